"""Verification: what it finds, what it calls it, and that no byte of a bundle escapes it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.approval.builder import CELL, EXPIRES, NEWER, NOW, RUN, approved, decided, made_key, publish_report, with_gate
from tests.builders.boards import TAKEN_BACK
from vllm_qualify.approval.actions import entry_of, revoke
from vllm_qualify.approval.errors import (
    ExpiredError,
    NotApprovedError,
    NotInForceError,
    OtherKeyError,
    RevokedError,
    SupersededError,
    TamperedError,
)
from vllm_qualify.approval.layout import JSON, approval_key, canonical, decision_key, pointer_key, readable, sha256
from vllm_qualify.approval.pointer import advance
from vllm_qualify.approval.published import PublishedRun, stored_object
from vllm_qualify.approval.signing import PrivateKey, public_keys, sign
from vllm_qualify.approval.statement import statement
from vllm_qualify.approval.verify import Verified, export, verify, verify_file
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store


@dataclass(frozen=True, repr=False)
class Bundle:
    """An exported approval, which no test leaves changed."""

    folder: Path
    key: PrivateKey
    run: PublishedRun

    @property
    def store(self) -> Store:
        return DirectoryStore(self.folder)

    @property
    def keys(self) -> list[str]:
        return list(self.store.keys(""))

    def verify(self, name: str = approval_key(CELL, RUN), now: datetime = NOW) -> Verified:
        return verify(self.store, name, [self.key.public_key], now)

    @contextmanager
    def changed(self, key: str, body: bytes | None) -> Iterator[None]:
        """Within the block, an object has another content, or is missing."""
        path = self.folder / key
        before = path.read_bytes()
        try:
            path.unlink()
            if body is not None:
                path.write_bytes(body)
            yield
        finally:
            path.unlink(missing_ok=True)
            path.write_bytes(before)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    folder = tmp_path_factory.mktemp("bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_QUALIFY_HOME", str(folder))
        store = DirectoryStore(folder / "store")
        key = made_key(folder / "key")
        run = publish_report(store, folder / "runs")
        publish_report(store, folder / "runs", NEWER)
        approved(store, run, key)
        export(store, CELL, folder / "bundle")
        yield Bundle(folder / "bundle", key, run)


def test_a_bundle_is_exactly_what_an_approval_rests_on(bundle: Bundle) -> None:
    own = [document(CELL, RUN) for document in (decision_key, approval_key, manifest_key)]
    named = [named.key for named in bundle.run.manifest.objects]
    assert bundle.keys == sorted([*own, pointer_key(CELL), *named])
    assert len(named) == 8


@pytest.mark.parametrize("name", [CELL, approval_key(CELL, RUN)])
def test_an_approval_that_holds(bundle: Bundle, name: str) -> None:
    verified = bundle.verify(name)
    assert (verified.cell, verified.run_id, verified.by, verified.expires) == (CELL, RUN, "Ada", EXPIRES)
    assert (verified.is_whole, verified.objects_checked) == (True, len(bundle.keys))
    assert verified.server == bundle.run.report.plan.server
    key_id = bundle.key.public_key.keyid[:16]
    assert verified.summary == f"{CELL}, run {RUN}: approved by Ada, until 2026-06-12, key {key_id}; 12 objects checked"
    assert bundle.verify(name, at_the_start_of(EXPIRES) - timedelta(seconds=1)) == verified


def at_the_start_of(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


@pytest.mark.parametrize("version", [1])
def test_what_an_earlier_version_signed_still_holds(tmp_path: Path, version: int) -> None:
    """Also with whatever the report's model has got since. See tests/approval/golden.py."""
    kept = Path(__file__).with_name(f"version-{version}.json")
    store = DirectoryStore(tmp_path)
    for key, text in json.loads(kept.read_text()).items():
        store.put_new(key, text.encode(), JSON)
    verified = verify(store, CELL, public_keys([kept.with_suffix(".pub")]), NOW)
    assert (verified.run_id, verified.expires, verified.objects_checked) == (RUN, date(2026, 5, 2), 12)
    assert verified.statement["predicate"]["result"] == "WARNED"
    assert verified.server.engine.launcher == "docker"


