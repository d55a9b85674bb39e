"""Rows that wait for the index of all cells: they save time, and nothing depends on them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.approval.builder import CELL, publish_report
from vllm_qualify.approval.index import index_problem, read_index, refresh
from vllm_qualify.approval.layout import INDEX_KEY, JSON, waiting_key
from vllm_qualify.approval.lines import Lines, lines_of, lines_with
from vllm_qualify.approval.row import Brief, Row, brief
from vllm_qualify.approval.waiting import LONGEST_REVISIONS, PLACES, TRIES, wait_for_index, waiting_rows
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.store import Stored, changed

OTHER = "other/bf16/h100/chat"


def row_of(cell: str, revision: int = 1) -> Brief:
    return brief(Row(cell=cell, revision=revision))


def index_of(*rows: Brief, revision: int = 7) -> Lines:
    return lines_with(rows, revision)


class Losing(DirectoryStore):
    """Loses the first race for the index: somebody else writes it first. `lost` is called then."""

    def __init__(self, root: Path, lost: Callable[[], object] = lambda: None) -> None:
        super().__init__(root)
        self.lost: Callable[[], object] | None = lost
        self.swaps = 0

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        self.swaps += key == INDEX_KEY
        if key == INDEX_KEY and self.lost:
            lost, self.lost = self.lost, None
            lost()
            raise changed(self.locate(key))
        super().swap(key, body, content_type, tag)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    publish_report(DirectoryStore(tmp_path / "store"), tmp_path / "runs")
    return tmp_path / "store"


def change(store: DirectoryStore) -> None:
    """A run is announced, and never comes: the cell's index changes."""
    row = refresh(store, CELL)
    fresh = row.model_copy(update={"coming": ["20260401T000000Z-abcdef"], "revision": row.revision + 1})
    key = f"cells/{CELL}/index.json"
    store.swap(key, fresh.model_dump_json(exclude_none=True).encode(), JSON, store.read(key).tag)


def test_who_loses_the_race_for_the_index_leaves_its_row_and_takes_in_those_of_others(root: Path) -> None:
    there = DirectoryStore(root)
    change(there)
    wait_for_index(there, row_of(OTHER, 5), lines_of(read_index(there)))
    losing = Losing(root)
    assert index_problem(losing, CELL) is None
    assert losing.swaps == 2
    assert {row.cell: row.revision for row in read_index(there).cells} == {CELL: refresh(there, CELL).revision, OTHER: 5}
    assert OTHER.encode() in there.get("index.html")
    assert CELL in [row.cell for row in waiting_rows(there, Lines(read_index(there).revision))]


def test_a_row_that_another_wrote_is_not_written_again(root: Path) -> None:
    there = DirectoryStore(root)
    change(there)
    losing = Losing(root, lambda: index_problem(DirectoryStore(root), CELL))
    before = read_index(there).revision
    assert index_problem(losing, CELL) is None
    assert (losing.swaps, read_index(there).revision) == (1, before + 1)


def test_only_rows_that_are_newer_than_the_index_are_taken_in(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for row in (row_of("a/b/c/d", 3), row_of(OTHER, 4)):
        wait_for_index(store, row, index_of())
    assert sorted(row.cell for row in waiting_rows(store, index_of())) == ["a/b/c/d", OTHER]
    assert [row.cell for row in waiting_rows(store, index_of(row_of("a/b/c/d", 3), row_of(OTHER, 3)))] == [OTHER]
    assert list(waiting_rows(store, index_of(row_of("a/b/c/d", 9), row_of(OTHER, 9)))) == []


@pytest.mark.parametrize("revision", [6, 7 + LONGEST_REVISIONS + 1], ids=["another index", "long ago"])
def test_a_row_that_was_forgotten_is_not_taken_in(tmp_path: Path, revision: int) -> None:
    """Else the old row of a cell that was made anew would come back."""
    store = DirectoryStore(tmp_path)
    wait_for_index(store, row_of(OTHER, 5), index_of())
    assert list(waiting_rows(store, index_of(revision=revision))) == []
    assert [row.cell for row in waiting_rows(store, index_of(revision=7 + LONGEST_REVISIONS))] == [OTHER]


def test_rows_that_wait_do_not_add_up(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for number in range(40):
        wait_for_index(store, row_of(OTHER, number + 1), index_of())
        wait_for_index(
            store, row_of(f"cell-{number}/b/c/d"), index_of(*(row_of(f"cell-{each}/b/c/d") for each in range(number)))
        )
    rows = [row for place in range(PLACES) for row in json.loads(store.get(waiting_key(place)))["rows"]]
    assert len(rows) <= 2 * PLACES


@pytest.mark.parametrize("body", [b"", b"[]", b'{"rows": [{"since": 7, "row": {"cell": 7}}]}', b"\xff" * 99])
def test_what_is_no_list_of_rows_is_passed_over_and_replaced(root: Path, body: bytes) -> None:
    store = DirectoryStore(root)
    change(store)
    for place in range(PLACES):
        store.swap(waiting_key(place), body, JSON, None)
    assert index_problem(Losing(root), CELL) is None
    assert [row.cell for row in read_index(store).cells] == [CELL]
    assert [row.cell for row in waiting_rows(store, Lines(read_index(store).revision))] == [CELL]


@pytest.mark.parametrize("tries", [1, TRIES])
def test_a_row_takes_another_place_when_one_is_taken_and_gives_up_in_the_end(tmp_path: Path, tries: int) -> None:
    class Contended(DirectoryStore):
        keys_tried: list[str] = []

        def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
            self.keys_tried.append(key)
            if len(self.keys_tried) <= tries:
                raise changed(key)
            super().swap(key, body, content_type, tag)

    store = Contended(tmp_path)
    wait_for_index(store, row_of(OTHER), index_of())
    assert len(set(store.keys_tried)) == len(store.keys_tried) == min(tries + 1, TRIES)
    assert len(list(waiting_rows(store, index_of()))) == (tries < TRIES)


def test_where_rows_cannot_wait_the_index_is_written_all_the_same(root: Path) -> None:
    class Forbidden(Losing):
        def read(self, key: str) -> Stored:
            if key.startswith("cells/_waiting/"):
                raise StoreError("this is not allowed", "ask for the right", key)
            return super().read(key)

    change(DirectoryStore(root))
    assert index_problem(Forbidden(root), CELL) is None
    assert read_index(DirectoryStore(root)).cells[0].revision == refresh(DirectoryStore(root), CELL).revision
