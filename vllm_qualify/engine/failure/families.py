"""What each family of vLLM's messages means: decisions of people who read vLLM's source. Pure.

A family is a part of vLLM's source and words that its messages share; the first family that fits a message decides. A message's
text has `{}` where vLLM puts a value in. docs/design/0066 says how the families were made and tried.
"""

import re
from typing import Literal, NamedTuple

from vllm_qualify.engine.failure.meanings import FailureClass

Fate = FailureClass | Literal["consequence", "request", "survived"]
"""What a message means: a failure, or words of a parent process, of one request, or of something that the start survives"""

NOT_OF_A_START = ("consequence", "request", "survived")


class Family(NamedTuple):
    """Messages from `places` with `words`: what they mean, and the remedy where the failure's own is not enough."""

    fate: Fate
    places: re.Pattern[str]
    words: re.Pattern[str]
    remedy: str | None = None


def make_family(fate: Fate, places: str, words: str = "", remedy: str | None = None) -> Family:
    return Family(fate, re.compile(places), re.compile(words, re.I), remedy)


_ANYWHERE = ""
# A package and its version. An option or a size stands before a plain number, or is one letter, or is joined with "_".
A_VERSION = r"[A-Za-z][A-Za-z0-9.-]{2,40} ?[>=]= ?(?:v?\d+\.\d|\{\})"
# Where options are read and held against one another.
_OPTIONS = (
    r"^(?:config/|engine/arg_utils|envs\.py|entrypoints/(?:cli|launchers|openai/cli_args|openai/api_server|grpc_server|serve/)"
    r"|entrypoints/(?:utils|llm|ssl)|utils/(?:argparse|numa)|logging_utils|plugins/|platforms/|reasoning/abs|tool_parsers/abs"
    r"|parser/(?:abstract|parser_manager)|usage/|tracing|logger\.py|snapshot/|profiler/|v1/metrics|v1/watermarking|kernels/helion"
    r"|scripts\.py|connections\.py|ray/|distributed/(?:kv_transfer|ec_transfer|weight_transfer|eplb|elastic_ep)"
    r"|v1/(?:kv_offload|simple_kv_offload|hisparse|spec_decode|pool|kv_cache_interface|core)"
    r"|config\.py|scheduler\.py|ir/|watermarking|v1/utils)"
)
_KERNELS = (
    r"^(?:v1/attention|attention/|model_executor/(?:layers/(?:fused_moe|attention|mamba|mla|fla|kda|sparse|deepseek|batch_invariant"
    r"|conv|hyper|indexer|fused|mhc|activation|lightning|linear_attn|kernels|ple|resampler|short_conv|layernorm|fp8_kv|topk)"
    r"|kernels|warmup|offloader)|kernels/|_custom_ops|_aiter_ops|_xpu_ops|_ipex_ops|third_party/(?!pynvml)|utils/(?:deep_gemm|flashinfer)"
    r"|models/[^/]+/(?:nvidia|amd|xpu|cpu|ops|kernels|common/ops)|v1/sample/ops|cute|lora/ops|triton_utils|vllm_flash_attn)"
)
_QUANTIZATION = (
    r"^(?:model_executor/layers/quantization|model_executor/layers/(?:utils|linear|vocab_parallel|parameter)"
    r"|model_executor/parameter)"
)
_MODELS = r"^(?:model_executor/(?:models|layers)|models/|model_executor/(?:utils|custom_op|model_arch))"
_LOADING = (
    r"^(?:model_executor/model_loader|model_executor/weight|utils/tensorizer|transformers_utils/(?:runai|s3|gguf)|assets/)"
)
_FILES_OF_MODELS = (
    r"^(?:transformers_utils|tokenizers|renderers|tool_parsers|reasoning|multimodal/(?:registry|processing|cache)"
    r"|parser/|tokenizers_)"
)
_WORKERS = (
    r"^(?:v1/(?:worker|executor|engine|core|cudagraph|serial|fault)|worker/|executor/|engine/|forward_context"
    r"|device_allocator|compilation)"
)
_DISTRIBUTED = r"^distributed/"

