"""Bring a store of an earlier version to today's layout: a key for each run, an index for each cell and one above them.

Reports, evidence and approvals stay as they are. Every step can be repeated, so an upgrade that was stopped is called again.
"""

from concurrent.futures import ThreadPoolExecutor

from vllm_qualify.approval.index import is_whole, make_again, write_index
from vllm_qualify.approval.layout import is_cell
from vllm_qualify.engine.process import Tell
from vllm_qualify.errors import AlreadyExistsError
from vllm_qualify.publish.layout import put_place, run_key, write_layout
from vllm_qualify.publish.store import Store

AT_ONCE = 16


def upgrade(store: Store, tell: Tell) -> None:
    """Add what the store lacks, and last the mark that it lacks nothing. `tell` gets a line for each step.

    Raises:
        TamperedError: a cell's pointer is not as it was written.
        StoreError: a manifest or an index is not valid.
    """
    cells = _cells(store)
    tell(f"{sum(map(len, cells.values()))} reports of {len(cells)} cells")
    places = set(store.keys("runs/"))
    lacking = [(cell, run_id) for cell, run_ids in cells.items() for run_id in run_ids if run_key(run_id) not in places]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for problem in filter(None, pool.map(lambda named: _place(store, *named), lacking)):
            tell(problem)
        made = sum(pool.map(lambda named: _make(store, *named), cells.items()))
    tell(f"{len(lacking)} keys of runs were added, and {made} indexes of cells were made")
    write_index(store)
    write_layout(store)


def _cells(store: Store) -> dict[str, list[str]]:
    """The runs of each cell that has reports or approvals, the newest first."""
    keys = [key.rsplit("/", 2) for key in store.keys("reports/") if key.endswith("/manifest.json")]
    runs: dict[str, list[str]] = {}
    for folder, run_id, _ in reversed(keys):
        runs.setdefault(folder.removeprefix("reports/"), []).append(run_id)
    for key in store.keys("approvals/"):
        if key.endswith("/pointer.json"):
            runs.setdefault(key.removeprefix("approvals/").removesuffix("/pointer.json"), [])
    return {cell: run_ids for cell, run_ids in runs.items() if is_cell(cell)}


def _place(store: Store, cell: str, run_id: str) -> str:
    """Write where a run is. Returns what is wrong with it, or an empty text."""
    try:
        put_place(store, run_id, cell)
    except AlreadyExistsError:
        return f"run {run_id} is in several cells: its id leads to another cell than {cell}"
    return ""


def _make(store: Store, cell: str, run_ids: list[str]) -> bool:
    """Make the index of a cell, unless it has these runs already. Returns whether it was made."""
    if is_whole(store, cell, run_ids):
        return False
    make_again(store, cell)
    return True
