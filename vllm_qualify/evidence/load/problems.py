"""What makes a repeat invalid."""

import json
import math
from pathlib import Path
from typing import Any

from pydantic import Field

from vllm_qualify.engine.kind import KINDS
from vllm_qualify.engine.kinds.base import Conditions, Counted, EngineKind, Totals
from vllm_qualify.evidence.load import agreement, steady
from vllm_qualify.evidence.load.agreement import Asked
from vllm_qualify.evidence.load.replay import planned_trace
from vllm_qualify.evidence.load.result import BESIDE, RESET, Repeat, count_of
from vllm_qualify.evidence.load.told import told_problems
from vllm_qualify.evidence.measurement import (
    UNUSABLE,
    in_words,
)
from vllm_qualify.evidence.restarts import labelled_totals
from vllm_qualify.evidence.watched import problems as watched_problems
from vllm_qualify.recipe.serving import VLLM, EngineName, ServerArguments
from vllm_qualify.recipe.values import CountOrNone, Frozen, Number, Share
from vllm_qualify.recipe.workload import Load

PREEMPTIONS = KINDS[VLLM].total("preemptions")
# A thread that is this busy makes its next request late, and sees a reply late.
CLIENT_CORES_ALLOWED = 0.9
CLIENT_REMEDY = "run the client on a faster host, or several clients"
# The most of its prompts that may be known to the prefix cache by chance. A load with more of them measures the cache.
MOST_DRAWN_BEFORE = 0.10
# The share of a repeat that the client's samples must cover: in less of it, its use of the CPU says little about the rest.
LEAST_SEEN = 0.5


class ClientUse(Frozen):
    """`client-N.json`: the client thread's CPU seconds so far, as pairs of the time of `clock.steady_s` and these seconds.

    `drawn_before` is the share of a run's random prompts that bench had drawn before on this server; older runs do not tell it.
    """

    cpu_s: list[tuple[Number, Number]] = Field(min_length=1)
    max_rss_mib: CountOrNone
    drawn_before: Share = 0.0

    @property
    def seconds(self) -> float:
        return self.cpu_s[-1][0] - self.cpu_s[0][0]

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
    sides = [side for side in (folder, folder / BESIDE) if side.is_dir()]
    return [sum(_use(side, repeat).seconds for side in sides) for repeat in range(1, count_of(folder) + 1)]


def _use(folder: Path, repeat: int) -> ClientUse:
    return ClientUse.model_validate_json((folder / f"client-{repeat}.json").read_bytes())


def problems_of(
    folder: Path,
    repeat: Repeat,
    settings: Load,
    kind: EngineName,
    arguments: ServerArguments,
    watched: Path | None = None,
    *,
    may_queue: bool = False,
    model: str | None = None,
    rate: float | None = None,
) -> list[str]:
    """Why a repeat in a folder does not count, by its requests, its server's counters, its client and what was watched.

    `watched` and `model` are as `parse` takes them. If requests `may_queue`, a queue is no reason; those of an open load may.
    `rate`, in req/s, goes before that of the load. Raises one of UNUSABLE.
    """
    at_once = None if may_queue or settings.is_open else KINDS[kind].most_requests(arguments)
    rate = settings.request_rate if rate is None else rate
    asked = Asked(settings, model, rate, planned_trace(folder, settings))
    return [
        *(request_problems(repeat.about, settings) or _disagreements(repeat, asked, kind, arguments)),
        *([] if request_problems(repeat.about, settings) else told_problems(folder, repeat, settings, kind, arguments)),
        *_server_problems(folder, repeat, settings, kind, arguments),
        *_problems_meanwhile(folder, repeat, settings, kind, at_once, watched),
    ]


def preemptions(folder: Path, number: int) -> int:
    """How many preemptions the server counted during a repeat. Raises one of UNUSABLE."""
    samples = _samples_of(folder, number)
    counted = Counted(*(_totals(page) for page in samples))
    if missing := counted.missing([PREEMPTIONS]):
        raise ValueError(missing[0])
    if back := agreement.went_back(*samples):
        raise ValueError(back[0])
    return int(counted.gained(PREEMPTIONS))


def request_problems(result: dict[str, Any], settings: Load) -> list[str]:
    """Why the requests of one of bench's results do not count. Raises one of UNUSABLE.

    Even if every request failed, bench exits with 0, and then writes 0.0 for the latencies.
    """
    asked, completed, failed = settings.num_prompts, result["completed"], result["failed"]
    problems = []
    if completed != asked or failed != 0:
        problems.append(f"{completed} of {asked} requests completed, {failed} failed")
    lengths = result["output_lens"]
    if len(lengths) != asked:
        problems.append(f"{len(lengths)} lengths of {asked} replies")
    if settings.trace is None:
        problems += _other_lengths(lengths, settings.output_len, settings.length_spread)
    # `not … <=`: NaN is no duration.
    if not settings.min_duration_s <= result["duration"] < math.inf:
        remedy = f": {steady.REMEDY}" if math.isfinite(result["duration"]) else ""
        problems.append(f"it lasted {result['duration']:.1f} s, under min_duration_s {settings.min_duration_s:g}{remedy}")
    return problems


