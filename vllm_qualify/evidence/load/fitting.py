"""Fit: finds server options on the machine itself, by starting the server, before the cell is qualified.

First comes the smallest tensor-parallel size with which the server starts. Then `max-num-seqs`: as many requests of the
workload's full length as the KV cache holds. Another start under the load confirms it, because more sequences leave less memory
for the cache. Last comes `max-num-batched-tokens`: of several, the one with the highest output throughput. Each search uses the
options found before it.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.engine.metrics_page import samples_of
from vllm_qualify.errors import QualifyError, RecipeError
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.startup import KvCache
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import plan_fitted
from vllm_qualify.recipe.serving import ServerArguments
from vllm_qualify.recipe.values import Count, CountOrZero, Frozen, Number

STAGE = "fit"
TENSOR_PARALLEL, SEQUENCES, BATCHED = "tensor-parallel-size", "max-num-seqs", "max-num-batched-tokens"
# Failures that more GPUs can mend.
TOO_SMALL = ("cuda-out-of-memory", "kv-cache-too-small")
# vLLM's usual block size, if the server does not report its own; on the CPU it is 128 tokens. A request takes whole blocks.
BLOCK_TOK = 16
# vLLM keeps the first block for itself: the "null block" fills places that need none.
OWN_BLOCKS = 1
# A number that fails is lowered to this share of it, or to what the cache then holds. At most so many numbers are tried.
LOWERED, MOST_CONFIRMATIONS = 0.75, 5
TRY, FIT_RESULT = "try.json", "found.json"
CACHE = "vllm:cache_config_info"


class Try(Frozen):
    """One start of the server, with these options in place of the recipe's.

    `failed_because` has a reason if the server did not start, if its load is invalid, or if it does not take as many requests
    at once as its options say. `holds` is the number of the workload's requests that the KV cache holds.
    """

    arguments: ServerArguments
    failed_because: str | None = None
    kv_cache_tok: Count | None = None
    holds: CountOrZero | None = None
    output_throughput_tok_s: Number | None = None


class Tried(Frozen):
    """The options that were found, and all starts that were needed."""

    found: ServerArguments
    tries: list[Try]


class Started(NamedTuple):
    """A server that is tried: its KV cache by its log, and functions that measure it under the plan's load.

    `throughput` is the output throughput over the planned repeats. `preemptions` counts those of one repeat.
    """

    kv_cache: KvCache | None
    throughput: Callable[[], Measurement]
    preemptions: Callable[[], int]


Attempt = Callable[[CellPlan, Path], AbstractContextManager[Started]]
"""Serves a plan's server with its files in this folder. Raises QualifyError with a kind if the server does not start."""
Then = Callable[[Started, Try], Try]
"""Measures something on a started server, and returns the try with the result."""


def _measure_throughput(started: Started, tried: Try) -> Try:
    throughput = started.throughput()
    return tried.model_copy(update={"failed_because": throughput.invalid_because, "output_throughput_tok_s": throughput.value})


def block_tok(page: str) -> int | None:
    """The tokens of a block of the KV cache, by the server's /metrics. None if it does not give them."""
    infos = samples_of(page, lambda line: line.startswith(CACHE))
    sizes = [info.labels.get("block_size", "") for info in infos if info.name == CACHE]
    return max((int(size) for size in sizes if size.isdecimal() and int(size)), default=None)


