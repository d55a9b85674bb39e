"""A run in the store counts only whole, and as its manifest says."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.approval.builder import CELL, NEWER, RUN, publish_report
from tests.approval.stores import rewrite
from vllm_qualify.approval.layout import sha256
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.store import MissingObjectError, Store


def test_a_run_has_its_report_as_it_was_written(store: Store, run: PublishedRun) -> None:
    assert (run.cell, run.run_id, run.report.run_id) == (CELL, RUN, RUN)
    assert run.document == json.loads(store.get(run.report_object.key))
    assert sha256(store.get(run.report_object.key)) == run.report_object.sha256


def test_a_report_that_is_not_its_manifests_or_has_none_is_reported(store: Store, run: PublishedRun) -> None:
    rewrite(store, run.report_object.key, store.get(run.report_object.key).replace(b"0.32.0", b"0.33.0"))
    with pytest.raises(StoreError, match="the report is not what its manifest says"):
        read_run(store, CELL, RUN)
    Path(store.locate(run.manifest_object.key)).unlink()
    with pytest.raises(MissingObjectError):
        read_run(store, CELL, RUN)


def test_a_manifest_of_something_else_is_reported(store: Store, run: PublishedRun) -> None:
    whole: dict[str, Any] = json.loads(store.get(run.manifest_object.key))
    evidence = [named for named in whole["objects"] if named["key"].startswith("evidence/")]
    others = [named for named in whole["objects"] if named not in evidence]
    for changed, message in [
        ({}, "not a manifest: run_id: Field required"),
        (whole | {"objects": evidence}, "does not name the run's report"),
        (whole | {"objects": [*evidence[1:], *others]}, "evidence that its manifest does not name"),
        (whole | {"outcome": "not passed"}, "of another run than its manifest"),
        (whole | {"run_id": NEWER}, "does not name the run's report"),
    ]:
        rewrite(store, run.manifest_object.key, json.dumps(changed).encode())
        with pytest.raises(StoreError, match=message):
            read_run(store, CELL, RUN)


def test_a_run_in_anothers_place_is_reported(store: Store, run: PublishedRun, tmp_path: Path) -> None:
    publish_report(store, tmp_path / "runs", NEWER)
    rewrite(store, manifest_key(CELL, NEWER), store.get(manifest_key(CELL, RUN)))
    with pytest.raises(StoreError, match="it is of another run"):
        read_run(store, CELL, NEWER)
    assert sha256(store.get(manifest_key(CELL, NEWER))) == run.manifest_object.sha256
