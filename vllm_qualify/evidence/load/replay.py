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
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.traces.reading import read_trace
from vllm_qualify.recipe.traces.trace import Trace

TRACE = "trace.json"
# Users see times to the first token of LATE_S. Where more than a few requests are so late, or one is much later, it is another
# burst. The few are charged their delay: what they found was a calmer server than the trace's.
LATE_S, LATE_SHARE_ALLOWED, LATEST_ALLOWED_S = 0.1, 0.05, 1.0


def trace_of(settings: Load, file: Path) -> Trace:
    """The trace of a planned load. Raises HostError if its file has changed since it was planned."""
    trace = read_trace(file, most=settings.num_prompts, speed=settings.trace_speed).trace
    if trace.digest != settings.prompts_sha256:
        raise HostError(f"the trace at {file} has changed since this run was planned", "restore it, or start a new run", "load")
    return trace


def planned_trace(folder: Path, settings: Load) -> Trace | None:
    """The trace that a load's evidence has, None of another load. Raises OSError or ValueError if it lacks the planned one."""
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
    share, latest_s = float((late > LATE_S).mean()), float(late.max())
    if share > LATE_SHARE_ALLOWED or latest_s > LATEST_ALLOWED_S:
        yield (
            f"{share:.1%} of its requests were sent more than {LATE_S:g} s after the trace, the last of them {latest_s:.2g} s:"
            f" the client fell behind: {steady.KEEP_UP_REMEDY}"
        )


def at_trace_times(result: dict[str, Any], trace: Trace) -> dict[str, Any]:
    """One of bench's results as the trace's users saw it: a request that was sent late waits from its time in the trace on.

    Times from the planned start are free of coordinated omission (Tene 2015, "How NOT to Measure Latency"). The small delays of
    all other requests are left out: in a comparison they would make both sides more alike.
    """
    starts, ttfts = (np.asarray(result[name], dtype=float) for name in ("start_times", "ttfts"))
    late = lateness_s(result["start_times"], trace)
    late = np.where(late > LATE_S, late, 0.0)
    duration = float(result["duration"]) + float(starts.min() - (starts - late).min())
    return result | {"start_times": (starts - late).tolist(), "ttfts": (ttfts + late).tolist(), "duration": duration}


def lateness_s(starts: list[float], trace: Trace) -> np.ndarray:
    """How much later than in the trace each request was sent, in s, if the most punctual one was sent in time."""
    late = np.asarray(starts, dtype=float) - np.asarray(trace.arrivals_s)
    # A start that is no time is later than any allowed one.
    return np.asarray(late - late.min()) if np.isfinite(late).all() else np.full(len(late), np.inf)
