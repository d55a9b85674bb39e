"""Paths that no recipe asked for: what cannot be proven is not judged, is said to be so, and holds no release up."""

from pathlib import Path

import pytest

from tests.builders.captured_runs import WITHOUT_BASELINE, captured_plan, captured_stage
from tests.builders.changed import changed
from vllm_qualify.approval.decision import check_passed, why_by_hand
from vllm_qualify.evidence.stages.paths import NOT_TAKEN
from vllm_qualify.recipe.gates import Minimum
from vllm_qualify.recipe.metrics import AWAKE, PATHS, path_metric
from vllm_qualify.recipe.paths import UNASKED, Paths
from vllm_qualify.report.head import facts
from vllm_qualify.report.model import Report
from vllm_qualify.runs.folder import start_run
from vllm_qualify.runs.judging import judge_run

NAMES = [path_metric(path) for path in PATHS if path != AWAKE]
WHY = "the server does not say the tokens of a prompt"


def judged_with(folder: Path, paths: Paths, files: dict[str, str] | None) -> Report:
    """The report of a run on whose server no path could be taken. Without `files` the run has no such stage."""
    plan = captured_plan(folder)
    gates = [*plan.gates, *(Minimum(metric=name, minimum=1.0, unit="bool") for name in NAMES)]
    run = start_run(changed(plan.model_copy(update={"paths": paths, "gates": gates}), "approval", automatic=True))
    stages = [captured_stage(run, stage) for stage in WITHOUT_BASELINE]
    return judge_run(run, stages if files is None else [*stages, captured_stage(run, "paths", files)])


@pytest.mark.usefixtures("home")
def test_what_nobody_asked_for_and_cannot_be_proven_holds_no_release_up(tmp_path: Path) -> None:
    report = judged_with(tmp_path, UNASKED, {NOT_TAKEN: f"{WHY}\n"})
    assert report.passed
    assert [gate.label for gate in report.judgement.not_judged] == NAMES
    assert why_by_hand(report) == ""
    check_passed(report, report.created_at.date())
    assert dict(facts(report))["Paths"] == f"not judged, since nothing proves them: {', '.join(NAMES)}"


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("paths", "files"), [(Paths(), {NOT_TAKEN: WHY}), (UNASKED, None)])
def test_what_was_asked_for_or_left_nothing_at_all_is_invalid(
    tmp_path: Path, paths: Paths, files: dict[str, str] | None
) -> None:
    report = judged_with(tmp_path, paths, files)
    assert report.judgement.verdict == "invalid"
    verdicts = {verdict.gate.label: verdict for verdict in report.judgement.gates}
    assert {verdicts[name].verdict for name in NAMES} == {"invalid"}
    assert (WHY in verdicts[NAMES[0]].because) == (files is not None)
