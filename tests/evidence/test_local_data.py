"""Local questions in each task's own format, through the real lm-eval: scores that were computed by hand."""

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.builders.accuracy import Replies, Row, Saying, answer_in_order, install_packages, refuse_task, write_rows
from tests.fakes.openai_server import Book
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy

ROOT = Path(__file__).parents[2]
EXTRAS = ROOT / ".cache" / "lm-eval-extras"
PACKAGES = ("langdetect", "immutabledict", "math_verify[antlr4_11_0]", "antlr4-python3-runtime==4.11")


class Case(NamedTuple):
    """Questions, their replies by a phrase of each, and the scores of each question in the order of the file, by hand."""

    task: str
    rows: list[Row]
    replies: dict[str, Saying]
    scores: dict[str, list[float]]
    shots: list[Row] = []
    num_fewshot: int = 0
    # Files of a task_folder.
    own: dict[str, str] = {}


def gsm(question: str, answer: str) -> Row:
    return {"question": question, "answer": f"It is so.\n#### {answer}"}


GSM = [
    gsm("Ann has 3 nuts and gets 4?", "7"),
    gsm("Bob has 9 nuts and eats 2?", "7"),
    gsm("Cid has 1,000 nuts twice?", "2,000"),
]
GSM8K = Case(
    task="gsm8k",
    rows=GSM,
    replies={"Ann": " 3 + 4 = 7.\n#### 7", "Bob": " It is 7", "Cid": " #### 2000"},
    # Bob's lacks the mark that strict-match wants. Commas do not count.
    scores={"exact_match,strict-match": [1, 0, 1], "exact_match,flexible-extract": [1, 1, 1]},
    shots=[gsm("Dan has 2 nuts?", "2"), gsm("Eve has 5 nuts?", "5")],
    num_fewshot=1,
)
PLATINUM = Case(
    task="gsm8k_platinum_cot",
    rows=GSM,
    replies={"Ann": " So the answer is 7. The answer is 7.", "Bob": " The answer is 8.", "Cid": " It is 2,000"},
    scores={"exact_match,strict-match": [1, 0, 0], "exact_match,flexible-extract": [1, 0, 1]},
    # The task has eight examples of its own.
    num_fewshot=8,
)


def choice(category: str, question: str, answer: str) -> Row:
    options = ["red", "green", "blue", "white"]
    cot = f"A: Let's think step by step. The answer is ({answer})."
    return {"question": question, "options": options, "answer": answer, "category": category, "cot_content": cot}


MEMBERS = ("biology", "law", "math")
MMLU_PRO = Case(
    task="three",
    rows=[
        choice("math", "What colour is one?", "A"),
        choice("biology", "What colour is grass?", "B"),
        choice("law", "What colour is a robe?", "D"),
        choice("biology", "What colour is the sky?", "C"),
    ],
    replies={
        "is one": " Let me see: the answer is (A).",
        "is grass": " the answer is C",
        "a robe": " I think that the answer is (D)",
        "the sky": " blue",
    },
    # Members are in the order of their names: biology, law, math.
    scores={"exact_match,custom-extract": [0, 0, 1, 1]},
    shots=[choice(name, f"What colour is {name}?", "A") for name in MEMBERS],
    num_fewshot=1,
    own={"three.yaml": json.dumps({"group": "three", "task": [f"mmlu_pro_{name}" for name in MEMBERS]})},
)


def expert(question: str, right: str) -> Row:
    others = {f"Incorrect Answer {number}": f"not {right} {number}" for number in (1, 2, 3)}
    return {"Question": question, "Correct Answer": right} | others


def saying(form: str, wanted: str) -> Saying:
    """A reply with the letter of an answer as the prompt has it: choices are shuffled."""
    return lambda prompt: form.format(re.findall(rf"\(([A-D])\) {wanted}\n", prompt)[-1])


GPQA = Case(
    task="gpqa_diamond_cot_zeroshot",
    rows=[expert("What is heavy?", "lead"), expert("What is light?", "cork"), expert("What is cold?", "ice")],
    replies={
        "is heavy": saying("The answer is ({}).", "lead"),
        "is light": saying("The answer is ({}).", "not cork 2"),
        "is cold": saying("It must be ({})", "ice"),
    },
    scores={"exact_match,strict-match": [1, 0, 0], "exact_match,flexible-extract": [1, 0, 1]},
)


def problem(text: str, answer: str) -> Row:
    return {"problem": text, "solution": f"So it is $\\boxed{{{answer}}}$.", "answer": answer}


