"""What this project relies on inside lm-eval, tried with the version that is locked and with the newest release."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lm_eval.tasks import TaskManager, _index

from tests.builders.accuracy import install_packages
from vllm_qualify.evidence.accuracy.letters import RefusedError
from vllm_qualify.evidence.accuracy.lm_eval_internals import find_task, seed_language_detection, task_files

ROOT = Path(__file__).parents[2]
NEWEST = ROOT / ".cache" / "lm-eval-newest"


def tried(*arguments: str, before: Path | None = None) -> dict[str, Any]:
    path = os.pathsep.join(str(each) for each in (before, ROOT) if each)
    done = subprocess.run(
        [sys.executable, "-m", "tests.evidence.lm_eval_parts", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["locked", "newest"])
def test_lm_eval_has_what_is_relied_on(which: str) -> None:
    # It comes without what it needs, of which .venv has the locked versions.
    if which == "newest" and (problem := install_packages(NEWEST, "--upgrade", "--no-deps", "lm-eval")):
        pytest.skip(f"no package index has lm-eval: {problem}")
    found = tried(before=NEWEST if which == "newest" else None)
    assert found["problems"] == {}, f"lm-eval {found['lm_eval']} moved what lm_eval_internals.py relies on"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("gone", "part"),
    [
        ("lm_eval.models.api_models:TemplateAPI.amodel_call", "failed_calls"),
        ("lm_eval.models.openai_completions:LocalCompletionsAPI._create_payload", "seeds"),
        ("lm_eval.models.openai_completions:LocalCompletionsAPI.parse_generations", "replies"),
        ("lm_eval.api.task:Task.build_all_requests", "prompts"),
        ("lm_eval.api.task:ConfigurableTask.doc_to_image", "pictures"),
        ("lm_eval.tasks:TaskManager.all_tags", "membership"),
        ("lm_eval.api.task:Task.dump_config", "records"),
        ("lm_eval.api.filter:FilterEnsemble.apply", "scoring"),
    ],
)
def test_what_moved_is_named(gone: str, part: str) -> None:
    problem = tried("--without", gone, part)["problems"][part]
    assert gone.rpartition(".")[2] in problem


@pytest.mark.parametrize(
    ("task", "members"),
    [
        ("mmlu_pro", 14),
        ("hendrycks_math", 7),
        ("gsm8k_platinum_cot", 1),
        ("aime25", 1),
        ("gpqa_diamond_cot_zeroshot", 1),
        ("bfcl", 5),
        ("bfcl_simple", 1),
    ],
)
def test_usual_tasks_are_found_without_reading_all_files(task: str, members: int) -> None:
    found = find_task(task, None)
    assert found
    assert (len(found.names), found.is_group) == (members, members > 1)
    assert len(found.manager.task_index) < 100


# What parses lm-eval's 14,000 files, each just once: several tests read all of them.
LOAD_ONCE = cache(_index.load_yaml)


@pytest.fixture
def parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_eval.tasks._index.load_yaml", LOAD_ONCE)


@pytest.fixture
def read_all(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each of lm-eval's managers whether it read all of lm-eval's files."""
    read = []

    class Watched(TaskManager):  # type: ignore[misc]  # lm-eval has no types
        def __init__(self, *, include_path: Any, include_defaults: bool = True) -> None:
            read.append(include_defaults)
            super().__init__(include_path=include_path, include_defaults=include_defaults)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", Watched)
    return read


def test_a_name_in_no_file_is_missed_without_reading_all_files(tmp_path: Path, read_all: list[bool]) -> None:
    assert find_task("no_such_task", None) is None
    (tmp_path / "mine.yaml").write_text("{group: mine, task: [no_such_task]}")
    with pytest.raises(RefusedError, match="names no_such_task, which is no task"):
        find_task("mine", tmp_path)
    assert True not in read_all


@pytest.mark.thorough
@pytest.mark.usefixtures("parsed_once")
def test_a_member_whose_folder_has_another_name_is_found(tmp_path: Path, read_all: list[bool]) -> None:
    (tmp_path / "mine.yaml").write_text("{group: mine, task: [20_newsgroups]}")
    found = find_task("mine", tmp_path)
    assert found
    assert found.names == ["20_newsgroups"]
    assert read_all[-1]


@pytest.mark.thorough
@pytest.mark.usefixtures("parsed_once")
def test_the_name_of_every_task_group_and_tag_stands_in_a_file_and_a_group_by_tags_has_all_its_members() -> None:
    words = set(re.split(rb"[\s:,'\"\[\]{}]+", b"\n".join(task_files())))
    names = TaskManager().task_index
    assert len(names) > 10_000
    assert [name for name in names if name.encode() not in words] == []
    found = find_task("mmlu", None)
    assert found
    assert len(found.names) == 57


def test_the_detection_of_languages_is_seeded_where_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried on the real package: findings/ifeval_scored_again.sh."""
    module = ModuleType("langdetect")
    module.DetectorFactory = type("DetectorFactory", (), {"seed": None})  # type: ignore[attr-defined]  # a stand-in
    module.__spec__ = ModuleSpec("langdetect", None)
    monkeypatch.setitem(sys.modules, "langdetect", module)
    seed_language_detection(7)
    assert module.DetectorFactory.seed == 7
