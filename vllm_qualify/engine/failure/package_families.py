"""What the messages of the packages mean that a start of vLLM runs through: decisions of people, by families. Pure.

A place begins with the package's name as Python imports it, and the file in it, or `native` for a text of its shared objects;
a numbered error of CUDA or HIP has the place `cuda/NAME`. The first family that fits decides.
"""

from vllm_qualify.engine.failure.families import A_VERSION, Family, make_family

_INSTALLED = (
    r"\binstall|packaged into|please build"
    r"|not built|built with|built in\b|not compiled|recompile|rebuild|could not (?:be )?import|cannot import"
    r"|failed to import|unable to import|no module|not available in (?:this|your) (?:build|installation)"
    r"|please (?:update|upgrade)"
    r"|(?:requires|needs) (?:the )?[\w.{}-]+ ?(?:library|package|version)|version mismatch"
    rf"|(?:requires|needs) (?:the )?{A_VERSION}"
    r"|incompatible version"
    r"|is required (?:to|for) (?:use|run|load)|mismatched versions|librar(?:y|ies) .{0,30}(?:not found|missing)"
)
_COMPILER = (
    r"nvcc|\bC\+\+ compiler|C compiler|\bninja\b|CUDA_HOME|CUDA_PATH|ROCM_HOME|SYCL_HOME|\bgcc\b|\bg\+\+|clang\b|hipcc|ptxas"
    r"|cuobjdump|nvdisasm|toolkit|compiler (?:not|is not|was not) found|no (?:working )?compiler|cannot find .{0,40}compiler"
)
_GPU = (
    r"capabilit"
    r"|\bSM ?\{?\d|\bsm_?\{?\d|hopper|blackwell|ampere|\bAda\b|gfx\d|\bMI\d{3}|(?:this|current|your) (?:GPU|device|arch)"
    r"|architecture|on (?:the )?(?:target|device|platform)|GPUs? (?:with|or|newer|only|that)|unsupported arch"
)
_DENIED = (
    r"support|only (?:available|valid|works?|for|on)|requires?|unsupported|not (?:allowed|implemented|available)"
    r"|no .{0,40}found"
)
_QUANTIZED = r"fp8|fp4|nvfp4|mxfp\d|float8|e4m3|e5m2|int4|quantiz"
_ABSENT = (
    r"no (?:GPU|CUDA|HIP|accelerator)"
    r"|(?:GPU|CUDA|accelerator|device)s? (?:is|are|was|were) (?:not )?(?:available|found|visible|detected)"
)
_WAITED = (
    r"time.?d? ?out|timeout|connect|unreachable|handshake|rendezvous|join|\bport\b|hostname|resolve|address|store\b|socket"
    r"|\bGCS\b"
)
_OF_A_COMPILER = r"^torch/(?:_dynamo|_inductor|_functorch|fx|_higher_order_ops|_export|_subclasses)"
_OF_FILES = (
    r"corrupt|invalid (?:header|magic|file|JSON)|not a (?:valid )?(?:zip|ZIP|JSON|safetensors)|unexpected (?:EOF|pos)|truncat"
)
_OF_A_REQUEST = (
    r"image|video|audio|speech|prompt|chat|conversation|message|\btext|token_ids|input_ids|batch|sequence|pad(?:ding|ded)?\b"
    r"|truncat|return_tensors|sampling rate|frames?\b|generat|logits|pixel|box(?:es)?|annotation|assistant|overflow|prediction"
)

