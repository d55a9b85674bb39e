"""A stage that another run measured: whoever may publish can write that one did, with evidence of another model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.captured_runs import captured_plan, captured_stage, judged, run, store
from vllm_qualify.errors import StoreError
from vllm_qualify.evidence.measurement import StageEvidence, describe
from vllm_qualify.evidence.stages.table import judged_by
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import new_run_id
from vllm_qualify.plan.request import Reuse
from vllm_qualify.publish.bundle import evidence_key, put_evidence
from vllm_qualify.publish.kept import KeptStage, keep_judged_again, kept_stage, stage_key
from vllm_qualify.publish.store import Store, TooLongError
from vllm_qualify.recipe.gates import Gate, gate_of
from vllm_qualify.runs.folder import Run, start_run
from vllm_qualify.runs.judging import judge_run, rejudge
from vllm_qualify.runs.publishing import publish_run
from vllm_qualify.runs.stored import fetch_evidence, reuse_stages

__all__ = ["judged", "run", "store"]
ALL = Reuse(of="all", most_age_days=36_500.0)
EVERY = ["smoke", "contract", "accuracy", "load", "serve"]
Change = Callable[[KeptStage], KeptStage]


def taken(store: Store, theirs: Run, reuse: Reuse = ALL) -> list[str]:
    """What a new run of the same plan takes over on another machine."""
    plan = theirs.plan
    shutil.rmtree(theirs.folder)
    ours = start_run(plan.model_copy(update={"run_id": new_run_id()}))
    return [stage.stage for stage in reuse_stages(ours, store, reuse)]


def taken_by(store: Store, plan: CellPlan) -> list[str]:
    """What a new run of a plan takes over on this machine."""
    ours = start_run(plan.model_copy(update={"run_id": new_run_id()}))
    return [stage.stage for stage in reuse_stages(ours, store, ALL)]


def write_note(store: Store, plan_of: Run, note: KeptStage) -> None:
    key = f"stages/{note.stage.stage}/{stage_key(note.stage.stage, plan_of.plan)}/{note.run_id}.json"
    store.put_new(key, note.model_dump_json().encode(), "application/json")


@pytest.fixture
def published(run: Run, store: Store) -> Run:
    """A run that passed, with a note of each stage."""
    publish_run(run.report(), run, store)
    for stage in run.stages():
        write_note(store, run, kept_stage(run.plan, stage))
    return run


def test_the_stages_of_a_published_run_are_taken_over(published: Run, store: Store) -> None:
    assert sorted(taken(store, published)) == sorted(EVERY)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("reuse", [ALL, Reuse(of="unfinished", most_age_days=36_500.0)])
def test_a_stage_that_a_note_alone_speaks_of_is_not_taken_over(tmp_path: Path, store: Store, reuse: Reuse) -> None:
    """The attack: evidence of another model, and a note of a run that nobody published."""
    theirs = start_run(captured_plan(tmp_path))
    for stage in ("smoke", "accuracy"):
        evidence = captured_stage(theirs, stage)
        for file in evidence.files:
            put_evidence(store, theirs.evidence, file)
        write_note(store, theirs, kept_stage(theirs.plan, evidence))
    assert taken(store, theirs, reuse) == []


def with_other_answers(note: KeptStage, store: Store, theirs: Run) -> KeptStage:
    """A published run's own name, and files that the run does not have."""
    (file, *rest) = note.stage.files
    (theirs.evidence / file.path).write_text("{}\n")
    changed = describe(theirs.evidence / file.path, theirs.evidence)
    put_evidence(store, theirs.evidence, changed)
    return note.model_copy(update={"stage": note.stage.model_copy(update={"files": [changed, *rest]})})


def stage_of(theirs: Run, name: str) -> StageEvidence:
    (stage,) = (each for each in theirs.stages() if each.stage == name)
    return stage


def test_other_files_under_a_published_runs_name_are_not_taken_over(run: Run, store: Store) -> None:
    publish_run(run.report(), run, store)
    write_note(store, run, with_other_answers(kept_stage(run.plan, stage_of(run, "accuracy")), store, run))
    assert taken(store, run) == []


