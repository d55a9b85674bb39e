"""The matrix of cells: each with its last approval and its state, read from the pointers."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from itertools import chain

from rich.table import Table
from rich.text import Text

from vllm_qualify.approval.layout import pointer_key
from vllm_qualify.approval.pointer import ApprovalState, Entry, Pointer, read_pointer, state_of
from vllm_qualify.errors import StoreBusyError
from vllm_qualify.limits import call_within
from vllm_qualify.publish.store import PLACE, Store
from vllm_qualify.recipe.values import Frozen

AT_ONCE = 16
LIMIT_S = 300.0


class CellState(Frozen):
    """One cell. `state` is the state of its last approval on the day of the request."""

    cell: str
    state: ApprovalState
    last: Entry


def matrix(store: Store, today: date) -> list[CellState]:
    """All cells with a pointer, sorted. Raises TamperedError, StoreError; StoreBusyError after LIMIT_S."""
    cells = _list_cells(store)
    # One limit for a share of them: a limit for each would cost a thread each, as long as some reads.
    shares = [sorted(cells)[number::AT_ONCE] for number in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        read = chain.from_iterable(pool.map(lambda share: _read_pointers(store, share, cells), shares))
        pointers = sorted(read, key=lambda pointer: pointer.cell)
    return [CellState(cell=each.cell, state=state_of(each.last, each, today), last=each.last) for each in pointers]


def _read_pointers(store: Store, share: Sequence[str], cells: Mapping[str, list[str]]) -> list[Pointer]:
    try:
        pointers = call_within(LIMIT_S, lambda: [read_pointer(store, cell, cells[cell]) for cell in share])
    except TimeoutError as error:
        raise StoreBusyError(f"{store.url}: its pointers were not read: {error}", "try again later", PLACE) from error
    return [pointer for pointer in pointers if pointer]


def _list_cells(store: Store) -> dict[str, list[str]]:
    """The keys of each cell that has a pointer. One listing has them all, and comes before the pointers are read."""
    cells: dict[str, list[str]] = {}
    for key in store.keys("approvals/"):
        cells.setdefault("/".join(key.split("/")[1:5]), []).append(key)
    return {cell: keys for cell, keys in cells.items() if pointer_key(cell) in keys}


def as_json(cells: list[CellState]) -> str:
    return json.dumps([cell.model_dump(mode="json") for cell in cells], indent=2)


def table(cells: list[CellState]) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("cell", "state", "until", "by", "run"):
        # Who reads a name copies it: it stays in one line.
        shown.add_column(column, overflow="fold", no_wrap=column in ("cell", "run"))
    for cell in cells:
        # A name is plain text, even if it looks like markup.
        shown.add_row(*map(Text, (cell.cell, cell.state, str(cell.last.expires), cell.last.by, cell.last.run_id)))
    return shown
