"""Automatic decisions: which reports a recipe's own rule may approve."""

from vllm_qualify.approval.decision import waivers_used
from vllm_qualify.report.model import Report


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
    if report.judgement.not_judged:
        return "has gates that were not judged, because there is nothing to hold them against"
    if report.plan.foreign_code:
        return "runs code that is not the engine's, which could have changed what was measured"
    return ""
