"""Publish a judged run, and note which attempts a flow run made."""

import json
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from vllm_qualify.approval.errors import TamperedError
from vllm_qualify.approval.head import head_of
from vllm_qualify.approval.index import announce, index_problem
from vllm_qualify.approval.layout import JSON
from vllm_qualify.approval.pointer import last_approved
from vllm_qualify.errors import AlreadyExistsError
from vllm_qualify.judge.chance import CellChance
from vllm_qualify.judge.start_means import StartMeans, start_means
from vllm_qualify.judge.verdict import Outcome
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.publish import bundle
from vllm_qualify.publish.bundle import find_manifest
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.order import order
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.report.model import Report
from vllm_qualify.report.page import render_page, render_words
from vllm_qualify.runs.folder import DATA_DOCS, Run
from vllm_qualify.secrets import redact


class Published(Frozen):
    """Where a report was published, what was decided about it since then, and whether that was not to deploy it."""

    outcome: Outcome
    passed: bool
    run: Run
    page: str
    manifest: str
    index_problem: str | None = None
    decision: str | None = None
    rejected: bool = False


def publish_run(report: Report, run: Run, store: Store) -> Published:
    """Publish evidence, report, page and manifest, and bring the indexes up to date. Raises StoreError, HostError."""
    to_root = "../" * (report.prefix.count("/") + 1)
    documents = {
        "report.json": redact(report.model_dump_json(indent=2)).encode(),
        # The page's links lead to the evidence on a disk and behind any web server.
        "report.html": redact(render_page(report, lambda file: to_root + bundle.evidence_key(file))).encode(),
    }
    documents |= {name: redact(page).encode() for name, page in render_words(report, run.evidence).items()}
    documents |= {
        f"{DATA_DOCS}/{path.relative_to(run.data_docs).as_posix()}": path.read_bytes()
        for path in sorted(run.data_docs.rglob("*"))
        if path.is_file()
    }
    head = head_of(report, starts_of(report, run.evidence))
    coming, find_approved = partial(announce, store, head.cell, head.run_id), partial(_last_approved, store, head.cell)
    manifest = bundle.publish(store, report.prefix, head, run.evidence, report.files, documents, coming, find_approved)
    outcome = {"outcome": report.outcome, "passed": report.passed, "index_problem": index_problem(store, head.cell)}
    return Published(run=run, page=store.locate(f"{report.prefix}/report.html"), manifest=manifest, **outcome)


def _last_approved(store: Store, cell: str) -> int:
    try:
        return last_approved(store, cell)
    except TamperedError:
        # The run is published all the same. Nothing of the cell is approved before somebody mends the pointer.
        return 0


def starts_of(report: Report, evidence: Path) -> list[StartMeans]:
    """What each start showed of what is compared, by a report and its evidence."""
    return start_means(report.plan, evidence, report.measurements)[: bundle.MOST_MEANS]


def published_as(run: Run, store: Store) -> Published:
    """What `publish_run` returned for a run that is already published."""
    report = run.report()
    page, manifest = (store.locate(f"{report.prefix}/{name}") for name in ("report.html", "manifest.json"))
    return Published(outcome=report.outcome, passed=report.passed, run=run, page=page, manifest=manifest)


def note_attempt(store: Store, flow_run: str, plan: CellPlan) -> None:
    """Note in the store which run a flow run made, so that a restarted flow run finds it. Raises StoreError."""
    noted = {"run_id": plan.run_id, "cell": plan.cell.id, "at": datetime.now(UTC).isoformat()}
    # If the store's answer was lost, the second try finds what the first one wrote.
    with suppress(AlreadyExistsError):
        key = f"{_attempts_folder(flow_run)}{plan.cell.id}/{plan.run_id}.json"
        store.put_new(key, json.dumps(noted, indent=2).encode(), JSON)


def attempts(store: Store, flow_run: str, cell: str = "") -> list[str]:
    """The completely published runs of a flow run, of one cell or of all. Raises StoreError."""
    folder = _attempts_folder(flow_run)
    keys = store.keys(f"{folder}{cell}")
    runs = [key.removeprefix(folder).removesuffix(".json").rsplit("/", 1) for key in keys]
    return [run_id for of, run_id in runs if store.exists(manifest_key(of, run_id))]


def chances(store: Store, flow_runs: Iterable[str]) -> list[CellChance]:
    """The newest published run of each cell that these flow runs qualified, with its p-value. Raises StoreError."""
    keys = [key for flow_run in flow_runs for key in store.keys(_attempts_folder(flow_run))]
    runs = [key.removesuffix(".json").split("/", 2)[2].rsplit("/", 1) for key in keys]
    # A run that was not published whole has no manifest.
    manifests = [manifest for cell, run_id in runs if (manifest := find_manifest(store, cell, run_id))]
    newest = {manifest.cell: manifest.chance for manifest in sorted(manifests, key=order)}
    return [chance for _, chance in sorted(newest.items()) if chance]


def _attempts_folder(flow_run: str) -> str:
    return f"attempts/{flow_run}/"
