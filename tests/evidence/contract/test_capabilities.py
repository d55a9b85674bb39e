"""What a recipe promises beyond completions: a server that keeps it, and one that breaks each part of it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.directions import CAPABILITIES
from tests.evidence.contract.conftest import Measure
from tests.evidence.contract.markup import CALLS
from tests.evidence.contract.server import ALONE, Document, Healthy, Rows, failing, keep, leaving_out, sent, unknown
from tests.evidence.contract.shapes import shape
from tests.fakes import vllm as fake
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.evidence.contract.capabilities.probe import SHORT_TOK
from vllm_qualify.evidence.contract.capabilities.table import most_requests
from vllm_qualify.evidence.contract.checks import parse_contract
from vllm_qualify.evidence.contract.exchange import EXCHANGES
from vllm_qualify.evidence.contract.measure import MOST_SILENT
from vllm_qualify.recipe.contract import Capability

CAPTURED = Path(__file__).parents[1] / "captured" / "chat" / "contract"
# Made of others' reports, in the form of kept exchanges.
CASES = Path(__file__).parents[1] / "captured" / "contract_cases"
# Of vLLM's own replies: the chat model has no eyes.
SEEN: list[Capability] = [each for each in ALONE.capabilities if each != "vision"]
Change = Callable[[Document, Document], Document]
PROMISED = [check for capability in ALONE.capabilities for check in CAPABILITIES[capability]]


def parsed(folder: Path, model: str = "reference-chat") -> Rows:
    contract = ALONE.model_copy(update={"capabilities": SEEN})
    return {row.metric: row for row in parse_contract(folder, contract, model, KINDS["vllm"])}


def test_the_stand_in_keeps_every_promise_at_the_first_attempt(measure_server: Measure, folder: Path) -> None:
    rows = measure_server(Healthy, ALONE)
    assert (list(rows), failing(rows), unknown(rows)) == (PROMISED, set(), set()), rows
    names = [name for name in sent(folder) if name != "models"]
    assert not [name for name in names if " 2" in name]
    assert len(names) < most_requests(ALONE.capabilities)
    bodies = [each["body"] for each in sent(folder).values() if each.get("body")]
    asked = {body.get("max_tokens") or body["max_output_tokens"] for body in bodies}
    assert asked == {1, 16, fake.LONGEST_TOK // 2}, "no reply is longer than half of what fits"


def test_vllms_own_replies_keep_what_its_model_can() -> None:
    rows = parsed(CAPTURED)
    assert list(rows) == [check for each in SEEN for check in CAPABILITIES[each]]
    assert {(row.value, row.unit, row.sample_count, row.source) for row in rows.values()} == {
        (1.0, "bool", 1, f"contract/{EXCHANGES}")
    }


@pytest.mark.parametrize(
    ("case", "capability", "broken"),
    [
        ("chat-role-in-content", "chat", "contract_chat"),  # SmolLM2-135M-Instruct, its template cut by hand
        ("stream-tool-markup-in-content", "tools", "contract_tools_stream"),  # vllm-project/vllm#39043
        ("stream-tool-reason-stop", "tools", "contract_tools_stream"),  # vllm-project/vllm#9209, Blaizzy/mlx-vlm#990
        ("stream-tools-no-done", "tools", "contract_tools_stream"),
        ("tool-markup-in-content", "tools", "contract_tools_auto"),  # vllm-project/vllm#47903, #47562
    ],
)
def test_known_regressions_fail_their_check(case: str, capability: Capability, broken: str, tmp_path: Path) -> None:
    (tmp_path / EXCHANGES).write_text((CASES / f"{case}.jsonl").read_text())
    model = "smollm2" if capability == "chat" else "made"
    contract = ALONE.model_copy(update={"capabilities": [capability]})
    rows = {row.metric: row for row in parse_contract(tmp_path, contract, model, KINDS["vllm"])}
    assert rows[broken].value == 0.0, rows[broken]
    assert rows[broken].finding


def test_the_stand_in_answers_as_vllm_did(measure_server: Measure, folder: Path) -> None:
    """Whatever it says, the real one says in the same place."""
    measure_server(Healthy, ALONE)
    own = sent(folder)
    for name, real in sent(CAPTURED).items():
        assert own[name]["status"] == real["status"]
        for ours, vllms in zip(*(_documents(each) for each in (own[name], real)), strict=False):
            # What vLLM leaves empty has no type.
            wanted = {place: kind for place, kind in shape(vllms).items() if kind is not type(None)}
            there = {place: kind for place, kind in shape(ours).items() if shape(vllms).get(place) is not type(None)}
            assert there.items() <= wanted.items(), name


def _documents(exchange: Document) -> list[object]:
    """A reply's document, or the first and the last of a stream."""
    if not exchange["content_type"].startswith("text/event-stream"):
        return [json.loads(exchange["reply"])]
    events = [line.removeprefix("data:").strip() for line in exchange["reply"].splitlines() if line.startswith("data:")]
    documents = [json.loads(event) for event in events if event != "[DONE]"]
    return [documents[0], documents[-1]]


