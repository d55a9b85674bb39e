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

from vllm_qualify.engine.kind import KINDS
from vllm_qualify.engine.kinds.base import Counted, CounterName, Totals
from vllm_qualify.evidence.load import steady
from vllm_qualify.evidence.load.client import APIS
from vllm_qualify.evidence.load.replay import fidelity_problems
from vllm_qualify.evidence.load.result import KEYS, Repeat
from vllm_qualify.recipe.serving import EngineName, ServerArguments
from vllm_qualify.recipe.traces.trace import Trace
from vllm_qualify.recipe.workload import Load

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
STREAM_INTERVAL = "stream_interval"
REASONING = ("reasoning-parser", "reasoning_parser")
# In older runs bench could send one request more, to see whether the server is ready.
READY_CHECKS = 1
ACCEPTANCE = ("spec_decode_num_drafts", "spec_decode_accepted_tokens", KEYS["acceptance_length_tok"])


class Asked(NamedTuple):
    """What bench was asked to do: the load, the model's served name if it is known, and of an open load its rate in req/s.

    Or of an open load its trace.
    """

    load: Load
    model: str | None = None
    rate: float | None = None
    trace: Trace | None = None

    @property
    def is_open(self) -> bool:
        return self.rate is not None or self.trace is not None

    @property
    def settings(self) -> dict[str, object]:
        """The keys in which bench tells its own settings, with the values that they must have."""
        return {
            "backend": APIS[self.load.api][0],
            "num_prompts": self.load.num_prompts,
            "request_rate": "inf" if self.rate is None else self.rate,
            "max_concurrency": None if self.is_open else self.load.max_concurrency,
            **({"burstiness": self.load.burstiness} if self.is_open else {}),
            **({"model_id": self.model} if self.model is not None else {}),
            **({"turns": str(self.load.turns)} if self.load.turns > 1 else {}),
        }


def result_problems(result: Result, asked: Asked, kind: EngineName, arguments: ServerArguments) -> list[str]:
    """Where a result disagrees with itself or with what was asked; all its requests were answered.

    `kind` and `arguments` are the server's.

    Raises one of UNUSABLE if it is no such result.
    """
    return [
        *_other_settings(result, asked),
        *_errors(result),
        *_totals(result),
        *_prompts(result, asked.load),
        *_texts(result, asked.load, arguments),
        *_times(result, asked),
        *_chunks(result),
        *_uncounted(result, kind, arguments),
        *_acceptance(result),
        *(fidelity_problems(result, asked.trace) if asked.trace else ()),
        *(_turns(result, asked.load) if asked.load.turns > 1 else ()),
    ]


def counter_problems(result: Result, counted: Counted, load: Load, kind: EngineName) -> list[str]:
    """Where the server's counters disagree with a result whose requests were all answered. Raises one of UNUSABLE.

    The result may lack its long lists.
    """
    if not _counts_tokens(kind):
        return []
    counters: tuple[CounterName, ...] = ("succeeded", "generation_tokens", "prompt_tokens")
    names = [KINDS[kind].total(name) for name in counters]
    if missing := counted.missing(names):
        return missing
    requests, generated, prompts = (counted.gained(name) for name in names)
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
    return [*problems, *_drafts(result, counted, before * result["output_lens"][0], kind)]


def _drafts(result: Result, counted: Counted, warmup_tok: float, kind: EngineName) -> Iterator[str]:
    """In older runs the server counts the drafts of the warm-ups too. None of these was longer than its reply."""
    if result.get(ACCEPTANCE[2]) is None:
        return
    counters: tuple[CounterName, ...] = ("drafts", "accepted_tokens")
    names = [KINDS[kind].total(name) for name in counters]
    if missing := counted.missing(names):
        yield missing[0]
        return
    for key, name in zip(ACCEPTANCE, names, strict=False):
        gained = counted.gained(name)
        if not 0 <= gained - result[key] <= warmup_tok:
            yield f"{key} is {result[key]}, and the server counts {gained:g}"


def went_back(before: Totals, after: Totals) -> list[str]:
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
    runs = [(repeat.number, _run(repeat)) for repeat in repeats]
    return [
        f"repeat {other} has the same requests as repeat {one}, or ran at the same time: it is no repeat of its own"
        for (one, first), (other, second) in combinations(runs, 2)
        if first.overlaps(second)
    ]


def share_requests(ours: Iterable[Repeat], theirs: Iterable[Repeat]) -> bool:
    """Whether a repeat of ours is a copy of one of theirs, or ran at the same time. Raises one of UNUSABLE."""
    return any(_run(one).overlaps(_run(other)) for one, other in product(ours, theirs))


