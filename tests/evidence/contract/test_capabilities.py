"""What a recipe promises beyond completions: a server that keeps it, and one that breaks each part of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.directions import CAPABILITIES, CONTRACT
from tests.evidence.contract.server import MODEL, Healthy, failing, measured, serving, unknown
from tests.evidence.contract.shapes import shape
from tests.fakes import vllm as fake
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.evidence.contract.asking import MOST_SILENT
from vllm_qualify.evidence.contract.capabilities.table import most_requests
from vllm_qualify.evidence.contract.checks import parse_contract
from vllm_qualify.evidence.contract.exchange import EXCHANGES
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.recipe.contract import Capability, Contract

CAPTURED = Path(__file__).parents[1] / "captured" / "chat" / "contract"
EVERY: list[Capability] = ["chat", "tools", "parallel_tools", "reasoning", "json_schema", "vision", "responses"]
# Of vLLM's own replies: the chat model has no eyes.
SEEN: list[Capability] = [each for each in EVERY if each != "vision"]
PROMISED = [check for capability in EVERY for check in CAPABILITIES[capability]]
# Only what the capabilities add.
ALONE = Contract(capabilities=EVERY, not_asked=dict.fromkeys(CONTRACT, "of another test"), time_limit_s=10.0)
Document = dict[str, Any]


def rows_of(handler: type[Healthy], folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Measurement]:
    with serving(handler) as url:
        return measured(url, folder / "contract", ALONE, patch)


def requests_of(folder: Path) -> dict[str, Document]:
    lines = (folder / "contract" / EXCHANGES).read_text().splitlines()
    return {each["name"]: each for each in map(json.loads, lines)}


def test_the_stand_in_keeps_every_promise_at_the_first_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(Healthy, tmp_path, monkeypatch)
    assert {name: (row.value, row.finding, row.invalid_because) for name, row in rows.items()} == dict.fromkeys(
        PROMISED, (1.0, "", None)
    )
    names = [name for name in requests_of(tmp_path) if name != "models"]
    assert not [name for name in names if " 2" in name]
    assert len(names) < most_requests(EVERY)


def test_vllms_own_replies_keep_what_its_model_can() -> None:
    contract = ALONE.model_copy(update={"capabilities": SEEN})
    rows = parse_contract(CAPTURED, contract, "reference-chat", KINDS["vllm"])
    assert [row.metric for row in rows] == [check for each in SEEN for check in CAPABILITIES[each]]
    assert {(row.value, row.unit, row.sample_count, row.source) for row in rows} == {(1.0, "bool", 1, f"contract/{EXCHANGES}")}


def test_the_stand_in_answers_as_vllm_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says, the real one says in the same place."""
    rows_of(Healthy, tmp_path, monkeypatch)
    said = requests_of(tmp_path)
    for line in (CAPTURED / EXCHANGES).read_text().splitlines():
        real = json.loads(line)
        assert said[real["name"]]["status"] == real["status"]
        for own, vllms in zip(*(_documents(each) for each in (said[real["name"]], real)), strict=False):
            # What vLLM leaves empty has no type.
            wanted = {place: kind for place, kind in shape(vllms).items() if kind is not type(None)}
            there = {place: kind for place, kind in shape(own).items() if shape(vllms).get(place) is not type(None)}
            assert there.items() <= wanted.items(), real["name"]


def _documents(exchange: Document) -> list[object]:
    """A reply's document, or the first and the last of a stream."""
    if not exchange["content_type"].startswith("text/event-stream"):
        return [json.loads(exchange["reply"])]
    events = [line.removeprefix("data:").strip() for line in exchange["reply"].splitlines() if line.startswith("data:")]
    documents = [json.loads(event) for event in events if event != "[DONE]"]
    return [documents[0], documents[-1]]


# --- servers that break one part


class Speaks(Healthy):
    """It says something else, where `changed` says what."""

    def changed(self, request: Document, spoken: Document) -> Document:
        raise NotImplementedError  # each broken server below has its own

    def speak(self, request: Document) -> Document:
        spoken = super().speak(request)
        return spoken | self.changed(request, spoken)


def is_streamed(request: Document) -> bool:
    return bool(request.get("stream"))


class Mute(Speaks):
    def changed(self, request: Document, _spoken: Document) -> Document:
        return {"content": "", "reasoning": ""} if request.get("max_tokens") == 16 and "tools" not in request else {}


class AnotherStream(Speaks):
    def changed(self, request: Document, spoken: Document) -> Document:
        return {"content": spoken["content"].upper()} if is_streamed(request) else {}


