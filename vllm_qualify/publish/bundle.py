"""One run in the store: evidence by content hash, then the report and its page, and the manifest last."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from vllm_qualify.errors import AlreadyExistsError, HostError, StoreBusyError, StoreError
from vllm_qualify.evidence.measurement import EvidenceFile, Interval
from vllm_qualify.judge.chance import CellChance
from vllm_qualify.judge.start_means import StartMeans
from vllm_qualify.judge.verdict import Outcome
from vllm_qualify.publish.door import check_open
from vllm_qualify.publish.layout import begin, put_place
from vllm_qualify.publish.order import next_number
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.gates import Verdict
from vllm_qualify.recipe.serving import EngineName
from vllm_qualify.recipe.values import Count, Frozen, Number

MANIFEST_VERSION: Literal[2] = 2
_OUTCOMES_OF_VERSION_1 = {"approved": "passed", "not approved": "not passed"}
TYPES = {
    ".css": "text/css",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
PLAIN = "text/plain; charset=utf-8"

# Of metrics whose starts a manifest tells: no more than gates that compare.
MOST_MEANS = 100


class StoredObject(Frozen):
    key: str
    sha256: str
    size: int


class Score(Frozen):
    """The score of an accuracy task: a share. `metric` is the label of its metric."""

    metric: str
    value: Number
    interval: Interval | None = None


class Summary(Frozen):
    """The figures of a run that the board shows. A figure that was not measured, or cannot be trusted, is None.

    `image` is the name of the engine's image; None if the engine is not an image. `score` is the score of the first gate on
    accuracy. The output throughput is that of the load. On a CPU there are no `gpus`, and it is that of the whole machine.
    """

    engine: EngineName
    engine_version: str
    image: str | None = None
    gpus: Count | None = None
    score: Score | None = None
    output_tok_s_per_gpu: Number | None = None


class ReleaseTry(Frozen):
    """What later runs of the same release read of a run. `number` is 1 for the first run of the release in its cell."""

    release: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    number: Count
    verdict: Verdict


class ManifestHead(Frozen):
    """A run and its outcome. A run that `establishes` was made to be a baseline, and with `new_anchor` also an anchor.

    `anchor` is the run that it was held against for good. `chance` is the cell's p-value: see `judge.chance`.

    `sequence` is the number that `publish` got for it from the store: see `order`. Older manifests have none, and no summary.
    `starts` is what each start of the server showed of what is compared; older manifests have none.
    `tried` is None for what is no try of a release: a run that becomes a baseline, or is judged again.
    """

    run_id: str
    cell: str
    outcome: Outcome
    establishes: bool = False
    new_anchor: bool = False
    anchor: str | None = None
    chance: CellChance | None = None
    summary: Summary | None = None
    tried: ReleaseTry | None = None
    sequence: Count | None = None
    starts: Annotated[list[StartMeans], Field(max_length=MOST_MEANS)] = []

    @property
    def is_baseline(self) -> bool:
        return self.establishes and self.outcome == "passed"


class Manifest(ManifestHead):
    """All objects of a run. A run without a manifest was not published completely, and does not count."""

    manifest_version: Literal[1, 2] = MANIFEST_VERSION
    objects: list[StoredObject]

    @model_validator(mode="before")
    @classmethod
    def _of_version_1(cls, given: Any) -> Any:
        """Version 1 had other words for the outcome. Approvals that were signed then still hold."""
        if isinstance(given, dict) and given.get("manifest_version") == 1:
            return given | {"outcome": _OUTCOMES_OF_VERSION_1.get(str(given.get("outcome")))}
        return given


class UnreadableError(StoreError):
    """An object is there, and is not what belongs there."""


def read_manifest(store: Store, key: str) -> Manifest:
    """Raises MissingObjectError, or UnreadableError if it is not a manifest."""
    try:
        return Manifest.model_validate_json(store.get(key))
    except ValidationError as error:
        raise UnreadableError(
            f"not a manifest of a known version: {error.errors()[0]['msg']}",
            "read it with a newer version of vllm-qualify; if that does not, do not trust this run",
            store.locate(key),
        ) from error


def evidence_key(file: EvidenceFile) -> str:
    """`evidence/<sha256>/<name>`: equal content is stored once, and the name still says what the file is."""
    return f"evidence/{file.sha256}/{PurePosixPath(file.path).name}"


def publish(
    store: Store,
    prefix: str,
    head: ManifestHead,
    evidence: Path,
    files: list[EvidenceFile],
    documents: Mapping[str, bytes],
    announce: Callable[[], None] = lambda: None,
) -> str:
    """Store a run and return the manifest's location. `announce` is called before evidence is written.

    A second call with the same content completes what a first one left unfinished.

    Raises:
        StoreBusyError: the store is being pruned.
        HostError: an evidence file is missing or is not what was measured.
        StoreError: the store refused. Objects that were already written do no harm, because the manifest is written last.
    """
    key = f"{prefix}/manifest.json"
    written = [_put(store, f"{prefix}/{name}", body) for name, body in documents.items()]
    begin(store)
    check_open(store)
    if _is_whole(store, key, prefix, files, documents):
        # Nothing more is written: the run may be pruned meanwhile, and what came after that would be a part of it.
        return store.locate(key)
    put_place(store, head.run_id, head.cell)
    announce()
    # Once more: the door may have been closed before this run was announced.
    check_open(store)
    # Until it was announced, a run that was published before may have been pruned, and its documents with it.
    if not all(store.exists(stored.key) for stored in written):
        raise StoreBusyError("the store was pruned meanwhile", "publish the run again", store.locate(prefix))
    objects = {stored.key: stored for stored in written}
    for file in files:
        # If two stages wrote the same file, it becomes one object.
        objects[evidence_key(file)] = objects.get(evidence_key(file)) or put_evidence(store, evidence, file)
    stored = sorted(objects.values(), key=lambda stored: stored.key)
    manifest = Manifest(**head.model_dump() | {"sequence": _sequence(store, head.cell, key)}, objects=stored)
    _put(store, key, json.dumps(manifest.model_dump(), indent=2).encode())
    return store.locate(key)


def _is_whole(store: Store, key: str, prefix: str, files: Iterable[EvidenceFile], documents: Mapping[str, bytes]) -> bool:
    """Whether a run with just these documents and this evidence is published, by its manifest."""
    if not store.exists(key):
        return False
    own = {f"{prefix}/{name}": hashlib.sha256(body).hexdigest() for name, body in documents.items()}
    own |= {evidence_key(file): file.sha256 for file in files}
    return {stored.key: stored.sha256 for stored in read_manifest(store, key).objects} == own


def _sequence(store: Store, cell: str, manifest: str) -> int | None:
    """The run's number in the order of its cell; if its manifest is there already, that manifest's."""
    return read_manifest(store, manifest).sequence if store.exists(manifest) else next_number(store, cell)


def put_evidence(store: Store, evidence: Path, file: EvidenceFile) -> StoredObject:
    """Store a file of the folder `evidence`, unless the store has it. Raises the same as `publish`."""
    return _put(store, evidence_key(file), _evidence_bytes(evidence, file))


def _evidence_bytes(folder: Path, file: EvidenceFile) -> bytes:
    path = folder / file.path
    try:
        body = path.read_bytes()
    except OSError as error:
        raise HostError(
            f"evidence cannot be read: {error.strerror}", "restore it or run the qualification again", str(path)
        ) from error
    if hashlib.sha256(body).hexdigest() != file.sha256:
        raise HostError("evidence was changed after it was measured", "run the qualification again", str(path))
    return body


def _put(store: Store, key: str, body: bytes) -> StoredObject:
    try:
        store.put_new(key, body, TYPES.get(PurePosixPath(key).suffix, PLAIN))
    except AlreadyExistsError:
        if store.get(key) != body:
            raise
    return StoredObject(key=key, sha256=hashlib.sha256(body).hexdigest(), size=len(body))