# --- servers that break one part


def speaking(change: Change) -> type[Healthy]:
    """It says something else: what the request and that which it would say are changed to."""

    class Speaks(Healthy):
        def speak(self, request: Document) -> Document:
            spoken = super().speak(request)
            return spoken | change(request, spoken)

    return Speaks


def hearing(change: Callable[[Document], Document]) -> type[Healthy]:
    class Hears(Healthy):
        def speak(self, request: Document) -> Document:
            return super().speak(change(request))

    return Hears


def is_streamed(request: Document) -> bool:
    return bool(request.get("stream"))


class CountsAgain(Healthy):
    def prompt_tok(self, request: Document) -> int:
        return super().prompt_tok(request) + is_streamed(request)


class NoUsage(Healthy):
    def pieces(self, _request: Document, spoken: Document) -> Iterator[Document]:
        return super().pieces({"stream_options": None}, spoken)


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


def leave_calls_in_text(_request: Document, spoken: Document) -> Document:
    written = "".join(f"<tool_call>{call}</tool_call>" for call in spoken["calls"])
    return {"content": written, "calls": [], "reason": "stop"} if spoken["calls"] else {}


def leave_markup_in_streams(request: Document, spoken: Document) -> Document:
    return {"content": "<|tool_call>call:get_weather{"} if spoken["calls"] and is_streamed(request) else {}


def is_sent(request: Document, words: str = "") -> bool:
    """Whether a text was to be sent, and the question has these words."""
    names = {tool["function"]["name"] for tool in request.get("tools", [])}
    return "send_message" in names and words in fake.messages_of(request)[-1]["content"]


def lose_token_in_text(request: Document, _spoken: Document) -> Document:
    """As vLLM 0.32 answers where a string argument holds `</tool_call>`: the reason is that of a call, and there is none."""
    written = '<tool_call>{"name": "send_message", "arguments": {"text": "}}</tool_call>"}}</tool_call>'
    return {"content": written, "calls": [], "reason": "tool_calls"} if is_sent(request) else {}


def in_streams(change: Change) -> Change:
    return lambda request, spoken: change(request, spoken) if is_streamed(request) else {}


def write_call(text: str) -> Change:
    return lambda _, spoken: {"content": text} if spoken["calls"] else {}


def is_answer(request: Document, spoken: Document) -> bool:
    """Whether it says something in its own words."""
    return not (spoken["calls"] or "response_format" in request or has_pictures(request))


def begin_with_a_role(request: Document, spoken: Document) -> Document:
    """As a server does whose chat template has lost its generation prompt."""
    is_form = "response_format" in request or "tools" in request or "messages" not in request or has_pictures(request)
    return {} if is_form else {"content": f"assistant\n{spoken['content']}"}


class EndlessTools(Healthy):
    """Its streams of calls end without the last event."""

    calls = False

    def pieces(self, request: Document, spoken: Document) -> Iterator[Document]:
        self.calls = bool(spoken["calls"])
        return super().pieces(request, spoken)

    def event(self, data: str) -> None:
        if not (self.calls and data == "[DONE]"):
            super().event(data)


