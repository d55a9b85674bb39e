"""`recipe new` as a person types it: what it asks, what it refuses, and what it leaves alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.families import make_family
from tests.terminal import typed
from vllm_qualify.recipe.loading import load_recipe


def new(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_qualify", "recipe", "new", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_family("smollm2", tmp_path)
    return tmp_path


def test_a_folder_needs_no_dot_and_a_table_no_engine(folder: Path) -> None:
    done = new(folder, "smollm2", "--gpu-type", "cpu", "--vllm", "0.32.0", "--output", "mine.yaml")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    recipe = load_recipe(str(folder / "mine.yaml")).recipe
    assert (recipe.variants["bf16"].model, recipe.capabilities, recipe.accuracy[0].api) == ("./smollm2", ["chat"], "chat")
    again = new(folder, "smollm2", "--gpu-type", "cpu", "--vllm", "0.32.0", "--output", "mine.yaml")
    assert (again.returncode, "there is such a file already" in again.stderr) == (2, True)


def test_a_trace_is_the_traffic(folder: Path) -> None:
    requests = [{"timestamp": each * 500, "input_length": 900, "output_length": 100, "hash_ids": []} for each in range(20)]
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, requests)))
    done = new(
        folder, "smollm2", "--gpu-type", "h100", "--vllm", "0.32.0", "--trace", "requests.jsonl", "--output", "mine.yaml"
    )
    assert done.returncode == 0, done.stderr
    load = load_recipe(str(folder / "mine.yaml")).recipe.gpu_types["h100"].profiles["balanced"].load
    assert (load.trace, load.window) == ("./requests.jsonl", "whole")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--users", "4", "--rate", "2"], "--users and --rate are two ways to send requests"),
        (["--trace", "requests.jsonl", "--users", "4"], "a trace has its own lengths and times"),
        (["--input-len", "9000"], "and the model's context is 8,192"),
        (["--published", "smollm2"], "there is no folder models in smollm2"),
    ],
)
def test_what_cannot_be_is_one_clear_error(folder: Path, arguments: list[str], said: str) -> None:
    config = folder / "smollm2" / "config.json"
    config.write_text(config.read_text().replace("{", '{"_name_or_path": "org/smol", ', 1))
    done = new(folder, "smollm2", "--gpu-type", "cpu", "--vllm", "0.32.0", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_person_at_a_terminal_is_asked_for_what_is_missing(folder: Path) -> None:
    arguments = ["recipe", "new", str(folder / "smollm2"), "--gpu-type", "cpu", "--vllm", "0.32.0", "--output-len", "20"]
    answers = [
        ("Tokens of a typical prompt", "many"),
        ("Tokens of a typical prompt", "200"),
        ("Clients at once", "3"),
        ("Most ms to the first token, for 99 % of requests", ""),
        ("Most ms per further token, for 99 % of requests", "250"),
    ]
    code, shown = typed([*arguments, "--output", str(folder / "asked.yaml")], answers)
    assert code == 0, shown
    profile = load_recipe(str(folder / "asked.yaml")).recipe.gpu_types["cpu"].profiles["balanced"]
    assert (profile.load.input_len, profile.load.output_len, profile.load.max_concurrency) == (200, 20, 3)
    assert [(gate.metric, gate.bounds) for gate in profile.gates] == [("tpot_p99_ms", [250.0])]
