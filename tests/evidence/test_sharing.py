"""Cells that share a server: whose answers can be reused, and that each has evidence of its own in the end."""

import os
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from tests.builders.comparisons import CANDIDATE, CPU, SCORE, cell_plan, lone_cell, loss_gate, server_plan, task_plan
from tests.evidence.commands import SERVER
from tests.lm_eval_files import right_but
from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.measurement import StageEvidence, describe
from vllm_qualify.evidence.serving import see_the_same
from vllm_qualify.evidence.stages.accuracy import ACCURACY
from vllm_qualify.evidence.stages.serve import SERVE
from vllm_qualify.evidence.stages.stage import MACHINE, stage_folder
from vllm_qualify.evidence.stages.table import parse, taken_over
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.recipe.gates import Waiver, gate_of

AT = datetime(2026, 3, 2, 8, 0, 0, tzinfo=UTC)
WATCHED = (SCRAPES, HOST_SAMPLES)
TTFT = gate_of(metric="ttft_p50_ms", maximum=500.0, unit="ms")
TPOT = gate_of(metric="tpot_p50_ms", maximum=50.0, unit="ms")
OTHERS_LOAD = cell_plan([]).load.model_copy(update={"seed": 7})
# Of such runs only what decides counts.
ESTABLISHING = {"baseline": None, "establishes": True}


def waived(gate: str, expires: date = date(2026, 12, 31)) -> Waiver:
    return Waiver(
        gate=gate, gpu_type="cpu", variant="bf16", profile="balanced", owner="a team", reason="known", expires=expires
    )


# --- whose answers can be reused


# Each with the cell that asks alike.
ALIKE = {
    "alike": (lone_cell(), lone_cell()),
    "another load": (lone_cell(), lone_cell(load=OTHERS_LOAD, run_id="another", warm_starts=3, price_usd_gpu_hour=2.0)),
    "another text": (lone_cell(), lone_cell(fit=None, smoke_golden=" 12")),
    # As many gates, so that each is looked at as surely.
    "another gate": (lone_cell(SCORE, TTFT), lone_cell(SCORE, TPOT)),
    "another order": (lone_cell(TTFT, SCORE), lone_cell(SCORE, TTFT)),
    # What has no noise takes nothing of that.
    "smoke": (lone_cell(), lone_cell(gate_of(metric="smoke_usage", minimum=1.0, unit="bool"), SCORE)),
    "load waived": (lone_cell(SCORE, TTFT), lone_cell(SCORE, TTFT, waivers=[waived(TTFT.label)])),
    "score waived": (lone_cell(waivers=[waived(SCORE.label)]), lone_cell(waivers=[waived(SCORE.label)])),
    "decides nothing yet": (cell_plan([SCORE, loss_gate()], **ESTABLISHING), cell_plan([SCORE], **ESTABLISHING)),
}
OTHER_FILTER = SCORE.model_copy(update={"filter": "flexible-extract"})
# Each would be given other answers than the lone cell.
OTHERWISE = {
    "server": lone_cell(server=server_plan(dtype="bfloat16")),
    "questions": lone_cell(accuracy=[task_plan(Accuracy(num_questions=41, num_fewshot=1, max_gen_toks=48))]),
    "concurrent": lone_cell(accuracy=[task_plan(num_concurrent=5)]),
    "repetitions": lone_cell(accuracy=[task_plan(repetitions=3)]),
    "in one go": lone_cell(accuracy=[task_plan(sequential=False)]),
    "baseline": cell_plan([SCORE]),
    "bound": lone_cell(SCORE.model_copy(update={"minimum": 0.6})),
    "filter": lone_cell(OTHER_FILTER),
    "one more score": lone_cell(SCORE, OTHER_FILTER),
    "no score": lone_cell(TTFT),
    # It would be looked at less surely for each of them.
    "one more gate": lone_cell(SCORE, TTFT),
    # It decides nothing there, so that asking ends sooner.
    "waived": lone_cell(waivers=[waived(SCORE.label)]),
}


@pytest.mark.parametrize(("ours", "theirs"), ALIKE.values(), ids=ALIKE)
def test_cells_that_differ_elsewhere_ask_alike(ours: CellPlan, theirs: CellPlan) -> None:
    assert ACCURACY.is_shared(ours, theirs)
    assert ACCURACY.is_shared(theirs, ours)


@pytest.mark.parametrize("theirs", OTHERWISE.values(), ids=OTHERWISE)
def test_a_cell_that_would_be_given_other_answers_asks_itself(theirs: CellPlan) -> None:
    assert not ACCURACY.is_shared(lone_cell(), theirs)
    assert not ACCURACY.is_shared(theirs, lone_cell())


def test_a_waiver_that_ends_on_another_day_is_another() -> None:
    soon, late = (lone_cell(waivers=[waived(SCORE.label, day)]) for day in (date(2026, 3, 3), date(2026, 3, 4)))
    assert not ACCURACY.is_shared(soon, late)


# --- taking them over


