"""Ed25519 keys and DSSE envelopes, by securesystemslib.

Its import takes 0.2 s; only code that signs or verifies imports this module.
"""

import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from pydantic import Field, ValidationError
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import UnverifiedSignatureError
from securesystemslib.signer import CryptoSigner, Signature, SSlibKey  # type: ignore[attr-defined]  # it lists no names as its own

from vllm_qualify.approval.errors import OtherKeyError, TamperedError
from vllm_qualify.approval.layout import readable
from vllm_qualify.errors import CallerError, HostError, QualifyError
from vllm_qualify.recipe.values import Frozen

PublicKey = SSlibKey
PrivateKey = CryptoSigner

PRIVATE_KEY, PUBLIC_KEY = "VLLM_QUALIFY_PRIVATE_KEY", "VLLM_QUALIFY_PUBLIC_KEY"
PASSWORD = f"{PRIVATE_KEY}_PASSWORD"
IN_TOTO: Literal["application/vnd.in-toto+json"] = "application/vnd.in-toto+json"
# The most that OpenSSL reads.
MOST_PASSWORD_BYTES = 1023
# A PEM of the longest RSA key has some 13,000 bytes. A device's file never ends.
MOST_KEY_BYTES = 64 * 1024
_SET_PASSWORD = f"set {PASSWORD} to its password, or {PASSWORD}_FILE to a file that holds it"
_MAKE_ONE = "make a key pair with `vllm-qualify key new PATH`"
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)


class Opened(NamedTuple):
    """The payload that a trusted key signed, and the id of that key."""

    payload: bytes
    key_id: str


def short_id(key_id: str) -> str:
    """The part of a key's id that people compare."""
    return key_id[:16]


def new_key(path: Path, password: bytes | None = None) -> PublicKey:
    """Write a new key pair: the private key to `path`, readable by its owner only, and the public one to `<path>.pub`.

    With a password, the private key is encrypted. Raises CallerError if one of the files exists already or the password is too
    long, HostError if they cannot be written.
    """
    if password and len(password) > MOST_PASSWORD_BYTES:
        raise CallerError("the password is too long", f"take one of at most {MOST_PASSWORD_BYTES} bytes", str(path))
    key = Ed25519PrivateKey.generate()
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    beside = path.with_name(f"{path.name}.pub")
    _create_file(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption), 0o600)
    try:
        _create_file(beside, public, 0o644)
    except QualifyError:
        path.unlink()
        raise
    return SSlibKey.from_crypto(key.public_key())


def private_key(text: str | None = None, ask: Callable[[], str] | None = None) -> PrivateKey:
    """The key to sign with: `text`, a PEM; else VLLM_QUALIFY_PRIVATE_KEY, else the file VLLM_QUALIFY_PRIVATE_KEY_FILE.

    The password of an encrypted key comes from `key_password`, else from `ask`, which asks a person. Raises CallerError if
    there is no key, it is not an Ed25519 key, its password is missing or wrong, or others may read its file.
    """
    body, place = _key_pem(text, PRIVATE_KEY, is_secret=True)
    key = _decrypt_key(body, place, ask) if b"ENCRYPTED" in body else _load_key(body, None)
    if key is None:
        raise CallerError("this is not a private key in PEM", _MAKE_ONE, place)
    if not isinstance(key, Ed25519PrivateKey):
        raise CallerError("this is not an Ed25519 key", _MAKE_ONE, place)
    return CryptoSigner(key)


def key_password() -> bytes | None:
    """The password in VLLM_QUALIFY_PRIVATE_KEY_PASSWORD, else in the file VLLM_QUALIFY_PRIVATE_KEY_PASSWORD_FILE, else None.

    A line break at the file's end is no part of it. Raises CallerError if the file is not readable, is empty, or is readable
    by others.
    """
    if value := os.environ.get(PASSWORD):
        return os.fsencode(value)
    file = os.environ.get(f"{PASSWORD}_FILE")
    if not file:
        return None
    password = _read_key_file(Path(file), is_secret=True, what="password").rstrip(b"\r\n")
    if not password:
        raise CallerError("the password is empty", "write it into this file", file)
    return password


def public_keys(files: Sequence[Path] = ()) -> list[PublicKey]:
    """The trusted keys: from `files`, else VLLM_QUALIFY_PUBLIC_KEY, else the file VLLM_QUALIFY_PUBLIC_KEY_FILE.

    Each may hold several keys, one PEM after the other. Raises CallerError if there is none, or one is no public Ed25519 key.
    """
    given = [(_read_key_file(file, is_secret=False), str(file)) for file in files]
    keys = []
    for body, place in given or [_key_pem(None, PUBLIC_KEY, is_secret=False)]:
        blocks = [match[0] for match in _BLOCK.finditer(body)]
        if not blocks:
            raise CallerError("this is not a public key in PEM", "give the file that ends in .pub", place)
        keys += [_load_public_key(block, place) for block in blocks]
    return keys


def keys_of_others() -> list[PublicKey]:
    """The trusted keys of this environment; none if it names none. Raises CallerError if one is no public Ed25519 key."""
    return public_keys() if os.environ.get(PUBLIC_KEY) or os.environ.get(f"{PUBLIC_KEY}_FILE") else []


