"""The baseline of a cell is the run that it is compared with: find it, check it against the plan, and fetch it.

A baseline is a run that was made to be one. It asked its questions as often as its noise requires, and passed its other gates.
All later runs are compared with it, not with the run before them, so small losses cannot add up. In a cell that has an approved
baseline a new one is held against that, unless it begins anew, and takes its place only when it is approved itself.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from vllm_qualify.approval.chain import chain_of
from vllm_qualify.approval.index import baseline_of, decided_against
from vllm_qualify.approval.published import read_run
from vllm_qualify.engine.environment import content_digest
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.launch import identity_of
from vllm_qualify.engine.launchers.registry import launcher_of
from vllm_qualify.engine.process import Tell
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import CallerError, HostError, QualifyError, StoreBusyError, StoreError
from vllm_qualify.evidence import likelihood
from vllm_qualify.evidence.measurement import EvidenceFile, describe
from vllm_qualify.evidence.thinking import REPLIES
from vllm_qualify.judge.compare import (
    MEASURED,
    is_answers,
    likelihood_differs,
    load_differs,
    task_differs,
    unusable_baseline,
)
from vllm_qualify.plan.cell import Baseline, CellPlan
from vllm_qualify.plan.choice import Selection
from vllm_qualify.publish.bundle import evidence_key
from vllm_qualify.publish.layout import check_layout
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.code import code_of_server
from vllm_qualify.recipe.environment import may_be_set
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.report.model import Report, load_report
from vllm_qualify.runs.anchor import ANEW, accuracy_settings, bring_anchor, with_anchor
from vllm_qualify.runs.folder import find_run
from vllm_qualify.runs.stored import trusted_report

PLACE = "--baseline"
# The baseline's scores of its own answers, and of the recipe's texts.
SCORES = tuple(f"{likelihood.STAGE}/{file}" for file in (likelihood.ANSWERS, likelihood.TEXTS))


class Against(Frozen):
    """What cells are compared with: by default each cell's newest baseline in the store; `run` names another one.

    `establish` makes the run itself the baseline: `always`, or only if there is no baseline (`none`). It is held against the
    approved one before it. With `in_turns` the baseline is served beside the candidate for the load, if this machine can do
    that. `anchor` names another anchor than the cell's; with `new_anchor` a run that becomes the baseline begins anew: it is
    held against neither, and becomes the anchor too.
    """

    run: str | None = None
    establish: Literal["never", "none", "always"] = "never"
    in_turns: bool = True
    anchor: str | None = None
    new_anchor: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.new_anchor and self.establish != "always":
            raise ValueError("a run becomes an anchor only as a baseline: `new_anchor` goes with `establish: always`")
        if self.new_anchor and self.anchor:
            raise ValueError("a run that becomes an anchor is held against none: leave `anchor` or `new_anchor` out")
        return self


def with_baseline(plan: CellPlan, store: Store, against: Against, tell: Tell) -> CellPlan:
    """The plan, with what its gates need from a baseline.

    Raises:
        CallerError: the gates need a baseline and there is none, or its measurements cannot be compared with this run's.
        StoreError: the store cannot be read.
    """
    if not plan.comparing:
        if against.run or against.establish == "always":
            tell(f"{plan.cell.id} has no gate against a baseline: it is not compared, and does not become one")
        return plan
    baseline = _find(plan, store, against)
    if baseline is None and against.establish == "never":
        raise _no_baseline(plan.cell.id, plan.baseline_cell, store)
    if baseline is None or against.establish == "always":
        plan = _establishing(plan, against, tell)
    return _held_against(plan, *baseline, store, against, tell) if baseline else plan


def _held_against(plan: CellPlan, report: Report, folder: Path | None, store: Store, against: Against, tell: Tell) -> CellPlan:
    _check_cell(plan, report)
    compared = plan.model_copy(update={"baseline": baseline_from(report, folder)})
    compared = with_anchor(compared, store, against.anchor, tell)
    _check_accuracy(compared)
    beside, why_not = _beside(compared, report.plan, tell) if against.in_turns else (None, "--no-in-turns")
    compared = compared.model_copy(update={"beside": beside, "warms_alike": beside is not None})
    if beside is None:
        compared = _with_history(compared, why_not)
    tell(f"{plan.cell.id} is compared with run {report.run_id} of {report.plan.cell.id}{_how(compared, why_not)}")
    return compared


def _establishing(plan: CellPlan, against: Against, tell: Tell) -> CellPlan:
    if plan.baseline_variant != plan.cell.variant:
        problem = f"{plan.cell.id} is compared with {plan.baseline_cell}, and cannot be a baseline itself"
        raise CallerError(problem, f"establish it with --variant {plan.baseline_variant}", "--establish-baseline")
    tell(f"{plan.cell.id} becomes a baseline. Where one is approved, it is held against that, and must be approved too")
    if against.new_anchor:
        tell(f"{plan.cell.id} begins anew, as its own anchor: it is held against no earlier run")
    tasks = [task.model_copy(update={"sequential": False}) for task in plan.accuracy]
    return plan.model_copy(update={"accuracy": tasks, "establishes": True, "new_anchor": against.new_anchor})


def _check_cell(plan: CellPlan, report: Report) -> None:
    ours, theirs = plan.cell, report.plan.cell
    if (ours.gpu_type, ours.profile) != (theirs.gpu_type, theirs.profile):
        problem = f"run {report.run_id} is of {theirs.id}, another GPU type or profile than {ours.id}"
        raise CallerError(problem, "choose its profile with --profile, or name another run", PLACE)


def _how(plan: CellPlan, why_not: str) -> str:
    if not _compares_load(plan):
        return ""
    if plan.load_alone:
        return f", but not its load: {plan.load_alone}"
    return ", its load in turns" if plan.beside else f", its load as it was then ({why_not})"


def check_early(selection: Selection, recipe: Recipe, store: Store, against: Against) -> None:
    """The checks of `with_baseline` that need no engine. Raises CallerError if a cell needs a baseline and has none."""
    if against.run:
        named_baseline(store, against.run)
    if against.run or against.establish != "never":
        return
    compared_with = selection.variant.baseline or selection.variant_name
    for name, profile in selection.profiles.items():
        cell, wanted = (f"{recipe.name}/{of}/{selection.gpu_type}/{name}" for of in (selection.variant_name, compared_with))
        needs_one = any(gate.is_against_baseline for gate in recipe.gates_of(profile))
        if needs_one and newest_baseline(store, wanted) is None:
            raise _no_baseline(cell, wanted, store)


def _no_baseline(cell: str, wanted: str, store: Store) -> CallerError:
    return CallerError(
        f"{cell} has gates against a baseline, and {store.url} has none of {wanted}",
        "name a run with --baseline, or let this one become the baseline with --establish-baseline "
        "(of a deployment: against.run and against.establish)",
        PLACE,
    )


ReportAndEvidence = tuple[Report, Path | None]


def _find(plan: CellPlan, store: Store, against: Against) -> ReportAndEvidence | None:
    if against.establish == "always":
        replaced = None if against.new_anchor else _approved(store, plan.baseline_cell)
        return (replaced, None) if replaced else None
    if against.run is not None:
        return named_baseline(store, against.run)
    newest = newest_baseline(store, plan.baseline_cell)
    return (newest, None) if newest else None


def _approved(store: Store, cell: str) -> Report | None:
    """The report of the cell's approved baseline. Raises StoreError, TamperedError."""
    check_layout(store)
    chain = chain_of(store, cell)
    return read_run(store, cell, chain[-1].run_id).report if chain else None


