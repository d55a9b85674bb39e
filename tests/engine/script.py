"""Scripts in the engine's own Python, for what only vLLM itself can tell."""

import subprocess
from pathlib import Path

from vllm_qualify.engine.confinement import confining_process
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import OFFLINE


def run_script(engine: EngineEnvironment, source: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script with the variables that servers have. Its output is captured."""
    command = [engine.python, "-c", source, *arguments]
    with confining_process(OFFLINE) as confinement:
        return subprocess.run(command, env=confinement.environment, capture_output=True, text=True, timeout=300, check=False)
