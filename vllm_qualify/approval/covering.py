"""Whether a cell's approval still covers a planned qualification."""

from datetime import date, timedelta
from typing import Any

from vllm_qualify.approval.pointer import Entry, read_pointer, state_of
from vllm_qualify.approval.published import read_run
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.publish.kept import is_the_same
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.serving import Environment, ServerArguments


def covering(store: Store, plan: CellPlan, today: date, renew_days: int) -> Entry | str:
    """The cell's approval if it covers the plan, else the reason why it does not.

    It covers the plan if it holds for more than `renew_days` and has the same inputs as the plan.

    Raises:
        TamperedError: the pointer is not as it was written.
        StoreError: the approved report cannot be read.
    """
    pointer = read_pointer(store, plan.cell.id)
    if pointer is None:
        return "nothing is approved"
    state = state_of(pointer.last, pointer, today)
    if state != "approved":
        return f"the last approval is {state}"
    if today + timedelta(days=renew_days) >= pointer.last.expires:
        return f"the approval ends on {pointer.last.expires}"
    approved = read_run(store, plan.cell.id, pointer.last.run_id).report.plan
    return pointer.last if is_the_same(plan, approved) else f"what was approved differs: {', '.join(differing(plan, approved))}"


def _configured(plan: CellPlan) -> tuple[ServerArguments, Environment, list[str]]:
    return plan.server.arguments, plan.server.environment, plan.server.aliases


def _asked(plan: CellPlan) -> list[dict[str, Any]]:
    return [task.asked.model_dump(exclude={"published"}) for task in plan.accuracy]


def differing(ours: CellPlan, theirs: CellPlan) -> list[str]:
    """The inputs in which two plans of one cell differ, in words."""
    release, other = ours.cell.release, theirs.cell.release
    parts = {
        "the engine": (release.engine.digest, other.engine.digest),
        "the model's revision": (release.revision, other.revision),
        "the machine or its driver": (ours.fingerprint.id, theirs.fingerprint.id),
        "the server's configuration": (
            (*_configured(ours), ours.server.inherited, ours.server.draft_digest),
            (*_configured(theirs), theirs.server.inherited, theirs.server.draft_digest),
        ),
        "the gates": (ours.gates, theirs.gates),
        "the load": (
            (ours.load, ours.workload, ours.sweep, ours.fit, ours.soak),
            (theirs.load, theirs.workload, theirs.sweep, theirs.fit, theirs.soak),
        ),
        "how often the server is started": (ours.starts, theirs.starts),
        "the questions": (_asked(ours), _asked(theirs)),
    }
    return [name for name, (one, two) in parts.items() if one != two] or ["the recipe or a tool's version"]
