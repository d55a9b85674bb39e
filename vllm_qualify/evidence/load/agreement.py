"""Whether a repeat's evidence agrees: what was asked, bench's file, its times, tokens and texts, and the server's counters.

Bench counts the tokens of a reply by the server's own `usage`, which a faulty server can get wrong. The server's counters come
from another place, the scheduler, so both must give the same number. Texts and gaps alone prove little: end-of-text is ignored,
so that special tokens without a text are common, and a busy server or one that drafts sends several tokens in one chunk.

Bench's record is taken as a whole: every number that is used here is held against others of the same file, of the recipe or of
the server.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from vllm_qualify.engine.kinds.base import Counted, CounterName, EngineKind, Totals
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.load import steady
from vllm_qualify.evidence.load.replay import fidelity_problems
from vllm_qualify.evidence.load.result import APIS, KEYS, Repeat
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.serving import ServerArguments
from vllm_qualify.recipe.traces.trace import Trace

Result = dict[str, Any]

# A tokenizer may read a random prompt as a few more or fewer tokens than were drawn, and adds its own at the beginning.
LENGTH_ALLOWED, LENGTH_ALLOWED_TOK = 0.10, 4
# A turn that has the one before in its prompt is longer by its own text; another is about as long. A text of 128 random tokens
# added 97 to a chat of the reference model, where the reply was empty.
TURN_ALLOWED = 0.5
# Of bench's duration, the time before the first request and after the last.
SLACK_ALLOWED, SLACK_ALLOWED_S = 0.05, 0.2
# With requests sent at a rate, the first is sent after a random time. It is seldom so many times the mean.
LEAST_LIKELY_WAITS = 10
# Rounding in sums of times since the machine's start. Sums of a request's own times are far more exact.
ROUNDING_S, ROUNDING_OF_REQUEST_S = 1e-6, 1e-9
# A reply without any text is possible: its tokens may all be special ones. Not so for most replies.
EMPTY_ALLOWED = 0.5
# Chunks without a token: one that opens a chat's reply, and one that ends a reply.
EMPTY_CHUNKS = 2
# If the server does not count its tokens, so many chunks must come for each token of its `usage`.
CHUNKS_PER_TOKEN = 0.5
STREAM_INTERVALS = ("stream_interval", "stream-interval")
REASONING = ("reasoning-parser", "reasoning_parser")
# In older runs bench could send one request more, to see whether the server is ready.
READY_CHECKS = 1
ACCEPTANCE = ("spec_decode_num_drafts", "spec_decode_accepted_tokens", KEYS["acceptance_length_tok"])


def setting_problems(result: Result, load: Load, model: str) -> list[str]:
    """Where a result was measured with other settings than the load's, or of a model with another served name."""
    expected = {
        "backend": APIS[load.api][0],
        "num_prompts": load.num_prompts,
        "request_rate": "inf" if load.request_rate is None else load.request_rate,
        "max_concurrency": None if load.is_open else load.max_concurrency,
        **({"burstiness": load.burstiness} if load.is_open else {}),
        "model_id": model,
        **({"turns": str(load.turns)} if load.turns > 1 else {}),
    }
    return [f"{name} {result[name]}, not {value}" for name, value in expected.items() if result[name] != value]


def result_problems(result: Result, load: Load, server: ServerPlan, trace: Trace | None = None) -> list[str]:
    """Where a result disagrees with itself or with the load, whose `trace` it is; all requests were answered.

    Raises one of UNUSABLE if it is no such result.
    """
    errors = [error for error in result["errors"] if error]
    return [
        *(f"bench had {problem}" for problem in setting_problems(result, load, server.served_model_name)),
        *([f"{len(errors)} requests have an error: {str(errors[-1]).strip().splitlines()[-1][:200]}"] if errors else []),
        *_total_problems(result),
        *_prompt_problems(result, load),
        *_text_problems(result, load, server.arguments),
        *_time_problems(result, load),
        *_chunk_problems(result, server),
        *_acceptance_problems(result),
        *(fidelity_problems(result, trace) if trace else ()),
        *(_turn_problems(result, load) if load.turns > 1 else ()),
    ]


