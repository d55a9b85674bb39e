"""What a chat template says of its model: the texts that it was trained to write, with a call of a tool and with thoughts.

The template is rendered once with an answer and once without one (`make_conversations`); the difference is what the model
writes. What a parser of an engine makes of that text, the engine itself says (`vllm_qualify.drift.parsers`).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

QUESTION, ANSWER = "How warm will it be in Oslo?", "It will be mild there."
THOUGHT = "Oslo is asked for, so its weather is wanted."
NAME, ARGUMENTS = "lookup_weather", {"city": "Oslo", "days": 3}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name"},
                    "days": {"type": "integer", "description": "how many"},
                },
                "required": ["city", "days"],
            },
        },
    }
]
# Mistral's templates want nine letters and digits, and Kimi's show the id in place of the name.
IDS = ("call00001", f"functions.{NAME}:0")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
_TAG = re.compile(r"[<\[](?P<close>/?)(?P<name>(?:\w+:)?[\w|]*think[\w|]*)[>\]]", re.IGNORECASE)
# The end of a text that is a part of markup.
_BEGUN = re.compile(r"[<\[][^<>\[\]\s]*$")

Message = dict[str, Any]


class Conversation(NamedTuple):
    """What is rendered: `template` is its name, and the last turn may be left for the model to write."""

    template: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    asks: bool


class Told(NamedTuple):
    """What the template says. `calls` and `thoughts` are texts that the model was trained to write, the likeliest first.

    `as_text` says that calls are rendered only of arguments as text, and vLLM gives a mapping. `closed` says that the template
    closes the thoughts before the reply, unless a request asks for them, and `hides_tools` that no prompt shows the tools.
    """

    calls: list[str]
    thoughts: list[str]
    as_text: bool = False
    closed: bool = False
    hides_tools: bool = False
    fails: str = ""


class _Form(NamedTuple):
    """How a conversation is written: contents as text or as parts, and of a call the arguments and the id."""

    in_parts: bool
    as_text: bool
    call_id: str


_PLAIN = _Form(False, False, IDS[0])
_FORMS = [_Form(in_parts, as_text, call_id) for as_text in (False, True) for call_id in IDS for in_parts in (False, True)]


def make_conversations(templates: Mapping[str, str]) -> dict[str, Conversation]:
    """All that is to be rendered, by its key."""
    tool_template = "tool_use" if "tool_use" in templates else "default"
    made: dict[str, Conversation] = {}
    for form in (_PLAIN, _PLAIN._replace(in_parts=True)):
        question = [_user(form)]
        answer = [*question, _assistant(form, ANSWER)]
        made[_key("asked", form)] = Conversation("default", question, None, True)
        made[_key("question", form)] = Conversation("default", question, None, False)
        made[_key("answer", form)] = Conversation("default", answer, None, False)
        thinking = [*question, _assistant(form, ANSWER) | dict.fromkeys(THOUGHT_KEYS, THOUGHT)]
        made[_key("thought", form)] = Conversation("default", thinking, None, False)
        made[_key("asked with tools", form)] = Conversation(tool_template, question, TOOLS, True)
        made[_key("question with tools", form)] = Conversation(tool_template, question, TOOLS, False)
        made[_key("answer with tools", form)] = Conversation(tool_template, answer, TOOLS, False)
    for form in _FORMS:
        made[_key("call", form)] = Conversation(tool_template, [_user(form), _calling(form)], TOOLS, False)
    return made


def _key(what: str, form: _Form) -> str:
    return " ".join(
        [what, "parts" if form.in_parts else "text", *([str(form.as_text), form.call_id] if what == "call" else [])]
    )


def _user(form: _Form) -> Message:
    return {"role": "user", "content": _content(form, QUESTION)}


def _assistant(form: _Form, text: str) -> Message:
    return {"role": "assistant", "content": _content(form, text)}


def _calling(form: _Form) -> Message:
    arguments: object = json.dumps(ARGUMENTS) if form.as_text else ARGUMENTS
    call = {"id": form.call_id, "type": "function", "function": {"name": NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _content(form: _Form, text: str) -> object:
    return [{"type": "text", "text": text}] if form.in_parts else text


# --- what was rendered


def read_template(source: str, rendered: Mapping[str, str | None], errors: Mapping[str, str], ends: Sequence[str]) -> Told:
    """What the rendered conversations tell. `errors` has why others could not be; `ends` are texts that end a turn."""
    form = next((form for form in (_PLAIN, _PLAIN._replace(in_parts=True)) if _shows_question(rendered, form)), None)
    if form is None:
        return Told([], [], fails=errors.get(_key("asked", _PLAIN), "the question is not in the text that it makes"))
    pieces = _Pieces(rendered, form, ends)
    thoughts, closed = _read_thoughts(source, pieces)
    calls = list(_read_calls(pieces))
    return Told(
        calls=list(dict.fromkeys(text for text, _ in calls)),
        thoughts=thoughts,
        as_text=bool(calls) and all(as_text for _, as_text in calls),
        closed=closed,
        hides_tools=NAME not in pieces.text("asked with tools"),
    )


def _shows_question(rendered: Mapping[str, str | None], form: _Form) -> bool:
    return all(QUESTION in (rendered.get(_key(what, form)) or "") for what in ("asked", "question", "answer"))


class _Pieces:
    """The rendered texts of one form."""

    def __init__(self, rendered: Mapping[str, str | None], form: _Form, ends: Sequence[str]) -> None:
        self.rendered, self.form, self.ends = rendered, form, ends

    def text(self, what: str) -> str:
        return self.rendered.get(_key(what, self.form)) or ""

    def prompt_end(self, what: str = "") -> str:
        """What stands after the question where the model is to write: the begin of its turn."""
        asked, question = self.text(f"asked{what}"), self.text(f"question{what}")
        return asked.removeprefix(question) if asked.startswith(question) else asked.rpartition(QUESTION)[2]

    def reply_in(self, whole: str, what: str = "") -> str:
        """What of a rendered conversation the model writes: all that follows the begin of its turn, without the turn's end."""
        asked, question = self.text(f"asked{what}"), self.text(f"question{what}")
        if whole.startswith(asked):
            written = whole[len(asked) :]
        else:
            begin = question if whole.startswith(question) else _common_begin(question, whole)
            rest, prompted = whole[len(begin) :], asked[len(begin) :] if asked.startswith(begin) else ""
            written = rest[len(_common_begin(rest, prompted)) :]
        return self._without_end(written, what)

    def _without_end(self, written: str, what: str) -> str:
        plain = self.text(f"answer{what}").rpartition(ANSWER)[2]
        if plain.strip() and written.endswith(plain):
            written = written.removesuffix(plain)
        written = written.rstrip()
        end = next((end for end in self.ends if end and written.endswith(end)), "")
        return written.removesuffix(end) if end else written


