"""Decisions: what a release manager, or the recipe's own rule, decides about one report. Each decision is made once."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Literal, Self

from pydantic import ValidationError, model_validator

from vllm_qualify.approval.errors import DecidedError
from vllm_qualify.approval.layout import JSON, Line, Moment, day, decision_key, in_plain_words, one_line, reason_of
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.errors import AlreadyExistsError, CallerError, StoreError
from vllm_qualify.evidence.stages.table import wanted_stages
from vllm_qualify.judge.verdict import GateVerdict, worst_verdict
from vllm_qualify.plan.contradiction import contradiction
from vllm_qualify.publish.store import MOST_SKEW, MissingObjectError, Store
from vllm_qualify.recipe.gates import Verdict, Waiver
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.report.model import Report

RECIPE = "recipe"


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
    def summary(self) -> str:
        """`approved by Ada on 2026-03-14`"""
        return f"{'approved' if self.verdict == 'approve' else 'rejected'} by {self.by} on {day(self.at)}"


@dataclass(frozen=True)
class StoredDecision:
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
        stored = read_decision(store, run.cell, run.run_id)
    except MissingObjectError:
        body = _new_decision(run, wanted, valid_days, now).model_dump_json(indent=2).encode()
        try:
            store.put_new(key, body, JSON)
            return parse_decision(body, store.locate(key))
        except AlreadyExistsError:
            stored = read_decision(store, run.cell, run.run_id)
    _check_same(stored.decision, run, wanted, valid_days, now, store.locate(key))
    return stored


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
    if wrong := contradiction(report.plan) or _find_missing(report):
        problem = f"run {report.run_id} cannot be approved: {wrong}"
        raise CallerError(problem, "do not trust this report; qualify the cell again", "REPORT")
    verdicts = [(result, _verdict_on(result, today)) for result in report.judgement.gates]
    if worst_verdict([verdict for _, verdict in verdicts]) == "pass" and report.passed:
        return
    gates = [f"{result.gate.label}: {_reason_of_gate(result, today)}" for result, verdict in verdicts if verdict != "pass"]
    without = f"its verdict is {report.judgement.verdict}" if verdicts else "no gate was judged"
    problem = f"run {report.run_id} cannot be approved: {'; '.join(gates) or without}"
    waive = f"waive each gate by name in the recipe and judge again with `vllm-qualify rejudge {report.run_id}`"
    raise CallerError(problem, f"qualify again, or {waive}", "REPORT")


def _find_missing(report: Report) -> str:
    """What of the plan its report lacks: a gate, or the evidence of a stage. Empty if it is whole."""
    judged = [result.gate for result in report.judgement.gates]
    # What is said not to be judged is shown, and signed; a gate of which nothing is said would be left out unseen.
    mentioned = [*judged, *report.judgement.not_judged]
    plan = report.plan
    must_be_judged = [gate for gate in plan.judged_gates if not plan.need_not_be_proven(gate)]
    if without := [gate.label for gate in plan.gates if gate not in (judged if gate in must_be_judged else mentioned)]:
        return f"it has no verdict on {', '.join(without)}, which its plan asks for"
    with_files = {stage.stage for stage in report.stages if stage.files}
    if absent := [name for name in wanted_stages(report.plan) if name not in with_files]:
        return f"it has no evidence of {', '.join(absent)}, which its plan asks for"
    return ""


def waivers_used(report: Report) -> list[Waiver]:
    return [result.waiver for result in report.judgement.gates if result.waiver and result.counts_as != result.verdict]


def why_by_hand(report: Report) -> str:
    """Why a person must decide about a report, in words that follow its cell; empty if its plan approves it itself."""
    if not report.plan.approval.automatic:
        return "is not approved automatically"
    if not report.passed:
        return f"is {report.outcome}"
    if waivers_used(report):
        return "rests on a waiver"
    if report.plan.establishes:
        return "becomes what later releases are compared with"
    if any(not report.plan.need_not_be_proven(gate) for gate in report.judgement.not_judged):
        return "has gates that were not judged, because there is nothing to hold them against"
    if report.plan.foreign_code:
        return "runs code that is not the engine's, which could have changed what was measured"
    if report.plan.openings:
        return "has a server that whoever reaches it may change after the check"
    return ""


def _new_decision(run: PublishedRun, wanted: Ruling, valid_days: int, now: datetime) -> Decision:
    today, expires, waivers = now.astimezone(UTC).date(), None, waivers_used(run.report)
    if wanted.verdict == "approve":
        check_passed(run.report, today)
        if wanted.automatic and waivers:
            names = ", ".join(waiver.gate for waiver in waivers)
            problem = f"run {run.run_id} rests on a waiver ({names}), so it is not approved automatically"
            raise CallerError(problem, f"decide by name: `vllm-qualify approve {run.run_id}`", "REPORT")
        # A waiver still holds on its last day.
        ends = [waiver.expires + timedelta(days=1) for waiver in waivers if waiver.expires < date.max]
        expires = min(today + timedelta(days=valid_days), *ends, date.max)
    return Decision(
        **wanted.model_dump(),
        run_id=run.run_id,
        cell=run.cell,
        at=now,
        expires=expires,
        report_sha256=run.report_object.sha256,
        manifest_sha256=run.manifest_object.sha256,
    )


def _check_same(decision: Decision, run: PublishedRun, wanted: Ruling, valid_days: int, now: datetime, place: str) -> None:
    """Check the decision that is there, which somebody else can have written: an approval is signed as it is."""
    about = (decision.cell, decision.run_id, decision.report_sha256, decision.manifest_sha256)
    if about != (run.cell, run.run_id, run.report_object.sha256, run.manifest_object.sha256):
        raise StoreError("the decision is about another report", "do not trust this run", place)
    # Without this, no person could complete an approval that the recipe began.
    is_completed = decision.automatic and wanted.verdict == decision.verdict
    if (decision.verdict, decision.by) != (wanted.verdict, wanted.by) and not is_completed:
        again = f"if `approved list` does not have it, approve it again as {decision.by}"
        revoke = f"revoke it if it must not hold; {again}"
        remedy = "qualify the cell again" if decision.verdict == "reject" else revoke
        raise DecidedError(f"run {run.run_id} was already {decision.summary}", remedy, "REPORT")
    if decision.verdict == "reject":
        return
    days = max(valid_days, run.report.plan.approval.valid_days)
    latest = _new_decision(run, Ruling(**decision.model_dump(include=set(Ruling.model_fields))), days, decision.at).expires
    if decision.at > now + MOST_SKEW:
        raise StoreError("the decision that is there is of the future", "find out who wrote it, and delete it", place)
    if decision.expires is None or latest is None or decision.expires > latest:
        problem = f"the decision that is there holds until {decision.expires}, longer than it may"
        raise StoreError(problem, "find out who wrote it, and delete it; or ask for as many days", place)


def _verdict_on(result: GateVerdict, today: date) -> Verdict:
    """The verdict of a gate that counts on this day."""
    return result.verdict if result.waiver and today > result.waiver.expires else result.counts_as


def _reason_of_gate(result: GateVerdict, today: date) -> str:
    waiver = result.expired or (result.waiver if result.waiver and today > result.waiver.expires else None)
    return f"{result.verdict}, its waiver expired after {waiver.expires}" if waiver else result.verdict
