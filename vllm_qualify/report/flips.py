"""The words of questions that flipped, read from lm-eval's samples: the question, and what each side answered and thought."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import escape

from vllm_qualify.evidence.accuracy.answers import Answer
from vllm_qualify.evidence.accuracy.pictures import NAMED
from vllm_qualify.evidence.accuracy.thinking import read_replies
from vllm_qualify.recipe.values import CountOrZero, Frozen
from vllm_qualify.secrets import plain

# The fields of a document that are its question: ChartQA has `query`.
ASKED = ("question", "query")
# A question counts as right if more than this share of its answers was right.
HALF = 0.5
# Qwen, DeepSeek and others write their thinking before `</think>`; a chat template may have written the opening tag.
OPENS, CLOSES = "<think>", "</think>"
# Words, white space and single other characters.
TOKEN = re.compile(r"\w+|\s+|[^\w\s]")
# Of texts that are less alike, the marks would be noise. It is SequenceMatcher's ratio, and the limit is our choice.
LEAST_ALIKE = 0.3
# Comparing takes quadratic time: at this length some milliseconds, whatever the texts are.
MOST_TOKENS = 1200

Pieces = list[tuple[str, bool]]
"""A text in pieces, each with whether it differs from the other text."""


class Excerpt(Frozen):
    """Outside text, and how many characters were cut. A prompt keeps its end, other text its beginning."""

    text: str
    cut: CountOrZero = 0


class Flip(Frozen):
    """A question that was right at the baseline and is wrong here, or the reverse. A text that is not available is None."""

    question: CountOrZero
    asked: Excerpt | None
    target: Excerpt | None
    theirs: Excerpt | None
    """the baseline's answer, without what the model thought before"""
    ours: Excerpt | None
    their_thinking: Excerpt | None = None
    our_thinking: Excerpt | None = None

    @property
    def texts(self) -> list[Excerpt]:
        texts = (self.asked, self.target, self.theirs, self.ours, self.their_thinking, self.our_thinking)
        return [each for each in texts if each]

    @property
    def bytes(self) -> int:
        """The size of its text as written on a page."""
        return sum(len(escape(plain(each.text)).encode(errors="replace")) for each in self.texts)


class FirstReply(Frozen):
    """What the model replied to one of the first questions, as it came: with what it thought, and whatever else it wrote."""

    question: CountOrZero
    said: Excerpt


def is_right(score: float) -> bool:
    return score > HALF


def keep_within(flips: Sequence[Flip], most_bytes: int) -> list[Flip]:
    """The first flips, whose texts have at most so many bytes."""
    taken = accumulate(flip.bytes for flip in flips)
    return [flip for flip, so_far in zip(flips, taken, strict=True) if so_far <= most_bytes]


class Side(NamedTuple):
    """The answers of one side, and the folder of the lm-eval files that contain them."""

    folder: Path
    answers: dict[int, list[Answer]]
    means: dict[int, float]
    """the mean score of each question"""

    def find_replies(self, numbers: Sequence[int], name: str) -> dict[int, "_Said"]:
        """What it replied to these questions, by the score `name`."""
        shown = {number: self.telling(number, name) for number in numbers}
        rows, thoughts = _read_rows(map(self.place, shown.values())), self.thoughts(list(shown.values()))
        return {number: _Said(rows.get(self.place(answer)), thoughts.get(answer.traced_to)) for number, answer in shown.items()}

    def telling(self, number: int, name: str) -> Answer:
        """The first answer with the same result as the question; one whose text is available, if there is one."""
        right = is_right(self.means[number])
        alike = [each for each in self.answers[number] if is_right(each.score(name)) == right]
        return next((each for each in alike if self.place(each)[0].is_file()), alike[0])

    def thoughts(self, shown: Sequence[Answer]) -> dict[str, str]:
        """What was thought before these answers, apart from them, by where they are from."""
        wanted = {(answer.step, answer.prompt_hash): answer.traced_to for answer in shown}
        return {
            wanted[step, reply.prompt_hash]: reply.thinking
            for step in {step for step, _ in wanted}
            for reply in read_replies(self.folder / step)
            if reply.thinking and (step, reply.prompt_hash) in wanted
        }

    def place(self, answer: Answer) -> tuple[Path, int]:
        path, _, line = answer.traced_to.rpartition(":")
        return self.folder / path, int(line)


def read_flips(numbers: Sequence[int], ours: Side, theirs: Side, name: str, most: int) -> list[Flip]:
    """The flips of these questions, by the score `name`. Each text has at most `most` characters."""
    here, there = ours.find_replies(numbers, name), theirs.find_replies(numbers, name)
    return [_make_flip(number, here[number], there[number], most) for number in numbers]


