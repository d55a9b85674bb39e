"""Data of tasks, fetched by the real lm-eval and datasets; files of the task's own folder stand in for the hub."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.builders.accuracy import EXAMPLES, read_rows, write_task
from vllm_qualify.errors import CallerError, HostError, RecipeError
from vllm_qualify.evidence.accuracy.data import fetch
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy

QUESTIONS = [{"question": f"{number} + 1?", "answer": f"#### {number + 1}", "kind": "kürzer"} for number in range(7)]


def plan(task: str, folder: Path | None = None) -> TaskPlan:
    return TaskPlan(settings=Accuracy(task=task, num_questions=3), num_concurrent=1, folder=folder)


def test_questions_and_examples_are_written_as_they_are_in_the_data(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks", "sums", QUESTIONS)
    reply = fetch(plan("sums", tmp_path / "tasks"), tmp_path / "data" / "sums")
    assert (reply.questions, reply.shots) == (7, 2)
    assert read_rows(tmp_path / "data" / "sums" / "test.jsonl") == QUESTIONS
    assert read_rows(tmp_path / "data" / "sums" / "shots.jsonl") == EXAMPLES


def test_examples_that_are_questions_are_not_written_and_a_task_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Of a file of its own, an example could be the question that is asked."""
    write_task(tmp_path / "tasks", "sums", QUESTIONS, fewshot_split="test", training_split="test")
    reply = fetch(plan("sums", tmp_path / "tasks"), tmp_path / "sums")
    assert reply.shots is None
    assert [path.name for path in (tmp_path / "sums").iterdir()] == ["test.jsonl"]
    with pytest.raises(RecipeError, match="there is no task 'no_such_sums'"):
        fetch(plan("no_such_sums", tmp_path / "tasks"), tmp_path / "none")


@pytest.mark.thorough
def test_members_of_a_group_that_share_their_data_are_fetched_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    write_task(folder, "short_sums", QUESTIONS)
    task = YAML(typ="safe").load((folder / "short_sums.yaml").read_text())
    YAML(typ="safe").dump(task | {"task": "long_sums"}, folder / "long_sums.yaml")
    group = {"group": "all_sums", "task": ["short_sums", "long_sums"]}
    means = {"aggregate_metric_list": [{"metric": "exact_match", "weight_by_size": True}]}
    YAML(typ="safe").dump(group | means, folder / "all_sums.yaml")
    assert fetch(plan("all_sums", folder), tmp_path / "sums").questions == 7


@pytest.mark.thorough
def test_a_hub_that_does_not_answer_is_the_worlds_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HostError, match="no data came for gsm8k"):
        fetch(plan("gsm8k"), tmp_path / "gsm8k")
    assert not (tmp_path / "gsm8k").exists()


@pytest.mark.parametrize("name", ["sums", "sums.part"])
def test_a_folder_that_is_there_is_left_alone(name: str, tmp_path: Path) -> None:
    kept = tmp_path / name / "mine.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(CallerError, match=f"{name} is there already"):
        fetch(plan("sums"), tmp_path / "sums")
    assert kept.read_text() == "mine"