class CountsAgain(Healthy):
    def prompt_tok(self, request: Document) -> int:
        return super().prompt_tok(request) + is_streamed(request)


class NoUsage(Healthy):
    def pieces(self, _request: Document, spoken: Document) -> Iterator[Document]:
        return super().pieces({"stream_options": None}, spoken)


class NoEnd(Healthy):
    def event(self, data: str) -> None:
        if data != "[DONE]":
            super().event(data)


class NoReason(Healthy):
    def pieces(self, request: Document, spoken: Document) -> Iterator[Document]:
        for piece in super().pieces(request, spoken):
            yield piece | {"choices": [choice | {"finish_reason": None} for choice in piece["choices"]]}


def forgetting(role: str, last: bool = False) -> type[Healthy]:
    """It forgets what this role said, but for the last message."""

    class Forgets(Healthy):
        def prompt_tok(self, request: Document) -> int:
            messages = fake.messages_of(request)
            kept = [message for message in messages[:-1] if message["role"] != role] + ([] if last else messages[-1:])
            return super().prompt_tok({"messages": kept or messages})

    return Forgets


class NeverEnds(Speaks):
    def changed(self, _request: Document, spoken: Document) -> Document:
        return {"reason": "length"} if spoken["reason"] == "stop" else {}


class WrongToolParser(Speaks):
    """The calls stay in the text."""

    def changed(self, _request: Document, spoken: Document) -> Document:
        written = "".join(f"<tool_call>{call}</tool_call>" for call in spoken["calls"])
        return {"content": written, "calls": [], "reason": "stop"} if spoken["calls"] else {}


def calling(arguments: str | None, name: str | None = None, reason: str | None = None, *, only: str = "") -> type[Healthy]:
    """All its calls have these arguments, name or reason; or only those of streams, if `only` says so."""

    class Calls(Speaks):
        def changed(self, request: Document, spoken: Document) -> Document:
            if not spoken["calls"] or (only == "stream" and not is_streamed(request)):
                return {}
            calls = [(name or own, arguments or given) for own, given in spoken["calls"]]
            return {"calls": calls, "reason": reason or spoken["reason"]}

    return Calls


class CallsAnyway(Speaks):
    def changed(self, request: Document, _spoken: Document) -> Document:
        return {"calls": [("get_weather", '{"city": "Paris"}')]} if request.get("tool_choice") == "none" else {}


def ignoring(choice: type) -> type[Healthy]:
    """It takes `required`, or a name, for `auto`."""

    class Ignores(Healthy):
        def speak(self, request: Document) -> Document:
            ignored = isinstance(request.get("tool_choice"), choice) and request["tool_choice"] not in ("auto", "none")
            return super().speak(request | ({"tool_choice": "auto"} if ignored else {}))

    return Ignores


class SilentAfterTools(Speaks):
    def changed(self, request: Document, _spoken: Document) -> Document:
        after = "tools" in request and request["messages"][-1]["role"] == "tool"
        return {"content": "", "reasoning": ""} if after else {}


class OneCall(Speaks):
    def changed(self, _request: Document, spoken: Document) -> Document:
        return {"calls": spoken["calls"][:1]}


class OneCallInStreams(Speaks):
    def changed(self, request: Document, spoken: Document) -> Document:
        return {"calls": spoken["calls"][:1]} if is_streamed(request) else {}


class OneId(Healthy):
    def _answer(self, status: int, body: Document) -> None:
        super()._answer(status, json.loads(re_numbered(json.dumps(body))))

    def event(self, data: str) -> None:
        super().event(re_numbered(data))


def re_numbered(text: str) -> str:
    return text.replace("chatcmpl-tool-1", "chatcmpl-tool-0")


class WrongReasoningParser(Speaks):
    def changed(self, _request: Document, spoken: Document) -> Document:
        return {"content": f"<think>{spoken['reasoning']}</think>{spoken['content']}", "reasoning": ""}


class TagLeft(Speaks):
    def changed(self, request: Document, spoken: Document) -> Document:
        return {"content": f"</think>{spoken['content']}"} if "chat_template_kwargs" not in request else {}


class AllInThoughts(Speaks):
    def changed(self, _request: Document, spoken: Document) -> Document:
        return {"content": "", "reasoning": spoken["reasoning"] + spoken["content"]}


class ThinksInPlainOnly(Speaks):
    def changed(self, request: Document, spoken: Document) -> Document:
        if not is_streamed(request) or request.get("max_tokens", 16) == 16:
            return {}
        return {"content": spoken["reasoning"] + spoken["content"], "reasoning": ""}


