"""Stores of earlier versions: what refuses them, and what an upgrade makes of them, also one that was stopped."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.approval.builder import CELL, NEWER, NOW, OLDER, RUN, TODAY, approved, made_key, of_variant, publish_report
from tests.approval.test_actions import KilledError, Mortal
from vllm_qualify.approval.index import read_index
from vllm_qualify.approval.layout import INDEX_KEY
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.approval.upgrade import upgrade
from vllm_qualify.approval.verify import verify
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.layout import prepare
from vllm_qualify.publish.store import Store
from vllm_qualify.report.model import Report
from vllm_qualify.runs.baseline import newest_baseline
from vllm_qualify.runs.stored import published_run

OTHER = CELL.replace("fp8", "bf16")
REFUSED = "the layout of an earlier version\n  remedy: run once: vllm-qualify store upgrade --store file:"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, PrivateKey]:
    """A store as today's version leaves it, and the same as an earlier version did."""
    folder = tmp_path_factory.mktemp("pair")
    store, key = DirectoryStore(folder / "today"), made_key(folder / "key.pem")
    publish_report(store, folder / "runs", OLDER, establishing)
    approved(store, publish_report(store, folder / "runs", RUN), key)
    publish_report(store, folder / "runs", NEWER, of_variant("bf16"))
    shutil.copytree(folder / "today", folder / "then")
    for name in ("runs", "cells"):
        shutil.rmtree(folder / "then" / name)
    for name in ("layout.json", INDEX_KEY):
        (folder / "then" / name).unlink()
    (folder / "then" / INDEX_KEY).write_text(json.dumps({"revision": 7, "index_version": 3, "cells": []}, indent=2))
    return folder / "today", folder / "then", key


def establishing(report: Report) -> Report:
    return report.model_copy(update={"plan": report.plan.model_copy(update={"establishes": True})})


@pytest.fixture
def then(pair: tuple[Path, Path, PrivateKey], tmp_path: Path) -> Store:
    shutil.copytree(pair[1], tmp_path / "store")
    return DirectoryStore(tmp_path / "store")


def objects(store: Store) -> dict[str, object]:
    """All that the indexes say, but for their revisions."""
    return {key: without_revisions(json.loads(store.get(key))) for key in store.keys("") if is_index(key)}


def is_index(key: str) -> bool:
    return key.endswith("index.json") or key.startswith("runs/") or key == "layout.json"


def without_revisions(document: object) -> object:
    if isinstance(document, dict):
        return {name: without_revisions(value) for name, value in document.items() if name != "revision"}
    return [without_revisions(value) for value in document] if isinstance(document, list) else document


def test_an_earlier_store_is_refused_in_one_line(then: Store, tmp_path: Path) -> None:
    before = {key: then.get(key) for key in then.keys("") if not key.startswith("evidence/")}
    find, compare = partial(published_run, run_id=RUN), partial(newest_baseline, cell=CELL)
    uses: tuple[Callable[[Store], object], ...] = (find, compare, prepare, read_index)
    for use in uses:
        with pytest.raises(StoreError, match=REFUSED):
            use(then)
    with pytest.raises(StoreError, match=REFUSED):
        publish_report(then, tmp_path / "runs", "20260401T080000Z-abcdef")
    assert {key: then.get(key) for key in before} == before
    assert not list(then.keys("runs/"))
    assert not [key for key in then.keys("reports/") if key.endswith("abcdef/manifest.json")]


def test_an_upgrade_makes_what_today_would_be_there(pair: tuple[Path, Path, PrivateKey], then: Store, tmp_path: Path) -> None:
    said: list[str] = []
    before = {key: then.get(key) for key in then.keys("") if key != INDEX_KEY and key != "index.html"}
    upgrade(then, said.append)
    assert said == ["3 reports of 2 cells", "3 keys of runs were added, and 2 indexes of cells were made"]
    assert objects(then) == objects(DirectoryStore(pair[0]))
    assert {key: then.get(key) for key in before} == before
    assert verify(then, CELL, [pair[2].public_key], NOW).run_id == RUN
    baseline = newest_baseline(then, CELL)
    assert baseline is not None
    assert (baseline.run_id, published_run(then, NEWER).cell) == (OLDER, OTHER)
    publish_report(then, tmp_path / "runs", "20260401T080000Z-abcdef")


def test_a_second_upgrade_changes_nothing(then: Store) -> None:
    upgrade(then, lambda _: None)
    before = {key: then.read(key) for key in then.keys("")}
    said: list[str] = []
    upgrade(then, said.append)
    assert said[-1] == "0 keys of runs were added, and 0 indexes of cells were made"
    assert {key: then.read(key) for key in then.keys("")} == before


def test_an_upgrade_that_was_stopped_goes_on(
    pair: tuple[Path, Path, PrivateKey], then: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_qualify.approval.upgrade.AT_ONCE", 1)
    whole = Mortal(then, 0, after=False)
    upgrade(whole, lambda _: None)
    assert whole.written[-1] == "layout.json"
    for number in range(1, len(whole.written) + 1):
        store = DirectoryStore(Path(shutil.copytree(pair[1], tmp_path / str(number))))
        with pytest.raises(KilledError):
            upgrade(Mortal(store, number, after=number % 2 == 0), lambda _: None)
        upgrade(store, lambda _: None)
        assert objects(store) == objects(then)


def test_a_run_in_two_cells_is_reported_and_found_in_one(then: Store, tmp_path: Path) -> None:
    other = DirectoryStore(tmp_path / "other")
    publish_report(other, tmp_path / "runs", RUN, of_variant("bf16"))
    shutil.copytree(tmp_path / "other" / "reports" / OTHER / RUN, tmp_path / "store" / "reports" / OTHER / RUN)
    said: list[str] = []
    upgrade(then, said.append)
    assert any(line.startswith(f"run {RUN} is in several cells") for line in said)
    assert published_run(then, RUN).cell in (CELL, OTHER)


def test_what_an_earlier_publisher_wrote_later_is_taken_in(then: Store, tmp_path: Path) -> None:
    upgrade(then, lambda _: None)
    late, other = "20260501T080000Z-abcdef", DirectoryStore(tmp_path / "other")
    publish_report(other, tmp_path / "runs", late)
    shutil.copytree(tmp_path / "other" / "reports" / CELL / late, tmp_path / "store" / "reports" / CELL / late)
    with pytest.raises(StoreError, match="no whole run"):
        published_run(then, late)
    upgrade(then, lambda _: None)
    assert published_run(then, late).run_id == late
    assert NOW.date() == TODAY
