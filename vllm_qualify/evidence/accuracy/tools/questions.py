"""Questions whose answers are calls of tools: BFCL's data, and the request that asks one.

BFCL (github.com/ShishirPatil/gorilla, berkeley-function-call-leaderboard) has two files for each kind of question: one with
`id`, `question` (turns of messages) and `function`, and one with `id` and `ground_truth`. Here one file has both: lines with
the same id are one question. The task files in `tasks` name functions of this module.
"""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import httpx
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

# The data that this project was tried with. The hub's data set is BFCL's version 3, in which some answers name no function.
COMMIT = "6ea57973c7a6097fd7c5915698c54c17c5b1b6c8"
SOURCE = f"https://raw.githubusercontent.com/ShishirPatil/gorilla/{COMMIT}/berkeley-function-call-leaderboard/bfcl_eval/data"
DOWNLOAD_S = 60.0
# The kinds of questions, by what their ids begin with: of those that fit, the longest one.
Kind = Literal["simple", "multiple", "parallel", "parallel_multiple", "irrelevance"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# BFCL's calls in these languages have other types, as text.
OTHER_LANGUAGES = ("simple_java_", "simple_javascript_")
# No call answers these questions, and BFCL has no file of answers for them.
UNANSWERABLE: Kind = "irrelevance"
# JSON Schema's name of each of BFCL's types (BFCL: constants/type_mappings.py). Schemas in JSON Schema's own words stay.
SCHEMA_TYPES = {
    "string": "string",
    "integer": "integer",
    "float": "number",
    "boolean": "boolean",
    "array": "array",
    "tuple": "array",
    "dict": "object",
    "any": "string",
    "number": "number",
    "object": "object",
}
# Deeper schemas than any that a model is asked with.
DEEPEST = 20


class QuestionsError(ValueError):
    """The file's questions are not as these tasks need them."""


class _Loose(BaseModel):
    """A part of BFCL's data: what is read of it, whatever else there is."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Message(_Loose):
    role: Literal["system", "user", "assistant"]
    content: str


class Parameters(_Loose):
    properties: dict[str, dict[str, JsonValue]] = {}
    required: list[str] = []


class Function(_Loose):
    name: str = Field(min_length=1)
    description: str = ""
    parameters: Parameters


class Line(_Loose):
    """A line of a file of questions. Its turn may have several messages."""

    id: str
    question: list[list[Message]] = Field(min_length=1, max_length=1)
    function: list[Function] = Field(min_length=1)
    ground_truth: list[dict[str, dict[str, list[JsonValue]]]] = []


class Question(NamedTuple):
    """What is scored by: the functions that could be called, and the calls that are right, by name and allowed values."""

    functions: dict[str, Parameters]
    calls: list[tuple[str, dict[str, list[Any]]]]


def kind_of(name: str) -> Kind | None:
    """The kind of the question with this id."""
    own = name.removeprefix("live_")
    if own.startswith(OTHER_LANGUAGES):
        return None
    longest_first = sorted(KINDS, key=len, reverse=True)
    return next((kind for kind in longest_first if own.startswith(f"{kind}_")), None)


def offered_name(name: str) -> str:
    """The name by which a function is offered: OpenAI's names have no dots, and BFCL writes `_` for them."""
    return name.replace(".", "_")


# --- the data, as lm-eval takes it


def load(data_files: dict[str, str] | None = None, **_: object) -> dict[str, Any]:
    """The data set of all kinds: from a local file, or BFCL's own.

    Raises QuestionsError if a line is no question, or its answer is missing; OSError or httpx.HTTPError if the file cannot be
    read, or BFCL's could not be had.
    """
    from datasets import Dataset

    if data_files is None:
        replies = [httpx.get(f"{SOURCE}/{name}", timeout=DOWNLOAD_S, follow_redirects=True) for name in files()]
        return {"test": Dataset.from_list(rows_of("\n".join(reply.raise_for_status().text for reply in replies)))}
    return {split: Dataset.from_list(rows_of(Path(path).read_text(encoding="utf-8"))) for split, path in data_files.items()}


def rows_of(text: str) -> list[dict[str, str]]:
    """The questions in JSON lines. Functions and answers stay text: a table has no room for parameters that differ by row."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    # `splitlines` would also split at U+2028 and the like, which text may have.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        part = _unpack_json(line, f"line {number}")
        if not isinstance(part, dict) or not isinstance(part.get("id"), str):
            raise QuestionsError(f"line {number} is no JSON object with a text as its id")
        where, before = found.setdefault(part["id"], (f"line {number}", {}))
        if twice := sorted(before.keys() & part.keys() - {"id"}):
            raise QuestionsError(f"line {number}: {part['id']} has another {twice[0]} in {where}")
        before.update(part)
    if not found:
        raise QuestionsError("it has no questions")
    return [_make_row(whole, where) for where, whole in found.values()]


def _make_row(whole: dict[str, Any], where: str) -> dict[str, str]:
    # A file that `data fetch` wrote has text, as the table has.
    fields = {name: _unpack_json(whole.get(name), where) for name in ("question", "function", "ground_truth")}
    known = {name: value for name, value in fields.items() if value is not None}
    try:
        read = Line.model_validate({"id": whole["id"], **known})
    except ValidationError as error:
        first = error.errors()[0]
        raise QuestionsError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    _check_line(read, where)
    return {"id": read.id} | {
        name: json.dumps(value, ensure_ascii=False) for name, value in ({"ground_truth": []} | known).items()
    }


def _unpack_json(value: Any, where: str) -> Any:
    """What is in JSON text; what is no text stays."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise QuestionsError(f"{where} is no JSON: {error}") from error


def _check_line(line: Line, where: str) -> None:
    kind = kind_of(line.id)
    if kind is None:
        raise QuestionsError(f"{where}: the id {line.id!r} begins with none of {', '.join(f'{each}_' for each in KINDS)}")
    if bool(line.ground_truth) is (kind == UNANSWERABLE):
        wanted = "no calls" if kind == UNANSWERABLE else "the right calls"
        raise QuestionsError(f"{where}: {line.id} needs {wanted} in ground_truth")
    functions = [offered_name(function.name) for function in line.function]
    if len(set(functions)) != len(functions):
        raise QuestionsError(f"{where}: two functions have one name")
    for call in line.ground_truth:
        if len(call) != 1 or offered_name(next(iter(call))) not in functions:
            raise QuestionsError(f"{where}: ground_truth needs one of the functions in each call, and has {', '.join(call)}")
    for function in line.function:
        for name, parameter in function.parameters.properties.items():
            schema_of(parameter, f"{where}: {function.name}: {name}")


def files() -> list[str]:
    """BFCL's own files of these kinds: first those with questions, then those with the right calls."""
    names = ["simple_python" if kind == "simple" else kind for kind in KINDS]
    answered = [name for name in names if name != UNANSWERABLE]
    return [f"BFCL_v4_{name}.json" for name in names] + [f"possible_answer/BFCL_v4_{name}.json" for name in answered]


def only_simple(questions: Any) -> Any:
    return _only(questions, "simple")


def only_multiple(questions: Any) -> Any:
    return _only(questions, "multiple")


def only_parallel(questions: Any) -> Any:
    return _only(questions, "parallel")


def only_parallel_multiple(questions: Any) -> Any:
    return _only(questions, "parallel_multiple")


def only_irrelevance(questions: Any) -> Any:
    return _only(questions, "irrelevance")


def _only(questions: Any, kind: Kind) -> Any:
    places = [place for place, name in enumerate(questions["id"]) if kind_of(name) == kind]
    if not places:
        raise QuestionsError(f"it has no question whose id begins with {kind}_")
    return questions.select(places)


# --- the request


def asked(document: dict[str, str]) -> str:
    """The prompt, which lm-eval keeps and hashes: a question's messages, and the tools that go with them."""
    (messages,) = json.loads(document["question"])
    tools = [_tool(function) for function in json.loads(document["function"])]
    return json.dumps({"messages": messages, "tools": tools}, ensure_ascii=False)


def request_of(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages to send in place of those whose last one is what `asked` made, and the tools, of which the model chooses."""
    *before, last = messages
    within = json.loads(last["content"])
    return [*before, *within["messages"]], {"tools": within["tools"], "tool_choice": "auto"}


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    parameters = function["parameters"]
    schemas = {name: schema_of(each, name) for name, each in parameters.get("properties", {}).items()}
    whole = parameters | {"type": "object", "properties": schemas}
    offered = {"name": offered_name(function["name"]), "description": function.get("description", ""), "parameters": whole}
    return {"type": "function", "function": offered}


def schema_of(parameter: Any, where: str, depth: int = 0) -> dict[str, Any]:
    """A parameter's JSON Schema. Raises QuestionsError if BFCL has no such type."""
    if depth > DEEPEST or not isinstance(parameter, dict):
        raise QuestionsError(f"{where} is no parameter" if depth <= DEEPEST else f"{where} is nested too deep")
    kind = parameter.get("type", "any")
    if not isinstance(kind, str) or kind not in SCHEMA_TYPES:
        raise QuestionsError(f"{where} has the type {str(kind)[:50]!r}: take one of {', '.join(SCHEMA_TYPES)}")
    schema = parameter | {"type": SCHEMA_TYPES[kind]}
    if isinstance(inner := parameter.get("properties"), dict):
        schema["properties"] = {name: schema_of(each, f"{where}.{name}", depth + 1) for name, each in inner.items()}
    if "items" in parameter:
        schema["items"] = schema_of(parameter["items"], f"{where}'s items", depth + 1)
    return schema


# --- the answer


def question_of(document: dict[str, str]) -> Question:
    functions = [Function.model_validate(each) for each in json.loads(document["function"])]
    calls = [next(iter(call.items())) for call in json.loads(document["ground_truth"])]
    return Question(
        {offered_name(function.name): function.parameters for function in functions},
        [(offered_name(name), allowed) for name, allowed in calls],
    )


def target(document: dict[str, str]) -> str:
    return document["ground_truth"]
