"""The head of a run's manifest: what later runs and the board read of a report without reading the report."""

from collections.abc import Iterable, Sequence

from vllm_qualify.engine.server import gpu_count
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.judge.compare.places import own_label
from vllm_qualify.judge.start_means import StartMeans
from vllm_qualify.plan.tried import digest_tried
from vllm_qualify.publish.bundle import ManifestHead, ReleaseTry, Score, Summary
from vllm_qualify.recipe.metrics import METRICS, OUTPUT_THROUGHPUT
from vllm_qualify.report.model import Report
from vllm_qualify.secrets import redact


def head_of(report: Report, starts: Sequence[StartMeans]) -> ManifestHead:
    """All of it follows from the report, but for `starts`, which follows from the evidence."""
    return ManifestHead(
        run_id=report.run_id,
        cell=report.plan.cell.id,
        outcome=report.outcome,
        establishes=report.is_baseline,
        establishes_again=report.is_baseline_again,
        new_anchor=report.is_new_anchor,
        anchor=report.plan.anchor.run_id if report.plan.anchor else None,
        chance=report.chance,
        summary=_run_summary(report),
        tried=_release_try(report),
        starts=list(starts),
    )


def differing_fields(said: ManifestHead, report: Report) -> Iterable[str]:
    """What of a head is not as the report gives it."""
    own = head_of(report, said.starts)
    if said.summary.model is None and said.summary.revision is None:
        # A manifest from before models were shown says nothing of the model, and nothing wrong.
        unnamed = own.summary.model_copy(update={"model": None, "revision": None})
        own = own.model_copy(update={"summary": unnamed})
    return [name for name in ManifestHead.model_fields if getattr(said, name) != getattr(own, name)]


def _release_try(report: Report) -> ReleaseTry | None:
    if (report.plan.establishes and not report.plan.is_compared) or report.rejudged_from:
        return None
    release, number = digest_tried(report.plan), len(report.plan.tries) + 1
    return ReleaseTry(release=release, number=number, verdict=report.judgement.verdict)


def _run_summary(report: Report) -> Summary:
    plan = report.plan
    engine = plan.cell.release.engine
    gpus = None if plan.cell.gpu_type == "cpu" else gpu_count(plan.server.arguments, plan.server.kind)
    output = _find_measurement(report, OUTPUT_THROUGHPUT)
    return Summary(
        engine=engine.kind,
        engine_version=engine.version,
        model=redact(plan.cell.release.model),
        revision=plan.cell.release.revision,
        image=redact(engine.image.reference) if engine.image else None,
        gpus=gpus,
        score=_first_score(report),
        output_tok_s_per_gpu=output.value / (gpus or 1) if output and output.value is not None else None,
    )


def _first_score(report: Report) -> Score | None:
    """The score that the first accuracy gate is about, even if that gate limits its loss against the baseline."""
    gate = next((gate for gate in report.plan.gates if METRICS[gate.metric].is_score), None)
    row = _find_measurement(report, own_label(gate)) if gate else None
    if row is None or row.value is None:
        return None
    return Score(metric=row.label, value=row.value, interval=row.interval)


def _find_measurement(report: Report, label: str) -> Measurement | None:
    return next((row for row in report.measurements if row.label == label), None)
