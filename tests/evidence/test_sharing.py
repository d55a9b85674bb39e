"""Cells that share a server: whose answers can be reused, and that each has evidence of its own in the end."""

import os
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.evidence.commands import SERVER
from tests.judge.test_compare import CANDIDATE, CPU, cell_plan, loss_gate, server_plan, task_plan
from tests.lm_eval_files import STRICT, right_but
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.measurement import StageEvidence, describe
from vllm_qualify.evidence.serving import see_the_same
from vllm_qualify.evidence.stages import MACHINE, asks_alike, parse, serve_stage, stage_folder, taken_over
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import Gate, Waiver, gate_of
from vllm_qualify.recipe.workload import Accuracy

AT = datetime(2026, 3, 2, 8, 0, 0, tzinfo=UTC)
WATCHED = (SCRAPES, HOST_SAMPLES)
SCORE = gate_of(metric="exact_match", task="gsm8k", filter=STRICT, minimum=0.5, unit="fraction")
TTFT = gate_of(metric="ttft_p50_ms", maximum=500.0, unit="ms")
TPOT = gate_of(metric="tpot_p50_ms", maximum=50.0, unit="ms")
OTHERS_LOAD = cell_plan([]).load.model_copy(update={"seed": 7})

Change = Callable[[CellPlan], CellPlan]


def cell(*gates: Gate, **changes: Any) -> CellPlan:
    """Without a baseline, which would be another one for each profile."""
    return cell_plan(gates or (SCORE,), **{"baseline": None, "establishes": False} | changes)


def waived(gate: str, expires: date = date(2026, 12, 31)) -> Waiver:
    return Waiver(
        gate=gate, gpu_type="cpu", variant="bf16", profile="balanced", owner="a team", reason="known", expires=expires
    )


# --- whose answers can be reused


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (cell(), cell()),
        (cell(), cell(load=OTHERS_LOAD, run_id="another", warm_starts=3, price_usd_gpu_hour=2.0)),
        (cell(), cell(fit=None, smoke_golden=" 12")),
        # As many gates, so that each is looked at as surely.
        (cell(SCORE, TTFT), cell(SCORE, TPOT)),
        (cell(TTFT, SCORE), cell(SCORE, TTFT)),
        # What has no noise takes nothing of that.
        (cell(), cell(gate_of(metric="smoke_usage", minimum=1.0, unit="bool"), SCORE)),
        (cell(SCORE, TTFT), cell(SCORE, TTFT, waivers=[waived(TTFT.label)])),
        (cell(waivers=[waived(SCORE.label)]), cell(waivers=[waived(SCORE.label)])),
    ],
    ids=["alike", "another load", "another text", "another gate", "another order", "smoke", "load waived", "score waived"],
)
def test_cells_that_differ_elsewhere_ask_alike(ours: CellPlan, theirs: CellPlan) -> None:
    assert asks_alike(ours, theirs)
    assert asks_alike(theirs, ours)


@pytest.mark.parametrize(
    "theirs",
    [
        cell(server=server_plan(dtype="bfloat16")),
        cell(accuracy=[task_plan(Accuracy(num_questions=41, num_fewshot=1, max_gen_toks=48))]),
        cell(accuracy=[task_plan(num_concurrent=5)]),
        cell(accuracy=[task_plan(repetitions=3)]),
        cell(accuracy=[task_plan(sequential=False)]),
        cell_plan([SCORE]),
        cell(SCORE.model_copy(update={"minimum": 0.6})),
        cell(SCORE.model_copy(update={"filter": "flexible-extract"})),
        cell(SCORE, SCORE.model_copy(update={"filter": "flexible-extract"})),
        cell(TTFT),
        # It would be looked at less surely for each of them.
        cell(SCORE, TTFT),
        # It decides nothing there, so that asking ends sooner.
        cell(waivers=[waived(SCORE.label)]),
    ],
    ids=[
        "server",
        "questions",
        "concurrent",
        "repetitions",
        "in one go",
        "baseline",
        "bound",
        "filter",
        "one more score",
        "no score",
        "one more gate",
        "waived",
    ],
)
def test_a_cell_that_would_be_given_other_answers_asks_itself(theirs: CellPlan) -> None:
    assert not asks_alike(cell(), theirs)
    assert not asks_alike(theirs, cell())


def test_a_waiver_that_ends_on_another_day_is_another() -> None:
    soon, late = (cell(waivers=[waived(SCORE.label, day)]) for day in (date(2026, 3, 3), date(2026, 3, 4)))
    assert not asks_alike(soon, late)


def test_of_runs_that_establish_a_baseline_only_what_decides_counts() -> None:
    establishing = {"baseline": None, "establishes": True}
    assert asks_alike(cell_plan([SCORE, loss_gate()], **establishing), cell_plan([SCORE], **establishing))


