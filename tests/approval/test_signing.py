"""Keys and envelopes."""

import base64
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from vllm_qualify.approval.errors import OtherKeyError, TamperedError
from vllm_qualify.approval.signing import (
    MOST_PASSWORD_BYTES,
    PASSWORD,
    PRIVATE_KEY,
    PUBLIC_KEY,
    PrivateKey,
    new_key,
    open_envelope,
    private_key,
    public_keys,
    sign,
)
from vllm_qualify.errors import CallerError, HostError

ELLIPTIC = ec.generate_private_key(ec.SECP256R1())
STATEMENT = b'{"_type":"https://in-toto.io/Statement/v1"}'


@pytest.fixture(autouse=True)
def no_outer_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PRIVATE_KEY, PUBLIC_KEY, PASSWORD):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)


def pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, password: bytes | None = None) -> str:
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption).decode()


def test_a_new_key_is_its_owners_alone_and_has_its_public_one_beside_it(tmp_path: Path) -> None:
    made = new_key(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert private_key((tmp_path / "key").read_text()).public_key == made
    assert public_keys([tmp_path / "key.pub"]) == [made]


@pytest.mark.parametrize("taken", ["key", "key.pub"])
def test_a_key_is_never_replaced(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).write_text("precious")
    with pytest.raises(CallerError, match="keys are not replaced"):
        new_key(tmp_path / "key")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(taken, "precious")]


def test_a_key_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="No such file"):
        new_key(tmp_path / "missing" / "key")


def test_the_environment_names_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_file, in_text = new_key(tmp_path / "a"), new_key(tmp_path / "b")
    monkeypatch.setenv(f"{PRIVATE_KEY}_FILE", str(tmp_path / "a"))
    monkeypatch.setenv(f"{PUBLIC_KEY}_FILE", str(tmp_path / "a.pub"))
    assert (private_key().public_key, public_keys()) == (in_file, [in_file])
    monkeypatch.setenv(PRIVATE_KEY, (tmp_path / "b").read_text())
    monkeypatch.setenv(PUBLIC_KEY, (tmp_path / "b.pub").read_text())
    assert (private_key().public_key, public_keys()) == (in_text, [in_text])
    assert public_keys([tmp_path / "a.pub"]) == [in_file]


def test_a_file_may_hold_several_public_keys(tmp_path: Path) -> None:
    keys = [new_key(tmp_path / "old"), new_key(tmp_path / "new")]
    (tmp_path / "both").write_text((tmp_path / "old.pub").read_text() + "\n" + (tmp_path / "new.pub").read_text())
    assert public_keys([tmp_path / "both"]) == keys


def test_an_encrypted_key_needs_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    text = pem(Ed25519PrivateKey.generate(), b"open sesame")
    with pytest.raises(CallerError, match=f"(?s)encrypted.*set {PASSWORD}"):
        private_key(text)
    monkeypatch.setenv(PASSWORD, "wrong")
    with pytest.raises(CallerError, match=f"{PASSWORD} does not open"):
        private_key(text)
    monkeypatch.setenv(PASSWORD, "open sesame")
    assert private_key(text).public_key.keytype == "ed25519"
    # Beside a plain key it does not matter.
    assert private_key(pem(Ed25519PrivateKey.generate())).public_key.scheme == "ed25519"


def test_a_password_may_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_key(tmp_path / "key", b"open sesame")
    file = tmp_path / "password"
    monkeypatch.setenv(f"{PRIVATE_KEY}_FILE", str(tmp_path / "key"))
    monkeypatch.setenv(f"{PASSWORD}_FILE", str(file))
    with pytest.raises(CallerError, match="the password cannot be read: No such file"):
        private_key()
    file.write_text("\n")
    file.chmod(0o600)
    with pytest.raises(CallerError, match="the password is empty"):
        private_key()
    file.write_text("open sesame\n")
    assert private_key().public_key == made
    file.chmod(0o604)
    with pytest.raises(CallerError, match="every user of this machine may use the password"):
        private_key()


def test_a_person_may_be_asked_for_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_key(tmp_path / "key", b"open sesame")
    text = (tmp_path / "key").read_text()
    assert "ENCRYPTED" in text
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert private_key(text, lambda: "open sesame").public_key == made
    with pytest.raises(CallerError, match="this password does not open the private key") as raised:
        private_key(text, lambda: "wrong")
    assert raised.value.__cause__ is None
    monkeypatch.setenv(PASSWORD, "open sesame")
    assert private_key(text, lambda: pytest.fail("nobody is asked")).public_key == made


def test_a_password_that_no_library_reads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="too long"):
        new_key(tmp_path / "key", b"a" * (MOST_PASSWORD_BYTES + 1))
    assert list(tmp_path.iterdir()) == []
    new_key(tmp_path / "key", b"a" * MOST_PASSWORD_BYTES)
    assert private_key((tmp_path / "key").read_text(), lambda: "a" * MOST_PASSWORD_BYTES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is not a private key in PEM"),
        ("hunter2-hunter2", "this is not a private key in PEM"),
        (pem(Ed25519PrivateKey.generate()).replace("M", "?"), "this is not a private key in PEM"),
        (pem(ELLIPTIC), "this is not an Ed25519 key"),
    ],
    ids=["empty", "a word", "broken", "elliptic"],
)
def test_what_is_no_private_key_is_reported_without_it(text: str, message: str) -> None:
    with pytest.raises(CallerError) as raised:
        private_key(text)
    assert message in str(raised.value)
    assert not text or text not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o777])
