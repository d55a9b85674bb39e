"""A release that did not pass is qualified again: the flow counts it, or takes over what was judged again."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from flows.qualify import run_qualification
from infra.bench.passing import passing
from tests.builders.flows import request_
from vllm_qualify.approval.published import read_run
from vllm_qualify.cli.commands import app
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.request import Against, Reuse
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


LOSS = {"metric": "exact_match", "filter": "strict-match", "max_loss": 0.5, "unit": "fraction"}


@pytest.fixture
def compared(request_: QualifyRelease) -> QualifyRelease:
    """A release that is compared with a baseline, and whose recipe has a bound that nothing meets."""
    path, yaml = Path(request_.recipe), YAML()
    document = yaml.load(path)
    document["gates"].append(LOSS)
    document["gpu_types"]["cpu"]["starts"] = 1
    yaml.dump(document, path)
    return asking(request_, "1000000000")


def judged_again(run_id: str, request: QualifyRelease) -> str:
    """What `rejudge` says of a run by the recipe of now."""
    done = CliRunner().invoke(app, ["rejudge", run_id, "--recipe", request.recipe, "--store", request.store])
    assert done.exit_code == 0, done.output
    return done.stderr


def test_a_baseline_with_a_corrected_bound_is_the_next_runs_baseline(compared: QualifyRelease) -> None:
    establishing = compared.model_copy(update={"against": Against(establish="always")})
    missed = ended(establishing)
    assert (missed.passed, missed.plan.establishes) == (False, True)
    corrected = asking(compared, "10")
    with pytest.raises(CallerError, match="has gates against a baseline"):
        ended(corrected)

    said = judged_again(missed.run_id, corrected)
    assert "is a baseline for runs with the same gates" in said
    next_ = ended(corrected)
    assert next_.plan.compared_with.run_id in said
    assert next_.passed

    # Its stages are taken over: nothing is asked again, and the new report can be approved as the cell's baseline.
    again = ended(establishing.model_copy(update={"reuse": Reuse(of="all")}))
    assert again.is_baseline
    assert again.passed
    taken_from = {stage.stage: stage.taken_from for stage in again.stages}
    assert None not in taken_from.values()
    assert {taken_from[stage] for stage in ("accuracy", "load")} == {next_.plan.compared_with.run_id}

    # Another bound is another judgement.
    with pytest.raises(CallerError, match="not by the gates of"):
        ended(asking(compared, "11").model_copy(update={"against": Against(run=next_.plan.compared_with.run_id)}))