def counter_problems(result: Result, counted: Counted, load: Load, kind: EngineKind) -> list[str]:
    """Where the server's counters disagree with a result whose requests were all answered. Raises one of UNUSABLE.

    The result may lack its long lists.
    """
    if "generation_tokens" not in kind.counters:
        return []
    counters: tuple[CounterName, ...] = ("succeeded", "generation_tokens", "prompt_tokens")
    names = [kind.total(name) for name in counters]
    if missing := counted.missing(names):
        return missing
    requests, generated, prompts = map(counted.gained, names)
    before = requests - load.num_prompts
    # In older runs bench itself warmed up, with its first prompt.
    if before != 0 and not load.num_warmups <= before <= load.num_warmups + READY_CHECKS:
        return [f"the server counts {requests:g} requests, and bench sent {load.num_prompts}"]
    outputs, inputs = (sum(result[name]) + before * result[name][0] for name in ("output_lens", "input_lens"))
    problems = []
    if generated != outputs:
        problems.append(f"the server counts {generated:g} generated tokens, and by its usage there were {outputs:g}")
    most = math.inf if load.api == "chat" else _most_tok(inputs, requests)
    # A chat has the template's tokens, which older versions of bench do not count.
    if not _least_tok(inputs, requests) <= prompts <= most:
        problems.append(f"the server counts {prompts:g} tokens of prompts, and bench {inputs:g}")
    return [*problems, *_draft_problems(result, counted, before * result["output_lens"][0], kind)]


def _draft_problems(result: Result, counted: Counted, warmup_tok: float, kind: EngineKind) -> Iterator[str]:
    """In older runs the server counts the drafts of the warm-ups too. None of these was longer than its reply."""
    if result.get(ACCEPTANCE[2]) is None:
        return
    counters: tuple[CounterName, ...] = ("drafts", "accepted_tokens")
    names = [kind.total(name) for name in counters]
    missing = counted.missing(names)
    yield from missing
    for key, name in zip(ACCEPTANCE, () if missing else names, strict=False):
        gained = counted.gained(name)
        if not 0 <= gained - result[key] <= warmup_tok:
            yield f"{key} is {result[key]}, and the server counts {gained:g}"


def counter_resets(before: Totals, after: Totals) -> list[str]:
    """That counters went back, each with its labels: one can only do that if its server was started anew.

    A counter that the later page lacks altogether is for those to miss who need it.
    """
    there = {name_of(key) for key in after}
    lower = {name_of(key) for key, value in before.items() if after.get(key, -math.inf) < value}
    back = sorted(there & lower)
    return [f"the server's count of {', '.join(back)} went back: it was started anew meanwhile"] if back else []


def name_of(key: str) -> str:
    """The name of a counter from a key with its labels."""
    return key.partition("{")[0]


def repeat_problems(repeats: Sequence[Repeat]) -> list[str]:
    """Repeats that are copies of each other, or that ran at the same time. Raises one of UNUSABLE."""
    runs = [(repeat.number, _find_span(repeat)) for repeat in repeats]
    return [
        f"repeat {other} has the same requests as repeat {one}, or ran at the same time: it is no repeat of its own"
        for (one, first), (other, second) in combinations(runs, 2)
        if first.overlaps(second)
    ]


def share_requests(ours: Iterable[Repeat], theirs: Iterable[Repeat]) -> bool:
    """Whether a repeat of ours is a copy of one of theirs, or ran at the same time. Raises one of UNUSABLE."""
    return any(_find_span(one).overlaps(_find_span(other)) for one, other in product(ours, theirs))


class _Run(NamedTuple):
    """From when to when a repeat ran, in s on bench's clock, None if bench did not record it; and a hash of its `ttfts`."""

    span: tuple[float, float] | None
    ttfts: int

    def overlaps(self, other: "_Run") -> bool:
        if self.ttfts == other.ttfts or self.span is None or other.span is None:
            return self.ttfts == other.ttfts
        return self.span[0] < other.span[1] and other.span[0] < self.span[1]


def _find_span(repeat: Repeat) -> _Run:
    return repeat.remember("run", lambda: _measure_span(repeat.result))


def _measure_span(result: Result) -> _Run:
    same = hash(tuple(sorted(result["ttfts"])))
    if "start_times" not in result:
        return _Run(None, same)
    starts, ends = _request_spans(result)
    return _Run((float(starts.min()), float(ends.max())), same)


