"""The API's contract: a server that keeps it, one that breaks each part, and evidence that says nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.directions import CAPABILITIES, CONTRACT
from tests.evidence.contract.server import MODEL, Healthy, failing, measured, serving, unknown
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.evidence.contract import asking
from vllm_qualify.evidence.contract.checks import parse_contract
from vllm_qualify.evidence.contract.exchange import EXCHANGES
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.recipe.contract import Contract

CAPTURED = Path(__file__).parents[1] / "captured" / "contract"
ALL = Contract(time_limit_s=10.0)
Document = dict[str, Any]


def parsed(folder: Path, contract: Contract = ALL) -> dict[str, Measurement]:
    return {row.metric: row for row in parse_contract(folder, contract, MODEL, KINDS["vllm"])}


def test_vllms_own_replies_keep_all_of_it() -> None:
    rows = parsed(CAPTURED)
    assert list(rows) == CONTRACT
    assert {(row.value, row.unit, row.sample_count, row.source) for row in rows.values()} == {
        (1.0, "bool", 1, f"contract/{EXCHANGES}")
    }


def test_the_stand_in_keeps_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Healthy) as url:
        rows = measured(url, tmp_path / "contract", ALL, monkeypatch)
    assert {name: (row.value, row.finding, row.invalid_because) for name, row in rows.items()} == dict.fromkeys(
        CONTRACT, (1.0, "", None)
    )


# --- aliases

NAMED = ALL.model_copy(update={"aliases": ["gpt", "Org/A-Model"]})


class Named(Healthy):
    aliases = ("gpt", "Org/A-Model")


class SilentAlias(Named):
    def complete(self, request: Document) -> None:
        super().complete(request | ({"stop": [" "]} if request["model"] == "Org/A-Model" else {}))


@pytest.mark.parametrize(
    ("server", "finding"),
    [
        (Named, ""),
        (Healthy, "and not the alias 'gpt'"),
        (SilentAlias, "the reply to a request for 'Org/A-Model' has no text"),
    ],
)
def test_every_alias_is_listed_and_answers(
    server: type[Healthy], finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(server) as url:
        row = measured(url, tmp_path / "contract", NAMED, monkeypatch)["contract_models"]
    assert row.value == (0.0 if finding else 1.0)
    assert finding in row.finding


# --- servers that break one part


class AnotherStream(Healthy):
    def stream(self, request: Document, text: str, tokens: int) -> None:
        super().stream(request, text.upper(), tokens)


class NoUsage(Healthy):
    def stream(self, request: Document, text: str, tokens: int) -> None:
        super().stream({name: value for name, value in request.items() if name != "stream_options"}, text, tokens)


class NoEnd(Healthy):
    def event(self, data: str) -> None:
        if data != "[DONE]":
            super().event(data)


class NoStop(Healthy):
    def complete(self, request: Document) -> None:
        super().complete({name: value for name, value in request.items() if name != "stop"})


class OneChoice(Healthy):
    def complete(self, request: Document) -> None:
        super().complete(request | {"n": 1})


class NoLogprobs(Healthy):
    def complete(self, request: Document) -> None:
        super().complete({name: value for name, value in request.items() if name != "logprobs"})


class TakesAnyModel(Healthy):
    def do_POST(self) -> None:  # noqa: N802  # the name that the base class calls
        type(self).model = MODEL
        super().do_POST()

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status if status == 400 else 200, {"object": "error", "message": message})


class FlatErrors(Healthy):
    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"object": "error", "message": message, "type": "BadRequestError", "code": status})


class InternalErrors(Healthy):
    def _refuse(self, _: int, message: str) -> None:
        self._answer(500, {"error": {"message": message, "type": "InternalServerError"}})


class Confused(Healthy):
    """It gives another text once it has refused something."""

    def _refuse(self, status: int, message: str) -> None:
        super()._refuse(status, message)
        type(self).behaviour = "forgetful"


class OneMoreToken(Healthy):
    def complete(self, request: Document) -> None:
        super().complete(request | {"max_tokens": request["max_tokens"] + 1})


class AnotherModel(Healthy):
    def do_GET(self) -> None:  # noqa: N802  # the name that the base class calls
        if self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": [{"id": "another", "max_model_len": 2048}]})
        else:
            super().do_GET()


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


@pytest.mark.parametrize(
    ("handler", "broken"),
    [
        (AnotherStream, {"stream"}),
        (NoUsage, {"stream_usage"}),
        (NoEnd, {"stream_end"}),
        (NoStop, {"stop"}),
        (OneChoice, {"n"}),
        (NoLogprobs, {"logprobs"}),
        (TakesAnyModel, {"unknown_model", "prompt_too_long", "bad_body"}),
        (FlatErrors, {"unknown_model", "prompt_too_long", "bad_body"}),
        (InternalErrors, {"unknown_model", "prompt_too_long", "bad_body"}),
        (Confused, {"alive"}),
        (OneMoreToken, {"completion", "max_tokens"}),
        (AnotherModel, {"models"}),
        (Busy, {"many"}),
        (Unseeded, {"seed"}),
        (Endless, {"hang_up"}),
    ],
)
def test_a_server_that_breaks_a_part_fails_its_check(
    handler: type[Healthy], broken: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "FREED_WITHIN_S", 0.2)
    with serving(handler) as url:
        rows = measured(url, tmp_path / "contract", ALL, monkeypatch)
    assert failing(rows) == broken
    assert unknown(rows) == set()
    for name in broken:
        assert rows[f"contract_{name}"].finding


# --- evidence


def changed(folder: Path, change: Callable[[Document], Document | None]) -> Path:
    """The captured exchanges, each changed, or left out."""
    exchanges = [change(json.loads(line)) for line in (CAPTURED / EXCHANGES).read_text().splitlines()]
    folder.mkdir()
    (folder / EXCHANGES).write_text("".join(f"{json.dumps(each)}\n" for each in exchanges if each is not None))
    return folder


def test_a_check_without_its_reply_is_invalid_and_says_why(tmp_path: Path) -> None:
    rows = parsed(changed(tmp_path / "contract", lambda each: None if each["name"] == "stop" else each))
    assert unknown(rows) == {"stop"}
    assert failing(rows) == set()
    assert rows["contract_stop"].invalid_because == "the request 'stop' was not kept"


def test_a_reply_that_was_not_whole_is_no_verdict(tmp_path: Path) -> None:
    def cut(each: Document) -> Document:
        return {"name": each["name"], "path": each["path"], "problem": "ReadTimeout: no answer within 120 s"}

    rows = parsed(changed(tmp_path / "contract", lambda each: cut(each) if each["name"] == "logprobs" else each))
    assert unknown(rows) == {"logprobs"}
    assert "no answer within 120 s" in (rows["contract_logprobs"].invalid_because or "")


@pytest.mark.parametrize("text", ["", "{", "[]\n", '{"name": 1}\n', "\x00\xff"])
def test_evidence_that_is_cut_or_of_another_form_is_invalid(text: str, tmp_path: Path) -> None:
    (tmp_path / EXCHANGES).write_text(text, encoding="latin-1")
    assert unknown(parsed(tmp_path)) == {name.removeprefix("contract_") for name in CONTRACT}


def test_no_evidence_is_invalid(tmp_path: Path) -> None:
    assert len(unknown(parsed(tmp_path))) == len(CONTRACT)


def test_what_an_engine_does_not_offer_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    not_asked = dict(KINDS["tensorrt-llm"].not_offered)
    assert set(not_asked) < {*CONTRACT, *CAPABILITIES["vision"]}
    contract = ALL.model_copy(update={"not_asked": not_asked})
    with serving(Healthy) as url:
        rows = measured(url, tmp_path / "contract", contract, monkeypatch)
    assert list(rows) == [name for name in CONTRACT if name not in not_asked]
    assert {row.value for row in rows.values()} == {1.0}
    asked = {json.loads(line)["name"] for line in (tmp_path / "contract" / EXCHANGES).read_text().splitlines()}
    assert not asked & {"too long", "no JSON", "wrong type", "unknown model", "after errors", "hung up"}


def test_every_request_is_at_temperature_zero_but_the_sampled_ones() -> None:
    exchanges = [json.loads(line) for line in (CAPTURED / EXCHANGES).read_text().splitlines()]
    bodies = {each["name"]: each["body"] for each in exchanges if each.get("body")}
    assert {name for name, body in bodies.items() if body["temperature"] != 0} == {"sampled", "sampled again"}


def test_a_copy_of_the_evidence_gives_the_same(tmp_path: Path) -> None:
    shutil.copytree(CAPTURED, tmp_path / "contract")
    assert parsed(tmp_path / "contract") == parsed(CAPTURED)
