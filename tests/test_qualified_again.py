"""A release that did not pass is qualified again: the flow counts it, and report, manifest and levels say so."""

from pathlib import Path

import pytest

from flows.qualify import run_qualification
from infra.bench.passing import passing
from tests.builders.flows import request_
from vllm_qualify.approval.published import read_run
from vllm_qualify.publish.bundle import read_manifest
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.stores import open_store
from vllm_qualify.report.model import Report
from vllm_qualify.runs.judging import check_judgement
from vllm_qualify.runs.request import QualifyRelease

__all__ = ["request_"]

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("on_prefect")]


def ended(request: QualifyRelease) -> Report:
    with passing():
        (published,) = run_qualification(request)
    return published.run.report()


def asking(request: QualifyRelease, tok_s: str) -> QualifyRelease:
    """The recipe now wants this output throughput."""
    path = Path(request.recipe)
    before, _, after = path.read_text().partition("output_throughput_tok_s, minimum: ")
    assert after, "the recipe has the gate"
    path.write_text(f"{before}output_throughput_tok_s, minimum: {tok_s}{after[after.index(',') :]}")
    return request


def test_each_try_is_counted_until_the_release_passes(request_: QualifyRelease) -> None:
    too_much, enough = "1000000000", "10"
    first, second, third, fourth = (ended(asking(request_, tok_s)) for tok_s in (too_much, too_much, enough, enough))
    assert [report.passed for report in (first, second, third, fourth)] == [False, False, True, True]
    assert first.plan.tries == []
    assert [(tried.run_id, tried.verdict) for tried in third.plan.tries] == [(first.run_id, "fail"), (second.run_id, "fail")]
    chances = [report.judgement.levels.false_pass for report in (first, second, third, fourth)]
    assert chances == pytest.approx([0.03, 0.03 / 8, 0.03 / 27, 0.03])

    store = open_store(request_.store)
    manifests = [read_manifest(store, manifest_key(report.plan.cell.id, report.run_id)) for report in (first, third, fourth)]
    tries = [(manifest.tried.number, manifest.tried.verdict) for manifest in manifests if manifest.tried]
    assert tries == [(1, "fail"), (3, "pass"), (4, "pass")]
    # Whoever judges the evidence again, with these levels, finds the same.
    check_judgement(store, read_run(store, third.plan.cell.id, third.run_id))