_GPU_WORDS = (
    r"capability|\bGPUs?\b.{0,40}(?:support|require|architecture)|(?:current|this) (?:GPU|device|platform|hardware)"
    r"|\bSM ?\d|sm_?\d|hopper|blackwell"
    r"|ampere|\bAda\b|gfx\d|\bMI\d{3}|\bROCm\b|\bCUDA\b(?! ?graph)|\bXPU\b|\bCPU\b|NVIDIA|\bAMD\b|platform"
)
_DIVIDED = r"divisible|divide|tensor.?parallel|\bTP\b|aligned|multiple of|world.?size|number of (?:kv |query |attention )?heads"
_NOT_INSTALLED = (
    r"install|not available|is required for|could not (?:be )?import|cannot import|failed to import|unable to import"
    r"|no module|not found in your"
    r"|(?:requires|needs) (?:the )?[\w-]+ ?(?:package|library|version|to be installed)|please (?:update|upgrade)"
    rf"|rebuild|not built|build of|(?:requires|needs) (?:the )?{A_VERSION}"
)
_NO_MEMORY = r"out of memory|not enough memory|insufficient memory|memory.{0,30}exceed|OOM\b"
_WEIGHTS = (
    r"weights?\b|checkpoint|parameter|shard|state.?dict|tensors?\b.{0,30}(?:shape|size|dtype|load|missing|found)"
    r"|safetensors|scale|shape mismatch"
    r"|module .{0,40}(?:named|not found)|not (?:found|initialized) in|missing|expected .{0,30}(?:shape|tensor)"
)
_OF_INPUTS = (
    r"image|video|audio|pixel|modalit|multi-?modal|prompt|placeholder|embeds?\b|embeddings? (?:of|for|type)|frames?\b"
    r"|speech|waveform|sampling_rate"
    r"|sampl(?:e|ing) rate|language\b|patch|token_?type|input_ids|inputs?_embeds|mm_|feature_?attention|timestamps?"
    r"|spectrogram|transcri|translat|chunks?\b"
    r"|request|batch(?:ed)? (?:input|size)|query|messages?\b|conversation|chat|tool|logprob|grid_thw|position|mel\b"
    r"|mask|document|score|text pair"
)
_INVARIANT = (
    r"unreachable|should (?:not|never) (?:be|happen|reach)|impossible|not (?:yet )?implement|must implement|subclass"
    r"|abstract|unexpected|internal"
    r"|invalid (?:state|status|index|request)|already (?:been )?(?:registered|initialized|exists?|set|started|running"
    r"|finalized)"
    r"|not (?:been )?(?:initialized|set|started|registered|bound|configured)|has no attribute|is none|must not be none"
    r"|cannot be none|bug|file an issue"
    r"|open an issue|duplicate|must be called|before|only be called|expected .{0,60} got|mismatch|\bempty\b|unknown"
    r"|invalid|not found|must|length"
)

_REFUSAL_WORDS = (
    r"support|unsupported|incompatible|mutually exclusive|cannot be (?:used|combined|enabled|set|larger|greater|other)"
    r"|only (?:available|valid|works?|for|with)"
    r"|requires? |needs |not (?:allowed|valid for|compatible|implemented)|deprecated|has been removed|no valid"
    r"|please (?:set|use|specify|choose|add|remove|disable)"
    r"|disable|enable|must (?:enable|set|specify|provide)|exceeds?|too (?:many|large|small)|larger than|greater than"
    r"|at (?:least|most)"
)
# Names as the command line, the configuration or the environment has them.
_OPTION_WORDS = (
    r"--\w|VLLM_|_config\b|_size\b|_backend\b|connector|\bargument|\boption|\bconfig|\bflag|\bmode\b|must be specified"
    r"|not specified|is required"
)
# What only vLLM's own code can give to its kernels.
_OF_TENSORS = (
    r"\b(?:tensors?|dtypes? (?:of|must|mismatch)|shapes?|strides?|ndim|contiguous|pointer|numel|rows|cols|columns"
    r"|buffer|workspace|batch_size|cu_seqlens|seqlens?"
    r"|num_tokens|topk_|out|query|key|value|hidden_states|logits|LSE|temperature|metadata|scratch|scale_?s?) (?:must"
    r"|should|has|have|is|are|mismatch|cannot|does)"
    r"|must (?:be|have) (?:Int|Float|BF16|FP|int|float|torch|uint|u?int\d|the same|equal|positive|non-negative"
    r"|contiguous|\d-?D|on |CUDA)|got (?:\{\}|shape|dtype|device)|shape mismatch"
    r"|expected \d|expected \{\} |Expected \w+-dimensional|same \[|out of range|is out of bounds"
)
# Where a configuration is read, and nothing else happens.
_CONFIGURATION = (
    r"^(?:config/|engine/arg_utils|envs\.py|entrypoints/(?:cli|launchers|openai/cli_args|common/cli_args|llm)|platforms/"
    r"|utils/argparse|config\.py)"
)

