"""Releases of one cell that follow each other, each with answers of its own, planned, judged and published by the product."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.approval.builder import ADA, VALID_DAYS
from tests.builders.plans import only, plans_of
from tests.fakes.vllm import make_engine, says_what_it_serves
from tests.lm_eval_files import STRICT, Asked, right_but
from tests.recipes import Document, reference
from vllm_qualify.approval.actions import approve
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import CONFIG_FILE, LOG, config_text
from vllm_qualify.evidence.measurement import Measurement, StageEvidence, describe
from vllm_qualify.evidence.stages import baseline
from vllm_qualify.evidence.stages.stage import MACHINE
from vllm_qualify.evidence.stages.table import parse
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.request import Against
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.metrics import StageName
from vllm_qualify.report.model import Report
from vllm_qualify.runs.baseline import copy_baseline, with_baseline
from vllm_qualify.runs.folder import Run, start_run
from vllm_qualify.runs.judging import judge_run
from vllm_qualify.runs.publishing import publish_run
from vllm_qualify.runs.tries import with_tries

CELL = "reference/bf16/cpu/balanced"
ABOUT = {"metric": "exact_match", "filter": STRICT, "unit": "fraction"}
LEAST = ABOUT | {"minimum": 0.5}
LOSS, SINCE = ABOUT | {"max_loss": 0.0075}, ABOUT | {"max_loss_since_anchor": 0.015}
# Margins of 20 points, and few questions.
WIDE, FEW = (LOSS | {"max_loss": 0.2}, SINCE | {"max_loss_since_anchor": 0.2}), {"questions": 40, "repetitions": 4}
OWN = f"exact_match (gsm8k, {STRICT})"
BASELINE, ANCHOR = (f"{OWN} against the {other}" for other in ("baseline", "anchor"))


def document(folder: Path, *gates: Document, questions: int = 1000, repetitions: int = 6) -> Document:
    """The reference recipe with weights of the test's own, so many questions, and these gates against other runs."""
    document = reference()
    for name in document["variants"]:
        weights = folder / name
        weights.mkdir(parents=True)
        (weights / "config.json").write_text(name)
        document["variants"][name]["model"] = str(weights)
    document["accuracy"] = [{"task": "gsm8k", "num_questions": questions, "num_fewshot": 1, "most_repetitions": repetitions}]
    # Its evidence has one start, and no likelihoods.
    del document["likelihood"]
    document["gpu_types"]["cpu"]["starts"] = 1
    compared = {"max_loss", "max_nll_increase"}
    kept = [gate for gate in document["gates"] if not compared & gate.keys() and gate["metric"] != "exact_match"]
    document["gates"] = [*kept, LEAST, *gates]
    return document


@dataclass
class Cell:
    """A cell of a recipe in a store, with a key to approve with."""

    store: Store
    key: PrivateKey
    folder: Path
    recipe: Document

    def plan(self, number: int, *, messages: list[str] | None = None, **against: Any) -> CellPlan:
        """The plan of a release: of the gates, those on the score, since nothing else is measured."""
        python = self.folder / "engine" / "bin" / "python"
        if not python.exists():
            make_engine(self.folder / "engine")
        plan = only(plans_of(self.recipe, EngineEnvironment(python=python)))
        gates = [gate for gate in plan.gates if gate.metric == "exact_match"]
        plan = plan.model_copy(update={"run_id": run_id(number), "gates": gates})
        messages = [] if messages is None else messages
        return with_tries(with_baseline(plan, self.store, Against(**against), messages.append), self.store, messages.append)

    def measured(self, plan: CellPlan, lost: int, *, version: float = 3.0, steps: int | None = None) -> Run:
        """A run in which so many questions are always wrong, and all others right; of the first steps, or of all."""
        run = start_run(plan)
        if plan.baseline:
            run.save_stage(baseline.BASELINE.bring(plan, run.evidence, lambda folder: copy_baseline(plan, self.store, folder)))
        (task,) = plan.accuracy
        asked = Asked(task, task.settings.num_questions, version=version)
        folder = run.evidence / "accuracy" / task.name
        asked.write(folder, right_but(range(lost)), asked.steps[:steps])
        (folder.parent / MACHINE).write_text(plan.fingerprint.model_dump_json())
        asked.keep_answers(folder, folder / "answers.jsonl")
        others: tuple[StageName, ...] = ("serve", "smoke", "contract", "load")
        for stage in others:
            (run.evidence / stage).mkdir()
            (run.evidence / stage / "note.txt").write_text("nothing of it is judged here\n")
        serving(plan, run.evidence / "serve")
        for stage in ("accuracy", *others):
            run.save_stage(evidence_of(run, stage))
        return run

    def judged(self, plan: CellPlan, lost: int, **how: Any) -> tuple[Report, Run]:
        run = self.measured(plan, lost, **how)
        return judge_run(run, run.stages()), run

    def published(self, number: int, lost: int, *, version: float = 3.0, **against: Any) -> PublishedRun:
        report, run = self.judged(self.plan(number, **against), lost, version=version)
        publish_run(report, run, self.store)
        return read_run(self.store, CELL, report.run_id)

    def approve(self, run: PublishedRun) -> None:
        approve(self.store, run, ADA, VALID_DAYS, self.key, datetime.now(UTC))

    def baseline(self, number: int, lost: int, **against: Any) -> PublishedRun:
        """A run that was made to be a baseline, and approved."""
        run = self.published(number, lost, establish="always", **against)
        self.approve(run)
        return run


def serving(plan: CellPlan, folder: Path) -> None:
    """What a server of the plan leaves: its config file, and the line of its log in which it describes itself."""
    text = config_text(plan.server, 8000)
    (folder / CONFIG_FILE).write_text(text)
    (folder / LOG).write_text(f"{says_what_it_serves(YAML(typ='safe').load(text))}\n")


def evidence_of(run: Run, stage: StageName, measured: list[Measurement] | None = None) -> StageEvidence:
    """A finished stage, with what was measured, or else with what is parsed of its files."""
    files = sorted(path for path in (run.evidence / stage).rglob("*") if path.is_file())
    return StageEvidence(
        stage=stage,
        started_at=datetime(2026, 3, 1, 8, tzinfo=UTC),
        duration_s=8.0,
        files=[describe(path, run.evidence) for path in files],
        measurements=parse(stage, run.plan, run.evidence) if measured is None else measured,
        run_id=run.plan.run_id,
    )


def run_id(number: int) -> str:
    return f"202603{number:02}T080000Z-0a1b2c"


def verdicts(report: Report) -> dict[str, str]:
    return {verdict.gate.label: verdict.verdict for verdict in report.judgement.gates}


def without(plan: CellPlan, label: str) -> CellPlan:
    return plan.model_copy(update={"gates": [gate for gate in plan.gates if gate.label != label]})
