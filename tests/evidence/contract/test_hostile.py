"""A server that drips, never ends, sends gigabytes, HTML, wrong types or a redirect: each check ends, with a sentence."""

import json
import time
from pathlib import Path

import pytest

from tests.directions import CAPABILITIES, CONTRACT
from tests.evidence.contract.server import Healthy, failing, measured, serving, unknown
from tests.fakes.vllm import TOKEN_S
from tests.faults.test_registry import dripping
from vllm_qualify.evidence.contract import exchange
from vllm_qualify.evidence.contract.exchange import EXCHANGES
from vllm_qualify.recipe.contract import Contract

BASE = {name.removeprefix("contract_") for name in CONTRACT}
SHORT, LONG = Contract(time_limit_s=0.5), Contract(time_limit_s=20)
ENDS_S = 60


class Says(Healthy):
    """It gives one answer to everything."""

    status, body, kind = 200, b"", "application/json"

    def do_GET(self) -> None:  # noqa: N802  # the name that the base class calls
        self._send(self.status, self.body, self.kind)

    def do_POST(self) -> None:  # noqa: N802  # the name that the base class calls
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()


def saying(body: bytes, kind: str = "application/json", status: int = 200) -> type[Says]:
    return type("Saying", (Says,), {"body": body, "kind": kind, "status": status})


def deep() -> bytes:
    return b"[" * 200_000


PROMISED = {name.removeprefix("contract_") for checks in CAPABILITIES.values() for name in checks}
# Only what the capabilities add.
PROMISES = Contract(
    capabilities=["chat", "tools", "parallel_tools", "reasoning", "json_schema", "vision", "responses"],
    not_asked=dict.fromkeys(CONTRACT, "of another test"),
    time_limit_s=20,
)
USAGE = b'"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}'


def message(text: bytes) -> bytes:
    """A chat's reply with this message."""
    choice = b'{"index": 0, "finish_reason": "stop", "message": %s}' % text
    return b'{"object": "chat.completion", "model": "reference", "choices": [%s], %s}' % (choice, USAGE)


def chunk(delta: bytes) -> bytes:
    """A stream of one chunk, with this delta."""
    choice = b'{"index": 0, "finish_reason": "stop", "delta": %s}' % delta
    return b'data: {"object": "chat.completion.chunk", "choices": [%s]}\n\ndata: [DONE]\n\n' % choice


