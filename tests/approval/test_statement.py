"""The statement: in-toto's form, and that it follows from what is stored alone."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.approval.builder import ADA, BOB_REJECTS, CELL, NEWER, NOW, OLDER, RUN, VALID_DAYS, publish_report, waiver, with_gate
from tests.report.builder import image_report
from vllm_qualify.approval.decision import make_decision
from vllm_qualify.approval.layout import decision_key, sha256
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.approval.statement import read_statement, statement
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.plan.cell import Anchor, EarlierTry
from vllm_qualify.publish.store import Store
from vllm_qualify.report.model import Report


def stated(store: Store, run: PublishedRun) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(statement(run, make_decision(store, run, ADA, VALID_DAYS, NOW)))
    return document


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
    qualified = stated(store, run)["predicate"]["qualification"]
    report = run.report
    assert qualified["cell"]["id"] == CELL
    assert qualified["cell"]["release"]["model"] == report.plan.cell.release.model
    assert qualified["server"] == json.loads(report.plan.server.model_dump_json())
    assert qualified["fingerprint"]["driver"] == "570.86.15"
    assert qualified["tools"] == {
        "vllm-qualify": "0.1.0",
        "vllm": "0.32.0",
        "load client": "0.32.0",
        "lm-eval": "0.4.13",
        "vllm bench serve": report.stages[2].tools["vllm bench serve"],
    }
    gate = next(gate for gate in qualified["gates"] if gate["name"] == "ttft_p99_ms")
    assert (gate["verdict"], gate["bound"], gate["unit"], gate["waived"]) == ("pass", 400.0, "ms", False)
    assert gate["interval"]["lower"] < gate["value"] < gate["interval"]["upper"] < 400
    assert qualified["expires"] == "2026-06-12"
    assert (qualified["decision"]["by"], qualified["decision"]["reason"]) == ("Ada", ADA.reason)
    body = store.get(decision_key(CELL, RUN))
    assert qualified["decision"]["object"] == {"key": decision_key(CELL, RUN), "sha256": sha256(body), "size": len(body)}
    assert qualified["manifest"]["sha256"] == sha256(store.get(f"reports/{CELL}/{RUN}/manifest.json"))


def test_subjects_are_what_is_installed_and_the_hubs_commit(store: Store, tmp_path: Path) -> None:
    run = publish_report(store, tmp_path)
    release = run.report.plan.cell.release
    engine, model = stated(store, run)["subject"]
    assert engine["name"] == "vllm 0.32.0"
    assert f"sha256:{engine['digest']['sha256']}" == release.engine.digest
    assert "RECORD" in engine["annotations"]["digest"]
    assert model == {"name": release.model, "digest": {"gitCommit": release.revision}}


def test_subjects_are_the_images_digest_and_the_folders(store: Store, tmp_path: Path) -> None:
    under_test = image_report().plan

    def change(report: Report) -> Report:
        release = under_test.cell.release.model_copy(update={"model": "./models/llama", "revision": f"sha256:{'ab' * 32}"})
        server = under_test.server.model_copy(update={"model": "/models/llama", "revision": None, "parts": []})
        cell = report.plan.cell.model_copy(update={"release": release})
        return report.model_copy(update={"plan": report.plan.model_copy(update={"cell": cell, "server": server})})

    run = publish_report(store, tmp_path, change=change)
    engine, model = stated(store, run)["subject"]
    digest = under_test.cell.release.engine.digest.removeprefix("sha256:")
    assert engine == {"name": "registry.example:5000/vllm/vllm-openai", "digest": {"sha256": digest}}
    assert (model["name"], model["digest"]) == ("./models/llama", {"sha256": "ab" * 32})
    assert "its files" in model["annotations"]["digest"]


def test_what_is_waived_is_warned_of(store: Store, tmp_path: Path) -> None:
    run = publish_report(store, tmp_path, change=with_gate("fail", waiver(date(2026, 4, 1))))
    predicate = stated(store, run)["predicate"]
    assert (predicate["result"], predicate["warnedTests"], predicate["failedTests"]) == ("WARNED", ["ttft_p99_ms"], [])
    assert "ttft_p99_ms" not in predicate["passedTests"]
    assert [pairs["owner"] for pairs in predicate["qualification"]["waivers"]] == ["Grace"]
    assert [gate["name"] for gate in predicate["qualification"]["gates"] if gate["waived"]] == ["ttft_p99_ms"]


def test_the_same_is_stated_of_the_same_objects(store: Store, run: PublishedRun) -> None:
    stored = make_decision(store, run, ADA, VALID_DAYS, NOW)
    assert statement(run, stored) == statement(read_run(store, CELL, RUN), stored)


def test_a_report_of_before_an_option_is_stated_as_it_was_written(store: Store, run: PublishedRun) -> None:
    document = json.loads(json.dumps(run.document))
    del document["plan"]["server"]["draft_digest"]
    older = replace(run, document=document, report=Report.model_validate_json(json.dumps(document)))
    assert "draft_digest" in stated(store, run)["predicate"]["qualification"]["server"]
    assert "draft_digest" not in stated(store, older)["predicate"]["qualification"]["server"]


def test_nothing_is_stated_of_a_rejected_run(store: Store, run: PublishedRun) -> None:
    with pytest.raises(ValueError, match="rejected"):
        statement(run, make_decision(store, run, BOB_REJECTS, VALID_DAYS, NOW))


def test_nothing_is_stated_of_a_run_that_did_not_pass(store: Store, run: PublishedRun) -> None:
    stored = make_decision(store, run, ADA, VALID_DAYS, NOW)
    failed = with_gate("fail")(run.report)
    with pytest.raises(CallerError, match="ttft_p99_ms: fail"):
        statement(replace(run, report=failed), stored)


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
    payload = statement(run, make_decision(store, run, ADA, VALID_DAYS, NOW))
    assert read_statement(payload, "here").qualification.cell_id == CELL
    assert payload.count(old) == 1
    with pytest.raises(StoreError, match="here: not a statement of version 1"):
        read_statement(payload.replace(old, new), "here")


def test_it_says_how_often_the_release_was_tried_before(store: Store, tmp_path: Path) -> None:
    tries = [EarlierTry(run_id="20260313T080000Z-ffffff", verdict="inconclusive")]

    def tried(report: Report) -> Report:
        return report.model_copy(update={"plan": report.plan.model_copy(update={"tries": tries})})

    qualified = stated(store, publish_report(store, tmp_path, change=tried))["predicate"]["qualification"]
    assert qualified["tries"] == [{"run_id": "20260313T080000Z-ffffff", "verdict": "inconclusive"}]


def test_a_report_that_lacks_anchor_and_tries_is_stated_without_any(store: Store, run: PublishedRun) -> None:
    plan = {name: value for name, value in run.document["plan"].items() if name not in ("anchor", "tries")}
    qualified = stated(store, replace(run, document=run.document | {"plan": plan}))["predicate"]["qualification"]
    assert (qualified["anchor"], qualified["tries"]) == (None, [])


def test_it_names_the_anchor_and_why_it_is_that_one(store: Store, run: PublishedRun, tmp_path: Path) -> None:
    def held(report: Report) -> Report:
        anchor = Anchor(run_id=OLDER, cell=report.plan.cell, accuracy=[], chosen="the first approved")
        return report.model_copy(update={"plan": report.plan.model_copy(update={"anchor": anchor})})

    later = publish_report(store, tmp_path / "later", NEWER, held)
    message = stated(store, later)["predicate"]["qualification"]["anchor"]
    assert message == {"run_id": OLDER, "chosen": "the first approved"}
    assert stated(store, run)["predicate"]["qualification"]["anchor"] is None
