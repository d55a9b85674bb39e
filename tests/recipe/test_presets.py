"""Presets of accuracy tasks: what they stand for, that lm-eval has their tasks, and what the page on them says."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.recipes import reference, write
from vllm_qualify.errors import CallerError
from vllm_qualify.evidence.accuracy import lm_eval_internals
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.presets import PRESETS

# How many questions the data of each task has, by the data's own page.
QUESTIONS = {
    "gsm8k": 1319,
    "mmlu": 14042,
    "gsm8k_platinum": 1209,
    "mmlu_pro": 12032,
    "ifeval": 541,
    "aime25": 30,
    "gpqa_diamond_cot_zeroshot": 198,
    "bfcl": 400 + 200 + 200 + 200 + 240,
    "chartqa": 2500,
    "mmmu_val": 900,
}
PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"


def accuracy_of(folder: Path, *entries: dict[str, Any]) -> list[Accuracy]:
    gate = {"metric": "output_throughput_tok_s", "minimum": 1, "unit": "tok/s"}
    document = reference() | {"accuracy": list(entries), "gates": [gate]}
    document["gpu_types"]["cpu"]["profiles"]["balanced"]["gates"] = []
    return load_recipe(str(write(document, folder / "recipe.yaml"))).recipe.accuracy


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_stands_for_its_tasks_and_the_page_says_what_they_cost(name: str, tmp_path: Path) -> None:
    tasks = accuracy_of(tmp_path, {"preset": name})
    assert [task.task for task in tasks] == [task["task"] for task in PRESETS[name]]
    for task in tasks:
        assert task.num_questions <= QUESTIONS[task.task]
        assert (task.api, task.stop) == (("completions", None) if name == "base" else ("chat", []))
    answers = [task.num_questions * task.samples_per_question for task in tasks]
    tokens = sum(number * (task.max_gen_toks or 0) for number, task in zip(answers, tasks, strict=True))
    (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE.read_text(), re.MULTILINE)
    assert row.endswith(f"| {sum(answers):,} | {tokens:,} |")


def test_what_is_said_beside_a_preset_is_said_of_each_of_its_tasks_and_published_scores_by_task(tmp_path: Path) -> None:
    beside = {"reasoning_effort": "high", "max_gen_toks": 65536}
    published = {"mmlu_pro": [{"score": 0.783, "source": "https://example.org/card"}]}
    tasks = accuracy_of(tmp_path, {"preset": "reasoning", "published": published} | beside, {"num_questions": 9})
    rows = [(task.task, task.reasoning_effort, task.max_gen_toks, [each.score for each in task.published]) for task in tasks]
    assert rows == [
        *((task, "high", 65536, []) for task in ("aime25", "gpqa_diamond_cot_zeroshot")),
        ("mmlu_pro", "high", 65536, [0.783]),
        ("gsm8k", None, None, []),
    ]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"preset": "chat", "published": [{"score": 0.5, "source": "a card"}]}], "published scores beside a preset stand by"),
        ([{"preset": "chat", "published": {"aime25": []}}], "stand by its tasks: gsm8k_platinum, mmlu_pro, ifeval"),
        ([{"preset": "chats"}], "there is no preset 'chats': take base, chat, reasoning, tools, vision"),
        ([{"preset": ["chat"]}], "there is no preset ['chat']: take"),
        ([{"preset": "chat", "task": "gsm8k"}], "has the preset 'chat' and a task: make two entries of it"),
        ([{"preset": "chat", "num_question": 3}], "num_question"),
        ([{"preset": "base", "reasoning_effort": "low"}], "'reasoning_effort' is of chats"),
        ([{"preset": "chat"}, {"preset": "reasoning"}], "mmlu_pro more than once"),
    ],
)
def test_a_preset_that_cannot_be_is_refused(entries: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(CallerError) as refused:
        accuracy_of(tmp_path, *entries)
    assert message in str(refused.value)


# To find mmlu, all of lm-eval's files are read: tests/evidence/test_lm_eval_internals.py counts its members.
@pytest.mark.parametrize("task", sorted({task["task"] for tasks in PRESETS.values() for task in tasks} - {"mmlu"}))
def test_lm_eval_has_the_task(task: str) -> None:
    assert lm_eval_internals.find_task(task, None) is not None
