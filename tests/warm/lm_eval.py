"""lm-eval's workers as forks of a process that has imported lm-eval, which takes longer than what most tests ask of it.

Each is guarded and confined as in production.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.warm.forks import Forks, Warm, stand_in
from vllm_qualify.engine import process
from vllm_qualify.engine.process import RunningProcess
from vllm_qualify.evidence import accuracy, data

SLOW = (
    *("lm_eval.evaluator", "lm_eval.models.openai_completions", "httpx", "PIL.Image", "ruamel.yaml"),
    # by datasets, when it opens a file
    *("multiprocessing.connection", "scipy.io"),
    *("vllm_qualify.engine.letter_box", "vllm_qualify.evidence.lm_eval_internals", "vllm_qualify.evidence.long.fitting"),
    *("vllm_qualify.evidence.thinking", "vllm_qualify.evidence.tools.scoring", "vllm_qualify.plan.questions"),
    "vllm_qualify.recipe.workload",
)
# Of SLOW, in this order: these read variables while they are imported.
READ_THE_ENVIRONMENT = ("huggingface_hub.constants", "datasets.config")
# Each process, test or task has its own.
OF_ONE_PROCESS = (
    *("TMPDIR", "PYTEST_", "VLLM_", "PYTHONPATH", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HF_TOKEN_PATH"),
    *("OPENAI_API_KEY", "LMEVAL_MODEL_", "HOME", "TORCHINDUCTOR_CACHE_DIR"),
)
IDLE_S = 600.0
FOLDER, SOCKET = "PYTEST_WARM", "lm_eval"


def forks() -> Forks:
    warm = Warm(sys.executable, SLOW, IDLE_S, reloads=READ_THE_ENVIRONMENT, ends_group=True)
    return Forks(warm, lambda name: not name.startswith(OF_ONE_PROCESS))


def program() -> list[str]:
    """What stands for Python, in a command that runs one of its modules."""
    return stand_in(Path(os.environ[FOLDER], SOCKET))


def guarded(
    command: Sequence[str], environment: Mapping[str, str], log: Path, **others: Any
) -> AbstractContextManager[RunningProcess]:
    """As `process.guarded`."""
    return process.guarded([*program(), *command[1:]], environment, log, **others)


def use(patch: pytest.MonkeyPatch | None = None) -> None:
    """The workers that this process starts are forks: until `patch` is undone, else as long as it lives."""
    patch = patch or pytest.MonkeyPatch()
    for module in (accuracy, data):
        patch.setattr(module, "guarded", guarded)
