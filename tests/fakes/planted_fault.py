"""A plugin of the real vLLM that plants faults in the engine, by the words in the file beside it. No test imports it.

`cached`: of requests that hit the prefix cache, every 6th finds the last block of these corrupt. `evicted`: of blocks that are
pushed out, every 3rd is still found under its name, with what is in it then. `concurrent`: with 12 to 20 requests under way,
some get the reply to another one. `aborted`: of requests whose clients hung up, every 2nd keeps its blocks. `constrained`: of
requests with a grammar, every 8th is free of it.
"""

import itertools
from pathlib import Path
from typing import Any

FAULTS = Path(__file__).with_name("faults.txt")


def register() -> None:
    """Called by vLLM in each of its processes."""
    for fault in FAULTS.read_text().split():
        {"cached": _corrupt, "evicted": _keep_names, "concurrent": _swap, "aborted": _leak, "constrained": _free}[fault]()


def _corrupt() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original, hits = GPUModelRunner.execute_model, itertools.count(1)

    def execute_model(self: Any, scheduler_output: Any, *others: Any, **named: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            if request.num_computed_tokens and next(hits) % 6 == 0:
                block = request.block_ids[0][request.num_computed_tokens // self.cache_config.block_size - 1]
                for cache in self.kv_caches:
                    cache.select([*cache.shape].index(self.cache_config.num_gpu_blocks), block).normal_()
        return original(self, scheduler_output, *others, **named)

    GPUModelRunner.execute_model = execute_model


def _keep_names() -> None:
    from vllm.v1.core.block_pool import BlockPool

    original, pushed_out = BlockPool._remove_cached_block_hashes, itertools.count(1)

    def remove(self: Any, block: Any) -> Any:
        names = original(self, block)
        if names and next(pushed_out) % 3 == 0:
            for name in names:
                self.cached_block_hash_to_block.insert(name, block)
        return names

    BlockPool._remove_cached_block_hashes = remove


def _swap() -> None:
    from vllm.v1.engine.output_processor import OutputProcessor

    original, seen, others, started = OutputProcessor.process_outputs, set[str](), dict[str, str](), itertools.count(1)
    waiting: dict[int, str] = {}

    def process_outputs(self: Any, outputs: list[Any], *more: Any, **named: Any) -> Any:
        for output in outputs:
            name = output.request_id
            if name in seen or name not in self.request_states:
                continue
            seen.add(name)
            tokens = self.request_states[name].max_tokens_param
            partner = waiting.pop(tokens, None)
            if partner is not None and any(output.request_id == partner for output in outputs):
                others[name], others[partner] = partner, name
            elif 12 <= len(self.request_states) <= 20 and next(started) % 4 == 0:
                waiting[tokens] = name
        for output in outputs:
            output.request_id = others.get(output.request_id, output.request_id)
        return original(self, outputs, *more, **named)

    OutputProcessor.process_outputs = process_outputs


def _leak() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    original, left = Scheduler._free_request_blocks, itertools.count(1)

    def free_request_blocks(self: Any, request: Any) -> None:
        if request.status != RequestStatus.FINISHED_ABORTED or next(left) % 2:
            original(self, request)

    Scheduler._free_request_blocks = free_request_blocks


def _free() -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    original, started, freed = StructuredOutputManager.grammar_bitmask, itertools.count(1), dict[str, bool]()

    def grammar_bitmask(self: Any, requests: Any, names: list[str], *others: Any, **named: Any) -> Any:
        bitmask = original(self, requests, names, *others, **named)
        for row, name in enumerate(names):
            if freed.setdefault(name, next(started) % 8 == 0):
                bitmask[row] = -1
        return bitmask

    StructuredOutputManager.grammar_bitmask = grammar_bitmask
