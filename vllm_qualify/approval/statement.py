"""The signed statement: in-toto's Statement v1 with the predicate test-result v0.1.

It depends only on the run's manifest, its report and the decision, byte by byte: a verifier makes it again and compares.
Parts of the report are copied as they were written, so that later versions of the report's model give the same statement.
A change of the statement needs a new version. The code must still make the old version for approvals that were signed before.
"""

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_qualify.approval.decision import StoredDecision, check_passed
from vllm_qualify.approval.layout import Moment, canonical, decision_key, reason_of
from vllm_qualify.approval.published import PublishedRun, stored_object
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.server import MODEL, Part
from vllm_qualify.errors import StoreError
from vllm_qualify.judge.verdict import GateVerdict
from vllm_qualify.publish.bundle import StoredObject, evidence_key

STATEMENT_VERSION: Literal[1] = 1
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"

CONFIG = "serve/server.yaml"
INSTALLED = (
    "SHA-256 over the sorted lines of its wheel's RECORD that tell of its own files, and of its plugins' RECORDs, joined by "
    "newlines; a file with another content has its path and the content's hash in place of its line"
)
FOLDER = "SHA-256 over its files, sorted by path: path, null, SHA-256 of the content in hexadecimal, newline"

Document = dict[str, Any]


class _Reading(BaseModel):
    """The part of a statement that this project reads; a statement may have more keys."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Deciding(_Reading):
    by: str
    automatic: bool
    reason: str | None
    at: Moment
    object: StoredObject


class Qualification(_Reading):
    """`qualification` in the predicate. `server`, `fingerprint`, … are the same as in the report."""

    version: Literal[1]
    run_id: str
    cell: dict[str, Any]
    server: dict[str, Any]
    manifest: StoredObject
    report: StoredObject
    decision: Deciding
    expires: date

    @property
    def cell_id(self) -> str:
        return str(self.cell["id"])


class Predicate(_Reading):
    result: Literal["PASSED", "WARNED"]
    qualification: Qualification


class Statement(_Reading):
    type_: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")]
    predicate_type: Annotated[Literal["https://in-toto.io/attestation/test-result/v0.1"], Field(alias="predicateType")]
    predicate: Predicate


def read_statement(payload: bytes, place: str) -> Qualification:
    """What a statement says of the run. Raises StoreError if it is not a statement of this version."""
    try:
        return Statement.model_validate_json(payload).predicate.qualification
    except ValidationError as error:
        problem = f"not a statement of version {STATEMENT_VERSION}: {reason_of(error)}"
        raise StoreError(problem, "read it with the version that wrote it", place) from error


def statement(run: PublishedRun, stored: StoredDecision) -> bytes:
    """The statement about an approved run, in the bytes to sign.

    Raises CallerError if the run had not passed on the day of the decision, ValueError if the decision is a rejection.
    """
    decision, report = stored.decision, run.report
    if decision.verdict != "approve" or decision.expires is None:
        raise ValueError("nothing is stated of a rejected run")
    check_passed(report, decision.at.date())
    gates = report.judgement.gates
    warned = [result.gate.label for result in gates if result.verdict != "pass"]
    return canonical(
        {
            "_type": STATEMENT_TYPE,
            "subject": [_engine_subject(run), *_model_subjects(run)],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "result": "WARNED" if warned else "PASSED",
                "configuration": _stated_configuration(run),
                "passedTests": [result.gate.label for result in gates if result.verdict == "pass"],
                "warnedTests": warned,
                "failedTests": [],
                "qualification": _stated_qualification(run, stored) | {"expires": decision.expires.isoformat()},
            },
        }
    )


def _engine_subject(run: PublishedRun) -> Document:
    engine, identity = run.report.plan.server.engine, run.report.plan.cell.release.engine
    digest = {"sha256": identity.digest.removeprefix("sha256:")}
    if isinstance(engine, EngineImage):
        return {"name": engine.repository, "digest": digest}
    return {"name": f"{identity.kind} {identity.version}", "digest": digest, "annotations": {"digest": INSTALLED}}


def _model_subjects(run: PublishedRun) -> list[Document]:
    """The model's commit on the hub, or its local folder, with each file of it; and all else that shapes the replies.

    A model of the hub is one of the parts: `plan.contradiction` refuses a report without it.
    """
    release, server = run.report.plan.cell.release, run.report.plan.server
    parts = [subject for part in server.parts for subject in _part_subjects(part)]
    if not server.is_local:
        return parts
    digest = {"sha256": release.revision.removeprefix("sha256:")}
    folder = {"name": release.model, "digest": digest, "annotations": {"digest": FOLDER}}
    return [
        folder,
        *({"name": f"{release.model}/{path}", "digest": {"sha256": sha256}} for path, sha256 in release.files.items()),
        *parts,
    ]


def _part_subjects(part: Part) -> list[Document]:
    """A repository at its commit with the hub's hash of each file, or a file or folder by its content."""
    named = {} if part.option == MODEL else {"annotations": {"option": part.option}}
    revision = {"gitCommit": part.revision} if part.is_of_the_hub else {"sha256": part.revision.removeprefix("sha256:")}
    files = ((f"{part.name}/{path}", digest.partition(":")) for path, digest in part.files.items())
    return [
        {"name": part.name, "digest": revision} | named,
        *({"name": name, "digest": {algorithm: digest}} for name, (algorithm, _, digest) in files),
    ]


