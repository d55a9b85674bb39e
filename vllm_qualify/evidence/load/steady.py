"""Steady state: the part of a load in which every client is under way and the server has warmed up.

Each of bench's clients sends its next prompt as soon as one has ended. Bench's own figures include the first wave, whose
prompts all come at once, and the tail, in which fewer and fewer requests are under way. Here both are cut off.

A wave is a group of requests, in the order of their starts, as large as the number of clients. The first and the last wave are
cut off: requests that started before the last wave end under full load. MSER-5 on the requests' latencies says how much more
to cut (White 1997, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69; White, Cobb &
Spratt 2000, "A comparison of five steady-state truncation heuristics for simulation"). Latencies are enough: with a fixed
number of requests under way, throughput is that number divided by the mean latency.

Equally long requests stay roughly in step, so tokens come in waves too, and a window with arbitrary edges would count part of a
wave. A window therefore goes from one wave to another: one stretch from each request of the first wave to its counterpart in
the second. Its rates are the means over all these stretches. If replies are not equally long, the rate of tokens is still
right, but that of requests is not.

Requests that are sent at a rate, each at its own time, have no fixed number under way. The first of them find an empty server,
and the last leave an empty one. Cut off are a warm-up, also by MSER-5, and at the end the first request that was still under
way when the last one was sent, with all requests after it.

If a client reads several chunks at once, they were sent earlier, at unknown times; only the last of them has a correct time. A
time per token is therefore measured from the end of a reply's first read to its last token, over the tokens in between. If each
chunk is read alone, it equals bench's own.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_qualify.lazy import Lazy
from vllm_qualify.recipe.load import Slo
from vllm_qualify.recipe.metrics import GOODPUT, METRICS, OUTPUT_THROUGHPUT, least_requests

if TYPE_CHECKING:
    from scipy import stats
else:
    stats = Lazy("scipy.stats")

BATCH = 5
# The share of all requests that must be left. MSER may cut at most half of its input, as its authors recommend.
LEAST_SHARE = 0.5
# The share of the clients that must be under way, on average over the window. The rest is bench's time between two requests,
# which is much if requests are short and the machine is busy.
LEAST_UNDER_WAY = 0.75
# The share of bench's duration that its requests need not fill if bench does not give their start times.
SLACK_ALLOWED = 0.05
# Latencies rise or fall all along if chance alone would do that less often than DRIFT_BY_CHANCE. Then one half of a window may
# differ from the other by at most DRIFT_ALLOWED.
DRIFT_ALLOWED, DRIFT_BY_CHANCE = 0.25, 0.001
REMEDY = "use more num_prompts"
# For requests sent at a rate: how many more may be sent than end in the second half of the sending, as a share, and as a
# multiple of the noise of the number under way. If the server keeps up with the rate, that number does not change.
SHORTFALL_ALLOWED, SHORTFALL_SPREADS = 0.05, 2.0
# The latencies of requests sent at a rate are checked for a trend in so many groups, in the order of their starts.
GROUPS = 20

# Chunks less than AT_ONCE_S apart were read at once, because no model is so fast. Each such gap makes another gap longer, so
# only the share AT_ONCE_ALLOWED of the gaps may be so short. At least the share LEAST_SHOWN of the replies must not have come
# in one read, so that they show a time per token. Which replies these are depends on when the client had time to read, and
# little on the server.
AT_ONCE_S, AT_ONCE_ALLOWED, LEAST_SHOWN = 50e-6, 0.01, 0.25
KEEP_UP_REMEDY = "give the client a core or a host of its own"
AT_ONCE_REMEDY = f"{KEEP_UP_REMEDY}, with no proxy between that collects chunks"


class UnsteadyError(Exception):
    """There is no steady state to measure; the message says why, and what to do."""


class OverloadError(Exception):
    """Requests were sent faster than the server can answer, so that ever more are under way; the message has the numbers."""


@dataclass(frozen=True)
class Requests:
    """Bench's record of the requests, in the order of their starts. Times are in s. `gaps` are those between chunks.

    `rebuilt` says that bench did not record the starts.
    """

    starts: np.ndarray
    ttfts: np.ndarray
    gaps: list[np.ndarray]
    inputs: np.ndarray
    outputs: np.ndarray
    rebuilt: bool = False

    @cached_property
    def latencies(self) -> np.ndarray:
        """The times from a request's start to its last chunk, as in bench."""
        return np.asarray(self.ttfts + [gaps.sum() for gaps in self.gaps])

    @property
    def tpots(self) -> np.ndarray:
        """The times per token as in bench's goodput: 0 for a reply of one token."""
        return np.asarray((self.latencies - self.ttfts) / np.maximum(self.outputs - 1, 1))

    @cached_property
    def settled_tpots(self) -> np.ndarray:
        """The times per token from the end of a reply's first read: NaN if that had all of it, 0 for a reply of one token."""
        return np.asarray([_settled_tpot(*each) for each in zip(self.gaps, self.outputs, strict=True)])

    def without_openings(self) -> "Requests":
        """The requests without their first chunk, which in a chat has no token."""
        opened = np.asarray([gaps[:1].sum() for gaps in self.gaps])
        return replace(self, ttfts=self.ttfts + opened, gaps=[gaps[1:] for gaps in self.gaps])