class Fitting:
    """The search. The files of each start go to a folder `try-N`."""

    def __init__(self, plan: CellPlan, attempt: Attempt, folder: Path) -> None:
        self.plan, self.attempt, self.folder = plan, attempt, folder
        self.tries: list[Try] = []

    def find(self) -> Tried:
        """Search all that the plan leaves open.

        Raises RecipeError if nothing fits, QualifyError if the server fails for another reason than its memory.
        """
        fit = self.plan.fit
        if fit is None:
            raise ValueError("the plan has nothing to fit")
        arguments: ServerArguments = {}
        first = self._find_smallest(fit.tensor_parallel_sizes) if fit.tensor_parallel_sizes else None
        if first:
            arguments |= first.arguments
        if fit.max_num_seqs:
            arguments |= self._find_sequences(first or self._start_server({}))
        if fit.max_num_batched_tokens:
            arguments |= self._find_fastest(arguments, fit.max_num_batched_tokens)
        return Tried(found=arguments, tries=self.tries)

    def _find_smallest(self, sizes: list[int]) -> Try:
        for size in sizes:
            tried = self._start_server({TENSOR_PARALLEL: size}, TOO_SMALL)
            if tried.failed_because is None:
                return tried
        reasons, place = [str(tried.failed_because) for tried in self.tries], f"{STAGE}.tensor_parallel_sizes"
        problem = f"the model fits none of the tensor-parallel sizes {sizes}"
        raise RecipeError(problem, "add a larger one, or shorten max-model-len", place, reasons)

    def _find_sequences(self, first: Try) -> ServerArguments:
        """As many sequences as the KV cache holds when the server is started with that many, by the log of each start.

        Fewer if the server has too little memory for them, or preempts requests under the load.
        """
        known = {name: value for name, value in first.arguments.items() if name == TENSOR_PARALLEL}
        wanted, refusals = self._check_holds(first), list[str]()
        while wanted and len(refusals) < MOST_CONFIRMATIONS:
            tried = self._start_server({**known, SEQUENCES: wanted}, TOO_SMALL, partial(self._confirm_sequences, wanted))
            if tried.failed_because is None:
                return {SEQUENCES: wanted}
            refusals.append(f"{SEQUENCES} {wanted}: {tried.failed_because}")
            wanted = tried.holds if tried.holds and tried.holds < wanted else math.floor(LOWERED * wanted)
        raise RecipeError(
            f"{len(refusals)} numbers of {SEQUENCES} were tried, and the server takes none of them under the load",
            f"give {SEQUENCES} under 'server', or mend what each start failed by",
            f"{STAGE}.max_num_seqs",
            refusals,
        )

    def _confirm_sequences(self, wanted: int, started: Started, tried: Try) -> Try:
        """The try, failed unless `wanted` requests have room without preemptions. Raises RecipeError if not even one has."""
        held, because = self._check_holds(tried), None
        if held < wanted:
            because = f"its KV cache holds {held} requests"
        elif preemptions := started.preemptions():
            because = f"{preemptions} preemptions under the load"
        return tried.model_copy(update={"failed_because": because})

    def _check_holds(self, tried: Try) -> int:
        if not tried.holds:
            size = f"{tried.kv_cache_tok:,} tokens" if tried.kv_cache_tok else "an unknown size"
            raise RecipeError(
                f"the KV cache has {size}, and does not hold one request of the workload",
                "raise gpu-memory-utilization or tensor_parallel_sizes, or shorten the workload's lengths",
                f"{STAGE}.max_num_seqs",
            )
        return tried.holds

    def _find_fastest(self, chosen: ServerArguments, sizes: list[int]) -> ServerArguments:
        tries = [self._start_server({**chosen, BATCHED: size}, TOO_SMALL, _measure_throughput) for size in sizes]
        measured = [tried for tried in tries if tried.output_throughput_tok_s is not None]
        if not measured:
            reasons, place = [str(tried.failed_because) for tried in tries], f"{STAGE}.max_num_batched_tokens"
            problem = f"no load of max_num_batched_tokens {sizes} is valid"
            raise RecipeError(problem, "mend what makes them invalid", place, reasons)
        best = max(measured, key=lambda tried: tried.output_throughput_tok_s or 0)
        return {BATCHED: best.arguments[BATCHED]}

    def _start_server(self, arguments: ServerArguments, refuses: tuple[str, ...] = (), then: Then | None = None) -> Try:
        """Start the server. A failure of a kind in `refuses` becomes a failed try. Any other is raised, with its place."""
        folder = self.folder / f"try-{len(self.tries) + 1}"
        folder.mkdir()
        try:
            with self.attempt(plan_fitted(self.plan, arguments), folder) as started:
                tried = self._describe_start(arguments, started.kv_cache)
                tried = then(started, tried) if then else tried
        except QualifyError as error:
            if error.kind not in refuses:
                options = ", ".join(f"{name} {value}" for name, value in arguments.items())
                error.add_note(f"{STAGE}/{folder.name}: the server was started with {options or 'those of the recipe'}")
                raise
            tried = Try(arguments=arguments, failed_because=error.problem)
        (folder / TRY).write_text(tried.model_dump_json(indent=2))
        self.tries.append(tried)
        return tried

    def _describe_start(self, arguments: ServerArguments, kv_cache: KvCache | None) -> Try:
        """The try, with how many requests of the workload's full length the KV cache holds, each in whole blocks."""
        if kv_cache is None:
            return Try(arguments=arguments)
        block_tok = kv_cache.block_tok or BLOCK_TOK
        of_request = math.ceil((self.plan.load.longest_tok or 1) / block_tok)
        holds = max(0, kv_cache.tokens // block_tok - OWN_BLOCKS) // of_request
        return Try(arguments=arguments, kv_cache_tok=kv_cache.tokens, holds=holds)
