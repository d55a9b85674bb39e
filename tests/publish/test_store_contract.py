"""What every store promises, tried on a directory, on moto and on a real gateway; then what goes wrong in each."""

import errno
import fcntl
import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier, Event, Thread
from typing import Any, NoReturn

import pytest

from tests.ci import IN_CI
from tests.publish.policies import allow
from tests.s3 import client_of_environment
from vllm_qualify.errors import AlreadyExistsError, CallerError, StoreBusyError, StoreError
from vllm_qualify.publish import directory, s3
from vllm_qualify.publish.store import (
    MOST_DOCUMENT_BYTES,
    ChangedError,
    MissingObjectError,
    PrunableStore,
    Store,
    Stored,
    TooLongError,
)
from vllm_qualify.publish.stores import open_store

JSON = "application/json"
KEY = "cells/llama-h200/report.json"
POINTER = "approvals/llama-h200/pointer.json"
SECRET = "top/Secret+0123456789"
TOKEN = "token-9876543210"


def put(store: Store, key: str, body: bytes = b"body") -> None:
    store.put_new(key, body, JSON)


def swap(store: Store, body: bytes, tag: str | None, key: str = POINTER) -> None:
    store.swap(key, body, JSON, tag)


def swapped(store: Store, body: bytes, tag: str | None, key: str = POINTER) -> str:
    """The object's tag after the swap."""
    swap(store, body, tag, key)
    return store.read(key).tag


def every_use(store: PrunableStore) -> dict[str, Callable[[], object]]:
    return {
        "check": store.check,
        "put_new": lambda: put(store, KEY),
        "swap": lambda: swap(store, b"body", None),
        "get": lambda: store.get(KEY),
        "read": lambda: store.read(KEY),
        "exists": lambda: store.exists(KEY),
        "keys": lambda: store.keys(""),
        "delete": lambda: store.delete("reports/old.json"),
    }


def errors_of_every_use(store: PrunableStore) -> list[StoreError]:
    """The errors of all methods; none may answer, least of all with False, an empty list or a missing object."""
    errors = []
    for name, use in every_use(store).items():
        with pytest.raises(StoreError) as raised:
            pytest.fail(f"{name} answered {use()!r}")
        assert not isinstance(raised.value, MissingObjectError | AlreadyExistsError | ChangedError), name
        errors.append(raised.value)
    return errors


def assert_every_use_raises(kind: type[StoreError], store: PrunableStore, *words: str) -> None:
    for error in errors_of_every_use(store):
        assert type(error) is kind
        assert_names(error, *words)


@contextmanager
def raises_naming(kind: type[StoreError], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as raised:
        yield
    assert_names(raised.value, *words)


def assert_names(error: StoreError, *words: str) -> None:
    text = str(error)
    assert error.place == "store"
    assert error.remedy
    for word in words:
        assert word in text
    shown = text + repr(error) + "".join(traceback.format_exception(error))
    for secret in (SECRET, TOKEN, os.environ.get("AWS_SECRET_ACCESS_KEY", SECRET)):
        assert secret not in shown


# --- the contract


@pytest.mark.parametrize(
    "body", [b"", b"\x00\xff\r\n\x1a" * 50, b"{}", os.urandom(5_000_000)], ids=["empty", "binary", "json", "5MB"]
)
def test_what_was_written_is_read_back(store: Store, body: bytes) -> None:
    put(store, KEY, body)
    assert store.exists(KEY)
    assert store.get(KEY) == body
    assert open_store(store.url).get(KEY) == body


def test_an_object_is_read_only_as_far_as_its_reader_says(store: Store) -> None:
    put(store, KEY, b"12345")
    assert store.get(KEY, 5) == b"12345"
    with raises_naming(TooLongError, KEY, "longer than the 4 bytes"):
        store.get(KEY, 4)


def test_a_document_has_an_end(store: Store) -> None:
    """Whoever publishes decides how long it is, and its readers keep it in memory."""
    put(store, KEY, bytes(MOST_DOCUMENT_BYTES + 1))
    for read in (store.get, store.read):
        with raises_naming(TooLongError, KEY):
            read(KEY)


@pytest.mark.parametrize("second", [b"first", b"second", b""], ids=["same", "other", "empty"])
def test_a_second_write_is_refused_and_changes_nothing(store: Store, second: bytes) -> None:
    put(store, KEY, b"first")
    for writer in (store, open_store(store.url)):
        with raises_naming(AlreadyExistsError, store.locate(KEY)):
            put(writer, KEY, second)
    assert store.get(KEY) == b"first"


@pytest.mark.parametrize("kind", ["different bodies", "same body", "first swap", "later swap"])
def test_of_16_racing_writers_exactly_one_wins(real_store: Store, kind: str) -> None:
    for round_ in range(3):
        key = f"race/{round_}"
        bodies = [b"x" * 3000 if kind == "same body" else bytes([writer]) * 3000 for writer in range(16)]
        tag = swapped(real_store, b"before", None, key) if kind == "later swap" else None
        write = partial(swap, real_store, tag=tag, key=key) if "swap" in kind else partial(put, real_store, key)
        winners = race(bodies, write)
        assert len(winners) == 1
        assert real_store.get(key) == bodies[winners[0]]


def race(bodies: list[bytes], write: Callable[[bytes], object]) -> list[int]:
    """Those of the writers, one for each body and all at once, whose write was taken."""
    together = Barrier(len(bodies))

    def wins(body: bytes) -> bool:
        together.wait()
        try:
            write(body)
        except (AlreadyExistsError, ChangedError):
            return False
        return True

    with ThreadPoolExecutor(len(bodies)) as pool:
        return [writer for writer, won in enumerate(pool.map(wins, bodies)) if won]


def test_a_swap_by_the_tag_that_was_read_is_taken(store: Store) -> None:
    first = swapped(store, b"1", None)
    assert store.read(POINTER) == Stored(b"1", first)
    second = swapped(open_store(store.url), b"1 2", first)
    assert store.read(POINTER) == Stored(b"1 2", second)
    assert second != first
    assert store.get(POINTER) == b"1 2"
    assert list(store.keys("")) == [POINTER]


@pytest.mark.parametrize("held", ["no object", "an older tag", "another tag", "an empty tag"])
def test_a_swap_by_any_other_tag_is_refused_and_changes_nothing(store: Store, held: str) -> None:
    older = swapped(store, b"1", None)
    newer = swapped(store, b"1 2", older)
    tag = {"no object": None, "an older tag": older, "another tag": "0" * len(newer), "an empty tag": ""}[held]
    with raises_naming(ChangedError, store.locate(POINTER), "somebody else"):
        swap(store, b"mine", tag)
    assert store.read(POINTER) == Stored(b"1 2", newer)


def test_a_swap_of_what_is_not_there_any_more_is_refused(store: PrunableStore) -> None:
    tag = swapped(store, b"1", None)
    store.delete(POINTER)
    with pytest.raises(ChangedError):
        swap(store, b"1 2", tag)
    assert not store.exists(POINTER)
    with pytest.raises(MissingObjectError):
        store.read(POINTER)
    swap(store, b"1 2", None)


def test_what_is_removed_is_gone_and_nothing_else(store: PrunableStore) -> None:
    for key in (KEY, f"{KEY}.sig"):
        put(store, key)
    for _ in range(2):
        store.delete(KEY)
        assert not store.exists(KEY)
        assert list(store.keys("")) == [f"{KEY}.sig"]
    with pytest.raises(MissingObjectError):
        store.get(KEY)
    put(store, KEY, b"again")
    assert store.get(KEY) == b"again"


def test_neither_write_takes_a_key_of_the_other(store: Store) -> None:
    put(store, KEY, b"once")
    with pytest.raises(ChangedError):
        swap(store, b"changed", None, KEY)
    swap(store, b"first", None)
    with pytest.raises(AlreadyExistsError):
        put(store, POINTER)
    assert (store.get(KEY), store.get(POINTER)) == (b"once", b"first")


def test_16_writers_of_one_document_lose_no_entry(real_store: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda writer: append(real_store, str(writer)), range(16)))
    assert sorted(map(int, real_store.get(POINTER).split())) == list(range(16))