def calling(arguments: str | None, name: str | None = None, reason: str | None = None, *, only: str = "") -> type[Healthy]:
    """All its calls have these arguments, name or reason; or only those of streams, if `only` says so."""

    def change(request: Document, spoken: Document) -> Document:
        if not spoken["calls"] or (only == "stream" and not is_streamed(request)):
            return {}
        calls = [(name or own, arguments or given) for own, given in spoken["calls"]]
        return {"calls": calls, "reason": reason or spoken["reason"]}

    return speaking(change)


def ignoring(choice: type) -> type[Healthy]:
    """It takes `required`, or a name, for `auto`."""

    def take_for_auto(request: Document) -> Document:
        ignored = isinstance(request.get("tool_choice"), choice) and request["tool_choice"] not in ("auto", "none")
        return request | ({"tool_choice": "auto"} if ignored else {})

    return hearing(take_for_auto)


class OneId(Healthy):
    def _answer(self, status: int, body: Document) -> None:
        super()._answer(status, json.loads(re_numbered(json.dumps(body))))

    def event(self, data: str) -> None:
        super().event(re_numbered(data))


def re_numbered(text: str) -> str:
    return text.replace("chatcmpl-tool-1", "chatcmpl-tool-0")


def think_in_plain_only(request: Document, spoken: Document) -> Document:
    is_long = is_streamed(request) and request.get("max_tokens", 16) != 16
    return {"content": spoken["reasoning"] + spoken["content"], "reasoning": ""} if is_long else {}


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


def has_parts(request: Document) -> bool:
    return "allOf" in json.dumps(request.get("response_format"))


class KeepsParts(Healthy):
    """It keeps a schema of two parts, as guidance does."""

    written = '{"number": 42, "colour": "red"}'

    def speak(self, request: Document) -> Document:
        content = {"content": self.written} if has_parts(request) else {}
        plain = {name: value for name, value in request.items() if name != "response_format"} if content else request
        return super().speak(plain) | content


class KeepsNoPart(KeepsParts):
    """As vLLM 0.32's xgrammar, where no backend is named and another form came first."""

    written = '{"answer": 42}'


class DiesOfParts(Healthy):
    def _refuse(self, status: int, message: str) -> None:
        super()._refuse(500 if "allOf" in message else status, message)


class NoCallsAfterParts(KeepsParts):
    """As vLLM 0.32, where no backend is named and guidance came first."""

    is_broken = False

    def speak(self, request: Document) -> Document:
        type(self).is_broken |= has_parts(request)
        return super().speak(request)

    def _talk(self, request: Document) -> None:
        if self.is_broken and request.get("tool_choice") == "required":
            self._answer(500, {"error": {"message": "Internal server error", "type": "InternalServerError"}})
        else:
            super()._talk(request)


class NoResponses(Healthy):
    def respond(self, _request: Document, _spoken: Document) -> None:
        self._answer(404, {"detail": "Not Found"})


MUTE = {"content": "", "reasoning": ""}
# A word of the first text that is to be sent.
FIRST_TEXT = "noon"
PARIS = {"calls": [("get_weather", '{"city": "Paris"}')]}
PARALLEL = {"parallel_tools", "parallel_tools_stream"}
TOOLS = {"tools_auto", "tools_stream", "tools_required", "tools_named", "tools_text", "tools_again", *PARALLEL}
LIKE_PLAIN = {"tools_stream", "parallel_tools_stream"}
IN_STREAMS = LIKE_PLAIN | {"tools_text"}
JSON = {"json_object", "json_schema"}
FORCED = {"tools_required", "tools_text", "tools_again"}
THOUGHTS = {"reasoning", "reasoning_stream", "reasoning_tags"}


def is_short(request: Document) -> bool:
    return request.get("max_tokens") == 16 and "tools" not in request


def is_after_tool(request: Document) -> bool:
    return "tools" in request and request["messages"][-1]["role"] == "tool"


def has_pictures(request: Document) -> bool:
    return isinstance(fake.messages_of(request)[-1]["content"], list)