def test_what_a_published_run_measured_of_something_else_is_not_taken_over(run: Run, store: Store) -> None:
    """Its own evidence, under the key of another model's inputs."""
    publish_run(run.report(), run, store)
    server = run.plan.server.model_copy(update={"arguments": {"max-num-seqs": 7}})
    other = start_run(run.plan.model_copy(update={"run_id": new_run_id(), "server": server}))
    for stage in run.stages():
        write_note(store, other, kept_stage(run.plan, stage))
    shutil.rmtree(run.folder)
    assert taken(store, other) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda note: note.model_copy(update={"prefix": "reports/another/cell/of/them/run"}),
        lambda note: note.model_copy(update={"prefix": ""}),
        lambda note: note.model_copy(update={"run_id": "20260101T000000Z-abcdef"}),
        lambda note: note.model_copy(update={"run_id": "../../.."}),
    ],
)
def test_a_note_that_names_another_place_than_its_runs_is_not_taken_over(run: Run, store: Store, change: Change) -> None:
    publish_run(run.report(), run, store)
    note = kept_stage(run.plan, stage_of(run, "accuracy"))
    key = f"stages/accuracy/{stage_key('accuracy', run.plan)}/{run.id}.json"
    store.put_new(key, change(note).model_dump_json().encode(), "application/json")
    assert taken(store, run) == []


TRIVIAL = gate_of(metric="exact_match", task="gsm8k", filter="flexible-extract", minimum=0.0001, unit="fraction")
STRICT = gate_of(metric="exact_match", task="gsm8k", filter="flexible-extract", minimum=0.99, unit="fraction")


def judging_by(plan: CellPlan, gate: Gate) -> CellPlan:
    return plan.model_copy(update={"gates": [*(own for own in plan.gates if own.metric != "exact_match"), gate]})


def publish_again(store: Store, failed: Run, gate: Gate) -> Run:
    """What `rejudge` does with a run that did not pass."""
    report, again = rejudge(failed, judging_by(failed.plan, gate))
    assert report.passed
    publish_run(report, again, store)
    keep_judged_again(store, report.plan, report.stages)
    return again


@pytest.fixture
def failed(run: Run, store: Store) -> Run:
    """A published run that missed a bound, with a note of each stage."""
    plan = judging_by(run.plan, STRICT).model_copy(update={"run_id": new_run_id()})
    theirs = start_run(plan)
    shutil.copytree(run.evidence, theirs.evidence)
    stages = [judged_by(stage, plan, theirs.evidence) for stage in run.stages()]
    for stage in stages:
        theirs.save_stage(stage)
        write_note(store, theirs, kept_stage(plan, stage))
    report = judge_run(theirs, stages)
    assert not report.passed
    publish_run(report, theirs, store)
    return theirs


def test_a_run_that_did_not_pass_gives_nothing_until_it_was_judged_by_other_gates(failed: Run, store: Store) -> None:
    assert taken_by(store, failed.plan) == []
    again = publish_again(store, failed, TRIVIAL)
    assert sorted(taken_by(store, again.plan)) == sorted(EVERY)


def test_nor_to_a_run_of_the_gates_that_it_missed(failed: Run, store: Store) -> None:
    """The attack: a verdict by weaker gates, so that all but the unlucky answers of a failed run would be kept."""
    publish_again(store, failed, TRIVIAL)
    assert taken_by(store, failed.plan) == []


@pytest.mark.parametrize("body", ["{", "[]", json.dumps({"kept_version": 1}), '{"kept_version": 2}'])
def test_a_note_that_nobody_can_read_keeps_no_run_from_measuring(published: Run, store: Store, body: str) -> None:
    key = f"stages/accuracy/{stage_key('accuracy', published.plan)}/20990101T000000Z-abcdef.json"
    store.put_new(key, body.encode(), "application/json")
    assert sorted(taken(store, published)) == sorted(EVERY)


def test_a_file_that_was_changed_in_the_store_is_told(published: Run, store: Store) -> None:
    (file,) = (each for each in stage_of(published, "smoke").files if each.path == "smoke/machine.json")
    Path(store.locate(evidence_key(file))).write_text("{}")
    with pytest.raises(StoreError, match="not what the run measured"):
        taken(store, published)


def test_evidence_that_is_longer_than_its_report_says_is_not_read(published: Run, store: Store, tmp_path: Path) -> None:
    """By one byte here: a file of terabytes would fill a memory or a disk before it were found out."""
    report = published.report()
    (file,) = (each for each in stage_of(published, "smoke").files if each.path == "smoke/machine.json")
    path = Path(store.locate(evidence_key(file)))
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b"\n")
    for read in (lambda: fetch_evidence(store, report, tmp_path / "fetched"), lambda: taken(store, published)):
        with pytest.raises(StoreError, match="not what its report says") as refused:
            read()
        assert isinstance(refused.value.__cause__, TooLongError)
