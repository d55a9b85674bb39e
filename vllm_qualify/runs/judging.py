"""Judge a run by its evidence, when it ends or again later."""

import math
import shutil
from collections.abc import Sequence
from datetime import UTC, date
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import ValidationError

from vllm_qualify.approval.errors import TamperedError
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.as_planned import beside_otherwise, drafted_otherwise, served_otherwise
from vllm_qualify.evidence.measurement import Measurement, StageEvidence, describe
from vllm_qualify.evidence.stages.stage import UNKEPT
from vllm_qualify.evidence.stages.table import judged_by
from vllm_qualify.evidence.starts import scored_by_lm_eval_alone, scored_otherwise
from vllm_qualify.judge.compare.enough import not_established
from vllm_qualify.judge.compare.gates import compare
from vllm_qualify.judge.compare.places import ANCHOR, ANCHORED, BASELINE, MEASURED
from vllm_qualify.judge.compare.speedup import speedup
from vllm_qualify.judge.expectations import judge
from vllm_qualify.judge.p_values import with_p_values
from vllm_qualify.judge.start_means import StartMeans, start_means
from vllm_qualify.judge.verdict import Judgement
from vllm_qualify.plan.cell import Anchor, Baseline, BetweenStarts, CellPlan
from vllm_qualify.plan.cells import new_run_id
from vllm_qualify.publish.store import MissingObjectError, Store
from vllm_qualify.recipe.metrics import StageName
from vllm_qualify.report.details import details_of
from vllm_qualify.report.model import Report, make_report
from vllm_qualify.runs.anchor import accuracy_settings
from vllm_qualify.runs.baseline import baseline_from
from vllm_qualify.runs.folder import Run, start_run
from vllm_qualify.runs.stored import check_own, fetch_evidence, trusted_report

# What is brought of another run as it is: its answers, those of its further starts, and its likelihoods.
BROUGHT = ("accuracy/", "starts/", "likelihood/")
_QUALIFY_AGAIN = "do not deploy it; qualify the cell again"


def judge_run(run: Run, stages: list[StageEvidence]) -> Report:
    """Judge the stages by the plan's gates; the report is saved in the run's folder."""
    return _make_run_report(run, run.plan, stages, None)


def rejudge(run: Run, plan: CellPlan) -> tuple[Report, Run]:
    """Parse the evidence of `run` again and judge it as `plan` says, in a new run with the same evidence.

    Raises HostError if an evidence file is gone, was changed or was added, or a stage is another run's.
    """
    for stage in run.stages():
        check_own(run, stage)
        _check_unchanged(run, stage)
    plan = plan.model_copy(update={"run_id": new_run_id()})
    fresh = start_run(plan)
    shutil.copytree(run.evidence, fresh.evidence)
    stages = [judged_by(stage, plan, fresh.evidence) for stage in run.stages()]
    for stage in stages:
        fresh.save_stage(stage)
    return _make_run_report(fresh, plan, stages, run.id), fresh


def check_judgement(store: Store, run: PublishedRun) -> list[str]:
    """Judge a published run again, from its evidence in the store and by its plan, and compare with what its report says.

    Replies are scored again where lm-eval's own filters and exact match do that alone. Returns the other tasks.

    What its manifest says of its starts must follow from the evidence too: later runs are judged by that. Raises TamperedError
    if a stage has no evidence, or the evidence is of another server than the plan's or gives other verdicts than the report,
    and StoreError if the evidence cannot be read or is not what the report says.
    """
    again, means, taken_as_scored = _judged_again(store, run, run.report.plan)
    problem = _find_difference(run.report.judgement, again)
    if problem or not _are_close(run.manifest.starts, means):
        mismatch = f"its evidence does not give its {f'verdicts: {problem}' if problem else 'means of each start'}"
        raise TamperedError(mismatch, _QUALIFY_AGAIN, store.locate(run.report_object.key))
    return taken_as_scored


def passes_with(store: Store, run: PublishedRun, between: list[BetweenStarts]) -> bool:
    """Whether a published run passes if `between` is all that is known of the differences between starts. Raises StoreError."""
    again, _, _ = _judged_again(store, run, run.report.plan.model_copy(update={"between": between}))
    return again.passed


