"""A repeat's result file, as `vllm bench serve` wrote it, and the samples beside it."""

import json
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vllm_qualify.evidence.load import steady
from vllm_qualify.evidence.load.replay import at_trace_times, planned_trace
from vllm_qualify.evidence.memory import Memory, digest_together
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.metrics import GOODPUT, OUTPUT_THROUGHPUT, PEAK_CHUNKS, TURN_TTFTS
from vllm_qualify.recipe.traces.trace import Trace

RESET = "/reset_prefix_cache"
# Bench's names of the metrics that are no latency. `key_of` builds those of latencies.
KEYS = {
    "request_throughput_req_s": "request_throughput",
    OUTPUT_THROUGHPUT: "output_throughput",
    "total_throughput_tok_s": "total_token_throughput",
    GOODPUT: "request_goodput",
    "acceptance_length_tok": "spec_decode_acceptance_length",
    PEAK_CHUNKS: "max_output_tokens_per_s",
}
# Bench's names of the two interfaces, and their paths.
APIS = {"completions": ("openai", "/v1/completions"), "chat": ("openai-chat", "/v1/chat/completions")}
# How far bench's own figures may differ from those of its requests. Only rounding is between them, except that older versions
# end a chat's reply with the chunk that has its usage.
CONTRADICTION_ALLOWED, OF_CHATS_ALLOWED, OF_CHATS = 1e-6, 0.01, ("tpot", "e2el")
# The folder, in the stage's folder, of a baseline that was measured in turns.
BESIDE = "beside"
# The long ones of bench's lists: a number for each token, and each reply's text.
LONG_LISTS = ("itls", "generated_texts")
# No repeat lasts so many seconds.
MOST_S = 10_000_000
# The results remembered for a file are small. No load has more repeats.
RESULTS = Memory(files=256)

Remembered = TypeVar("Remembered")


@dataclass(frozen=True)
class Repeat:
    """A repeat as bench left it.

    A big load's file takes seconds to read, so results from it are remembered for as long as the file is the same.
    """

    folder: Path
    number: int
    path: str
    """of its result file, in the evidence folder"""
    text: str

    @cached_property
    def result(self) -> Any:
        """All that bench wrote. Raises ValueError if it is not JSON."""
        return json.loads(self.text)

    @property
    def summary(self) -> Any:
        """The result without its LONG_LISTS. Raises ValueError."""
        return self.remember("summary", self._without_long_lists)

    def _without_long_lists(self) -> Any:
        if not isinstance(self.result, dict):
            return self.result
        return {name: value for name, value in self.result.items() if name not in LONG_LISTS}

    def line_of(self, key: str) -> str:
        """The line of a key in the result file, as `path:line`; only the path if the file does not have the key."""
        line = self.remember(("line", key), lambda: _line_of(self.text, key))
        return self.path if line is None else f"{self.path}:{line}"

    def steady(self, settings: Load) -> "Steady":
        what = ("steady", settings.model_dump_json())
        return self.remember(what, lambda: steady_of(self.result, settings, planned_trace(self.folder, settings)))

    @property
    def peak_chunks(self) -> int:
        return self.remember("peak", lambda: peak_chunks(self.result))

    def remember(self, what: Hashable, find: Callable[[], Remembered]) -> Remembered:
        """The same as `Memory.find`, for the result file."""
        return RESULTS.find(self._text_digest, what, find)

    @cached_property
    def _text_digest(self) -> bytes:
        return digest_together(self.text.encode(errors="surrogatepass"))


def _line_of(text: str, key: str) -> int | None:
    """The first line with a key. One regular expression for all would take long in a long text."""
    name, colon, at = f'"{key}"', re.compile(r"\s*:"), -1
    while (at := text.find(name, at + 1)) >= 0:
        if text[at - 1 : at] != "\\" and colon.match(text, at + len(name)):
            # Bench writes only one line, and to check for that is quicker than to count.
            return 1 if text.find("\n", 0, at) < 0 else text.count("\n", 0, at) + 1
    return None


@dataclass(frozen=True)
class Steady:
    """What a repeat measured in its steady state, and over how many requests. `untold` says why metrics have no value."""

    values: dict[str, float]
    requests: int
    rebuilt: bool
    untold: dict[str, str]


def metrics_pages(folder: Path, number: int) -> tuple[Path, Path]:
    """The server's /metrics from before a repeat, and from after it."""
    return folder / f"metrics-{number}-before.txt", folder / f"metrics-{number}-after.txt"


