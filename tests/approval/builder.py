"""Published runs to decide about, as a real run leaves them in a store, and what is decided about them."""

from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

from tests.builders.changed import changed
from tests.report.builder import passed_report
from vllm_qualify.approval.actions import Approved, approve
from vllm_qualify.approval.decision import Ruling, StoredDecision, make_decision, ruling
from vllm_qualify.approval.layout import cell_index_key
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.approval.row import Row
from vllm_qualify.approval.signing import PrivateKey, new_key, private_key
from vllm_qualify.evidence.measurement import EvidenceFile, describe
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.gates import Verdict, Waiver
from vllm_qualify.report.model import Report
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.publishing import publish_run

CELL = "llama-3.1-8b/fp8/h200/throughput"
OLDER, RUN, NEWER = "20260313T080000Z-ffffff", "20260314T092653Z-5f3d19", "20260314T092653Z-5f3d1a"
NOW = datetime(2026, 3, 14, 12, 30, tzinfo=UTC)
TODAY = NOW.date()
VALID_DAYS = 90
EXPIRES = date(2026, 6, 12)
ADA = ruling("approve", "Ada", "it is faster than what we have")
BOB_REJECTS = ruling("reject", "Bob", "we do not need it")

Change = Callable[[Report], Report]


def publish_report(
    store: Store, folder: Path, run_id: str = RUN, change: Change = lambda report: report, **evidence: str
) -> PublishedRun:
    """A run with real, small evidence. `evidence` has further files' texts by their path, as in `**{"load/x.txt": "…"}`."""
    run = Run(folder=folder / run_id)
    names = ("serve/server.yaml", "serve/server.log", "smoke/replies.json", "accuracy/results.json", "load/bench-1.json")
    for name, text in ({name: f"{name} of {run_id}\n" for name in names} | evidence).items():
        path = run.evidence / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    run.data_docs.mkdir()
    (run.data_docs / "index.html").write_text("<html>all expectations</html>")
    report = change(_with_evidence(passed_report(), run))
    publish_run(changed(changed(report, run_id=run_id), "plan", run_id=run_id), run, store)
    return read_run(store, report.plan.cell.id, run_id)


def row_of(store: Store, cell: str = CELL) -> Row:
    """The cell's index as it is in the store."""
    return Row.model_validate_json(store.get(cell_index_key(cell)))


def approved(store: Store, run: PublishedRun, key: PrivateKey, now: datetime = NOW) -> Approved:
    return approve(store, run, ADA, VALID_DAYS, key, now)


def decided(store: Store, run: PublishedRun, wanted: Ruling = ADA, now: datetime = NOW) -> StoredDecision:
    return make_decision(store, run, wanted, VALID_DAYS, now)


def made_key(path: Path) -> PrivateKey:
    new_key(path)
    return private_key(path.read_text())


def with_gate(verdict: Verdict, waiver: Waiver | None = None, expired: Waiver | None = None) -> Change:
    """The first gate on the load with another verdict."""

    def change(report: Report) -> Report:
        gates = [
            changed(result, verdict=verdict, waiver=waiver, expired=expired) if result.gate.label == "ttft_p99_ms" else result
            for result in report.judgement.gates
        ]
        overall = next((result.counts_as for result in gates if result.counts_as != "pass"), "pass")
        return changed(report, "judgement", gates=gates, verdict=overall)

    return change


def with_judgement(**changes: object) -> Change:
    return lambda report: changed(report, "judgement", **changes)


def of_plan(part: str = "", **changes: object) -> Change:
    """The plan, or a part of it such as `cell.release`, with other values."""
    return lambda report: changed(report, f"plan.{part}".rstrip("."), **changes)


def of_variant(name: str) -> Change:
    return of_plan("cell", variant=name)


def waiver(expires: date) -> Waiver:
    return Waiver(
        gate="ttft_p99_ms",
        gpu_type="h200",
        variant="fp8",
        profile="throughput",
        owner="Grace",
        reason="nobody waits for the first token here",
        expires=expires,
    )


def _with_evidence(report: Report, run: Run) -> Report:
    def files(stage: str) -> list[EvidenceFile]:
        return [describe(path, run.evidence) for path in sorted((run.evidence / stage).iterdir())]

    return changed(report, stages=[changed(stage, files=files(stage.stage)) for stage in report.stages])