BROKEN: dict[str, tuple[type[Healthy], set[str]]] = {
    "mute": (speaking(lambda request, _: MUTE if is_short(request) else {}), {"chat"}),
    "another stream": (
        speaking(lambda request, spoken: {"content": spoken["content"].upper()} if is_streamed(request) else {}),
        {"chat_stream", "responses_stream"},
    ),
    "counts again": (CountsAgain, {"chat_stream_usage", "responses_stream"}),
    "no usage": (NoUsage, {"chat_stream_usage"}),
    "no end": (leaving_out("[DONE]"), {"chat_stream_end", *IN_STREAMS}),
    "no reason": (
        NoReason,
        {"chat_stream", "chat_stream_usage", "chat_stream_end", "reasoning_stream", "reasoning_tags", *IN_STREAMS},
    ),
    "forgets user": (forgetting("user"), {"chat_turns"}),
    "forgets assistant": (forgetting("assistant"), {"chat_turns"}),
    "forgets system": (forgetting("system"), {"chat_system"}),
    "forgets tool": (forgetting("tool", last=True), {"tools_result"}),
    "never ends": (
        speaking(lambda _, spoken: {"reason": "length"} if spoken["reason"] == "stop" else {}),
        {"chat_end", "responses"},
    ),
    "wrong tool parser": (speaking(leave_calls_in_text), TOOLS),
    "cut arguments": (calling('{"city": "Par'), TOOLS),
    "number": (calling('{"city": 7}'), TOOLS),
    "another key": (calling('{"town": "Paris"}'), TOOLS),
    "list": (calling('["Paris"]'), TOOLS),
    "another tool": (calling(None, "get_wether"), TOOLS),
    "stops at a call": (calling(None, reason="stop"), {"tools_auto", *LIKE_PLAIN}),
    "stops at a call in streams": (calling(None, reason="stop", only="stream"), LIKE_PLAIN),
    "markup beside a call": (speaking(lambda _, said: {"content": "<pad><tool_call>"} if said["calls"] else {}), TOOLS),
    "a call in JSON beside the call": (speaking(write_call(CALLS["xlam"])), TOOLS),
    "a call in Python beside a streamed call": (speaking(in_streams(write_call(CALLS["pythonic"]))), IN_STREAMS),
    "a call as text after a result": (
        speaking(lambda request, _: {"content": CALLS["llama3_json"]} if is_after_tool(request) else {}),
        {"tools_result"},
    ),
    "an end token in whole replies": (
        speaking(lambda request, said: {"content": f"{said['content']}<|im_end|>"} if is_answer(request, said) else {}),
        {"chat", "chat_end", "reasoning", "reasoning_stream", "responses", "tools_result"},
    ),
    "markup beside a streamed call": (speaking(leave_markup_in_streams), IN_STREAMS),
    "tools' streams without an end": (EndlessTools, IN_STREAMS),
    "role first": (speaking(begin_with_a_role), {"chat", "chat_end", "reasoning", "reasoning_stream"}),
    "another city in streams": (calling('{"city": "Bern"}', only="stream"), IN_STREAMS),
    "calls anyway": (speaking(lambda request, _: PARIS if request.get("tool_choice") == "none" else {}), {"tools_none"}),
    "ignores required": (ignoring(str), FORCED),
    "loses a call whose text has the parser's token": (speaking(lose_token_in_text), {"tools_text"}),
    "loses it in streams": (speaking(in_streams(lose_token_in_text)), {"tools_text"}),
    "ignores names": (ignoring(dict), {"tools_named"}),
    "silent after tools": (speaking(lambda request, _: MUTE if is_after_tool(request) else {}), {"tools_result"}),
    "one call": (speaking(lambda _, spoken: {"calls": spoken["calls"][:1]}), PARALLEL),
    "one call in streams": (
        speaking(lambda request, spoken: {"calls": spoken["calls"][:1]} if is_streamed(request) else {}),
        {"parallel_tools_stream"},
    ),
    "one id": (OneId, PARALLEL),
    "wrong reasoning parser": (
        speaking(lambda _, said: {"content": f"<think>{said['reasoning']}</think>{said['content']}", "reasoning": ""}),
        THOUGHTS | JSON,
    ),
    "tag left": (
        speaking(lambda asked, said: {} if "chat_template_kwargs" in asked else {"content": f"</think>{said['content']}"}),
        {"reasoning_tags"} | JSON,
    ),
    "all in thoughts": (
        speaking(lambda _, spoken: {"content": "", "reasoning": spoken["reasoning"] + spoken["content"]}),
        THOUGHTS | JSON | {"vision", "vision_two", "vision_broken", "responses"},
    ),
    "thinks in plain only": (speaking(think_in_plain_only), {"reasoning_stream"}),
    "no format": (
        hearing(lambda asked: {name: asked[name] for name in asked if name != "response_format"}),
        JSON | {"json_schema_all_of"},
    ),
    # It writes the JSON that the question asks for, and not that of the schema.
    "any JSON": (
        speaking(lambda request, _: {"content": '{"answer": 42}'} if "response_format" in request else {}),
        {"json_schema"},
    ),
    "any JSON for a schema of two parts": (KeepsNoPart, {"json_schema_all_of"}),
    "dies of a schema of two parts": (DiesOfParts, {"json_schema_all_of"}),
    "calls no tool after it": (NoCallsAfterParts, {"tools_again"}),
    "colour-blind": (
        speaking(lambda request, _: {"content": "Red"} if has_pictures(request) else {}),
        {"vision", "vision_two"},
    ),
    "sees one picture": (speaking(lambda _, spoken: {"content": spoken["content"].partition(" and ")[0]}), {"vision_two"}),
    "takes broken pictures": (TakesBrokenPictures, {"vision_broken"}),
    "blind after broken": (BlindAfterBroken, {"vision_broken"}),
    "no responses": (NoResponses, {"responses", "responses_stream"}),
    "cut responses": (leaving_out('"response.completed"'), {"responses_stream"}),
}


