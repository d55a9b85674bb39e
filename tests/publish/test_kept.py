"""Finished stages: what determines them, who may take them over, and that nothing else is taken."""

import json
import shutil
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.builders.captured_runs import captured_plan, captured_stage, store_in
from tests.builders.changed import changed
from vllm_qualify.approval.covering import list_differences
from vllm_qualify.evidence.measurement import StageEvidence, describe
from vllm_qualify.evidence.stages.starts import STARTS, begin_start
from vllm_qualify.evidence.starts import further
from vllm_qualify.plan.cell import BetweenStarts, CellPlan, EarlierTry, LikelihoodPlan
from vllm_qualify.plan.cells import new_run_id, within_budget
from vllm_qualify.plan.request import Reuse
from vllm_qualify.publish.bundle import evidence_key
from vllm_qualify.publish.kept import is_the_same, keep, stage_key
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.accuracy import Likelihood
from vllm_qualify.recipe.gates import Waiver, gate_of
from vllm_qualify.recipe.metrics import StageName
from vllm_qualify.recipe.paths import UNASKED
from vllm_qualify.recipe.published import PublishedScore
from vllm_qualify.recipe.searches import Soak
from vllm_qualify.runs.folder import Run, lacking_stages, start_run
from vllm_qualify.runs.stored import reuse_stage, reuse_stages, save_finished

