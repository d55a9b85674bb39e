"""The real questions of GSM8K through the real lm-eval: what the server knows is what is measured, to the question."""

import random
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.builders.accuracy import ask_task, read_rows
from tests.fakes.openai_server import Book
from vllm_qualify.evidence.accuracy.answers import Answered
from vllm_qualify.evidence.accuracy.blocks import BLOCKS
from vllm_qualify.evidence.accuracy.measurements import parse_task
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
TEST, SHOTS = DATA / "test.jsonl", DATA / "train.jsonl"
QUESTIONS, RIGHT, ONLY_FLEXIBLE, CUT, LOST = 1319, 1000, 57, 13, 20

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(not TEST.is_file(), reason=f"the questions of GSM8K are not at {DATA}")]


class Measured(NamedTuple):
    measurements: dict[str | None, Measurement]
    answered: Answered
    prompts: dict[str, set[str]]


def measured(folder: Path, book: Book, *, sequential: bool, repetitions: int, asked: int) -> Measured:
    plan = TaskPlan(
        settings=Accuracy(num_questions=QUESTIONS, time_limit_s=120),
        num_concurrent=32,
        repetitions=repetitions,
        sequential=sequential,
        questions=[TEST, SHOTS],
    )
    answered, task = ask_task(plan, folder, book, asked)
    rows = parse_task(task, plan, Levels())
    prompts: dict[str, set[str]] = {}
    for prompt in book.prompts:
        prompts.setdefault(prompt.rpartition("Question: ")[2], set()).add(prompt)
    return Measured({each.filter or each.metric: each for each in rows}, answered, prompts)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return read_rows(TEST)


@pytest.fixture(scope="module")
def order(rows: list[dict[str, str]]) -> list[int]:
    return random.Random(0).sample(range(len(rows)), len(rows))


def replies_of(rows: list[dict[str, str]], order: list[int], right: int) -> dict[str, str]:
    """What a model says that knows so many answers by heart, and some others without saying them as asked."""
    answers = {row["question"]: " I do not know that." for row in rows}
    for place, number in enumerate(order):
        question, answer = rows[number]["question"], rows[number]["answer"]
        if place < right:
            answers[question] = f" {answer}"
        elif RIGHT <= place < RIGHT + ONLY_FLEXIBLE:
            answers[question] = f" So the answer is {answer.rpartition('#### ')[2]}"
    return answers


@pytest.fixture(scope="module")
def baseline(rows: list[dict[str, str]], order: list[int], tmp_path_factory: pytest.TempPathFactory) -> Measured:
    book = Book(replies_of(rows, order, RIGHT), cut=frozenset(row["question"] for row in rows[:CUT]))
    return measured(tmp_path_factory.mktemp("baseline"), book, sequential=True, repetitions=2, asked=2 * BLOCKS)


@pytest.fixture(scope="module")
def candidate(rows: list[dict[str, str]], order: list[int], tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """It forgot some answers, and is asked all at once."""
    book = Book(replies_of(rows, order, RIGHT - LOST))
    return measured(tmp_path_factory.mktemp("candidate"), book, sequential=False, repetitions=1, asked=1)


def test_the_scores_of_the_task_and_of_each_answer_are_what_the_server_knows(baseline: Measured, order: list[int]) -> None:
    right = {"strict-match": set(order[:RIGHT]), "flexible-extract": set(order[: RIGHT + ONLY_FLEXIBLE])}
    for name, questions in right.items():
        each = baseline.measurements[name]
        assert each.value == len(questions) / QUESTIONS
        assert (each.metric, each.task, each.sample_count) == ("exact_match", "gsm8k", QUESTIONS)
        assert each.interval is not None
        assert each.interval.lower < each.value < each.interval.upper
    assert len(baseline.answered.answers) == 2 * QUESTIONS
    for answer in baseline.answered.answers:
        assert answer.scores == {f"exact_match,{name}": answer.question in questions for name, questions in right.items()}
        assert not answer.unanswered


def test_a_loss_between_two_builds_is_just_that_of_their_questions(
    baseline: Measured, candidate: Measured, order: list[int]
) -> None:
    key = "exact_match,strict-match"
    before, after = (
        {answer.question: answer.scores[key] for answer in each.answered.answers} for each in (baseline, candidate)
    )
    lost = {question for question in before if before[question] != after[question]}
    assert lost == set(order[RIGHT - LOST : RIGHT])
    values = [each.measurements["strict-match"].value or 0 for each in (baseline, candidate)]
    assert values[0] - values[1] == pytest.approx(LOST / QUESTIONS, abs=1e-12)
    # Cut answers are counted by the server.
    cut = [each.measurements["truncated_answers"] for each in (baseline, candidate)]
    assert [(row.value, row.sample_count) for row in cut] == [(CUT / QUESTIONS, QUESTIONS), (0, QUESTIONS)]


def test_a_question_has_one_prompt_whatever_it_is_asked_with(baseline: Measured, candidate: Measured) -> None:
    """lm-eval draws each prompt's examples after those of the prompt before."""
    assert baseline.prompts == candidate.prompts
    assert len(baseline.prompts) == QUESTIONS
    assert {len(prompts) for prompts in baseline.prompts.values()} == {1}
    # Each has its own five examples, not all the same ones.
    assert len({prompt.rpartition("Question: ")[0] for (prompt,) in map(tuple, baseline.prompts.values())}) > QUESTIONS / 2
    hashes = [{answer.question: answer.prompt_hash for answer in each.answered.answers} for each in (baseline, candidate)]
    assert hashes[0] == hashes[1]
    assert baseline.answered.config_hash == candidate.answered.config_hash