MATH = [problem("Add 2 and 3.", "5"), problem("Halve 1.", "\\frac{1}{2}"), problem("Square 4.", "16")]
MATH500 = Case(
    task="hendrycks_math500",
    rows=MATH,
    # What is between the first and the last $ is the answer; 1/2 is the fraction.
    replies={"Add 2": " It is $5$.", "Halve 1": " $1/2$", "Square 4": " $8$"},
    scores={"exact_match,none": [1, 1, 0]},
)
AIME = Case(
    task="aime25",
    rows=[{"problem": text, "answer": answer} for text, answer in (("Find a.", "204"), ("Find b.", "33"), ("Find c.", "7"))],
    replies={"Find a": " So $a = 204$, \\boxed{204}", "Find b": " The result is $33$", "Find c": " \\boxed{8}"},
    scores={"exact_match,none": [1, 1, 0]},
)
IFEVAL = Case(
    task="ifeval",
    rows=[
        {"key": 1, "prompt": "Say hello without a comma.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        {
            "key": 2,
            "prompt": "Say five words in capitals.",
            "instruction_id_list": ["change_case:english_capital", "length_constraints:number_words"],
            "kwargs": [{}, {"relation": "at least", "num_words": 5}],
        },
        {"key": 3, "prompt": "Say it in lower case.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    ],
    # Loosely, a first line does not count.
    replies={"hello": "Hello there", "capitals": "THREE SHORT WORDS", "lower case": "Well, of course:\nhello there"},
    scores={"prompt_level_strict_acc,none": [1, 0, 0], "prompt_level_loose_acc,none": [1, 0, 1]},
)
MINERVA = Case(
    task="minerva_math500",
    rows=MATH,
    replies={
        phrase: f" Final Answer: The final answer is ${answer}$. I hope it is correct."
        for phrase, answer in {"Add 2": "5", "Halve 1": "0.25", "Square 4": "16"}.items()
    },
    scores={"exact_match,none": [1, 0, 1]},
    num_fewshot=4,
)


# Answers that are all dates, and examples that are not.
DATES = Case(
    task="dates",
    rows=[{"question": "When is a?", "answer": "2024-01-31"}, {"question": "When is b?", "answer": "2023-05-06"}],
    replies={"When is b?": "2023-05-06 00:00:00", "When is a?": "2024-01-31"},
    scores={"exact_match,none": [1, 0]},
    shots=[{"question": "Who is c?", "answer": "Ann"}],
    num_fewshot=1,
    own={
        "dates.yaml": json.dumps(
            {
                "task": "dates",
                "dataset_path": "json",
                "test_split": "test",
                "fewshot_split": "train",
                "doc_to_text": "{{question}}",
                "doc_to_target": "{{answer}}",
                "output_type": "generate_until",
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16},
                "metric_list": [{"metric": "exact_match"}],
            }
        )
    },
)


def plan_of(case: Case, folder: Path) -> TaskPlan:
    files = [(folder / f"{name}.jsonl", rows) for name, rows in (("test", case.rows), ("shots", case.shots)) if rows]
    for file, rows in files:
        write_rows(file, rows)
    own = folder / "tasks"
    own.mkdir()
    for name, text in case.own.items():
        (own / name).write_text(text)
    settings = Accuracy(task=case.task, num_questions=len(case.rows), num_fewshot=case.num_fewshot, time_limit_s=120.0)
    plan = TaskPlan(settings=settings, num_concurrent=4, repetitions=1, sequential=False, questions=[file for file, _ in files])
    return plan.model_copy(update={"folder": own}) if case.own else plan


def check(case: Case, folder: Path) -> None:
    answers = answer_in_order(plan_of(case, folder), folder, Book(Replies(case.replies)))
    assert {name: [answer.scores[name] for answer in answers] for name in case.scores} == case.scores


@pytest.mark.parametrize("case", [GSM8K, PLATINUM, MMLU_PRO, GPQA, MATH500, AIME, DATES], ids=lambda case: case.task)
def test_scores_are_those_computed_by_hand(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.parametrize("case", [IFEVAL, MINERVA], ids=lambda case: case.task)
def test_scores_of_tasks_with_packages_of_their_own(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if problem := install_packages(EXTRAS, *PACKAGES):
        pytest.skip(f"no package index has lm-eval's extras: {problem}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXTRAS), os.environ.get("PYTHONPATH", str(ROOT))]))
    check(case, tmp_path)


@pytest.mark.parametrize(("case", "extra"), [(IFEVAL, "ifeval"), (MINERVA, "math")], ids=["ifeval", "minerva"])
def test_a_package_that_is_missing_is_named_with_its_extra(case: Case, extra: str, tmp_path: Path) -> None:
    error = refuse_task(plan_of(case, tmp_path), tmp_path / "lm-eval")
    assert "needs a package that is not installed" in str(error)
    assert f"pip install 'lm-eval[{extra}]'" in (error.remedy or "")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (GSM8K._replace(rows=[{"query": "?", "answer": "1"}], shots=GSM8K.shots[:1]), "gsm8k does not find its fields"),
        (AIME._replace(rows=[{"question": "?", "answer": "1"}]), "aime25 does not find its fields in test.jsonl"),
        (GPQA._replace(rows=[{"Question": "?"}]), "does not find its fields in test.jsonl: KeyError"),
        # Without examples lm-eval would take the questions themselves.
        (MATH500._replace(num_fewshot=2), "hendrycks_math500 needs solved examples"),
    ],
    ids=["gsm8k", "aime25", "gpqa", "no examples"],
)
def test_questions_of_another_format_or_without_examples_are_refused(case: Case, message: str, tmp_path: Path) -> None:
    assert message in str(refuse_task(plan_of(case, tmp_path), tmp_path / "lm-eval"))
