"""From a published report to an approval: by the recipe's own rule, or by a person's decision, for which the flow waits."""

import os
from time import monotonic, sleep

from prefect import get_run_logger

from tasks.step import LIMIT_S, step
from vllm_qualify.approval.actions import approve
from vllm_qualify.approval.decision import AUTOMATIC, Decision, read_decision, why_by_hand
from vllm_qualify.approval.errors import OvertakenError, RevokedError
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.approval.signing import PRIVATE_KEY, private_key
from vllm_qualify.errors import CallerError
from vllm_qualify.publish.store import MissingObjectError, Store, checked_now
from vllm_qualify.publish.stores import open_store
from vllm_qualify.runs import judging
from vllm_qualify.runs.anchor import why_not_the_cells
from vllm_qualify.runs.publishing import Published

LOOK_EVERY_S = 10.0


@step("signing key")
def check_signing_key() -> None:
    """Check the signing key, if there is one, before a server starts. Raises CallerError if it is not valid."""
    if _has_key():
        private_key()


@step("approve")
def approve_automatically(published: Published, store: str) -> Published:
    """Approve a cell that its recipe approves, if this machine has a key; else leave it to the approver.

    Raises StoreError if the store refuses, TamperedError if its content cannot be trusted.
    """
    if not published.passed:
        return published
    report, opened = published.run.report(), open_store(store)
    why = why_by_hand(report)
    if not why and not _has_key():
        get_run_logger().info("the recipe approves automatically, and there is no key here to sign with")
        return published
    if why := why or why_not_the_cells(report.plan, opened):
        get_run_logger().info(f"{report.plan.cell.id} {why}: a person decides")
        return published
    refused = _try_to_approve(opened, read_run(opened, published.run.plan.cell.id, published.run.id))
    return _with_decision(published, _find_decision(opened, published), refused)


@step("decision", limit_s=lambda given: given["timeout_s"] + LIMIT_S)
def await_decision(published: Published, store: str, timeout_s: float) -> Published:
    """Wait until a person has decided about a cell, with `vllm-qualify approve` or at the approver.

    The result has no decision if there is none in time: it can still be made later. Raises StoreError.
    """
    opened, deadline = open_store(store), monotonic() + timeout_s
    get_run_logger().info(f"run {published.run.id} waits for a decision: {published.page}")
    while (decision := _find_decision(opened, published)) is None and monotonic() < deadline:
        # The store does not announce new objects.
        sleep(min(LOOK_EVERY_S, max(0.0, deadline - monotonic())))
    if decision is None:
        get_run_logger().warning(f"run {published.run.id} was not decided in {timeout_s:g} s; it can still be decided")
    return _with_decision(published, decision, None)


def _has_key() -> bool:
    return bool(os.environ.get(PRIVATE_KEY) or os.environ.get(f"{PRIVATE_KEY}_FILE"))


def _try_to_approve(store: Store, run: PublishedRun) -> str | None:
    """Approve a run; the reason if that is refused (another decision, a revocation, a newer approval), else None."""
    try:
        judging.check_judgement(store, run)
        valid_days = run.report.plan.approval.valid_days
        problem = approve(store, run, AUTOMATIC, valid_days, private_key(), checked_now(store)).index_problem
    except (CallerError, OvertakenError, RevokedError) as error:
        get_run_logger().warning(str(error))
        return error.problem
    if problem:
        get_run_logger().warning(problem)
    return None


def _find_decision(store: Store, published: Published) -> Decision | None:
    try:
        return read_decision(store, published.run.plan.cell.id, published.run.id).decision
    except MissingObjectError:
        return None


def _with_decision(published: Published, decision: Decision | None, refused: str | None) -> Published:
    """The run with the decision that holds, or why there is none."""
    if decision is None:
        return published.model_copy(update={"decision": refused})
    until = f", until {decision.expires}" if decision.expires else f": {decision.reason}"
    text = refused or f"{decision.summary}{until}"
    get_run_logger().info(f"{published.run.plan.cell.id}: {text}")
    return published.model_copy(update={"decision": text, "rejected": decision.verdict == "reject"})