def append(store: Store, entry: str) -> None:
    while True:
        body, tag = read_or_none(store)
        if entry.encode() in body.split():
            return
        with suppress(ChangedError, StoreBusyError):
            swap(store, body + f"{entry}\n".encode(), tag)
            return


def read_or_none(store: Store) -> tuple[bytes, str | None]:
    try:
        return store.read(POINTER)
    except MissingObjectError:
        return b"", None


def test_a_reader_never_sees_half_a_swap(real_store: Store) -> None:
    tag, done = swapped(real_store, b"0" * 300_000, None), False

    def seen() -> list[Stored]:
        objects = []
        while not done:
            objects.append(real_store.read(POINTER))
        return objects

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(seen) for _ in range(2)]
        tags = {b"0": tag}
        for number in range(1, 10):
            tag = tags[b"%d" % number] = swapped(real_store, b"%d" % number * 300_000, tag)
        done = True
        for stored in (stored for reader in readers for stored in reader.result()):
            assert stored.body == stored.body[:1] * 300_000
            assert stored.tag == tags[stored.body[:1]]


def test_a_missing_object_is_reported_as_missing(store: Store) -> None:
    put(store, "cells/a/report.json")
    for key in ("cells/b/report.json", "cells/a", "cells/a/report", "cells/a/report.json.sig", "cells/a/report.json/x"):
        assert not store.exists(key)
        with raises_naming(MissingObjectError, key):
            store.get(key)
    assert store.exists("cells/a/report.json")


def test_keys_are_sorted_and_a_prefix_is_a_string(store: Store) -> None:
    assert list(store.keys("")) == []
    names = ["a-b", "a.b", "a/b/2", "a/b/10", "a/bc", "a_b", "B", "b@sha256:0+x=~,y"]
    for name in names:
        put(store, name)
    assert list(store.keys("")) == sorted(names)
    assert list(store.keys("a/b")) == ["a/b/10", "a/b/2", "a/bc"]
    assert list(store.keys("a/b/")) == ["a/b/10", "a/b/2"]
    assert list(store.keys("a/b/1")) == ["a/b/10"]
    assert list(store.keys("a_b/c")) == []
    assert list(store.keys("none/")) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "count"),
    # A page has 1000 keys. infra/radosgw.sh lets its gateway give 100, and so does moto here.
    [("directory", 1003), ("moto", 203), pytest.param("radosgw", 203, marks=pytest.mark.s3)],
)
def test_a_listing_has_all_of_more_than_a_page(
    request: pytest.FixtureRequest, kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "100")
    store = open_store(request.getfixturevalue(f"{kind}_url"))
    names = [f"many/{number:05}" for number in range(count)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: put(store, name, b""), names))
    assert list(store.keys("many/")) == names


def test_one_store_does_not_see_its_neighbour(s3_url: str) -> None:
    store, neighbour = open_store(f"{s3_url}/a"), open_store(f"{s3_url}/ab")
    put(neighbour, KEY)
    assert list(store.keys("")) == []
    assert not store.exists(KEY)
    assert list(open_store(s3_url).keys("")) == [f"ab/{KEY}"]


NOT_KEYS = ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/..", "./a", ".store", "a/.b", "a\\b", "a b", "a\nb"]
NOT_KEYS += ["a\0b", "ä", "a%2e", "a?b", "a#b", "-a", "a\n", "a" * 256, "a/" * 500 + "a"]