def named_baseline(store: Store, name: str) -> ReportAndEvidence:
    """The run that the caller named: of this machine, with its folder, or of the store. Raises CallerError, StoreError."""
    folder: Path | None = None
    try:
        folder = find_run(name).folder
        report = load_report(folder)
    except CallerError:
        folder, report = None, _stored(store, name)
    if not report.passed or not report.is_baseline:
        problem = f"run {report.run_id} {'did not pass' if not report.passed else 'is not a baseline'}"
        raise CallerError(problem, "name a run that passed and was made with --establish-baseline, not judged again", PLACE)
    if against := decided_against(store, report.plan.cell.id, report.run_id):
        raise CallerError(f"run {report.run_id} was {against}", "name another run", PLACE)
    approved = [manifest.run_id for manifest in chain_of(store, report.plan.cell.id)]
    if approved and report.run_id not in approved:
        problem = f"run {report.run_id} is not approved, and its cell has an approved baseline, run {approved[-1]}"
        raise CallerError(problem, "name an approved one, or approve this one first", PLACE)
    return report, folder


def _stored(store: Store, run_id: str) -> Report:
    try:
        return trusted_report(store, run_id)
    except StoreBusyError:
        raise
    except StoreError as error:
        problem = f"neither this machine nor the store has it: {error.problem}"
        raise CallerError(problem, "give the id of a published run, or a run's folder", PLACE) from error


