"""Whether a reply's document fits a schema, within limits: a pattern of a schema, or a union, may take for ever."""

import json
import signal
import subprocess
import sys

from pydantic import JsonValue

from vllm_qualify.engine.confinement import quiet_environment
from vllm_qualify.recipe.json_schemas import Schema

WORKER = "vllm_qualify.evidence.contract.fit_worker"
# Seconds of a core, so that a busy machine comes to the same result. An honest schema takes milliseconds.
LIMIT_S = 10
# What a busy machine may take for them.
WAITS_S = 300.0


def find_fault_in_time(schema: Schema, document: JsonValue, limit_s: int = LIMIT_S) -> str | None:
    """As `find_fault`, in a process of its own.

    Raises ValueError if the document cannot be held to the schema, also where that takes too much time or memory.
    """
    done = _run_worker(json.dumps({"schema": schema, "document": document}), limit_s)
    if done.returncode == -signal.SIGXCPU:
        raise ValueError(f"not within {limit_s} s")
    if done.returncode:
        raise ValueError(f"its process ended with {done.returncode}")
    answer: dict[str, str | None] = json.loads(done.stdout)
    if problem := answer["problem"]:
        raise ValueError(problem)
    return answer["fault"]


def _run_worker(question: str, limit_s: int) -> subprocess.CompletedProcess[str]:
    command, kept = [sys.executable, "-m", WORKER, str(limit_s)], quiet_environment()
    try:
        return subprocess.run(command, input=question, capture_output=True, text=True, timeout=WAITS_S, env=kept, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"not within {WAITS_S:g} s") from error
    except OSError as error:
        raise ValueError(f"no process starts: {error.strerror}") from error