def _common_begin(one: str, other: str) -> str:
    """The begin that both texts have, up to the last whole piece of markup."""
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return _BEGUN.sub("", one[:length])


# --- calls


def _read_calls(pieces: _Pieces) -> Iterator[tuple[str, bool]]:
    """The texts of a call in each form in which it is rendered, and whether its arguments had to be text."""
    for form in _FORMS:
        whole = pieces.rendered.get(_key("call", form)) if form.in_parts == pieces.form.in_parts else None
        if not whole or NAME not in (written := pieces.reply_in(whole, " with tools")):
            continue
        # The city is in the question, too, but not in what the model writes.
        if str(ARGUMENTS["city"]) not in written:
            continue
        for tag in reversed(list(_TAG.finditer(written))):
            # A reasoning parser takes the thoughts away before.
            if tag["close"]:
                written = written[tag.end() :]
                break
        yield written, form.as_text


# --- thoughts


def _read_thoughts(source: str, pieces: _Pieces) -> tuple[list[str], bool]:
    """The texts with thoughts that a model was trained to write, and whether the template closes them before the reply."""
    begin = pieces.prompt_end()
    tags = list(_TAG.finditer(begin))
    if tags and tags[-1]["close"]:
        return [], True
    rendered = pieces.reply_in(pieces.text("thought"))
    if THOUGHT in rendered and ANSWER in rendered.partition(THOUGHT)[2]:
        return [rendered], False
    answer = f"<answer>\n{ANSWER}\n</answer>" if "</answer>" in source else ANSWER
    if tags:
        # The prompt has opened them already.
        return [f"{THOUGHT}\n{tags[-1][0][0]}/{tags[-1][0][1:]}\n\n{answer}"], False
    # A template that cuts thoughts out of earlier turns names their tags.
    closes = [tag[0] for tag in _TAG.finditer(source) if tag["close"]]
    if closes:
        return [f"{closes[0].replace('/', '', 1)}\n{THOUGHT}\n{closes[0]}\n{answer}"], False
    return [], False
