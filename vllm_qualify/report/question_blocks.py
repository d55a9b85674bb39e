"""The questions of a report as its page has them: what flipped with both answers, and every question in a list."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from vllm_qualify.recipe.gates import label_of
from vllm_qualify.report import words
from vllm_qualify.report.questions import Excerpt, Flip, ScoredQuestions, Way
from vllm_qualify.report.replies import Pieces, difference

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


@dataclass(frozen=True)
class AnswerBlock:
    """One side's answer, and what was thought before it, if anything was."""

    answer: TextBlock
    thinking: TextBlock | None


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
    """A task's questions. `left_out` and `unshown` say how many questions and how many flips are not on the page."""

    title: str
    scored: ScoredQuestions
    flips: list[FlipBlock]
    rows: list[QuestionRow]
    topics: list[TopicRow]
    unshown: int
    left_out: int


def questions_sections(tasks: Sequence[ScoredQuestions], more: str = "") -> list[QuestionsSection]:
    """Each task's questions, by filter. Addresses name the first filter's questions by the task alone.

    `more` is the address of a page with the words of more questions, if there is one.
    """
    named: dict[str, ScoredQuestions] = {}
    for scored in tasks:
        named.setdefault(scored.task, scored)
    names = [scored.task if named[scored.task] is scored else f"{scored.task}-{scored.filter}" for scored in tasks]
    return [_section(scored, name, more) for scored, name in zip(tasks, names, strict=True)]


def anchor_of(name: str, number: int) -> str:
    """What names a question in the page's address, such as `question-gsm8k-41`."""
    return f"question-{quote(name, safe='')}-{number}"


def topic_class(place: int | None) -> str:
    """What a question's element is marked with, so that a topic can be chosen."""
    return "" if place is None else f"t{place}"


def _marks(number: int, place: int | None, cut: frozenset[int]) -> str:
    """The classes by which a question can be chosen."""
    return " ".join(filter(None, (topic_class(place), "cut" if number in cut else "")))


def _section(scored: ScoredQuestions, name: str, more: str) -> QuestionsSection:
    ways = scored.ways
    theirs = scored.theirs or [None] * len(scored.ours)
    scores = dict(zip(scored.numbers, zip(scored.ours, theirs, strict=True), strict=True))
    about = dict(zip(scored.numbers, scored.about or [None] * len(scored.numbers), strict=True))
    cut = frozenset(scored.cut or ())
    flips = [
        _flip(
            flip, way, anchor_of(name, flip.question), _marks(flip.question, about[flip.question], cut), scores[flip.question]
        )
        for flip in scored.flips
        if (way := ways.get(flip.question))
    ]
    shown = {flip.number for flip in flips}

    def leads_to(number: int) -> str:
        elsewhere = bool(more and ways[number] and number not in shown)
        return f"{more if elsewhere else ''}#{anchor_of(name, number)}" if elsewhere or number in shown else ""

    return QuestionsSection(
        title=label_of(scored.metric, scored.task, scored.filter, against_baseline=False),
        scored=scored,
        flips=flips,
        rows=[
            QuestionRow(
                number=number,
                anchor="" if number in shown else anchor_of(name, number),
                leads_to=leads_to(number),
                way=ways[number] or "",
                marks=_marks(number, about[number], cut),
                ours=_score(scores[number][0]),
                theirs=_score(scores[number][1]),
            )
            for number in scored.numbers
        ],
        topics=topic_rows(scored),
        unshown=scored.flipped - len(scored.flips),
        left_out=scored.asked - len(scored.numbers),
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
    return [_topic_row(topic, flips[place]) for place, topic in enumerate(scored.topics) if place in flips]


def _topic_row(topic: str, ways: Sequence[Way | None]) -> TopicRow:
    lost, gained = ways.count("lost"), ways.count("gained")
    lower, upper = difference_interval(lost, gained, len(ways))
    points = [f"{100 * share:+.1f}" for share in ((gained - lost) / len(ways), lower, upper)]
    return TopicRow(topic, len(ways), lost, gained, f"{points[0]} pp", f"{points[1]} to {points[2]} pp")


def difference_interval(lost: int, gained: int, questions: int) -> tuple[float, float]:
    """Bounds of the difference of two shares over the same questions, at 95 %: what was gained less what was lost.

    Wald's bounds with half a question added to each of the four cases (Agresti & Min 2005, "Simple improved confidence
    intervals for comparing matched proportions", Statistics in Medicine 24).
    """
    worse, better, count = lost + 0.5, gained + 0.5, questions + 2
    middle = (better - worse) / count
    error = Z_95 * math.sqrt(worse + better - (better - worse) ** 2 / count) / count
    return max(-1.0, middle - error), min(1.0, middle + error)


def _flip(flip: Flip, way: Way, anchor: str, marks: str, scores: tuple[float | None, float | None]) -> FlipBlock:
    ours, theirs = map(_score, scores)
    marked = difference(flip.theirs.text, flip.ours.text) if flip.theirs and flip.ours else None
    before, now = marked or (None, None)
    is_noise = bool(marked is None and flip.theirs and flip.ours and flip.theirs.text and flip.ours.text)
    return FlipBlock(
        number=flip.question,
        anchor=anchor,
        way=way,
        marks=marks,
        scores=f"{theirs} at the baseline, {ours} here",
        asked=[_text("Question", flip.asked), _text("Expected", flip.target)],
        theirs=_answer(f"Baseline: {theirs}", flip.theirs, flip.their_thinking, before),
        ours=_answer(f"This run: {ours}", flip.ours, flip.our_thinking, now),
        note=NOT_MARKED if is_noise else "",
    )


def _answer(name: str, answer: Excerpt | None, thinking: Excerpt | None, pieces: Pieces | None) -> AnswerBlock:
    thought = _text("Thinking", thinking) if thinking else None
    return AnswerBlock(_text(name, answer, pieces), thought)


def _text(name: str, excerpt: Excerpt | None, pieces: Pieces | None = None) -> TextBlock:
    if excerpt is None:
        return TextBlock(name, [], NOT_KEPT)
    if not excerpt.text:
        return TextBlock(name, [], EMPTY)
    note = f"{excerpt.cut:,} more characters were cut" if excerpt.cut else ""
    return TextBlock(name, pieces or [(excerpt.text, False)], note)


def _score(score: float | None) -> str:
    if score is None:
        return "unanswered"
    return {1.0: "right", 0.0: "wrong"}.get(score) or words.share(score)