class NoFormat(Healthy):
    def speak(self, request: Document) -> Document:
        return super().speak({name: value for name, value in request.items() if name != "response_format"})


class AnyJson(Speaks):
    """It writes the JSON that the question asks for, and not that of the schema."""

    def changed(self, request: Document, _spoken: Document) -> Document:
        return {"content": '{"answer": 42}'} if "response_format" in request else {}


class ColourBlind(Speaks):
    def changed(self, request: Document, _spoken: Document) -> Document:
        return {"content": "Red"} if isinstance(fake.messages_of(request)[-1]["content"], list) else {}


class SeesOnePicture(Speaks):
    def changed(self, _request: Document, spoken: Document) -> Document:
        return {"content": spoken["content"].partition(" and ")[0]}


class TakesBrokenPictures(Healthy):
    def _refuse(self, status: int, message: str) -> None:
        super()._refuse(500 if "image" in message else status, message)


class BlindAfterBroken(Healthy):
    broken = False

    def _refuse(self, status: int, message: str) -> None:
        type(self).broken = True
        super()._refuse(status, message)

    def speak(self, request: Document) -> Document:
        spoken = super().speak(request)
        return spoken | {"content": "Grey"} if self.broken else spoken


class NoResponses(Healthy):
    def respond(self, _request: Document, _spoken: Document) -> None:
        self._answer(404, {"detail": "Not Found"})


class CutResponses(Healthy):
    def event(self, data: str) -> None:
        if '"response.completed"' not in data:
            super().event(data)


TOOLS = {"tools_auto", "tools_stream", "tools_required", "tools_named", "parallel_tools", "parallel_tools_stream"}
PARALLEL = {"parallel_tools", "parallel_tools_stream"}
IN_STREAMS = {"tools_stream", "parallel_tools_stream"}