# --- taking them over


def keep_machine(folder: Path, machine: Fingerprint = CPU) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MACHINE).write_text(machine.model_dump_json())


@pytest.fixture
def asked(tmp_path: Path) -> tuple[Path, StageEvidence]:
    """A cell's evidence with its answers, all right but two, and its finished stage."""
    evidence, plan = tmp_path / "first", cell()
    CANDIDATE.write(evidence / "accuracy" / "gsm8k", right_but([3, 4]))
    keep_machine(evidence / "accuracy")
    files = [describe(path, evidence) for path in sorted((evidence / "accuracy").rglob("*")) if path.is_file()]
    stage = StageEvidence(
        stage="accuracy",
        started_at=AT,
        duration_s=60.0,
        commands=[["lm_eval"]],
        tools={"lm-eval": "0.4.12"},
        files=files,
        measurements=parse("accuracy", plan, evidence),
    )
    return evidence, stage


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_taken_over_is_the_cells_own(asked: tuple[Path, StageEvidence], tmp_path: Path) -> None:
    first, theirs = asked
    ours = stage_folder(tmp_path / "second", "smoke").parent
    stage = taken_over("accuracy", cell(), ours, first, [theirs])
    assert stage == theirs.model_copy(update={"run_id": cell().run_id})
    assert contents(ours / "accuracy") == contents(first / "accuracy")
    assert [describe(ours / file.path, ours) for file in stage.files] == stage.files
    assert any(measured.value is not None for measured in stage.measurements)
    (first / "accuracy" / MACHINE).unlink()
    assert (ours / "accuracy" / MACHINE).is_file()


def test_the_measurements_are_those_of_the_cells_own_plan(asked: tuple[Path, StageEvidence], tmp_path: Path) -> None:
    first, theirs = asked
    # With more gates to be wrong about, each bound that can fail the release is surer.
    stage = taken_over("accuracy", cell(SCORE, TTFT, TPOT), tmp_path / "second", first, [theirs])
    by_filter = {each.filter: each for each in theirs.measurements if each.metric == "exact_match"}
    for measured in (each for each in stage.measurements if each.metric == "exact_match"):
        before = by_filter[measured.filter]
        assert measured.value == before.value
        assert measured.interval is not None
        assert before.interval is not None
        assert measured.interval.upper > before.interval.upper
    assert stage.model_copy(update={"measurements": theirs.measurements, "run_id": None}) == theirs


def test_of_another_machine_nothing_counts(asked: tuple[Path, StageEvidence], tmp_path: Path) -> None:
    first, theirs = asked
    elsewhere = cell(fingerprint=CPU.model_copy(update={"name": "Another CPU"}))
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
        taken_over("accuracy", cell(), tmp_path / "second", first, [theirs])
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


def test_what_cannot_be_seen_is_reported(folders: list[Path]) -> None:
    first, second = folders
    (first / SCRAPES).unlink()
    with pytest.raises(HostError, match="No such file or directory"):
        see_the_same(first, second)


def test_in_the_end_each_cell_has_a_copy_of_its_own(folders: list[Path]) -> None:
    first, second = folders
    see_the_same(first, second)
    append(first, "of both")
    mine, other = (serve_stage(SERVER, cell(), folder.parent, AT, 60.0, first) for folder in folders)
    append(second, "of the second")
    assert (lines(first), lines(second)) == ([["of both"]] * 2, [["of both", "of the second"]] * 2)
    assert not any(os.path.samefile(first / name, second / name) for name in WATCHED)
    assert [file.path for file in mine.files] == [file.path for file in other.files]
    assert {file.path for file in mine.files} == {f"serve/{path}" for path in contents(first)}
    assert contents(second).keys() == contents(first).keys()
    assert mine.files == other.files
    assert mine.measurements == other.measurements
    assert mine.commands == other.commands == [SERVER.command]


def test_the_start_is_reported_for_each_cell(folders: list[Path]) -> None:
    first, second = folders
    see_the_same(first, second)
    for folder in folders:
        stage = serve_stage(SERVER, cell(), folder.parent, AT, 60.0, first)
        (startup,) = (measured for measured in stage.measurements if measured.metric == "startup_s")
        assert (startup.value, startup.fingerprint) == (SERVER.startup_s, CPU.id)


def test_secrets_are_in_neither_copy(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody_at_all")
    first, second = folders
    see_the_same(first, second)
    append(first, "hf_of_nobody_at_all")
    for folder in folders:
        serve_stage(SERVER, cell(), folder.parent, AT, 60.0, first)
    assert all(b"hf_of_nobody_at_all" not in body for folder in folders for body in contents(folder).values())
