"""Decisions: what a release manager, or the recipe's own rule, decides about one report. Each decision is made once."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Literal, Self

from pydantic import ValidationError, model_validator

from vllm_qualify.approval.errors import DecidedError
from vllm_qualify.approval.layout import JSON, Line, Moment, day, decision_key, in_plain_words, one_line, reason_of
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.errors import AlreadyExistsError, CallerError, StoreError
from vllm_qualify.evidence.stages.table import wanted
from vllm_qualify.judge.verdict import GateVerdict, worst
from vllm_qualify.plan.contradiction import contradiction
from vllm_qualify.publish.store import MOST_SKEW, MissingObjectError, Store
from vllm_qualify.recipe.gates import Verdict, Waiver
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.report.model import Report

RECIPE = "recipe"
DONE = {"approve": "approved", "reject": "rejected"}


class Ruling(Frozen):
    """The wanted decision. The recipe itself can only approve, and needs no reason."""

    verdict: Literal["approve", "reject"]
    by: Line
    automatic: bool = False
    reason: Line | None = None

    @model_validator(mode="after")
    def _is_somebodys(self) -> Self:
        if self.automatic != (self.by == RECIPE):
            raise ValueError(f"'{RECIPE}' decides automatically, and a person never does")
        if self.automatic and self.verdict != "approve":
            raise ValueError("nothing is rejected automatically")
        if self.reason is None and not self.automatic:
            raise ValueError("a decision needs a reason")
        return self


AUTOMATIC = Ruling(verdict="approve", by=RECIPE, automatic=True)


class Decision(Ruling):
    """A decision about one run. `expires` is the first UTC day on which the approval no longer holds; None for a rejection."""

    decision_version: Literal[1] = 1
    run_id: str
    cell: str
    at: Moment
    expires: date | None
    report_sha256: str
    manifest_sha256: str

    @property
    def done(self) -> str:
        """`approved by Ada on 2026-03-14`"""
        return f"{DONE[self.verdict]} by {self.by} on {day(self.at)}"


@dataclass(frozen=True)
class StoredDecision:
    """A decision with its bytes in the store."""

    decision: Decision
    body: bytes


def ruling(verdict: Literal["approve", "reject"], by: str, reason: str) -> Ruling:
    """The ruling of a person. Raises CallerError if the name or the reason is missing or cannot be shown."""
    with in_plain_words():
        return Ruling(verdict=verdict, by=one_line(by), reason=one_line(reason))


def make_decision(store: Store, run: PublishedRun, wanted: Ruling, valid_days: int, now: datetime) -> StoredDecision:
    """The decision about the run. It is made now, unless the same decision was made before.

    Raises:
        CallerError: the run did not pass on this day, or the recipe cannot give this approval itself.
        DecidedError: another person decided, or the decision was another one. A person may repeat the recipe's approval.
        StoreError: the stored decision is about another report, of the future, or holds longer than it may.
    """
    key = decision_key(run.cell, run.run_id)
    try:
        return _same(read_decision(store, run.cell, run.run_id), run, wanted, valid_days, now, store.locate(key))
    except MissingObjectError:
        body = _decision(run, wanted, valid_days, now).model_dump_json(indent=2).encode()
    try:
        store.put_new(key, body, JSON)
    except AlreadyExistsError:
        return _same(read_decision(store, run.cell, run.run_id), run, wanted, valid_days, now, store.locate(key))
    return parse_decision(body, store.locate(key))


def read_decision(store: Store, cell: str, run_id: str) -> StoredDecision:
    """The stored decision about a run. Raises MissingObjectError if there is none yet."""
    key = decision_key(cell, run_id)
    return parse_decision(store.get(key), store.locate(key))


def parse_decision(body: bytes, place: str) -> StoredDecision:
    """Raises StoreError if it is not a decision of this version."""
    try:
        return StoredDecision(Decision.model_validate_json(body), body)
    except ValidationError as error:
        raise StoreError(f"not a decision: {reason_of(error)}", "read it with the version that wrote it", place) from error


def check_passed(report: Report, today: date) -> None:
    """Raises CallerError if a report must not be approved on this day.

    Its plan contradicts itself, something of the plan is missing, or a gate did not pass and no waiver holds for it.
    """
    if wrong := contradiction(report.plan) or _missing(report):
        problem = f"run {report.run_id} cannot be approved: {wrong}"
        raise CallerError(problem, "do not trust this report; qualify the cell again", "REPORT")
    if _verdict_on(report, today) == "pass" and report.passed:
        return
    gates = [f"{result.gate.label}: {_why(result, today)}" for result in report.judgement.gates if _on(result, today) != "pass"]
    without = f"its verdict is {report.judgement.verdict}" if report.judgement.gates else "no gate was judged"
    problem = f"run {report.run_id} cannot be approved: {'; '.join(gates) or without}"
    remedy = (
        f"qualify again, or waive each gate by name in the recipe and judge again with `vllm-qualify rejudge {report.run_id}`"
    )
    raise CallerError(problem, remedy, "REPORT")


def _missing(report: Report) -> str:
    """What of the plan its report lacks: a gate, or the evidence of a stage. Empty if it is whole."""
    judged = [result.gate for result in report.judgement.gates]
    # What is said not to be judged is shown, and signed; a gate of which nothing is said would be left out unseen.
    mentioned = [*judged, *report.judgement.not_judged]
    if without := [
        gate.label for gate in report.plan.gates if gate not in (judged if gate in report.plan.judged else mentioned)
    ]:
        return f"it has no verdict on {', '.join(without)}, which its plan asks for"
    with_files = {stage.stage for stage in report.stages if stage.files}
    if absent := [name for name in wanted(report.plan) if name not in with_files]:
        return f"it has no evidence of {', '.join(absent)}, which its plan asks for"
    return ""


def waivers_used(report: Report) -> list[Waiver]:
    """The waivers that the verdict depends on."""
    return [result.waiver for result in report.judgement.gates if result.waiver and result.counts_as != result.verdict]


def _decision(run: PublishedRun, wanted: Ruling, valid_days: int, now: datetime) -> Decision:
    today, expires = now.astimezone(UTC).date(), None
    if wanted.verdict == "approve":
        check_passed(run.report, today)
        _check_automatic(run.report, wanted)
        expires = min(
            today + timedelta(days=valid_days), *(_day_after(waiver) for waiver in waivers_used(run.report)), date.max
        )
    return Decision(
        **wanted.model_dump(),
        run_id=run.run_id,
        cell=run.cell,
        at=now,
        expires=expires,
        report_sha256=run.report_object.sha256,
        manifest_sha256=run.manifest_object.sha256,
    )


def _day_after(waiver: Waiver) -> date:
    """The day after the waiver's last day, on which it still holds."""
    return waiver.expires if waiver.expires == date.max else waiver.expires + timedelta(days=1)


