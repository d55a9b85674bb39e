"""Local questions in each task's own format, through the real lm-eval: scores that were computed by hand."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.evidence.commands import SERVER, STARTING
from tests.evidence.test_groups import reply_of
from tests.fakes.openai_server import Book, serving
from vllm_qualify.errors import RecipeError
from vllm_qualify.evidence.accuracy import loading, prepare_task
from vllm_qualify.evidence.answers import Answered, read_answers
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.workload import Accuracy

pytestmark = pytest.mark.usefixtures("warm_lm_eval")

ROOT = Path(__file__).parents[2]
EXTRAS = ROOT / ".cache" / "lm-eval-extras"
UV = Path(sys.executable).parent / "uv"

Row = dict[str, Any]
Saying = str | Callable[[str], str]


class Replies(Mapping[str, str]):
    """The reply to a prompt, by the phrase that is in it; by the last one, since examples come before the question."""

    def __init__(self, by_phrase: Mapping[str, Saying]) -> None:
        self._by_phrase = by_phrase

    def __getitem__(self, prompt: str) -> str:
        found = max(self._by_phrase, key=prompt.rfind)
        if found not in prompt:
            raise KeyError(prompt)
        saying = self._by_phrase[found]
        return saying if isinstance(saying, str) else saying(prompt)

    def __contains__(self, prompt: object) -> bool:
        return any(phrase in str(prompt) for phrase in self._by_phrase)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_phrase)

    def __len__(self) -> int:
        return len(self._by_phrase)


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


def letter(wanted: str) -> Callable[[str], str]:
    """The letter of an answer as the prompt has it: choices are shuffled."""
    return lambda prompt: re.findall(rf"\(([A-D])\) {wanted}\n", prompt)[-1]


def strictly(wanted: str) -> Saying:
    return lambda prompt: f"The answer is ({letter(wanted)(prompt)})."


GPQA = Case(
    task="gpqa_diamond_cot_zeroshot",
    rows=[expert("What is heavy?", "lead"), expert("What is light?", "cork"), expert("What is cold?", "ice")],
    replies={
        "is heavy": strictly("lead"),
        "is light": strictly("not cork 2"),
        "is cold": lambda prompt: f"It must be ({letter('ice')(prompt)})",
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
        "Add 2": " Final Answer: The final answer is $5$. I hope it is correct.",
        "Halve 1": " Final Answer: The final answer is $0.25$. I hope it is correct.",
        "Square 4": " Final Answer: The final answer is $16$. I hope it is correct.",
    },
    scores={"exact_match,none": [1, 0, 1]},
    num_fewshot=4,
)


def plan_of(case: Case, folder: Path) -> TaskPlan:
    files = []
    for name, rows in (("test", case.rows), ("shots", case.shots)):
        if rows:
            files.append(folder / f"{name}.jsonl")
            files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = folder / "tasks"
    own.mkdir()
    for name, text in case.own.items():
        (own / name).write_text(text)
    settings = Accuracy(task=case.task, num_questions=len(case.rows), num_fewshot=case.num_fewshot, time_limit_s=120.0)
    return TaskPlan(
        settings=settings,
        num_concurrent=4,
        repetitions=1,
        sequential=False,
        questions=files,
        folder=own if case.own else None,
    )


def measured(case: Case, folder: Path) -> Answered:
    plan, into = plan_of(case, folder), folder / "accuracy" / case.task
    with serving(Book(Replies(case.replies))) as url:
        starting, server = STARTING.model_copy(update={"url": url}), SERVER.model_copy(update={"url": url})
        with loading(starting, "reference", plan, folder / "lm-eval") as lm_eval:
            run = prepare_task(server, lm_eval, into, lambda *_: None)
            run.ask(run.steps[0])
    return read_answers(into, plan)


def check(case: Case, folder: Path) -> None:
    answers = sorted(measured(case, folder).answers, key=lambda answer: answer.question)
    assert {name: [answer.scores[name] for answer in answers] for name in case.scores} == case.scores


@pytest.mark.parametrize("case", [GSM8K, PLATINUM, MMLU_PRO, GPQA, MATH500, AIME], ids=lambda case: case.task)
def test_scores_are_those_computed_by_hand(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@cache
def extras() -> str | None:
    """Why the packages of lm-eval's extras cannot be had, or None."""
    packages = ["langdetect", "immutabledict", "math_verify[antlr4_11_0]", "antlr4-python3-runtime==4.11"]
    done = subprocess.run(
        [UV, "pip", "install", "--quiet", "--target", EXTRAS, *packages],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stderr[-300:] if done.returncode else None


@pytest.mark.parametrize("case", [IFEVAL, MINERVA], ids=lambda case: case.task)
def test_scores_of_tasks_with_packages_of_their_own(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if problem := extras():
        pytest.skip(f"no package index has lm-eval's extras: {problem}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXTRAS), os.environ.get("PYTHONPATH", str(ROOT))]))
    check(case, tmp_path)


def refusal(case: Case, folder: Path) -> RecipeError:
    plan = plan_of(case, folder)
    nobody = STARTING.model_copy(update={"url": "http://127.0.0.1:9"})
    with pytest.raises(RecipeError) as raised, loading(nobody, "reference", plan, folder / "lm-eval") as lm_eval:
        reply_of(lm_eval)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            lm_eval.check()
            time.sleep(0.05)  # the worker takes its first reply back, by a file
    return raised.value


@pytest.mark.parametrize(("case", "extra"), [(IFEVAL, "ifeval"), (MINERVA, "math")], ids=["ifeval", "minerva"])
def test_a_package_that_is_missing_is_named_with_its_extra(case: Case, extra: str, tmp_path: Path) -> None:
    error = refusal(case, tmp_path)
    assert "needs a package that is not installed" in str(error)
    assert f"pip install 'lm-eval[{extra}]'" in (error.remedy or "")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (GSM8K._replace(rows=[{"query": "?", "answer": "1"}], shots=GSM8K.shots[:1]), "gsm8k does not find its fields"),
        (AIME._replace(rows=[{"question": "?", "answer": "1"}]), "aime25 does not find its fields in test.jsonl"),
        (GPQA._replace(rows=[{"Question": "?"}]), "does not find its fields in test.jsonl: KeyError"),
    ],
    ids=["gsm8k", "aime25", "gpqa"],
)
def test_questions_of_another_format_are_refused(case: Case, message: str, tmp_path: Path) -> None:
    assert message in str(refusal(case, tmp_path))


def test_examples_that_a_task_needs_are_asked_for(tmp_path: Path) -> None:
    """Without them lm-eval would take the questions themselves."""
    error = refusal(MATH500._replace(num_fewshot=2), tmp_path)
    assert "hendrycks_math500 needs solved examples" in str(error)