@pytest.mark.parametrize("key", NOT_KEYS)
def test_bad_keys_are_refused_by_every_method(tmp_path: Path, moto_url: str, key: str) -> None:
    for store in (open_store(tmp_path.as_uri()), open_store(moto_url)):
        writes = (lambda key, store=store: put(store, key), lambda key, store=store: swap(store, b"", None, key))
        for use in (store.get, store.read, store.exists, store.locate, store.delete, *writes):
            with pytest.raises(ValueError, match="store key"):
                use(key)
        if key.removesuffix("/"):
            with pytest.raises(ValueError, match="store key"):
                store.keys(f"{key}/")
    assert list(tmp_path.iterdir()) == []


def test_the_longest_key_is_taken(store: Store) -> None:
    key = "/".join(["k" * 255] * 3 + ["k" * 132])
    assert len(key) == 900
    put(store, key)
    assert list(store.keys("k")) == [key]


def test_check_may_be_repeated_and_shows_nothing(store: Store) -> None:
    store.check()
    open_store(store.url).check()
    assert list(store.keys("")) == []
    assert all(name.startswith((".store", ".locks/")) for name in every_name(store))


def every_name(store: Store) -> list[str]:
    """Of all objects and files of the store, also of those that `keys` does not show."""
    if store.url.startswith("file:"):
        root = Path(store.locate("x")).parent
        return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    bucket, _, prefix = store.url.removeprefix("s3://").partition("/")
    listed = client_of_environment().list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")
    return [entry["Key"].removeprefix(f"{prefix}/") for entry in listed["Contents"]]


def test_16_checks_at_once_pass(real_store: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: open_store(real_store.url).check(), range(16)))


def test_locate_says_where_the_object_is(tmp_path: Path, moto_url: str) -> None:
    assert open_store(tmp_path.as_uri()).locate(KEY) == str(tmp_path / KEY)
    assert open_store(moto_url).locate(KEY) == f"{moto_url}/{KEY}"


# --- URLs


@pytest.mark.parametrize(
    ("url", "same_as"),
    [
        ("s3://b", "s3://b"),
        ("s3://b/", "s3://b"),
        ("s3://b/p/q/", "s3://b/p/q"),
        ("file:///", "file:///"),
        ("file:///a/b/", "file:///a/b"),
        ("file:///a/../b%20c", "file:///b%20c"),
    ],
)
def test_urls_of_stores(url: str, same_as: str) -> None:
    assert open_store(url).url == same_as
    assert open_store(same_as).url == same_as


NOT_URLS = ["", "store", "/data/store", "s3:/b", "s3://", "s3:///p", "s3://b//p", "s3://b/../p", "s3://b/p?x=1", "s3://ä/p"]
NOT_URLS += ["S3://b", "file://host/p", "file:p", "file://", "file:///p?x", "file:///p#x", "file:///p%00", "gs://b"]
NOT_URLS += ["https://b.s3.amazonaws.com/p"]
NOT_URLS += [f"s3://key:{SECRET}@b/p", f"https://key:{SECRET}@host/b", f"https://host/b?X-Amz-Signature={SECRET}"]


@pytest.mark.parametrize("url", NOT_URLS)
def test_other_urls_are_the_callers_error(url: str) -> None:
    with pytest.raises(CallerError) as raised:
        open_store(url)
    assert raised.value.place == "--store"
    assert "file:///" in raised.value.remedy
    assert SECRET not in str(raised.value)


def test_the_remedy_for_a_plain_path_is_its_url() -> None:
    with pytest.raises(CallerError, match="remedy: write file:///data/store"):
        open_store("/data/store")


def test_boto3_is_not_imported_before_a_bucket_is_opened() -> None:
    code = (
        "import sys; from vllm_qualify.publish.stores import open_store; open_store('file:///store');"
        "print([name for name in sys.modules if name.startswith('boto')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# --- a directory that fails


@pytest.mark.parametrize("step", ["fsync", "link"])
def test_a_killed_writer_leaves_nothing_visible(tmp_path: Path, step: str) -> None:
    code = (
        "import os, sys; from vllm_qualify.publish.stores import open_store;"
        f"os.{step} = lambda *_: os.kill(os.getpid(), 9);"
        f"open_store(sys.argv[1]).put_new({KEY!r}, b'x' * 100_000, '')"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path.as_uri()], check=False)
    assert killed.returncode == -signal.SIGKILL
    store = open_store(tmp_path.as_uri())
    assert [file.name[:5] for file in (tmp_path / KEY).parent.iterdir()] == [".new-"]
    assert list(store.keys("")) == []
    assert not store.exists(KEY)
    put(store, KEY, b"whole")
    assert store.get(KEY) == b"whole"


def failing(number: int) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("step", ["open", "fsync", "link"])
@pytest.mark.parametrize(
    ("number", "kind", "word"),
    [
        (errno.ENOSPC, StoreError, "free space"),
        (errno.EDQUOT, StoreError, "quota"),
        (errno.EIO, StoreError, "another store"),
        (errno.EPERM, StoreError, "hard links"),
        (errno.EROFS, StoreError, "for writing"),
        (errno.ESTALE, StoreBusyError, "Stale"),
    ],
)
def test_a_failed_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int, kind: type[StoreError], word: str
) -> None:
    store = open_store(tmp_path.as_uri())
    with monkeypatch.context() as patched:
        patched.setattr(os, step, failing(number))
        with pytest.raises(StoreError) as raised:
            put(store, KEY)
    assert type(raised.value) is kind
    assert_names(raised.value, str(tmp_path / KEY), word)
    assert list((tmp_path / KEY).parent.iterdir()) == []


