"""Whoever may write the indexes lies in them: nothing is approved, found or compared with because of that."""

import json
from pathlib import Path

import pytest

from tests.approval.builder import CELL, NEWER, OLDER, RUN, approved, made_key, of_variant, publish_report, row_of, with_gate
from tests.builders.told_by_hosts import change_of
from vllm_qualify.approval.index import make_again
from vllm_qualify.approval.layout import JSON, cell_index_key
from vllm_qualify.approval.published import read_run
from vllm_qualify.approver.decisions import Desk
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.publish.layout import run_key
from vllm_qualify.publish.order import Numbered
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.runs.baseline import newest_baseline
from vllm_qualify.runs.stored import published_run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A baseline, a run that did not pass, and one that passed and is no baseline."""
    store = open_store((tmp_path / "store").as_uri())
    publish_report(store, tmp_path / "runs", OLDER, change_of("plan", establishes=True))
    publish_report(store, tmp_path / "runs", RUN, with_gate("fail"))
    publish_report(store, tmp_path / "runs", NEWER)
    return store


def lie(store: Store, **message: object) -> None:
    key = cell_index_key(CELL)
    row = row_of(store).model_copy(update=message)
    store.swap(key, row.model_dump_json(exclude_none=True).encode(), JSON, store.read(key).tag)


def test_what_is_said_to_have_passed_is_not_approved(store: Store, tmp_path: Path) -> None:
    (line,) = (line for line in row_of(store).reports if line.run_id == RUN)
    lie(store, reports=[line.model_copy(update={"outcome": "passed", "standing": "waiting for a decision"})])
    key = made_key(tmp_path / "key.pem")
    with pytest.raises(CallerError, match="cannot be approved"):
        approved(store, read_run(store, CELL, RUN), key)
    assert "a person decides" in Desk(store, key, {}).approve_automatically(CELL, RUN)
    assert not list(store.keys("approvals/"))


@pytest.mark.parametrize("run_id", [RUN, NEWER, "20260401T080000Z-abcdef", "../../../x"])
def test_what_is_said_to_be_a_baseline_is_none(store: Store, run_id: str) -> None:
    try:
        lie(store, baseline=Numbered(run_id=run_id, sequence=99))
        newest = newest_baseline(store, CELL)
    except StoreError:
        return
    assert newest is not None
    assert newest.run_id == OLDER


def test_an_index_that_was_falsified_can_be_made_again(store: Store) -> None:
    before = row_of(store)
    lie(store, reports=[], baseline=Numbered(run_id=NEWER, sequence=99))
    assert make_again(store, CELL).model_copy(update={"revision": before.revision}) == before


@pytest.mark.parametrize(
    "document",
    [
        {"run_id": RUN, "cell": "a/b/c/d"},
        {"run_id": NEWER, "cell": CELL},
        {"run_id": RUN, "cell": "../../../../etc"},
        {"run_id": RUN, "cell": f"{CELL}/{NEWER}/.."},
        {"run_id": RUN},
        {"run_id": RUN, "cell": CELL, "more": 1},
        [],
        None,
    ],
)
def test_a_run_is_not_found_where_it_is_not(store: Store, document: object) -> None:
    path = Path(store.locate(run_key(RUN)))
    path.unlink()
    path.write_text(json.dumps(document))
    with pytest.raises(StoreError):
        published_run(store, RUN)


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "../layout", "x" * 300, "a b", "a\nb"])
def test_no_name_of_a_run_leads_to_another_object(store: Store, run_id: str) -> None:
    with pytest.raises(StoreError, match="no whole run"):
        published_run(store, run_id)


def test_the_place_of_a_run_leads_to_no_run_of_another_cell(store: Store, tmp_path: Path) -> None:
    """Nobody approves another cell's report by this id without its own manifest saying so."""
    other = publish_report(store, tmp_path / "other", "20260401T080000Z-abcdef", of_variant("bf16"))
    path = Path(store.locate(run_key(NEWER)))
    path.unlink()
    path.write_text(json.dumps({"run_id": NEWER, "cell": other.cell}))
    with pytest.raises(StoreError, match="no whole run"):
        published_run(store, NEWER)
