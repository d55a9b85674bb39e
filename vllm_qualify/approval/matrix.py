"""The matrix of cells: each with its last approval and its state, read from the pointers."""

import json
from datetime import date

from rich.table import Table
from rich.text import Text

from vllm_qualify.approval.pointer import ApprovalState, Entry, read_pointer, state_of
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.values import Frozen

POINTER = "/pointer.json"


class CellState(Frozen):
    """One cell. `state` is the state of its last approval on the day of the request."""

    cell: str
    state: ApprovalState
    last: Entry


def matrix(store: Store, today: date) -> list[CellState]:
    """All cells with a pointer, sorted. Raises TamperedError, StoreError."""
    cells = [key.removeprefix("approvals/").removesuffix(POINTER) for key in store.keys("approvals/") if key.endswith(POINTER)]
    pointers = [pointer for cell in cells if (pointer := read_pointer(store, cell))]
    return [
        CellState(cell=pointer.cell, state=state_of(pointer.last, pointer, today), last=pointer.last) for pointer in pointers
    ]


def as_json(cells: list[CellState]) -> str:
    return json.dumps([cell.model_dump(mode="json") for cell in cells], indent=2)


def table(cells: list[CellState]) -> Table:
    found = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("cell", "state", "until", "by", "run"):
        found.add_column(column, overflow="fold")
    for cell in cells:
        told = (cell.cell, cell.state, str(cell.last.expires), cell.last.by, cell.last.run_id)
        # A name is plain text, even if it looks like markup.
        found.add_row(*map(Text, told))
    return found
