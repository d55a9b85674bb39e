"""A store with many synthetic reports: whole and valid, each with a report, a page and a manifest; all share their evidence.

Approvals are signed by a key of this bench. The reports say that they passed; they are not judged again.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from tests.approval.builder import ADA, VALID_DAYS, publish_report
from vllm_qualify.approval.actions import bring_into_force
from vllm_qualify.approval.index import make_again, write_index
from vllm_qualify.approval.layout import JSON
from vllm_qualify.approval.published import PublishedRun, read_run, stored_object
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.layout import manifest_key, prepare, put_place
from vllm_qualify.publish.store import Store
from vllm_qualify.report.model import Report
from vllm_qualify.runs.folder import Run

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
AT_ONCE = 8
# The gateway keeps all in memory, and nobody looks at these pages.
PAGE = b"<!doctype html><title>Report</title>"
TWOS = (("bf16", "fp8"), ("h100", "h200"), ("chat", "batch"))


class MadeReport(NamedTuple):
    """One report to be published: its cell and its run."""

    cell: str
    run_id: str


class Template(NamedTuple):
    """A published report, of which all others are copies with other names, and the objects that they share."""

    run: Run
    published: PublishedRun
    shared: dict[str, bytes]


def report_template(folder: Path) -> Template:
    """The template; `folder` gets its evidence."""
    store = DirectoryStore(folder / "report_template")
    published = publish_report(store, folder / "runs", change=_establishing)
    shared = {named.key: store.get(named.key) for named in published.manifest.objects if named.key.startswith("evidence/")}
    return Template(Run(folder=folder / "runs" / published.run_id), published, shared)


def _establishing(report: Report) -> Report:
    return report.model_copy(update={"plan": report.plan.model_copy(update={"establishes": True})})


def numbered_cell(number: int) -> str:
    """A name for each number: two variants, two GPU types and two profiles of each model."""
    variant, gpu_type, profile = (two[number >> bit & 1] for bit, two in enumerate(TWOS))
    return f"model-{number // 8:04}/{variant}/{gpu_type}/{profile}"


def names(reports: int, cells: int) -> list[MadeReport]:
    """The same number of reports for each cell, one a minute."""
    starts = (BEGAN + timedelta(minutes=number) for number in range(reports))
    return [MadeReport(numbered_cell(number % cells), f"{at:%Y%m%dT%H%M%SZ}-{number:06x}") for number, at in enumerate(starts)]


def report_of(given: Template, made: MadeReport) -> Report:
    """The template's report under another name."""
    recipe, variant, gpu_type, profile = made.cell.split("/")
    named = {"recipe": recipe, "variant": variant, "gpu_type": gpu_type, "profile": profile}
    plan = given.published.report.plan
    plan = plan.model_copy(update={"cell": plan.cell.model_copy(update=named), "run_id": made.run_id})
    return given.published.report.model_copy(update={"plan": plan, "run_id": made.run_id})


def put_report(store: Store, given: Template, made: MadeReport) -> None:
    """Publish a report without its indexes, which are made afterwards, once for each cell."""
    report = report_of(given, made)
    documents = {"report.json": report.model_dump_json().encode(), "report.html": PAGE}
    bodies = {f"{report.prefix}/{name}": body for name, body in documents.items()}
    objects = [stored_object(key, body) for key, body in (given.shared | bodies).items()]
    manifest = given.published.manifest.model_copy(update={"cell": made.cell, "run_id": made.run_id, "objects": objects})
    for key, body in bodies.items():
        store.put_new(key, body, JSON)
    put_place(store, made.run_id, made.cell)
    store.put_new(manifest_key(made.cell, made.run_id), manifest.model_dump_json().encode(), JSON)


def approve_one(store: Store, made: MadeReport, key: PrivateKey) -> None:
    now = datetime.now(UTC)
    bring_into_force(store, read_run(store, made.cell, made.run_id), ADA, VALID_DAYS, key, now)


def fill(store: Store, given: Template, reports: int, cells: int, key: PrivateKey) -> None:
    """Publish that many reports, and approve the newest but one of each cell."""
    every = names(reports, cells)
    prepare(store)
    for name, body in given.shared.items():
        store.put_new(name, body, JSON)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda made: put_report(store, given, made), every))
        list(pool.map(lambda made: approve_one(store, made, key), every[-2 * cells : -cells]))
        list(pool.map(lambda number: make_again(store, numbered_cell(number)), range(cells)))
    write_index(store)
