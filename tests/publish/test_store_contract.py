"""What every store promises, tried on a directory, on moto and on a real gateway; then what goes wrong in each."""

import errno
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier, Thread
from typing import NoReturn

import boto3
import pytest

from tests.ci import IN_CI
from vllm_qualify.errors import AlreadyExistsError, CallerError, StoreBusyError, StoreError
from vllm_qualify.publish.store import MissingObjectError, Store, open_store

JSON = "application/json"
KEY = "cells/llama-h200/report.json"
SECRET = "top/Secret+0123456789"
TOKEN = "token-9876543210"


def put(store: Store, key: str, body: bytes = b"body") -> None:
    store.put_new(key, body, JSON)


def every_use(store: Store) -> dict[str, Callable[[], object]]:
    return {
        "check": store.check,
        "put_new": lambda: put(store, KEY),
        "get": lambda: store.get(KEY),
        "exists": lambda: store.exists(KEY),
        "keys": lambda: store.keys(""),
    }


def errors_of_every_use(store: Store) -> list[StoreError]:
    """The errors of all methods; none may answer, least of all with False, an empty list or a missing object."""
    errors = []
    for name, use in every_use(store).items():
        with pytest.raises(StoreError) as raised:
            pytest.fail(f"{name} answered {use()!r}")
        assert not isinstance(raised.value, MissingObjectError | AlreadyExistsError), name
        errors.append(raised.value)
    return errors


def assert_told(error: StoreError, *words: str) -> None:
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
    assert store.get(KEY) == body
    assert open_store(store.url).get(KEY) == body


@pytest.mark.parametrize("second", [b"first", b"second", b""], ids=["same", "other", "empty"])
def test_a_second_write_is_refused_and_changes_nothing(store: Store, second: bytes) -> None:
    put(store, KEY, b"first")
    with pytest.raises(AlreadyExistsError) as raised:
        put(store, KEY, second)
    assert_told(raised.value, store.locate(KEY))
    assert store.get(KEY) == b"first"


def test_the_first_write_stands_for_a_store_opened_anew(store: Store) -> None:
    put(store, KEY)
    with pytest.raises(AlreadyExistsError):
        put(open_store(store.url), KEY)


@pytest.mark.parametrize("same", [False, True], ids=["different bodies", "same body"])
def test_of_16_racing_writers_exactly_one_wins(real_store: Store, same: bool) -> None:
    for round_ in range(3):
        key = f"race/{round_}"
        bodies = [b"x" * 3000 if same else bytes([writer]) * 3000 for writer in range(16)]
        winners = race(real_store, key, bodies)
        assert len(winners) == 1
        assert real_store.get(key) == bodies[winners[0]]


def race(store: Store, key: str, bodies: list[bytes]) -> list[int]:
    together = Barrier(len(bodies))

    def write(body: bytes) -> bool:
        together.wait()
        try:
            put(store, key, body)
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(len(bodies)) as pool:
        return [writer for writer, won in enumerate(pool.map(write, bodies)) if won]


def test_a_missing_object_is_told_as_missing(store: Store) -> None:
    put(store, "cells/a/report.json")
    for key in ("cells/b/report.json", "cells/a", "cells/a/report", "cells/a/report.json.sig", "cells/a/report.json/x"):
        assert not store.exists(key)
        with pytest.raises(MissingObjectError) as raised:
            store.get(key)
        assert_told(raised.value, key)
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


@pytest.mark.parametrize(
    ("kind", "count"),
    # A page has 1000 keys; infra/radosgw.sh lets its gateway give 100.
    [("directory", 1003), ("moto", 1003), pytest.param("radosgw", 203, marks=pytest.mark.s3)],
)
def test_a_listing_has_all_of_more_than_a_page(request: pytest.FixtureRequest, kind: str, count: int) -> None:
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
        for use in (store.get, store.exists, store.locate, lambda key, store=store: put(store, key)):
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


