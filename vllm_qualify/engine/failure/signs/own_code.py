"""Signs of code or models that fail with words that sound like something else: a refusal, or a bug."""

from vllm_qualify.engine.failure.signs.sign import make_sign

SIGNS = [
    make_sign(
        "engine-bug",
        r"(?:^\w{1,40}(?:Error|Exception)|Failed to start engine): (?P<why>[^\n]{0,200}"
        r"(?:view size is not compatible with input tensor's size"
        r"|Operator does not have a meta kernel|could not determine the shape of object type"
        r"|signal only works in main thread|page size is not divisible by the maximum page size"
        r"|Ran out of memory in memory space [vs]mem)[^\n]{0,200})",
        "the engine's own code failed: {why}",
        needs=(
            "view size is not",
            "a meta kernel",
            "determine the shape of object",
            "signal only works",
            "page size is not divisible",
            "in memory space ",
        ),
    ),
    make_sign(
        "engine-bug",
        r"^TypeError: (?P<why>(?:Type '[^\n]{1,200}' is not supported|unsupported operand type[^\n]{1,200}"
        r"|object of type '\w{1,60}' has no len\(\)|argument of type '\w{1,60}' is not iterable))",
        "the engine's own code failed: {why}",
        needs=("TypeError: ",),
    ),
    make_sign(
        "broken-installation",
        r"^\w{1,40}Error: (?P<why>infer_schema\(func\): [^\n]{1,100})",
        "the engine's torch does not take vLLM's operators: {why}",
        needs=("infer_schema(func): ",),
    ),
    # Triton made this code a moment before, for this GPU.
    make_sign(
        "driver-too-old",
        r"(?P<why>Triton Error \[CUDA\]: device kernel image is invalid)",
        "the driver does not load the code that Triton made for this GPU: {why}",
        needs=("Triton Error [CUDA]",),
    ),
    make_sign(
        "broken-installation",
        r"(?P<why>No operator found for `memory_efficient_attention_forward`)",
        "xFormers was not built for this GPU: {why}",
        "install the build of xFormers for the engine's torch and CUDA, or take another attention backend",
        needs=("memory_efficient_attention_forward",),
    ),
    # vLLM's own tokenizer, under the name of transformers'.
    make_sign(
        "engine-bug",
        r"^AttributeError: (?P<why>'MistralTokenizer' object has no attribute '\w{1,60}')",
        "the engine's own code failed: {why}",
        needs=("MistralTokenizer",),
    ),
    make_sign(
        "unsupported-quantization",
        r"^\w{1,40}Error: (?P<why>(?=[^\n]{0,300}(?:quantiz|per-(?:tensor|channel|token)|\bW\d+A\d+|FP8|FP4|INT[48]))"
        r"[^\n]{0,200}\bonly [^\n]{1,150}\b(?:scales?|quantization|weights)\b[^\n]{1,60}\b(?:is|are) supported)",
        "this engine does not take the variant's quantization on this GPU: {why}",
        needs=("only ",),
    ),
    make_sign(
        "engine-bug",
        r"^\w{1,40}Error: (?P<why>Received a Cached\w{1,60} for argument \w{1,40}, but an? \w{1,60} was expected)",
        "the engine's own code failed: {why}",
        needs=("Received a Cached",),
    ),
    # A server's other process does not see the model's code that the first one loaded.
    make_sign(
        "engine-bug",
        r"^ModuleNotFoundError: (?P<why>No module named 'transformers_modules\.[^'\n]{1,200}')",
        "a process of the engine does not find the model's own code: {why}",
        needs=("transformers_modules.",),
    ),
    make_sign(
        "unsupported-architecture",
        r"^AttributeError: (?P<why>'\w{2,60}Config' object has no attribute '\w{1,60}')",
        "the engine does not know the model's configuration: {why}",
        needs=("Config' object has no attribute",),
        through=r"/vllm/(?:config|transformers_utils|model_executor|worker|v1/worker|engine/arg_utils)",
    ),
    make_sign(
        "broken-installation",
        r"(?P<why>Tried to instantiate class '_\w{0,40}C\.\w{1,60}', but it does not exist!)",
        "vLLM's own compiled library did not load: {why}",
        needs=("Tried to instantiate class",),
    ),
    make_sign(
        "incomplete-model",
        r"^TypeError: (?P<why>not a string$|stat: path should be string[^\n]{0,60}"
        r"|expected str, bytes or os\.PathLike[^\n]{0,60})",
        "the model lacks what its tokenizer is loaded from: {why}",
        through=r"sentencepiece|/transformers/|tokeniz",
    ),
]