def test_an_object_that_is_missing_is_named(bundle: Bundle) -> None:
    for key in bundle.keys:
        with bundle.changed(key, None), pytest.raises(TamperedError) as raised:
            bundle.verify()
        assert (raised.value.problem, raised.value.place) == ("it is missing", str(bundle.folder / key))
    # A cell whose pointer is missing is not one without approvals.
    with bundle.changed(pointer_key(CELL), None), pytest.raises(TamperedError, match=r"pointer\.json: it is missing"):
        bundle.verify(CELL)


def test_every_object_is_read_to_its_end(bundle: Bundle) -> None:
    for key in bundle.keys:
        body = bundle.store.get(key)
        first, last = bytes([body[0] ^ 1]) + body[1:], body[:-1] + bytes([body[-1] ^ 1])
        for other in (first, last, body[:-1], body + b"\n", body + b"\0", b"", body[::-1]):
            with bundle.changed(key, other), pytest.raises(TamperedError) as raised:
                bundle.verify()
            assert raised.value.place == str(bundle.folder / key)


@pytest.mark.thorough
@settings(max_examples=300)
@given(st.data())
def test_no_changed_byte_escapes(bundle: Bundle, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(bundle.keys))
    body = bytearray(bundle.store.get(key))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    with bundle.changed(key, bytes(body)), pytest.raises(TamperedError) as raised:
        bundle.verify()
    assert raised.value.place == str(bundle.folder / key)
    assert "\n" not in raised.value.problem


@given(st.data())
def test_nothing_cut_out_or_put_in_escapes(bundle: Bundle, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(bundle.keys))
    body = bundle.store.get(key)
    begin = data.draw(st.integers(0, len(body)))
    end = data.draw(st.integers(begin, min(len(body), begin + 40)))
    put_in = data.draw(st.binary(min_size=int(begin == end), max_size=4))
    other = body[:begin] + put_in + body[end:]
    if other == body:
        return
    with bundle.changed(key, other), pytest.raises(TamperedError):
        bundle.verify()


@given(st.integers(0, 63), st.sampled_from("0123456789abcdef"))
@example(0, "0")
def test_the_pointers_own_sha256_is_looked_at(bundle: Bundle, at: int, digit: str) -> None:
    body = bundle.store.get(pointer_key(CELL))
    written = json.loads(body)["sha256"]
    other = written[:at] + digit + written[at + 1 :]
    if other == written:
        return
    with bundle.changed(pointer_key(CELL), body.replace(written.encode(), other.encode())), pytest.raises(TamperedError):
        bundle.verify()


@pytest.mark.parametrize(
    "change", [{"expires": "2099-01-01"}, {"by": "Eve"}, {"at": "2026-03-15T12:30:00Z"}], ids=["expires", "by", "at"]
)
def test_a_pointer_cannot_say_more_than_was_signed(bundle: Bundle, change: dict[str, str]) -> None:
    """Whoever may write the pointer can make its SHA-256 right."""
    document = json.loads(bundle.store.get(pointer_key(CELL)))
    del document["sha256"]
    document["entries"][0] |= change
    body = readable(document | {"sha256": sha256(canonical(document))})
    with bundle.changed(pointer_key(CELL), body), pytest.raises(TamperedError, match="pointer does not say what was signed"):
        bundle.verify()


def test_another_key_and_a_forger_with_a_key_of_their_own_are_reported(bundle: Bundle, other_key: PrivateKey) -> None:
    with pytest.raises(OtherKeyError, match=f"signed by key {bundle.key.public_key.keyid[:16]}"):
        verify(bundle.store, CELL, [other_key.public_key], NOW)
    payload = statement(bundle.run, decided(bundle.store, bundle.run))
    with bundle.changed(approval_key(CELL, RUN), sign(payload, other_key)), pytest.raises(OtherKeyError):
        bundle.verify()


