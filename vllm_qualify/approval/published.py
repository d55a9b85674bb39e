"""A run in the store: its report, checked against its manifest."""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from vllm_qualify.approval.head import differing_fields
from vllm_qualify.approval.layout import parse_object, reason_of, sha256
from vllm_qualify.publish.bundle import Manifest, StoredObject, UnreadableError, evidence_key
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.store import Store
from vllm_qualify.report.model import Report, read_report


@dataclass(frozen=True)
class PublishedRun:
    """A published run. `document` is the report as it was written, also with keys that this version's model does not know."""

    manifest_object: StoredObject
    manifest: Manifest
    report_object: StoredObject
    report: Report
    document: dict[str, Any]

    @property
    def cell(self) -> str:
        return self.manifest.cell

    @property
    def run_id(self) -> str:
        return self.manifest.run_id

    @property
    def sequence(self) -> int:
        return self.manifest.sequence


def read_run(store: Store, cell: str, run_id: str) -> PublishedRun:
    """The run of a cell, without its evidence. Raises StoreError if it is not whole, or not what its manifest says."""
    key = manifest_key(cell, run_id)
    manifest_body = store.get(key)
    manifest = parse_manifest(manifest_body, store.locate(key))
    named = report_object(manifest, store.locate(key))
    run = check_published(stored_object(key, manifest_body), manifest, store.get(named.key), store.locate(named.key))
    if (run.cell, run.run_id) != (cell, run_id):
        raise _untrusted_error("it is of another run", store.locate(key))
    return run


def parse_manifest(body: bytes, place: str) -> Manifest:
    try:
        return Manifest.model_validate_json(body)
    except ValidationError as error:
        raise _untrusted_error(f"not a manifest: {reason_of(error)}", place) from error


def report_object(manifest: Manifest, place: str) -> StoredObject:
    key = manifest_key(manifest.cell, manifest.run_id).replace("manifest.json", "report.json")
    named = [entry for entry in manifest.objects if entry.key == key]
    if len(named) != 1:
        raise _untrusted_error("the manifest does not name the run's report", place)
    return named[0]


def check_published(manifest_object: StoredObject, manifest: Manifest, report_body: bytes, place: str) -> PublishedRun:
    """Raises StoreError if the report does not match the manifest, or has evidence that the manifest does not name."""
    named = report_object(manifest, place)
    if stored_object(named.key, report_body) != named:
        raise _untrusted_error("the report is not what its manifest says", place)
    report = read_report(report_body, place)
    reported = (report.plan.cell.id, report.run_id, report.plan.run_id, report.outcome)
    if reported != (manifest.cell, manifest.run_id, manifest.run_id, manifest.outcome):
        raise _untrusted_error("the report is of another run than its manifest", place)
    if (manifest.establishes and not report.is_baseline) or manifest.new_anchor != report.is_new_anchor:
        raise _untrusted_error("the report is of another kind of run than its manifest says: no such baseline or anchor", place)
    if differing := differing_fields(manifest, report):
        raise _untrusted_error(f"its manifest says of {', '.join(differing)} what its report does not", place)
    try:
        document = parse_object(report_body)
    except ValueError as error:
        raise _untrusted_error(f"the report cannot be trusted: {error}", place) from error
    known = {(entry.key, entry.sha256) for entry in manifest.objects}
    if not known.issuperset((evidence_key(file), file.sha256) for file in report.files):
        raise _untrusted_error("the report has evidence that its manifest does not name", place)
    return PublishedRun(manifest_object, manifest, named, report, document)


def stored_object(key: str, body: bytes) -> StoredObject:
    return StoredObject(key=key, sha256=sha256(body), size=len(body))


def _untrusted_error(problem: str, place: str) -> UnreadableError:
    return UnreadableError(problem, "do not trust this run", place)