def _total_problems(result: Result) -> Iterator[str]:
    for total, name in (("total_input_tokens", "input_lens"), ("total_output_tokens", "output_lens")):
        lengths = result[name]
        if not all(type(length) is int and length >= 0 for length in lengths):
            raise ValueError(f"its {name} are not whole numbers")
        if result[total] != sum(lengths):
            yield f"{total} is {result[total]}, and its requests have {sum(lengths)}"


def _prompt_problems(result: Result, load: Load) -> Iterator[str]:
    lengths = result["input_lens"]
    if len(lengths) != load.num_prompts:
        yield f"{len(lengths)} lengths of {load.num_prompts} prompts"
    if load.input_len is None:
        return
    prefix = load.shared_prefix_len
    least, most = (prefix + load.input_len * (1 + spread) for spread in (-load.length_spread, load.length_spread))
    low, high = math.floor(_least_tok(least)), math.inf if load.api == "chat" else math.ceil(_most_tok(most))
    if other := [length for length in lengths if not low <= length <= high]:
        yield f"{len(other)} prompts do not have about {prefix + load.input_len} tokens, the first of them {other[0]}"


def _least_tok(tokens: float, prompts: float = 1) -> float:
    return tokens * (1 - LENGTH_ALLOWED) - LENGTH_ALLOWED_TOK * prompts


def _most_tok(tokens: float, prompts: float = 1) -> float:
    return tokens * (1 + LENGTH_ALLOWED) + LENGTH_ALLOWED_TOK * prompts


def _text_problems(result: Result, load: Load, arguments: ServerArguments) -> Iterator[str]:
    texts = result["generated_texts"]
    if len(texts) != load.num_prompts:
        yield f"{len(texts)} texts of {load.num_prompts} replies"
    empty = sum(not text for text in texts)
    if empty > EMPTY_ALLOWED * len(texts) and not splits_reasoning(load, arguments):
        yield f"{empty} of {len(texts)} replies have no text"


def splits_reasoning(load: Load, arguments: ServerArguments) -> bool:
    """Whether a chat's parser splits off reasoning, which bench does not record."""
    return load.api == "chat" and any(arguments.get(name) for name in REASONING)


def _time_problems(result: Result, load: Load) -> Iterator[str]:
    ttfts, gaps = _number_array(result["ttfts"]), _number_array([gap for gaps in result["itls"] for gap in gaps])
    wrong = int((~(np.isfinite(ttfts) & (ttfts > 0))).sum() + (~(np.isfinite(gaps) & (gaps >= 0))).sum())
    if wrong:
        yield f"{wrong} of its times to a token are no times"
        return
    if "latencies" in result:
        yield from _latency_problems(result, load)
    if "start_times" in result:
        yield from _span_problems(result, load)


def _latency_problems(result: Result, load: Load) -> Iterator[str]:
    starts, ends = _request_spans(result | {"start_times": [0.0] * len(result["ttfts"])})
    beyond = _number_array(result["latencies"]) - (ends - starts)
    # Older versions of bench end a chat's reply with the chunk that has its usage.
    most = ROUNDING_OF_REQUEST_S + (SLACK_ALLOWED * ends + SLACK_ALLOWED_S if load.api == "chat" else 0 * ends)
    if wrong := int((~((beyond >= -ROUNDING_OF_REQUEST_S) & (beyond <= most))).sum()):
        yield f"{wrong} latencies are not the sum of the request's times to its tokens"