def _judged_again(store: Store, run: PublishedRun, plan: CellPlan) -> tuple[Judgement, list[StartMeans], list[str]]:
    """The judgement by a plan, what each start showed, and the tasks that were not scored again. Raises StoreError."""
    report, place = run.report, store.locate(run.report_object.key)
    if other := [stage for stage in report.stages if stage.run_id != report.run_id]:
        raise TamperedError(f"its stage {other[0].stage} is of run {other[0].run_id}", _QUALIFY_AGAIN, place)
    with TemporaryDirectory(prefix="vllm-qualify-judge-") as folder:
        evidence = Path(folder)
        fetch_evidence(store, report, evidence)
        _check_brought(store, report, evidence)
        if problem := _served_otherwise(report, plan, evidence):
            raise TamperedError(f"its evidence is of another server: {problem}", _QUALIFY_AGAIN, place)
        if problem := scored_otherwise(plan, evidence):
            raise TamperedError(f"its evidence contradicts itself: {problem}", _QUALIFY_AGAIN, place)
        stages = [judged_by(stage, plan, evidence) for stage in report.stages]
        again, _ = _judge_stages(plan, evidence, stages, today=report.created_at.astimezone(UTC).date())
        means = start_means(plan, evidence, [row for stage in stages for row in stage.measurements])
        return again, means, scored_by_lm_eval_alone(plan, evidence)


def _served_otherwise(report: Report, plan: CellPlan, evidence: Path) -> str:
    """In what a server of the evidence is another one than the plan's, in words; empty if none is."""
    taken_over = {stage.stage: stage.taken_from is not None for stage in report.stages}
    problem = served_otherwise(plan.server, evidence, taken_over=taken_over.get("serve", False))
    problem = problem or beside_otherwise(plan, evidence, taken_over=taken_over.get("load", False))
    if problem or "speculation" not in taken_over:
        return problem
    return drafted_otherwise(plan, evidence, taken_over=taken_over["speculation"])


def _find_difference(reported: Judgement, again: Judgement) -> str:
    """In words, the first difference between what a report says and what its evidence gives; empty if there is none."""
    ours = {verdict.gate: verdict for verdict in again.gates}
    for verdict in reported.gates:
        own = ours.pop(verdict.gate, None)
        if own is None:
            return f"{verdict.gate.label} is no gate of the plan"
        if (verdict.verdict, verdict.waiver) != (own.verdict, own.waiver):
            return f"{verdict.gate.label} is said to be {verdict.counts_as}, and is {own.counts_as}: {own.because}"
        if not _is_close(verdict.value, own.value):
            return f"{verdict.gate.label} is said to be {verdict.value}, and is {own.value}"
    if ours:
        return f"{next(iter(ours)).label} is a gate of the plan, and was not judged"
    if reported.not_judged != again.not_judged:
        return "other gates are said not to be judged"
    return "" if reported.verdict == again.verdict else f"the verdict is said to be {reported.verdict}, and is {again.verdict}"


def _are_close(reported: Sequence[StartMeans], again: Sequence[StartMeans]) -> bool:
    ours, theirs = ({each.label: [*each.means, *each.noises, *each.repeats] for each in means} for means in (again, reported))
    return ours.keys() >= theirs.keys() and all(
        len(numbers) == len(ours[label]) and all(map(_is_close, numbers, ours[label])) for label, numbers in theirs.items()
    )


def _is_close(reported: float | None, again: float | None) -> bool:
    """Equal, but for the last digits: another version of a library may round otherwise."""
    return reported == again or (reported is not None and again is not None and math.isclose(reported, again, rel_tol=1e-9))


def _make_run_report(run: Run, plan: CellPlan, stages: list[StageEvidence], rejudged_from: str | None) -> Report:
    judgement, gained = _judge_stages(plan, run.evidence, stages, docs=run.data_docs)
    judgement = with_p_values(judgement, plan, run.evidence)
    report = make_report(plan, stages, judgement, rejudged_from, details_of(plan, run.evidence, gained))
    run.save_report(report)
    return report


