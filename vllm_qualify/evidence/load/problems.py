"""What makes a repeat invalid."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field

from vllm_qualify.engine.kinds.base import Conditions, Counted, EngineKind, Totals
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.load import agreement, steady
from vllm_qualify.evidence.load.replay import planned_trace
from vllm_qualify.evidence.load.result import BESIDE, RESET, Repeat, count_of, metrics_pages
from vllm_qualify.evidence.load.told import told_problems
from vllm_qualify.evidence.measurement import UNUSABLE, in_words
from vllm_qualify.evidence.restarts import labelled_totals
from vllm_qualify.evidence.watched import QueueLimit, watched_problems
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.serving import VLLM
from vllm_qualify.recipe.values import CountOrZero, Frozen, Number, Share

PREEMPTIONS = KINDS[VLLM].total("preemptions")
# A thread that is this busy makes its next request late, and sees a reply late.
CLIENT_CORES_ALLOWED = 0.9
CLIENT_REMEDY = "run the client on a faster host, or several clients"
# The most of its prompts that may be known to the prefix cache by chance. A load with more of them measures the cache.
MOST_DRAWN_BEFORE = 0.10
# The share of a repeat that the client's samples must cover: in less of it, its use of the CPU says little about the rest.
LEAST_SEEN = 0.5


class ClientUse(Frozen):
    """`client-N.json`: what bench's client used and drew."""

    cpu_s: list[tuple[Number, Number]] = Field(min_length=1)
    """pairs of a time of `watch.steady_s` and the CPU seconds that the client's thread had used until then"""
    max_rss_mib: CountOrZero
    drawn_before: Share = 0.0
    """the share of the run's random prompts that bench had drawn before on this server"""

    def cores(self, began: float, ended: float) -> float | None:
        """How many cores the thread used on average between two times; None if the samples cover too little of it."""
        seen = [sample for sample in self.cpu_s if began <= sample[0] <= ended]
        if len(seen) < 2:
            return None
        (first, before), (last, after) = seen[0], seen[-1]
        seen_s = last - first
        return (after - before) / seen_s if seen_s >= LEAST_SEEN * (ended - began) else None


def took_s(folder: Path) -> list[float]:
    """How long each repeat of a load took, in s, by its client's samples; in turns, both servers' together.

    Raises one of UNUSABLE.
    """
    sides, repeats = [side for side in (folder, folder / BESIDE) if side.is_dir()], range(1, count_of(folder) + 1)
    samples = [[_read_use(side, repeat).cpu_s for side in sides] for repeat in repeats]
    return [sum(cpu_s[-1][0] - cpu_s[0][0] for cpu_s in of_sides) for of_sides in samples]


def _read_use(folder: Path, repeat: int) -> ClientUse:
    return ClientUse.model_validate_json((folder / f"client-{repeat}.json").read_bytes())


def problems_of(
    repeat: Repeat, settings: Load, server: ServerPlan, watched: Path | None = None, *, may_queue: bool = False
) -> list[str]:
    """Why a repeat does not count, by its requests, its server's counters, its client and what was watched.

    `watched` is the folder with what was watched of the server; None if nothing was. Requests of an open load, and others if
    they `may_queue`, count also where they had to wait. Raises one of UNUSABLE.
    """
    of_requests = request_problems(repeat.summary, settings)
    return [
        *(of_requests or [*_find_disagreements(repeat, settings, server), *told_problems(repeat, settings, server)]),
        *_server_problems(repeat, settings, server, is_whole=not of_requests),
        *_problems_meanwhile(repeat, settings, server, watched, may_queue=may_queue or settings.is_open),
    ]


def preemptions(folder: Path, number: int) -> int:
    """How many preemptions the server counted during a repeat. Raises one of UNUSABLE."""
    samples, counted = counters_of(*metrics_pages(folder, number))
    if missing := counted.missing([PREEMPTIONS]):
        raise ValueError(missing[0])
    if back := agreement.counter_resets(*samples):
        raise ValueError(back[0])
    return int(counted.gained(PREEMPTIONS))


def request_problems(result: dict[str, Any], settings: Load) -> list[str]:
    """Why the requests of one of bench's results do not count. Raises one of UNUSABLE.

    Even if every request failed, bench exits with 0, and then writes 0.0 for the latencies.
    """
    asked, completed, failed, duration = settings.num_prompts, result["completed"], result["failed"], result["duration"]
    problems = []
    if completed != asked or failed != 0:
        problems.append(f"{completed} of {asked} requests completed, {failed} failed")
    lengths = result["output_lens"]
    if len(lengths) != asked:
        problems.append(f"{len(lengths)} lengths of {asked} replies")
    if settings.trace is None:
        part = settings.length_spread
        least, most = math.floor(settings.output_len * (1 - part)), math.ceil(settings.output_len * (1 + part))
        if other := sum(not least <= length <= most for length in lengths):
            problems.append(f"{other} replies do not have {least if least == most else f'{least} to {most}'} tokens")
    # `not … <=`: NaN is no duration.
    if not settings.min_duration_s <= duration < math.inf:
        remedy = f": {steady.REMEDY}" if math.isfinite(duration) else ""
        problems.append(f"it lasted {duration:.1f} s, under min_duration_s {settings.min_duration_s:g}{remedy}")
    return problems