FAMILIES = [
    # A parent's words, and those of processes that end because another one did.
    make_family(
        "consequence",
        _ANYWHERE,
        r"engine core initialization failed|failed core proc|engine process failed|workerproc initialization failed"
        r"|died unexpectedly"
        r"|worker (?:proc|failed|died|process)|enginecore (?:encountered|failed|hit|died|fatal)|engine.{0,12}dead"
        r"|engine is dead"
        r"|executor failed|shutting down|shutdown|api server .{0,20}(?:failed|exit|died)|terminated"
        r"|error in inspecting model|cancel"
        r"|\bsee (?:the )?(?:stack trace|logs?|root cause)|failed to be inspected|aborting",
    ),
    # Python's own words, which anybody may say.
    make_family(
        "engine-bug",
        _ANYWHERE,
        r"has no attribute|object is not (?:callable|iterable|subscriptable)|unexpected keyword argument",
    ),
    make_family(
        "refused-configuration",
        r"^(?:reasoning|tool_parsers|parser)/",
        r"could not locate .* in the tokenizer",
        "take the parser of the model's own family, or leave it out",
    ),
    # What no server of the recipe's does: other programs and offline calls.
    make_family(
        "request",
        r"^(?:benchmarks/|.*/(?:test_|bench)|entrypoints/(?:openai/(?!cli_args|api_server)|pooling|generate|anthropic|scale_out|speech|sagemaker|mcp|chat|cohere|ollama"
        r"|score|rerank|logger|context|harmony|constants)|sampling_params|pooling_params|inputs?/|outputs\.py|v1/structured_output"
        r"|v1/sample/(?!ops)|v1/request|multimodal/(?:media|inputs|image|video|audio|parse|hasher|utils|budget|evs|processing)|parser/(?!abs)"
        r"|tool_parsers/(?!abs)|reasoning/(?!abs)|renderers/(?!chat_utils)|logits_process|beam_search|v1/engine/(?:input|output|detoken|logprobs"
        r"|parallel_sampling|processor|async_llm|exceptions)|exceptions\.py|sequence\.py|tasks\.py|model_executor/layers/pooler|lora/resolver|grpc/"
        r"|entrypoints/serve/(?!instrumentator)|entrypoints/(?:tool|utils/request))",
    ),
    make_family(
        "request",
        r"^(?:model_executor/models|models/|transformers_utils/processors|multimodal/|renderers/|v1/worker)",
        rf"\b(?:{_OF_INPUTS})",
    ),
    # Memory.
    make_family(
        "kv-cache-too-small",
        r"^(?:v1/core/kv_cache|v1/worker|config/|v1/engine)",
        r"kv cache is needed|available kv cache|cache blocks",
    ),
    make_family("gpu-memory-in-use", r"^v1/worker", r"free memory on device|memory profiling|less than desired GPU"),
    make_family(
        "out-of-memory",
        _ANYWHERE,
        r"available memory on node|CPU memory|host memory.{0,30}(?:exceed|insufficient|enough)"
        r"|shared memory.{0,40}(?:full|enough|exceed)",
    ),
    make_family("cuda-out-of-memory", _ANYWHERE, _NO_MEMORY),
    # Packages that are missing, and programs that cannot be started.
    make_family("broken-installation", r"^(?!config/(?:attention|vllm))", rf"(?:{_NOT_INSTALLED})"),
    # vLLM's own assumptions, first those that are told so.
    make_family(
        "engine-bug",
        rf"{_KERNELS}|{_MODELS}|{_WORKERS}|{_QUANTIZATION}|{_DISTRIBUTED}",
        r"unreachable|should (?:not|never) (?:be|happen|reach|get)|must be called|subclass|\bdecorat"
        r"|already (?:been )?(?:registered|initialized|bound)"
        r"|(?:is|are|was) not (?:been )?(?:initialized|bound)|(?:open|file) an? (?:vllm )?issue|\bcontiguous\b"
        r"|same device|must (?:have|be) (?:shape|dtype|\dD)"
        r"|expect(?:s|ed) \S+ (?:shape|dtype|tensor|weight|input)|\bndim\b|must be \d-?D|is not implemented for",
    ),
    # Ranks that do not meet.
    make_family(
        "rendezvous",
        rf"{_DISTRIBUTED[:-1]}|v1/(?:engine|executor)|utils/network",
        r"time.?out|timed out|waiting for .*(?:start|ready|join|ranks?|clients?)|connection|(?:fail|unable"
        r"|could not).{0,20} connect|handshake|rendezvous"
        r"|no route|\bbarrier",
    ),
    make_family(
        "too-few-gpus",
        _ANYWHERE,
        r"placement group|no GPU available|number of available (?:GPUs|nodes)"
        r"|not enough (?:GPUs|nodes|resources)|available GPUs"
        r"|cluster does not have",
    ),
    make_family(
        "no-gpu",
        r"^(?:platforms|config/device|third_party/pynvml|utils|device_allocator)",
        r"infer device|NVML|no (?:GPU|device)|visible|device (?:id|ordinal|index)|amdsmi|GCN arch",
    ),
    make_family("compile-cache", r"^compilation", r"cache|artifact|corrupt"),
    make_family("nccl-failure", rf"{_DISTRIBUTED}device_communicators", r"NCCL|\bnccl|all.?reduce|rccl|custom_all"),
    # A model's code, configuration, tokenizer and weights.
    make_family(
        "refused-configuration",
        r"^model_executor/model_loader|^transformers_utils/(?:runai|s3)",
        r"config file for|load.?format|extra config|quantization=|enable_|not support|unsupported|option|argument|`\w+`|--\w",
    ),
    make_family("weights-do-not-fit", _LOADING, _WEIGHTS),
    make_family("incomplete-model", _LOADING),
    make_family(
        "refused-configuration",
        r"^lora/",
        "",
        "take another adapter, or change the options of adapters (max-loras, max-lora-rank)",
    ),
    make_family(
        "refused-configuration",
        rf"{_QUANTIZATION}|{_MODELS}|{_KERNELS}",
        _DIVIDED,
        "a smaller tensor-parallel-size, or what vLLM names",
    ),
    make_family("engine-bug", rf"{_QUANTIZATION}|{_KERNELS}", _OF_TENSORS),
    make_family("unsupported-quantization", _QUANTIZATION),
    make_family("unsupported-backend", _KERNELS, rf"{_REFUSAL_WORDS}|{_GPU_WORDS}|backend|kernel"),
    make_family("engine-bug", _KERNELS),
    make_family("weights-do-not-fit", _MODELS, rf"\b(?:{_WEIGHTS})"),
    make_family(
        "refused-configuration",
        _MODELS,
        r"pipeline|parallel|lora|enable|--\w|quantiz|cudagraph|CUDA graph|speculative|eagle|mtp|kv.?cache|dtype|prefix",
    ),
    make_family("unsupported-architecture", _MODELS),
    make_family("incomplete-model", _FILES_OF_MODELS, r"file|json|config|missing|token|template|not found|load|vocab"),
    make_family("unsupported-architecture", _FILES_OF_MODELS),
    # Options.
    make_family(
        "unsupported-quantization",
        r"^(?:config/|platforms/|engine/arg)",
        rf"quantiz.{{0,120}}(?:{_GPU_WORDS}|not support|unsupported)",
    ),
    make_family(
        "unsupported-backend",
        r"^(?:config/|platforms/|engine/arg)",
        r"backend.{0,120}(?:not support|unsupported|not valid|only|requires|no valid)",
    ),
    make_family(
        "invalid-value",
        _OPTIONS,
        r"valid (?:options|values|modes|kinds|choices|backends)? ?are|must be one of|expected one of|choose from",
    ),
    make_family("refused-configuration", _CONFIGURATION),
    make_family("refused-configuration", _OPTIONS, rf"{_REFUSAL_WORDS}|{_OPTION_WORDS}"),
    make_family("engine-bug", _OPTIONS),
    make_family("refused-configuration", rf"{_WORKERS}|{_DISTRIBUTED}", rf"{_REFUSAL_WORDS}|{_OPTION_WORDS}"),
    # vLLM's own assumptions.
    make_family(
        "engine-bug",
        r"^(?:v1|worker|executor|engine|distributed|utils|compilation|device_allocator|model_executor|models|third_party|multimodal)",
    ),
]


def decide(place: str, text: str) -> Family | None:
    """The family of the message `text` from the file `place` of vLLM's source; None if nobody decided."""
    return next((family for family in FAMILIES if family.places.search(place) and family.words.search(text)), None)