class _Run(NamedTuple):
    """When a repeat ran, in s on bench's clock, None if bench did not record it; and its times to the first token, sorted."""

    began: float | None
    ended: float | None
    ttfts: int

    def overlaps(self, other: "_Run") -> bool:
        if self.ttfts == other.ttfts:
            return True
        if self.began is None or self.ended is None or other.began is None or other.ended is None:
            return False
        return self.began < other.ended and other.began < self.ended


def _run(repeat: Repeat) -> _Run:
    return repeat.remembered("run", lambda: _run_of(repeat.result))


def _run_of(result: Result) -> _Run:
    same = hash(tuple(sorted(result["ttfts"])))
    if "start_times" not in result:
        return _Run(None, None, same)
    starts, ends = _stretches(result)
    return _Run(float(starts.min()), float(ends.max()), same)


def _other_settings(result: Result, asked: Asked) -> Iterator[str]:
    for name, wanted in asked.settings.items():
        if (value := result[name]) != wanted:
            yield f"bench had {name} {value}, not {wanted}"


def _errors(result: Result) -> Iterator[str]:
    if errors := [error for error in result["errors"] if error]:
        yield f"{len(errors)} requests have an error: {str(errors[-1]).strip().splitlines()[-1][:200]}"


def _totals(result: Result) -> Iterator[str]:
    for total, name in (("total_input_tokens", "input_lens"), ("total_output_tokens", "output_lens")):
        lengths = result[name]
        if not all(type(length) is int and length >= 0 for length in lengths):
            raise ValueError(f"its {name} are not whole numbers")
        if result[total] != sum(lengths):
            yield f"{total} is {result[total]}, and its requests have {sum(lengths)}"


def _prompts(result: Result, load: Load) -> Iterator[str]:
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


def _texts(result: Result, load: Load, arguments: ServerArguments) -> Iterator[str]:
    """Bench does not record the reasoning that a chat's parser splits off."""
    texts = result["generated_texts"]
    if len(texts) != load.num_prompts:
        yield f"{len(texts)} texts of {load.num_prompts} replies"
    if load.api == "chat" and any(arguments.get(name) for name in REASONING):
        return
    empty = sum(not text for text in texts)
    if empty > EMPTY_ALLOWED * len(texts):
        yield f"{empty} of {len(texts)} replies have no text"


def _times(result: Result, asked: Asked) -> Iterator[str]:
    ttfts, gaps = _numbers(result["ttfts"]), _numbers([gap for gaps in result["itls"] for gap in gaps])
    wrong = int((~(np.isfinite(ttfts) & (ttfts > 0))).sum() + (~(np.isfinite(gaps) & (gaps >= 0))).sum())
    if wrong:
        yield f"{wrong} of its times to a token are no times"
        return
    if "latencies" in result:
        yield from _latencies(result, asked)
    if "start_times" in result:
        yield from _span(result, asked)


def _latencies(result: Result, asked: Asked) -> Iterator[str]:
    starts, ends = _stretches(result | {"start_times": [0.0] * len(result["ttfts"])})
    beyond = _numbers(result["latencies"]) - (ends - starts)
    # Older versions of bench end a chat's reply with the chunk that has its usage.
    most = ROUNDING_OF_REQUEST_S + (SLACK_ALLOWED * ends + SLACK_ALLOWED_S if asked.load.api == "chat" else 0 * ends)
    if wrong := int((~((beyond >= -ROUNDING_OF_REQUEST_S) & (beyond <= most))).sum()):
        yield f"{wrong} latencies are not the sum of the request's times to its tokens"


def _span(result: Result, asked: Asked) -> Iterator[str]:
    starts, ends = _stretches(result)
    took, duration = float(ends.max() - starts.min()), float(result["duration"])
    least = 0.0 if asked.rate is None else _longest_wait_s(asked.rate, asked.load.burstiness)
    if asked.rate is not None and (late := _fell_behind(starts, asked.rate)):
        yield late
    if not took - ROUNDING_S <= duration <= took * (1 + SLACK_ALLOWED) + SLACK_ALLOWED_S + least:
        yield f"its duration is {duration:.3g} s, and its requests took {took:.3g} s from the first to the last"
    # Bench makes its requests one after another, and then each waits for its turn.
    waited = _numbers(result["queue_times"]) if "queue_times" in result else np.zeros(0)
    made = np.diff(starts - waited) if len(waited) else waited
    if wrong := int((~(waited >= 0)).sum() + (~(made >= 0)).sum()):
        yield f"{wrong} of its requests began at another time than when they were made and how long they waited tell"
    at_once = _most_at_once(starts, ends)
    if not asked.is_open and at_once > asked.load.max_concurrency:
        yield f"{at_once} requests were under way at once, and max_concurrency is {asked.load.max_concurrency}"


