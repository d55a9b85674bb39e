"""A registry, or its token server, that never ends, drips, or says what none says: one error in time, and the watch goes on."""

import gzip
import json
import threading
import time
from collections.abc import Callable

import pytest

from tests.builders.dripping import dripping
from tests.releases.conftest import docker_config
from tests.releases.service import Answer, Asked, serving
from vllm_qualify.engine import hub
from vllm_qualify.engine.hub import resolve_commit
from vllm_qualify.errors import HostError
from vllm_qualify.limits import call_within
from vllm_qualify.releases import registry
from vllm_qualify.releases.registry import AT_ONCE, MOST_PAGES, NEWEST_TAGS, releases_in
from vllm_qualify.releases.source import VersionRule, version_in

__all__ = ["docker_config"]

DIGEST = "sha256:" + "a" * 64
HEAD = {"Docker-Content-Digest": DIGEST}
REPOSITORY = "a/name"


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test can wait for."""
    for module, limits in ((registry, {"ANSWER_S": 1.0, "WHOLE_S": 3.0}), (hub, {"ANSWER_S": 2.0})):
        for name, seconds in limits.items():
            monkeypatch.setattr(module, name, seconds)


def tags(*names: object, link: str = "") -> Answer:
    headers = {"Link": f'<{link}>; rel="next"'} if link else {}
    return Answer(body=json.dumps({"name": REPOSITORY, "tags": list(names)}).encode(), headers=headers)


def error_of(answer: Callable[[Asked], Answer]) -> HostError:
    with serving(answer) as service, pytest.raises(HostError) as raised:
        releases_in(f"{service.address}/{REPOSITORY}", VersionRule())
    assert raised.value.remedy
    return raised.value


HEADERS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
BODY = HEADERS + b"Content-Length: 100000\r\n\r\n"


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    ("start", "drop"), [(BODY, b" "), (HEADERS, b"X-More: 1\r\n"), (b"", b"")], ids=["body", "headers", "silence"]
)
def test_a_registry_that_drips_does_not_answer(start: bytes, drop: bytes) -> None:
    began_s = time.monotonic()
    with dripping(start, drop) as address, pytest.raises(HostError) as raised:
        releases_in(f"{address}/{REPOSITORY}", VersionRule())
    assert (raised.value.kind, raised.value.retry) == ("registry-unreachable", True)
    assert time.monotonic() - began_s < 15


@pytest.mark.usefixtures("_impatient")
def test_a_token_that_drips_is_given_up() -> None:
    with dripping(BODY, b" ") as tokens:
        challenge = {"WWW-Authenticate": f'Bearer realm="http://{tokens}/token",service="s"'}
        error = error_of(lambda _: Answer(401, headers=challenge))
    assert (error.kind, error.retry) == ("registry-unreachable", True)


@pytest.mark.usefixtures("_impatient")
def test_a_hub_that_drips_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with dripping(BODY, b" ") as address, pytest.raises(HostError) as raised:
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        resolve_commit("org/name", None, "watch")
    assert raised.value.retry


def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    error = error_of(lambda _: Answer(body=b'{"tags": [' + b" " * 9 * 2**20 + b"]}"))
    assert "longer than 8 MiB" in error.problem


def test_an_answer_that_grows_when_it_is_unpacked_is_not_unpacked() -> None:
    bomb = gzip.compress(b'{"tags": [' + b" " * 2**24 + b"]}")
    assert len(bomb) < 2**16
    assert "compressed" in error_of(lambda _: Answer(body=bomb, headers={"Content-Encoding": "gzip"})).problem


@pytest.mark.thorough
def test_a_list_of_tags_without_end_is_left() -> None:
    asked: list[str] = []

    def answer(request: Asked) -> Answer:
        if "tags/list" not in request.path:
            return Answer(404)
        asked.append(request.path)
        return tags(f"v0.1.{len(asked)}", link=f"/v2/{REPOSITORY}/tags/list?last={len(asked)}")

    assert f"no end after {MOST_PAGES} pages" in error_of(answer).problem
    assert len(asked) == MOST_PAGES


def test_of_many_tags_the_newest_are_looked_at_several_at_a_time() -> None:
    names = [f"v0.{minor}.{patch}" for minor in range(20, 40) for patch in range(100)]
    heads: list[str] = []
    running, most, lock = 0, 0, threading.Lock()

    def answer(request: Asked) -> Answer:
        nonlocal running, most
        if request.method != "HEAD":
            return tags(*names) if "tags/list" in request.path else Answer(404)
        with lock:
            running, most = running + 1, max(most, running + 1)
            heads.append(request.path.rpartition("/")[2])
        time.sleep(0.005)
        with lock:
            running -= 1
        return Answer(headers=HEAD)

    with serving(answer) as service:
        (release,) = releases_in(f"{service.address}/{REPOSITORY}", VersionRule())
    newest = [f"v0.{minor}.{patch}" for minor in range(39, 34, -1) for patch in range(99, -1, -1)]
    assert release.tags == newest
    assert len(heads) == NEWEST_TAGS == len(newest)
    assert 2 <= most <= AT_ONCE


NO_TAGS = [b'{"tags": %s}' % tags for tags in (b"[1, 2]", b'{"a": 1}', b'"v1.0.0"', b"[null]")]


@pytest.mark.parametrize("body", [*NO_TAGS, b"[]", b"7", b'{"name": "a"}', b"\xff"])
def test_what_is_no_list_of_tags_is_reported(body: bytes) -> None:
    assert "not a list of tags" in error_of(lambda _: Answer(body=body)).problem


@pytest.mark.parametrize("link", ["http://[::1/v2/", "http://a:b:c/", "\x7f://"])
def test_a_link_that_is_no_address_is_reported(link: str) -> None:
    assert error_of(lambda _: tags("v0.32.0", link=link)).kind.startswith("registry-")


def test_of_a_link_to_another_port_only_the_path_counts() -> None:
    """So a port that is no port leads nowhere else."""
    link = f"http://127.0.0.1:99999999/v2/{REPOSITORY}/tags/list?last=1"
    answers = {"HEAD": Answer(headers=HEAD), "GET": tags("v0.32.0", link=link)}
    with serving(lambda asked: answers[asked.method]) as service:
        (release,) = releases_in(f"{service.address}/{REPOSITORY}", VersionRule())
    assert release.tags == ["v0.32.0"]


def test_a_number_of_thousands_of_digits_is_no_version() -> None:
    huge = "9" * 5000
    assert version_in(f"v{huge}.0.0") is None
    assert version_in(f"v1.0.0.post{huge}") is None
    assert VersionRule().newest_first(["v0.32.0", f"v1.{huge}.0", "v0.٣٢.0"]) == ["v0.32.0"]


def test_a_call_in_time_gives_its_value_or_its_error() -> None:
    assert call_within(5, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        call_within(5, lambda: 1 // 0)
    never = threading.Event()
    slow: list[Callable[[], object]] = [
        lambda: call_within(0.05, never.wait),
        lambda: call_within(0.05, lambda: call_within(60, never.wait)),
        lambda: call_within(60, lambda: call_within(0.05, never.wait)),
    ]
    for call in slow:
        with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
            call()
    never.set()
    # One within one that ends sooner stays in its thread.
    inner, outer = call_within(5, lambda: (call_within(60, threading.get_ident), threading.get_ident()))
    assert inner == outer != threading.get_ident()
