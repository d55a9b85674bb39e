"""Open Model Signing: whether the files of a model are those that its publisher signed.

`model.sig` beside the weights is a Sigstore bundle with a DSSE envelope. Its payload is an in-toto statement with the
SHA-256 of each file. The format is that of model-signing 1.x (https://github.com/sigstore/model-transparency). That library is
not used: it compares a whole folder without links, and a cache of the hub has links, and not the weights in a second format.
"""

import hashlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import AliasPath, Base64Bytes, BaseModel, Field, ValidationError
from securesystemslib.dsse import Envelope

from vllm_qualify.engine.environment import file_sha256
from vllm_qualify.engine.hub import needed_files
from vllm_qualify.engine.server import MODEL, ServerPlan
from vllm_qualify.errors import HubError, writing
from vllm_qualify.recipe.publisher import HASHES, key_id, public_key

SIGNATURE = "model.sig"
MOST_BYTES = 16 * 2**20
_KIND = "model-signature"
_OF_GIT = (".git", ".gitattributes", ".github", ".gitignore")
AT_ONCE = 8


def _field_below(*keys: str) -> Any:
    """A field of the document that these keys lead to."""
    return Field(validation_alias=AliasPath(*keys))


class _Signature(BaseModel):
    sig: Base64Bytes


class _Bundle(BaseModel):
    payload: Base64Bytes = _field_below("dsseEnvelope", "payload")
    payload_type: Literal["application/vnd.in-toto+json"] = _field_below("dsseEnvelope", "payloadType")
    signatures: Annotated[list[_Signature], Field(min_length=1, max_length=1)] = _field_below("dsseEnvelope", "signatures")


class _Subject(BaseModel):
    sha256: str = _field_below("digest", "sha256")


class _Resource(BaseModel):
    name: str
    algorithm: Literal["sha256"]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Statement(BaseModel):
    kind: Literal["https://in-toto.io/Statement/v1"] = _field_below("_type")
    predicate_kind: Literal["https://model_signing/signature/v1.0"] = _field_below("predicateType")
    subject: Annotated[list[_Subject], Field(min_length=1, max_length=1)]
    method: Literal["files"] = _field_below("predicate", "serialization", "method")
    resources: list[_Resource] = _field_below("predicate", "resources")


def check_publisher(server: ServerPlan, cached: Path | None, place: str) -> None:
    """Check a server's model, if its publisher's key is named. `cached` is its folder in the hub's cache. As `check_signed`."""
    if server.signed_by is None:
        return
    model = server.part(MODEL)
    files = model.files if model else {}
    left_out = files.keys() - set(needed_files(files))
    check_signed(cached or Path(server.model), server.signed_by, left_out, server.model, place)


def check_signed(folder: Path, signed_by: str, left_out: Collection[str], name: str, place: str) -> None:
    """Check that the files of a model's folder are those that the key `signed_by` (a PEM) signed, no more and no less.

    `left_out` are signed files that are not served, and so need not be there. Git's own files need no signature. Raises
    HubError if there is no signature, it is another key's or of another form, or a file is not what was signed; HostError if a
    file cannot be read.
    """
    signed = _signed_digests(_read_bundle(folder / SIGNATURE, name, place), signed_by, name, place)
    with writing(place), ThreadPoolExecutor(AT_ONCE) as pool:
        paths = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if not path.is_dir()]
        served = [path for path in paths if path != SIGNATURE and path.split("/")[0] not in _OF_GIT]
        there = dict(zip(served, pool.map(lambda path: file_sha256(folder / path), served), strict=True))
    wrong = [f"{path} is not what was signed" for path in served if signed.get(path) != there[path]]
    wrong += [f"{path} is missing" for path in sorted(signed.keys() - there.keys() - {*left_out})]
    if wrong:
        problems = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise _signature_error(f"{name} is not the model that was signed: {problems}", "find out who changed the model", place)


def _read_bundle(file: Path, name: str, place: str) -> bytes:
    with writing(place):
        if not file.is_file():
            remedy = "take a signed model, or leave signed_by out of the recipe"
            raise _signature_error(f"{name} has no {SIGNATURE}", remedy, place)
        if file.stat().st_size > MOST_BYTES:
            raise _signature_error(f"{SIGNATURE} of {name} has more than {MOST_BYTES // 2**20} MiB", _UNKNOWN, place)
        return file.read_bytes()


_UNKNOWN = "ask the publisher for one of model-signing 1.x by a key, with the SHA-256 of each file"


def _signed_digests(bundle: bytes, signed_by: str, name: str, place: str) -> dict[str, str]:
    """The SHA-256 of each signed file. Raises HubError."""
    try:
        envelope = _Bundle.model_validate_json(bundle)
    except (ValidationError, RecursionError) as error:
        raise _signature_error(f"{SIGNATURE} of {name} is not a signature by a key", _UNKNOWN, place) from error
    key = public_key(signed_by)
    signed = Envelope(envelope.payload, envelope.payload_type, {}).pae()
    try:
        key.verify(envelope.signatures[0].sig, signed, ec.ECDSA(HASHES[key.curve.key_size]))
    except InvalidSignature as error:
        problem = f"{SIGNATURE} of {name} is not by the key {key_id(signed_by)[:16]}, which the recipe names"
        raise _signature_error(problem, "find out who signed the model, or correct signed_by", place) from error
    try:
        statement = _Statement.model_validate_json(envelope.payload)
    except (ValidationError, RecursionError) as error:
        raise _signature_error(f"{SIGNATURE} of {name} signs something else than files by SHA-256", _UNKNOWN, place) from error
    digests = {resource.name: resource.digest for resource in statement.resources}
    whole = hashlib.sha256(b"".join(bytes.fromhex(resource.digest) for resource in statement.resources)).hexdigest()
    if len(digests) < len(statement.resources) or whole != statement.subject[0].sha256:
        raise _signature_error(f"{SIGNATURE} of {name} contradicts itself", _UNKNOWN, place)
    return digests


def _signature_error(problem: str, remedy: str, place: str) -> HubError:
    return HubError(problem, remedy, place, kind=_KIND)
