"""TensorRT-LLM, by `trtllm-serve` in NVIDIA's image."""

from vllm_qualify.engine.kinds.base import Conditions, Counted, EngineKind, ServedModel, hit_problem, inner_setting, plain_text
from vllm_qualify.recipe.serving import EngineName, ServerArguments

TENSORRT_LLM: EngineName = "tensorrt-llm"
# The scheduler's default policy, and the only one that never pauses a running request for another.
NO_EVICTION = "GUARANTEED_NO_EVICT"
FLAT_ERRORS = "its errors are not in an object named `error`, as OpenAI's are"
BLOCK_REUSE_REMEDY = "set enable_block_reuse to false in kv_cache_config"


def _make_config(_served: ServedModel, options: ServerArguments) -> ServerArguments:
    # Without these options /prometheus/metrics is missing, or lacks the counts of the KV cache's blocks.
    counted: ServerArguments = {"return_perf_metrics": True, "enable_iter_perf_stats": True}
    return counted | options


def _server_arguments(served: ServedModel, config: str) -> list[str]:
    """The config file holds arguments of its LLM class; the address and the model's name are options of the server."""
    return [
        *("trtllm-serve", "serve", served.model),
        *("--host", served.host, "--port", str(served.port)),
        *("--served_model_name", served.name),
        # Newer versions prefer the name --hf_revision, but all versions know this one.
        *(("--revision", served.revision) if served.revision else ()),
        *("--config", config),
    ]


def _load_problems(counted: Counted, under: Conditions) -> list[str]:
    """The server counts no pauses and, without reuse, no blocks: its configuration must rule out what it does not count."""
    succeeded, reused, missed = KIND.total("succeeded"), KIND.total("reused_blocks"), KIND.total("missed_blocks")
    if missing := counted.missing([succeeded]):
        return missing
    problems = []
    if not (answered := counted.gained(succeeded)) >= under.num_prompts:
        problems.append(f"the server counts {answered:.0f} requests of {under.num_prompts}")
    policy = inner_setting(under.arguments, "scheduler_config", "capacity_scheduler_policy", NO_EVICTION)
    if policy != NO_EVICTION:
        problems.append(f"under {policy} the server may pause requests, which it does not count: use {NO_EVICTION}")
    if inner_setting(under.arguments, "kv_cache_config", "enable_block_reuse", True) is False:
        return problems
    hits, misses = counted.gained(reused), counted.gained(missed)
    if not misses > 0:
        problems.append(f"the server does not count {missed}: {BLOCK_REUSE_REMEDY}")
    words = f"{hits:.0f} of {hits + misses:.0f} blocks of the KV cache hit"
    problem = hit_problem(words, hits, hits + misses, under, BLOCK_REUSE_REMEDY)
    return [*problems, *([problem] if problem else [])]


def _hit_share(counted: Counted) -> float | None:
    hits, misses = (counted.gained(KIND.total(name)) for name in ("reused_blocks", "missed_blocks"))
    return hits / (hits + misses) if misses > 0 else None


KIND = EngineKind(
    name=TENSORRT_LLM,
    title="TensorRT-LLM",
    package="tensorrt_llm",
    example_image="nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc29",
    # --served_model_name came with NVIDIA/TensorRT-LLM pull request 11711, between 1.2 and 1.3.
    least_version="1.3",
    parallel=("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
    concurrency="max_batch_size",
    trust_remote_code="trust_remote_code",
    speculative="speculative_config",
    repositories=(),
    unpinned=("tokenizer",),
    files=(),
    metrics_path="/prometheus/metrics",
    # From its tensorrt_llm/metrics/collector.py. A counter appears with its first count.
    counters={
        "succeeded": ("trtllm_request_success",),
        "reused_blocks": ("trtllm_kv_cache_reused_blocks",),
        "missed_blocks": ("trtllm_kv_cache_missed_blocks",),
    },
    load_problems=_load_problems,
    hit_share=_hit_share,
    # From its tensorrt_llm/serve/postprocess_handlers.py: yield_first_chat.
    opens_with_role=True,
    # From its tensorrt_llm/serve/openai_protocol.py: ErrorResponse and ModelCard.
    not_offered={
        "contract_prompt_too_long": "its /v1/models does not say how long a prompt may be",
        "contract_bad_body": FLAT_ERRORS,
        "contract_unknown_model": FLAT_ERRORS,
        "contract_alive": "none of the requests that it must refuse is asked",
        "contract_vision_broken": FLAT_ERRORS,
        "contract_hang_up": "its metrics page does not count the requests that run",
    },
    config=_make_config,
    text=plain_text,
    arguments=_server_arguments,
)