def _settled_tpot(gaps: np.ndarray, output: float) -> float:
    if output <= 1:
        return 0.0
    at_once = next((number for number, gap in enumerate(gaps) if gap >= AT_ONCE_S), len(gaps))
    if at_once == len(gaps):
        return math.nan
    # Bench records the tokens of a reply, not those of a chunk.
    return float(gaps[at_once:].sum() / ((output - 1) * (1 - at_once / len(gaps))))


@dataclass(frozen=True)
class Window:
    """The requests from `first` to before `last`, in the order of their starts. As many of them start in each stretch."""

    requests: Requests
    first: int
    last: int
    begins: np.ndarray
    ends: np.ndarray

    @property
    def count(self) -> int:
        return self.last - self.first

    @property
    def length_s(self) -> float:
        """The mean length of its stretches."""
        return float((self.ends - self.begins).mean())


def requests_of(result: dict[str, Any], clients: int) -> Requests:
    """The requests of one of bench's detailed results. All must have been answered.

    vLLM's bench records their starts from 0.15 on. For older versions they follow from the latencies: when a client's request
    ends, that client sends the next one. Raises UnsteadyError if they do not, LookupError, TypeError or ValueError if it is no
    such result.
    """
    ttfts, inputs, outputs = (np.asarray(result[name], dtype=float) for name in ("ttfts", "input_lens", "output_lens"))
    gaps, rebuilt = [np.asarray(each, dtype=float) for each in result["itls"]], "start_times" not in result
    latencies = [float(ttft + each.sum()) for ttft, each in zip(ttfts, gaps, strict=True)]
    starts = _rebuild_starts(latencies, clients, result["duration"]) if rebuilt else result["start_times"]
    starts = np.asarray(starts, dtype=float)
    if not len(starts) == len(ttfts) == len(inputs) == len(outputs):
        raise ValueError("its lists of requests are not equally long")
    order = np.argsort(starts, kind="stable")
    return Requests(starts[order], ttfts[order], [gaps[at] for at in order], inputs[order], outputs[order], rebuilt)


def _rebuild_starts(latencies: list[float], clients: int, duration: float) -> np.ndarray:
    """Starts from 0 on, stretched to fill the duration, because bench needs a little time between two requests."""
    free, starts = [0.0] * clients, []
    for latency in latencies:
        starts.append(heapq.heappop(free))
        heapq.heappush(free, starts[-1] + latency)
    if not 1 - SLACK_ALLOWED <= max(free) / duration <= 1:
        raise UnsteadyError(
            f"its requests, one after another, take {max(free):.3g} s of its {duration:.3g} s, and this version of bench does"
            " not record when each started"
        )
    return np.asarray(starts) * (duration / max(free))


def whole_window(requests: Requests, duration: float) -> Window:
    """All requests and bench's whole duration, as bench counts."""
    begin = requests.starts[:1]
    # Rounding in the sum of times may miss the end.
    return Window(requests, 0, len(requests.starts), begin, begin + duration * (1 + 1e-9))


def ramp_up_s(requests: Requests, clients: int) -> float:
    """The time until all requests of the first wave have their first token. Until then they wait for each other's prefill."""
    wave = slice(0, clients)
    return float((requests.starts[wave] + requests.ttfts[wave]).max() - requests.starts[0])


def find_window(requests: Requests, clients: int) -> Window:
    """The window of the steady state. Raises UnsteadyError if there is none."""
    total = len(requests.starts)
    waves = total // clients - 2
    spare = math.floor(waves - LEAST_SHARE * total / clients)
    if spare < 0:
        kept = max(0, waves) * clients
        raise UnsteadyError(f"{kept} of {total} requests lie between the first and the last wave of {clients}: {REMEDY}")
    last = (waves + 1) * clients
    cut = truncation(requests.latencies[clients:last], spare * clients)
    first = clients * (1 + math.ceil(cut / clients))
    begins, ends = (requests.starts[at : at + clients] for at in (first, last))
    window = Window(requests, first, last, begins, ends)
    _check_full(window, clients)
    _check_drift(window, clients)
    return window


