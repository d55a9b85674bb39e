"""Whether a reply calls the right tools with the right arguments, by the rule of BFCL's `ast_checker.py`.

Each right call must be made once, in any order, and no other. A call has the function's name, all its required parameters, no
parameter that the answer does not know, and of each parameter one of the allowed values. A parameter may be absent if `""` is
among its allowed values. Text is compared without case, blanks and some punctuation.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from vllm_qualify.evidence.accuracy.tools.questions import SCHEMA_TYPES, Parameters, question_of

RIGHT, WRONG = "right", "wrong: "
# What a reply with calls begins with. A reply of text that begins so gets a blank before it.
CALLS = '{"tool_calls": '
# BFCL's types as a JSON reader gives them.
READ_AS: dict[str, type] = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
TYPES = {name: READ_AS[schema_type] for name, schema_type in SCHEMA_TYPES.items()}
UNCOUNTED = re.compile(r"[ ,./\-_*^]")
# So much of what a model wrote stands in a reason.
MOST_SHOWN = 100


class Call(NamedTuple):
    """A call as it came: OpenAI's form has the arguments as JSON text."""

    name: object
    arguments: object


# --- the reply as text


def text_of(choice: dict[str, Any], text: str | None) -> str | None:
    """What is scored of a choice of OpenAI's reply: its calls as JSON, or its text if it calls nothing."""
    message = choice.get("message")
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list) or not calls:
        return f" {text}" if text and text.startswith(CALLS) else text
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    made = [
        {name: function.get(name) for name in ("name", "arguments")} if isinstance(function, dict) else {}
        for function in functions
    ]
    # A half of a surrogate pair can be in JSON, but in no file.
    return json.dumps({"tool_calls": made}, ensure_ascii=False).encode(errors="replace").decode()


# --- what lm-eval's task files name


def judged(replies: list[list[str]], documents: list[dict[str, str]]) -> list[str]:
    """A verdict on each reply, with the reason if it is wrong: lm-eval keeps it beside the reply."""
    faults = [fault(document, reply[0]) for reply, document in zip(replies, documents, strict=True)]
    return [f"{WRONG}{why}" if why else RIGHT for why in faults]


def scores(_: dict[str, str], verdicts: list[str]) -> dict[str, float]:
    return {"acc": float(verdicts[0] == RIGHT)}


# --- the rule


def fault(document: dict[str, str], reply: str) -> str:
    """Why a reply is wrong; empty if it is right."""
    question = question_of(document)
    calls = json.loads(reply)["tool_calls"] if reply.startswith(CALLS) else []
    left = [Call(call.get("name"), call.get("arguments")) for call in calls]
    if not reply.strip():
        return "the reply is empty"
    if len(left) != len(question.calls):
        return f"{len(left)} calls, where {len(question.calls)} are right"
    # As BFCL does, each right call takes the first one that fits it.
    for name, allowed in question.calls:
        faults = [_call_fault(call, name, allowed, question.functions[name]) for call in left]
        if "" not in faults:
            return f"no call fits {name}: {'; '.join(faults)}"
        del left[faults.index("")]
    return ""


def _call_fault(call: Call, name: str, allowed: dict[str, list[Any]], parameters: Parameters) -> str:
    if call.name != name:
        return f"{_shorten_value(call.name)} was called"
    try:
        arguments = _parse_arguments(call.arguments)
    except (ValueError, RecursionError) as error:
        return f"its arguments are malformed: {str(error)[:MOST_SHOWN]}"
    if missing := [each for each in parameters.required if each not in arguments]:
        return f"{missing[0]} is missing"
    for each, value in arguments.items():
        if each not in parameters.properties or each not in allowed:
            return f"there is no parameter {_shorten_value(each)}"
        if not _is_allowed(value, parameters.properties[each], allowed[each]):
            return f"{each} is {_shorten_value(value)}"
    if missing := [each for each, values in allowed.items() if each not in arguments and "" not in values]:
        return f"{missing[0]} is missing"
    return ""


def _parse_arguments(text: object) -> dict[str, Any]:
    if not isinstance(text, str):
        raise ValueError("they are no text")
    arguments = json.loads(text, parse_constant=_no_number, object_pairs_hook=_each_once)
    if not isinstance(arguments, dict):
        raise ValueError("they are no object")
    return arguments


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Of a name that is there twice, clients take different values."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


def _is_allowed(value: Any, parameter: dict[str, Any], allowed: list[Any]) -> bool:
    wanted = TYPES[parameter.get("type", "any")]
    items = parameter.get("items")
    inner = TYPES[items.get("type", "any")] if wanted is list and isinstance(items, dict) else None
    found = float if wanted is float and type(value) is int else type(value)
    answers = [answer for answer in allowed if answer != ""]
    # BFCL allows a variable's name for a value of any type, if the answer has one.
    answered = type(answers[0]) if answers else wanted
    if found is not wanted and found is not answered:
        return False
    if found is wanted and inner and not any(_has_items(value, inner, answer) for answer in allowed):
        return False
    return _equals_answer(value, wanted, inner, allowed) if found is wanted is answered else value in allowed


def _has_items(value: list[Any], inner: type, answer: object) -> bool:
    """Whether all items are of the type that the parameter's items have, or of that of the answer's."""
    if not isinstance(answer, list):
        return True
    answered = next((type(each) for each in answer if each != ""), inner)
    return all(type(item) in (inner, answered) for item in value)


def _equals_answer(value: Any, wanted: type, inner: type | None, allowed: list[Any]) -> bool:
    if wanted is dict:
        return any(isinstance(answer, dict) and _same_object(value, answer) for answer in allowed)
    if wanted is list and inner is dict:
        return any(_same_objects(value, answer) for answer in allowed)
    if wanted is list:
        plain = [_standardize_text(item) for item in value]
        # To BFCL an empty list is as good as leaving out a parameter that may be left out.
        return any(
            plain == [_standardize_text(item) for item in answer] for answer in allowed if isinstance(answer, list | str)
        )
    return any(_standardize_text(value) == _standardize_text(answer) for answer in allowed)


def _same_objects(value: Sequence[Any], answer: object) -> bool:
    if not isinstance(answer, list | str) or len(value) != len(answer):
        return False
    pairs = zip(value, answer, strict=True)
    return all(isinstance(one, dict) and isinstance(other, dict) and _same_object(one, other) for one, other in pairs)


def _same_object(value: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Whether an object has only what the answer knows, each with one of its allowed values, and lacks only what it may."""
    options = {name: each if isinstance(each, list) else [each] for name, each in answer.items()}
    return all(
        name in options and any(_standardize_text(each) == _standardize_text(option) for option in options[name])
        for name, each in value.items()
    ) and all(name in value or "" in each for name, each in options.items())


def _standardize_text(value: Any) -> Any:
    """Text as it is compared (BFCL's `standardize_string`); all else as it is."""
    return UNCOUNTED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value


def _shorten_value(value: object) -> str:
    """What a model wrote, short: an integer can be too long for `str`, and a list too deep."""
    if isinstance(value, str):
        return repr(value[:MOST_SHOWN])
    return repr(value) if value is None or isinstance(value, bool | float) else f"another {type(value).__name__}"