def newest_baseline(store: Store, cell: str) -> Report | None:
    """The report of the baseline of a cell: see `baseline_of`. Raises StoreError, TamperedError."""
    check_layout(store)
    run_id = baseline_of(store, cell)
    return None if run_id is None else read_run(store, cell, run_id).report


def baseline_from(report: Report, folder: Path | None = None) -> Baseline:
    """What a plan says of its baseline."""
    return Baseline(
        run_id=report.run_id,
        folder=folder,
        cell=report.plan.cell,
        fingerprint=report.plan.fingerprint,
        client_version=report.plan.client_version,
        accuracy=accuracy_settings(report),
        load=report.plan.load,
        likelihood=report.plan.likelihood,
        served_model_name=report.plan.server.served_model_name,
    )


def _compares_load(plan: CellPlan) -> bool:
    return any(gate.against == "load" for gate in plan.gates)


def _check_accuracy(plan: CellPlan) -> None:
    for task in plan.accuracy:
        if problem := task_differs(plan, task):
            raise CallerError(problem, f"{ANEW}, or mend the recipe", PLACE)
    if problem := likelihood_differs(plan):
        raise CallerError(problem, f"{ANEW}, or mend the recipe", PLACE)


def _with_history(plan: CellPlan, why_not: str) -> CellPlan:
    """Report a difference before a GPU is used, not in a verdict hours later. A new baseline's load is then not compared."""
    problem = load_differs(plan) if _compares_load(plan) else None
    if problem and plan.establishes:
        return plan.model_copy(update={"load_alone": problem})
    if problem:
        remedy = "take the same client with --client-image, or make a new baseline with --establish-baseline"
        raise CallerError(f"{problem}, and the two cannot be measured in turns ({why_not})", remedy, PLACE)
    return plan


def _beside(plan: CellPlan, then: CellPlan, tell: Tell) -> tuple[ServerPlan | None, str]:
    """The baseline's server, to be started beside the candidate's, or why that is not possible."""
    if not _compares_load(plan):
        return None, "no gate compares loads"
    problem = _cannot_be_beside(plan, then)
    if problem:
        return None, problem
    server = then.server
    try:
        engine = server.engine
        if isinstance(engine, EngineImage):
            # By its digest: its tag may mean another image by now.
            engine = engine.model_copy(update={"tag": None})
        launcher_of(engine).pull(engine, tell)
        identity = identity_of(engine)
    except QualifyError as error:
        return None, f"its engine is not here: {error.problem}"
    if identity.digest != then.cell.release.engine.digest:
        return None, "its engine is not here any more"
    first = len(plan.server.gpus)
    gpus = plan.fingerprint.devices[first : first + len(server.gpus)]
    return server.model_copy(update={"engine": engine, "gpus": gpus}), ""


