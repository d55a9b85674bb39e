"""From a published report to an approval: by the recipe's own rule, or by a release manager's decision in Prefect's UI."""

import math
import os
import time
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID

from prefect import get_client, get_run_logger, pause_flow_run
from prefect.blocks.system import Secret
from prefect.exceptions import FlowPauseTimeout, ObjectNotFound
from prefect.input import RunInput
from prefect.runtime import flow_run
from prefect.states import Running
from pydantic import Field

from tasks.step import step
from vllm_qualify.approval.actions import approve, reject
from vllm_qualify.approval.decision import AUTOMATIC, Ruling, read_decision, ruling, waivers_used
from vllm_qualify.approval.errors import OvertakenError, RevokedError
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.approval.signing import PRIVATE_KEY, PrivateKey, private_key
from vllm_qualify.errors import CallerError
from vllm_qualify.publish.store import MissingObjectError, Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.report.model import Report
from vllm_qualify.runs import judging
from vllm_qualify.runs.publishing import Published
from vllm_qualify.runs.stored import published_run


class ReleaseDecision(RunInput):
    """The form that a release manager fills in for each report that passed."""

    decision: Literal["approve", "reject"] = Field(description="Whether this configuration may be deployed.")
    name: str = Field(min_length=1, max_length=200, pattern=r"\S", description="Who decides.")
    reason: str = Field(min_length=1, max_length=500, pattern=r"\S", description="Why; it is kept with the approval.")


def ask_for_decision(published: Published, timeout_s: float) -> Ruling | None:
    """A release manager's decision from a form in Prefect's UI; None if there is none in time. The flow run pauses meanwhile.

    If the name or the reason is not valid, the form is shown again and says why.
    """
    deadline, problem, number = time.monotonic() + timeout_s, "", 0
    while (left_s := math.ceil(deadline - time.monotonic())) > 0:
        number += 1
        form = ReleaseDecision.with_initial_data(description=problem + question(published.run.report(), published.page))
        try:
            # Prefect allows no capital letters in a key.
            given = pause_flow_run(wait_for_input=form, timeout=left_s, key=f"{published.run.id.lower()}-{number}")
        except FlowPauseTimeout:
            _run_again()
            break
        try:
            return ruling(given.decision, given.name, given.reason)
        except CallerError as error:
            problem = f"**Not accepted: {error.problem}.** "
            get_run_logger().warning(str(error))
    get_run_logger().warning(f"no decision was made about run {published.run.id} in {timeout_s:g} s: it stays to be decided")
    return None


def _run_again() -> None:
    """Set the flow run to Running. Prefect leaves it paused after a timeout, and accepts no later state but a failure."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(flow_run.id), Running(), force=True)


def question(report: Report, page: str) -> str:
    """The text of the form, in Markdown: the report's cell, run, outcome, page and gates."""
    gates = [f"- {found.gate.label}: {found.verdict}{' (waived)' if found.waiver else ''}" for found in report.judgement.gates]
    gates += [f"- {gate.label}: not judged, because there is no baseline" for gate in report.judgement.not_judged]
    return "\n".join([f"**{report.plan.cell.id}**, run `{report.run_id}`: {report.outcome}", page, "", *gates])


def signing_key(block: str) -> PrivateKey | None:
    """The key from the environment, else from Prefect's Secret block of this name; None if there is neither.

    Raises:
        CallerError: the value is not a key that can sign.
    """
    if os.environ.get(PRIVATE_KEY) or os.environ.get(f"{PRIVATE_KEY}_FILE"):
        return private_key()
    try:
        found: Any = Secret.load(block)
    except ValueError as error:
        # Prefect raises this if the block does not exist.
        if isinstance(error.__cause__, ObjectNotFound):
            return None
        raise
    return private_key(str(found.get()))


@step("signing key")
def check_signing_key(block: str, decision_timeout_s: float) -> None:
    """Check the signing key before a server starts. The key may be missing only if the flow does not wait for a decision.

    Raises:
        CallerError: the key is not valid, or it is missing and the flow is to wait for a decision.
    """
    if signing_key(block) is None and decision_timeout_s:
        problem = "the flow is to wait for a decision, and there is no key to sign an approval with"
        raise CallerError(problem, f"set {PRIVATE_KEY}_FILE, or make the Secret block '{block}'", "decision_timeout_s")


@step("automatic approval")
def automatic_ruling(published: Published, block: str) -> Ruling | None:
    """The recipe's own approval. None if it allows none, or there is no key, or a person must decide.

    A person decides if a gate is waived, failed or not judged, and about a trusted model whose code was not confined.
    """
    report = published.run.report()
    if not (published.passed and report.plan.approval.automatic):
        return None
    if waivers_used(report) or report.judgement.not_judged:
        why = "rests on a waiver" if waivers_used(report) else "has gates that were not judged, because there is no baseline"
        get_run_logger().info(f"{report.plan.cell.id} {why}: a person decides")
        return None
    if report.plan.server.trust_remote_code and not report.plan.fingerprint.confined:
        why = "trusts code of the model, which ran neither in a container nor confined by Landlock"
        get_run_logger().info(f"{report.plan.cell.id} {why}: a person decides")
        return None
    if signing_key(block) is None:
        get_run_logger().info("the recipe approves automatically, and there is no key to sign with")
        return None
    return AUTOMATIC


@step("approve")
def decide_approval(published: Published, wanted: Ruling | None, store: str, block: str) -> Published:
    """Store the decision, and return the run with the decision that holds. An approval is signed and enters the cell's pointer.

    If `wanted` is None, or another decision came first, the result has that other decision, if there is one.

    Raises:
        StoreError: the store refuses. TamperedError: the store's content cannot be trusted.
    """
    opened = open_store(store)
    cell, run_id = published.run.plan.cell.id, published.run.id
    told = _decided(opened, read_run(opened, cell, run_id), wanted, block) if wanted else None
    try:
        decision = read_decision(opened, cell, run_id).decision
    except MissingObjectError:
        return published.model_copy(update={"decision": told})
    until = f", until {decision.expires}" if decision.expires else f": {decision.reason}"
    told = told or f"{decision.done}{until}"
    get_run_logger().info(f"{cell}: {told}")
    return published.model_copy(update={"decision": told, "rejected": decision.verdict == "reject"})


@step("decide", "{wanted.verdict} {run_id}")
def decide_report(store: str, run_id: str, wanted: Ruling, block: str) -> None:
    """Store a release manager's decision about a published report.

    Raises:
        CallerError: the report cannot be approved, there is another decision already, or the decision came too late.
        StoreError: there is no such run, or the store refuses.
    """
    opened = open_store(store)
    if problem := _decided(opened, published_run(opened, run_id), wanted, block):
        raise CallerError(problem, "see its report, and `vllm-qualify approved list`", "run")


def _decided(store: Store, run: PublishedRun, wanted: Ruling, block: str) -> str | None:
    """Store the decision; the reason if it is refused (another decision, a revocation, a newer approval), else None."""
    now = datetime.now(UTC)
    try:
        if wanted.verdict == "reject":
            problem = reject(store, run, wanted, now).index_problem
        else:
            key = signing_key(block) or private_key()
            judging.check_judgement(store, run)
            problem = approve(store, run, wanted, run.report.plan.approval.valid_days, key, now).index_problem
    except (CallerError, OvertakenError, RevokedError) as error:
        get_run_logger().warning(str(error))
        return error.problem
    if problem:
        get_run_logger().warning(problem)
    return None
