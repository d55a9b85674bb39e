"""What is in a trace, in numbers."""

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from vllm_qualify.recipe.traces.trace import Trace
from vllm_qualify.recipe.values import Count, CountOrZero, Frozen, NotNegative, Share

# The length of the stretch with the most arrivals.
PEAK_S = 10


class Lengths(Frozen):
    """Tokens: percentiles by the nearest rank, the most, and all together."""

    p50_tok: Count
    p90_tok: Count
    p99_tok: Count
    most_tok: Count
    total_tok: Count


class Summary(Frozen):
    """`burstiness` is that of a load at this trace's mean rate: 1 for a Poisson process; None for fewer than three requests.

    `peak_req_s` is the mean over the busiest 10 s. `shared_share` is the most that a prefix cache can hit.
    """

    form: str
    requests: Count
    lasts_s: NotNegative
    mean_req_s: NotNegative | None
    peak_req_s: NotNegative
    burstiness: NotNegative | None
    prompts: Lengths
    replies: Lengths
    longest_tok: Count
    shared_tok: CountOrZero
    shared_share: Share
    digest: str

    @property
    def lines(self) -> list[str]:
        """For a terminal."""
        mean = "all at once" if self.mean_req_s is None else f"{self.mean_req_s:.3g} req/s on average"
        peak = f", {self.peak_req_s:.3g} req/s in the busiest {PEAK_S} s" if self.lasts_s >= PEAK_S else ""
        bursts = "" if self.burstiness is None else f", burstiness {self.burstiness:.2g} (1 is a Poisson process)"
        return [
            f"form        {self.form}",
            f"requests    {self.requests:,} in {self.lasts_s:,.1f} s",
            f"arrivals    {mean}{peak}{bursts}",
            f"prompts     {_describe_lengths(self.prompts)}",
            f"replies     {_describe_lengths(self.replies)}",
            f"context     {self.longest_tok:,} tokens at most, prompt and reply",
            f"prefixes    {self.shared_share:.1%} of the prompts' tokens began an earlier prompt too",
            f"digest      {self.digest}",
        ]


def _describe_lengths(lengths: Lengths) -> str:
    each = f"median {lengths.p50_tok:,}, p90 {lengths.p90_tok:,}, p99 {lengths.p99_tok:,}, most {lengths.most_tok:,}"
    return f"{each} tokens, {lengths.total_tok:,} in all"


def summary_of(trace: Trace, form: str) -> Summary:
    arrivals_s = trace.arrivals_s
    lasts_s = arrivals_s[-1]
    peak = max(Counter(int(at // PEAK_S) for at in arrivals_s).values())
    return Summary(
        form=form,
        requests=len(arrivals_s),
        lasts_s=lasts_s,
        mean_req_s=(len(arrivals_s) - 1) / lasts_s if lasts_s else None,
        peak_req_s=peak / PEAK_S,
        burstiness=_estimate_burstiness(arrivals_s),
        prompts=_summarize_lengths(trace.input_toks),
        replies=_summarize_lengths(trace.output_toks),
        longest_tok=max(map(sum, zip(trace.input_toks, trace.output_toks, strict=True))),
        shared_tok=trace.shared_tok,
        shared_share=trace.shared_share,
        digest=trace.digest,
    )


def _summarize_lengths(tokens: Sequence[int]) -> Lengths:
    ranked = sorted(tokens)
    p50, p90, p99 = (ranked[-(-len(ranked) * percent // 100) - 1] for percent in (50, 90, 99))
    return Lengths(p50_tok=p50, p90_tok=p90, p99_tok=p99, most_tok=ranked[-1], total_tok=sum(ranked))


def _estimate_burstiness(arrivals_s: Sequence[float]) -> float | None:
    """The shape of the gamma distribution with this mean and variance of the times between requests, mean² / variance."""
    gaps = [after - before for before, after in pairwise(arrivals_s)]
    if len(gaps) < 2 or not (variance := statistics.variance(gaps)):
        return None
    return statistics.fmean(gaps) ** 2 / variance