@pytest.mark.parametrize("server", BROKEN)
def test_a_server_that_breaks_a_part_fails_its_check(server: str, measure_server: Measure) -> None:
    handler, broken = BROKEN[server]
    rows = measure_server(handler, ALONE)
    assert (failing(rows), unknown(rows)) == (broken, set())
    assert all(rows[f"contract_{name}"].finding for name in broken)


# --- attempts


def be_shy(request: Document, _spoken: Document) -> Document:
    """It calls a tool, thinks and writes JSON only where it is asked in another way."""
    is_paris = "messages" in request and "Paris?" in str(request["messages"][-1]["content"])
    return {"calls": [], "content": "I can not."} if is_paris else {}


def think_if_told(request: Document, _spoken: Document) -> Document:
    return {} if request.get("chat_template_kwargs", {}).get("thinking") else {"reasoning": ""}


@pytest.mark.parametrize(
    ("change", "checks", "attempts"),
    [(be_shy, ("tools_auto", "tools_stream"), 2), (think_if_told, ("reasoning", "reasoning_stream"), 3)],
)
def test_a_model_that_does_it_only_if_asked_otherwise_is_asked_otherwise(
    change: Change, checks: tuple[str, ...], attempts: int, measure_server: Measure, folder: Path
) -> None:
    rows = measure_server(speaking(change), ALONE)
    assert (failing(rows), unknown(rows)) == (set(), set())
    for check in checks:
        names = [name for name in sent(folder) if name.startswith(f"{check} ")]
        assert names == [f"{check} {number}" for number in range(1, attempts + 1)]


def cut_first_text(request: Document, _spoken: Document) -> Document:
    """The model does not end the first text that it may write."""
    return {"calls": [], "reason": "length"} if is_sent(request, FIRST_TEXT) else {}


def lose_first_text(request: Document, spoken: Document) -> Document:
    return lose_token_in_text(request, spoken) if is_sent(request, FIRST_TEXT) else {}


def test_a_text_without_an_end_is_asked_for_otherwise(measure_server: Measure, folder: Path) -> None:
    assert failing(measure_server(speaking(cut_first_text), ALONE)) == set()
    assert [name for name in sent(folder) if name.startswith("tools_text")] == [
        f"tools_text {attempt} {way}" for attempt in (1, 2) for way in ("plain", "stream")
    ]


