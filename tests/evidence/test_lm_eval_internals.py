"""What this project relies on inside lm-eval, tried with the version that is locked and with the newest release."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vllm_qualify.evidence.lm_eval_internals import find

ROOT = Path(__file__).parents[2]
NEWEST = ROOT / ".cache" / "lm-eval-newest"
UV = Path(sys.executable).parent / "uv"


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


@cache
def newest() -> str | None:
    """Why the newest release cannot be had, or None. It comes without what it needs, of which .venv has the locked versions."""
    done = subprocess.run(
        [UV, "pip", "install", "--quiet", "--target", NEWEST, "--upgrade", "--no-deps", "lm-eval"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stderr[-300:] if done.returncode else None


@pytest.mark.parametrize("which", ["locked", "newest"])
def test_lm_eval_has_what_is_relied_on(which: str) -> None:
    if which == "newest" and (problem := newest()):
        pytest.skip(f"no package index has lm-eval: {problem}")
    found = tried(before=NEWEST if which == "newest" else None)
    assert found["problems"] == {}, f"lm-eval {found['lm_eval']} moved what lm_eval_internals.py relies on"


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
    ],
)
def test_what_moved_is_named(gone: str, part: str) -> None:
    problem = tried("--without", gone)["problems"][part]
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
    found = find(task, None)
    assert found
    assert (len(found.names), found.is_group) == (members, members > 1)
    assert len(found.manager.task_index) < 100


@pytest.mark.thorough
def test_a_group_by_tags_has_all_its_members() -> None:
    found = find("mmlu", None)
    assert found
    assert len(found.names) == 57
