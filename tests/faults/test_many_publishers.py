"""Many publishers at once: in whatever order they call the store, each draws a page twice at most, and the newest is shown."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.turns import Call, Choice, Turns
from tests.publish.conftest import directory_url, no_outer_settings, radosgw_url, real_store
from vllm_qualify.approval.board import render_board
from vllm_qualify.approval.cell_page import page_revision, render_cell_page
from vllm_qualify.approval.index import announce, index_problem, read_index, refresh
from vllm_qualify.approval.layout import BOARD_KEY, cell_page_key
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store

__all__ = ["directory_url", "no_outer_settings", "radosgw_url", "real_store"]

PUBLISHERS = 8
ONE_CELL = ["model/bf16/h100/chat"] * PUBLISHERS
CELL_EACH = [f"model-{number}/bf16/h100/chat" for number in range(PUBLISHERS)]


def run_id(number: int) -> str:
    return f"20260314T0926{number:02}Z-abcdef"


def publish(cells: Sequence[str], number: int, store: Store) -> None:
    """What a publication writes to indexes and pages. Its run is announced, and never comes: the cell's index has it then."""
    cell = cells[number]
    announce(store, cell, run_id(number))
    revision = refresh(store, cell).revision
    assert index_problem(store, cell) is None
    # Whoever is killed: what was published is shown.
    assert page_revision(store, cell) >= revision
    assert revision_of_row(store, cell) >= revision


def revision_of_row(store: Store, cell: str) -> int:
    """What the board says."""
    match = re.search(rf'data-cell="{cell}" data-revision="([0-9]+)"', store.get(BOARD_KEY).decode())
    return int(match[1]) if match else 0


def take_turns(store: Store, cells: Sequence[str], choose: Choice, kills: Mapping[int, int] | None = None) -> Turns:
    turns = Turns(choose, kills)
    turns.run([open_store(store.url) for _ in cells], lambda number, view: publish(cells, number, view))
    return turns


def most_draws(turns: Turns) -> int:
    pages = [count for (_, key), count in turns.tried.items() if key.endswith(".html")]
    return max(pages, default=0)


def is_newest(store: Store, cells: Sequence[str]) -> bool:
    """The board and each cell's page are those of the newest index."""
    pages = {cell: store.get(cell_page_key(cell)).decode() for cell in cells}
    are_newest = all(page == render_cell_page(refresh(store, cell)) for cell, page in pages.items())
    return are_newest and store.get(BOARD_KEY).decode() == render_board(read_index(store))


def oldest_first(key: str) -> Choice:
    """All draw the page of this key at once. The oldest is written first, then all others try and lose, and so on."""

    def choose(turns: Turns, calls: Sequence[Call]) -> Call:
        others = [call for call in calls if (call.name, call.key) != ("swap", key)]
        late = [call for call in calls if call not in others and call.seen != turns.swaps[key]]
        return [*others, *late, *sorted(calls, key=lambda call: revision_in(call.body))][0]

    return choose


def revision_in(page: bytes) -> int:
    match = re.search(rb'data-revision="([0-9]+)"', page)
    return int(match[1]) if match else 0


@pytest.mark.parametrize(
    ("cells", "key"), [(CELL_EACH, BOARD_KEY), (ONE_CELL, cell_page_key(ONE_CELL[0]))], ids=["the board", "a cell's page"]
)
def test_who_loses_to_older_pages_draws_twice_at_most(real_store: Store, cells: list[str], key: str) -> None:
    turns = take_turns(real_store, cells, oldest_first(key))
    assert most_draws(turns) == 2
    assert is_newest(real_store, cells)


SCHEDULE = st.lists(st.integers(0, 5), max_size=150)
KILLS = st.dictionaries(st.integers(0, 3), st.integers(1, 25), max_size=2)


def in_this_order(schedule: Sequence[int]) -> Choice:
    """Who is next by the schedule; after it, one after the other to its end."""
    left = iter(schedule)
    return lambda _, calls: calls[next(left, 0) % len(calls)]


@pytest.mark.thorough
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(shared=st.integers(1, 4), schedule=SCHEDULE, kills=KILLS)
def test_in_any_order_the_newest_index_is_shown_and_nobody_draws_thrice(
    shared: int, schedule: list[int], kills: dict[int, int]
) -> None:
    cells = [CELL_EACH[number % shared] for number in range(4)]
    with TemporaryDirectory() as folder:
        store = open_store(Path(folder).as_uri())
        turns = take_turns(store, cells, in_this_order(schedule), kills)
        assert most_draws(turns) <= 2
        if kills:
            # What a killed publisher left is mended by whoever publishes or decides next.
            for cell in cells:
                assert index_problem(store, cell) is None
        assert is_newest(store, cells)
