"""Plans of servers with all that a format must carry over."""

import subprocess
from pathlib import Path
from typing import Any

from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.server import ServerPlan

DIGEST = f"sha256:{'a1' * 32}"
IMAGE = EngineImage(repository="vllm/vllm-openai", tag="v0.32.0", digest=DIGEST, platform="linux/amd64")
PROCESS = EngineEnvironment(python=Path("/opt/engine/bin/python"))
AWKWARD = ["", " ", "it's", '"quoted"', "$HOME `id` $(id) ${PATH} $$", "a\nb: c\n", "a \\\n  b"]
AWKWARD += ["#no", "--opt", "yes", "1e3", "ü"]


def plan(**others: Any) -> ServerPlan:
    known = {
        "engine": IMAGE,
        "model": "some/model",
        "revision": "0" * 40,
        "served_model_name": "tiny",
        "arguments": {"max-model-len": 64, "enable-prefix-caching": False},
        "environment": {"VLLM_LOGGING_LEVEL": "DEBUG"},
        "startup_timeout_s": 1234.5,
        "gpus": [4, 5],
        "memory_limit_gib": 1.5,
    }
    return ServerPlan(**(known | others))


def run_by_a_shell(line: str, variables: dict[str, str]) -> list[str]:
    """The arguments that `docker` gets when a POSIX shell reads the line."""
    script = f"docker() {{ printf '%s\\0' docker \"$@\"; }}\n{line}"
    done = subprocess.run(["sh", "-euc", script], capture_output=True, env=variables, check=True)
    return done.stdout.decode().split("\0")[:-1]
