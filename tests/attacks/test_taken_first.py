"""Who may publish, and takes another run's id, its keys or a release before the honest one comes."""

import json
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.builders.captured_runs import judged, run, store
from tests.publish.policies import document, resources
from vllm_qualify.approval.layout import JSON
from vllm_qualify.approval.published import read_run
from vllm_qualify.errors import AlreadyExistsError, StoreError
from vllm_qualify.publish.bundle import evidence_key
from vllm_qualify.publish.layout import Place, manifest_key, run_key
from vllm_qualify.publish.store import Store
from vllm_qualify.releases.known import Claim, claim, note_new, record_emission, release_key, taken_untold
from vllm_qualify.releases.source import Available, ImageSource
from vllm_qualify.report.model import Report, load_report
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.judging import rejudge
from vllm_qualify.runs.publishing import publish_run

__all__ = ["judged", "run", "store"]

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
SOURCE = ImageSource(name="vllm/vllm-openai", recipe="llama")
OTHER = "reference/bf16/cpu/other"


@pytest.fixture
def report(run: Run) -> Report:
    return load_report(run.folder)


# --- a run's id


@pytest.mark.parametrize("taken", ["its place", "its manifest", "its report"])
def test_a_run_whose_keys_are_taken_is_published_under_a_new_id(run: Run, report: Report, store: Store, taken: str) -> None:
    """Its id is known as soon as it begins: a flow notes it in the store. A new judgement draws its own at the end."""
    keys = {
        "its place": run_key(run.id),
        "its manifest": manifest_key(report.plan.cell.id, run.id),
        "its report": f"{report.prefix}/report.json",
    }
    store.put_new(keys[taken], Place(run_id=run.id, cell=OTHER).model_dump_json().encode(), JSON)
    with pytest.raises(AlreadyExistsError, match="other content stands under this run's id") as refused:
        publish_run(report, run, store)
    assert f"vllm-qualify rejudge {run.id}" in refused.value.remedy
    again, fresh = rejudge(run, run.plan)
    publish_run(again, fresh, store)
    assert read_run(store, report.plan.cell.id, fresh.id).report.outcome == report.outcome


def test_a_file_that_stands_where_evidence_belongs_is_named(run: Run, report: Report, store: Store) -> None:
    """Its key is the hash of its content: whoever can guess that, as of an empty file, can put another file there."""
    key = evidence_key(report.files[0])
    store.put_new(key, b"not what its key says", "text/plain")
    with pytest.raises(AlreadyExistsError, match="this object holds another file than its key says") as refused:
        publish_run(report, run, store)
    assert store.locate(key) in str(refused.value)
    assert "delete it" in refused.value.remedy


# --- a release


def test_a_gpu_host_may_not_take_a_release() -> None:
    key = "arn:aws:s3:::bucket/releases/claims/" + "0" * 64 + ".json"
    may = {
        role: any(
            fnmatchcase(key, pattern)
            for statement in document(role)
            if "s3:PutObject" in statement["actions"]
            for pattern in resources(statement)
        )
        for role in ("reader", "publisher", "approver", "pruner", "watcher")
    }
    assert may == {"reader": False, "publisher": False, "approver": False, "pruner": False, "watcher": True}


def test_a_release_that_was_taken_before_it_was_told_is_found(store: Store) -> None:
    """Its key follows from what everybody knows. It would never be told, and nobody would handle it."""
    note_new(store, SOURCE, [], NOW)
    taken, told = (Available(identity=f"sha256:{number:064x}", tags=[f"v0.{number}.0"]) for number in (1, 2))
    key = release_key(SOURCE, taken.identity)
    assert claim(store, key, "nobody", NOW)
    assert [each.identity for each in note_new(store, SOURCE, [told, taken], NOW)] == [told.identity]
    record_emission(store, SOURCE, release_key(SOURCE, told.identity), NOW)
    assert claim(store, release_key(SOURCE, told.identity), "a flow run", NOW)
    ((sighting, held),) = taken_untold(store, SOURCE)
    assert (sighting.tags, held) == (taken.tags, Claim(by="nobody", at=NOW))
    # Its owner deletes the claim, and the release is told.
    Path(store.locate(f"releases/claims/{key}.json")).unlink()
    assert [each.key for each in note_new(store, SOURCE, [told, taken], NOW)] == [key]
    assert not list(taken_untold(store, SOURCE))


def test_a_claim_that_is_none_is_one_clear_error(store: Store) -> None:
    key = release_key(SOURCE, "sha256:" + "1" * 64)
    store.put_new(f"releases/claims/{key}.json", json.dumps({"by": ["x"], "at": 10**30}).encode(), JSON)
    with pytest.raises(StoreError, match="this is not as it was written"):
        claim(store, key, "a flow run", NOW)
