"""Scores of tool calls by hand: BFCL's rule on made questions, and replies that mean harm."""

import json
from typing import Any

import pytest

from tests.builders.fake_servers import serving
from tests.fakes.vllm import Handler
from vllm_qualify.evidence.accuracy.tools import questions
from vllm_qualify.evidence.accuracy.tools.questions import QuestionsError, asked, kind_of, request_of, rows_of
from vllm_qualify.evidence.accuracy.tools.scoring import RIGHT, fault, judged, scores, text_of

WEATHER = {
    "name": "weather.at",
    "description": "The weather.",
    "parameters": {
        "type": "dict",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "float"},
            "rain": {"type": "boolean"},
            "hours": {"type": "array", "items": {"type": "integer"}},
            "names": {"type": "tuple", "items": {"type": "string"}},
            "place": {"type": "dict", "properties": {"lat": {"type": "float"}, "name": {"type": "string"}}},
            "stops": {"type": "array", "items": {"type": "dict"}},
            "note": {"type": "any"},
        },
        "required": ["city"],
    },
}
TIME = {"name": "time", "parameters": {"type": "dict", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
ALLOWED: dict[str, list[Any]] = {
    "city": ["New York", "NYC"],
    "days": [3, ""],
    "share": [0.5, 1, ""],
    "rain": [True, ""],
    "hours": [[1, 2], ""],
    "names": [["A. Lee", "Bo"], ""],
    "place": [{"lat": [1.5], "name": ["North End", ""]}, ""],
    "stops": [[{"name": ["A"]}, {"name": ["B", "b1"]}], ""],
    "note": ["x-y", ""],
}


def row(*right: dict[str, Any], kind: str = "simple") -> dict[str, str]:
    question = {"id": f"{kind}_1", "question": [[{"role": "user", "content": "?"}]], "function": [WEATHER, TIME]}
    (made,) = rows_of(json.dumps(question | {"ground_truth": list(right)}))
    return made


def said(*calls: tuple[Any, Any], text: str | None = None) -> str:
    made = [{"id": "1", "type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return text_of({"message": {"content": text, "tool_calls": made}}, text) or ""


def is_right(document: dict[str, str], reply: str) -> bool:
    (verdict,) = judged([[reply]], [document])
    assert (verdict == RIGHT) is (fault(document, reply) == "")
    return scores(document, [verdict])["acc"] == 1.0


SIMPLE = row({"weather.at": ALLOWED})


# Of each parameter, what is right and what is wrong. Case, blanks and punctuation do not count; an integer is a float.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "city": (["New York", "new-york."], ["New Yorks", 5]),
    "days": ([3], [3.0, "3", True, None]),
    "share": ([0.5, 1], [2]),
    "rain": ([True], [1, "true"]),
    "hours": ([[1, 2]], [[2, 1], ["1", "2"], 1]),
    "names": ([["a lee", "BO"]], []),
    "place": ([{"lat": 1.5}, {"lat": 1.5, "name": "northend"}], [{"name": "North End"}, {"lat": 1.5, "height": 2}]),
    "stops": ([[{"name": "a"}, {"name": "B1"}]], [[{"name": "B"}, {"name": "A"}], [{"name": "A"}], ["A", "B"]]),
    "note": (["xy"], []),
    "colour": ([], ["red"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_arguments_are_right_by_the_leaderboards_rule(name: str) -> None:
    for values, right in zip(VALUES[name], (True, False), strict=True):
        for value in values:
            reply = said(("weather_at", json.dumps({"city": "NYC"} | {name: value})))
            assert is_right(SIMPLE, reply) is right, value


def test_a_parameter_that_must_be_given_may_not_be_left_out() -> None:
    document = row({"weather.at": {"city": ["Rome"], "days": [3]}})
    assert is_right(document, said(("weather_at", '{"city": "Rome", "days": 3}')))
    assert fault(document, said(("weather_at", '{"city": "Rome"}'))) == "no call fits weather_at: days is missing"
    assert fault(document, said(("weather_at", "{}"))) == "no call fits weather_at: city is missing"


def test_a_variables_name_stands_for_a_value_where_the_answer_has_one() -> None:
    document = row({"weather.at": {"city": ["Rome"], "days": ["count"]}})
    assert is_right(document, said(("weather_at", '{"city": "Rome", "days": "count"}')))
    assert not is_right(document, said(("weather_at", '{"city": "Rome", "days": "Count"}')))


TWO = row({"time": {"city": ["Rome"]}}, {"time": {"city": ["Oslo"]}}, kind="parallel")
ROME, OSLO = ("time", '{"city": "Rome"}'), ("time", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([ROME, OSLO], True),
        ([OSLO, ROME], True),
        ([ROME], False),
        ([ROME, ROME], False),
        ([ROME, OSLO, OSLO], False),
        ([ROME, ("weather_at", '{"city": "Oslo"}')], False),
        ([ROME, ("time", '{"city": "Oslo"')], False),
    ],
)
def test_calls_are_matched_one_to_one_in_any_order(calls: list[tuple[str, str]], right: bool) -> None:
    assert is_right(TWO, said(*calls)) is right


def test_one_call_is_not_the_same_right_call_twice() -> None:
    twice = row(*[{"time": {"city": ["Rome"]}}] * 2, kind="parallel")
    assert is_right(twice, said(ROME, ROME))
    assert not is_right(twice, said(ROME, OSLO))


def test_where_no_tool_fits_no_call_is_right() -> None:
    document = row(kind="irrelevance")
    assert is_right(document, said(text="I cannot do that."))
    assert not is_right(document, said(ROME))
    # A server that swallows calls leaves nothing.
    assert fault(document, said(text="")) == "the reply is empty"


def test_text_that_looks_like_calls_is_no_call() -> None:
    calls = said(ROME)
    assert not is_right(row({"time": {"city": ["Rome"]}}), said(text=calls))
    assert is_right(row(kind="irrelevance"), said(text=calls))


DEEP = "[" * 100_000 + "]" * 100_000


HOSTILE_FIELDS = [
    *(f'"{name}": 1{"0" * zeros}' for name, zeros in (("days", 5000), ("days", 4000), ("share", 4000))),
    *('"share": 1e999', '"share": NaN', '"share": -Infinity', f'"hours": {DEEP}', f'"hours": {"[" * 500 + "]" * 500}'),
]


HOSTILE_ARGUMENTS = [
    *(f'{{"city": "NYC", {field}}}' for field in HOSTILE_FIELDS),
    *('{"city": "Rome", "city": "NYC"}', '{"city": ["NYC"]}', '{"city": {"NYC": {}}}', '["NYC"]', '"NYC"', "null", ""),
    *('{"city": "NYC"', "{'city': 'NYC'}", {"city": "NYC"}, None, '{"city": "\ud800", "days": 3}'),
]
HOSTILE_NAMES = ["weather.at", None, ["weather_at"], {"weather_at": 1}, 1e999, "\ud800"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [*(("weather_at", each) for each in HOSTILE_ARGUMENTS), *((name, '{"city": "NYC"}') for name in HOSTILE_NAMES)],
    ids=lambda value: repr(value)[:50],
)
def test_a_hostile_call_is_wrong_for_a_short_reason(name: Any, arguments: Any) -> None:
    reply = said((name, arguments))
    reply.encode()
    why = fault(SIMPLE, reply)
    assert why.startswith("no call fits weather_at: ")
    assert len(why) < 300


@pytest.mark.parametrize("calls", ["weather_at", {"function": 1}, 3, True, None, []])
def test_calls_that_are_no_list_or_without_a_message_are_none(calls: Any) -> None:
    assert text_of({"message": {"tool_calls": calls}}, "Hello") == "Hello"
    assert text_of({"message": {"tool_calls": calls}}, None) is None
    assert text_of({"text": "Hello"}, "Hello") == "Hello"


@pytest.mark.parametrize("calls", [[None], ["x"], [{}], [{"function": None}], [{"function": ["x"]}]])
def test_a_call_without_a_function_is_wrong(calls: Any) -> None:
    reply = text_of({"message": {"tool_calls": calls}}, None)
    assert reply is not None
    assert fault(SIMPLE, reply) == "no call fits weather_at: None was called"


# --- the questions


def test_the_request_has_the_questions_messages_and_its_tools_as_json_schema() -> None:
    before = [{"role": "system", "content": "Be brief."}]
    messages, fields = request_of([*before, {"role": "user", "content": asked(SIMPLE)}])
    tools = fields.pop("tools")
    assert fields == {"tool_choice": "auto"}
    assert messages == [*before, {"role": "user", "content": "?"}]
    assert [tool["function"]["name"] for tool in tools] == ["weather_at", "time"]
    assert {tool["type"] for tool in tools} == {"function"}
    parameters = tools[0]["function"]["parameters"]
    assert (parameters["type"], parameters["required"]) == ("object", ["city"])
    schemas = parameters["properties"]
    types = ("string", "integer", "number", "boolean", "array", "array", "object", "array", "string")
    assert {name: schema["type"] for name, schema in schemas.items()} == dict(zip(ALLOWED, types, strict=True))
    assert schemas["place"]["properties"]["lat"] == {"type": "number"}
    assert schemas["stops"]["items"] == {"type": "object"}
    # Other tools give another prompt.
    assert asked(SIMPLE | {"function": json.dumps([TIME, WEATHER])}) != asked(SIMPLE)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("simple_python_0", "simple"),
        ("simple_0", "simple"),
        ("live_simple_0-0-0", "simple"),
        ("multiple_3", "multiple"),
        ("parallel_3", "parallel"),
        ("parallel_multiple_3", "parallel_multiple"),
        ("irrelevance_3", "irrelevance"),
        ("simple_java_3", None),
        ("simple_javascript_3", None),
        ("live_relevance_3", None),
        ("multi_turn_base_0", None),
        ("", None),
    ],
)
def test_a_questions_kind_is_by_its_id(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind


LINE: dict[str, Any] = {
    "id": "simple_1",
    "question": [[{"role": "user", "content": "?"}]],
    "function": [TIME],
    "ground_truth": [{"time": {"city": ["Rome"]}}],
}


def timed(parameter: Any) -> dict[str, Any]:
    return TIME | {"parameters": {"properties": {"city": parameter}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 1 is no JSON"),
        (DEEP, "line 1 is no JSON"),
        ("[]", "line 1 is no JSON object with a text as its id"),
        ("3", "line 1 is no JSON object with a text as its id"),
        ("", "it has no questions"),
        (LINE | {"id": 3}, "line 1 is no JSON object with a text as its id"),
        (f"{json.dumps(LINE)}\n{json.dumps(LINE)}", "line 2: simple_1 has another function in line 1"),
        (LINE | {"id": "mine_1"}, "the id 'mine_1' begins with none of simple_, multiple_"),
        (LINE | {"question": "?"}, "line 1 is no JSON"),
        (LINE | {"question": LINE["question"] * 2}, "line 1: question"),
        (LINE | {"question": [[{"role": "tool", "content": "?"}]]}, "line 1: question.0.0.role"),
        (LINE | {"function": []}, "line 1: function"),
        (LINE | {"function": [TIME, TIME]}, "two functions have one name"),
        (LINE | {"function": [timed({"type": "Hashtable"})]}, "time: city has the type 'Hashtable'"),
        (LINE | {"function": [timed({"type": ["string"]})]}, "time: city has the type"),
        (LINE | {"function": [timed({"type": "array", "items": "string"})]}, "time: city's items is no parameter"),
        (LINE | {"function": [timed(nested(30))]}, "is nested too deep"),
        (LINE | {"ground_truth": []}, "simple_1 needs the right calls in ground_truth"),
        ({name: value for name, value in LINE.items() if name != "ground_truth"}, "needs the right calls in ground_truth"),
        (LINE | {"id": "irrelevance_1"}, "irrelevance_1 needs no calls in ground_truth"),
        (LINE | {"ground_truth": [{"clock": {}}]}, "ground_truth needs one of the functions in each call, and has clock"),
        (LINE | {"ground_truth": [{"time": {}, "clock": {}}]}, "and has time, clock"),
        (LINE | {"ground_truth": [{"time": {"city": "Rome"}}]}, "line 1: ground_truth.0.time.city"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else str(value)[:40],
)
def test_a_line_that_is_no_question_is_refused(line: Any, problem: str) -> None:
    with pytest.raises(QuestionsError) as refused:
        rows_of(line if isinstance(line, str) else json.dumps(line))
    assert problem in str(refused.value)
    assert len(str(refused.value)) < 400


def test_questions_and_answers_in_lines_of_their_own_are_joined_by_their_id() -> None:
    answer = {name: LINE[name] for name in ("id", "ground_truth")}
    question = {name: value for name, value in LINE.items() if name != "ground_truth"}
    other = LINE | {"id": "simple_2"}
    assert rows_of("\n".join(map(json.dumps, (question, other, answer)))) == rows_of(f"{json.dumps(LINE)}\n{json.dumps(other)}")


class Files(Handler):
    """BFCL's data of one question of each kind. Its files do not end with a line's end."""

    def do_GET(self) -> None:  # noqa: N802  # the name that the base class calls
        folder, _, kind = self.path.removesuffix(".json").rpartition("/BFCL_v4_")
        name = f"{kind}_0"
        lines = {
            "": {field: value for field, value in LINE.items() if field != "ground_truth"} | {"id": name},
            "/possible_answer": {"id": name, "ground_truth": LINE["ground_truth"]},
        }
        self._answer(404 if kind == "irrelevance" and folder else 200, lines[folder])


def test_the_leaderboards_own_data_is_downloaded_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Files) as url:
        monkeypatch.setattr(questions, "SOURCE", url)
        rows = questions.load()["test"]
    answers = {row["id"]: json.loads(row["ground_truth"]) for row in rows}
    called = ("simple_python_0", "multiple_0", "parallel_0", "parallel_multiple_0")
    assert answers == dict.fromkeys(called, LINE["ground_truth"]) | {"irrelevance_0": []}
    assert [row["id"] for row in questions.only_parallel(rows)] == ["parallel_0"]


def test_what_was_fetched_is_read_as_what_it_was_made_of() -> None:
    rows = rows_of(json.dumps(LINE) + "\n\n" + json.dumps(LINE | {"id": "irrelevance_1", "ground_truth": []}) + "\n")
    assert rows_of("\n".join(map(json.dumps, rows))) == rows
