"""The baseline of a cell is the run that it is compared with: find it, check it against the plan, and fetch it.

A baseline is a run that was made to be one. It asked its questions as often as its noise requires, and passed its other gates.
All later runs are compared with it, not with the run before them, so small losses cannot add up. In a cell that has an approved
baseline a new one is held against that, unless it begins anew, and takes its place only when it is approved itself.
Such a run that was judged again is the baseline of runs with the same gates alone: see docs/design/0070.
"""

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from vllm_qualify.approval.index import baseline_of, chain_of, decided_against
from vllm_qualify.approval.published import read_run
from vllm_qualify.engine.environment import content_digest
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.launchers.registry import launcher_of
from vllm_qualify.engine.process import Tell
from vllm_qualify.engine.provision import identity_of
from vllm_qualify.engine.server import Engine, ServerPlan
from vllm_qualify.errors import CallerError, HostError, QualifyError, StoreBusyError, StoreError
from vllm_qualify.evidence import likelihood
from vllm_qualify.evidence.accuracy.thinking import REPLIES
from vllm_qualify.evidence.measurement import EvidenceFile
from vllm_qualify.evidence.stages.stage import server_inputs
from vllm_qualify.judge.compare.enough import unusable_baseline
from vllm_qualify.judge.compare.places import MEASURED, is_answers
from vllm_qualify.judge.compare.settings import likelihood_differs, load_differs, task_differs
from vllm_qualify.plan.cell import Baseline, CellPlan
from vllm_qualify.plan.choice import Selection
from vllm_qualify.plan.gates import judges_alike
from vllm_qualify.plan.request import Against
from vllm_qualify.publish.bundle import read_evidence, write_evidence
from vllm_qualify.publish.layout import check_layout
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.code import code_of_server
from vllm_qualify.recipe.environment import may_be_set
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.report.model import Report, load_report
from vllm_qualify.runs.anchor import ANEW, accuracy_settings, bring_anchor, with_anchor
from vllm_qualify.runs.folder import find_run
from vllm_qualify.runs.stored import trusted_report

PLACE = "--baseline"
# The baseline's scores of its own answers, and of the recipe's texts.
SCORES = tuple(f"{likelihood.STAGE}/{file}" for file in (likelihood.ANSWERS, likelihood.TEXTS))


def with_baseline(plan: CellPlan, store: Store, against: Against, tell: Tell) -> CellPlan:
    """The plan, with what its gates need from a baseline. Raises CallerError if it fits none, and StoreError."""
    if not plan.gates_against_baseline:
        if against.run or against.establish == "always":
            tell(f"{plan.cell.id} has no gate against a baseline: it is not compared, and does not become one")
        return plan
    baseline = _find_baseline(plan, store, against)
    if baseline is None and against.establish == "never":
        raise _no_baseline(plan.cell.id, plan.baseline_cell, store, with_gates=True)
    if baseline is None or against.establish == "always":
        plan = _become_baseline(plan, against, tell)
    return _held_against(plan, *baseline, store, against, tell) if baseline else plan


def _held_against(plan: CellPlan, report: Report, folder: Path | None, store: Store, against: Against, tell: Tell) -> CellPlan:
    ours, theirs = plan.cell, report.plan.cell
    if (ours.gpu_type, ours.profile) != (theirs.gpu_type, theirs.profile):
        problem = f"run {report.run_id} is of {theirs.id}, another GPU type or profile than {ours.id}"
        raise CallerError(problem, "choose its profile with --profile, or name another run", PLACE)
    compared = plan.model_copy(update={"baseline": baseline_from(report, folder)})
    compared = with_anchor(compared, store, against.anchor, tell)
    _check_accuracy(compared)
    beside, why_not = _plan_beside(compared, report.plan, tell) if against.in_turns else (None, "--no-in-turns")
    compared = compared.model_copy(update={"beside": beside, "warms_alike": beside is not None})
    if beside is None:
        compared = _with_history(compared, why_not)
    if not _compares_load(compared):
        loads = ""
    elif compared.load_alone:
        loads = f", but not its load: {compared.load_alone}"
    else:
        loads = ", its load in turns" if beside else f", its load as it was then ({why_not})"
    tell(f"{ours.id} is compared with run {report.run_id} of {theirs.id}{loads}")
    return compared