ANY_AGE = 36_500.0
UNFINISHED = Reuse(of="unfinished", most_age_days=ANY_AGE)
ALL = Reuse(of="all", most_age_days=ANY_AGE)
MEASURED: list[StageName] = ["smoke", "contract", "accuracy", "load"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_in(tmp_path / "store")


@pytest.fixture
def plan(tmp_path: Path) -> CellPlan:
    return captured_plan(tmp_path)


@pytest.fixture
def broken_off(plan: CellPlan, store: Store) -> Run:
    """All that was measured is kept; there is no report."""
    run = start_run(plan)
    for stage in [*MEASURED, "serve"]:
        save(store, run, captured_stage(run, stage))
    return run


def save(store: Store, run: Run, stage: StageEvidence) -> None:
    save_finished(run, stage)
    keep(store, run.plan, stage, run.evidence)


def forget(run: Run, stage: StageName) -> None:
    (note,) = (run.folder / "kept").glob(f"{stage}-*.json")
    note.unlink()


def again(plan: CellPlan) -> Run:
    return start_run(plan.model_copy(update={"run_id": new_run_id()}))


def finish(store: Store, run: Run, outcome: str) -> None:
    """What of a published run tells that it is one."""
    what = {"outcome": outcome, "sequence": 1, "summary": {"engine": "vllm", "engine_version": "0.32.0"}, "objects": []}
    manifest = {"run_id": run.id, "cell": run.plan.cell.id} | what
    store.put_new(f"reports/{run.plan.cell.id}/{run.id}/manifest.json", json.dumps(manifest).encode(), "application/json")


def taken(store: Store, run: Run, reuse: Reuse = UNFINISHED) -> list[str]:
    return [stage.stage for stage in reuse_stages(run, store, reuse)]


def test_a_rerun_takes_over_what_a_broken_off_run_measured(broken_off: Run, store: Store) -> None:
    run = again(broken_off.plan)
    assert taken(store, run) == [*MEASURED, "serve"]
    assert lacking_stages(run) == []
    theirs = {stage.stage: stage for stage in broken_off.stages()}
    for ours in run.stages():
        assert ours == changed(theirs[ours.stage], run_id=run.id, taken_from=broken_off.id)
        for file in ours.files:
            assert (run.evidence / file.path).read_bytes() == (broken_off.evidence / file.path).read_bytes()


def test_what_was_taken_over_twice_names_the_run_that_measured(broken_off: Run, store: Store) -> None:
    second = again(broken_off.plan)
    taken(store, second)
    shutil.rmtree(broken_off.folder)
    third = again(broken_off.plan)
    taken(store, third)
    assert {stage.taken_from for stage in third.stages()} == {broken_off.id}


def test_without_a_stage_the_server_is_started_and_tells_itself(broken_off: Run, store: Store) -> None:
    forget(broken_off, "load")
    run = again(broken_off.plan)
    assert taken(store, run) == ["smoke", "contract", "accuracy"]
    assert lacking_stages(run) == ["load"]


@pytest.mark.parametrize("is_taken_over", [False, True], ids=["its own", "taken over"])
@pytest.mark.parametrize(
    ("outcome", "reuse", "is_taken"),
    [
        ("passed", UNFINISHED, False),
        ("passed", ALL, True),
        ("not passed", UNFINISHED, False),
        ("not passed", ALL, False),
        (None, Reuse(of="none", most_age_days=ANY_AGE), False),
    ],
)
def test_what_a_finished_run_has_is_measured_once_more_unless_the_run_passed_and_all_are_wanted(
    outcome: str | None, reuse: Reuse, is_taken: bool, is_taken_over: bool, broken_off: Run, store: Store
) -> None:
    finished = again(broken_off.plan) if is_taken_over else broken_off
    if is_taken_over:
        taken(store, finished)
    if outcome:
        finish(store, finished, outcome)
    assert bool(taken(store, again(broken_off.plan), reuse)) is is_taken


@pytest.fixture
def started_again(plan: CellPlan, store: Store) -> Run:
    """All is kept but further starts; three are planned."""
    gate = gate_of(metric="ttft_p50_ms", max_worsening=0.1, unit="fraction")
    starting = {"gates": [*plan.gates, gate], "establishes": True, "starts": 4, "likelihood": None}
    run = start_run(plan.model_copy(update=starting))
    for stage in [*MEASURED, "serve"]:
        save(store, run, captured_stage(run, stage))
    return run


def start(run: Run, number: int) -> StageEvidence:
    """One more start, saved with those before it. It left nothing but a log."""
    folder = begin_start(run.evidence, number)
    (folder / "server.log").write_text(f"start {number}\n")
    finished = STARTS.collect(run.plan, run.evidence, datetime(2026, 11, 20, tzinfo=UTC), 60.0, [["vllm"]], run.stage("starts"))
    save_finished(run, finished)
    return finished


def test_finished_starts_are_taken_over_one_by_one(started_again: Run, store: Store) -> None:
    plan = started_again.plan
    for number in (2, 3):
        keep(store, plan, start(started_again, number), started_again.evidence)
    run = again(plan)
    assert taken(store, run)[-1] == "starts"
    assert further(run.evidence) == [2, 3]
    grown = start(run, 4)
    assert (grown.taken_from, grown.duration_s) == (started_again.id, 180.0)
    keep(store, run.plan, grown, run.evidence)
    last = again(plan)
    assert taken(store, last)[-1] == "starts"
    logs = [(last.evidence / f"starts/{number}/serve/server.log").read_text() for number in (2, 3, 4)]
    assert logs == ["start 2\n", "start 3\n", "start 4\n"]


def test_starts_wait_for_the_stages_that_they_follow(started_again: Run, store: Store) -> None:
    plan = started_again.plan
    keep(store, plan, start(started_again, 2), started_again.evidence)
    forget(started_again, "load")
    assert "starts" not in taken(store, again(plan))


def test_old_evidence_is_measured_once_more(broken_off: Run, store: Store) -> None:
    began = min(stage.started_at for stage in broken_off.stages())
    age_days = (datetime.now(UTC) - began) / timedelta(days=1)
    assert taken(store, again(broken_off.plan), Reuse(most_age_days=age_days + 1)) != []
    assert taken(store, again(broken_off.plan), Reuse(most_age_days=age_days / 2)) == []


def test_a_stage_that_a_gate_cannot_judge_by_is_measured_once_more(plan: CellPlan, store: Store) -> None:
    run = start_run(plan)
    measured = captured_stage(run, "load")
    shutil.rmtree(run.evidence / "load")
    shutil.copytree(Path(__file__).parents[1] / "evidence" / "captured" / "load", run.evidence / "load")
    (run.evidence / "load" / "machine.json").write_text(plan.fingerprint.model_dump_json())
    bench = run.evidence / "load" / "bench-2.json"
    bench.write_text(bench.read_text().replace('"failed": 0', '"failed": 1'))
    files = [describe(run.evidence / file.path, run.evidence) for file in measured.files]
    save(store, run, measured.model_copy(update={"files": files}))
    fresh = again(plan)
    assert reuse_stage(fresh, "load", store, UNFINISHED) is None
    assert not [path for path in fresh.evidence.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("file", "is_taken"), [("not-taken.txt", True), ("lost.txt", False)])
def test_paths_that_cannot_be_proven_are_taken_over_and_broken_ones_measured_again(
    plan: CellPlan, store: Store, file: str, is_taken: bool
) -> None:
    """A server that does not take them takes them no more the next time."""
    gates = [*plan.gates, gate_of(metric="path_cached", minimum=1, unit="bool")]
    asked = plan.model_copy(update={"paths": UNASKED, "gates": gates})
    run = start_run(asked)
    folder = run.evidence / "paths"
    folder.mkdir(parents=True)
    (folder / "machine.json").write_text(plan.fingerprint.model_dump_json())
    (folder / file).write_text("the server gives no tokens")
    files = [describe(path, run.evidence) for path in sorted(folder.iterdir())]
    stage = captured_stage(run, "smoke").model_copy(update={"stage": "paths", "files": files, "measurements": []})
    save(store, run, stage)
    fresh = again(asked)
    reused = reuse_stage(fresh, "paths", store, UNFINISHED)
    assert (reused is not None) == is_taken


@pytest.fixture
def left_here(plan: CellPlan) -> Run:
    """All that was measured is in the run's folder: the store was away."""
    run = start_run(plan)
    for stage in [*MEASURED, "serve"]:
        save_finished(run, captured_stage(run, stage))
    return run


def test_what_is_on_this_machine_is_taken_over_and_the_store_gets_it(left_here: Run, store: Store) -> None:
    plan = left_here.plan
    run = again(plan)
    assert taken(store, run) == [*MEASURED, "serve"]
    assert {stage.taken_from for stage in run.stages()} == {left_here.id}
    for stage in run.stages():
        for file in stage.files:
            assert store.get(evidence_key(file)) == (left_here.evidence / file.path).read_bytes()


def test_a_changed_file_on_this_machine_is_not_taken_over(left_here: Run, store: Store) -> None:
    (left_here.evidence / "smoke" / "machine.json").write_text("{}")
    (left_here.evidence / "accuracy" / "machine.json").unlink()
    (note,) = (left_here.folder / "kept").glob("serve-*.json")
    note.write_text("{")
    assert taken(store, again(left_here.plan)) == ["contract", "load"]


@pytest.mark.parametrize(("outcome", "reuse", "is_taken"), [("not passed", ALL, False), ("passed", ALL, True)])
def test_what_is_on_this_machine_is_finished_with_its_run(
    outcome: str, reuse: Reuse, is_taken: bool, left_here: Run, store: Store
) -> None:
    finish(store, left_here, outcome)
    assert bool(taken(store, again(left_here.plan), reuse)) is is_taken
    assert not taken(store, again(left_here.plan))


def test_another_plans_stages_on_this_machine_are_not_taken_over(left_here: Run, store: Store) -> None:
    plan = of("smoke", prompt="Who?")(left_here.plan)
    assert taken(store, again(plan)) == ["accuracy", "load"]


Change = Callable[[CellPlan], CellPlan]


def of(part: str = "", **changes: Any) -> Change:
    return lambda plan: changed(plan, part, **changes)


def of_task(part: str = "", **changes: Any) -> Change:
    return lambda plan: changed(plan, accuracy=[changed(task, part, **changes) for task in plan.accuracy])


def without_contract(plan: CellPlan) -> CellPlan:
    gates = [gate for gate in plan.gates if not gate.metric.startswith("contract_")]
    return plan.model_copy(update={"gates": gates, "contract": None})


EVERY: list[StageName] = ["fit", "serve", "smoke", "contract", "accuracy", "likelihood"]
EVERY += ["load", "speculation", "sweep", "soak", "starts"]
JUDGED: list[StageName] = ["fit", "accuracy", "load", "speculation", "sweep", "starts"]
KNOWN = BetweenStarts(label="ttft_p50_ms", variance=1e-4, noise=1e-5, freedom=7.0, runs=["run-1"])
CELL = {"gpu_type": "cpu", "variant": "bf16", "profile": "balanced"}
WAIVER = Waiver(gate="contract_seed", owner="Ada", reason="known", expires=date(2100, 1, 1), **CELL)
CHANGES: dict[str, tuple[Change, list[StageName]]] = {
    "image": (of("cell.release.engine", digest="sha256:" + "f" * 64), EVERY),
    "vllm": (of("cell.release.engine", version="0.99.0"), EVERY),
    "a package of the engine's": (of("cell.release.engine", packages={"vllm": "0.32.0", "torch": "9"}), EVERY),
    "revision": (of("cell.release", revision="0" * 40), EVERY),
    "argument": (of("server", arguments={"max-num-seqs": 7}), EVERY),
    "environment": (of("server", environment={"VLLM_X": "1"}), EVERY),
    "environment of the machine": (of("server", inherited={"VLLM_X": "1"}), EVERY),
    "draft": (of("server", draft_digest="sha256:0"), EVERY),
    "number of GPUs": (of("server", gpus=[0, 1]), EVERY),
    "driver": (of("fingerprint", name="Another CPU"), EVERY),
    "smoke": (of("smoke", prompt="Who?"), ["smoke", "contract"]),
    "contract": (of("contract", time_limit_s=7.0), ["contract"]),
    # A run that was published before there was a contract.
    "no contract": (without_contract, ["contract"]),
    # Another run's own answers may differ then, which are scored.
    "questions": (of_task(num_concurrent=3), ["accuracy", "likelihood", "starts"]),
    "texts": (of(likelihood=LikelihoodPlan(settings=Likelihood(), texts_sha256="0" * 64)), ["likelihood"]),
    "number of scored answers": (of(likelihood=LikelihoodPlan(settings=Likelihood(num_answers=3))), ["likelihood"]),
    "load": (of("load", num_prompts=41), ["fit", "load", "speculation", "sweep", "soak", "starts"]),
    "soak": (of(soak=Soak(soak_min=9.0, soak_share=0.5)), ["soak"]),
    "warm starts": (of(warm_starts=3), ["serve"]),
    "starts": (of(starts=3), ["accuracy", "load", "starts"]),
    "known starts": (of(between=[KNOWN]), ["accuracy", "load", "starts"]),
    "gates": (lambda plan: changed(plan, gates=plan.gates[:-1]), JUDGED),
    "baseline": (of(establishes=True), ["fit", "accuracy", "likelihood", *JUDGED[2:]]),
    "tries": (of(tries=[EarlierTry(run_id="run-1", verdict="fail")]), JUDGED),
    # What does not determine a measurement.
    "run": (of(run_id="another-run"), []),
    "patience": (of("server", startup_timeout_s=1.0), []),
    "place": (of("server", model="/elsewhere/reference"), []),
    "which GPUs": (of("fingerprint", devices=[3]), []),
    "waiver of a check of the contract": (of(waivers=[WAIVER]), []),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_stage_is_taken_over_only_where_all_that_determines_it_is_the_same(name: str, plan: CellPlan) -> None:
    change, stages = CHANGES[name]
    other = change(plan)
    assert {stage for stage in EVERY if stage_key(stage, plan) != stage_key(stage, other)} == set(stages)


def test_a_published_score_forces_no_new_measurement(plan: CellPlan) -> None:
    other = of_task("settings", published=[PublishedScore(score=0.9, source="a model card")])(plan)
    assert all(stage_key(stage, plan) == stage_key(stage, other) for stage in EVERY)
    assert is_the_same(other, plan)
    assert list_differences(other, plan) == list_differences(plan, plan)


def test_the_content_of_the_questions_counts_and_not_their_place(plan: CellPlan, tmp_path: Path) -> None:
    (task,) = plan.accuracy
    assert task.questions is not None
    moved = [Path(shutil.copy(path, tmp_path / path.name)) for path in task.questions]
    other = of_task(questions=tuple(moved))(plan)
    assert stage_key("accuracy", other) == stage_key("accuracy", plan)
    moved[0].write_text(moved[0].read_text() + '{"question": "?", "answer": "#### 1"}\n')
    assert stage_key("accuracy", other) != stage_key("accuracy", plan)


def test_all_files_of_a_folder_of_questions_count_with_their_names(plan: CellPlan, tmp_path: Path) -> None:
    def key(name: str, **files: str) -> str:
        (tmp_path / name).mkdir()
        for task, text in files.items():
            (tmp_path / name / f"{task}.jsonl").write_text(text)
        return stage_key("accuracy", of_task(questions=[tmp_path / name])(plan))

    first = key("first", anatomy="1", virology="2")
    assert key("moved", anatomy="1", virology="2") == first
    others = [key("swapped", anatomy="2", virology="1"), key("changed", anatomy="1", virology="3"), key("fewer", anatomy="1")]
    others += [key("more", anatomy="1", virology="2", law=""), key("joined", anatomy="1virology2")]
    assert len({first, *others}) == 6


def test_a_plan_is_the_same_whatever_it_is_compared_with(plan: CellPlan) -> None:
    assert is_the_same(plan, changed(of_task(sequential=False)(plan), establishes=True))
    assert is_the_same(plan, within_budget(plan, 900.0))
    assert is_the_same(plan, changed(plan, between=[KNOWN]))
    assert not is_the_same(plan, changed(plan, starts=3))
    assert is_the_same(plan, changed(plan, tries=[EarlierTry(run_id="run-1", verdict="fail")]))
    assert not is_the_same(plan, changed(plan, "server", arguments={"max-num-seqs": 7}))