def _judge_stages(
    plan: CellPlan, evidence: Path, stages: list[StageEvidence], *, today: date | None = None, docs: Path | None = None
) -> tuple[Judgement, list[Measurement]]:
    """The judgement, and the speedups by speculative decoding. Waivers count if they hold on `today`."""
    measured = [measurement for stage in stages for measurement in stage.measurements]
    gained = speedup(plan, evidence, measured)
    measured += [*compare(plan, evidence, measured), *gained]
    # Great Expectations accepts no slash in this name.
    name = plan.cell.id.replace("/", ".")
    lacking = not_established(plan, evidence, measured)
    # A run that cannot be a baseline is not judged by its comparison with another one.
    useless = {gate.label for gate, _ in lacking}
    useless |= _unproven_gates(plan, measured)
    gates = [*(gate for gate in plan.judged_gates if gate.label not in useless), *(gate for gate, _ in lacking)]
    measured = [row for row in measured if row.label not in useless] + [measurement for _, measurement in lacking]
    judgement = judge(gates, measured, name, tries=plan.unpassed, waivers=plan.waivers, today=today, docs=docs)
    left = [gate for gate in plan.gates if gate not in gates]
    return judgement.model_copy(update={"not_judged": left}), gained


def _unproven_gates(plan: CellPlan, measured: Sequence[Measurement]) -> set[str]:
    """The gates on paths that cannot be proven to have been taken, and need not be."""
    unproven = {row.metric for row in measured if row.invalid_because is not None and row.is_unproven}
    return {gate.label for gate in plan.gates if gate.metric in unproven and plan.need_not_be_proven(gate)}


def _check_unchanged(run: Run, stage: StageEvidence) -> None:
    known = {file.path for file in stage.files}
    found = sorted((run.evidence / stage.stage).rglob("*"))
    here = [path for path in found if path.is_file() and path.suffix != UNKEPT]
    if added := [path for path in here if path.relative_to(run.evidence).as_posix() not in known]:
        raise HostError("the stage did not measure this file", "take the file away, or qualify the cell again", str(added[0]))
    for file in stage.files:
        path = run.evidence / file.path
        if not path.is_file() or describe(path, run.evidence) != file:
            raise HostError("evidence is gone or was changed after it was measured", "qualify the cell again", str(path))


def _check_brought(store: Store, report: Report, evidence: Path) -> None:
    """Hold what a report has of its baseline and anchor against their own reports. `evidence` is the folder with its files.

    A run that the store does not have is not looked for: it may be only on the measured machine, or the store may be an export.
    A report that is held against such a run is never approved automatically. Raises TamperedError if a file, or what the plan
    says of the run, is not that run's, and StoreError if a report of the two cannot be read.
    """
    baseline, anchor = report.plan.baseline, report.plan.anchor
    for other, folder, stages in ((baseline, BASELINE, MEASURED), (anchor, f"{BASELINE}/{ANCHOR}", ANCHORED)):
        if other is None:
            continue
        try:
            theirs = trusted_report(store, other.run_id)
        except MissingObjectError:
            continue
        _check_files(report, theirs, f"{folder}/")
        for name, file in stages.items():
            _check_stage(theirs, name, evidence / folder / file)
        if not _is_as_told(other, theirs):
            raise _not_theirs("what the plan says", theirs)


def _is_as_told(other: Baseline | Anchor, theirs: Report) -> bool:
    if isinstance(other, Baseline):
        return other.folder is not None or other == baseline_from(theirs)
    return (other.cell, other.accuracy) == (theirs.plan.cell, accuracy_settings(theirs))


def _check_files(report: Report, theirs: Report, folder: str) -> None:
    known = {file.path: file.sha256 for file in theirs.files}
    for file in report.files:
        path = file.path.removeprefix(folder)
        if path.startswith(BROUGHT) and file.path.startswith(folder) and known.get(path) != file.sha256:
            raise _not_theirs(path, theirs)


def _check_stage(theirs: Report, name: StageName, path: Path) -> None:
    try:
        brought = StageEvidence.model_validate_json(path.read_bytes()) if path.is_file() else None
    except ValidationError as error:
        raise _not_theirs(path.name, theirs) from error
    if brought and brought not in [stage for stage in theirs.stages if stage.stage == name]:
        raise _not_theirs(path.name, theirs)


def _not_theirs(what: str, theirs: Report) -> TamperedError:
    problem = f"{what} is not that of run {theirs.run_id}, which it is held against"
    return TamperedError(problem, _QUALIFY_AGAIN, what)
