"""A plugin of the real vLLM that plants faults in the engine, by the words in the file beside it. No test imports it.

`cached`: of requests that hit the prefix cache, every 3rd finds the last block of these corrupt. `evicted`: of blocks that are
pushed out, two of three are still found under their names, with what is in them then. `concurrent`: with 12 to 20 requests
under way, some get another's reply. `aborted`: of requests whose clients hung up, every 2nd keeps its blocks. `constrained`:
of requests with a grammar, every 8th is free of it. `lost`: of streams that may call a tool, every 8th is without its calls.
`shared`: no request has a cache of its own, whatever its salt. `sleeps`: a server on a CPU says that it can sleep, and is not
changed by it. `awake`: woken up, it has other weights.
"""

import itertools
from pathlib import Path
from typing import Any

FAULTS = Path(__file__).with_name("faults.txt")


def register() -> None:
    """Called by vLLM in each of its processes."""
    planted = {
        "cached": _corrupt,
        "evicted": _keep_names,
        "concurrent": _swap,
        "aborted": _leak,
        "constrained": _free,
        "lost": _lose,
        "shared": _share,
        "sleeps": _offer_sleep,
        "awake": _change_weights,
    }
    for fault in FAULTS.read_text().split():
        planted[fault]()


def _corrupt() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original, hits = GPUModelRunner.execute_model, itertools.count(1)

    def execute_model(self: Any, scheduler_output: Any, *others: Any, **named: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            if request.num_computed_tokens and next(hits) % 3 == 0:
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
        # Not one of two: a prompt has two whole blocks here, and the second alone is never looked for.
        if names and next(pushed_out) % 3:
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


def _lose() -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    original, started = OpenAIServingChat.chat_completion_stream_generator, itertools.count(1)

    async def chat_completion_stream_generator(self: Any, request: Any, *others: Any, **named: Any) -> Any:
        loses = bool(request.tools) and next(started) % 8 == 0
        async for line in original(self, request, *others, **named):
            if not (loses and '"tool_calls":[' in line):
                yield line

    OpenAIServingChat.chat_completion_stream_generator = chat_completion_stream_generator


def _share() -> None:
    from vllm.v1.request import Request

    original = Request.__init__

    def init(self: Any, *others: Any, **named: Any) -> None:
        original(self, *others, **named | {"cache_salt": None})

    Request.__init__ = init


def _offer_sleep() -> None:
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.is_sleep_mode_available = lambda _: True


def _change_weights() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    _offer_sleep()

    def wake_up(self: Any, tags: Any = None) -> None:  # noqa: ARG001  (vLLM's signature)
        # A transformer's norms are vectors: few weights that all answers depend on.
        for weights in self.model_runner.model.parameters():
            if weights.dim() == 1:
                weights.data.mul_(1.5)

    CPUWorker.wake_up = wake_up