FAMILIES = [
    # The numbered errors of CUDA and HIP, by their names; what is left is the release's own.
    make_family("cuda-out-of-memory", "^cuda/.*(?:MemoryAllocation|OutOfMemory)"),
    make_family(
        "driver-too-old",
        "^cuda/.*JitCompilerNotFound",
        "",
        "give the container all of the driver's libraries: NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    make_family(
        "driver-too-old",
        "^cuda/.*(?:InsufficientDriver|CallRequiresNewerDriver|SystemDriverMismatch|CompatNotSupported|UnsupportedPtxVersion)",
    ),
    make_family(
        "no-gpu",
        "^cuda/.*Mps",
        "",
        "check CUDA's Multi-Process Service on this host, which serves the GPU: its daemon, its limits and its versions",
    ),
    make_family("no-gpu", "^cuda/.*(?:NoDevice|DevicesUnavailable|DeviceNotLicensed|SystemNotReady|StubLibrary)"),
    make_family("too-few-gpus", "^cuda/.*InvalidDevice$"),
    make_family("gpu-broken", "^cuda/.*(?:ECC|HardwareStack|Nvlink|Contained|ErrorUnknown)"),
    make_family(
        "unsupported-gpu",
        "^cuda/.*(?:NoKernelImage|NoBinary|InvalidDeviceFunction|InvalidKernelImage|InvalidImage|UnsupportedExecAff)",
    ),
    make_family("broken-installation", "^cuda/.*SharedObject"),
    make_family("nccl-failure", "^cuda/.*(?:PeerAccessUnsupported|TooManyPeers)"),
    make_family("crashed", "^cuda/"),
    # Words of those who end because another one did, and of code that looks for errors.
    make_family(
        "consequence",
        "",
        r"worker .{0,30}(?:died|exited|failed)|(?:actor|task|process|child) .{0,40}(?:died|dead|killed|terminated|cancel)"
        r"|owner .{0,20}died|shut(?:ting)? ?down|aborted?\b|raised the following exception|see (?:above|the (?:log"
        r"|trace|error))"
        r"|exception in .{0,40}process",
    ),
    make_family("request", r"^transformers/(?:tokenization|processing|image_|video_|feature_extraction|audio)", _OF_A_REQUEST),
    make_family(
        "request",
        r"^transformers/models/(?!auto)[^/]+/(?:processing|image|video|feature)",
        rf"{_OF_A_REQUEST}|number of|points|labels|mask",
    ),
    # Training and saving, which no server does.
    make_family(
        "request",
        r"^(?:transformers|safetensors)/",
        r"gradient|\btrain(?:ing|er)?\b|\bsav(?:e|ing)(?:_\w+)?\b|push_to_hub|share memory",
    ),
    make_family("request", r"^transformers/(?:generation|pipelines|cache_utils)"),
    # Memory.
    make_family("out-of-memory", "^ray/", r"memory|object store .{0,40}full|/dev/shm"),
    make_family("cuda-out-of-memory", "", r"out of memory|not enough memory|insufficient memory"),
    # The hub and what it gives.
    make_family(
        "not-in-cache",
        "^(?:huggingface_hub|transformers)/",
        r"outgoing traffic|offline|local_files_only|in the (?:disk )?cache|cached (?:snapshot|file)"
        r"|not find the requested files",
    ),
    make_family("unknown-model", "^huggingface_hub/", r"repo_id|repo id|repository (?:not|id|name)"),
    make_family("unknown-revision", "^(?:huggingface_hub|transformers)/", r"git identifier|revision .{0,30}(?:not|invalid)"),
    make_family(
        "gated-model",
        "^(?:huggingface_hub|transformers)/",
        r"\btoken\b.{0,60}(?:required|found|logged|login|invalid)|authenticat|gated|log ?in",
    ),
    make_family("incomplete-model", "^(?:huggingface_hub|safetensors)/", r"safetensors|header|shard|index file|checkpoint"),
    make_family(
        "incomplete-model",
        "^huggingface_hub/dataclasses",
        "",
        "mend the field of the model's config.json, or take a vLLM version whose transformers takes it",
    ),
    make_family("disk-full", "^huggingface_hub/", r"disk space|not enough (?:free )?space"),
    make_family("no-permission", "^huggingface_hub/", r"permission|symlink|writable|file lock"),
    make_family(
        "hub-unreachable", "^huggingface_hub/(?:file_download|_snapshot|hf_file|utils/_(?:http|xet|h)|lfs|errors|_local)"
    ),
    make_family("hub-unreachable", "^transformers/utils/hub", r"connection|couldn't connect|load .{0,40}(?:url|files)"),
    make_family("engine-bug", "^huggingface_hub/"),
    # Compilers and packages.
    make_family("broken-installation", "^triton/backends/nvidia", r"cannot find (?:ptxas|nvdisasm|cuobjdump)"),
    make_family("unsupported-gpu", "^torch/utils/cpp_extension", r"unknown CUDA arch"),
    make_family(
        "no-compiler",
        r"^(?:torch/(?:utils/cpp|_inductor)|triton/(?:runtime|backends|knobs)|flashinfer/(?:jit|compil|__init__"
        r"|get_inc)|vllm/third)",
        _COMPILER,
    ),
    make_family(
        "unsupported-architecture",
        "^transformers/models/auto|^transformers/(?:processing|tokenization)",
        r"recogni[sz]|does not exist|no .{0,30}mapping|upgrade",
    ),
    make_family("unsupported-architecture", "^transformers/modeling_gguf", r"architecture|not supported"),
    make_family(
        "refused-configuration",
        "^transformers/",
        r"trust_remote_code|custom code|execute the",
        "read the code, set trust-remote-code in the recipe, and give --allow-code",
    ),
    make_family(
        "unsupported-backend",
        "^transformers/",
        r"attn_implementation|flash.?attention|flex.?attention|sdpa|\battention implement",
    ),
    make_family("no-gpu", "^(?:transformers|torch|triton|ray)/", _ABSENT),
    make_family(
        "no-gpu", "^triton/(?:runtime/driver|backends)", r"active drivers?|libcuda|libamdhip|drivers? .{0,20}not found"
    ),
    make_family("driver-too-old", "^torch/cuda", r"driver .{0,60}(?:old|version)|update your GPU driver"),
    make_family("broken-installation", "", _INSTALLED),
    # Quantizations and GPUs that do not fit.
    make_family(
        "unsupported-quantization", "^transformers/(?:quantizers|integrations|utils/quantization)", rf"(?:{_DENIED})|(?:{_GPU})"
    ),
    make_family("incomplete-model", "^transformers/utils/quantization"),
    make_family("engine-bug", "^transformers/(?:quantizers|integrations)"),
    make_family(
        "unsupported-quantization",
        "^(?:triton|flashinfer|vllm)/",
        rf"(?:{_QUANTIZED}).{{0,80}}(?:{_GPU}|support)|(?:{_GPU}).{{0,80}}(?:{_QUANTIZED})",
    ),
    make_family(
        "unsupported-backend",
        "^(?:triton|flashinfer|vllm)/",
        rf"(?:{_GPU}).{{0,120}}(?:{_DENIED})|(?:{_DENIED}).{{0,120}}(?:{_GPU})",
    ),
    make_family(
        "unsupported-backend",
        "^flashinfer/",
        r"backend.{0,80}(?:support|require|only|invalid|unknown)|(?:support|unsupported|no) .{0,60}(?:backend|kernel"
        r"|head.?dim|page.?size)",
    ),
    # A model's configuration, its tokenizer, its weights.
    make_family(
        "weights-do-not-fit",
        "^transformers/(?:modeling_utils|core_model|conversion|integrations)",
        r"weight|state.?dict|checkpoint|shape|parameter|key",
    ),
    make_family("unsupported-architecture", "^transformers/(?:models/auto|dynamic_module)"),
    make_family(
        "incomplete-model",
        r"^transformers/(?:configuration|modeling_rope|modeling_gguf|models/[^/]+/configuration|tokenization|processing"
        r"|image_proc|video_proc"
        r"|feature_ext|convert_slow|models/[^/]+/(?:tokenization|processing|image|video|feature)|utils/(?:hub|generic|chat))",
    ),
    make_family(
        "incomplete-model",
        "^torch/(?:serialization|hub|_weights_only|native)",
        rf"{_OF_FILES}|weights.only|PytorchStreamReader|pickle|zip archive|magic",
    ),
    make_family("incomplete-model", "^transformers/modeling_utils", r"no file named|safetensors|not the path"),
    make_family("engine-bug", "^transformers/"),
    # What vLLM itself asks of Ray.
    make_family(
        "engine-bug", "^ray/", r"must not be provided|^bundles? (?:must|cannot)|resource quantities|reserved resource name"
    ),
    make_family("too-few-gpus", "^ray/", r"placement group|bundle|resource|num_gpus|GPU"),
    # Ranks that do not meet.
    make_family("rendezvous", "^(?:torch/distributed/(?!_symm)|ray/(?:_private|util|exceptions|_raylet|client))", _WAITED),
    make_family(
        "no-gpu", "^torch/(?:cuda|accelerator|xpu)", r"device (?:id|index|ordinal)|invalid device|NVML|amdsmi|pynvml|visible"
    ),
    make_family("process-limit", "^native/|^torch/native", r"pthread|threads?\b.{0,30}(?:create|limit|resource)"),
    make_family(
        "rendezvous",
        "^torch/native",
        r"TCPStore|client socket|server socket|gloo|connectFullMesh|timed out|wait timeout|getaddrinfo|network address",
    ),
    make_family("cuda-out-of-memory", "^torch/native", r"tried to allocate"),
    make_family(
        "broken-installation",
        "^torch/native",
        r"compiled with|linked with|NCCL version|could not load library|dlopen|cannot open",
    ),
    # What was compiled and kept, and the engine's own code.
    make_family(
        "compile-cache",
        r"^torch/_inductor/(?:codecache|runtime/cache|standalone)|^torch/_functorch/_aot_autograd/autograd_cache",
        r"cache|artifact|corrupt|load",
    ),
    make_family(
        "engine-bug",
        _OF_A_COMPILER,
        "",
        "report it to vLLM with the log; enforce-eager starts without compiling, and is slower",
    ),
    make_family(
        "broken-installation",
        "^flashinfer/jit/cubin",
        r"NO_DOWNLOAD",
        "take the flashinfer-cubin of flashinfer's own version, which has its kernels, or unset FLASHINFER_NO_DOWNLOAD",
    ),
    make_family(
        "hub-unreachable",
        "^flashinfer/(?:jit/cubin|artifacts|cubin)",
        r"download|checksum|get cubin|fetch|sha256",
        "FlashInfer fetches kernels when it starts: give the server a network, or install flashinfer-cubin, which has them",
    ),
    # Checks in C++ that nothing else decides are left out: they are thousands, on what one kernel hands to another.
    make_family("engine-bug", r"^(?:torch|triton|flashinfer|ray|vllm)/.*\.py$"),
]


def decide_package(place: str, text: str) -> Family | None:
    """The family of a package's message; None if nobody decided."""
    return next((family for family in FAMILIES if family.places.search(place) and family.words.search(text)), None)
