"""`infra.bench.imports`: what it counts, by made-up recipes and a made-up vLLM, and by published commands and the real one."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.bench import imports
from tests.recipe.importing.documents import model_document, repository
from vllm_qualify.engine.environment import EngineEnvironment

# A stand-in for a Python with vLLM: it takes every command but those with --seed.
FAKE = """
import json, pathlib, sys
asked = json.load(sys.stdin)
with pathlib.Path(__file__).with_name("asked.txt").open("a") as file:
    file.writelines(json.dumps(command) + "\\n" for command in asked["commands"])
refusals = ["it has no --seed" if "--seed" in command["words"] else None for command in asked["commands"]]
json.dump({"version": "VERSION", "refusals": refusals}, sys.stdout)
"""


def fake_environment(folder: Path, version: str = "0.32.0+cpu") -> Path:
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    (folder / "bin" / "fake.py").write_text(FAKE.replace("VERSION", version))
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "{folder}/bin/fake.py" "$@"\n')
    python.chmod(0o755)
    return folder


def recipes_of(folder: Path, *models: list[str]) -> Path:
    """A repository with a model for each list of words, on one GPU type."""
    for number, words in enumerate(models):
        about = {"meta__hardware": {"b200": "unsupported"}, "model__model_id": f"Org/Model-{number}"}
        document = model_document(model__base_args=words, **about)
        shutil.move(repository(folder, document), folder / "models" / "Org" / f"Model-{number}.yaml")
    return folder


def last_line(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    text = capsys.readouterr().out
    figures: dict[str, Any] = json.loads(text.splitlines()[-1])
    return figures, text


def test_it_counts_what_each_side_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the table of 0.32: --seed is an option, --no-such-option is none, and a file of the image is unknown."""
    good, unknown = [["--max-num-seqs", "8"], ["--seed", "1"]], [["--no-such-option"], ["--no-such-option", "--seed", "1"]]
    others = [["--chat-template", "of-the-image.jinja"], ["--max-model-len 8192"], ["--headless"]]
    recipes = recipes_of(tmp_path / "recipes", *good, *unknown, *others)
    environment = fake_environment(tmp_path / "env")
    assert imports.main(["--recipes", str(recipes), "--engine", f"0.32.0={environment}"]) == 1
    figures, text = last_line(capsys)
    counts = {"commands": 6, "fit": 2, "refused_by_both": 1, "false_refusals": 1, "false_fits": 1, "unsure": 1, "for_newer": 0}
    assert figures == {"not_imported": 1, "0.32.0": counts}
    assert "false_refusals at 0.32.0: models/Org/Model-2.yaml, variant default, h200" in text
    assert "recipe check: vLLM 0.32.0 has no option --no-such-option" in text
    assert "vllm serve:   takes it" in text
    assert "false_fits at 0.32.0: models/Org/Model-1.yaml, variant default, h200" in text
    assert "recipe check: fits\n  vllm serve:   it has no --seed" in text
    asked = [json.loads(line)["words"] for line in (environment / "bin" / "asked.txt").read_text().splitlines()]
    assert ["Org/Model-5", "--max-model-len", "8192", "--tensor-parallel-size", "1"] in asked, "as a shell reads it"


def test_a_command_that_is_for_newer_versions_is_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = model_document(model__base_args=[], model__min_vllm_version="0.30.0")
    repository(tmp_path / "recipes", document)
    given = ["--recipes", str(tmp_path / "recipes")]
    for version in ("0.20.0", "0.33.0"):
        given += ["--engine", f"{version}={fake_environment(tmp_path / version, version)}"]
    assert imports.main(given) == 0
    figures, _ = last_line(capsys)
    assert (figures["0.20.0"]["fit"], figures["0.20.0"]["for_newer"]) == (2, 2)
    assert (figures["0.33.0"]["fit"], figures["0.33.0"]["for_newer"]) == (2, 0)


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("recipes", "git clone https://github.com/vllm-project/recipes"),
        ("env", "ENV/bin/python -m pip install vllm==0.32.0"),
        ("version", "give an environment with vLLM 0.32.0"),
    ],
)
def test_what_is_missing_has_its_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str, remedy: str) -> None:
    if missing != "recipes":
        recipes_of(tmp_path / "recipes", [])
    if missing != "env":
        fake_environment(tmp_path / "env", "0.31.0" if missing == "version" else "0.32.0")
    assert imports.main(["--recipes", str(tmp_path / "recipes"), "--engine", f"0.32.0={tmp_path}/env"]) == 2
    assert remedy in capsys.readouterr().err


# From vllm-project/recipes (Apache-2.0) of 2026-08-21: Seed-OSS-36B, DeepSeek-V4-Flash, MiMo-V2.5-Pro, Ring-1T-FP8 and
# NVIDIA-Nemotron-Nano-9B-v2.
PUBLISHED = [
    ["--enable-auto-tool-choice", "--tool-call-parser", "seed_oss"],
    [
        *("--trust-remote-code", "--kv-cache-dtype", "fp8", "--block-size", "256", "--enable-expert-parallel"),
        *("--tokenizer-mode", "deepseek_v4", "--tool-call-parser", "deepseek_v4", "--enable-auto-tool-choice"),
        *("--reasoning-parser", "deepseek_v4"),
    ],
    ["--trust-remote-code", "--max-model-len auto", "--generation-config", "vllm", "--gpu-memory-utilization", "0.95"],
    ["--trust-remote-code", "--kv-cache-dtype", "fp8", "--compilation-config", '{"use_inductor": false}'],
    [
        *("--trust-remote-code", "--enable-auto-tool-choice", "--tool-call-parser-plugin"),
        *("nemotron_toolcall_parser_no_streaming.py", "--tool-call-parser", "nemotron_json"),
    ],
    ["--enable-auto-tool-choice", "--tool-call-parser", "no_such_parser"],
    ["--enable-auto-tool-choice"],
]


@pytest.mark.engine
def test_published_commands_are_judged_as_the_real_vllm_judges_them(
    engine: EngineEnvironment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last two are no published ones: both sides must refuse them."""
    recipes = recipes_of(tmp_path / "recipes", *PUBLISHED)
    status = imports.main(["--recipes", str(recipes), "--engine", f"0.32.0={engine.python.parent.parent}"])
    figures, text = last_line(capsys)
    assert (status, figures["not_imported"]) == (0, 0), text
    counts = {"commands": 7, "fit": 3, "refused_by_both": 4, "false_refusals": 0, "false_fits": 0, "unsure": 0, "for_newer": 0}
    assert figures["0.32.0"] == counts