def _become_baseline(plan: CellPlan, against: Against, tell: Tell) -> CellPlan:
    if plan.baseline_variant != plan.cell.variant:
        problem = f"{plan.cell.id} is compared with {plan.baseline_cell}, and cannot be a baseline itself"
        raise CallerError(problem, f"establish it with --variant {plan.baseline_variant}", "--establish-baseline")
    tell(f"{plan.cell.id} becomes a baseline. Where one is approved, it is held against that, and must be approved too")
    if against.new_anchor:
        tell(f"{plan.cell.id} begins anew, as its own anchor: it is held against no earlier run")
    tasks = [task.model_copy(update={"sequential": False}) for task in plan.accuracy]
    return plan.model_copy(update={"accuracy": tasks, "establishes": True, "new_anchor": against.new_anchor})


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
        # By which gates a run was judged again is looked at when there is a plan.
        if needs_one and newest_baseline(store, wanted, lambda _: True) is None:
            raise _no_baseline(cell, wanted, store)


def _no_baseline(cell: str, wanted: str, store: Store, *, with_gates: bool = False) -> CallerError:
    if with_gates and (judged_again := baseline_of(store, wanted, lambda _: True)):
        return _other_gates(judged_again, cell)
    ways = "name a run with --baseline, or let this one become the baseline with --establish-baseline"
    remedy = f"{ways} (of a deployment: against.run and against.establish)"
    return CallerError(f"{cell} has gates against a baseline, and {store.url} has none of {wanted}", remedy, PLACE)


def _other_gates(run_id: str, cell: str) -> CallerError:
    problem = f"run {run_id} was judged again, and not by the gates of {cell}: it is no baseline of it"
    remedy = f"judge it by them: vllm-qualify rejudge {run_id} --recipe RECIPE; or make a baseline with --establish-baseline"
    return CallerError(problem, remedy, PLACE)


def _find_baseline(plan: CellPlan, store: Store, against: Against) -> tuple[Report, Path | None] | None:
    if against.establish == "always":
        replaced = None if against.new_anchor else _approved_report(store, plan.baseline_cell)
        return (replaced, None) if replaced else None
    if against.run is not None:
        return named_baseline(store, against.run, plan)
    newest = newest_baseline(store, plan.baseline_cell, partial(_is_judged_alike, store, plan))
    return (newest, None) if newest else None


def _approved_report(store: Store, cell: str) -> Report | None:
    """The report of the cell's approved baseline. Raises StoreError, TamperedError."""
    check_layout(store)
    chain = chain_of(store, cell)
    return read_run(store, cell, chain[-1].run_id).report if chain else None


def _is_judged_alike(store: Store, plan: CellPlan, run_id: str) -> bool:
    """Whether a run of the baseline's cell was judged by the plan's gates. Raises StoreError, TamperedError."""
    return judges_alike(plan, read_run(store, plan.baseline_cell, run_id).report.plan)


def named_baseline(store: Store, name: str, plan: CellPlan | None = None) -> tuple[Report, Path | None]:
    """The run that the caller named: of this machine, with its folder, or of the store. Raises CallerError, StoreError.

    A run that was judged again is held against the gates of `plan`, as soon as there is one.
    """
    folder: Path | None = None
    try:
        folder = find_run(name).folder
        report = load_report(folder)
    except CallerError:
        folder, report = None, _stored_report(store, name)
    if not report.passed or not (report.is_baseline or report.is_baseline_again):
        problem = f"run {report.run_id} {'did not pass' if not report.passed else 'is not a baseline'}"
        raise CallerError(problem, "name a run that passed and was made with --establish-baseline", PLACE)
    if plan and report.is_baseline_again and not judges_alike(plan, report.plan):
        raise _other_gates(report.run_id, plan.cell.id)
    if against := decided_against(store, report.plan.cell.id, report.run_id):
        raise CallerError(f"run {report.run_id} was {against}", "name another run", PLACE)
    approved = [manifest.run_id for manifest in chain_of(store, report.plan.cell.id)]
    if approved and report.run_id not in approved:
        problem = f"run {report.run_id} is not approved, and its cell has an approved baseline, run {approved[-1]}"
        raise CallerError(problem, "name an approved one, or approve this one first", PLACE)
    return report, folder


def _stored_report(store: Store, run_id: str) -> Report:
    try:
        return trusted_report(store, run_id)
    except StoreBusyError:
        raise
    except StoreError as error:
        problem = f"neither this machine nor the store has it: {error.problem}"
        raise CallerError(problem, "give the id of a published run, or a run's folder", PLACE) from error