def _span_problems(result: Result, load: Load) -> Iterator[str]:
    starts, ends = _request_spans(result)
    took, duration = float(ends.max() - starts.min()), float(result["duration"])
    rate, wait_s = load.request_rate, 0.0
    if rate is not None:
        # A gamma distribution's tail falls as its scale, 1/burstiness.
        wait_s = LEAST_LIKELY_WAITS / rate * max(1.0, 1 / load.burstiness)
        # Bench plans the last of n requests for n/rate after it began.
        sent_s, planned_s = float(starts.max() - starts.min()), len(starts) / rate
        if not sent_s <= planned_s * (1 + SLACK_ALLOWED) + SLACK_ALLOWED_S:
            sent = f"its {len(starts)} requests were sent in {sent_s:.3g} s, and {planned_s:.3g} s were asked"
            yield f"{sent}: the client fell behind: {steady.KEEP_UP_REMEDY}"
    if not took - ROUNDING_S <= duration <= took * (1 + SLACK_ALLOWED) + SLACK_ALLOWED_S + wait_s:
        yield f"its duration is {duration:.3g} s, and its requests took {took:.3g} s from the first to the last"
    # Bench makes its requests one after another, and then each waits for its turn.
    waited = _number_array(result["queue_times"]) if "queue_times" in result else np.zeros(0)
    made = np.diff(starts - waited) if len(waited) else waited
    if wrong := int((~(waited >= 0)).sum() + (~(made >= 0)).sum()):
        yield f"{wrong} of its requests began at another time than when they were made and how long they waited tell"
    at_once = _most_at_once(starts, ends)
    if not load.is_open and at_once > load.max_concurrency:
        yield f"{at_once} requests were under way at once, and max_concurrency is {load.max_concurrency}"


def _turn_problems(result: Result, load: Load) -> Iterator[str]:
    """Whether each turn of a chat began when the one before had ended, and had its prompt in it: requests come in rounds."""
    if "start_times" not in result:
        yield "this version of bench does not record when each request started, which turns need"
        return
    chats = load.num_prompts // load.turns
    starts, ends = _request_spans(result)
    if early := int((~(starts[chats:] >= ends[:-chats] - ROUNDING_S)).sum()):
        yield f"{early} turns began before the reply to the one before had come"
    lengths = _number_array(result["input_lens"])
    least = (load.input_len or 0) * (1 - load.length_spread) * TURN_ALLOWED
    if short := int((~(lengths[chats:] - lengths[:-chats] >= least)).sum()):
        yield f"{short} turns do not have the prompt of the one before in them, or this version of bench does not count it"


def _most_at_once(starts: np.ndarray, ends: np.ndarray) -> int:
    """The most requests under way at one time. One that begins as another ends follows it."""
    times, steps = np.concatenate((starts, ends - ROUNDING_S)), np.repeat((1, -1), len(starts))
    return int(np.cumsum(steps[np.lexsort((steps, times))]).max())


def _request_spans(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """When each request began, and when its last chunk came."""
    starts, ttfts = _number_array(result["start_times"]), _number_array(result["ttfts"])
    lasted = np.asarray([math.fsum(gaps) for gaps in result["itls"]])
    if not 0 < len(starts) == len(ttfts) == len(lasted):
        raise ValueError("its lists of requests are not equally long")
    return starts, starts + ttfts + lasted


def _number_array(values: Iterable[float]) -> np.ndarray:
    numbers = np.asarray([*values])
    if len(numbers) and numbers.dtype.kind not in "fi":
        raise ValueError("its times are not numbers")
    return numbers


def _chunk_problems(result: Result, server: ServerPlan) -> Iterator[str]:
    """Without a count of its tokens, only a server's chunks tell that it sent them. Drafting and intervals join tokens."""
    chunks, lengths, kind = [len(gaps) + 1 for gaps in result["itls"]], result["output_lens"], server.engine_kind
    if more := sum(count > length + EMPTY_CHUNKS for count, length in zip(chunks, lengths, strict=True)):
        yield f"{more} replies came in more chunks than their usage has tokens"
    joins_tokens = any(server.arguments.get(name) for name in (kind.speculative, *STREAM_INTERVALS))
    if "generation_tokens" in kind.counters or joins_tokens or sum(chunks) >= CHUNKS_PER_TOKEN * sum(lengths):
        return
    came = f"its replies came in {sum(chunks)} chunks and have {sum(lengths)} tokens by its usage"
    yield f"{came}, which the server does not count"


def _acceptance_problems(result: Result) -> Iterator[str]:
    if result.get(ACCEPTANCE[2]) is None:
        return
    drafts, accepted, reported = (result[name] for name in ACCEPTANCE)
    if not (drafts > 0 and abs(reported - 1 - accepted / drafts) <= ROUNDING_S):
        yield f"{ACCEPTANCE[2]} is {reported:g}, and {accepted} tokens of {drafts} drafts were accepted"
