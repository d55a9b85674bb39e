"""Traces from files of conversations: lengths alone get into them, by a tokenizer, and no text.

A file is a JSON list, or JSON lines. Each entry has `conversations`, as in ShareGPT's files, a list of `from` and `value`, or
`messages`, as in chats with OpenAI's API, a list of `role` and `content`. A file is hostile until it was read.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.recipe.traces.making import Made
from vllm_qualify.recipe.traces.reading import MOST_BYTES, MOST_REQUESTS, MOST_TOK

MODEL = {"gpt", "assistant", "chatgpt", "model", "bing", "bard"}
SYSTEM = {"system", "developer"}
OTHERS = {"human", "user", "tool", "function", "observation"}
FORM = 'each entry is {"conversations": [{"from": …, "value": …}, …]} or {"messages": [{"role": …, "content": …}, …]}'

# JSON allows a half of a surrogate pair, and UTF-8 has none.
HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")
CountTokens = Callable[[Sequence[str]], list[int]]


class Message(NamedTuple):
    role: str
    text: str


class Pace(NamedTuple):
    """How many conversations begin per second, at random times, and the seconds from one turn of a conversation to the next."""

    rate_chat_s: float
    apart_s: float
    seed: int = 0


def make_chats(file: Path, count: CountTokens, pace: Pace, most: int | None = None) -> Made:
    """Make a trace of the first `most` conversations of a file. Each reply of the model in it is a request.

    A prompt is all that was said before. Its tokens are those of the texts, without a template's. Conversations whose system
    prompt is the same share that. Raises HostError or CallerError as `read_trace` does.
    """
    entries = enumerate(_read_entries(file), start=1)
    chats = [list(_parse_messages(file, number, entry)) for number, entry in entries][:most]
    lengths = iter(count([message.text for chat in chats for message in chat]))
    drawn, systems, began_s, lines, silent = random.Random(pace.seed), dict[str, int](), 0.0, list[dict[str, Any]](), 0
    for number, chat in enumerate(chats, start=1):
        toks = [next(lengths) for _ in chat]
        system = systems.setdefault(chat[0].text, len(systems)) if chat and chat[0].role in SYSTEM else None
        turns = list(_find_turns(chat, toks))
        silent += not turns
        for turn, (prompt_tok, reply_tok) in enumerate(turns):
            if (longest := max(prompt_tok, reply_tok)) > MOST_TOK:
                _refuse_entry(file, number, f"it has {longest:,} tokens", f"leave out those of over {MOST_TOK:,}")
            prefix = [[f"chat-{number}", prompt_tok]]
            if system is not None and toks[0]:
                prefix = [[f"system-{system}", toks[0]], *([[f"chat-{number}", prompt_tok - toks[0]]] * (prompt_tok > toks[0]))]
            arrival_s = round(began_s + turn * pace.apart_s, 6)
            lines.append({"arrival_s": arrival_s, "input_tok": prompt_tok, "output_tok": reply_tok, "prefix": prefix})
        began_s += drawn.expovariate(pace.rate_chat_s)
    if not lines:
        raise CallerError("no conversation has a reply of the model", f"give conversations: {FORM}", str(file))
    if len(lines) > MOST_REQUESTS:
        remedy = f"take fewer conversations: {MOST_REQUESTS:,} turns at most"
        raise CallerError(f"it has {len(lines):,} turns", remedy, str(file))
    lines.sort(key=lambda line: float(line["arrival_s"]))
    return Made("".join(f"{json.dumps(line)}\n" for line in lines), len(lines), silent)


def _find_turns(chat: Sequence[Message], toks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The tokens of prompt and reply of each reply in a conversation that has both."""
    for message, reply_tok, so_far in zip(chat, toks, accumulate(toks), strict=True):
        if message.role in MODEL and reply_tok and so_far > reply_tok:
            yield so_far - reply_tok, reply_tok


def _read_entries(file: Path) -> list[Any]:
    remedy = "restore the file, or mend its path"
    try:
        if not file.is_file():
            raise HostError(f"no conversations at {file}", remedy, "check")
        if file.stat().st_size > MOST_BYTES:
            raise CallerError(f"it has more than {MOST_BYTES:,} bytes", "cut the file", str(file))
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        unpack = "save the file as UTF-8; unpack it first if it is compressed"
        raise CallerError("it is not UTF-8", unpack, str(file)) from error
    except OSError as error:
        raise HostError(f"no conversations at {file}: {error.strerror}", remedy, "check") from error
    if text.lstrip().startswith("["):
        entries = _parse_json(file, "it", text)
        return entries if isinstance(entries, list) else []
    # Split at line feeds alone: a text may have other characters that end a line.
    lines = enumerate(text.split("\n"), start=1)
    return [_parse_json(file, f"line {number}", line) for number, line in lines if line.strip()]


def _parse_json(file: Path, what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CallerError(f"{what} is no JSON", f"give a JSON list, or JSON lines: {FORM}", str(file)) from error


def _parse_messages(file: Path, number: int, entry: Any) -> Iterator[Message]:
    forms = (("conversations", "from", "value"), ("messages", "role", "content"))
    form = next((form for form in forms if isinstance(entry, dict) and form[0] in entry), None)
    if form is None:
        _refuse_entry(file, number, "it is no conversation", FORM)
    key, role_key, text_key = form
    if not isinstance(entry[key], list):
        _refuse_entry(file, number, f"its {key} are no list", FORM)
    for at, message in enumerate(entry[key], start=1):
        role, text = (message.get(name) if isinstance(message, dict) else None for name in (role_key, text_key))
        if not isinstance(role, str) or role not in MODEL | SYSTEM | OTHERS:
            known = ", ".join(sorted(MODEL | SYSTEM | OTHERS))
            _refuse_entry(file, number, f"nobody known says message {at}", f"{role_key} is one of {known}")
        # A call of a tool has no content.
        if not isinstance(text, str | None) or HALF_OF_A_PAIR.search(text or ""):
            _refuse_entry(file, number, f"message {at} is no text", f"give {text_key} as text, without pictures or sounds")
        yield Message(role, text or "")


def _refuse_entry(file: Path, number: int, problem: str, remedy: str) -> NoReturn:
    raise CallerError(f"entry {number}: {problem}", remedy, str(file))