def _cannot_be_beside(plan: CellPlan, then: CellPlan) -> str | None:
    ours, theirs, release = plan.server, then.server, then.cell.release
    by_us, by_them = ((server.arguments, server.environment, server.draft_digest) for server in (ours, theirs))
    if (plan.cell.release, by_us) == (release, by_them):
        return "it is the same release with the same server"
    if unknown := [name for name in theirs.environment if not may_be_set(name)]:
        return f"it has variables that no recipe may set: {', '.join(unknown)}"
    if another := [line for line in code_of_server(theirs.arguments, theirs.environment) if line not in plan.code]:
        return f"it runs code that this recipe does not: {'; '.join(another)}"
    if ours.engine.launcher != theirs.engine.launcher:
        return "it is launched in another way"
    if then.fingerprint.gpu_type != plan.fingerprint.gpu_type:
        return f"it is for {then.fingerprint.gpu_type}"
    if theirs.gpus and len(plan.fingerprint.devices) < len(ours.gpus) + len(theirs.gpus):
        return "this machine has too few GPUs for both"
    if theirs.gpus and not launcher_of(theirs.engine).from_image and "CUDA_VISIBLE_DEVICES" in os.environ:
        return "CUDA_VISIBLE_DEVICES is set, and both would get its GPUs"
    if theirs.is_local and not _is_unchanged(Path(theirs.model), release.revision):
        return "its weights are not here any more"
    in_own_image = launcher_of(ours.engine).from_image and plan.client_image is None
    if in_own_image and release.engine.version != plan.client_version:
        return "each would have the load client of its own image"
    return None


def _is_unchanged(folder: Path, revision: str) -> bool:
    return folder.is_dir() and content_digest(folder) == revision


def bring(plan: CellPlan, store: Store, folder: Path) -> None:
    """Copy what the comparison needs of the baseline's run into `folder`: report, scores, and answers and load of all starts.

    The anchor's answers go into a folder of their own in it. lm-eval's samples of the first repetition are copied too: their
    texts are scored, and a report shows answers that flipped.

    Raises:
        StoreError: the store lacks a file, or a file is not what the report says.
    """
    report, read = _source(plan.compared_with, store)
    (folder / "report.json").write_text(report.model_dump_json(indent=2))
    for stage in report.stages:
        if stage.stage in MEASURED:
            (folder / MEASURED[stage.stage]).write_text(stage.model_dump_json(indent=2))
    for file in (file for file in report.files if _is_brought(file.path, plan)):
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(read(file))
        if describe(target, folder) != file:
            raise StoreError("the baseline's evidence is not what its report says", "do not trust this run", file.path)
    if plan.anchor:
        bring_anchor(plan, store, folder)
    if problem := unusable_baseline(plan, folder):
        raise CallerError(f"run {report.run_id} cannot be a baseline here: {problem}", f"make a new one, or {ANEW}", PLACE)


def _is_brought(path: str, plan: CellPlan) -> bool:
    if path in SCORES:
        return plan.likelihood is not None
    return any(_is_of_task(path, task.name) for task in plan.accuracy)


def _is_of_task(path: str, task: str) -> bool:
    words = rf"accuracy/{re.escape(task)}/r1-b\d+/(samples_[^/]*\.jsonl|{re.escape(REPLIES)})"
    return is_answers(path, task) or re.fullmatch(words, path) is not None


def _source(baseline: Baseline, store: Store) -> tuple[Report, Callable[[EvidenceFile], bytes]]:
    folder = baseline.folder
    if folder is None:
        return trusted_report(store, baseline.run_id), lambda file: store.get(evidence_key(file))
    return load_report(folder), lambda file: _here(folder / "evidence" / file.path)


def _here(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        problem = f"the baseline's evidence cannot be read: {error.strerror}"
        raise HostError(problem, "restore it, or name another run with --baseline", str(path)) from error