def test_a_private_key_that_every_user_may_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    new_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    monkeypatch.setenv(f"{PRIVATE_KEY}_FILE", str(tmp_path / "key"))
    with pytest.raises(CallerError, match=f"(?s)every user.*chmod 600 {tmp_path / 'key'}"):
        private_key()
    (tmp_path / "key").chmod(0o640)
    assert private_key().public_key.keytype == "ed25519"


def test_without_a_key_the_names_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CallerError, match=f"{PRIVATE_KEY}_FILE"):
        private_key()
    with pytest.raises(CallerError, match=f"{PUBLIC_KEY}_FILE"):
        public_keys()
    monkeypatch.setenv(f"{PRIVATE_KEY}_FILE", str(tmp_path / "missing"))
    with pytest.raises(CallerError, match=f"{tmp_path}/missing: the key cannot be read: No such file"):
        private_key()


def test_what_is_no_public_key_is_reported(tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    elliptic = ELLIPTIC.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    broken = (tmp_path / "key.pub").read_bytes().replace(b"MC", b"MD")
    for body, message in [
        ((tmp_path / "key").read_bytes(), "this is a private key"),
        (elliptic, "this is not an Ed25519 key"),
        (broken, "this is not a public key in PEM"),
        (b"ssh-ed25519 AAAA", "this is not a public key in PEM"),
    ]:
        (tmp_path / "given").write_bytes(body)
        with pytest.raises(CallerError, match=f"{tmp_path}/given: {message}"):
            public_keys([tmp_path / "given"])


def test_another_implementation_reads_the_envelope(key: PrivateKey) -> None:
    """As https://github.com/secure-systems-lab/dsse/blob/master/protocol.md says, with nothing of ours."""
    envelope = json.loads(sign(STATEMENT, key))
    payload, kind = base64.b64decode(envelope["payload"], validate=True), envelope["payloadType"].encode()
    assert (payload, kind) == (STATEMENT, b"application/vnd.in-toto+json")
    encoded = b" ".join([b"DSSEv1", str(len(kind)).encode(), kind, str(len(payload)).encode(), payload])
    (signature,) = envelope["signatures"]
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.public_key.keyval["public"]))
    public.verify(base64.b64decode(signature["sig"], validate=True), encoded)
    with pytest.raises(InvalidSignature):
        public.verify(base64.b64decode(signature["sig"]), encoded + b" ")


def test_any_of_the_trusted_keys_opens_what_is_always_signed_in_the_same_way(key: PrivateKey, other_key: PrivateKey) -> None:
    opened = open_envelope(sign(STATEMENT, key), [other_key.public_key, key.public_key], "here")
    assert opened == (STATEMENT, key.public_key.keyid)
    assert sign(STATEMENT, key) == sign(STATEMENT, key)


def test_another_key_is_reported_with_those_that_are_trusted(key: PrivateKey, other_key: PrivateKey) -> None:
    signed, trusted = key.public_key.keyid[:16], other_key.public_key.keyid[:16]
    with pytest.raises(OtherKeyError, match=f"here: signed by key {signed}; trusted: {trusted}"):
        open_envelope(sign(STATEMENT, key), [other_key.public_key], "here")
    with pytest.raises(OtherKeyError, match="trusted: none"):
        open_envelope(sign(STATEMENT, key), [], "here")


def altered(body: bytes, **changes: Any) -> bytes:
    return json.dumps(json.loads(body) | changes, sort_keys=True, indent=2).encode() + b"\n"


def test_a_signature_of_something_else_and_an_id_of_another_key_are_reported(key: PrivateKey, other_key: PrivateKey) -> None:
    body = sign(STATEMENT, key)
    with pytest.raises(TamperedError, match="what is signed is not what the key signed"):
        open_envelope(altered(body, payload=base64.b64encode(b"{}").decode()), [key.public_key], "here")
    (signature,) = json.loads(body)["signatures"]
    forged = altered(body, signatures=[signature | {"keyid": other_key.public_key.keyid}])
    for trusted in ([key], [key, other_key]):
        with pytest.raises(TamperedError, match="names another key"):
            open_envelope(forged, [one.public_key for one in trusted], "here")
    with pytest.raises(TamperedError, match="not what the key signed"):
        open_envelope(forged, [other_key.public_key], "here")


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"\xff\xfe", b'{"payload": 1}', b'{"payload": "e30=", "payloadType": "x", "signatures": []}']
)
def test_what_is_no_envelope_is_reported(key: PrivateKey, body: bytes) -> None:
    with pytest.raises(TamperedError, match="here: this is not a signed approval"):
        open_envelope(body, [key.public_key], "here")


@pytest.mark.parametrize(
    "changes", [{"signatures": []}, {"payloadType": "text/plain"}, {"payload": "e30"}, {"payload": "é"}, {"more": 1}]
)
def test_an_envelope_of_another_form_is_reported(key: PrivateKey, changes: dict[str, Any]) -> None:
    with pytest.raises(TamperedError):
        open_envelope(altered(sign(STATEMENT, key), **changes), [key.public_key], "here")


@given(st.data())
def test_any_other_byte_is_found(key: PrivateKey, data: st.DataObject) -> None:
    body = bytearray(sign(STATEMENT, key))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TamperedError):
        open_envelope(bytes(body), [key.public_key], "here")