@pytest.mark.parametrize(
    ("handler", "broken"),
    [
        (Mute, {"chat"}),
        (AnotherStream, {"chat_stream", "responses_stream"}),
        (CountsAgain, {"chat_stream_usage", "responses_stream"}),
        (NoUsage, {"chat_stream_usage"}),
        (NoEnd, {"chat_stream_end"}),
        (NoReason, {"chat_stream", "chat_stream_usage", "chat_stream_end", "reasoning_stream", "reasoning_tags", *IN_STREAMS}),
        (forgetting("user"), {"chat_turns"}),
        (forgetting("assistant"), {"chat_turns"}),
        (forgetting("system"), {"chat_system"}),
        (forgetting("tool", last=True), {"tools_result"}),
        (NeverEnds, {"chat_end", "responses"}),
        (WrongToolParser, TOOLS),
        (calling('{"city": "Par'), TOOLS),
        (calling('{"city": 7}'), TOOLS),
        (calling('{"town": "Paris"}'), TOOLS),
        (calling('["Paris"]'), TOOLS),
        (calling(None, "get_wether"), TOOLS),
        (calling(None, reason="stop"), {"tools_auto"}),
        (calling('{"city": "Bern"}', only="stream"), IN_STREAMS),
        (CallsAnyway, {"tools_none"}),
        (ignoring(str), {"tools_required"}),
        (ignoring(dict), {"tools_named"}),
        (SilentAfterTools, {"tools_result"}),
        (OneCall, PARALLEL),
        (OneCallInStreams, {"parallel_tools_stream"}),
        (OneId, PARALLEL),
        (WrongReasoningParser, {"reasoning", "reasoning_stream", "reasoning_tags", "json_object", "json_schema"}),
        (TagLeft, {"reasoning_tags", "json_object", "json_schema"}),
        (
            AllInThoughts,
            {"reasoning", "reasoning_stream", "reasoning_tags", "json_object", "json_schema", "vision", "vision_two"}
            | {"vision_broken", "responses"},
        ),
        (ThinksInPlainOnly, {"reasoning_stream"}),
        (NoFormat, {"json_object", "json_schema"}),
        (AnyJson, {"json_schema"}),
        (ColourBlind, {"vision", "vision_two"}),
        (SeesOnePicture, {"vision_two"}),
        (TakesBrokenPictures, {"vision_broken"}),
        (BlindAfterBroken, {"vision_broken"}),
        (NoResponses, {"responses", "responses_stream"}),
        (CutResponses, {"responses_stream"}),
    ],
)
def test_a_server_that_breaks_a_part_fails_its_check(
    handler: type[Healthy], broken: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(handler, tmp_path, monkeypatch)
    assert (failing(rows), unknown(rows)) == (broken, set())
    for name in broken:
        assert rows[f"contract_{name}"].finding


# --- attempts


class Shy(Healthy):
    """It calls a tool, thinks and writes JSON only where it is asked in another way."""

    def speak(self, request: Document) -> Document:
        spoken = super().speak(request)
        if "Paris?" in str(request["messages"][-1]["content"]) if "messages" in request else False:
            return spoken | {"calls": [], "content": "I can not."}
        return spoken


def test_a_model_that_calls_no_tool_at_once_gets_another_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(Shy, tmp_path, monkeypatch)
    assert (failing(rows), unknown(rows)) == (set(), set())
    names = set(requests_of(tmp_path))
    assert {"tools_auto 1", "tools_auto 2", "tools_stream 1", "tools_stream 2"} <= names
    assert not {"tools_auto 3", "tools_stream 3"} & names


def test_thoughts_that_must_be_asked_for_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ThinksIfTold(Speaks):
        def changed(self, request: Document, _spoken: Document) -> Document:
            thinking = request.get("chat_template_kwargs", {}).get("thinking")
            return {} if thinking else {"reasoning": ""}

    rows = rows_of(ThinksIfTold, tmp_path, monkeypatch)
    assert (failing(rows), unknown(rows)) == (set(), set())
    assert {"reasoning 3", "reasoning_stream 3"} <= set(requests_of(tmp_path))


def test_what_is_not_promised_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = ALONE.model_copy(update={"capabilities": ["chat", "json_schema"]})
    with serving(Healthy) as url:
        rows = measured(url, tmp_path / "contract", contract, monkeypatch)
    assert list(rows) == [*CAPABILITIES["chat"], *CAPABILITIES["json_schema"]]
    assert {name.partition("_")[0] for name in requests_of(tmp_path)} == {"models", "chat 1", "chat", "json"}


def test_no_reply_is_longer_than_half_of_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of(Healthy, tmp_path, monkeypatch)
    bodies = [each["body"] for each in requests_of(tmp_path).values() if each.get("body")]
    asked = {body.get("max_tokens") or body["max_output_tokens"] for body in bodies}
    assert asked == {1, 16, fake.LONGEST_TOK // 2}


def test_a_server_that_falls_silent_is_asked_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Healthy):
        def do_POST(self) -> None:  # noqa: N802  # the name that the base class calls
            self.close_connection = True

    rows = rows_of(Silent, tmp_path, monkeypatch)
    assert unknown(rows) == {name.removeprefix("contract_") for name in PROMISED}
    assert len(requests_of(tmp_path)) == 1 + MOST_SILENT


# --- evidence


def changed(folder: Path, leave: str) -> dict[str, Measurement]:
    """What follows from the captured exchanges without one of them."""
    lines = [line for line in (CAPTURED / EXCHANGES).read_text().splitlines() if json.loads(line)["name"] != leave]
    folder.mkdir()
    (folder / EXCHANGES).write_text("".join(f"{line}\n" for line in lines))
    contract = ALONE.model_copy(update={"capabilities": SEEN})
    return {row.metric: row for row in parse_contract(folder, contract, "reference-chat", KINDS["vllm"])}


@pytest.mark.parametrize(
    ("left_out", "checks"),
    [
        ("chat 1", {"chat", "chat_stream", "chat_stream_usage"}),
        ("chat_turns 1 model", {"chat_turns"}),
        ("tools_auto 1", {"tools_auto", "tools_stream"}),
        ("parallel_tools 1", {"parallel_tools", "parallel_tools_stream"}),
        ("reasoning 1", {"reasoning"}),
        ("responses_stream 1 plain", {"responses_stream"}),
    ],
)
def test_a_check_without_its_reply_is_invalid(left_out: str, checks: set[str], tmp_path: Path) -> None:
    rows = changed(tmp_path / "contract", left_out)
    assert (unknown(rows), failing(rows)) == (checks, set())


def test_replies_of_another_model_are_not_taken() -> None:
    rows = parse_contract(CAPTURED, ALONE.model_copy(update={"capabilities": SEEN}), MODEL, KINDS["vllm"])
    plain = [
        row
        for row in rows
        if row.metric in ("contract_chat", "contract_tools_auto", "contract_json_schema", "contract_responses")
    ]
    assert {row.value for row in plain} == {0.0}
    assert "is of the model 'reference-chat'" in plain[0].finding
