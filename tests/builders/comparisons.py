"""A cell beside its baseline: its plan and gates, and what both left, in files as the tools leave them."""

import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.builders.loads import CAPTURED as CAPTURED_LOAD
from tests.builders.loads import SETTINGS as SLO_SETTINGS
from tests.builders.loads import load_server, scale
from tests.lm_eval_files import STRICT, Answering, Asked
from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.accuracy.answers import Answered
from vllm_qualify.evidence.accuracy.blocks import BLOCKS
from vllm_qualify.evidence.load import figures
from vllm_qualify.evidence.measurement import EvidenceFile, Interval, Measurement, StageEvidence
from vllm_qualify.evidence.sequential import levels_of
from vllm_qualify.evidence.stages.table import parse_unfinished
from vllm_qualify.judge.compare.gates import compare
from vllm_qualify.judge.compare.places import LOAD_STAGE, answers_path
from vllm_qualify.plan.cell import Baseline, Cell, CellPlan, Release, TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy, Smoke
from vllm_qualify.recipe.gates import Gate, gate_of
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.metrics import StageName
from vllm_qualify.recipe.serving import ServerArguments

RUN = "20260301T080000Z-0a1b2c"
CPU = Fingerprint(gpu_type="cpu", name="Some CPU", count=2, memory_mib=8192)
SETTINGS = Accuracy(num_questions=40, num_fewshot=1, max_gen_toks=48)
AVAILABLE, LEAST = 50, 3
LOAD = SLO_SETTINGS.model_copy(update={"slo": None})
DRAFTED: ServerArguments = {"speculative-config": {"method": "ngram", "num_speculative_tokens": 3}}
SCORE = gate_of(metric="exact_match", task="gsm8k", filter=STRICT, minimum=0.5, unit="fraction")


def task_plan(settings: Accuracy = SETTINGS, **changes: Any) -> TaskPlan:
    """Of a candidate: its looks are after each of 4 blocks."""
    about: dict[str, Any] = {"num_concurrent": 4, "repetitions": settings.most_repetitions, "sequential": True}
    return TaskPlan(settings=settings, **(about | changes))


def baseline_task(settings: Accuracy = SETTINGS, repetitions: int = LEAST) -> TaskPlan:
    return task_plan(settings, repetitions=repetitions, sequential=False)


CANDIDATE, BASELINE = Asked(task_plan(), AVAILABLE), Asked(baseline_task(), AVAILABLE)
QUESTIONS = sorted(question for step in BASELINE.steps if step.repetition == 1 for question in step.questions)


def server_plan(**arguments: Any) -> ServerPlan:
    return load_server(arguments)


def cell_plan(gates: Sequence[Gate], **changes: Any) -> CellPlan:
    """A cell with a baseline that is like it in all that is compared."""
    engine = EngineIdentity(version="0.32.0", digest=f"sha256:{'0' * 64}", python="3.12.1", packages={"vllm": "0.32.0"})
    release = Release(model="org/model", revision="0123abc", engine=engine)
    cell = Cell(recipe="reference", release=release, variant="bf16", gpu_type="cpu", profile="balanced")
    about: dict[str, Any] = {"accuracy": [task_plan()], "load": LOAD, "server": server_plan()} | changes
    settings = [task.settings for task in about["accuracy"]]
    before = Baseline(run_id=RUN, cell=cell, fingerprint=CPU, client_version="0.32.0", accuracy=settings, load=about["load"])
    return CellPlan.model_validate(
        {
            "run_id": "20260302T080000Z-3d4e5f",
            "cell": cell,
            "fingerprint": CPU,
            "smoke": Smoke(prompt="The capital of France is"),
            "smoke_golden": None,
            "gates": list(gates),
            "baseline_variant": "bf16",
            "baseline": before,
            "establishes": about.get("baseline", before) is None,
            **about,
        }
    )


def against(plan: CellPlan, **changes: Any) -> CellPlan:
    """The plan with a baseline that differs from it."""
    assert plan.baseline is not None
    return plan.model_copy(update={"baseline": plan.baseline.model_copy(update=changes)})


def loss_gate(max_loss: float = 0.05, name_filter: str = STRICT, task: str = "gsm8k", metric: str = "exact_match") -> Gate:
    return gate_of(metric=metric, task=task, filter=name_filter, max_loss=max_loss, unit="fraction")


def keep_baseline(evidence: Path, answering: Answering, asked: Asked = BASELINE) -> Answered:
    """The baseline's answers, read from its own files and brought to where a comparison finds them."""
    raw = evidence.parent / f"baseline-{asked.task.name}"
    asked.write(raw, answering)
    return asked.keep_answers(raw, evidence / "baseline" / answers_path(asked.task.name))


def ask(evidence: Path, answering: Answering, steps: int = BLOCKS, asked: Asked = CANDIDATE) -> Path:
    """The candidate's answers to the first steps."""
    folder = evidence / "accuracy" / asked.task.name
    asked.write(folder, answering, asked.steps[:steps])
    return folder


def all_of(plan: CellPlan, evidence: Path, gates: Sequence[Gate] | None = None) -> list[Measurement]:
    return compare(plan, evidence, parse_unfinished("accuracy", plan, evidence), gates)


def one(plan: CellPlan, evidence: Path, stage: StageName = "accuracy") -> Measurement:
    (row,) = compare(plan, evidence, parse_unfinished(stage, plan, evidence))
    assert row.against == RUN
    return row


def interval_of(row: Measurement) -> Interval:
    assert row.interval is not None
    return row.interval


def width(row: Measurement) -> float:
    return interval_of(row).upper - interval_of(row).lower


def reason(row: Measurement) -> str:
    assert row.value is None
    assert row.interval is None
    return row.invalid_because or ""


def worsening_gate(metric: str = "ttft_p50_ms", max_worsening: float = 0.05) -> Gate:
    return gate_of(metric=metric, max_worsening=max_worsening, unit="fraction")


def captured_load(folder: Path, slower: float = 1.0) -> Path:
    """The captured repeats, all of them so many times slower."""
    shutil.copytree(CAPTURED_LOAD, folder)
    for repeat in (1, 2):
        scale(folder, repeat, slower)
    return folder


def lone_cell(*gates: Gate, **changes: Any) -> CellPlan:
    """Without a baseline, which would be another one for each profile."""
    return cell_plan(gates or (SCORE,), **{"baseline": None, "establishes": False} | changes)


def in_turns(gates: Sequence[Gate], **changes: Any) -> CellPlan:
    return cell_plan(gates, beside=server_plan(), **changes)


def keep_history(evidence: Path, folder: Path, settings: Load = LOAD, gpus: int = 0) -> None:
    """What was measured in a folder at the baseline's own time, as a run leaves it."""
    stage = StageEvidence(
        stage="load",
        started_at=datetime(2026, 3, 1, 8, tzinfo=UTC),
        duration_s=8.0,
        files=[EvidenceFile(path="load/bench-1.json", sha256="0" * 64, size=1)],
        measurements=figures.parse_load(folder, settings, levels_of([]), load_server(gpus=range(gpus))),
        run_id=RUN,
    )
    (evidence / "baseline").mkdir(parents=True, exist_ok=True)
    (evidence / "baseline" / LOAD_STAGE).write_text(stage.model_dump_json(indent=2))


def parse_loads(plan: CellPlan, evidence: Path) -> list[Measurement]:
    """What the load measured, and what the further starts did."""
    return [*parse_unfinished("load", plan, evidence), *parse_unfinished("starts", plan, evidence)]