def count_of(folder: Path) -> int:
    """The number of repeats in a folder. Raises OSError."""
    names = [re.fullmatch(r"bench-([1-9]\d*)\.json", path.name) for path in folder.iterdir()]
    return max((int(name[1]) for name in names if name), default=0)


def read_repeat(folder: Path, place: str, number: int) -> Repeat:
    """Read a repeat from a folder, whose path in the evidence is `place`. Raises one of UNUSABLE, also if the file is cut."""
    repeat = Repeat(folder, number, f"{place}/bench-{number}.json", (folder / f"bench-{number}.json").read_text())
    _ = repeat.summary
    return repeat


def steady_of(result: dict[str, Any], settings: Load, trace: Trace | None = None) -> Steady:
    """What the requests of a result show, those of a trace from their times in the trace on.

    Over a whole run the figures are the same as bench's own, but computed from its requests, and without the first chunk of a
    chat where the load skips it. Raises steady.UnsteadyError if these have no steady state or contradict bench's,
    steady.OverloadError if they were sent faster than the server can answer.
    """
    requests = steady.requests_of(result, settings.max_concurrency)
    whole = steady.figures_of(steady.whole_window(requests, float(result["duration"])), settings.slo, as_bench=True)
    for name, value in whole.items():
        is_of_chats, reported = settings.api == "chat" and name.startswith(OF_CHATS), float(result[key_of(name)])
        allowed = OF_CHATS_ALLOWED if is_of_chats else CONTRADICTION_ALLOWED
        # `not … <=`: NaN contradicts its requests too.
        if not abs(reported - value) <= allowed * abs(value):
            compared = f"{key_of(name)} is {reported:g}, and by them {value:g}"
            raise steady.UnsteadyError(f"bench's own figure contradicts its requests: {compared}")
    if trace:
        result = at_trace_times(result, trace)
        requests = steady.requests_of(result, settings.max_concurrency)
        whole = steady.figures_of(steady.whole_window(requests, result["duration"]), settings.slo, as_bench=True)
    if settings.skips_role:
        # Bench takes it for the first token. Some servers send it long before.
        requests = requests.without_openings()
        window = steady.whole_window(requests, float(result["duration"]))
        whole = steady.figures_of(window, settings.slo, as_bench=True)
    if settings.window == "whole":
        return Steady(whole | _turn_ttfts(result, settings), len(requests.starts), requests.rebuilt, {})
    window = steady.find_open_window(requests) if settings.is_open else steady.find_window(requests, settings.max_concurrency)
    untold = steady.distrusted_metrics(window, settings.slo)
    values = {name: value for name, value in steady.figures_of(window, settings.slo).items() if name not in untold}
    return Steady(values, window.count, requests.rebuilt, untold)


def _turn_ttfts(result: dict[str, Any], settings: Load) -> dict[str, float]:
    """Empty for a load without turns. Bench's lists are in the order of its requests, in which first turns come first."""
    if settings.turns == 1:
        return {}
    opened = [sum(gaps[:1]) if settings.skips_role else 0.0 for gaps in result["itls"]]
    ttfts, chats = np.asarray(result["ttfts"], dtype=float) + np.asarray(opened), settings.num_prompts // settings.turns
    parts = zip(TURN_TTFTS, (ttfts[:chats], ttfts[chats:]), strict=True)
    return {name: 1000 * float(np.median(part)) for name, part in parts}


def peak_chunks(result: dict[str, Any]) -> int:
    """The most chunks in one of the seconds since the first request's start, as bench counts. Raises one of UNUSABLE."""
    starts, ttfts = (np.asarray(result[name], dtype=float) for name in ("start_times", "ttfts"))
    # Summed up one after another, as bench does: else rounding could move a chunk into the next second.
    came = [np.cumsum([first, *gaps]) for first, gaps in zip(starts + ttfts, result["itls"], strict=True)]
    seconds = np.concatenate(came) - starts.min()
    if not ((seconds >= 0) & (seconds < MOST_S)).all():
        raise ValueError("its times to a token are no times")
    return int(np.bincount(seconds.astype(int)).max())


def key_of(name: str) -> str:
    """Bench's own name of a metric, over the whole run."""
    if name in KEYS:
        return KEYS[name]
    if name in TURN_TTFTS:
        return "ttfts"
    latency, statistic, unit = name.split("_")
    return f"{statistic}_{latency}_{unit}"
