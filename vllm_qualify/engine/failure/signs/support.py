"""Signs of a quantization, a backend or a data type that the GPU or this engine does not support."""

from vllm_qualify.engine.failure.signs.sign import make_sign

SIGNS = [
    make_sign(
        "unsupported-quantization",
        r"\bkv_data_type (?P<type>[\w.]{1,60}) is not supported",
        "the attention backend does not take a KV cache of {type}",
        "choose another kv-cache-dtype or attention backend for this GPU type",
        needs=("kv_data_type",),
    ),
    make_sign(
        "unsupported-quantization",
        r"quantization method (?P<method>\S+) is not supported for the current GPU\. Minimum capability: (?P<least>\d+)\. "
        r"Current capability: (?P<has>\d+)",
        "the quantization {method} needs compute capability {least}, this GPU has {has}",
    ),
    make_sign(
        "unsupported-quantization",
        r"Quantization scheme is not supported for the current GPU\. Min capability: (?P<least>\d+)\. "
        r"Current capability: (?P<has>\d+)",
        "the quantization scheme needs compute capability {least}, this GPU has {has}",
    ),
    make_sign(
        "unsupported-quantization",
        r"Unknown quantization method: (?P<method>[^.\n]{1,100})\.",
        "this vLLM does not know the quantization {method} on this device",
    ),
    make_sign(
        "unsupported-backend",
        r"Selected backend (?:\w+\.)?(?P<name>\w+) is not valid for this configuration\. Reason: (?P<why>.+)",
        "the attention backend {name} does not fit the model or this GPU: {why}",
    ),
    make_sign(
        "unsupported-backend",
        r"(?P<kind>\w{1,40}) MoE backend '?(?P<name>\w+)'? does not support the deployment configuration"
        r"(?: since (?P<why>.+))?",
        "the {kind} MoE backend {name} does not fit the model or this GPU: {why}",
        needs=(" does not support the deployment configuration",),
    ),
    make_sign(
        "invalid-value",
        r"Unknown attention backend: '(?P<name>[^'\n]{1,100})'\. Valid options are: (?P<valid>.+)",
        "this vLLM has no attention backend {name}",
    ),
    make_sign(
        "refused-configuration",
        r"Bfloat16 is only supported on GPUs with compute capability of at least (?P<least>\d+\.\d+)\. Your "
        r"(?P<gpu>[^\n]{1,100}?) GPU",
        "bfloat16 needs compute capability {least}, which the GPU {gpu} does not have",
        "set dtype: half for this GPU type, or take another GPU type",
    ),
    make_sign(
        "unsupported-backend",
        r"No (?P<kind>[\w ]{1,40}?) ?MoE backend supports (?P<what>[^\n]{1,200})",
        "no MoE kernel of this vLLM fits the {kind} weights on this GPU: none supports {what}",
        "choose another variant for this GPU type, or a newer vLLM",
    ),
    make_sign(
        "unsupported-backend",
        r"No valid (?:[\w ]{1,40} )?backend found(?P<why>[^\n]{0,300})",
        "no attention backend of this vLLM fits the model on this GPU{why}",
        "leave the attention options out, choose another variant for this GPU type, or a newer vLLM",
    ),
    make_sign(
        "unsupported-backend",
        r"(?P<what>[^\n]{0,100}?(?:does not support attention sinks|Sinks are only supported in"
        r"|attention sinks (?:are )?not supported)[^\n]{0,100})",
        "the model needs attention sinks, which this backend lacks on this GPU: {what}",
        "leave the attention backend out, or name another",
        needs=("attention sinks", "Sinks are only supported in"),
    ),
    make_sign(
        "unsupported-backend",
        r"(?P<name>FlashAttention|FlashMLA|FlashInfer|DeepGEMM)\S{0,20} (?:only supports|requires|is only supported on) "
        r"(?P<what>(?:Ampere|Ada|Hopper|Blackwell|[Ss][Mm] ?\d|GPUs? with|compute capability)[^\n]{0,100})",
        "{name} does not run on this GPU: it needs {what}",
    ),
    make_sign(
        "unsupported-backend",
        r"out of resource: shared memory, Required: (?P<asked>\d+), Hardware limit: (?P<has>\d+)",
        "a kernel needs {asked} bytes of a GPU's shared memory, this GPU has {has}",
        "choose another backend or variant for this GPU type",
    ),
    make_sign(
        "unsupported-quantization",
        r"(?P<what>Failed to (?:initialize|run) \S{0,20} ?(?:cutlass )?(?:FP4|FP8|fp4|fp8|NVFP4|nvfp4)[^\n]{0,100}"
        r"|\S{0,40}(?:fp8e4nv|float8_e4m3fn) (?:is )?not supported (?:in|on) this [^\n]{0,80}"
        r"|FP[48][^\n]{0,60} (?:is|are) not supported on (?:this|the current) [^\n]{0,80})",
        "the quantization does not run on this GPU with this vLLM: {what}",
        "choose another variant or backend for this GPU type, or a newer vLLM",
        needs=("Failed to initialize", "Failed to run", " not supported "),
    ),
]