def _stated_configuration(run: PublishedRun) -> list[Document]:
    """The report, which contains the whole plan, and the server's config file as it was written."""
    files = [file for file in run.report.files if file.path == CONFIG]
    digests = {run.report_object.key: run.report_object.sha256} | {evidence_key(file): file.sha256 for file in files}
    return [{"name": key, "digest": {"sha256": sha256}} for key, sha256 in digests.items()]


def _stated_qualification(run: PublishedRun, stored: StoredDecision) -> Document:
    decision, report, document = stored.decision, run.report, run.document
    plan, anchor = document["plan"], document["plan"].get("anchor")
    gates = list(zip(report.judgement.gates, document["judgement"]["gates"], strict=True))
    decided = stored_object(decision_key(run.cell, run.run_id), stored.body)
    return {
        "version": STATEMENT_VERSION,
        "run_id": run.run_id,
        "rejudged_from": report.rejudged_from,
        "baseline": report.plan.baseline.run_id if report.plan.baseline else None,
        "created_at": document["created_at"],
        "cell": {"id": run.cell, **plan["cell"]},
        "server": plan["server"],
        "fingerprint": plan["fingerprint"],
        "gates": [_stated_gate(gate, raw) for gate, raw in gates],
        # The model has defaults for both: a report that somebody wrote may lack them.
        "anchor": {"run_id": anchor["run_id"], "chosen": anchor["chosen"]} if anchor else None,
        "tries": plan.get("tries", []),
        "not_judged": [gate.label for gate in report.judgement.not_judged],
        "waivers": [raw["waiver"] for gate, raw in gates if gate.counts_as != gate.verdict],
        "tools": _stated_tools(run),
        "decision": {
            "by": decision.by,
            "automatic": decision.automatic,
            "reason": decision.reason,
            "at": decision.at.isoformat(),
            "object": decided.model_dump(),
        },
        "manifest": run.manifest_object.model_dump(),
        "report": run.report_object.model_dump(),
    }


def _stated_gate(result: GateVerdict, raw: Document) -> Document:
    interval = result.interval
    return {
        "name": result.gate.label,
        "gate": raw["gate"],
        "bound": result.gate.bound,
        "unit": result.gate.unit,
        "verdict": result.verdict,
        "value": result.value,
        "interval": {"lower": interval.lower, "upper": interval.upper} if interval else None,
        "sample_count": result.sample_count,
        "waived": result.counts_as != result.verdict,
    }


def _stated_tools(run: PublishedRun) -> dict[str, str]:
    report, engine = run.report, run.report.plan.cell.release.engine
    name, _, version = report.made_by.partition(" ")
    tools = {name: version, engine.kind: engine.version, "load client": report.plan.client_version}
    return tools | {tool: version for stage in report.stages for tool, version in stage.tools.items()}
