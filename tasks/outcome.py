"""The outcome of a flow run's cells, as its final state. The UI colours the state by its type; automations match its name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from vllm_qualify.judge.chance import Refusals, refusals
from vllm_qualify.recipe.gates import Verdict
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.report.refusals import refusal_lines
from vllm_qualify.runs.publishing import Published

NOT_PASSED, INVALID, INCONCLUSIVE, REJECTED = "NotPassed", "Invalid", "Inconclusive", "Rejected"
AWAITING, APPROVED, COVERED = "AwaitingDecision", "Approved", "NothingToDo"
OF_VERDICT: dict[Verdict, str] = {"fail": NOT_PASSED, "invalid": INVALID, "inconclusive": INCONCLUSIVE}
# These are of type Failed, which is red in the UI. Nothing is broken, so these runs are not started again.
NOT_TO_DEPLOY = (NOT_PASSED, INVALID, INCONCLUSIVE, REJECTED)
# The state of a run with several cells has the first of these names that one of its cells has.
WORST_FIRST = (*NOT_TO_DEPLOY, AWAITING, APPROVED, COVERED)


class HostOutcome(Frozen):
    """How a flow run on a host ended: its state's name and message, and whether it came to verdicts."""

    name: str
    message: str
    is_qualified: bool


def outcome_state(reported: list[Published]) -> State[list[Published]]:
    """The final state of a run that qualified cells on its own machine. The state's result is their reports."""
    if not reported:
        return nothing_to_do("the approval of every cell still covers it")
    refused = refusal_lines(refusals([each.run.report().chance for each in reported]))
    message = "\n".join([*(line for each in reported for line in _cell_lines(each)), *refused])
    return _worst_state([_state_name(each) for each in reported], message, reported)


def state_of_fleet(ended: Mapping[str, HostOutcome], refusals: Refusals) -> State[list[Published]]:
    """The final state of a run whose cells were qualified on hosts, and which of their refusals stand out.

    The hosts' messages say where the reports are.
    """
    hosts = [f"{gpu_type}: {each.name}: {each.message}" for gpu_type, each in ended.items()]
    message = "\n".join([*hosts, *refusal_lines(refusals)])
    return _worst_state([each.name for each in ended.values()], message, [])


def nothing_to_do(why: str) -> State[list[Published]]:
    return Completed(name=COVERED, message=why, data=[])


def was_qualified(state: State[Any]) -> bool:
    """Whether a run came to verdicts, whatever they are."""
    return state.is_completed() or state.name in NOT_TO_DEPLOY


def _worst_state(names: Sequence[str], message: str, data: list[Published]) -> State[list[Published]]:
    worst = next((name for name in WORST_FIRST if name in names), COVERED)
    kind = Failed if worst in NOT_TO_DEPLOY else Completed
    return kind(name=worst, message=message, data=data)


def _state_name(published: Published) -> str:
    if published.rejected:
        return REJECTED
    if not published.passed:
        return OF_VERDICT[published.run.report().judgement.verdict]
    return APPROVED if published.decision else AWAITING


def _cell_lines(published: Published) -> Iterator[str]:
    """The cell, the gates that it failed, and where its report is."""
    report = published.run.report()
    yield f"{report.plan.cell.id}: {published.decision or published.outcome}"
    for result in report.judgement.gates:
        if result.counts_as != "pass":
            yield f"  {result.gate.label}: {result.verdict}"
    yield f"  {published.page}"
