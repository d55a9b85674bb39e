"""Replay a trace, and judge whether it was replayed as it is: each length, and each arrival within a bound.

Bench's `timed_trace` makes the tokens of a block from its id by Python's `hash`, which differs from process to process unless
PYTHONHASHSEED is set: `engine.bench_worker` sets it, so that the candidate and its baseline are asked the same.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vllm_qualify.errors import HostError
from vllm_qualify.evidence.load import steady
from vllm_qualify.recipe.traces.reading import read_trace
from vllm_qualify.recipe.traces.trace import Trace
from vllm_qualify.recipe.workload import Load

TRACE = "trace.json"
# A burst in which requests are so late is another burst: users see times to the first token that long.
LATE_ALLOWED_S, LATE_SHARE_ALLOWED = 0.1, 0.01


def trace_of(settings: Load, file: Path) -> Trace:
    """The trace of a planned load. Raises HostError if its file has changed since it was planned."""
    trace = read_trace(file, most=settings.num_prompts, speed=settings.trace_speed).trace
    if trace.digest != settings.prompts_sha256:
        raise HostError(f"the trace at {file} has changed since this run was planned", "restore it, or start a new run", "load")
    return trace


def planned_trace(folder: Path, settings: Load) -> Trace | None:
    """The trace that a load's evidence has, None of another load.

    Raises:
        OSError, ValueError: there is none, or it is not the planned one.
    """
    if settings.trace is None:
        return None
    body = (folder / TRACE).read_bytes()
    if hashlib.sha256(body).hexdigest() != settings.prompts_sha256:
        raise ValueError(f"{TRACE} is not the planned trace")
    return Trace.model_validate_json(body)


def fidelity_problems(result: dict[str, Any], trace: Trace) -> Iterator[str]:
    """Where the requests of one of bench's results are not those of the trace. Raises one of UNUSABLE."""
    for name, wanted in (("input_lens", trace.input_toks), ("output_lens", trace.output_toks)):
        if other := [at for at, (is_, asked) in enumerate(zip(result[name], wanted, strict=True)) if is_ != asked]:
            first = f"request {other[0] + 1} {result[name][other[0]]} and not {wanted[other[0]]}"
            yield f"{len(other)} {name} are not the trace's: {first}"
    if "start_times" not in result:
        yield "this version of bench does not record when each request started, which a trace needs"
        return
    late = lateness_s(result["start_times"], trace)
    share = float((~(late <= LATE_ALLOWED_S)).mean())
    if share > LATE_SHARE_ALLOWED:
        yield (
            f"{share:.1%} of its requests were sent more than {LATE_ALLOWED_S:g} s after the trace, the last of them"
            f" {float(late.max()):.2g} s: the client fell behind: {steady.KEEP_UP_REMEDY}"
        )


def lateness_s(starts: list[float], trace: Trace) -> np.ndarray:
    """How much later than in the trace each request was sent, in s, if the most punctual one was sent in time."""
    late = np.asarray(starts, dtype=float) - np.asarray(trace.arrivals_s)
    return np.asarray(late - late.min())
