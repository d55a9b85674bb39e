"""How many tokens the answers of a task have, by the server's own counts before and after each step."""

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from scipy import special

from vllm_qualify.engine.metrics_page import samples_of
from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.sequential import Sides

# vLLM's histogram of the output tokens of finished requests. Thinking is counted, whatever a reply shows of it.
COUNTED = "vllm:request_generation_tokens"
# Its bounds are 1, 2, 5, 10, 20, … up to the longest context, by `build_1_2_5_buckets` of vllm/v1/metrics/loggers.py. None is
# more than 2.5 times the one before, and neither is a reply that is longer than all.
NEXT_BOUND = 2.5
SUM, COUNT, BUCKET = f"{COUNTED}_sum", f"{COUNTED}_count", f"{COUNTED}_bucket"


class ReplyTokens(NamedTuple):
    """The answers' number, their tokens, and the most that the tokens' variance can be by the histogram's buckets."""

    answers: float
    tokens: float
    most_variance: float

    @property
    def mean(self) -> float:
        return self.tokens / self.answers

    def interval(self, questions: int, at: Sides) -> Interval:
        """The mean's interval, by the normal distribution. A question that is asked again is no further sample."""
        error = math.sqrt(self.most_variance / questions)
        below, above = (-float(special.ndtri(alpha)) * error for alpha in at)
        return Interval(lower=max(0.0, self.mean - below), upper=self.mean + above)


class _Counts(NamedTuple):
    tokens: float
    answers: float
    buckets: dict[float, float]
    """how many replies have at most so many tokens"""


def reply_tokens(steps: Iterable[tuple[str, str, int, str]]) -> ReplyTokens:
    """The answers' tokens, from the /metrics before and after each step, its number of questions, and its name.

    Raises ValueError if a page has no such counts, they bound no reply, or they do not agree with each other or the questions.
    """
    gains = [
        _count_gain(_read_counts(before, name), _read_counts(after, name), questions, name)
        for before, after, questions, name in steps
    ]
    answers, tokens = math.fsum(gain.answers for gain in gains), math.fsum(gain.tokens for gain in gains)
    buckets: defaultdict[float, float] = defaultdict(float)
    for bound, count in chain.from_iterable(gain.buckets.items() for gain in gains):
        buckets[bound] += count
    return ReplyTokens(answers, tokens, _most_variance(buckets, answers, tokens))


def _read_counts(page: str, name: str) -> _Counts:
    totals: defaultdict[str, float] = defaultdict(float)
    buckets: defaultdict[float, float] = defaultdict(float)
    for sample in samples_of(page, lambda line: line.startswith(COUNTED)):
        totals[sample.name] += sample.value
        if sample.name == BUCKET:
            buckets[float(sample.labels["le"])] += sample.value
    if not {SUM, COUNT, BUCKET} <= totals.keys():
        raise ValueError(f"the server's /metrics of {name} has no {COUNTED}")
    return _Counts(totals[SUM], totals[COUNT], buckets)


def _count_gain(before: _Counts, after: _Counts, questions: int, name: str) -> _Counts:
    """What a step added. Its buckets count the replies between two bounds, no longer all up to one."""
    if before.buckets.keys() != after.buckets.keys():
        raise ValueError(f"the server's {COUNTED} has other buckets after {name} than before")
    gained, below = dict[float, float](), 0.0
    for bound in sorted(after.buckets):
        up_to = after.buckets[bound] - before.buckets[bound]
        gained[bound], below = up_to - below, up_to
    gain = _Counts(after.tokens - before.tokens, after.answers - before.answers, gained)
    # Each comparison is false for NaN.
    if not (gain.answers >= questions and gain.tokens >= 0 and min(gained.values()) >= 0 and math.isfinite(gain.tokens)):
        raise ValueError(
            f"the server counts {gain.tokens:g} tokens of {gain.answers:g} answers to {questions} questions of {name}"
        )
    if below != gain.answers:
        raise ValueError(f"the server's {COUNTED} has {below:g} answers in its buckets of {name}, and counts {gain.answers:g}")
    return gain


def _most_variance(buckets: dict[float, float], answers: float, tokens: float) -> float:
    """The largest variance that answers with this sum can have in these buckets.

    Squares are largest where each answer is at an end of its bucket. All begin at the lower end; the tokens that are left go to
    the highest buckets first, where each adds most to the squares.
    """
    bounds = sorted(buckets)
    if not math.isfinite(bounds[0]):
        raise ValueError(f"the server's {COUNTED} has no bucket that ends, so that nothing bounds how long a reply was")
    lows = [0.0, *bounds[:-1]]
    ranges = [(low, min(high, NEXT_BOUND * low), buckets[high]) for low, high in zip(lows[1:], bounds[1:], strict=True)]
    ranges.insert(0, (0.0, bounds[0], buckets[bounds[0]]))
    squares = math.fsum(count * low**2 for low, _, count in ranges)
    left = tokens - math.fsum(count * low for low, _, count in ranges)
    for low, high, count in reversed(ranges):
        taken = min(left, count * (high - low))
        squares, left = squares + taken * (low + high), left - taken
    return max(0.0, squares / answers - (tokens / answers) ** 2)
