"""Whether a cell's approval still covers a planned qualification."""

from datetime import date, timedelta

from vllm_qualify.approval.pointer import Entry, read_pointer, state_of
from vllm_qualify.approval.published import read_run
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.publish.kept import is_the_same
from vllm_qualify.publish.store import Store


def find_covering(store: Store, plan: CellPlan, today: date, renew_days: int) -> Entry | str:
    """The cell's approval if it covers the plan, else the reason why it does not.

    It covers the plan if it holds for more than `renew_days` and has the same inputs as the plan. Raises TamperedError if the
    pointer is not as it was written, StoreError if the approved report cannot be read.
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
    if is_the_same(plan, approved):
        return pointer.last
    return f"what was approved differs: {', '.join(list_differences(plan, approved))}"


def list_differences(ours: CellPlan, theirs: CellPlan) -> list[str]:
    """The inputs in which two plans of one cell differ, in words."""
    one, two = _named_inputs(ours), _named_inputs(theirs)
    return [name for name in one if one[name] != two[name]] or ["the recipe or a tool's version"]


def _named_inputs(plan: CellPlan) -> dict[str, object]:
    release, server = plan.cell.release, plan.server
    configuration = (server.arguments, server.environment, server.aliases, server.inherited, server.draft_digest)
    return {
        "the engine": release.engine.digest,
        "the model's revision": release.revision,
        "the machine or its driver": plan.fingerprint.id,
        "the server's configuration": configuration,
        "the gates": plan.gates,
        "the load": (plan.load, plan.workload, plan.asked_stages, plan.soak),
        "how often the server is started": plan.starts,
        "the questions": [task.asked_settings.model_dump(exclude={"published"}) for task in plan.accuracy],
    }
