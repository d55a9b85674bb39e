"""The questions of a report as its page has them: what flipped with both answers, and every question in a list."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from vllm_qualify.recipe.gates import label_of
from vllm_qualify.report import words
from vllm_qualify.report.questions import Excerpt, Flip, ScoredQuestions, Way
from vllm_qualify.report.replies import Pieces, difference

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
    topic: str
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
    topic: str
    ours: str
    theirs: str


@dataclass(frozen=True)
class QuestionsSection:
    """A task's questions. `left_out` and `unshown` say how many questions and how many flips are not on the page."""

    title: str
    scored: ScoredQuestions
    flips: list[FlipBlock]
    rows: list[QuestionRow]
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


def _section(scored: ScoredQuestions, name: str, more: str) -> QuestionsSection:
    ways = scored.ways
    theirs = scored.theirs or [None] * len(scored.ours)
    scores = dict(zip(scored.numbers, zip(scored.ours, theirs, strict=True), strict=True))
    about = dict(zip(scored.numbers, scored.about or [None] * len(scored.numbers), strict=True))
    flips = [
        _flip(flip, way, anchor_of(name, flip.question), topic_class(about[flip.question]), scores[flip.question])
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
                topic=topic_class(about[number]),
                ours=_score(scores[number][0]),
                theirs=_score(scores[number][1]),
            )
            for number in scored.numbers
        ],
        unshown=scored.flipped - len(scored.flips),
        left_out=scored.asked - len(scored.numbers),
    )


def _flip(flip: Flip, way: Way, anchor: str, topic: str, scores: tuple[float | None, float | None]) -> FlipBlock:
    ours, theirs = map(_score, scores)
    marked = difference(flip.theirs.text, flip.ours.text) if flip.theirs and flip.ours else None
    before, now = marked or (None, None)
    is_noise = bool(marked is None and flip.theirs and flip.ours and flip.theirs.text and flip.ours.text)
    return FlipBlock(
        number=flip.question,
        anchor=anchor,
        way=way,
        topic=topic,
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
