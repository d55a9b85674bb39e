"""One run in the store: evidence by content hash, then the report and its page, and the manifest last."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from vllm_qualify.errors import AlreadyExistsError, HostError, StoreBusyError, StoreError
from vllm_qualify.evidence.measurement import EvidenceFile, Interval, describe
from vllm_qualify.judge.chance import CellChance
from vllm_qualify.judge.start_means import StartMeans
from vllm_qualify.judge.verdict import Outcome
from vllm_qualify.publish.door import check_open
from vllm_qualify.publish.layout import begin, manifest_key, put_place
from vllm_qualify.publish.order import next_number
from vllm_qualify.publish.store import MOST_EVIDENCE_BYTES, MissingObjectError, Store, TooLongError, checked_key
from vllm_qualify.recipe.gates import Verdict
from vllm_qualify.recipe.serving import EngineName
from vllm_qualify.recipe.values import Count, Frozen, Number

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
    key: Annotated[str, AfterValidator(checked_key)]
    sha256: str
    size: int


class Score(Frozen):
    """The score of an accuracy task: a share. `metric` is the label of its metric."""

    metric: str
    value: Number
    interval: Interval | None = None


class Summary(Frozen):
    """What the board and the cells' pages show of a run. A figure that was not measured, or cannot be trusted, is None.

    `image` is the name of the engine's image; None if the engine is not an image. `score` is the score of the first gate on
    accuracy. The output throughput is that of the load. On a CPU there are no `gpus`, and it is that of the whole machine.
    """

    engine: EngineName
    engine_version: str
    model: str | None = None
    """its name; None in a manifest that was written before models were shown"""
    revision: str | None = None
    """the model's commit, or the digest of its folder"""
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
    run_id: str
    cell: str
    outcome: Outcome
    establishes: bool = False
    """Whether the run was made to be a baseline."""
    establishes_again: bool = False
    """Whether it judges such a run again."""
    new_anchor: bool = False
    """Whether the run was made to be an anchor too."""
    anchor: str | None = None
    """The run that it was held against for good."""
    chance: CellChance | None = None
    """The cell's p-value: see `judge.chance`."""
    summary: Summary
    tried: ReleaseTry | None = None
    """None for a run that is no try of a release: it becomes a baseline, or was judged again."""
    starts: Annotated[list[StartMeans], Field(max_length=MOST_MEANS)] = []
    """What each start of the server showed of each metric that is compared."""

    @property
    def is_baseline(self) -> bool:
        return self.establishes and self.outcome == "passed"

    @property
    def is_baseline_again(self) -> bool:
        """Whether it can be the baseline of runs that are judged by the same gates."""
        return self.establishes_again and self.outcome == "passed"


class Manifest(ManifestHead):
    """All objects of a run. A run without a manifest was not published completely, and does not count."""

    manifest_version: Literal[2] = 2
    sequence: Count
    """The number that `publish` got for the run from the store: see `order`."""
    objects: list[StoredObject]


class UnreadableError(StoreError):
    """An object is there, and is not what belongs there."""


def read_manifest(store: Store, key: str) -> Manifest:
    """Raises MissingObjectError, or UnreadableError if it is not a manifest."""
    try:
        return Manifest.model_validate_json(store.get(key))
    except ValidationError as error:
        problem = f"not a manifest of a known version: {error.errors()[0]['msg']}"
        remedy = "read it with a newer version of vllm-qualify; if that does not, do not trust this run"
        raise UnreadableError(problem, remedy, store.locate(key)) from error