def _problems_meanwhile(
    repeat: Repeat, settings: Load, server: ServerPlan, watched: Path | None, *, may_queue: bool
) -> list[str]:
    """The problems during the measured part of a repeat, which is its end: the warm-ups come before it."""
    duration = repeat.summary["duration"]
    if not 0 < duration < math.inf:
        # `request_problems` reports it.
        return []
    try:
        use = _read_use(repeat.folder, repeat.number)
    except UNUSABLE as error:
        return [f"it is not known when its client was busy, and how much: {in_words(error)}"] if watched else []
    ended, _ = use.cpu_s[-1]
    began, problems = ended - duration, list[str]()
    cores = use.cores(began, ended)
    if cores is None and watched:
        problems = ["the client was seen too seldom to know how busy it was: measure again"]
    elif cores is not None and cores > CLIENT_CORES_ALLOWED:
        problems = [f"the client used {cores:.2f} of a core, so that it measured itself: {CLIENT_REMEDY}"]
    if watched is None or not server.engine_kind.tells_its_queue:
        return problems
    ramp_up_s = repeat.remember(("ramp-up", settings.model_dump_json()), lambda: _ramp_up_s(repeat.result, settings))
    limit = None if may_queue else QueueLimit(server, settings.max_concurrency, began + ramp_up_s)
    return [*problems, *watched_problems(watched, began, ended, limit)]


def _ramp_up_s(result: dict[str, Any], settings: Load) -> float:
    """How long a whole run's first wave waits in prefill. Its figures include that, and in a short run it is a large part."""
    if settings.window != "whole":
        return 0.0
    try:
        took_s = steady.ramp_up_s(steady.requests_of(result, settings.max_concurrency), settings.max_concurrency)
    except steady.UnsteadyError:
        # `steady_of` raises it too.
        return 0.0
    return took_s if math.isfinite(took_s) else 0.0


def _find_disagreements(repeat: Repeat, settings: Load, server: ServerPlan) -> list[str]:
    trace = planned_trace(repeat.folder, settings)
    arguments = json.dumps(server.arguments, sort_keys=True)
    what = ("disagreements", settings.model_dump_json(), server.served_model_name, server.kind, arguments)
    return repeat.remember(what, lambda: agreement.result_problems(repeat.result, settings, server, trace))


def _server_problems(repeat: Repeat, settings: Load, server: ServerPlan, *, is_whole: bool) -> list[str]:
    """What the server's counters tell against a repeat. `is_whole` says that its requests were all answered."""
    folder, number, kind, drawn_before = repeat.folder, repeat.number, server.engine_kind, 0.0
    samples, counted = counters_of(*metrics_pages(folder, number))
    if back := agreement.counter_resets(*samples):
        return back
    # Each run of bench has a seed of its own for its random prompts, and ids of its own for those of a trace.
    are_fresh = settings.prompts is None
    with suppress(OSError, ValueError):
        # By the client's file, the prefix cache was emptied; without it, it was not.
        are_fresh = are_fresh or (folder / f"reset-{number}.txt").read_text().split() == [RESET, "200"]
    with suppress(*UNUSABLE):
        # `_problems_meanwhile` reports what cannot be read.
        drawn_before = min(_read_use(folder, number).drawn_before, MOST_DRAWN_BEFORE)
    shared = _shared_part(folder, settings, counted, kind)
    problems = kind.load_problems(counted, Conditions(server.arguments, settings.num_prompts, shared, are_fresh, drawn_before))
    if problems or not is_whole:
        return problems
    return agreement.counter_problems(repeat.summary, counted, settings, kind)


def _shared_part(folder: Path, settings: Load, counted: Counted, kind: EngineKind) -> float | None:
    """`Conditions.shared`. In a chat the server's template begins every prompt alike, with as many tokens as it counts more."""
    if trace := planned_trace(folder, settings):
        return trace.shared_share
    if settings.input_len is None:
        return None
    whole = settings.shared_prefix_len + settings.input_len
    if settings.api != "chat":
        return settings.shared_prefix_len / whole
    if "prompt_tokens" not in kind.counters:
        return None
    asked_tok = max(counted.gained(kind.total("prompt_tokens")), settings.num_prompts * whole)
    return 1 - settings.num_prompts * settings.input_len / asked_tok


def counters_of(before: Path, after: Path) -> tuple[tuple[Totals, Totals], Counted]:
    """The counters of two pages: by name and labels, and their totals. Raises one of UNUSABLE."""
    one, other = (labelled_totals(page.read_text()) for page in (before, after))
    return (one, other), Counted(_sum_labels(one), _sum_labels(other))


def _sum_labels(samples: Totals) -> Totals:
    totals: dict[str, float] = {}
    for key, value in samples.items():
        name = agreement.name_of(key)
        totals[name] = totals.get(name, 0.0) + value
    return totals
