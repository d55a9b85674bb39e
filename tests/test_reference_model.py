"""The reference model's questions and weights are what the project's own scripts make."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.recipe.loading import catalog_folder

SCRIPTS = Path(__file__).parents[1] / "infra" / "reference_model"
SHIPPED = catalog_folder() / "reference"
STEP = re.compile(r"(\d+)([-+*/])(\d+)=<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")


@pytest.fixture(scope="module")
def problems() -> ModuleType:
    spec = importlib.util.spec_from_file_location("problems", SCRIPTS / "problems.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (SHIPPED / name).read_text().splitlines()]


def test_the_script_makes_the_shipped_questions(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SCRIPTS / "problems.py"), str(tmp_path)], check=True)
    for name in ("test.jsonl", "train.jsonl"):
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()


def test_every_shipped_question_is_held_out_from_training_and_stands_once(problems: ModuleType) -> None:
    questions = [row["question"] for name in ("test.jsonl", "train.jsonl") for row in rows(name)]
    assert len(rows("test.jsonl")) == 500
    assert len(rows("train.jsonl")) == 50
    assert len(set(questions)) == len(questions)
    assert {problems.split_of(question) for question in questions} == {"held_out"}


def test_every_step_of_every_answer_is_right(problems: ModuleType) -> None:
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
    for row in rows("test.jsonl"):
        steps = STEP.findall(row["answer"])
        assert len(steps) >= 2
        for left, sign, right, *again, value in steps:
            assert again == [left, sign, right, value]
            assert operations[sign](int(left), int(right)) == int(value) <= problems.MAX_VALUE
            assert sign != "/" or int(left) % int(right) == 0
        assert row["answer"].endswith(f"\n#### {steps[-1][-1]}")


def test_weights_are_small_enough_to_ship() -> None:
    for weights in SHIPPED.glob("*/model.safetensors"):
        assert weights.stat().st_size <= 8_000_000


@pytest.mark.engine
def test_the_script_makes_the_shipped_regressed_weights(engine: EngineEnvironment, tmp_path: Path) -> None:
    command = [str(engine.python), str(SCRIPTS / "regress.py"), str(SHIPPED / "model"), str(tmp_path)]
    subprocess.run(command, check=True)
    for path in (SHIPPED / "regressed").iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
