"""A server that drips, never ends, sends gigabytes, HTML, wrong types or a redirect: each check ends, with a sentence."""

import time
from pathlib import Path

import pytest

from tests.builders.dripping import dripping
from tests.builders.fake_servers import serving
from tests.directions import CAPABILITIES, CONTRACT
from tests.evidence.contract.conftest import Measure
from tests.evidence.contract.server import ALONE, Healthy, failing, listing, measured, sent, short_names, unknown
from tests.fakes.vllm import TOKEN_S
from vllm_qualify.evidence.contract import exchange
from vllm_qualify.evidence.contract.exchange import EXCHANGES
from vllm_qualify.recipe.contract import Contract

BASE = short_names(CONTRACT)
PROMISED = short_names(name for checks in CAPABILITIES.values() for name in checks)
SHORT, LONG = Contract(time_limit_s=0.5), Contract(time_limit_s=20)
ENDS_S = 60
JSON, STREAM = "application/json", "text/event-stream"


class Says(Healthy):
    status, body, kind = 200, b"", JSON

    def do_GET(self) -> None:  # noqa: N802  # the name that the base class calls
        self._send(self.status, self.body, self.kind)

    def do_POST(self) -> None:  # noqa: N802  # the name that the base class calls
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()


def saying(body: bytes, kind: str = JSON, status: int = 200) -> type[Says]:
    return type("Saying", (Says,), {"body": body, "kind": kind, "status": status})


DEEP = b"[" * 200_000
USAGE = b'"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}'


def message(text: bytes) -> bytes:
    choice = b'{"index": 0, "finish_reason": "stop", "message": %s}' % text
    return b'{"object": "chat.completion", "model": "reference", "choices": [%s], %s}' % (choice, USAGE)


def chunk(delta: bytes) -> bytes:
    choice = b'{"index": 0, "finish_reason": "stop", "delta": %s}' % delta
    return b'data: {"object": "chat.completion.chunk", "choices": [%s]}\n\ndata: [DONE]\n\n' % choice


def call(arguments: bytes) -> bytes:
    function = b'{"name": "get_weather", "arguments": "%s"}' % arguments
    return b'{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": %s}]}' % function


PROMISE_NONSENSE: dict[str, tuple[bytes, str]] = {
    "html": (b"<html>welcome</html>", "text/html"),
    "null": (b"null", JSON),
    "deep": (DEEP, JSON),
    "role": (message(b'{"role": "user", "content": ""}'), JSON),
    "content": (message(b'{"role": "assistant", "content": {"a": 1}}'), JSON),
    "calls": (message(b'{"role": "assistant", "tool_calls": {"0": null}}'), JSON),
    "deep arguments": (message(call(DEEP)), JSON),
    "nan": (message(call(b'{\\"city\\": NaN}')), JSON),
    "surrogate": (message(call(b"\\ud800")), JSON),
    "response": (b'{"object": "response", "output": [{"type": 7}], "usage": {}}', JSON),
    "far index": (chunk(b'{"tool_calls": [{"index": 99999999999999999999, "function": {"arguments": "}"}}]}'), STREAM),
    "codes": (chunk(b'{"tool_calls": [{"index": -1, "id": "\\u001b", "function": null}]}'), STREAM),
    "deep chunk": (chunk(b'{"content": %s}' % DEEP), STREAM),
    "no response": (b'data: {"type": "response.completed"}\n\n', STREAM),
}


@pytest.mark.parametrize("name", PROMISE_NONSENSE)
def test_nonsense_breaks_every_promise_with_a_sentence(name: str, measure_server: Measure) -> None:
    rows = measure_server(saying(*PROMISE_NONSENSE[name]), ALONE.model_copy(update={"time_limit_s": 20.0}))
    # By its form it can be a reply without a call, or a stream that ends.
    assert PROMISED - failing(rows) <= {"tools_none", "chat_end", "chat_stream_end"}
    assert unknown(rows) == set()
    for row in rows.values():
        assert len(row.finding) < 600
        assert row.finding.isprintable()