def read_first_replies(numbers: Sequence[int], ours: Side, name: str, most: int) -> list[FirstReply]:
    """The replies to these questions. Each has at most `most` characters; a reply whose text is not kept is left out."""
    said = ours.find_replies(numbers, name)
    texts = {number: _reply_text(each.row) for number, each in said.items() if each.row}
    return [FirstReply(question=number, said=_beginning(text, most)) for number, text in texts.items()]


def _read_rows(places: Iterable[tuple[Path, int]]) -> dict[tuple[Path, int], dict[str, Any]]:
    """lm-eval's rows at these lines. Each file is read once; missing files are left out."""
    wanted: dict[Path, set[int]] = defaultdict(set)
    for path, line in places:
        wanted[path].add(line)
    rows: dict[tuple[Path, int], dict[str, Any]] = {}
    for path, lines in wanted.items():
        if path.is_file():
            # Only `\n` ends a line of lm-eval: a reply can contain other line ends.
            with path.open(encoding="utf-8", newline="\n") as file:
                rows |= {(path, number): json.loads(text) for number, text in enumerate(file, start=1) if number in lines}
    return rows


class _Said(NamedTuple):
    """One side's answer to a question: lm-eval's row, and what was thought apart from it."""

    row: dict[str, Any] | None
    thought: str | None

    def excerpts(self, most: int) -> tuple[Excerpt | None, Excerpt | None]:
        """What was thought, and the answer."""
        if self.row is None:
            return None, None
        thinking, answer = split_thinking(_reply_text(self.row))
        thoughts = [each for each in (self.thought, thinking) if each is not None]
        return _beginning("\n\n".join(thoughts), most) if thoughts else None, _beginning(answer, most)


def _make_flip(number: int, ours: _Said, theirs: _Said, most: int) -> Flip:
    row = ours.row or theirs.row
    their_thinking, their_answer = theirs.excerpts(most)
    our_thinking, our_answer = ours.excerpts(most)
    return Flip(
        question=number,
        asked=excerpt_question(row, most) if row else None,
        target=_beginning(_as_text(row.get("target")), most) if row else None,
        theirs=their_answer,
        ours=our_answer,
        their_thinking=their_thinking,
        our_thinking=our_thinking,
    )


def excerpt_question(row: dict[str, Any], most: int) -> Excerpt:
    """The question alone, with the names of its pictures, if the task has it; else the prompt's end, after the examples."""
    document = row.get("doc")
    fields = document if isinstance(document, dict) else {}
    question = next((fields[name] for name in ASKED if isinstance(fields.get(name), str)), None)
    if question is not None:
        pictures = [value for value in fields.values() if isinstance(value, str) and value.startswith(NAMED)]
        return _beginning("\n".join([*pictures, question]), most)
    prompt = _as_text(row["arguments"]["gen_args_0"]["arg_0"])
    return _make_excerpt(prompt[-most:], prompt)


def _reply_text(row: dict[str, Any]) -> str:
    """The reply. If likelihoods were compared, lm-eval's result."""
    replies = [reply for replies in row["resps"] for reply in replies]
    if all(reply is None or isinstance(reply, str) for reply in replies):
        return "\n\n".join(reply or "" for reply in replies)
    return _as_text(row["filtered_resps"])


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _beginning(text: str, most: int) -> Excerpt:
    return _make_excerpt(text[:most], text)


def _make_excerpt(part: str, whole: str) -> Excerpt:
    """The excerpt. Half of a surrogate pair, which JSON cannot contain, is escaped."""
    return Excerpt(text=part.encode(errors="backslashreplace").decode(), cut=len(whole) - len(part))


def split_thinking(text: str) -> tuple[str | None, str]:
    """The thinking of a reply, None if it has none, and its answer. Thinking that does not end has no answer."""
    before, closes, after = text.rpartition(CLOSES)
    if closes:
        return before.strip().removeprefix(OPENS).strip(), after.strip()
    opened = text.lstrip()
    if opened.startswith(OPENS):
        return opened.removeprefix(OPENS).strip(), ""
    return None, text


def mark_differences(theirs: str, ours: str) -> tuple[Pieces, Pieces] | None:
    """Both texts in pieces; None if they are too different or too long to mark what differs. Equal texts differ nowhere."""
    before, now = TOKEN.findall(theirs), TOKEN.findall(ours)
    matcher = SequenceMatcher(None, before, now)
    if max(len(before), len(now)) > MOST_TOKENS or matcher.ratio() < LEAST_ALIKE:
        return None
    pieces: tuple[Pieces, Pieces] = [], []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        for side, tokens in zip(pieces, (before[i1:i2], now[j1:j2]), strict=True):
            if tokens:
                side.append(("".join(tokens), tag != "equal"))
    return pieces
