"""Judge a run by its evidence, when it ends or again later."""

import shutil

from vllm_qualify.errors import HostError
from vllm_qualify.evidence.measurement import StageEvidence, describe
from vllm_qualify.evidence.stages import parse
from vllm_qualify.judge.compare import compare, not_established, speedup
from vllm_qualify.judge.expectations import judge
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import new_run_id
from vllm_qualify.report.details import details_of
from vllm_qualify.report.model import Report, make_report
from vllm_qualify.runs.folder import Run, start_run


def judge_run(run: Run, stages: list[StageEvidence]) -> Report:
    """Judge the stages by the plan's gates; the report is saved in the run's folder."""
    return _report(run, run.plan, stages, None)


def rejudge(run: Run, plan: CellPlan) -> tuple[Report, Run]:
    """Parse the evidence of `run` again and judge it as `plan` says, in a new run with the same evidence.

    Raises:
        HostError: an evidence file is gone, or was changed after it was measured.
    """
    for stage in run.stages():
        _check_unchanged(run, stage)
    plan = plan.model_copy(update={"run_id": new_run_id()})
    fresh = start_run(plan)
    shutil.copytree(run.evidence, fresh.evidence)
    stages = [stage.model_copy(update={"measurements": parse(stage.stage, plan, fresh.evidence)}) for stage in run.stages()]
    for stage in stages:
        fresh.save_stage(stage)
    return _report(fresh, plan, stages, run.id), fresh


def _report(run: Run, plan: CellPlan, stages: list[StageEvidence], rejudged_from: str | None) -> Report:
    measured = [measurement for stage in stages for measurement in stage.measurements]
    gained = speedup(plan, run.evidence, measured)
    measured += [*compare(plan, run.evidence, measured), *gained]
    # Great Expectations accepts no slash in this name.
    name = plan.cell.id.replace("/", ".")
    lacking = not_established(plan, run.evidence, measured)
    gates = [*plan.judged, *(gate for gate, _ in lacking)]
    measured += [measurement for _, measurement in lacking]
    judgement = judge(gates, measured, name, waivers=plan.waivers, docs=run.data_docs)
    left = [gate for gate in plan.gates if gate not in gates]
    judgement = judgement.model_copy(update={"not_judged": left})
    report = make_report(plan, stages, judgement, rejudged_from, details_of(plan, run.evidence, gained))
    run.save_report(report)
    return report


def _check_unchanged(run: Run, stage: StageEvidence) -> None:
    for file in stage.files:
        path = run.evidence / file.path
        if not path.is_file() or describe(path, run.evidence) != file:
            raise HostError("evidence is gone or was changed after it was measured", "qualify the cell again", str(path))
