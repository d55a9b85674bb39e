"""The statement: in-toto's form, and that it follows from what is stored alone."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.approval.builder import (
    ADA,
    BOB_REJECTS,
    CELL,
    NEWER,
    OLDER,
    RUN,
    decided,
    of_plan,
    publish_report,
    waiver,
    with_gate,
)
from tests.builders.changed import changed
from tests.report.builder import image_report, passed_report
from vllm_qualify.approval.layout import decision_key, sha256
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.approval.statement import read_statement, statement
from vllm_qualify.engine.environment import digest_of
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.plan.cell import Anchor, EarlierTry
from vllm_qualify.publish.store import Store
from vllm_qualify.report.model import Report


def stated(store: Store, run: PublishedRun) -> dict[str, Any]:
    return dict(json.loads(statement(run, decided(store, run))))


def qualified(store: Store, run: PublishedRun) -> dict[str, Any]:
    return dict(stated(store, run)["predicate"]["qualification"])


def test_it_is_a_test_result_of_in_toto(store: Store, run: PublishedRun) -> None:
    document = stated(store, run)
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    predicate = document["predicate"]
    assert predicate["result"] == "PASSED"
    assert "ttft_p99_ms" in predicate["passedTests"]
    assert len(predicate["passedTests"]) == len(run.report.judgement.gates)
    assert predicate["warnedTests"] == predicate["failedTests"] == []
    config = next(file for file in run.report.files if file.path == "serve/server.yaml")
    assert predicate["configuration"] == [
        {"name": f"reports/{CELL}/{RUN}/report.json", "digest": {"sha256": run.report_object.sha256}},
        {"name": f"evidence/{config.sha256}/server.yaml", "digest": {"sha256": config.sha256}},
    ]


def test_it_says_all_that_a_deployment_needs_to_know(store: Store, run: PublishedRun) -> None:
    said, report = qualified(store, run), run.report
    assert said["cell"]["id"] == CELL
    assert said["cell"]["release"]["model"] == report.plan.cell.release.model
    assert said["server"] == json.loads(report.plan.server.model_dump_json())
    assert said["fingerprint"]["driver"] == "570.86.15"
    assert said["tools"] == {
        "vllm-qualify": "0.1.0",
        "vllm": "0.32.0",
        "load client": "0.32.0",
        "lm-eval": "0.4.13",
        "vllm bench serve": report.stages[2].tools["vllm bench serve"],
    }
    gate = next(gate for gate in said["gates"] if gate["name"] == "ttft_p99_ms")
    assert (gate["verdict"], gate["bound"], gate["unit"], gate["waived"]) == ("pass", 400.0, "ms", False)
    assert gate["interval"]["lower"] < gate["value"] < gate["interval"]["upper"] < 400
    assert said["expires"] == "2026-06-12"
    assert (said["decision"]["by"], said["decision"]["reason"]) == ("Ada", ADA.reason)
    body = store.get(decision_key(CELL, RUN))
    assert said["decision"]["object"] == {"key": decision_key(CELL, RUN), "sha256": sha256(body), "size": len(body)}
    assert said["manifest"]["sha256"] == sha256(store.get(f"reports/{CELL}/{RUN}/manifest.json"))


def test_subjects_are_what_is_installed_and_the_hubs_commit(store: Store, run: PublishedRun) -> None:
    release = run.report.plan.cell.release
    engine, model = stated(store, run)["subject"]
    assert engine["name"] == "vllm 0.32.0"
    assert f"sha256:{engine['digest']['sha256']}" == release.engine.digest
    assert "RECORD" in engine["annotations"]["digest"]
    assert model == {"name": release.model, "digest": {"gitCommit": release.revision}}


def test_subjects_are_the_images_digest_and_the_folders(store: Store, tmp_path: Path) -> None:
    under_test = image_report().plan

    files = {"config.json": "ab" * 32}
    release = changed(under_test.cell.release, model="./models/llama", revision=digest_of(files), files=files)
    server = changed(under_test.server, model="/models/llama", revision=None, parts=[])
    cell = changed(passed_report().plan.cell, release=release)
    engine, model, *_ = stated(store, publish_report(store, tmp_path, change=of_plan(cell=cell, server=server)))["subject"]
    digest = under_test.cell.release.engine.digest.removeprefix("sha256:")
    assert engine == {"name": "registry.example:5000/vllm/vllm-openai", "digest": {"sha256": digest}}
    assert (model["name"], model["digest"]) == ("./models/llama", {"sha256": digest_of(files).removeprefix("sha256:")})
    assert "its files" in model["annotations"]["digest"]


def test_what_is_waived_is_warned_of(store: Store, tmp_path: Path) -> None:
    run = publish_report(store, tmp_path, change=with_gate("fail", waiver(date(2026, 4, 1))))
    predicate = stated(store, run)["predicate"]
    assert (predicate["result"], predicate["warnedTests"], predicate["failedTests"]) == ("WARNED", ["ttft_p99_ms"], [])
    assert "ttft_p99_ms" not in predicate["passedTests"]
    assert [pairs["owner"] for pairs in predicate["qualification"]["waivers"]] == ["Grace"]
    assert [gate["name"] for gate in predicate["qualification"]["gates"] if gate["waived"]] == ["ttft_p99_ms"]


def test_the_same_is_stated_of_the_same_objects(store: Store, run: PublishedRun) -> None:
    stored = decided(store, run)
    assert statement(run, stored) == statement(read_run(store, CELL, RUN), stored)


def test_a_report_of_before_an_option_is_stated_as_it_was_written(store: Store, run: PublishedRun) -> None:
    document = json.loads(json.dumps(run.document))
    del document["plan"]["server"]["draft_digest"]
    older = replace(run, document=document, report=Report.model_validate_json(json.dumps(document)))
    assert "draft_digest" in qualified(store, run)["server"]
    assert "draft_digest" not in qualified(store, older)["server"]


def test_nothing_is_stated_of_a_rejected_run(store: Store, run: PublishedRun) -> None:
    with pytest.raises(ValueError, match="rejected"):
        statement(run, decided(store, run, BOB_REJECTS))


def test_nothing_is_stated_of_a_run_that_did_not_pass(store: Store, run: PublishedRun) -> None:
    with pytest.raises(CallerError, match="ttft_p99_ms: fail"):
        statement(replace(run, report=with_gate("fail")(run.report)), decided(store, run))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"in-toto.io/Statement/v1", b"in-toto.io/Statement/v2"),
        (b"attestation/test-result/v0.1", b"attestation/vsa/v0.1"),
        (b'"version":1', b'"version":2'),
        (b'"result":"PASSED"', b'"result":"FAILED"'),
    ],
)
def test_a_statement_of_another_form_is_not_read(store: Store, run: PublishedRun, old: bytes, new: bytes) -> None:
    payload = statement(run, decided(store, run))
    assert read_statement(payload, "here").cell_id == CELL
    assert payload.count(old) == 1
    with pytest.raises(StoreError, match="here: not a statement of version 1"):
        read_statement(payload.replace(old, new), "here")


def test_it_says_how_often_the_release_was_tried_before(store: Store, tmp_path: Path) -> None:
    tries = [EarlierTry(run_id=OLDER, verdict="inconclusive")]
    run = publish_report(store, tmp_path, change=of_plan(tries=tries))
    assert qualified(store, run)["tries"] == [{"run_id": OLDER, "verdict": "inconclusive"}]


def test_a_report_that_lacks_anchor_and_tries_is_stated_without_any(store: Store, run: PublishedRun) -> None:
    plan = {name: value for name, value in run.document["plan"].items() if name not in ("anchor", "tries")}
    said = qualified(store, replace(run, document=run.document | {"plan": plan}))
    assert (said["anchor"], said["tries"]) == (None, [])


def test_it_names_the_anchor_and_why_it_is_that_one(store: Store, run: PublishedRun, tmp_path: Path) -> None:
    anchor = Anchor(run_id=OLDER, cell=run.report.plan.cell, accuracy=[], chosen="the first approved")
    later = publish_report(store, tmp_path / "later", NEWER, of_plan(anchor=anchor))
    assert qualified(store, later)["anchor"] == {"run_id": OLDER, "chosen": "the first approved"}
    assert qualified(store, run)["anchor"] is None
