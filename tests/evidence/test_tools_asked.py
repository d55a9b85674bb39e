"""Tasks that call tools, through the real lm-eval and a server of chosen replies: scores by hand, and forged evidence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders.accuracy import answer_in_order, ask_task, read_rows, refuse_task, write_rows
from tests.fakes.openai_server import Book
from tests.lm_eval_files import hashed
from vllm_qualify.errors import RecipeError
from vllm_qualify.evidence.accuracy.answers import Answered
from vllm_qualify.evidence.accuracy.data import fetch
from vllm_qualify.evidence.accuracy.measurements import describe_missing_answers, parse_task
from vllm_qualify.evidence.accuracy.samples import read_answers
from vllm_qualify.evidence.accuracy.task_files import OURS
from vllm_qualify.evidence.accuracy.thinking import read_replies
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy

Row = dict[str, Any]
WEATHER = {
    "name": "weather.get",
    "description": "The weather of a city.",
    "parameters": {"type": "dict", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADD = {
    "name": "add",
    "description": "The sum of two numbers.",
    "parameters": {"type": "dict", "properties": {"a": {"type": "float"}, "b": {"type": "float"}}, "required": ["a", "b"]},
}


def row(name: str, text: str, functions: list[Row], *right: Row) -> Row:
    return {
        "id": name,
        "question": [[{"role": "user", "content": text}]],
        "function": functions,
        **({"ground_truth": list(right)} if right else {}),
    }


def call(name: str, arguments: Any) -> Row:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": "call-1", "type": "function", "function": {"name": name, "arguments": text}}


# The rows, and the calls and the words of each reply.
ROWS = [
    row("simple_0", "Rome?", [WEATHER], {"weather.get": {"city": ["Rome"]}}),
    row("simple_1", "Oslo?", [WEATHER], {"weather.get": {"city": ["Oslo"]}}),
    row("multiple_0", "Add 1 and 2", [WEATHER, ADD], {"add": {"a": [1.0], "b": [2.0]}}),
    row("multiple_1", "Add 3 and 4", [WEATHER, ADD], {"add": {"a": [3.0], "b": [4.0]}}),
    row("parallel_0", "Rome and Oslo?", [WEATHER], *({"weather.get": {"city": [city]}} for city in ("Rome", "Oslo"))),
    row("parallel_1", "Bern and Lima?", [WEATHER], *({"weather.get": {"city": [city]}} for city in ("Bern", "Lima"))),
    row(
        "parallel_multiple_0",
        "Rome, and add 1 and 2",
        [WEATHER, ADD],
        {"weather.get": {"city": ["Rome"]}},
        {"add": {"a": [1.0], "b": [2.0]}},
    ),
    row("irrelevance_0", "Who wrote Faust?", [WEATHER]),
    row("irrelevance_1", "What is love?", [WEATHER]),
]
CALLS: dict[str, Any] = {
    "Rome?": [call("weather_get", {"city": "rome"})],
    "Oslo?": [call("weather_get", "{'city': 'Oslo'}")],
    "Add 1 and 2": [call("add", {"a": 1, "b": 2})],
    "Add 3 and 4": [call("weather_get", {"city": "3"})],
    "Rome and Oslo?": [call("weather_get", {"city": "Oslo"}), call("weather_get", {"city": "Rome"})],
    "Bern and Lima?": [call("weather_get", {"city": "Bern"})],
    "Rome, and add 1 and 2": [call("add", {"a": 1.0, "b": 2.0}), call("weather_get", {"city": "Rome"})],
    "What is love?": [call("weather_get", {"city": "Love"})],
}
WORDS = dict.fromkeys(CALLS, "") | {"Who wrote Faust?": "Goethe."}
# In the order of the members' names: irrelevance, multiple, parallel, parallel_multiple, simple.
BY_HAND = [1, 0, 1, 0, 1, 0, 1, 1, 0]
SIMPLE = [each for each in ROWS if each["id"].startswith("simple")]


def plan_of(rows: list[Row], folder: Path, task: str = "bfcl", **settings: Any) -> TaskPlan:
    folder.mkdir(exist_ok=True)
    data = folder / "test.jsonl"
    write_rows(data, rows)
    asked = {"api": "chat", "stop": [], "num_fewshot": 0, "num_questions": len(rows), "time_limit_s": 120.0} | settings
    return TaskPlan(settings=Accuracy(task=task, **asked), num_concurrent=4, repetitions=1, sequential=False, questions=[data])


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> tuple[TaskPlan, Answered, Path, Book]:
    folder, book = tmp_path_factory.mktemp("group"), Book(WORDS, calls=CALLS, thinking={"Rome?": "A city."})
    plan = plan_of(ROWS, folder, system_prompt="Be brief.")
    return (plan, *ask_task(plan, folder, book, most_blocks=1), book)


Group = tuple[TaskPlan, Answered, Path, Book]


def test_scores_are_those_computed_by_hand(group: Group) -> None:
    plan, answered, folder, _ = group
    answers = sorted(answered.answers, key=lambda answer: answer.question)
    assert [answer.scores for answer in answers] == [{"acc,ast": score} for score in BY_HAND]
    kinds = ("irrelevance", "multiple", "parallel", "parallel_multiple", "simple")
    assert [answer.topic for answer in answers][::2] == [f"bfcl_{kind}" for kind in kinds]
    rows = {row.metric: row for row in parse_task(folder, plan, Levels())}
    assert rows["acc"].value == pytest.approx(sum(BY_HAND) / len(BY_HAND))
    assert rows["looping_answers"].value == 0.0


def test_each_question_goes_with_its_own_tools_to_the_servers_own_parser(group: Group) -> None:
    *_, book = group
    by_text = {each["question"][0][0]["content"]: each for each in ROWS}
    assert len(book.requests) == len(ROWS)
    for request in book.requests:
        system, user = request["messages"]
        assert (system["content"], user.keys(), user["role"]) == ("Be brief.", {"role", "content"}, "user")
        offered = [tool["function"]["name"] for tool in request["tools"]]
        assert offered == [each["name"].replace(".", "_") for each in by_text[user["content"]]["function"]]
        assert (request["tool_choice"], request["stop"]) == ("auto", [])


def samples(folder: Path, task: str) -> Path:
    (path,) = folder.glob(f"r1-b1/samples_{task}_*.jsonl")
    return path


def test_the_calls_the_reason_and_the_thinking_before_stay_as_evidence(group: Group) -> None:
    plan, _, folder, _ = group
    rows = {each["doc"]["id"]: each for each in read_rows(samples(folder, "bfcl_simple"))}
    assert rows["simple_0"]["resps"] == [['{"tool_calls": [{"name": "weather_get", "arguments": "{\\"city\\": \\"rome\\"}"}]}']]
    assert rows["simple_0"]["filtered_resps"] == ["right"]
    assert rows["simple_1"]["filtered_resps"][0].startswith("wrong: no call fits weather_get: its arguments are malformed")
    assert read_rows(samples(folder, "bfcl_irrelevance"))[0]["resps"] == [["Goethe."]]
    replies = list(read_replies(folder / "r1-b1"))
    assert sorted(reply.thinking or "" for reply in replies) == [""] * 8 + ["A city."]
    assert not any(reply.is_empty for reply in replies)
    assert describe_missing_answers(folder, plan) == ""


def swapped(row: Row, **document: Any) -> Row:
    """A sample whose hashes are right, of another document."""
    return hashed(row | {"doc": row["doc"] | document})


def prompted(row: Row, change: Callable[[Row], Row]) -> Row:
    """A sample whose hashes are right, with another prompt."""
    first = row["arguments"]["gen_args_0"]
    messages = json.loads(first["arg_0"][0])
    messages[-1]["content"] = json.dumps(change(json.loads(messages[-1]["content"])))
    text = json.dumps(messages, ensure_ascii=False)
    return hashed(row | {"arguments": {"gen_args_0": first | {"arg_0": [text]}}})


@pytest.mark.parametrize(
    "forged",
    [
        lambda row: swapped(row, function=json.dumps([ADD])),
        lambda row: swapped(row, question=json.dumps([[{"role": "user", "content": "Paris?"}]])),
        lambda row: prompted(row, lambda sent: sent | {"tools": []}),
        lambda row: prompted(row, lambda sent: {"messages": sent["messages"], "tools": sent["tools"] * 2}),
        lambda row: prompted(row, lambda sent: sent | {"messages": sent["messages"] * 2}),
    ],
    ids=["other-tools", "other-question", "no-tools", "more-tools", "more-messages"],
)
def test_evidence_of_other_tools_or_none_is_noticed(forged: Callable[[Row], Row], group: Group, tmp_path: Path) -> None:
    plan, _, folder, _ = group
    copy = shutil.copytree(folder, tmp_path / "accuracy" / "bfcl")
    path = samples(copy, "bfcl_simple")
    first, *others = read_rows(path)
    write_rows(path, [forged(first), *others])
    with pytest.raises(ValueError, match="was not asked with its own messages and tools"):
        read_answers(copy, plan)


def test_sampled_answers_have_seeds_of_their_own(tmp_path: Path) -> None:
    book = Book(WORDS, calls=CALLS)
    sampling = {"temperature": 0.7}
    answers = answer_in_order(plan_of(SIMPLE, tmp_path, "bfcl_simple", sampling=sampling), tmp_path, book)
    assert [answer.scores["acc,ast"] for answer in answers] == [1, 0]
    assert len({request["seed"] for request in book.requests}) == 2
    assert {request["temperature"] for request in book.requests} == {0.7}


def test_all_questions_are_fetched_as_one_file_that_can_be_asked(tmp_path: Path) -> None:
    """A folder's task files stand in for the hub's data."""
    local, own = plan_of(ROWS, tmp_path), tmp_path / "own"
    own.mkdir()
    (tmp_path / "test.jsonl").rename(own / "test.jsonl")
    data = {"data_files": {"test": str(own / "test.jsonl")}}
    for kind in ("simple", "multiple"):
        task = {"include": str(OURS / f"bfcl_{kind}.yaml"), "task": f"my_{kind}", "dataset_kwargs": data}
        (own / f"my_{kind}.yaml").write_text(json.dumps(task))
    (own / "mine.yaml").write_text(json.dumps({"group": "mine", "task": ["my_simple", "my_multiple"]}))
    settings = local.settings.model_copy(update={"task": "mine", "num_questions": 4})
    plan = local.model_copy(update={"settings": settings, "questions": None, "folder": own})
    assert fetch(plan, tmp_path / "data").questions == len(ROWS)
    local = plan.model_copy(update={"questions": [tmp_path / "data" / "test.jsonl"]})
    answers = answer_in_order(local, tmp_path, Book(WORDS, calls=CALLS))
    # Of the group's list, multiple comes before simple.
    assert [answer.scores["acc,ast"] for answer in answers] == [1, 0, 1, 0]


def test_calls_that_a_wrong_parser_leaves_in_the_text_score_nothing(tmp_path: Path) -> None:
    text = '<tool_call>{"name": "weather_get", "arguments": {"city": "%s"}}</tool_call>'
    book = Book({"Rome?": text % "Rome", "Oslo?": text % "Oslo"})
    answers = answer_in_order(plan_of(SIMPLE, tmp_path, "bfcl_simple"), tmp_path, book)
    assert [answer.scores["acc,ast"] for answer in answers] == [0, 0]


def test_a_server_without_a_parser_is_refused_with_the_options_that_it_lacks(tmp_path: Path) -> None:
    plan, book = plan_of(SIMPLE, tmp_path, "bfcl_simple"), Book(WORDS, calls=CALLS, has_no_parser=True)
    with pytest.raises(RecipeError) as refused:
        ask_task(plan, tmp_path, book, most_blocks=1)
    assert "the server has no parser of tool calls" in str(refused.value)
    assert "enable-auto-tool-choice" in (refused.value.remedy or "")


@pytest.mark.parametrize(
    ("rows", "task", "settings", "message"),
    [
        (SIMPLE, "bfcl_simple", {"api": "completions"}, "bfcl_simple calls tools, which only a chat can"),
        (SIMPLE, "bfcl", {}, "bfcl cannot be asked from test.jsonl: it has no question whose id begins with multiple_"),
        ([SIMPLE[0] | {"id": "mine"}], "bfcl_simple", {}, "bfcl_simple cannot be asked from test.jsonl: line 1: the id 'mine'"),
        ([{"question": "?"}], "bfcl_simple", {}, "bfcl_simple cannot be asked from test.jsonl: line 1"),
    ],
    ids=["completions", "no-questions-of-a-kind", "another-id", "another-format"],
)
def test_what_cannot_be_asked_is_refused(
    rows: list[Row], task: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in str(refuse_task(plan_of(rows, tmp_path, task, **settings), tmp_path / "lm-eval"))