NONSENSE: dict[str, tuple[bytes, str, int]] = {
    "bad gateway": (b"<html><h1>502 Bad Gateway</h1></html>", "text/html", 502),
    "html": (b"<html>welcome</html>", "text/html", 200),
    "empty": (b"", JSON, 200),
    "null": (b"null", JSON, 200),
    "list": (b"[]", JSON, 200),
    "types": (b'{"choices": 7, "usage": "many", "model": null}', JSON, 200),
    "text": (b'{"object": "text_completion", "choices": [{"text": {"a": 1}}]}', JSON, 200),
    "error": (b'{"error": "no"}', JSON, 400),
    "nan": (b'{"usage": {"prompt_tokens": NaN}}', JSON, 200),
    "encoding": (b"\xff\xfe\x00", "application/json; charset=zip", 200),
    "deep": (DEEP, JSON, 200),
    "events": (b"data: \n\ndata: {\n\ndata: [DONE]\n\n", STREAM, 200),
    "codes": (b"\x1b]0;owned\x07", "text/plain", 200),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_fails_each_check_with_a_sentence(name: str, measure_server: Measure) -> None:
    rows = measure_server(saying(*NONSENSE[name]), LONG)
    # What follows from an earlier reply cannot be asked.
    assert failing(rows) | unknown(rows) == BASE
    assert unknown(rows) <= {"stop", "prompt_too_long"}
    for row in rows.values():
        sentence = row.finding or row.invalid_because or ""
        assert 10 < len(sentence) < 600
        assert sentence.isprintable()


def test_a_redirect_is_not_followed(measure_server: Measure) -> None:
    class Redirects(Says):
        def do_GET(self) -> None:  # noqa: N802  # the name that the base class calls
            self.send_response(307)
            self.send_header("location", f"{elsewhere}{self.path}")
            self.send_header("content-length", "0")
            self.end_headers()

    with serving(Healthy) as elsewhere:
        rows = measure_server(Redirects, LONG)
    assert failing(rows) | unknown(rows) == BASE
    assert "HTTP 307" in rows["contract_models"].finding


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"], ids=["silent", "body"])
def test_a_server_that_drips_is_asked_no_more(start: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with dripping(start, b"x" if start else b"") as address:
        rows = measured(f"http://{address}", folder, SHORT, monkeypatch)
    assert time.monotonic() - began < ENDS_S
    assert unknown(rows) == BASE
    assert len(sent(folder)) == 4
    assert "ReadTimeout" in (rows["contract_completion"].invalid_because or "")
    assert "was not kept" in (rows["contract_many"].invalid_because or "")


def test_no_more_of_a_reply_is_kept_than_allowed(
    folder: Path, measure_server: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MOST_BYTES", 1000)
    rows = measure_server(saying(b"x" * 100_000), LONG)
    assert unknown(rows) == BASE
    assert (folder / EXCHANGES).stat().st_size < 10_000
    assert "longer than" in (rows["contract_models"].invalid_because or "")


def test_a_stream_that_never_ends_ends_here(measure_server: Measure) -> None:
    class NeverEnds(Healthy):
        def event(self, data: str) -> None:
            """The first event, again and again. The client that hangs up ends it with its connection."""
            while True:
                super().event(data)
                time.sleep(TOKEN_S)  # a token takes this long

    rows = measure_server(NeverEnds, Contract(time_limit_s=5))
    assert (unknown(rows), failing(rows)) == ({"stream", "stream_usage", "stream_end"}, set())


@pytest.mark.parametrize("longest", [10**15, -1, 0, True, "2048"])
def test_a_length_that_cannot_be_makes_no_long_prompt(longest: object, folder: Path, measure_server: Measure) -> None:
    rows = measure_server(listing({"id": "reference", "max_model_len": longest}), LONG)
    assert unknown(rows) == {"prompt_too_long"}
    assert max(each.get("times", 1) for each in sent(folder).values()) == 1