def _check_automatic(report: Report, wanted: Ruling) -> None:
    if wanted.automatic and waivers_used(report):
        names = ", ".join(waiver.gate for waiver in waivers_used(report))
        problem = f"run {report.run_id} rests on a waiver ({names}), so it is not approved automatically"
        raise CallerError(problem, f"decide by name: `vllm-qualify approve {report.run_id}`", "REPORT")


def _same(
    stored: StoredDecision, run: PublishedRun, wanted: Ruling, valid_days: int, now: datetime, place: str
) -> StoredDecision:
    decision = stored.decision
    about = (decision.cell, decision.run_id, decision.report_sha256, decision.manifest_sha256)
    if about != (run.cell, run.run_id, run.report_object.sha256, run.manifest_object.sha256):
        raise StoreError("the decision is about another report", "do not trust this run", place)
    # Without this, no person could complete an approval that the recipe began.
    is_completed = decision.automatic and wanted.verdict == decision.verdict
    if (decision.verdict, decision.by) != (wanted.verdict, wanted.by) and not is_completed:
        raise DecidedError(f"run {run.run_id} was already {decision.done}", _instead(decision), "REPORT")
    if decision.verdict == "approve":
        _check_possible(decision, run, valid_days, now, place)
    return stored


def _check_possible(decision: Decision, run: PublishedRun, valid_days: int, now: datetime, place: str) -> None:
    """Check a decision that is in the store, which somebody else can have written: it is signed as it is.

    Raises:
        CallerError: the run did not pass on the day of the decision.
        StoreError: it is of the future, or holds longer than it may.
    """
    days = max(valid_days, run.report.plan.approval.valid_days)
    latest = _decision(run, Ruling(**decision.model_dump(include=set(Ruling.model_fields))), days, decision.at).expires
    if decision.at > now + MOST_SKEW:
        raise StoreError("the decision that is there is of the future", "find out who wrote it, and delete it", place)
    if decision.expires is None or latest is None or decision.expires > latest:
        problem = f"the decision that is there holds until {decision.expires}, longer than it may"
        raise StoreError(problem, "find out who wrote it, and delete it; or ask for as many days", place)


def _instead(decision: Decision) -> str:
    if decision.verdict == "reject":
        return "qualify the cell again"
    return f"revoke it if it must not hold; if `approved list` does not have it, approve it again as {decision.by}"


def _verdict_on(report: Report, today: date) -> Verdict:
    return worst([_on(result, today) for result in report.judgement.gates])


def _on(result: GateVerdict, today: date) -> Verdict:
    """The verdict that counts on this day."""
    return result.verdict if result.waiver and today > result.waiver.expires else result.counts_as


def _why(result: GateVerdict, today: date) -> str:
    waiver = result.expired or (result.waiver if result.waiver and today > result.waiver.expires else None)
    return f"{result.verdict}, its waiver expired after {waiver.expires}" if waiver else result.verdict
