"""The anchor of a cell: the approved run that all its later runs are held against, however often the baseline changes."""

from pathlib import Path

from vllm_qualify.approval.index import anchor_in, chain_of
from vllm_qualify.approval.published import read_run
from vllm_qualify.engine.process import Tell
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.judge.compare.places import ANCHOR, ANCHORED, is_answers
from vllm_qualify.plan.cell import Anchor, Baseline, CellPlan
from vllm_qualify.publish.bundle import read_evidence, write_evidence
from vllm_qualify.publish.layout import check_layout
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.report.model import Report
from vllm_qualify.runs.stored import trusted_report

ANEW = "begin anew with --establish-baseline --new-anchor"


def with_anchor(plan: CellPlan, store: Store, named: str | None, tell: Tell) -> CellPlan:
    """The plan with the cell's anchor, if a gate is against one: `named` by the caller, by the recipe, or else the chain's own.

    Raises CallerError if a named run is no approved baseline of the cell, StoreError and TamperedError.
    """
    if not any(gate.is_against_anchor for gate in plan.gates):
        if named:
            tell(f"{plan.cell.id} has no gate against an anchor: it is not held against run {named}")
        return plan
    if plan.new_anchor:
        return plan
    check_layout(store)
    anchor = _find_anchor(plan, store, named)
    if anchor is None:
        tell(f"{plan.cell.id} has no anchor yet, since no baseline is approved: gates against it are not judged")
        return plan
    tell(f"{plan.cell.id} is held against run {anchor.run_id}: {anchor.chosen}")
    return plan.model_copy(update={"anchor": anchor})


def _find_anchor(plan: CellPlan, store: Store, named: str | None) -> Anchor | None:
    chain = chain_of(store, plan.baseline_cell)
    run_id, chosen = named or plan.named_anchor, "named by the caller" if named else "named by the recipe"
    if run_id is not None and run_id not in {manifest.run_id for manifest in chain}:
        problem = f"run {run_id} is no approved baseline of {plan.baseline_cell}"
        raise CallerError(problem, "name one that is, or leave it out", "--anchor" if named else "anchors")
    if run_id is None:
        own = anchor_in(chain)
        if own is None:
            return None
        run_id, chosen = own.run_id, "made to be one" if own.new_anchor else "the first approved"
    report = read_run(store, plan.baseline_cell, run_id).report
    fields = {"cell": report.plan.cell, "accuracy": accuracy_settings(report), "chosen": chosen}
    return Anchor.model_validate({"run_id": run_id, **fields})


def accuracy_settings(report: Report) -> list[Accuracy]:
    """How the tasks of a run were asked."""
    return [task.asked_settings for task in report.plan.accuracy]


def bring_anchor(plan: CellPlan, store: Store, folder: Path) -> None:
    """Copy the anchor's answers of all starts, and its own scores, into its folder below the baseline's. Raises StoreError."""
    report, into = trusted_report(store, plan.held_against.run_id), folder / ANCHOR
    into.mkdir(exist_ok=True)
    for stage in report.stages:
        if stage.stage in ANCHORED:
            (into / ANCHORED[stage.stage]).write_text(stage.model_dump_json(indent=2))
    for file in (file for file in report.files if any(is_answers(file.path, task.name) for task in plan.accuracy)):
        if not write_evidence(into, file, read_evidence(store, file)):
            raise StoreError("the anchor's evidence is not what its report says", f"name another anchor, or {ANEW}", file.path)


def why_not_the_cells(plan: CellPlan, store: Store) -> str:
    """Why a run is not held against what its cell has now, in words that follow the run; empty if it is.

    Only the store says which baseline is approved and which run is the anchor: a plan is a claim. Raises StoreError, and
    TamperedError.
    """
    cell, chain = plan.baseline_cell, chain_of(store, plan.baseline_cell)
    approved, own = [manifest.run_id for manifest in chain], anchor_in(chain)
    newest = approved[-1] if approved else None
    if (plan.gates_against_baseline or plan.baseline) and not _is_run(plan.baseline, cell, newest):
        approved_now = f"the approved baseline of {cell} is {_name_of_run(newest)}"
        return f"is compared with {_name_of_other(plan.baseline)}, and {approved_now}"
    anchor = plan.named_anchor if plan.named_anchor in approved else own.run_id if own and not plan.named_anchor else None
    if any(gate.is_against_anchor for gate in plan.gates) and not _is_run(plan.anchor, cell, anchor):
        return f"is held against {_name_of_other(plan.anchor)}, and the anchor of {cell} is {_name_of_run(anchor)}"
    return ""


def _is_run(other: Baseline | Anchor | None, cell: str, run_id: str | None) -> bool:
    return other is not None and (other.cell.id, other.run_id) == (cell, run_id)


def _name_of_other(other: Baseline | Anchor | None) -> str:
    return f"run {other.run_id} of {other.cell.id}" if other else "no run"


def _name_of_run(run_id: str | None) -> str:
    return f"run {run_id}" if run_id else "none"
