"""The questions of a report as its page has them: what flipped with both answers, and every question in a list."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from vllm_qualify.recipe.gates import label_of
from vllm_qualify.report import words
from vllm_qualify.report.flips import Excerpt, Flip, Pieces, mark_differences
from vllm_qualify.report.questions import ScoredQuestions, Way

# The normal distribution's quantile of 97.5 %.
Z_95 = 1.959964
EMPTY = "empty"
NOT_KEPT = "its words are not in this run's evidence"
NOT_MARKED = "What differs is not marked: the two answers have too little in common, or are too long."


@dataclass(frozen=True)
class TextBlock:
    """A text in pieces, each with whether it is marked. Without pieces, `note` says why; else it says what is left out."""

    name: str
    pieces: Pieces
    note: str = ""


AnswerBlock = tuple[TextBlock, TextBlock | None]
"""One side's answer, and what was thought before it, if anything was."""


@dataclass(frozen=True)
class FlipBlock:
    """One flipped question. `anchor` names it in an address."""

    number: int
    anchor: str
    way: Way
    marks: str
    scores: str
    asked: list[TextBlock]
    theirs: AnswerBlock
    ours: AnswerBlock
    note: str


@dataclass(frozen=True)
class QuestionRow:
    """One question in the list. `anchor` names it in an address; `leads_to` is the address of its words, if there are any."""

    number: int
    anchor: str
    leads_to: str
    way: str
    marks: str
    ours: str
    theirs: str


@dataclass(frozen=True)
class TopicRow:
    """The questions of a topic that both sides answered. The difference is what was gained less what was lost."""

    topic: str
    questions: int
    lost: int
    gained: int
    difference: str
    interval: str


@dataclass(frozen=True)
class QuestionsSection:
    title: str
    scored: ScoredQuestions
    flips: list[FlipBlock]
    rows: list[QuestionRow]
    topics: list[TopicRow]


def questions_sections(tasks: Sequence[ScoredQuestions], more: str = "") -> list[QuestionsSection]:
    """Each task's questions, by filter; `more` is the address of a page with the words of more of them, if there is one."""
    sections, seen = [], set[str]()
    for scored in tasks:
        name = f"{scored.task}-{scored.filter}" if scored.task in seen else scored.task
        sections.append(_make_section(scored, name, more))
        seen.add(scored.task)
    return sections


def _make_section(scored: ScoredQuestions, name: str, more: str) -> QuestionsSection:
    ways = scored.ways
    unknown = [None] * len(scored.numbers)
    scores = dict(zip(scored.numbers, zip(scored.ours, scored.theirs or unknown, strict=True), strict=True))
    about = dict(zip(scored.numbers, scored.about or unknown, strict=True))
    cut = frozenset(scored.cut or ())
    # What names a question in the page's address, such as `question-gsm8k-41`.
    anchors = {number: f"question-{quote(name, safe='')}-{number}" for number in scored.numbers}
    # The classes by which a question can be chosen: its topic, and whether an answer was cut.
    topics = {number: "" if place is None else f"t{place}" for number, place in about.items()}
    marks = {number: f"{topics[number]} {'cut' if number in cut else ''}".strip() for number in scored.numbers}
    flips = [
        _flip_block(flip, way, anchors[flip.question], marks[flip.question], scores[flip.question])
        for flip in scored.flips
        if (way := ways.get(flip.question))
    ]
    shown = {flip.number for flip in flips}

    def leads_to(number: int) -> str:
        elsewhere = bool(more and ways[number] and number not in shown)
        return f"{more if elsewhere else ''}#{anchors[number]}" if elsewhere or number in shown else ""

    return QuestionsSection(
        title=label_of(scored.metric, scored.task, scored.filter, against_baseline=False),
        scored=scored,
        flips=flips,
        rows=[
            QuestionRow(
                number=number,
                anchor="" if number in shown else anchors[number],
                leads_to=leads_to(number),
                way=ways[number] or "",
                marks=marks[number],
                ours=_score_words(scores[number][0]),
                theirs=_score_words(scores[number][1]),
            )
            for number in scored.numbers
        ],
        topics=topic_rows(scored),
    )


def topic_rows(scored: ScoredQuestions) -> list[TopicRow]:
    """A row for each topic with a question that both sides answered; none if questions were left out or nothing is compared."""
    if not scored.theirs or scored.asked != len(scored.numbers):
        return []
    ways = scored.ways
    flips: dict[int, list[Way | None]] = {}
    for number, ours, theirs, place in zip(scored.numbers, scored.ours, scored.theirs, scored.about, strict=False):
        if place is not None and ours is not None and theirs is not None:
            flips.setdefault(place, []).append(ways[number])
    rows = []
    for place, of_topic in sorted(flips.items()):
        count, lost, gained = len(of_topic), of_topic.count("lost"), of_topic.count("gained")
        shares = ((gained - lost) / count, *difference_interval(lost, gained, count))
        difference, lower, upper = (f"{100 * share:+.1f}" for share in shares)
        rows.append(TopicRow(scored.topics[place], count, lost, gained, f"{difference} pp", f"{lower} to {upper} pp"))
    return rows


def difference_interval(lost: int, gained: int, questions: int) -> tuple[float, float]:
    """Bounds of the difference of two shares over the same questions, at 95 %: what was gained less what was lost.

    Wald's bounds with half a question added to each of the four cases (Agresti & Min 2005, "Simple improved confidence
    intervals for comparing matched proportions", Statistics in Medicine 24).
    """
    worse, better, count = lost + 0.5, gained + 0.5, questions + 2
    middle = (better - worse) / count
    error = Z_95 * math.sqrt(worse + better - (better - worse) ** 2 / count) / count
    return max(-1.0, middle - error), min(1.0, middle + error)


def _flip_block(flip: Flip, way: Way, anchor: str, marks: str, scores: tuple[float | None, float | None]) -> FlipBlock:
    ours, theirs = map(_score_words, scores)
    marked = mark_differences(flip.theirs.text, flip.ours.text) if flip.theirs and flip.ours else None
    before, now = marked or (None, None)
    is_noise = bool(marked is None and flip.theirs and flip.ours and flip.theirs.text and flip.ours.text)
    return FlipBlock(
        number=flip.question,
        anchor=anchor,
        way=way,
        marks=marks,
        scores=f"{theirs} at the baseline, {ours} here",
        asked=[_text_block("Question", flip.asked), _text_block("Expected", flip.target)],
        theirs=_answer_block(f"Baseline: {theirs}", flip.theirs, flip.their_thinking, before),
        ours=_answer_block(f"This run: {ours}", flip.ours, flip.our_thinking, now),
        note=NOT_MARKED if is_noise else "",
    )


def _answer_block(name: str, answer: Excerpt | None, thinking: Excerpt | None, pieces: Pieces | None) -> AnswerBlock:
    return _text_block(name, answer, pieces), _text_block("Thinking", thinking) if thinking else None


def _text_block(name: str, excerpt: Excerpt | None, pieces: Pieces | None = None) -> TextBlock:
    if excerpt is None:
        return TextBlock(name, [], NOT_KEPT)
    if not excerpt.text:
        return TextBlock(name, [], EMPTY)
    note = f"{excerpt.cut:,} more characters were cut" if excerpt.cut else ""
    return TextBlock(name, pieces or [(excerpt.text, False)], note)


def _score_words(score: float | None) -> str:
    if score is None:
        return "unanswered"
    return {1.0: "right", 0.0: "wrong"}.get(score) or words.share(score)