def _turns(result: Result, load: Load) -> Iterator[str]:
    """Whether each turn of a chat began when the one before had ended, and had its prompt in it: requests come in rounds."""
    if "start_times" not in result:
        yield "this version of bench does not record when each request started, which turns need"
        return
    chats = load.num_prompts // load.turns
    starts, ends = _stretches(result)
    if early := int((~(starts[chats:] >= ends[:-chats] - ROUNDING_S)).sum()):
        yield f"{early} turns began before the reply to the one before had come"
    lengths = _numbers(result["input_lens"])
    least = (load.input_len or 0) * (1 - load.length_spread) * TURN_ALLOWED
    if short := int((~(lengths[chats:] - lengths[:-chats] >= least)).sum()):
        yield f"{short} turns do not have the prompt of the one before in them, or this version of bench does not count it"


def _longest_wait_s(rate: float, burstiness: float) -> float:
    """The most time before the first request that is likely. A gamma distribution's tail falls as its scale, 1/burstiness."""
    return LEAST_LIKELY_WAITS / rate * max(1.0, 1 / burstiness)


def _fell_behind(starts: np.ndarray, rate: float) -> str | None:
    """That bench sent its requests more slowly than asked. It plans the last of n for n/rate after it began."""
    took, planned = float(starts.max() - starts.min()), len(starts) / rate
    if took <= planned * (1 + SLACK_ALLOWED) + SLACK_ALLOWED_S:
        return None
    sent = f"its {len(starts)} requests were sent in {took:.3g} s, and {planned:.3g} s were asked"
    return f"{sent}: the client fell behind: {steady.KEEP_UP_REMEDY}"


def _most_at_once(starts: np.ndarray, ends: np.ndarray) -> int:
    """The most requests under way at one time. One that begins as another ends follows it."""
    times = np.concatenate((starts, ends - ROUNDING_S))
    steps = np.concatenate((np.ones(len(starts), dtype=int), -np.ones(len(ends), dtype=int)))
    order = np.lexsort((steps, times))
    return int(np.cumsum(steps[order]).max())


def _stretches(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """When each request began, and when its last chunk came."""
    starts, ttfts = _numbers(result["start_times"]), _numbers(result["ttfts"])
    lasted = np.asarray([math.fsum(gaps) for gaps in result["itls"]])
    if not 0 < len(starts) == len(ttfts) == len(lasted):
        raise ValueError("its lists of requests are not equally long")
    return starts, starts + ttfts + lasted


def _numbers(values: Iterable[float]) -> np.ndarray:
    numbers = np.asarray([*values])
    if len(numbers) and numbers.dtype.kind not in "fi":
        raise ValueError("its times are not numbers")
    return numbers


def _chunks(result: Result) -> Iterator[str]:
    both = zip(result["itls"], result["output_lens"], strict=True)
    if more := sum(len(gaps) + 1 > length + EMPTY_CHUNKS for gaps, length in both):
        yield f"{more} replies came in more chunks than their usage has tokens"


def _counts_tokens(kind: EngineName) -> bool:
    return "generation_tokens" in KINDS[kind].counters


def _uncounted(result: Result, kind: EngineName, arguments: ServerArguments) -> Iterator[str]:
    """Without a count of its tokens, only a server's chunks tell that it sent them. Drafting and intervals join tokens."""
    if _counts_tokens(kind) or any(arguments.get(name) for name in (KINDS[kind].speculative, STREAM_INTERVAL)):
        return
    chunks, tokens = sum(len(gaps) + 1 for gaps in result["itls"]), sum(result["output_lens"])
    if not chunks >= CHUNKS_PER_TOKEN * tokens:
        yield f"its replies came in {chunks} chunks and have {tokens} tokens by its usage, which the server does not count"


def _acceptance(result: Result) -> Iterator[str]:
    if result.get(ACCEPTANCE[2]) is None:
        return
    drafts, accepted, reported = (result[name] for name in ACCEPTANCE)
    if not (drafts > 0 and abs(reported - 1 - accepted / drafts) <= ROUNDING_S):
        yield f"{ACCEPTANCE[2]} is {reported:g}, and {accepted} tokens of {drafts} drafts were accepted"