def find_manifest(store: Store, cell: str, run_id: str) -> Manifest | None:
    """None if the run was not published whole. Raises as `read_manifest`."""
    try:
        return read_manifest(store, manifest_key(cell, run_id))
    except MissingObjectError:
        return None


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
    find_approved: Callable[[], int] = lambda: 0,
) -> str:
    """Store a run and return the manifest's location. `announce` is called before evidence is written.

    `find_approved` gives the number of the cell's last approval: the run gets a larger one.

    A second call with the same content completes what a first one left unfinished. Raises StoreBusyError while the store is
    pruned, HostError if an evidence file is missing or not what was measured, and StoreError if the store refuses: objects that
    were already written do no harm, because the manifest is written last.
    """
    key = f"{prefix}/manifest.json"
    with _under_own_id(store, prefix):
        written = [_put_object(store, f"{prefix}/{name}", body) for name, body in documents.items()]
    begin(store)
    check_open(store)
    with _under_own_id(store, prefix):
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
    number = read_manifest(store, key).sequence if store.exists(key) else next_number(store, head.cell, find_approved())
    manifest = Manifest(**head.model_dump(), sequence=number, objects=stored)
    with _under_own_id(store, prefix):
        _put_object(store, key, json.dumps(manifest.model_dump(), indent=2).encode())
    return store.locate(key)


@contextmanager
def _under_own_id(store: Store, prefix: str) -> Iterator[None]:
    """Within the block, what others wrote at the keys of a run is told with its remedy.

    Everybody who may publish can write there, and learns a run's id when it begins. Of a new judgement the id is drawn when it
    is published, so that nobody comes first.
    """
    try:
        yield
    except (AlreadyExistsError, UnreadableError) as error:
        run_id = PurePosixPath(prefix).name
        remedy = (
            f"publish it under a new id: `vllm-qualify rejudge {run_id}`; if you never published it, find out who wrote there"
        )
        raise AlreadyExistsError("other content stands under this run's id", remedy, store.locate(prefix)) from error


def _is_whole(store: Store, key: str, prefix: str, files: Iterable[EvidenceFile], documents: Mapping[str, bytes]) -> bool:
    """Whether a run with just these documents and this evidence is published, by its manifest."""
    if not store.exists(key):
        return False
    own = {f"{prefix}/{name}": hashlib.sha256(body).hexdigest() for name, body in documents.items()}
    own |= {evidence_key(file): file.sha256 for file in files}
    return {stored.key: stored.sha256 for stored in read_manifest(store, key).objects} == own


def put_evidence(store: Store, evidence: Path, file: EvidenceFile) -> StoredObject:
    """Store a file of the folder `evidence`, unless the store has it. Raises the same as `publish`."""
    path = evidence / file.path
    try:
        body = path.read_bytes()
    except OSError as error:
        problem = f"evidence cannot be read: {error.strerror}"
        raise HostError(problem, "restore it or run the qualification again", str(path)) from error
    if hashlib.sha256(body).hexdigest() != file.sha256:
        raise HostError("evidence was changed after it was measured", "run the qualification again", str(path))
    try:
        return _put_object(store, evidence_key(file), body)
    except AlreadyExistsError as error:
        remedy = "find out who wrote it, delete it, and publish the run again"
        place = store.locate(evidence_key(file))
        raise AlreadyExistsError("this object holds another file than its key says", remedy, place) from error


def write_evidence(folder: Path, file: EvidenceFile, body: bytes) -> bool:
    """Write a file of evidence below a folder. Returns whether it is what was measured."""
    path = folder / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return describe(path, folder) == file


def read_evidence(store: Store, file: EvidenceFile) -> bytes:
    """A file of evidence. Raises StoreError, also if it is longer than is said of it."""
    try:
        return store.get(evidence_key(file), min(file.size, MOST_EVIDENCE_BYTES))
    except TooLongError as error:
        place = store.locate(evidence_key(file))
        raise StoreError("a stored object is not what its report says", "do not trust this run", place) from error


def _put_object(store: Store, key: str, body: bytes) -> StoredObject:
    try:
        store.put_new(key, body, TYPES.get(PurePosixPath(key).suffix, PLAIN))
    except AlreadyExistsError:
        if store.get(key, MOST_EVIDENCE_BYTES) != body:
            raise
    return StoredObject(key=key, sha256=hashlib.sha256(body).hexdigest(), size=len(body))
