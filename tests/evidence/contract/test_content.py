"""What may not stand in a reply's content: markup of any tool-call parser, and calls written as JSON or Python."""

import re
import time

import pytest

from tests.evidence.contract.markup import CALLS, OTHER_CALLS
from vllm_qualify.evidence.contract.content import check_content, find_written_call
from vllm_qualify.evidence.contract.replies import BrokenError

OFFERED = ("get_time", "get_weather")
DSML = "\uff5cDSML\uff5c"
# What a server leaves out that was not told to keep special tokens.
SPECIAL = re.compile(
    r"</?[|\uff5c][^<>]*>|<[\w:]*\|>|\[(?:TOOL_CALLS|CALL_ID|ARGS)\]|\]<\]minimax\[>\[|<(?:start|end)_function_call>|<escape>"
)
EVERY = CALLS | OTHER_CALLS
ORDINARY = {
    "JSON": '{"city": "Paris", "temperature": 20, "name": "Ann", "arguments": ["a", "b"]}',
    "another function's JSON": '{"name": "get_news", "arguments": {"city": "Paris"}}',
    "a definition": 'def get_weather(city="Paris"):\n    return {"city": city}',
    "a use in code": '```python\nweather = get_weather("Paris")\nprint(get_weather(city="Rome"))\n```',
    "in a sentence": 'I call get_weather(city="Paris") for you. It is named "get_weather".',
    "at a sentence's beginning": 'get_weather(city="Paris") gives the weather.',
    "the tools": "I have two tools:\n- get_weather(city)\n- get_time(city)\n\nget_weather: the weather {of a city}",
    "a tool's own description": '{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}}',
    "a list": "[1, 2, 3] and [a link](https://example.org/get_weather)",
    "HTML": "<p>Hello</p> <b>x < y</b>",
    "a comparison": "a < b and c > d; x <- 3; y |> f",
    "nothing": "",
}


def bare(text: str) -> str:
    return SPECIAL.sub("", text.replace("\uff5cDSML\uff5c ", DSML).replace(DSML, ""))


@pytest.mark.parametrize("parser", EVERY)
def test_a_call_in_the_form_of_any_parser_is_no_content(parser: str) -> None:
    for text in (EVERY[parser], f"Let me look.\n\n{EVERY[parser]}", f"\n{EVERY[parser]}\n"):
        with pytest.raises(BrokenError, match=r"^the content of 'asked' has "):
            check_content("asked", text, OFFERED)


@pytest.mark.parametrize("parser", EVERY)
def test_a_call_whose_special_tokens_were_left_out_is_no_content(parser: str) -> None:
    with pytest.raises(BrokenError):
        check_content("asked", bare(EVERY[parser]), OFFERED)


@pytest.mark.parametrize("answer", ORDINARY)
def test_an_ordinary_answer_with_json_or_code_is_let_pass(answer: str) -> None:
    check_content("asked", ORDINARY[answer], OFFERED)


@pytest.mark.parametrize("parser", ["xlam", "pythonic", "llama3_json"])
def test_a_call_of_a_tool_that_was_not_offered_is_text(parser: str) -> None:
    check_content("asked", CALLS[parser], ("get_time",))
    check_content("asked", CALLS[parser])


def test_the_sentence_shows_the_call() -> None:
    with pytest.raises(BrokenError, match=re.escape("has a call that is written as text, '[get_weather(city=\"Paris\")]'")):
        check_content("asked", CALLS["pythonic"], OFFERED)


def test_a_long_content_takes_no_time() -> None:
    began = time.monotonic()
    for part in ("[ ", "\n", '{"name": ', "get_weather", "get_weather(", "get_weather {", "call tool", "call:", "functions."):
        assert find_written_call(part * (2**20 // len(part)), OFFERED) is None
    assert time.monotonic() - began < 20


CALL = CALLS["xlam"]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("```\n<|im_end|>\n```", "has markup"),
        ("`<|im_start|>` done", "has markup"),
        ("`<tool_call>{}</tool_call>`", "has markup"),
        ("assistant\n`code`", "begins with a role"),
        (f"Let`s call {CALL} and see what it`s like", "a call that is written as text"),
        (f"The cities` weather: {CALL} as their people` say", "a call that is written as text"),
        (f"```json\n{CALL}", "a call that is written as text"),
        (f"```json\n{{}}\n```\n{CALL}", "a call that is written as text"),
    ],
)
def test_what_may_quote_a_call_has_no_markup_no_role_and_no_plain_call(content: str, what: str) -> None:
    with pytest.raises(BrokenError, match=what):
        check_content("asked", content, OFFERED, may_quote=True)


@pytest.mark.parametrize(
    "content",
    [
        f"`{CALL}`",
        f"I call (`{CALL}`).",
        f"Let`s call `{CALL}`.",
        f"```json\n{CALL}\n```",
        "`x`assistant: that is a role",
        '`x` get_weather(city="Paris"), say',
        "```python\nx\n```assistant\n",
        "<tool_`x`call>",
    ],
)
def test_code_stays_where_it_is(content: str) -> None:
    check_content("asked", content, OFFERED, may_quote=True)
