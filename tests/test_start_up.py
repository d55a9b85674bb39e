"""What a command imports before it does anything: the slow libraries only where they are needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.vllm import make_engine
from vllm_qualify.recipe.loading import catalog_folder

SLOW = {"boto3", "docker", "great_expectations", "httpx", "huggingface_hub", "numpy", "pandas", "prefect", "requests", "scipy"}


def imported_by(*arguments: str, **environment: str) -> set[str]:
    """The modules, by their full names, that the command has imported when it ends."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "vllm_qualify", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        check=False,
    )
    assert done.returncode in (0, 2), done.stderr
    return {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "frobnicate",
        "run --help",
        "run no-such-recipe",
        "run reference --profile no-such-profile",
        "run reference --gpu-type cpu --dry-run",
        "run reference --gpu-type cpu --dry-run --launcher docker --image vllm/vllm-openai:v0.32.0",
        "recipe show reference --gpu-type cpu",
        "recipe check reference --vllm 0.32.0",
        f"recipe new {catalog_folder()}/reference-chat/model --gpu-type cpu --vllm 0.32.0",
    ],
)
def test_a_light_command_imports_no_slow_library(arguments: str, tmp_path: Path) -> None:
    engine = str(make_engine(tmp_path / "engine"))
    imported = imported_by(*arguments.split(), VLLM_QUALIFY_ENGINE=engine, VLLM_QUALIFY_HOME=str(tmp_path / "home"))
    assert "vllm_qualify.cli" in imported
    assert not imported & SLOW


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", ["report show no-such-run", "rejudge no-such-run", "approved list"])
def test_a_command_about_reports_imports_neither_the_orchestrator_nor_what_judges(arguments: str, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    imported = imported_by(*arguments.split(), VLLM_QUALIFY_HOME=str(tmp_path))
    assert imported & {"vllm_qualify.runs.folder", "vllm_qualify.approval.matrix"}
    assert not imported & {"boto3", "docker", "great_expectations", "pandas", "prefect", "scipy.optimize", "scipy.stats"}