def test_a_forced_call_that_ended_and_is_none_is_not_made_good_by_another_one(measure_server: Measure) -> None:
    row = measure_server(speaking(lose_first_text), ALONE)["contract_tools_text"]
    assert row.value == 0.0
    assert row.finding
    assert "'tools_text 1 plain' calls no tool" in row.finding
    assert "ended by tool_calls" in row.finding


def add_key_to_first_text(request: Document, spoken: Document) -> Document:
    calls = [(name, json.dumps({**json.loads(given), "urgent": True})) for name, given in spoken["calls"]]
    return {"calls": calls} if is_sent(request, FIRST_TEXT) else {}


def call_another_tool_too(request: Document, spoken: Document) -> Document:
    return {"calls": [*spoken["calls"], ("get_weather", "{}")]} if is_sent(request, FIRST_TEXT) else {}


@pytest.mark.parametrize("change", [add_key_to_first_text, call_another_tool_too])
def test_a_call_that_is_there_and_does_not_fit_is_asked_for_otherwise(change: Change, measure_server: Measure) -> None:
    assert failing(measure_server(speaking(change), ALONE)) == set()


def cut_first_text_and_lose_it_in_the_stream(request: Document, spoken: Document) -> Document:
    return (lose_first_text if is_streamed(request) else cut_first_text)(request, spoken)


def test_a_stream_that_lost_its_call_counts_although_the_plain_reply_was_cut(measure_server: Measure) -> None:
    row = measure_server(speaking(cut_first_text_and_lose_it_in_the_stream), ALONE)["contract_tools_text"]
    assert "'tools_text 1 stream' calls no tool" in (row.finding or "")


@pytest.mark.parametrize("way", ["plain", "stream"])
def test_a_text_without_a_reply_is_asked_for_otherwise(way: str, measure_server: Measure, folder: Path, tmp_path: Path) -> None:
    measure_server(speaking(cut_first_text), ALONE)
    lost = {"status": None, "reply": "", "problem": "ReadTimeout: "}
    exchanges = [each | (lost if name == f"tools_text 1 {way}" else {}) for name, each in sent(folder).items()]
    row = parsed(keep(tmp_path / "kept", exchanges), "reference")["contract_tools_text"]
    assert (row.value, row.invalid_because) == (1.0, None)


@pytest.mark.parametrize("plan", [f"`{CALLS['xlam']}`", f"```json\n{CALLS['xlam']}\n```"])
def test_a_plan_in_code_beside_a_call_is_let_pass(plan: str, measure_server: Measure) -> None:
    assert failing(measure_server(speaking(write_call(f"I call:\n{plan}\nNow.")), ALONE)) == set()


def test_a_call_in_code_without_a_true_call_is_none(measure_server: Measure) -> None:
    def write(_: Document, spoken: Document) -> Document:
        return {"content": f"```json\n{CALLS['xlam']}\n```", "calls": [], "reason": "stop"} if spoken["calls"] else {}

    assert failing(measure_server(speaking(write), ALONE)) == TOOLS


class FlatErrors(Healthy):
    """As TensorRT-LLM's."""

    def _answer(self, status: int, body: Document) -> None:
        flat = {"object": "error", **body["error"]} if "allOf" in str(body.get("error")) else body
        super()._answer(status, flat)


class CutsParts(KeepsParts):
    written = '{"number": 42, "colour": "re'

    def speak(self, request: Document) -> Document:
        return super().speak(request) | ({"reason": "length"} if has_parts(request) else {})


def test_a_schema_of_two_parts_is_refused_in_any_form_of_an_error(measure_server: Measure) -> None:
    assert failing(measure_server(FlatErrors, ALONE)) == set()


def answering_parts(status: int, **body: object) -> type[Healthy]:
    class Answers(Healthy):
        def _talk(self, request: Document) -> None:
            if has_parts(request):
                self._answer(status, body)
            else:
                super()._talk(request)

    return Answers


