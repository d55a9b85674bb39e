"""Whether vLLM cut prompts into pieces during a load: a step's tokens are at most max-num-batched-tokens.

Its histogram of tokens per step counts a prompt as a whole in the step that ends it (vllm/v1/metrics/stats.py of 0.32). So a
step with more tokens than the limit ended a prompt that an earlier step had begun.
"""

import re
from pathlib import Path

from vllm_qualify.engine.metrics_page import samples_of

OPTION = "max-num-batched-tokens"
STEPS = "vllm:iteration_tokens_total_bucket"
PAGES = re.compile(r"metrics-\d+-before\.txt")
# Fewer would hardly show in any figure of the load.
LEAST_SHARE = 0.01
# vLLM's documentation, "Optimization and Tuning", section "Performance Tuning with Chunked Prefill".
ADVICE = "a higher value shortens the time to the first token and can raise the throughput, a lower one the time between tokens"


def cut_prompts(folder: Path, limit_tok: object) -> list[str]:
    """In words, how often prompts were cut during the repeats in a load's folder. `limit_tok` is the option's value.

    Empty if they hardly were, without such an option, or if the server does not count its steps. Raises one of UNUSABLE.
    """
    if isinstance(limit_tok, bool) or not isinstance(limit_tok, int):
        return []
    cut = steps = 0.0
    for before in sorted(path for path in folder.iterdir() if PAGES.fullmatch(path.name)):
        pages = (before, before.with_name(before.name.replace("before", "after")))
        (cut_then, steps_then), (cut_now, steps_now) = (_count_cut_steps(page.read_text(), limit_tok) for page in pages)
        cut, steps = cut + cut_now - cut_then, steps + steps_now - steps_then
    if not (steps > 0 and cut / steps >= LEAST_SHARE):
        return []
    return [
        f"in {cut:,.0f} of {steps:,.0f} steps the server ended prompts that {OPTION} {limit_tok} had cut into pieces: {ADVICE};"
        " `fit` tries several"
    ]


def _count_cut_steps(page: str, limit_tok: int) -> tuple[float, float]:
    """The steps of more tokens than the limit, as far as the buckets tell them apart, and all steps, over all engines."""
    up_to: dict[float, float] = {}
    for sample in samples_of(page, lambda line: line.startswith(STEPS)):
        if sample.name == STEPS:
            bound = float(sample.labels["le"])
            up_to[bound] = up_to.get(bound, 0.0) + sample.value
    within = [bound for bound in up_to if bound >= limit_tok]
    return (up_to[max(up_to)] - up_to[min(within)], up_to[max(up_to)]) if within else (0.0, 0.0)