# A swap's steps in their order; the second fsync is the folder's, after the rename.
@pytest.mark.parametrize(
    ("place", "name", "call", "left"),
    [("fcntl", "flock", 1, b"old"), ("os", "fsync", 1, b"old"), ("os", "replace", 1, b"old"), ("os", "fsync", 2, b"new")],
)
def test_a_killed_swap_leaves_the_old_or_the_new_and_no_lock(
    tmp_path: Path, place: str, name: str, call: int, left: bytes
) -> None:
    store = open_store(tmp_path.as_uri())
    tag = swapped(store, b"old", None)
    code = f"""
import fcntl, os, sys
from vllm_qualify.publish.stores import open_store
real, calls = {place}.{name}, []
def step(*arguments):
    calls.append(arguments)
    if {place} is fcntl:
        real(*arguments)
    if len(calls) == {call}:
        os.kill(os.getpid(), 9)
    real(*arguments)
{place}.{name} = step
open_store(sys.argv[1]).swap({POINTER!r}, b"new", "", sys.argv[2])
"""
    killed = subprocess.run([sys.executable, "-c", code, tmp_path.as_uri(), tag], check=False)
    assert killed.returncode == -signal.SIGKILL
    stored = store.read(POINTER)
    assert stored.body == left
    assert list(store.keys("")) == [POINTER]
    swap(store, b"newer", stored.tag)
    assert store.get(POINTER) == b"newer"


def test_of_16_racing_processes_one_wins_each_write_and_no_entry_is_lost(tmp_path: Path) -> None:
    code = """
import sys
from vllm_qualify.errors import AlreadyExistsError
from vllm_qualify.publish.store import *
from vllm_qualify.publish.stores import *
def wins(write, *arguments):
    try:
        write(*arguments)
    except (AlreadyExistsError, ChangedError):
        return False
    return True
store, name = open_store(sys.argv[1]), sys.argv[2].encode()
print("ready", flush=True)
sys.stdin.readline()
print(wins(store.put_new, "new", name, ""), wins(store.swap, "swapped", name, "", None))
while True:
    try:
        body, tag = store.read("entries")
    except MissingObjectError:
        body, tag = b"", None
    if wins(store.swap, "entries", body + name + b" ", "", tag):
        break
"""
    url = tmp_path.as_uri()
    with ExitStack() as stack:
        writers = [stack.enter_context(waiting(code, url, str(number))) for number in range(16)]
        for writer in writers:
            assert writer.stdout
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin
            writer.stdin.write("\n")
            writer.stdin.flush()
        won = [writer.communicate(timeout=60)[0].split() for writer in writers]
    store = open_store(url)
    for column, key in enumerate(["new", "swapped"]):
        assert [number for number, line in enumerate(won) if line[column] == "True"] == [int(store.get(key))]
    assert sorted(map(int, store.get("entries").split())) == list(range(16))


