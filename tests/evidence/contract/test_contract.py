"""The API's contract: a server that keeps it, one that breaks each part, and evidence that says nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.directions import CAPABILITIES, CONTRACT
from tests.evidence.contract.conftest import Measure
from tests.evidence.contract.server import MODEL, Document, Healthy, Rows, failing, keep, leaving_out, listing, sent, unknown
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.evidence.contract import measure
from vllm_qualify.evidence.contract.checks import parse_contract
from vllm_qualify.evidence.contract.exchange import EXCHANGES
from vllm_qualify.recipe.contract import Contract

CAPTURED = Path(__file__).parents[1] / "captured" / "contract"
ALL = Contract(time_limit_s=10.0)


def parsed(folder: Path) -> Rows:
    return {row.metric: row for row in parse_contract(folder, ALL, MODEL, KINDS["vllm"])}


def test_vllms_own_replies_keep_all_of_it(folder: Path) -> None:
    rows = parsed(CAPTURED)
    assert list(rows) == CONTRACT
    assert {(row.value, row.unit, row.sample_count, row.source) for row in rows.values()} == {
        (1.0, "bool", 1, f"contract/{EXCHANGES}")
    }
    assert parsed(shutil.copytree(CAPTURED, folder)) == rows


def test_the_stand_in_keeps_all_of_it(measure_server: Measure) -> None:
    rows = measure_server(Healthy, ALL)
    assert (list(rows), failing(rows), unknown(rows)) == (CONTRACT, set(), set()), rows


# --- aliases


class Named(Healthy):
    aliases = ("gpt", "Org/A-Model")


class SilentAlias(Named):
    def complete(self, request: Document) -> None:
        super().complete(request | ({"stop": [" "]} if request["model"] == "Org/A-Model" else {}))


@pytest.mark.parametrize(
    ("server", "finding"),
    [(Named, ""), (Healthy, "and not the alias 'gpt'"), (SilentAlias, "the reply to a request for 'Org/A-Model' has no text")],
)
def test_every_alias_is_listed_and_answers(server: type[Healthy], finding: str, measure_server: Measure) -> None:
    row = measure_server(server, ALL.model_copy(update={"aliases": list(Named.aliases)}))["contract_models"]
    assert row.value == (0.0 if finding else 1.0)
    assert finding in row.finding


# --- servers that break one part


def hearing(change: Callable[[Document], Document]) -> type[Healthy]:
    class Hears(Healthy):
        def complete(self, request: Document) -> None:
            super().complete(change(request))

    return Hears


def without(request: Document, key: str) -> Document:
    return {name: value for name, value in request.items() if name != key}


def refusing(status: int | None, body: Callable[[str, int], Document]) -> type[Healthy]:
    class Refuses(Healthy):
        def _refuse(self, usual: int, message: str) -> None:
            self._answer(status or usual, body(message, usual))

    return Refuses


class AnotherStream(Healthy):
    def stream(self, request: Document, text: str, tokens: int) -> None:
        super().stream(request, text.upper(), tokens)


class NoUsage(Healthy):
    def stream(self, request: Document, text: str, tokens: int) -> None:
        super().stream(without(request, "stream_options"), text, tokens)


class TakesAnyModel(Healthy):
    def do_POST(self) -> None:  # noqa: N802  # the name that the base class calls
        type(self).model = MODEL
        super().do_POST()

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status if status == 400 else 200, {"object": "error", "message": message})


class Confused(Healthy):
    """It gives another text once it has refused something."""

    def _refuse(self, status: int, message: str) -> None:
        super()._refuse(status, message)
        type(self).behaviour = "forgetful"


class Busy(Healthy):
    """It fails every second of the requests at once, which are those of four tokens at temperature 0."""

    asked = 0

    def complete(self, request: Document) -> None:
        if request["max_tokens"] == 4 and "logprobs" not in request and request["temperature"] == 0:
            Busy.asked += 1
            if Busy.asked % 2:
                self._answer(503, {"error": {"message": "busy", "type": "ServiceUnavailable"}})
                return
        super().complete(request)


class Unseeded(Healthy):
    asked = 0

    def complete(self, request: Document) -> None:
        if "seed" in request:
            Unseeded.asked += 1
            request |= {"stop": ["7"] if Unseeded.asked % 2 else ["is"]}
        super().complete(request)


class Endless(Healthy):
    """It runs on for a client that has gone, and so says its page of metrics."""

    def do_GET(self) -> None:  # noqa: N802  # the name that the base class calls
        if self.path == "/metrics":
            page = (
                '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 1.0\n'
                '# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total{engine="0"} 1.0\n'
            )
            self._send(200, page.encode(), "text/plain")
        else:
            super().do_GET()


FAULTY = {"unknown_model", "prompt_too_long", "bad_body"}
FLAT = refusing(None, lambda message, code: {"object": "error", "message": message, "type": "BadRequestError", "code": code})
INTERNAL = refusing(500, lambda message, _: {"error": {"message": message, "type": "InternalServerError"}})
BROKEN: dict[str, tuple[type[Healthy], set[str]]] = {
    "another stream": (AnotherStream, {"stream"}),
    "no usage": (NoUsage, {"stream_usage"}),
    "no end": (leaving_out("[DONE]"), {"stream_end"}),
    "no stop": (hearing(lambda request: without(request, "stop")), {"stop"}),
    "one choice": (hearing(lambda request: request | {"n": 1}), {"n"}),
    "no logprobs": (hearing(lambda request: without(request, "logprobs")), {"logprobs"}),
    "takes any model": (TakesAnyModel, FAULTY),
    "flat errors": (FLAT, FAULTY),
    "internal errors": (INTERNAL, FAULTY),
    "confused": (Confused, {"alive"}),
    "one more token": (
        hearing(lambda request: request | {"max_tokens": request["max_tokens"] + 1}),
        {"completion", "max_tokens"},
    ),
    "another model": (listing({"id": "another", "max_model_len": 2048}), {"models"}),
    "busy": (Busy, {"many"}),
    "unseeded": (Unseeded, {"seed"}),
    "endless": (Endless, {"hang_up"}),
}


@pytest.mark.parametrize("server", BROKEN)
def test_a_server_that_breaks_a_part_fails_its_check(
    server: str, measure_server: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "FREED_WITHIN_S", 0.2)
    handler, broken = BROKEN[server]
    rows = measure_server(handler, ALL)
    assert (failing(rows), unknown(rows)) == (broken, set())
    assert all(rows[f"contract_{name}"].finding for name in broken)


# --- evidence


def test_a_check_without_its_whole_reply_is_invalid_and_says_why(folder: Path) -> None:
    exchanges = sent(CAPTURED)
    path = exchanges.pop("stop")["path"]
    exchanges["logprobs"] = {"name": "logprobs", "path": path, "problem": "ReadTimeout: no answer within 120 s"}
    rows = parsed(keep(folder, exchanges.values()))
    assert (unknown(rows), failing(rows)) == ({"stop", "logprobs"}, set())
    assert rows["contract_stop"].invalid_because == "the request 'stop' was not kept"
    assert "no answer within 120 s" in (rows["contract_logprobs"].invalid_because or "")


@pytest.mark.parametrize("text", [None, "", "{", "[]\n", '{"name": 1}\n', "\x00\xff"])
def test_evidence_that_is_missing_cut_or_of_another_form_is_invalid(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / EXCHANGES).write_text(text, encoding="latin-1")
    assert [name for name, row in parsed(tmp_path).items() if row.invalid_because] == CONTRACT


def test_what_an_engine_does_not_offer_is_not_asked(measure_server: Measure, folder: Path) -> None:
    not_asked = dict(KINDS["tensorrt-llm"].not_offered)
    assert set(not_asked) < {*CONTRACT, *CAPABILITIES["vision"]}
    rows = measure_server(Healthy, ALL.model_copy(update={"not_asked": not_asked}))
    assert {name: row.value for name, row in rows.items()} == {name: 1.0 for name in CONTRACT if name not in not_asked}
    assert not set(sent(folder)) & {"too long", "no JSON", "wrong type", "unknown model", "after errors", "hung up"}


def test_every_request_is_at_temperature_zero_but_the_sampled_ones() -> None:
    bodies = {name: each["body"] for name, each in sent(CAPTURED).items() if each.get("body")}
    assert {name for name, body in bodies.items() if body["temperature"] != 0} == {"sampled", "sampled again"}