def test_a_trusted_signature_under_something_else_than_the_report_says_is_reported(bundle: Bundle) -> None:
    payload = statement(bundle.run, decided(bundle.store, bundle.run))
    other = sign(payload.replace(b'"gpu-memory-utilization":0.9', b'"gpu-memory-utilization":0.5'), bundle.key)
    assert other != bundle.store.get(approval_key(CELL, RUN))
    with bundle.changed(approval_key(CELL, RUN), other), pytest.raises(TamperedError, match="does not say what was signed"):
        bundle.verify()


def test_a_trusted_signature_under_a_report_that_did_not_pass_is_reported(
    store: Store, run: PublishedRun, tmp_path: Path, key: PrivateKey
) -> None:
    """Whoever holds the key cannot approve it either."""
    failed = publish_report(store, tmp_path / "runs", NEWER, with_gate("fail"))
    as_if = replace(failed, report=failed.report.model_copy(update={"judgement": run.report.judgement}))
    decision = decided(store, as_if)
    body = sign(statement(as_if, decision), key)
    store.put_new(approval_key(CELL, NEWER), body, JSON)
    advance(store, CELL, entry_of(failed, decision.decision, stored_object(approval_key(CELL, NEWER), body)))
    with pytest.raises(TamperedError, match="what was signed could not be approved"):
        verify(store, CELL, [key.public_key], NOW)


