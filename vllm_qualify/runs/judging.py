"""Judge a run by its evidence, when it ends or again later."""

import math
import shutil
from collections.abc import Iterable, Sequence
from datetime import UTC, date
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_qualify.approval.errors import TamperedError
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.as_planned import drafted_otherwise, served_otherwise
from vllm_qualify.evidence.measurement import Measurement, StageEvidence, describe
from vllm_qualify.evidence.stages import UNKEPT, judged_by
from vllm_qualify.judge.compare import compare, not_established, speedup
from vllm_qualify.judge.expectations import judge
from vllm_qualify.judge.p_values import with_p_values
from vllm_qualify.judge.start_means import StartMeans, start_means
from vllm_qualify.judge.verdict import Judgement
from vllm_qualify.plan.cell import BetweenStarts, CellPlan
from vllm_qualify.plan.cells import new_run_id
from vllm_qualify.publish.store import Store
from vllm_qualify.report.details import details_of
from vllm_qualify.report.model import Report, make_report
from vllm_qualify.runs.brought import check_brought
from vllm_qualify.runs.folder import Run, start_run
from vllm_qualify.runs.stored import check_own, fetch_evidence

_QUALIFY_AGAIN = "do not deploy it; qualify the cell again"


def judge_run(run: Run, stages: list[StageEvidence]) -> Report:
    """Judge the stages by the plan's gates; the report is saved in the run's folder."""
    return _report(run, run.plan, stages, None)


def rejudge(run: Run, plan: CellPlan) -> tuple[Report, Run]:
    """Parse the evidence of `run` again and judge it as `plan` says, in a new run with the same evidence.

    Raises:
        HostError: an evidence file is gone, was changed after it was measured or was added, or a stage is of another run.
    """
    for stage in run.stages():
        check_own(run, stage)
        _check_unchanged(run, stage)
    plan = plan.model_copy(update={"run_id": new_run_id()})
    fresh = start_run(plan)
    shutil.copytree(run.evidence, fresh.evidence)
    stages = _parsed_again(run.stages(), plan, fresh.evidence)
    for stage in stages:
        fresh.save_stage(stage)
    return _report(fresh, plan, stages, run.id), fresh


def check_judgement(store: Store, run: PublishedRun) -> None:
    """Judge a published run again, from its evidence in the store and by its plan, and compare with what its report says.

    What its manifest says of its starts must follow from the evidence too: later runs are judged by that.

    Raises:
        TamperedError: a stage of the plan has no evidence, the evidence is of another server than the plan's, or it gives
            other verdicts than the report.
        StoreError: the evidence cannot be read, or is not what the report says.
    """
    place = store.locate(run.report_object.key)
    again, means = _judged_again(store, run, run.report.plan)
    problem = _difference(run.report.judgement, again)
    if problem or not _are_close(run.manifest.starts, means):
        mismatch = f"its evidence does not give its {f'verdicts: {problem}' if problem else 'means of each start'}"
        raise TamperedError(mismatch, _QUALIFY_AGAIN, place)


def passes_with(store: Store, run: PublishedRun, between: list[BetweenStarts]) -> bool:
    """Whether a published run passes if `between` is all that is known of the differences between starts. Raises StoreError."""
    again, _ = _judged_again(store, run, run.report.plan.model_copy(update={"between": between}))
    return again.passed


def _judged_again(store: Store, run: PublishedRun, plan: CellPlan) -> tuple[Judgement, list[StartMeans]]:
    """The judgement by a plan, and what each start showed. Raises StoreError."""
    report = run.report
    if other := [stage for stage in report.stages if stage.run_id not in (None, report.run_id)]:
        problem = f"its stage {other[0].stage} is of run {other[0].run_id}"
        raise TamperedError(problem, _QUALIFY_AGAIN, store.locate(run.report_object.key))
    with TemporaryDirectory(prefix="vllm-qualify-judge-") as folder:
        evidence = Path(folder)
        fetch_evidence(store, report, evidence)
        check_brought(store, report, evidence)
        if problem := _served_otherwise(report, plan, evidence):
            place = store.locate(run.report_object.key)
            raise TamperedError(f"its evidence is of another server: {problem}", _QUALIFY_AGAIN, place)
        stages = _parsed_again(report.stages, plan, evidence)
        again, _ = _judged(plan, evidence, stages, today=report.created_at.astimezone(UTC).date())
        return again, start_means(plan, evidence, [row for stage in stages for row in stage.measurements])


def _served_otherwise(report: Report, plan: CellPlan, evidence: Path) -> str:
    """In what a server of the evidence is another one than the plan's, in words; empty if none is."""
    taken_over = {stage.stage: stage.taken_from is not None for stage in report.stages}
    problem = served_otherwise(plan.server, evidence, taken_over=taken_over.get("serve", False))
    if problem or "speculation" not in taken_over:
        return problem
    return drafted_otherwise(plan, evidence, taken_over=taken_over["speculation"])


def _parsed_again(stages: Iterable[StageEvidence], plan: CellPlan, evidence: Path) -> list[StageEvidence]:
    return [judged_by(stage, plan, evidence) for stage in stages]


def _difference(reported: Judgement, again: Judgement) -> str:
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
    """As `_is_close`. Older manifests say nothing of starts."""
    if not reported:
        return True
    ours, theirs = ({each.label: [*each.means, *each.noises, *each.repeats] for each in means} for means in (again, reported))
    return ours.keys() >= theirs.keys() and all(
        len(numbers) == len(ours[label]) and all(map(_is_close, numbers, ours[label])) for label, numbers in theirs.items()
    )


def _is_close(reported: float | None, again: float | None) -> bool:
    """Equal, but for the last digits: another version of a library may round otherwise."""
    return reported == again or (reported is not None and again is not None and math.isclose(reported, again, rel_tol=1e-9))


def _report(run: Run, plan: CellPlan, stages: list[StageEvidence], rejudged_from: str | None) -> Report:
    judgement, gained = _judged(plan, run.evidence, stages, docs=run.data_docs)
    judgement = with_p_values(judgement, plan, run.evidence)
    report = make_report(plan, stages, judgement, rejudged_from, details_of(plan, run.evidence, gained))
    run.save_report(report)
    return report


def _judged(
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
    gates = [*(gate for gate in plan.judged if gate.label not in useless), *(gate for gate, _ in lacking)]
    measured = [row for row in measured if row.label not in useless] + [measurement for _, measurement in lacking]
    judgement = judge(gates, measured, name, tries=plan.unpassed, waivers=plan.waivers, today=today, docs=docs)
    left = [gate for gate in plan.gates if gate not in gates]
    return judgement.model_copy(update={"not_judged": left}), gained


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
