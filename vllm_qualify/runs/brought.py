"""Whether what a run brought of its baseline and its anchor is theirs: the host that was measured brought it."""

from pathlib import Path

from pydantic import ValidationError

from vllm_qualify.approval.errors import TamperedError
from vllm_qualify.evidence.measurement import StageEvidence
from vllm_qualify.judge.compare import ANCHOR, ANCHORED, BASELINE, MEASURED
from vllm_qualify.plan.cell import Anchor, Baseline
from vllm_qualify.publish.store import MissingObjectError, Store
from vllm_qualify.recipe.metrics import Stage
from vllm_qualify.report.model import Report
from vllm_qualify.runs.anchor import accuracy_settings
from vllm_qualify.runs.baseline import baseline_from
from vllm_qualify.runs.stored import trusted_report

# What is brought of another run as it is: its answers, those of its further starts, and its likelihoods.
FOLDERS = ("accuracy/", "starts/", "likelihood/")


def check_brought(store: Store, report: Report, evidence: Path) -> None:
    """Hold what a report has of its baseline and anchor against their own reports. `evidence` is the folder with its files.

    A run that the store does not have is not looked for: it may be only on the measured machine, or the store may be an export.
    A report that is held against such a run is never approved automatically.

    Raises:
        TamperedError: a file, or what the plan says of the run, is not that run's.
        StoreError: a report of the two cannot be read.
    """
    plan = report.plan
    if plan.baseline and (theirs := _report(store, plan.baseline)):
        _check_files(report, theirs, f"{BASELINE}/")
        for name, file in MEASURED.items():
            _check_stage(theirs, name, evidence / BASELINE / file)
        if plan.baseline.folder is None and plan.baseline != baseline_from(theirs):
            raise _not_theirs("what the plan says", theirs)
    if plan.anchor and (theirs := _report(store, plan.anchor)):
        _check_files(report, theirs, f"{BASELINE}/{ANCHOR}/")
        for name, file in ANCHORED.items():
            _check_stage(theirs, name, evidence / BASELINE / ANCHOR / file)
        if (plan.anchor.cell, plan.anchor.accuracy) != (theirs.plan.cell, accuracy_settings(theirs)):
            raise _not_theirs("what the plan says", theirs)


def _report(store: Store, other: Baseline | Anchor) -> Report | None:
    try:
        return trusted_report(store, other.run_id)
    except MissingObjectError:
        return None


def _check_files(report: Report, theirs: Report, folder: str) -> None:
    known = {file.path: file.sha256 for file in theirs.files}
    for file in report.files:
        path = file.path.removeprefix(folder)
        if path.startswith(FOLDERS) and file.path.startswith(folder) and known.get(path) != file.sha256:
            raise _not_theirs(path, theirs)


def _check_stage(theirs: Report, name: Stage, path: Path) -> None:
    if not path.is_file():
        return
    try:
        brought = StageEvidence.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise _not_theirs(path.name, theirs) from error
    if brought not in [stage for stage in theirs.stages if stage.stage == name]:
        raise _not_theirs(path.name, theirs)


def _not_theirs(what: str, theirs: Report) -> TamperedError:
    problem = f"{what} is not that of run {theirs.run_id}, which it is held against"
    return TamperedError(problem, "do not deploy it; qualify the cell again", what)