FAULT = {"message": "no", "type": "error"}


@pytest.mark.parametrize(
    ("server", "broken", "missing"),
    [
        (answering_parts(422, error=FAULT), set(), set()),
        (answering_parts(400, detail="no"), {"json_schema_all_of"}, set()),
        (answering_parts(401, error=FAULT), {"json_schema_all_of"}, set()),
        (answering_parts(404, error=FAULT), {"json_schema_all_of"}, set()),
        (answering_parts(408, error=FAULT), set(), {"json_schema_all_of"}),
        (answering_parts(429, **FAULT), set(), {"json_schema_all_of"}),
    ],
)
def test_only_a_refusal_of_the_form_itself_counts_as_one(
    server: type[Healthy], broken: set[str], missing: set[str], measure_server: Measure
) -> None:
    rows = measure_server(server, ALONE.model_copy(update={"capabilities": ["json_schema"]}))
    assert (failing(rows), unknown(rows)) == (broken, missing)


def test_a_reply_to_a_schema_of_two_parts_that_was_cut_is_not_judged(measure_server: Measure, folder: Path) -> None:
    rows = measure_server(CutsParts, ALONE)
    assert (failing(rows), unknown(rows)) == (set(), {"json_schema_all_of"})
    assert "'json_schema_all_of 1' was cut" in (rows["contract_json_schema_all_of"].invalid_because or "")
    assert sent(folder)["tools_again 1 schema"]["body"]["max_tokens"] == SHORT_TOK


def test_the_finding_on_a_schema_that_is_not_kept_names_the_option(measure_server: Measure) -> None:
    finding = measure_server(KeepsNoPart, ALONE)["contract_json_schema_all_of"].finding
    assert finding
    assert '{"answer": 42}' in finding
    assert (
        "no backend keeps it: name another `backend` in `structured-outputs-config`, or take a vLLM that refuses it" in finding
    )


def test_a_schema_of_two_parts_is_kept_or_refused(measure_server: Measure, folder: Path) -> None:
    for server, status in ((Healthy, 400), (KeepsParts, 200)):
        (folder / EXCHANGES).unlink(missing_ok=True)
        assert failing(measure_server(server, ALONE)) == set()
        assert sent(folder)["json_schema_all_of 1"]["status"] == status


def test_what_could_decide_the_backend_is_asked_last(measure_server: Measure, folder: Path) -> None:
    measure_server(Healthy, ALONE)
    assert list(sent(folder))[-3:] == ["tools_again 1 schema", "tools_again 1 call", "json_schema_all_of 1"]


def test_what_is_not_promised_is_not_asked(measure_server: Measure, folder: Path) -> None:
    rows = measure_server(Healthy, ALONE.model_copy(update={"capabilities": ["chat", "json_schema"]}))
    assert list(rows) == [*CAPABILITIES["chat"], *CAPABILITIES["json_schema"]]
    assert {name.partition("_")[0] for name in sent(folder)} == {"models", "chat 1", "chat", "json"}


def test_a_server_that_falls_silent_is_asked_no_more(measure_server: Measure, folder: Path) -> None:
    class Silent(Healthy):
        def do_POST(self) -> None:  # noqa: N802  # the name that the base class calls
            self.close_connection = True

    assert [name for name, row in measure_server(Silent, ALONE).items() if row.invalid_because] == PROMISED
    assert len(sent(folder)) == 1 + MOST_SILENT


# --- evidence


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
def test_a_check_without_its_reply_is_invalid(left_out: str, checks: set[str], folder: Path) -> None:
    rows = parsed(keep(folder, (each for name, each in sent(CAPTURED).items() if name != left_out)))
    assert (unknown(rows), failing(rows)) == (checks, set())


def test_replies_of_another_model_are_not_taken() -> None:
    rows = parsed(CAPTURED, "reference")
    plain = [rows[f"contract_{check}"] for check in ("chat", "tools_auto", "json_schema", "responses")]
    assert {row.value for row in plain} == {0.0}
    assert "is of the model 'reference-chat'" in plain[0].finding