def call(arguments: bytes) -> bytes:
    function = b'{"name": "get_weather", "arguments": "%s"}' % arguments
    return b'{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": %s}]}' % function


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"<html>welcome</html>", "text/html"),
        (b"null", "application/json"),
        (deep(), "application/json"),
        (message(b'{"role": "user", "content": ""}'), "application/json"),
        (message(b'{"role": "assistant", "content": {"a": 1}}'), "application/json"),
        (message(b'{"role": "assistant", "tool_calls": {"0": null}}'), "application/json"),
        (message(call(deep())), "application/json"),
        (message(call(b'{\\"city\\": NaN}')), "application/json"),
        (message(call(b"\\ud800")), "application/json"),
        (b'{"object": "response", "output": [{"type": 7}], "usage": {}}', "application/json"),
        (chunk(b'{"tool_calls": [{"index": 99999999999999999999, "function": {"arguments": "}"}}]}'), "text/event-stream"),
        (chunk(b'{"tool_calls": [{"index": -1, "id": "\\u001b", "function": null}]}'), "text/event-stream"),
        (chunk(b'{"content": %s}' % deep()), "text/event-stream"),
        (b'data: {"type": "response.completed"}\n\n', "text/event-stream"),
    ],
    ids=[
        "html",
        "null",
        "deep",
        "role",
        "content",
        "calls",
        "deep arguments",
        "nan",
        "surrogate",
        "response",
        "far index",
        "codes",
        "deep chunk",
        "no response",
    ],
)
def test_nonsense_breaks_every_promise_with_a_sentence(
    body: bytes, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(saying(body, kind)) as url:
        rows = measured(url, tmp_path / "contract", PROMISES, monkeypatch)
    # By its form it can be a reply without a call, or a stream that ends.
    assert PROMISED - failing(rows) <= {"tools_none", "chat_end", "chat_stream_end"}
    assert unknown(rows) == set()
    for row in rows.values():
        assert len(row.finding) < 600
        assert row.finding.isprintable()


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"<html><h1>502 Bad Gateway</h1></html>", "text/html", 502),
        (b"<html>welcome</html>", "text/html", 200),
        (b"", "application/json", 200),
        (b"null", "application/json", 200),
        (b"[]", "application/json", 200),
        (b'{"choices": 7, "usage": "many", "model": null}', "application/json", 200),
        (b'{"object": "text_completion", "choices": [{"text": {"a": 1}}]}', "application/json", 200),
        (b'{"error": "no"}', "application/json", 400),
        (b'{"usage": {"prompt_tokens": NaN}}', "application/json", 200),
        (b"\xff\xfe\x00", "application/json; charset=zip", 200),
        (deep(), "application/json", 200),
        (b"data: \n\ndata: {\n\ndata: [DONE]\n\n", "text/event-stream", 200),
        (b"\x1b]0;owned\x07", "text/plain", 200),
    ],
    ids=[
        "bad gateway",
        "html",
        "empty",
        "null",
        "list",
        "types",
        "text",
        "error",
        "nan",
        "encoding",
        "deep",
        "events",
        "codes",
    ],
)
def test_nonsense_fails_each_check_with_a_sentence(
    body: bytes, kind: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(saying(body, kind, status)) as url:
        rows = measured(url, tmp_path / "contract", LONG, monkeypatch)
    # What follows from an earlier reply cannot be asked.
    assert failing(rows) | unknown(rows) == BASE
    assert unknown(rows) <= {"stop", "prompt_too_long"}
    for row in rows.values():
        sentence = row.finding or row.invalid_because or ""
        assert 10 < len(sentence) < 600
        assert sentence.isprintable()


def test_a_redirect_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Redirects(Says):
        def do_GET(self) -> None:  # noqa: N802  # the name that the base class calls
            self.send_response(307)
            self.send_header("location", f"{elsewhere}{self.path}")
            self.send_header("content-length", "0")
            self.end_headers()

    with serving(Healthy) as elsewhere, serving(Redirects) as url:
        rows = measured(url, tmp_path / "contract", LONG, monkeypatch)
    assert failing(rows) | unknown(rows) == BASE
    assert "HTTP 307" in rows["contract_models"].finding


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"], ids=["silent", "body"])
def test_a_server_that_drips_is_asked_no_more(start: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with dripping(start, b"x" if start else b"") as address:
        rows = measured(f"http://{address}", tmp_path / "contract", SHORT, monkeypatch)
    assert time.monotonic() - began < ENDS_S
    assert unknown(rows) == BASE
    assert len((tmp_path / "contract" / EXCHANGES).read_text().splitlines()) == 4
    assert "ReadTimeout" in (rows["contract_completion"].invalid_because or "")
    assert "was not kept" in (rows["contract_many"].invalid_because or "")


def test_no_more_of_a_reply_is_kept_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MOST_BYTES", 1000)
    with serving(saying(b"x" * 100_000)) as url:
        rows = measured(url, tmp_path / "contract", LONG, monkeypatch)
    assert unknown(rows) == BASE
    assert (tmp_path / "contract" / EXCHANGES).stat().st_size < 10_000
    assert "longer than" in (rows["contract_models"].invalid_because or "")


def test_a_stream_that_never_ends_ends_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NeverEnds(Healthy):
        def event(self, data: str) -> None:
            """The first event, again and again. The client that hangs up ends it with its connection."""
            while True:
                super().event(data)
                time.sleep(TOKEN_S)  # a token takes this long

    with serving(NeverEnds) as url:
        rows = measured(url, tmp_path / "contract", Contract(time_limit_s=5), monkeypatch)
    assert unknown(rows) == {"stream", "stream_usage", "stream_end"}
    assert failing(rows) == set()


@pytest.mark.parametrize("longest", [10**15, -1, 0, True, "2048"])
def test_a_length_that_cannot_be_makes_no_long_prompt(longest: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Boasts(Healthy):
        def do_GET(self) -> None:  # noqa: N802  # the name that the base class calls
            if self.path == "/v1/models":
                self._answer(200, {"object": "list", "data": [{"id": "reference", "max_model_len": longest}]})
            else:
                super().do_GET()

    with serving(Boasts) as url:
        rows = measured(url, tmp_path / "contract", LONG, monkeypatch)
    assert unknown(rows) == {"prompt_too_long"}
    sent = [json.loads(line) for line in (tmp_path / "contract" / EXCHANGES).read_text().splitlines()]
    assert max(each.get("times", 1) for each in sent) == 1