def find_open_window(requests: Requests) -> Window:
    """The window of the steady state for requests that were sent at a rate, whether or not others had ended.

    Raises OverloadError if the server did not keep up with the rate, UnsteadyError if there is none for another reason.
    """
    if requests.rebuilt:
        raise UnsteadyError(
            "this version of bench does not record when each request started, which a rate needs: use 0.15 or later"
        )
    total, ended = len(requests.starts), requests.starts + requests.latencies
    if total < 2 or not np.isfinite(ended).all() or not requests.starts[0] < requests.starts[-1]:
        raise UnsteadyError(f"the starts of its {total} requests are no times")
    _check_kept_up(requests)
    last = int(np.argmax(ended > requests.starts[-1]))
    least = math.ceil(LEAST_SHARE * total)
    if last < least:
        raise UnsteadyError(f"{last} of {total} requests were sent before the first that outlived the sending: {REMEDY}")
    first = truncation(requests.latencies[:last], last - least)
    return Window(requests, first, last, requests.starts[first : first + 1], requests.starts[last : last + 1])


def _check_kept_up(requests: Requests) -> None:
    """Raise OverloadError if latencies rise all along, and either rise far or more and more requests are under way."""
    latencies = requests.latencies
    settled = latencies[truncation(latencies, len(latencies) // 2) :]
    groups = [float(group.mean()) for group in np.array_split(settled, min(GROUPS, len(settled)))]
    tau, by_chance = _find_trend(groups)
    if not (tau > 0 and by_chance < DRIFT_BY_CHANCE):
        return
    middle = len(settled) // 2
    change = float(settled[middle:].mean() / settled[:middle].mean()) - 1
    sent, answered, noise = _second_half(requests)
    if change > DRIFT_ALLOWED or sent - answered > max(SHORTFALL_ALLOWED * sent, SHORTFALL_SPREADS * noise):
        raise OverloadError(
            f"its requests took ever longer, in its second half {change:+.0%}, and while {sent} of them were sent there,"
            f" {answered} ended"
        )


def _second_half(requests: Requests) -> tuple[int, int, float]:
    """How many requests were sent, and how many ended, in the second half of the sending; and the noise of their difference.

    The number under way scatters as arrivals do, by its own square root, at both ends of the half. Only the smaller of the two
    numbers counts, because a queue that has grown is not noise.
    """
    begin, end = (requests.starts[0] + requests.starts[-1]) / 2, requests.starts[-1]
    ended = requests.starts + requests.latencies
    sent, answered = (int(((times > begin) & (times <= end)).sum()) for times in (requests.starts, ended))
    under_way = [int(((requests.starts <= at) & (ended > at)).sum()) for at in (begin, end)]
    return sent, answered, math.sqrt(2 * min(under_way))


def truncation(series: np.ndarray, most: int) -> int:
    """How many of the first values belong to the warm-up, by MSER-5: a multiple of 5, at most `most`.

    The cut is where the remaining values, taken as independent, have the least standard error.
    """
    batches = series[: len(series) // BATCH * BATCH].reshape(-1, BATCH).mean(axis=1)
    candidates = range(min(most // BATCH, len(batches) - 1) + 1)
    errors = [float(np.var(batches[cut:]) / (len(batches) - cut)) for cut in candidates]
    return BATCH * int(np.argmin(errors)) if errors else 0


def _check_full(window: Window, clients: int) -> None:
    requests, begin, end = window.requests, window.begins[0], window.ends[-1]
    inside = np.minimum(requests.starts + requests.latencies, end) - np.maximum(requests.starts, begin)
    under_way = float(np.maximum(inside, 0).sum() / (end - begin)) if end > begin else math.nan
    # `not … <=`: NaN is no number under way.
    if not LEAST_UNDER_WAY * clients <= under_way <= 1.01 * clients:
        raise UnsteadyError(
            f"on average {under_way:.3g} of {clients} requests were under way in what should be its steady state: bench did not"
            f" keep up, or its times are wrong: {KEEP_UP_REMEDY}"
        )


def _check_drift(window: Window, clients: int) -> None:
    """Raise UnsteadyError if latencies rise or fall all along, and far. A short warm-up is cut off, and noise has no trend."""
    latencies = window.requests.latencies
    waves = latencies[clients : window.last].reshape(-1, clients).mean(axis=1)
    _, by_chance = _find_trend(waves)
    if not by_chance < DRIFT_BY_CHANCE:
        return
    middle = (window.first + window.last) // 2
    change = float(latencies[middle : window.last].mean() / latencies[window.first : middle].mean()) - 1
    if not abs(change) <= DRIFT_ALLOWED:
        trend = "longer" if change > 0 else "shorter"
        raise UnsteadyError(f"its requests took ever {trend}, in its second half {change:+.0%}: {REMEDY}")


def _find_trend(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Kendall's tau of values in their order, and the chance of such a tau without a trend. Both are NaN for fewer than two."""
    if len(values) < 2:
        return math.nan, math.nan
    correlation = stats.kendalltau(range(len(values)), values)
    return float(correlation.statistic), float(correlation.pvalue)


def figures_of(window: Window, slo: Slo | None, *, as_bench: bool = False) -> dict[str, float]:
    """All load metrics of a window's requests, in the metric's unit. A metric that no request shows is 0, as in bench.

    Times per token are the settled ones, or with `as_bench` those of bench.

    Output tokens are those that came within the window. Requests, with their inputs and latencies, are those that started in
    the window. As many ended in it, and the choice does not depend on how long they took.
    """
    requests, chosen, rate = window.requests, slice(window.first, window.last), window.count / window.length_s
    tokens, tpots = _count_tokens(window) / window.length_s, requests.tpots if as_bench else requests.settled_tpots
    figures = {
        "request_throughput_req_s": rate,
        OUTPUT_THROUGHPUT: tokens,
        "total_throughput_tok_s": tokens + rate * float(requests.inputs[chosen].mean()),
    }
    if slo:
        figures[GOODPUT] = rate * _share_met(window, slo, tpots)
    shown_times = {
        "ttft": requests.ttfts[chosen],
        "tpot": tpots[chosen][(requests.outputs[chosen] > 1) & ~np.isnan(tpots[chosen])],
        "itl": np.concatenate(requests.gaps[chosen]),
        "e2el": requests.latencies[chosen],
    }
    for latency, shown in shown_times.items():
        times, names = shown if len(shown) else np.zeros(1), _metrics_of(latency)
        # All quantiles in one call, so that the times are sorted only once.
        percentiles = np.percentile(times, [100 * (METRICS[name].quantile or 0) for name in names])
        for name, percentile in zip(names, percentiles, strict=True):
            figures[name] = 1000 * float(times.mean() if METRICS[name].quantile is None else percentile)
    return figures


def _count_tokens(window: Window) -> float:
    """The mean number of output tokens in the window's stretches."""
    requests = window.requests
    came = [
        start + ttft + np.concatenate(([0.0], np.cumsum(gaps)))
        for start, ttft, gaps in zip(requests.starts, requests.ttfts, requests.gaps, strict=True)
    ]
    chunks = np.array([len(each) for each in came])
    # A chunk has several tokens with a draft model, or when bench fell behind. Bench records only the tokens of the reply.
    tokens = np.repeat((requests.outputs - 1) / np.maximum(chunks - 1, 1), chunks)
    tokens[np.cumsum(chunks) - chunks] = np.where(chunks > 1, 1, requests.outputs)
    at = np.concatenate(came)
    stretches = np.searchsorted(window.begins, at, side="right") - np.searchsorted(window.ends, at, side="right")
    return float((tokens * stretches).sum()) / len(window.begins)


def _share_met(window: Window, slo: Slo, tpots: np.ndarray) -> float:
    """The share of requests that met the SLO, of those that show whether they did. 0 if none does."""
    requests, chosen = window.requests, slice(window.first, window.last)
    times = {"ttft": requests.ttfts, "tpot": tpots, "e2el": requests.latencies}
    wanted = [(times[name][chosen], limit / 1000) for name, limit in slo.limits_ms.items()]
    shown = ~np.any([np.isnan(each) for each, _ in wanted], axis=0)
    met = np.all([each <= limit for each, limit in wanted], axis=0)[shown]
    return float(met.mean()) if len(met) else 0.0


def distrusted_metrics(window: Window, slo: Slo | None) -> dict[str, str]:
    """Why metrics of the times between tokens cannot be trusted, by metric: too many chunks were read at once."""
    requests, chosen = window.requests, slice(window.first, window.last)
    gaps = np.concatenate([np.zeros(0), *requests.gaps[chosen]])
    at_once, reasons = int((gaps < AT_ONCE_S).sum()), dict[str, str]()
    if at_once > AT_ONCE_ALLOWED * len(gaps):
        reason = f"{at_once} of {len(gaps)} gaps between chunks are under {1e6 * AT_ONCE_S:.0f} µs: they were read at once"
        reasons |= dict.fromkeys(_metrics_of("itl"), f"{reason}, {AT_ONCE_REMEDY}")
    tpots = requests.settled_tpots[chosen][requests.outputs[chosen] > 1]
    shown = int((~np.isnan(tpots)).sum())
    reason = f"{shown} of {len(tpots)} replies show a time per token, the others came in one read: {AT_ONCE_REMEDY}"
    for name in [*_metrics_of("tpot"), *([GOODPUT] if slo and slo.tpot_ms else [])]:
        # At most all: if a percentile needs more, the sample count shows that.
        if shown < max(LEAST_SHOWN * len(tpots), min(least_requests(name), len(tpots))):
            reasons[name] = reason
    return reasons


def _metrics_of(latency: str) -> list[str]:
    return [name for name in METRICS if name.startswith(f"{latency}_")]