def sign(statement: bytes, key: PrivateKey) -> bytes:
    """The statement in a DSSE envelope. The same key and the same bytes always give the same signature."""
    envelope = Envelope(statement, IN_TOTO, {})
    envelope.sign(key)
    return readable(envelope.to_dict())


def open_envelope(body: bytes, trusted: Sequence[PublicKey], place: str) -> Opened:
    """The content of an envelope that one of the keys signed.

    Raises TamperedError if it is not an envelope as `sign` writes it or its content is not what was signed, and OtherKeyError
    if no trusted key signed it.
    """
    envelope = _parse_envelope(body, place)
    for signature in envelope.signatures.values():
        for key in trusted:
            if _signed_by(key, signature, envelope.pae()):
                if signature.keyid != key.keyid:
                    raise _tampered_error("the signature names another key than the one that made it", place)
                return Opened(envelope.payload, key.keyid)
    signers, known = list(envelope.signatures), [key.keyid for key in trusted]
    if set(signers) & set(known):
        raise _tampered_error("what is signed is not what the key signed", place)
    problem = f"signed by key {', '.join(map(short_id, signers))}; trusted: {', '.join(map(short_id, known)) or 'none'}"
    raise OtherKeyError(problem, "trust it only with the public key from whoever approves your releases", place)


class _EnvelopeForm(Frozen):
    class _Signature(Frozen):
        keyid: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
        sig: str

    payload: str
    payloadType: Literal["application/vnd.in-toto+json"]  # noqa: N815  (DSSE's name)
    signatures: Annotated[list[_Signature], Field(min_length=1)]


def _parse_envelope(body: bytes, place: str) -> Envelope:
    try:
        envelope = Envelope.from_dict(_EnvelopeForm.model_validate_json(body).model_dump())
    except (ValidationError, ValueError) as error:
        raise _tampered_error("this is not a signed approval", place) from error
    # Base64 and JSON can be written in many ways, but only one was signed and stored.
    if readable(envelope.to_dict()) != body:
        raise _tampered_error("the envelope is not as it was written", place)
    return envelope


def _signed_by(key: PublicKey, signature: Signature, content: bytes) -> bool:
    try:
        # Only the key counts: the id in an envelope is a hint that is not signed.
        key.verify_signature(Signature(key.keyid, signature.signature), content)
    except UnverifiedSignatureError:
        return False
    return True


def _tampered_error(problem: str, place: str) -> TamperedError:
    return TamperedError(problem, "do not trust it; get the approval again from the store", place)


def _key_pem(text: str | None, name: str, *, is_secret: bool) -> tuple[bytes, str]:
    """A key's PEM, and where it comes from."""
    if text is not None:
        return text.encode(), "key"
    if value := os.environ.get(name):
        return value.encode(), name
    if file := os.environ.get(f"{name}_FILE"):
        return _read_key_file(Path(file), is_secret=is_secret), f"{name}_FILE"
    raise CallerError("there is no key", f"set {name} to a PEM, or {name}_FILE to its file; {_MAKE_ONE}", name)


def _read_key_file(path: Path, *, is_secret: bool, what: str = "key") -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            if is_secret and os.fstat(file.fileno()).st_mode & (stat.S_IROTH | stat.S_IWOTH):
                problem = f"every user of this machine may use the {'private key' if what == 'key' else what}"
                raise CallerError(problem, f"chmod 600 {path}", str(path))
            body = file.read(MOST_KEY_BYTES + 1)
        if len(body) > MOST_KEY_BYTES:
            raise CallerError(f"the file is longer than a {what}", f"give the file of a {what}", str(path))
        return body
    except OSError as error:
        raise CallerError(f"the {what} cannot be read: {error.strerror}", f"give the file of a {what}", str(path)) from error


def _decrypt_key(body: bytes, place: str, ask: Callable[[], str] | None) -> PrivateKeyTypes:
    password, source = key_password(), PASSWORD
    if password is None and ask:
        password, source = ask().encode(), "this password"
    if not password:
        raise CallerError("the private key is encrypted", _SET_PASSWORD, place)
    key = _load_key(body, password)
    if key is None:
        raise CallerError(f"{source} does not open the private key", _SET_PASSWORD, place)
    return key


def _load_key(body: bytes, password: bytes | None) -> PrivateKeyTypes | None:
    """None if it is not a private key, or not with this password. The library's own message may reveal the key."""
    try:
        return load_pem_private_key(body, password)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None


def _load_public_key(block: bytes, place: str) -> PublicKey:
    if b"PRIVATE KEY" in block:
        raise CallerError("this is a private key", "give the public one, the file that ends in .pub", place)
    try:
        key = load_pem_public_key(block)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CallerError("this is not a public key in PEM", "give the file that ends in .pub", place) from error
    if not isinstance(key, Ed25519PublicKey):
        raise CallerError("this is not an Ed25519 key", _MAKE_ONE, place)
    return SSlibKey.from_crypto(key)


def _create_file(path: Path, body: bytes, mode: int) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(body)
    except FileExistsError as error:
        problem = "there is a file already, and keys are not replaced"
        raise CallerError(problem, "choose another path", str(path)) from error
    except OSError as error:
        raise HostError(f"the key cannot be written: {error.strerror}", "choose another path", str(path)) from error