def test_an_approval_in_anothers_place_is_reported(bundle: Bundle, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    other = publish_report(store, tmp_path / "runs", NEWER)
    approved(store, other, bundle.key)
    body = store.get(approval_key(CELL, NEWER))
    with bundle.changed(approval_key(CELL, RUN), body), pytest.raises(TamperedError, match="the approval of another run"):
        bundle.verify()


@pytest.mark.parametrize("today", [EXPIRES, date(2027, 1, 1)])
def test_an_expired_one_is_reported(bundle: Bundle, today: date) -> None:
    with pytest.raises(ExpiredError, match=f"the approval of run {RUN} expired on 2026-06-12"):
        bundle.verify(CELL, at_the_start_of(today))


def test_a_superseded_one_is_reported(store: Store, run: PublishedRun, tmp_path: Path, key: PrivateKey) -> None:
    approved(store, run, key)
    approved(store, publish_report(store, tmp_path / "runs", NEWER), key)
    with pytest.raises(SupersededError, match=f"run {RUN} was superseded by run {NEWER}, approved by Ada"):
        verify(store, approval_key(CELL, RUN), [key.public_key], NOW)
    assert verify(store, CELL, [key.public_key], NOW).run_id == NEWER


@pytest.mark.parametrize("name", [CELL, approval_key(CELL, RUN)])
@pytest.mark.parametrize("now", [NOW, at_the_start_of(EXPIRES)])
def test_a_revoked_one_is_reported_whatever_else_it_is(
    store: Store, run: PublishedRun, key: PrivateKey, name: str, now: datetime
) -> None:
    approved(store, run, key)
    revoke(store, CELL, None, TAKEN_BACK)
    with pytest.raises(RevokedError, match="was revoked by Grace on 2026-03-14: it answers in Latin"):
        verify(store, name, [key.public_key], now)


def test_one_that_the_pointer_never_named_is_reported(store: Store, run: PublishedRun, tmp_path: Path, key: PrivateKey) -> None:
    approved(store, run, key)
    other = publish_report(store, tmp_path / "runs", NEWER)
    store.put_new(approval_key(CELL, NEWER), sign(statement(other, decided(store, other)), key), JSON)
    with pytest.raises(NotInForceError, match=f"run {NEWER} was signed, and the pointer"):
        verify(store, approval_key(CELL, NEWER), [key.public_key], NOW)


def test_the_exit_codes_are_distinct() -> None:
    kinds = [TamperedError, OtherKeyError, ExpiredError, SupersededError, RevokedError, NotInForceError]
    assert [kind.exit_code for kind in kinds] == [10, 11, 12, 13, 14, 15]
    assert all(issubclass(kind, NotApprovedError) for kind in kinds)


@pytest.mark.parametrize("name", ["a/b/c/d", "a/b", f"approvals/{CELL}/{RUN}/decision.json", "../secrets"])
def test_what_is_not_approved_is_reported(bundle: Bundle, name: str) -> None:
    with pytest.raises(CallerError):
        bundle.verify(name)


def test_a_file_in_a_bundle_is_checked_with_all_of_it(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    file = bundle.folder / approval_key(CELL, RUN)
    monkeypatch.chdir(file.parent)
    for path in (file, Path("approval.json")):
        assert verify_file(path, [bundle.key.public_key], NOW) == bundle.verify(CELL)
    evidence = next(key for key in bundle.keys if key.startswith("evidence/"))
    with bundle.changed(evidence, b"better figures"), pytest.raises(TamperedError, match="it is not what was approved"):
        verify_file(file, [bundle.key.public_key], NOW)


def test_a_file_alone_says_what_was_not_checked(bundle: Bundle, tmp_path: Path, other_key: PrivateKey) -> None:
    file = tmp_path / "approval.json"
    body = bundle.store.get(approval_key(CELL, RUN))
    file.write_bytes(body)
    verified = verify_file(file, [bundle.key.public_key], NOW)
    assert (verified.cell, verified.run_id, verified.expires) == (CELL, RUN, EXPIRES)
    assert (verified.is_whole, verified.objects_checked) == (False, 0)
    assert verified.summary.endswith("; evidence and revocation not checked")
    with pytest.raises(ExpiredError):
        verify_file(file, [bundle.key.public_key], at_the_start_of(EXPIRES))
    with pytest.raises(OtherKeyError):
        verify_file(file, [other_key.public_key], NOW)
    file.write_bytes(body.replace(b"payload", b"Payload", 1))
    with pytest.raises(TamperedError, match=f"{file}: this is not a signed approval"):
        verify_file(file, [bundle.key.public_key], NOW)
    with pytest.raises(CallerError, match="No such file"):
        verify_file(tmp_path / "missing.json", [bundle.key.public_key], NOW)


def test_only_an_empty_folder_is_exported_into(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export(bundle.store, CELL, tmp_path / "empty")
    assert list(DirectoryStore(tmp_path / "empty").keys("")) == bundle.keys
    with pytest.raises(CallerError, match="the folder is not empty"):
        export(bundle.store, CELL, tmp_path / "empty")


def test_an_export_of_what_is_not_whole_is_none(bundle: Bundle, tmp_path: Path) -> None:
    for number, key in enumerate(bundle.keys):
        with bundle.changed(key, None), pytest.raises((StoreError, NotApprovedError)):
            export(bundle.store, CELL, tmp_path / str(number))
        with suppress(StoreError):
            assert pointer_key(CELL) not in set(DirectoryStore(tmp_path / str(number)).keys(""))


def test_an_earlier_approval_can_be_exported(store: Store, run: PublishedRun, tmp_path: Path, key: PrivateKey) -> None:
    approved(store, run, key)
    approved(store, publish_report(store, tmp_path / "runs", NEWER), key)
    export(store, CELL, tmp_path / "earlier", RUN)
    with pytest.raises(SupersededError):
        verify(DirectoryStore(tmp_path / "earlier"), approval_key(CELL, RUN), [key.public_key], NOW)
    with pytest.raises(CallerError, match="has no approval in force"):
        export(store, CELL, tmp_path / "none", "20200101T000000Z-000000")


@pytest.mark.thorough
def test_the_whole_life_of_an_approval_in_s3(s3_url: str, tmp_path: Path, key: PrivateKey) -> None:
    store = open_store(s3_url)
    run = publish_report(store, tmp_path / "runs")
    first = approved(store, run, key)
    assert approved(store, run, key) == first
    verified = verify(store, CELL, [key.public_key], NOW)
    export(store, CELL, tmp_path / "bundle")
    assert verify(DirectoryStore(tmp_path / "bundle"), CELL, [key.public_key], NOW) == verified
    revoke(store, CELL, None, TAKEN_BACK)
    with pytest.raises(RevokedError):
        verify(store, CELL, [key.public_key], NOW)
    assert verify(DirectoryStore(tmp_path / "bundle"), CELL, [key.public_key], NOW) == verified
    newer = publish_report(store, tmp_path / "runs", NEWER)
    assert approved(store, newer, key).pointer == advance(store, CELL, approved(store, newer, key).pointer.last)