def waiting(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A program that says when it is ready, and then waits for a line."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_lock_that_is_never_freed_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path.as_uri())
    tag = swapped(store, b"1", None)
    monkeypatch.setattr(directory, "LOCK_WAIT_S", 0.05)
    [lock] = (tmp_path / ".locks").iterdir()
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with raises_naming(StoreBusyError, POINTER, "locked by another writer"):
            swap(store, b"1 2", tag)
        swap(store, b"other", None, "approvals/other/pointer.json")
        assert store.get(POINTER) == b"1"
    swap(store, b"1 2", tag)


def test_who_waits_for_a_lock_in_vain_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer swapped the object, and still holds its lock, or a third one does."""
    store, other = open_store(tmp_path.as_uri()), open_store(tmp_path.as_uri())
    old = swapped(store, b"old", None)
    swap(other, b"new", old)
    monkeypatch.setattr(directory, "LOCK_WAIT_S", 0.05)
    [lock] = (tmp_path / ".locks").iterdir()
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        for late in (old, None):
            with pytest.raises(ChangedError):
                swap(store, b"late", late)
    assert store.get(POINTER) == b"new"


@pytest.mark.parametrize(("place", "step"), [("os", "open"), ("os", "fsync"), ("os", "replace"), ("fcntl", "flock")])
def test_a_failed_swap_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, step: str) -> None:
    store = open_store(tmp_path.as_uri())
    tag = swapped(store, b"old", None)

    with monkeypatch.context() as patched:
        patched.setattr({"os": os, "fcntl": fcntl}[place], step, failing(errno.ENOLCK))
        with raises_naming(StoreError, POINTER, "with locks"):
            swap(store, b"new", tag)
    assert [path.name for path in (tmp_path / POINTER).parent.iterdir()] == ["pointer.json"]
    assert store.read(POINTER) == Stored(b"old", tag)


def repeated(step: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    """The step of a file system that asks again, since the answer was lost."""

    def twice(source: Path, target: Path) -> None:
        step(source, target)
        step(source, target)

    return twice


def test_a_link_or_rename_whose_answer_was_lost_is_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path.as_uri())
    tag = swapped(store, b"1", None)
    for step in ("link", "replace"):
        monkeypatch.setattr(os, step, repeated(getattr(os, step)))
    put(store, KEY, b"once")
    swap(store, b"1 2", tag)
    assert (store.get(KEY), store.get(POINTER)) == (b"once", b"1 2")
    with pytest.raises(AlreadyExistsError):
        put(store, KEY, b"once")


def test_objects_are_readable_by_others_and_not_writable(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        put(open_store(tmp_path.as_uri()), KEY)
    finally:
        os.umask(umask)
    assert (tmp_path / KEY).stat().st_mode & 0o777 == 0o444


def test_a_directory_that_is_not_there_is_not_an_empty_store(tmp_path: Path) -> None:
    store = open_store((tmp_path / "mistyped").as_uri())
    for use in (lambda: store.keys(""), lambda: store.exists(KEY), lambda: store.get(KEY)):
        with pytest.raises(StoreError) as raised:
            use()
        assert not isinstance(raised.value, MissingObjectError)
        assert_names(raised.value, "mistyped", "mounted")
    store.check()
    assert list(store.keys("")) == []


def test_a_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_every_use_raises(StoreError, open_store((tmp_path / "file" / "store").as_uri()), str(tmp_path / "file"), "is a file")


def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    put(store, KEY)
    (tmp_path / "store").chmod(0)
    with without_root():
        errors = errors_of_every_use(store)
    for error in errors:
        assert_names(error, str(tmp_path / "store"), "right to")


def test_a_folder_that_cannot_be_read_is_not_left_out_of_the_list() -> None:
    with TemporaryDirectory() as directory:  # a tmp_path is closed to other users as a whole
        root = Path(directory)
        root.chmod(0o755)
        store = open_store(root.as_uri())
        put(store, KEY)
        put(store, "cells/closed/report.json")
        (root / "cells/closed").chmod(0)
        with without_root(), pytest.raises(StoreError) as raised:
            store.keys("")
        (root / "cells/closed").chmod(0o755)
    assert_names(raised.value, "Permission denied")


@contextmanager
def without_root() -> Iterator[None]:
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    output = on_a_small_disk(
        tmp_path,
        "",
        """
store.check()
store.put_new("small", b"x" * 1000, "")
try:
    store.put_new("large", b"x" * 1_000_000, "")
except StoreError as error:
    print(error)
print(list(store.keys("")), [name for name in os.listdir(sys.argv[1]) if name.startswith(".new")])
""",
    )
    assert str(tmp_path / "large") in output
    assert "No space left on device" in output
    assert "free space" in output
    assert "['small'] []" in output


def test_a_read_only_directory_is_reported_by_check(tmp_path: Path) -> None:
    output = on_a_small_disk(
        tmp_path,
        'mount -o remount,ro "$1"',
        """
for use in (store.check, lambda: store.put_new("key", b"", "")):
    try:
        use()
    except StoreError as error:
        print(error)
print(list(store.keys("")))
""",
    )
    assert output.count("Read-only file system") == 2
    assert output.count("mount the file system for writing") == 2
    assert "[]" in output


def on_a_small_disk(directory: Path, then: str, code: str) -> str:
    """What a program prints that has a disk of 64 KiB at this directory, in a mount namespace that ends with it."""
    imports = "import os, sys; from vllm_qualify.publish.store import *; from vllm_qualify.publish.stores import *"
    start = f"{imports}; store = open_store('file://' + sys.argv[1])"
    shell = f'(mount -t tmpfs -o size=64k small-disk "$1" && {then or ":"}) >&2 || exit 77; exec "$2" -c "$3" "$1"'
    arguments = ["sh", str(directory), sys.executable, f"{start}\n{code}"]
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", shell, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        (pytest.fail if IN_CI else pytest.skip)(f"no mount namespace here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- an S3 that refuses


@pytest.mark.usefixtures("s3_url")
def test_a_missing_bucket_is_not_an_empty_store() -> None:
    store, endpoint = open_store("s3://never-made/prefix"), os.environ["AWS_ENDPOINT_URL"]
    assert_every_use_raises(StoreError, store, "never-made", "does not exist", endpoint)


@pytest.mark.s3
@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("AWS_SECRET_ACCESS_KEY", SECRET, "SignatureDoesNotMatch"), ("AWS_ACCESS_KEY_ID", "nobody", "InvalidAccessKeyId")],
)
def test_a_wrong_key_is_reported(radosgw_url: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str, code: str) -> None:
    monkeypatch.setenv(name, value)
    assert_every_use_raises(StoreError, open_store(radosgw_url), "evidence", code, name)


@pytest.mark.s3
def test_a_user_without_permission_is_reported_what_it_needs(radosgw_url: str, become_denied: Callable[[], str]) -> None:
    put(open_store(radosgw_url), KEY)
    become_denied()
    for error in errors_of_every_use(open_store(radosgw_url)):
        assert_names(error, "evidence", "AccessDenied")
        assert statement_in(error)["Action"]


def statement_in(error: StoreError) -> dict[str, Any]:
    """The policy statement that an error asks for."""
    statement, _ = json.JSONDecoder().raw_decode(error.remedy[error.remedy.index("{") :])
    return dict(statement)


@pytest.mark.s3
@pytest.mark.usefixtures("radosgw_url")
def test_a_user_who_is_given_what_the_errors_ask_for_can_do_everything(become_denied: Callable[[], str]) -> None:
    owner, bucket = client_of_environment(), "granted"
    owner.create_bucket(Bucket=bucket)
    become_denied()
    store = open_store(f"s3://{bucket}/store")
    granted: list[dict[str, Any]] = []
    for use in every_use(store).values():
        while asked := refused(use):
            assert asked not in granted
            granted.append(asked)
            allow(owner, bucket, granted, "denied")
    assert list(store.keys("")) == [POINTER, KEY]
    neighbour = every_use(open_store(f"s3://{bucket}/other"))
    assert all(refused(neighbour[name]) for name in ("put_new", "swap"))


def refused(use: Callable[[], object]) -> dict[str, Any] | None:
    """The statement that is asked for where this is not allowed."""
    try:
        use()
    except MissingObjectError:
        return None
    except StoreError as error:
        assert_names(error, "AccessDenied")
        return statement_in(error)
    return None


@pytest.mark.parametrize(
    ("method", "use", "actions", "resources"),
    [
        ("PUT", "put_new", ["s3:PutObject"], ["{}/store/*"]),
        ("PUT", "swap", ["s3:PutObject", "s3:GetObject"], ["{}/store/*"]),
        ("GET", "read", ["s3:GetObject", "s3:ListBucket"], ["{}", "{}/store/*"]),
        ("GET", "get", ["s3:GetObject", "s3:ListBucket"], ["{}", "{}/store/*"]),
        ("GET", "keys", ["s3:ListBucket"], ["{}"]),
        ("GET", "exists", ["s3:GetObject", "s3:ListBucket"], ["{}", "{}/store/*"]),
        ("DELETE", "delete", ["s3:DeleteObject"], ["{}/store/*"]),
    ],
)
@pytest.mark.usefixtures("moto_url")
def test_a_refusal_has_the_statement_that_is_needed(
    in_front: "InFront", method: str, use: str, actions: list[str], resources: list[str]
) -> None:
    in_front(lambda request, _: request.answer(403, "AccessDenied") if request.command == method else request.pass_on())
    with pytest.raises(StoreError) as raised:
        every_use(open_store("s3://evidence/store"))[use]()
    arns = [resource.format("arn:aws:s3:::evidence") for resource in resources]
    assert statement_in(raised.value) == {"Effect": "Allow", "Action": actions, "Resource": arns}


@pytest.mark.usefixtures("moto_url")
def test_the_statement_has_what_the_settings_need(in_front: "InFront", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_QUALIFY_S3_OBJECT_LOCK", "compliance:30")
    monkeypatch.setenv("VLLM_QUALIFY_S3_SSE", "aws:kms")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "cn-north-1")
    in_front(lambda request, _: request.answer(403, "AccessDenied"))
    with pytest.raises(StoreError) as raised:
        put(open_store("s3://evidence"), KEY)
    assert statement_in(raised.value)["Action"] == ["s3:PutObject", "s3:PutObjectRetention"]
    assert statement_in(raised.value)["Resource"] == ["arn:aws-cn:s3:::evidence/*"]
    assert_names(raised.value, "kms:GenerateDataKey", "kms:Decrypt")


@pytest.mark.s3
@pytest.mark.usefixtures("radosgw_url")
def test_a_user_who_may_only_read_reads_and_is_refused_by_check(become_denied: Callable[[], str]) -> None:
    owner, bucket = client_of_environment(), "read-only"
    owner.create_bucket(Bucket=bucket)
    store_arns = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    allow(owner, bucket, [{"Action": ["s3:GetObject", "s3:ListBucket"], "Resource": store_arns}], "denied")
    url = f"s3://{bucket}/store"
    put(open_store(url), KEY)
    become_denied()
    reader = open_store(url)
    assert reader.get(KEY) == b"body"
    assert list(reader.keys("")) == [KEY]
    assert reader.exists(KEY)
    with raises_naming(StoreError, "write", "AccessDenied", "s3:PutObject"):
        reader.check()


@pytest.mark.s3
@pytest.mark.usefixtures("radosgw_url")
def test_a_gateway_that_forgets_the_condition_with_versions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceph 16 does. Its buckets with object lock have versions."""
    client_of_environment().create_bucket(Bucket="versions", ObjectLockEnabledForBucket=True)
    monkeypatch.setenv("VLLM_QUALIFY_S3_OBJECT_LOCK", "governance:1")
    with raises_naming(StoreError, "replaced", "without versions"):
        open_store("s3://versions").check()


@pytest.mark.s3
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_QUALIFY_S3_SSE", "AES256"),
        ("VLLM_QUALIFY_S3_STORAGE_CLASS", "STANDARD_IA"),
        ("VLLM_QUALIFY_S3_OBJECT_LOCK", "governance:1"),
    ],
)
def test_settings_that_the_server_lacks_are_reported_by_check(
    radosgw_url: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    open_store(radosgw_url).check()
    monkeypatch.setenv(name, value)
    with raises_naming(StoreError, "answered 400", "VLLM_QUALIFY_S3_"):
        open_store(radosgw_url).check()


def test_no_credentials_are_reported(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert_every_use_raises(StoreError, open_store(moto_url), "evidence", "needs credentials", "AWS_PROFILE", "s3:PutObject")


def test_an_unreachable_endpoint_is_busy(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # bound and not listening: every connection is refused
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:{SECRET.replace('/', '_')}@{address}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        for error in errors_of_every_use(open_store(moto_url)):
            assert type(error) is StoreBusyError
            assert_names(error, f"http://{address}", "AWS_ENDPOINT_URL")
            assert SECRET.replace("/", "_") not in str(error)


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_ENDPOINT_URL", "no-url"), ("AWS_PROFILE", "unknown"), ("AWS_DEFAULT_REGION", "a b")]
)
def test_unusable_settings_are_reported_at_the_latest_by_check(
    moto_url: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with raises_naming(StoreError, "evidence", name):
        open_store(moto_url).check()


@pytest.mark.parametrize("token", [f"{TOKEN}\n", f" {TOKEN}\r\nx: y"])
def test_a_token_that_is_no_header_is_reported_without_it(moto_url: str, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    """The error of boto3 does hold the token."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert_every_use_raises(StoreError, open_store(moto_url), "evidence", "credentials")


# --- an S3 that misbehaves


@dataclass
class Scripted:
    """A server that gives the test's answer, or passes requests on and then changes the answer as the test wants."""

    behave: Callable[["Handler", int], None]
    seen: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Scripted
    upstream: str

    def handle_request(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.script.seen.append(f"{self.command} {self.path}")
        self.script.behave(self, len(self.script.seen))

    do_GET = do_PUT = do_HEAD = do_DELETE = handle_request  # noqa: N815

    def answer(self, status: int, code: str = "", headers: Mapping[str, str] | None = None) -> None:
        body = f"<Error><Code>{code}</Code><Message>{SECRET} {TOKEN}</Message></Error>".encode() if code else b""
        self.respond(status, {**(headers or {}), "Content-Length": str(len(body))}, body)

    def pass_on(self, without: str = "", lose_the_answer: bool = False, until: Event | None = None) -> None:
        connection = http.client.HTTPConnection(self.upstream, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in (without.lower(), "expect")}
        connection.request(self.command, self.path, self.body, headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if until:
            until.wait(30)
        if lose_the_answer:
            self.cut()
        else:
            dropped = ("connection", "transfer-encoding")
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in dropped}
            self.respond(answer.status, {"Content-Length": str(len(body)), **kept}, body)

    def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Not on the terminal."""


@pytest.fixture
def in_front(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Handler, int], None]], Scripted]]:
    """Puts a scripted server in front of the S3 that the settings name."""
    servers = []

    def start(behave: Callable[[Handler, int], None]) -> Scripted:
        script = Scripted(behave)
        upstream = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
        handler = type("Scripted", (Handler,), {"script": script, "upstream": upstream})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        return script

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each call, with a token that no error may tell."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)


InFront = Callable[[Callable[[Handler, int], None]], Scripted]
# What a server answers that is busy with another write.
CONFLICT = (409, "ConditionalRequestConflict")


def answer_once(status: int, code: str) -> Callable[[Handler, int], None]:
    return lambda request, count: request.answer(status, code) if count == 1 else request.pass_on()


def methods(script: Scripted) -> list[str]:
    return [line.split()[0] for line in script.seen]


def test_a_write_whose_answer_was_lost_is_a_success(s3_url: str, in_front: InFront) -> None:
    script = in_front(lambda request, count: request.pass_on(lose_the_answer=count == 1))
    put(open_store(s3_url), KEY, b"once")
    assert methods(script) == ["PUT", "PUT", "HEAD"]
    assert open_store(s3_url).get(KEY) == b"once"


def test_a_swap_whose_answer_was_lost_is_a_success(s3_url: str, in_front: InFront) -> None:
    tag = swapped(open_store(s3_url), b"1", None)
    script = in_front(lambda request, count: request.pass_on(lose_the_answer=count == 1))
    store = open_store(s3_url)
    swap(store, b"1 2", tag)
    assert methods(script) == ["PUT", "PUT", "HEAD"]
    assert store.get(POINTER) == b"1 2"
    swap(store, b"1 2 3", store.read(POINTER).tag)


def test_a_swap_whose_answer_was_lost_and_that_was_swapped_since_is_reported(s3_url: str, in_front: InFront) -> None:
    others = open_store(s3_url)
    tag = swapped(others, b"1", None)

    def behave(request: Handler, count: int) -> None:
        if count == 2:
            swap(others, others.get(POINTER) + b" theirs", others.read(POINTER).tag)
        request.pass_on(lose_the_answer=count == 1)

    in_front(behave)
    with pytest.raises(ChangedError):
        swap(open_store(s3_url), b"1 ours", tag)
    assert others.get(POINTER) == b"1 ours theirs"


@pytest.mark.parametrize("name", ["put_new", "swap", "read", "get", "exists", "keys", "check"])
def test_a_server_that_fails_twice_is_asked_again(moto_url: str, in_front: InFront, name: str) -> None:
    for key in (KEY, POINTER) if name in ("read", "get") else ():
        put(open_store(moto_url), key)

    def behave(request: Handler, count: int) -> None:
        request.answer(503, "SlowDown") if count == 1 else request.cut() if count == 2 else request.pass_on()

    script = in_front(behave)
    every_use(open_store(moto_url))[name]()
    assert script.seen[0] == script.seen[1] == script.seen[2]


@pytest.mark.parametrize("write", ["first write", "first swap", "later swap"])
def test_a_conflict_that_passes_is_no_error(moto_url: str, in_front: InFront, write: str) -> None:
    store = open_store(moto_url)
    tag = swapped(store, b"1", None) if write == "later swap" else None
    script = in_front(answer_once(*CONFLICT))
    store = open_store(moto_url)
    put(store, KEY) if write == "first write" else swap(store, b"1 2", tag)
    assert methods(script) == ["PUT", "HEAD", "PUT"]


@pytest.mark.usefixtures("one_try")
@pytest.mark.parametrize("tag_is_known", [False, True], ids=["first swap", "later swap"])
def test_after_an_error_of_the_server_the_object_tells_whether_it_was_swapped(
    moto_url: str, in_front: InFront, tag_is_known: bool
) -> None:
    """radosgw answers 500 where many writers race. Here it has written nothing; then another writer was quicker."""
    tag = swapped(open_store(moto_url), b"1", None) if tag_is_known else None
    script = in_front(answer_once(500, "UnknownError"))
    swap(open_store(moto_url), b"1 2", tag)
    assert methods(script) == ["PUT", "HEAD", "PUT"]
    in_front(answer_once(500, "UnknownError"))
    with pytest.raises(ChangedError):
        swap(open_store(moto_url), b"1 3", tag)
    assert open_store(moto_url).get(POINTER) == b"1 2"


def test_a_server_that_is_too_slow_is_busy(moto_url: str, in_front: InFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 0.1)
    given_up = Event()
    in_front(lambda request, _: request.cut() if given_up.wait(30) else None)
    try:
        assert_every_use_raises(StoreBusyError, open_store(moto_url), "does not answer (ReadTimeoutError)")
    finally:
        given_up.set()


def test_a_server_that_drips_is_busy(moto_url: str, in_front: InFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "CALL_LIMIT_S", 0.3)
    given_up = Event()

    def drip(request: Handler, _: int) -> None:
        request.respond(200, {"Content-Length": "1000000"}, b"")
        with suppress(OSError):
            while not given_up.wait(0.05):
                request.wfile.write(b"<")

    in_front(drip)
    try:
        store = open_store(moto_url)
        for use in (lambda: store.get(KEY), lambda: store.keys(""), lambda: store.exists(KEY)):
            with raises_naming(StoreBusyError, "no answer within 0.3 s"):
                use()
    finally:
        given_up.set()


def test_an_answer_that_comes_too_late_is_a_success(s3_url: str, in_front: InFront, monkeypatch: pytest.MonkeyPatch) -> None:
    tag = swapped(open_store(s3_url), b"1", None)
    second = Event()

    def late(request: Handler, count: int) -> None:
        if count == 1:
            request.pass_on(lose_the_answer=True, until=second)
        else:
            second.set()
            request.pass_on()

    in_front(late)
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 1.0)
    store = open_store(s3_url)
    swap(store, b"1 2", tag)
    assert store.get(POINTER) == b"1 2"


@pytest.mark.thorough
@pytest.mark.parametrize("second", [b"first", b"second"], ids=["same", "other"])
def test_a_lost_answer_does_not_make_an_earlier_object_ours(s3_url: str, in_front: InFront, second: bytes) -> None:
    put(open_store(s3_url), KEY, b"first")
    script = in_front(lambda request, count: request.pass_on(lose_the_answer=count == 1))
    with pytest.raises(AlreadyExistsError):
        put(open_store(s3_url), KEY, second)
    assert len(script.seen) == 3
    assert open_store(s3_url).get(KEY) == b"first"


@pytest.mark.parametrize(
    ("condition", "problem"), [("If-None-Match", "replaced"), ("If-Match", "cannot keep approvals")], ids=["new", "tag"]
)
def test_a_server_that_ignores_a_condition_is_refused(moto_url: str, in_front: InFront, condition: str, problem: str) -> None:
    in_front(lambda request, _: request.pass_on(without=condition))
    with raises_naming(StoreError, problem, "conditional writes"):
        open_store(moto_url).check()


@pytest.mark.parametrize("action", ["read", "list"])
def test_check_finds_a_missing_right(moto_url: str, in_front: InFront, action: str) -> None:
    def deny(request: Handler, _: int) -> None:
        asked = {"PUT": "write", "GET": "list" if "list-type" in request.path else "read"}.get(request.command)
        request.answer(403, "AccessDenied") if asked == action else request.pass_on()

    in_front(deny)
    with raises_naming(StoreError, action, "AccessDenied", {"read": "s3:GetObject", "list": "s3:ListBucket"}[action]):
        open_store(moto_url).check()


def test_a_conflict_with_a_finished_write_is_reported_as_such(moto_url: str, in_front: InFront) -> None:
    put(open_store(moto_url), KEY, b"first")
    in_front(answer_once(*CONFLICT))
    with pytest.raises(AlreadyExistsError):
        put(open_store(moto_url), KEY, b"first")


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(409, "OperationAborted", "keep getting in the way"), (500, "InternalError", "was answered 500 InternalError")],
)
def test_a_refusal_that_stays_is_busy(
    moto_url: str, in_front: InFront, monkeypatch: pytest.MonkeyPatch, status: int, code: str, words: str
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(time, "sleep", lambda _: None)
    in_front(lambda request, _: request.answer(status, code) if request.command == "PUT" else request.pass_on())
    with raises_naming(StoreBusyError, "evidence", KEY, words):
        put(open_store(moto_url), KEY)


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (301, "PermanentRedirect", StoreError, ["another region", "AWS_DEFAULT_REGION", "eu-north-1"]),
        (400, "AuthorizationHeaderMalformed", StoreError, ["another region", "eu-north-1"]),
        (400, "ExpiredToken", StoreError, ["credentials", "temporary"]),
        (400, "InvalidToken", StoreError, ["credentials", "AWS_SESSION_TOKEN"]),
        (400, "InvalidRequest", StoreError, ["InvalidRequest"]),
        (403, "AccessDenied", StoreError, ["does not allow", '{"Effect": "Allow", "Action": ["s3:']),
        (403, "RequestTimeTooSkewed", StoreError, ["clock"]),
        (403, "QuotaExceeded", StoreError, ["is full", "quota"]),
        (404, "NoSuchBucket", StoreError, ["does not exist"]),
        (429, "TooManyRequests", StoreBusyError, ["429"]),
        (500, "InternalError", StoreBusyError, ["500"]),
        (501, "NotImplemented", StoreError, ["conditional writes"]),
        (502, "", StoreBusyError, ["502"]),
        (503, "SlowDown", StoreBusyError, ["SlowDown"]),
        (507, "InsufficientStorage", StoreError, ["is full"]),
    ],
)
@pytest.mark.usefixtures("one_try")
def test_answers_are_reported(
    moto_url: str, in_front: InFront, status: int, code: str, kind: type[StoreError], words: list[str]
) -> None:
    in_front(lambda request, _: request.answer(status, code, {"x-amz-bucket-region": "eu-north-1"}))
    assert_every_use_raises(kind, open_store(moto_url), "evidence", *words)


@pytest.mark.usefixtures("one_try")
def test_a_cut_connection_is_busy(moto_url: str, in_front: InFront) -> None:
    in_front(lambda request, _: request.cut())
    assert_every_use_raises(StoreBusyError, open_store(moto_url), "does not answer")


def cut_short(most: float) -> Callable[[Handler, int], None]:
    """So many answers break off."""

    def behave(request: Handler, count: int) -> None:
        if count > most:
            return request.pass_on()
        request.respond(200, {"Content-Length": "1000", "ETag": '"half"'}, b"half")
        return request.cut()

    return behave


def test_a_read_that_is_cut_short_is_tried_again(moto_url: str, in_front: InFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    tag = swapped(open_store(moto_url), b"whole", None)
    in_front(cut_short(1))
    assert open_store(moto_url).read(POINTER) == Stored(b"whole", tag)
    in_front(cut_short(math.inf))
    with pytest.raises(StoreBusyError):
        open_store(moto_url).get(KEY)


def test_a_custom_endpoint_is_addressed_by_path(moto_url: str, in_front: InFront, monkeypatch: pytest.MonkeyPatch) -> None:
    script = in_front(lambda request, _: request.pass_on())
    monkeypatch.setenv("AWS_ENDPOINT_URL", os.environ["AWS_ENDPOINT_URL"].replace("127.0.0.1", "localhost"))
    put(open_store(moto_url), KEY)
    assert script.seen == [f"PUT /{moto_url.removeprefix('s3://')}/{KEY}"]