def _other_lengths(lengths: list[int], output_len: int, spread: float) -> list[str]:
    least, most = math.floor(output_len * (1 - spread)), math.ceil(output_len * (1 + spread))
    other = sum(not least <= length <= most for length in lengths)
    return [f"{other} replies do not have {least if least == most else f'{least} to {most}'} tokens"] if other else []


def _problems_meanwhile(
    folder: Path, repeat: Repeat, settings: Load, kind: EngineName, at_once: int | None, watched: Path | None
) -> list[str]:
    """The problems during the measured part of a repeat, which is its end: the warm-ups come before it.

    `at_once` is how many requests the server runs without a queue, None if a queue does not matter.
    """
    duration = repeat.about["duration"]
    if not 0 < duration < math.inf:
        # `request_problems` reports it.
        return []
    try:
        use = _use(folder, repeat.number)
    except UNUSABLE as error:
        # Older runs, in which nothing was watched, have no such file.
        return [f"it is not known when its client was busy, and how much: {in_words(error)}"] if watched else []
    ended, _ = use.cpu_s[-1]
    began = ended - duration
    of_client = _client_problems(use.cores(began, ended), watched is not None)
    if watched is None or not KINDS[kind].tells_its_queue:
        return of_client
    queues_from = began + repeat.remembered(
        ("ramp-up", settings.model_dump_json()), lambda: _ramp_up_s(repeat.result, settings)
    )
    return [
        *of_client,
        *watched_problems(watched, began, ended, settings.max_concurrency, at_once, queues_from=queues_from, kind=KINDS[kind]),
    ]


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


def _client_problems(cores: float | None, must_be_known: bool) -> list[str]:
    if cores is None:
        return ["the client was seen too seldom to know how busy it was: measure again"] if must_be_known else []
    if cores > CLIENT_CORES_ALLOWED:
        return [f"the client used {cores:.2f} of a core, so that it measured itself: {CLIENT_REMEDY}"]
    return []


def _disagreements(repeat: Repeat, asked: Asked, kind: EngineName, arguments: ServerArguments) -> list[str]:
    what = ("disagreements", asked.load.model_dump_json(), asked.model, asked.rate, kind, json.dumps(arguments, sort_keys=True))
    return repeat.remembered(what, lambda: agreement.result_problems(repeat.result, asked, kind, arguments))


def _server_problems(folder: Path, repeat: Repeat, settings: Load, kind: EngineName, arguments: ServerArguments) -> list[str]:
    number = repeat.number
    samples = _samples_of(folder, number)
    if back := agreement.went_back(*samples):
        return back
    counted = Counted(*(_totals(page) for page in samples))
    under = Conditions(
        arguments,
        settings.num_prompts,
        shared=_shared(folder, settings, counted, KINDS[kind]),
        # Each run of bench has a seed of its own for its random prompts, and ids of its own for those of a trace.
        are_fresh=settings.prompts is None or _was_emptied(folder / f"reset-{number}.txt"),
        drawn_before=_drawn_before(folder, number),
    )
    problems = KINDS[kind].load_problems(counted, under)
    if problems or request_problems(repeat.about, settings):
        return problems
    return agreement.counter_problems(repeat.about, counted, settings, kind)


def _drawn_before(folder: Path, number: int) -> float:
    try:
        return min(_use(folder, number).drawn_before, MOST_DRAWN_BEFORE)
    except UNUSABLE:
        # `_problems_meanwhile` reports it.
        return 0.0


def hit_share(folder: Path, number: int, kind: EngineName) -> float | None:
    """The share of a repeat's prompts that the server's prefix cache had; None without such a cache. Raises one of UNUSABLE."""
    return KINDS[kind].hit_share(Counted(*(_totals(page) for page in _samples_of(folder, number))))


def _shared(folder: Path, settings: Load, counted: Counted, kind: EngineKind) -> float | None:
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


def _samples_of(folder: Path, number: int) -> tuple[Totals, Totals]:
    samples, _ = counters_of(*(folder / f"metrics-{number}-{when}.txt" for when in ("before", "after")))
    return samples


def counters_of(before: Path, after: Path) -> tuple[tuple[Totals, Totals], Counted]:
    """The counters of two pages: by name and labels, and their totals. Raises one of UNUSABLE."""
    one, other = (labelled_totals(page.read_text()) for page in (before, after))
    return (one, other), Counted(_totals(one), _totals(other))


def _was_emptied(reset: Path) -> bool:
    """Whether the prefix cache was emptied, by the file that `run` wrote. If that is missing, it was not."""
    try:
        return reset.read_text().split() == [RESET, "200"]
    except (OSError, ValueError):
        return False


def _totals(samples: Totals) -> Totals:
    """Totals by name, summed over their labels."""
    totals: dict[str, float] = {}
    for key, value in samples.items():
        name = agreement.name_of(key)
        totals[name] = totals.get(name, 0.0) + value
    return totals