@pytest.fixture
def asked(tmp_path: Path) -> tuple[Path, StageEvidence]:
    """A cell's evidence with its answers, all right but two, and its finished stage."""
    evidence, plan = tmp_path / "first", lone_cell()
    CANDIDATE.write(evidence / "accuracy" / "gsm8k", right_but([3, 4]))
    (evidence / "accuracy" / MACHINE).write_text(CPU.model_dump_json())
    files = [describe(path, evidence) for path in sorted((evidence / "accuracy").rglob("*")) if path.is_file()]
    stage = StageEvidence(
        stage="accuracy",
        started_at=AT,
        duration_s=60.0,
        commands=[["lm_eval"]],
        tools={"lm-eval": "0.4.12"},
        files=files,
        measurements=parse("accuracy", plan, evidence),
        run_id=plan.run_id,
    )
    return evidence, stage


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_taken_over_is_the_cells_own(asked: tuple[Path, StageEvidence], tmp_path: Path) -> None:
    first, theirs = asked
    ours = stage_folder(tmp_path / "second", "smoke").parent
    stage = taken_over("accuracy", lone_cell(), ours, first, [theirs])
    assert stage == theirs.model_copy(update={"run_id": lone_cell().run_id})
    assert contents(ours / "accuracy") == contents(first / "accuracy")
    assert [describe(ours / file.path, ours) for file in stage.files] == stage.files
    assert any(measured.value is not None for measured in stage.measurements)
    (first / "accuracy" / MACHINE).unlink()
    assert (ours / "accuracy" / MACHINE).is_file()


def test_the_measurements_are_those_of_the_cells_own_plan(asked: tuple[Path, StageEvidence], tmp_path: Path) -> None:
    first, theirs = asked
    # With more gates to be wrong about, each bound that can fail the release is surer.
    stage = taken_over("accuracy", lone_cell(SCORE, TTFT, TPOT), tmp_path / "second", first, [theirs])
    by_filter = {each.filter: each for each in theirs.measurements if each.metric == "exact_match"}
    for measured in (each for each in stage.measurements if each.metric == "exact_match"):
        before = by_filter[measured.filter]
        assert measured.value == before.value
        assert measured.interval is not None
        assert before.interval is not None
        assert measured.interval.upper > before.interval.upper
    assert stage.model_copy(update={"measurements": theirs.measurements, "run_id": theirs.run_id}) == theirs


def test_of_another_machine_nothing_counts(asked: tuple[Path, StageEvidence], tmp_path: Path) -> None:
    first, theirs = asked
    elsewhere = lone_cell(fingerprint=CPU.model_copy(update={"name": "Another CPU"}))
    stage = taken_over("accuracy", elsewhere, tmp_path / "second", first, [theirs])
    assert {measured.value for measured in stage.measurements} == {None}
    # What the captured evidence does not have keeps its own reason.
    counted = {(row.metric, row.filter) for row in theirs.measurements if row.invalid_because is None}
    refused = {(row.metric, row.filter) for row in stage.measurements if "and planned for" in str(row.invalid_because)}
    assert refused == counted
    assert ("exact_match", "strict-match") in counted


def test_what_cannot_be_copied_is_reported(asked: tuple[Path, StageEvidence], tmp_path: Path) -> None:
    first, theirs = asked
    stage_folder(tmp_path / "second", "accuracy")
    with pytest.raises(HostError, match="File exists") as raised:
        taken_over("accuracy", lone_cell(), tmp_path / "second", first, [theirs])
    assert raised.value.place == "accuracy"


# --- what the server itself leaves


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The serve stages of two cells; the server runs in the first, on this plan's machine."""
    monkeypatch.setattr("vllm_qualify.evidence.stages.stage.read_machine", lambda *_: CPU)
    first, second = (stage_folder(tmp_path / name, "serve") for name in ("first", "second"))
    (first / "server.log").write_text("INFO: ready\n")
    for name in WATCHED:
        (first / name).touch()
    return [first, second]


def append(folder: Path, line: str) -> None:
    for name in WATCHED:
        with (folder / name).open("a") as file:
            file.write(f"{line}\n")


def lines(folder: Path) -> list[list[str]]:
    return [(folder / name).read_text().splitlines() for name in WATCHED]


def test_what_is_watched_for_one_cell_is_so_for_the_other(folders: list[Path]) -> None:
    first, second = folders
    append(first, "before")
    see_the_same(first, second)
    append(first, "after")
    assert lines(first) == lines(second) == [["before", "after"]] * 2
    (first / SCRAPES).unlink()
    with pytest.raises(HostError, match="No such file or directory"):
        see_the_same(first, second)


def test_in_the_end_each_cell_has_a_copy_of_its_own(folders: list[Path]) -> None:
    first, second = folders
    see_the_same(first, second)
    append(first, "of both")
    mine, other = (collect(folder, first) for folder in folders)
    append(second, "of the second")
    assert (lines(first), lines(second)) == ([["of both"]] * 2, [["of both", "of the second"]] * 2)
    assert not any(os.path.samefile(first / name, second / name) for name in WATCHED)
    assert {file.path for file in mine.files} == {f"serve/{path}" for path in contents(first)}
    assert contents(second).keys() == contents(first).keys()
    assert (mine.files, mine.measurements) == (other.files, other.measurements)
    assert mine.commands == other.commands == [SERVER.command]
    (startup,) = (measured for measured in mine.measurements if measured.metric == "startup_s")
    assert (startup.value, startup.fingerprint) == (SERVER.startup_s, CPU.id)


def collect(folder: Path, first: Path) -> StageEvidence:
    """A cell's stage, whose server ran in the folder of the first one."""
    return SERVE.collect(SERVER, lone_cell(), folder.parent, AT, 60.0, first)


def test_secrets_are_in_neither_copy(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody_at_all")
    first, second = folders
    see_the_same(first, second)
    append(first, "hf_of_nobody_at_all")
    for folder in folders:
        collect(folder, first)
    assert all(b"hf_of_nobody_at_all" not in body for folder in folders for body in contents(folder).values())
