"""The anchor of a cell: which run it is, how a release is held against it, and how a cell gets another one."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.approval.builder import made_key
from tests.chained import ANCHOR, BASELINE, CELL, FEW, OWN, WIDE, Cell, document, run_id, verdicts, without
from vllm_qualify.approval.actions import revoke
from vllm_qualify.approval.pointer import revocation
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.judge.stopping import accuracy_decided
from vllm_qualify.plan.request import Against
from vllm_qualify.publish.bundle import evidence_key
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.kept import is_the_same
from vllm_qualify.report.changes import changes_of
from vllm_qualify.report.rerun import rerun
from vllm_qualify.report.words import anchor_sentence, baseline_sentence
from vllm_qualify.runs.baseline import copy_baseline
from vllm_qualify.runs.prune import Policy, prune_store


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    store = DirectoryStore(tmp_path / "store")
    store.check()
    return Cell(store, made_key(tmp_path / "key.pem"), tmp_path, document(tmp_path / "weights", *WIDE, **FEW))


def anchor_of(cell: Cell, **against: Any) -> tuple[str, str]:
    anchor = cell.plan(20, **against).held_against
    return anchor.run_id, anchor.chosen


# --- which run it is


def test_before_a_baseline_is_approved_there_is_none(cell: Cell) -> None:
    first = cell.published(1, 0, establish="always")
    messages: list[str] = []
    report, _ = cell.judged(cell.plan(2, messages=messages), 0)
    assert report.plan.anchor is None
    assert any("has no anchor yet" in line for line in messages)
    assert verdicts(report) == {OWN: "pass", BASELINE: "pass"}
    assert [gate.label for gate in report.judgement.not_judged] == [ANCHOR]
    assert anchor_sentence(report.plan) == f"none: no baseline of the cell is approved yet; not judged: {ANCHOR}"
    cell.approve(first)
    assert anchor_of(cell) == (first.run_id, "the first approved")


def test_it_stays_the_first_approved_one_whatever_is_approved_later(cell: Cell) -> None:
    first = cell.baseline(1, 0)
    cell.approve(cell.published(2, 0))
    newest = cell.baseline(3, 1)
    plan = cell.plan(4)
    assert plan.compared_with.run_id == newest.run_id
    assert anchor_of(cell) == (first.run_id, "the first approved")


def test_a_revoked_one_is_none(cell: Cell) -> None:
    first, second = cell.baseline(1, 0), cell.baseline(2, 0)
    revoke(cell.store, CELL, first.run_id, revocation("Grace", "its answers were another model's", datetime.now(UTC)))
    assert anchor_of(cell) == (second.run_id, "the first approved")


def test_the_caller_or_the_recipe_names_another(cell: Cell) -> None:
    runs = [cell.baseline(number, 0).run_id for number in (1, 2, 3)]
    assert anchor_of(cell, anchor=runs[1]) == (runs[1], "named by the caller")
    cell.recipe["anchors"] = [{"run": runs[2], "gpu_type": "cpu", "variant": "bf16", "profile": "balanced"}]
    assert anchor_of(cell) == (runs[2], "named by the recipe")
    named = cell.plan(4, anchor=runs[1])
    assert (named.named_anchor, named.held_against.run_id) == (runs[2], runs[1])
    command = rerun(named)
    assert command[command.index("--anchor") + 1] == runs[1]
    assert "--anchor" not in rerun(cell.plan(5))


def test_a_recipe_names_only_an_approved_baseline(cell: Cell) -> None:
    cell.baseline(1, 0)
    cell.recipe["anchors"] = [{"run": run_id(9), "gpu_type": "cpu", "variant": "bf16", "profile": "balanced"}]
    with pytest.raises(CallerError, match=f"run {run_id(9)} is no approved baseline of {CELL}") as refused:
        cell.plan(2)
    assert refused.value.place == "anchors"


def test_one_that_was_made_to_be_it_follows_when_it_is_approved(cell: Cell) -> None:
    first = cell.baseline(1, 0)
    anew = cell.published(2, 12, establish="always", new_anchor=True)
    assert (
        anchor_sentence(anew.report.plan)
        == "this run was made to be the anchor of later ones, and is held against none before it"
    )
    assert rerun(anew.report.plan)[-2:] == ["--establish-baseline", "--new-anchor"]
    assert anchor_of(cell) == (first.run_id, "the first approved")
    cell.approve(anew)
    assert anchor_of(cell) == (anew.run_id, "made to be one")
    cell.baseline(3, 12)
    assert anchor_of(cell) == (anew.run_id, "made to be one")


@pytest.mark.parametrize("given", [{"new_anchor": True}, {"new_anchor": True, "establish": "none"}])
def test_a_run_becomes_an_anchor_only_as_a_baseline(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="goes with `establish: always`"):
        Against.model_validate(given)
    with pytest.raises(ValidationError, match="is held against none"):
        Against.model_validate({"new_anchor": True, "establish": "always", "anchor": "x"})


# --- how a release is held against it


def test_the_report_shows_it_beside_the_baseline(cell: Cell) -> None:
    first, second = cell.baseline(1, 2), cell.baseline(2, 4)
    report, _ = cell.judged(cell.plan(3), 5)
    assert baseline_sentence(report.plan).startswith(f"run {second.run_id} of {CELL}")
    assert anchor_sentence(report.plan).startswith(f"run {first.run_id} of {CELL} on vLLM")
    assert anchor_sentence(report.plan).endswith(", the first approved")
    changes = changes_of(report)
    assert changes
    assert {row.other: (row.then, row.now, row.worse.split("\N{NO-BREAK SPACE}")[0]) for row in changes.metrics} == {
        "baseline": ("90.00\N{NO-BREAK SPACE}%", "87.50\N{NO-BREAK SPACE}%", "2.50"),
        "anchor": ("95.00\N{NO-BREAK SPACE}%", "87.50\N{NO-BREAK SPACE}%", "7.50"),
    }


def test_asking_does_not_go_on_for_the_anchors_sake(cell: Cell) -> None:
    """The gate against the baseline is decided, that against the anchor is not: its margin lies within its interval."""
    cell.baseline(1, 0)
    cell.baseline(2, 5)
    plan = cell.plan(3)
    report, run = cell.judged(plan, 5, steps=5)
    assert verdicts(report) == {OWN: "pass", BASELINE: "pass", ANCHOR: "inconclusive"}
    assert accuracy_decided(plan, run.evidence, plan.accuracy[0])


def test_a_new_baseline_is_asked_until_its_noise_and_its_loss_are_known(cell: Cell) -> None:
    """One repetition shows no noise. Four do, and tell the loss against the baseline before as exactly as its margin needs."""
    cell.baseline(1, 0)
    plan = cell.plan(2, establish="always")
    assert plan.establishes
    _, run = cell.judged(plan, 0, steps=1)
    assert not accuracy_decided(plan, run.evidence, plan.accuracy[0])
    again = cell.plan(3, establish="always")
    _, run = cell.judged(again, 0, steps=4)
    assert accuracy_decided(again, run.evidence, again.accuracy[0])


def test_an_approval_covers_a_plan_with_another_anchor_and_none_with_another_gate(cell: Cell) -> None:
    cell.baseline(1, 0)
    plan = cell.plan(2)
    assert is_the_same(plan, plan.model_copy(update={"anchor": None, "baseline": None}))
    assert not is_the_same(plan, without(plan, ANCHOR))
    assert not is_the_same(plan, plan.model_copy(update={"named_anchor": run_id(1)}))


def test_an_anchor_that_no_gate_is_against_is_reported(cell: Cell) -> None:
    cell.recipe["gates"] = [gate for gate in cell.recipe["gates"] if "max_loss_since_anchor" not in gate]
    cell.baseline(1, 0)
    messages: list[str] = []
    assert cell.plan(2, messages=messages, anchor=run_id(1)).anchor is None
    assert f"{CELL} has no gate against an anchor: it is not held against run {run_id(1)}" in messages


# --- an anchor that is not like the release


def test_another_version_of_the_task_is_invalid_until_somebody_begins_anew(cell: Cell) -> None:
    cell.baseline(1, 0)
    report, _ = cell.judged(cell.plan(2), 0, version=4.0)
    assert {verdicts(report)[label] for label in (BASELINE, ANCHOR)} == {"invalid"}
    message = next(verdict.because for verdict in report.judgement.gates if verdict.gate.label == ANCHOR)
    assert message == "the task gsm8k is not the anchor's: its prompts or its scoring changed"
    cell.approve(cell.published(3, 0, establish="always", new_anchor=True, version=4.0))
    report, _ = cell.judged(cell.plan(4), 0, version=4.0)
    assert report.passed
    assert report.plan.held_against.run_id == run_id(3)


def test_other_questions_are_reported_before_anything_is_measured_with_the_way_out(cell: Cell) -> None:
    cell.baseline(1, 0)
    cell.recipe["accuracy"][0]["num_questions"] = 39
    for establish in ("never", "always"):
        with pytest.raises(CallerError, match="num_questions 40, now 39") as refused:
            cell.plan(2, establish=establish)
        assert "--establish-baseline --new-anchor" in refused.value.remedy
    assert cell.plan(3, establish="always", new_anchor=True).new_anchor


def test_an_anchor_without_its_evidence_is_reported_with_the_way_out(cell: Cell, tmp_path: Path) -> None:
    first = cell.baseline(1, 0)
    cell.baseline(2, 1)
    file = next(file for file in first.report.files if file.path.endswith("answers.jsonl"))
    path = Path(cell.store.locate(evidence_key(file)))
    body = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(body.replace(b"1.0", b"0.0", 1))
    (tmp_path / "brought").mkdir()
    with pytest.raises(StoreError, match="the anchor's evidence is not what its report says") as refused:
        copy_baseline(cell.plan(3), cell.store, tmp_path / "brought")
    assert "--new-anchor" in refused.value.remedy


def test_prune_never_removes_what_an_anchor_rests_on(cell: Cell, tmp_path: Path) -> None:
    cell.baseline(1, 0)
    for number in (2, 3, 4):
        cell.published(number, 0)
    assert isinstance(cell.store, DirectoryStore)
    later = datetime(2026, 3, 31, tzinfo=UTC) + timedelta(days=400)
    gone = prune_store(cell.store, Policy(keep=1, older_than_days=30), later, lambda _: None, grace_s=0)
    assert {name for _, name in gone.runs} == {run_id(2), run_id(3)}
    (tmp_path / "brought").mkdir()
    copy_baseline(cell.plan(5), cell.store, tmp_path / "brought")
    assert anchor_of(cell)[0] == run_id(1)