NOT_URLS = [
    "",
    "store",
    "/data/store",
    "s3:/b",
    "s3://",
    "s3:///p",
    "s3://b//p",
    "s3://b/../p",
    "s3://b/p?x=1",
    "s3://ä/p",
    "S3://b",
]
NOT_URLS += [
    "file://host/p",
    "file:p",
    "file://",
    "file:///p?x",
    "file:///p#x",
    "file:///p%00",
    "gs://b",
    "https://b.s3.amazonaws.com/p",
]
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
        "import sys; from vllm_qualify.publish.store import open_store; open_store('file:///store');"
        "print([name for name in sys.modules if name.startswith('boto')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# --- a directory that fails


@pytest.mark.parametrize("step", ["fsync", "link"])
def test_a_killed_writer_leaves_nothing_visible(tmp_path: Path, step: str) -> None:
    code = (
        "import os, sys; from vllm_qualify.publish.store import open_store;"
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

    def fail(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, step, fail)
        with pytest.raises(StoreError) as raised:
            put(store, KEY)
    assert type(raised.value) is kind
    assert_told(raised.value, str(tmp_path / KEY), word)
    assert list((tmp_path / KEY).parent.iterdir()) == []


def test_a_link_whose_answer_was_lost_is_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, link = open_store(tmp_path.as_uri()), os.link

    def repeated(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", repeated)
    put(store, KEY, b"once")
    assert store.get(KEY) == b"once"
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
        assert_told(raised.value, "mistyped", "mounted")
    store.check()
    assert list(store.keys("")) == []


def test_a_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for error in errors_of_every_use(open_store((tmp_path / "file" / "store").as_uri())):
        assert_told(error, str(tmp_path / "file"), "is a file")


def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    put(store, KEY)
    (tmp_path / "store").chmod(0)
    with without_root():
        errors = errors_of_every_use(store)
    for error in errors:
        assert_told(error, str(tmp_path / "store"), "right to")


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
    assert_told(raised.value, "Permission denied")


@contextmanager
def without_root() -> Iterator[None]:
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
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


def test_a_read_only_directory_is_told_by_check(tmp_path: Path) -> None:
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
    start = "import os, sys; from vllm_qualify.publish.store import *; store = open_store('file://' + sys.argv[1])"
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
    for error in errors_of_every_use(open_store("s3://never-made/prefix")):
        assert_told(error, "never-made", "does not exist", os.environ["AWS_ENDPOINT_URL"])


@pytest.mark.s3
def test_a_wrong_secret_is_told(radosgw_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    for error in errors_of_every_use(open_store(radosgw_url)):
        assert_told(error, "evidence", "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY")


@pytest.mark.s3
def test_an_unknown_access_key_is_told(radosgw_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    for error in errors_of_every_use(open_store(radosgw_url)):
        assert_told(error, "evidence", "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID")


@pytest.mark.s3
def test_a_user_without_permission_is_told_what_it_needs(
    radosgw_url: str, radosgw_denied: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(open_store(radosgw_url), KEY)
    for name, value in radosgw_denied.items():
        monkeypatch.setenv(name, value)
    for error in errors_of_every_use(open_store(radosgw_url)):
        assert_told(error, "evidence", "AccessDenied", "s3:PutObject", "s3:GetObject", "s3:ListBucket")


@pytest.mark.s3
@pytest.mark.usefixtures("radosgw_url")
def test_a_user_who_may_only_read_reads_and_is_refused_by_check(
    radosgw_denied: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, bucket = boto3.client("s3"), "read-only"
    owner.create_bucket(Bucket=bucket)
    may_read = {
        "Effect": "Allow",
        "Principal": {"AWS": ["arn:aws:iam:::user/denied"]},
        "Action": ["s3:GetObject", "s3:ListBucket"],
        "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
    }
    owner.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [may_read]}))
    url = f"s3://{bucket}/store"
    put(open_store(url), KEY)
    for name, value in radosgw_denied.items():
        monkeypatch.setenv(name, value)
    reader = open_store(url)
    assert reader.get(KEY) == b"body"
    assert list(reader.keys("")) == [KEY]
    assert reader.exists(KEY)
    with pytest.raises(StoreError) as raised:
        reader.check()
    assert_told(raised.value, "write", "AccessDenied", "s3:PutObject")


def test_no_credentials_are_told(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for error in errors_of_every_use(open_store(moto_url)):
        assert_told(error, "evidence", "needs credentials", "AWS_PROFILE", "s3:PutObject")


def test_an_unreachable_endpoint_is_busy(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # bound and not listening: every connection is refused
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:{SECRET.replace('/', '_')}@{address}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        for error in errors_of_every_use(open_store(moto_url)):
            assert type(error) is StoreBusyError
            assert_told(error, f"http://{address}", "AWS_ENDPOINT_URL")
            assert SECRET.replace("/", "_") not in str(error)


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_ENDPOINT_URL", "no-url"), ("AWS_PROFILE", "unknown"), ("AWS_DEFAULT_REGION", "a b")]
)
def test_unusable_settings_are_told_at_the_latest_by_check(
    moto_url: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StoreError) as raised:
        open_store(moto_url).check()
    assert_told(raised.value, "evidence", name)


@pytest.mark.parametrize("token", [f"{TOKEN}\n", f" {TOKEN}\r\nx: y"])
def test_a_token_that_is_no_header_is_told_without_it(moto_url: str, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    """The error of boto3 does hold the token."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for error in errors_of_every_use(open_store(moto_url)):
        assert type(error) is StoreError
        assert_told(error, "evidence", "credentials")


# --- an S3 that misbehaves


@dataclass
class Scripted:
    """A server that answers as it is told, or passes requests on and then does to the answer what it is told."""

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

    do_GET = do_PUT = do_HEAD = handle_request  # noqa: N815

    def answer(self, status: int, code: str = "", headers: Mapping[str, str] | None = None) -> None:
        body = f"<Error><Code>{code}</Code><Message>{SECRET} {TOKEN}</Message></Error>".encode() if code else b""
        self.respond(status, {**(headers or {}), "Content-Length": str(len(body))}, body)

    def pass_on(self, without: str = "", lose_the_answer: bool = False) -> None:
        connection = http.client.HTTPConnection(self.upstream, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in (without.lower(), "expect")}
        connection.request(self.command, self.path, self.body, headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if lose_the_answer:
            self.cut()
        else:
            kept = {
                name: value for name, value in answer.getheaders() if name.lower() not in ("connection", "transfer-encoding")
            }
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


InFront = Callable[[Callable[[Handler, int], None]], Scripted]


def test_a_write_whose_answer_was_lost_is_a_success(s3_url: str, in_front: InFront) -> None:
    script = in_front(lambda request, count: request.pass_on(lose_the_answer=count == 1))
    store = open_store(s3_url)
    put(store, KEY, b"once")
    assert [line.split()[0] for line in script.seen] == ["PUT", "PUT", "HEAD"]
    assert store.get(KEY) == b"once"


@pytest.mark.parametrize("second", [b"first", b"second"], ids=["same", "other"])
def test_a_lost_answer_does_not_make_an_earlier_object_ours(s3_url: str, in_front: InFront, second: bytes) -> None:
    put(open_store(s3_url), KEY, b"first")
    script = in_front(lambda request, count: request.pass_on(lose_the_answer=count == 1))
    with pytest.raises(AlreadyExistsError):
        put(open_store(s3_url), KEY, second)
    assert len(script.seen) == 3
    assert open_store(s3_url).get(KEY) == b"first"


def test_a_busy_server_is_asked_again(s3_url: str, in_front: InFront) -> None:
    script = in_front(lambda request, count: request.answer(503, "SlowDown") if count == 1 else request.pass_on())
    put(open_store(s3_url), KEY)
    assert len(script.seen) == 2


def test_a_server_that_ignores_the_condition_is_refused(moto_url: str, in_front: InFront) -> None:
    in_front(lambda request, _: request.pass_on(without="If-None-Match"))
    with pytest.raises(StoreError) as raised:
        open_store(moto_url).check()
    assert_told(raised.value, "replaced", "conditional writes")


@pytest.mark.parametrize("action", ["read", "list"])
def test_check_finds_a_missing_right(moto_url: str, in_front: InFront, action: str) -> None:
    def deny(request: Handler, _: int) -> None:
        asked = {"PUT": "write", "GET": "list" if "list-type" in request.path else "read"}.get(request.command)
        request.answer(403, "AccessDenied") if asked == action else request.pass_on()

    in_front(deny)
    with pytest.raises(StoreError) as raised:
        open_store(moto_url).check()
    assert_told(raised.value, action, "AccessDenied", "s3:GetObject", "s3:ListBucket")


def test_a_conflict_that_passes_is_no_error(moto_url: str, in_front: InFront) -> None:
    script = in_front(
        lambda request, count: request.answer(409, "ConditionalRequestConflict") if count == 1 else request.pass_on()
    )
    put(open_store(moto_url), KEY)
    assert [line.split()[0] for line in script.seen] == ["PUT", "HEAD", "PUT"]


def test_a_conflict_with_a_finished_write_is_told_as_such(moto_url: str, in_front: InFront) -> None:
    put(open_store(moto_url), KEY, b"first")
    in_front(lambda request, count: request.answer(409, "ConditionalRequestConflict") if count == 1 else request.pass_on())
    with pytest.raises(AlreadyExistsError):
        put(open_store(moto_url), KEY, b"first")


def test_a_conflict_that_stays_is_busy(moto_url: str, in_front: InFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    in_front(lambda request, _: request.answer(409, "OperationAborted") if request.command == "PUT" else request.pass_on())
    with pytest.raises(StoreBusyError) as raised:
        put(open_store(moto_url), KEY)
    assert_told(raised.value, "evidence", KEY)


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (301, "PermanentRedirect", StoreError, ["another region", "AWS_DEFAULT_REGION", "eu-north-1"]),
        (400, "AuthorizationHeaderMalformed", StoreError, ["another region", "eu-north-1"]),
        (400, "ExpiredToken", StoreError, ["credentials", "temporary"]),
        (400, "InvalidToken", StoreError, ["credentials", "AWS_SESSION_TOKEN"]),
        (400, "InvalidRequest", StoreError, ["InvalidRequest"]),
        (403, "AccessDenied", StoreError, ["s3:PutObject", "s3:GetObject", "s3:ListBucket"]),
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
def test_answers_are_told(
    moto_url: str,
    in_front: InFront,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    kind: type[StoreError],
    words: list[str],
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    in_front(lambda request, _: request.answer(status, code, {"x-amz-bucket-region": "eu-north-1"}))
    for error in errors_of_every_use(open_store(moto_url)):
        assert type(error) is kind
        assert_told(error, "evidence", *words)


def test_a_cut_connection_is_busy(moto_url: str, in_front: InFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    in_front(lambda request, _: request.cut())
    for error in errors_of_every_use(open_store(moto_url)):
        assert type(error) is StoreBusyError
        assert_told(error, "does not answer")


def test_a_body_cut_short_is_busy(moto_url: str, in_front: InFront) -> None:
    def cut_short(request: Handler, _: int) -> None:
        request.respond(200, {"Content-Length": "1000"}, b"half")
        request.cut()

    in_front(cut_short)
    with pytest.raises(StoreBusyError):
        open_store(moto_url).get(KEY)


def test_a_custom_endpoint_is_addressed_by_path(moto_url: str, in_front: InFront, monkeypatch: pytest.MonkeyPatch) -> None:
    script = in_front(lambda request, _: request.pass_on())
    monkeypatch.setenv("AWS_ENDPOINT_URL", os.environ["AWS_ENDPOINT_URL"].replace("127.0.0.1", "localhost"))
    put(open_store(moto_url), KEY)
    assert script.seen == [f"PUT /{moto_url.removeprefix('s3://')}/{KEY}"]