def newest_baseline(store: Store, cell: str, stands: Callable[[str], bool] = lambda _: False) -> Report | None:
    """The report of the baseline of a cell: see `baseline_of`. Raises StoreError, TamperedError."""
    check_layout(store)
    run_id = baseline_of(store, cell, stands)
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


def departures_of_baseline(plan: CellPlan, store: Store) -> Iterator[str]:
    """What a plan says of its baseline that the store does not, in words that follow the run. Raises StoreError."""
    if plan.baseline is None:
        return
    then = read_run(store, plan.baseline.cell.id, plan.baseline.run_id).report
    if baseline_from(then, plan.baseline.folder) != plan.baseline:
        yield f"says of its baseline, run {then.run_id}, what is not in its report"
    if plan.beside:
        # By its settings, its number of GPUs, and the engine, by an image's digest.
        beside, own = ((server_inputs(server), _by_digest(server.engine)) for server in (plan.beside, then.plan.server))
        if beside != own:
            yield f"is compared with another server than run {then.run_id} had"


def _by_digest(engine: Engine) -> Engine:
    """The engine without its tag, which may mean another image by now."""
    return engine.model_copy(update={"tag": None}) if isinstance(engine, EngineImage) else engine


def _compares_load(plan: CellPlan) -> bool:
    return any(gate.against == "load" for gate in plan.gates)


def _check_accuracy(plan: CellPlan) -> None:
    for problem in (*(task_differs(plan, task) for task in plan.accuracy), likelihood_differs(plan)):
        if problem:
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


def _plan_beside(plan: CellPlan, then: CellPlan, tell: Tell) -> tuple[ServerPlan | None, str]:
    """The baseline's server, to be started beside the candidate's, or why that is not possible."""
    if not _compares_load(plan):
        return None, "no gate compares loads"
    if problem := _cannot_be_beside(plan, then):
        return None, problem
    server = then.server
    try:
        engine = _by_digest(server.engine)
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
    weights = Path(theirs.model)
    if theirs.is_local and not (weights.is_dir() and content_digest(weights) == release.revision):
        return "its weights are not here any more"
    in_own_image = launcher_of(ours.engine).from_image and plan.client_image is None
    if in_own_image and release.engine.version != plan.client_version:
        return "each would have the load client of its own image"
    return None


def copy_baseline(plan: CellPlan, store: Store, folder: Path) -> None:
    """Copy what the comparison needs of the baseline's run into `folder`: report, scores, and answers and load of all starts.

    The anchor's answers go into a folder of their own in it. lm-eval's samples of the first repetition are copied too: their
    texts are scored, and a report shows answers that flipped. Raises StoreError if the store lacks a file, or a file is not
    what the report says.
    """
    report, read = _report_and_reader(plan.compared_with, store)
    (folder / "report.json").write_text(report.model_dump_json(indent=2))
    for stage in report.stages:
        if stage.stage in MEASURED:
            (folder / MEASURED[stage.stage]).write_text(stage.model_dump_json(indent=2))
    for file in (file for file in report.files if _is_brought(file.path, plan)):
        if not write_evidence(folder, file, read(file)):
            raise StoreError("the baseline's evidence is not what its report says", "do not trust this run", file.path)
    if plan.anchor:
        bring_anchor(plan, store, folder)
    if problem := unusable_baseline(plan, folder):
        raise CallerError(f"run {report.run_id} cannot be a baseline here: {problem}", f"make a new one, or {ANEW}", PLACE)


def _is_brought(path: str, plan: CellPlan) -> bool:
    if path in SCORES:
        return plan.likelihood is not None
    names = [task.name for task in plan.accuracy]
    words = re.fullmatch(rf"accuracy/(?P<task>.+)/r1-b\d+/(samples_[^/]*\.jsonl|{re.escape(REPLIES)})", path)
    return any(is_answers(path, name) for name in names) or (words is not None and words["task"] in names)


def _report_and_reader(baseline: Baseline, store: Store) -> tuple[Report, Callable[[EvidenceFile], bytes]]:
    folder = baseline.folder
    if folder is None:
        return trusted_report(store, baseline.run_id), partial(read_evidence, store)
    return load_report(folder), lambda file: _read_local(folder / "evidence" / file.path)


def _read_local(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        problem = f"the baseline's evidence cannot be read: {error.strerror}"
        raise HostError(problem, "restore it, or name another run with --baseline", str(path)) from error
