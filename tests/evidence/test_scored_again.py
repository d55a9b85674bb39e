"""Scores made again from the kept replies, by lm-eval's own filters and its exact match."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.builders.accuracy import CAPTURED, CAPTURED_PLAN, change_samples
from tests.lm_eval_files import hashed
from vllm_qualify.evidence.accuracy import lm_eval_internals as internals
from vllm_qualify.evidence.accuracy.lm_eval_internals import own_scoring
from vllm_qualify.evidence.accuracy.scored_again import can_be_scored_again, find_wrong_score

Row = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(CAPTURED, tmp_path / "accuracy" / "gsm8k")


def test_what_lm_eval_captured_is_scored_as_it_was() -> None:
    assert can_be_scored_again(CAPTURED, CAPTURED_PLAN)
    assert find_wrong_score(CAPTURED, CAPTURED_PLAN, 1) == ""


def test_a_task_of_the_recipes_own_folder_is_not_taken_for_lm_evals(tmp_path: Path) -> None:
    assert not can_be_scored_again(CAPTURED, CAPTURED_PLAN.model_copy(update={"folder": tmp_path}))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("gsm8k", True),
        ("gsm8k_cot", True),
        ("gsm8k_platinum", True),
        ("mmlu_pro_biology", True),
        ("ifeval", False),  # its own functions
        ("humaneval", False),  # it runs what the model wrote
        ("chartqa", False),  # its own scores
        ("mmlu_abstract_algebra", False),  # it compares likelihoods
        ("bfcl_simple", False),  # this project's function
        ("no_such_task", False),
    ],
)
def test_only_lm_evals_own_filters_and_exact_match_score_again(name: str, known: bool) -> None:
    assert (own_scoring(name) is not None) == known


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (1, {"exact_match": 0.0}, "the exact_match of question 11 by strict-match is 0.0 in {2}, and its reply gives 1.0"),
        (0, {"exact_match": 1.0}, "the exact_match of question 9 by strict-match is 1.0 in {1}, and its reply gives 0.0"),
        (3, {"resps": [["It is 105."]]}, "what flexible-extract found for question 11 is ['106'] in {4}, and its reply gives"),
        (1, {"target": "#### 7"}, "the target of question 11 is '#### 7' in {2}, and its document gives"),
        (1, {"filter": "generous"}, "question 11 in {2} cannot be scored again by generous: "),
        (1, {"metrics": [], "exact_match": 0.0}, "the exact_match of question 11 by strict-match is 0.0 in {2}"),
        (1, {"acc": 1.0}, "the acc of question 11 by strict-match is 1.0 in {2}, and its reply gives None"),
        (1, {"doc": {}}, "question 11 in {2} cannot be scored again by strict-match: "),
        (1, {"doc": {"self": 1}}, "question 11 in {2} cannot be scored again by strict-match: "),
        (1, {"resps": [[]]}, "question 11 in {2} cannot be scored again by strict-match: "),
        (1, {"resps": 7}, "question 11 in {2} cannot be scored again by strict-match: "),
    ],
)  # fmt: skip
def test_a_sample_that_says_another_thing_than_its_reply_is_named(folder: Path, number: int, change: Row, message: str) -> None:
    change_samples(folder, lambda rows: rows[number].update(hashed(rows[number] | change)))
    place = "accuracy/gsm8k/r1-b1/samples_gsm8k_2026-11-20T21-19-01.301084.jsonl"
    assert find_wrong_score(folder, CAPTURED_PLAN, 1).startswith(message.format(*(f"{place}:{line}" for line in range(5))))


@pytest.mark.parametrize("document", [{}, {"self": 1}, {"answer": ["5"]}, None, 7])
def test_a_first_question_that_is_none_spares_no_other_one(folder: Path, document: object) -> None:
    change_samples(folder, lambda rows: rows[0].update(doc=document))
    assert find_wrong_score(folder, CAPTURED_PLAN, 1)


@pytest.mark.parametrize(("score", "message"), [(0.0, ""), (1.0, "question 11 is right by strict-match in ")])
def test_a_text_that_would_hold_whoever_scores_it_is_wrong_and_nothing_else(folder: Path, score: float, message: str) -> None:
    """`(?s).*#### ` takes the square of the length of a text without an end."""
    endless = {"resps": [["#### " + "1" * (internals.LONGEST_FOUND + 1)]], "exact_match": score}
    change_samples(folder, lambda rows: rows[1].update(endless))
    assert find_wrong_score(folder, CAPTURED_PLAN, 1).startswith(message)
    assert bool(find_wrong_score(folder, CAPTURED_PLAN, 1)) == bool(message)


def test_a_document_that_lm_evals_templates_would_read_as_their_own_stays_text(folder: Path) -> None:
    """A template within a document is not rendered."""
    answer = "{{ 7 * 7 }} #### {{ cycler.__init__ }}"
    change_samples(folder, lambda rows: rows[1].update(hashed(rows[1] | {"doc": {"answer": answer}, "target": answer})))
    assert find_wrong_score(folder, CAPTURED_PLAN, 1).startswith("the exact_match of question 11 by strict-match is 1.0")
