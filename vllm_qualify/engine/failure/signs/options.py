"""Signs of options that an engine does not have, or does not take."""

from vllm_qualify.engine.failure.signs.sign import make_sign

_SMALLER_PARTS = "a smaller tensor-parallel-size, or no expert parallelism, which cuts the weights into larger parts"
_OTHER_SERVICE = "rename the cluster's service, or set enableServiceLinks to false in the pod: the cluster sets this variable"

SIGNS = [
    make_sign("unknown-flag", r"error: unrecognized arguments: (?P<flags>.+)", "this vLLM version does not know {flags}"),
    make_sign(
        "invalid-value",
        r"error: argument (?P<flag>\S+): \d+ validation errors? for [^\n]+\n(?P<key>\S.*)\n +(?P<why>.+?)(?= \[type=|$)",
        "vLLM refuses the value of {flag}: {key}: {why}",
    ),
    make_sign(
        "invalid-value",
        r"error: argument (?P<flag>\S+): \d+ validation errors? for [^\n]+\n +(?P<why>.+?)(?= \[type=|$)",
        "vLLM refuses the value of {flag}: {why}",
    ),
    make_sign(
        "invalid-value",
        r"^\S{0,100}ValidationError: \d+ validation errors? for (?P<config>\w{1,100})\n(?P<key>[\w.]{1,200})\n "
        r"+(?P<why>.+?)(?= \[type=|$)",
        "vLLM refuses the value of {config}.{key}: {why}",
    ),
    make_sign("invalid-value", r"error: argument (?P<flag>\S+): (?P<why>.+)", "vLLM refuses the value of {flag}: {why}"),
    make_sign(
        "invalid-value",
        r"^(?:json\.decoder\.)?JSONDecodeError: (?P<why>[^\n]{1,200})",
        "the value of an option is no JSON: {why}",
        "mend the option's JSON, and its quotes on the command line",
        through=r"/vllm/(?:entrypoints/(?:openai/|serve/)?(?:cli_args|utils/cli)|utils/argparse)",
    ),
    make_sign(
        "unknown-flag",
        r"^TypeError: __init__\(\) got an unexpected keyword argument '(?P<name>[^'\n]{1,100})'",
        "this vLLM version does not know the option {name}",
        through=r"EngineArgs\(",
    ),
    # A launcher hands its own options on.
    make_sign(
        "unknown-flag",
        r"TypeError: (?:\w{0,20}EngineArgs|(?:Speculative|Compilation|KVTransfer|Pooler|LoRA|StructuredOutputs|Parallel"
        r"|Scheduler|Cache|Load|Attention|Kernel|Profiler)Config)\.__init__\(\) got an unexpected keyword argument "
        r"'(?P<name>[^'\n]{1,100})'",
        "this vLLM version does not know the option {name}",
    ),
    # A cluster sets NAME_PORT for each of its services. One that is named vllm sets vLLM's own option.
    make_sign(
        "invalid-value",
        r"invalid literal for int\(\) with base 10: '(?P<value>(?:tcp|udp)://[^'\n]{1,100})'",
        "a number of vLLM's environment, such as VLLM_PORT, is {value}",
        _OTHER_SERVICE,
        turn="host",
    ),
    make_sign(
        "invalid-value",
        r"(?P<name>VLLM_\w{1,40}) '?(?P<value>[^'\n]{1,100}?)'? appears to be a URI",
        "vLLM's environment has {value} as {name}",
        _OTHER_SERVICE,
        turn="host",
    ),
    make_sign(
        "refused-configuration",
        r"^AssertionError(?:: [^\n]{0,200})?$",
        "the draft model's vocabulary is not the model's",
        "take a draft of the model's own family",
        through=r"assert all\(vocab_sizes\[0\] == vocab_size",
    ),
    make_sign(
        "invalid-value",
        r"The supplied chat template (?:string )?\((?P<name>[^)\n]{1,300})\) (?:appears path-like|looks like a file path)",
        "the chat template {name} is not there",
        "name a chat template that is there, as the server sees it",
    ),
    # Words of the parsers of tools and of reasoning, in older and newer versions.
    make_sign(
        "invalid-value",
        r"invalid (?P<kind>tool call|reasoning) parser: (?P<name>[^\n]{1,60}?) \(chose from (?P<valid>[^)\n]{1,1000})"
        r"|(?P<other>(?:Tool|Reasoning) parser '[^'\n]{1,60}' not found)",
        "this vLLM has no such parser: {whole}",
        "name a parser that this vLLM version has, or take a newer version",
        needs=(" parser: ", " parser '"),
    ),
    make_sign(
        "refused-configuration",
        r"User-specified max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len \((?P<why>[^)\n]{1,200})",
        "max-model-len {asked} is more than the model's configuration has: {why}",
        "lower max-model-len",
    ),
    make_sign(
        "refused-configuration",
        r"^AssertionError: (?P<what>\d+ is not divisible by \d+)",
        "a size of the model cannot be cut over the ranks: {what}",
        "change tensor-parallel-size",
    ),
    make_sign(
        "refused-configuration",
        r"^\w{1,40}Error: (?P<what>CUDAGraphMode\.\w{1,40} is not supported with [^\n]{1,200})",
        "the CUDA graphs that are asked for do not fit the attention backend: {what}",
        "change cudagraph_mode in compilation-config, or leave it out",
        needs=("CUDAGraphMode",),
    ),
    make_sign(
        "refused-configuration",
        r"Pipeline parallelism is not supported for this model",
        "vLLM does not split this model over a pipeline",
        "take pipeline-parallel-size out",
    ),
    make_sign(
        "refused-configuration",
        r"Can't determine cudagraph shapes that are both a multiple of (?P<drafts>\d+)[^\n]{0,100}? and (?P<ranks>\d+)",
        "no size of a CUDA graph is a multiple of {drafts} (drafted tokens and one) and of {ranks} (ranks)",
        "change num_speculative_tokens or tensor-parallel-size",
    ),
    make_sign(
        "refused-configuration",
        r"(?P<what>[^\n]{1,200}? is not divisible by weight quantization block_[nk] = \d+)",
        "the quantization's blocks cannot be cut so: {what}",
        _SMALLER_PARTS,
        needs=(" is not divisible by weight quantization block_",),
    ),
    make_sign(
        "refused-configuration",
        r"The (?P<side>input|output) size is not aligned with the quantized weight shape",
        "the quantization's groups cannot be cut so: the {side} size is not aligned with them",
        _SMALLER_PARTS,
    ),
    make_sign(
        "refused-configuration",
        r"(?P<name>\S{1,300}) is unsupported LoRA weight",
        "the adapter has a weight that vLLM cannot apply: {name}",
        "take another adapter, or leave it out",
        needs=(" is unsupported LoRA weight",),
    ),
    make_sign(
        "refused-configuration",
        r"LoRA rank (?P<rank>\d+) is greater than max_lora_rank (?P<most>\d+)",
        "the adapter has rank {rank}, and max-lora-rank is {most}",
        "set max-lora-rank to {rank}, or take another adapter",
    ),
    make_sign(
        "refused-configuration",
        r"While loading (?P<path>\S{1,300}), expected target modules in [^\n]{1,2000}? but received (?P<names>[^\n]{1,300})",
        "the adapter {path} has modules that vLLM cannot apply: {names}",
        "take another adapter, or leave it out",
    ),
    make_sign(
        "refused-configuration",
        r"(?P<what>only pre-sharded checkpoints are (?:currently )?supported)",
        "the model is not sharded as load-format asks for: {what}",
        "take load-format out, or bring a checkpoint that was sharded for as many ranks",
    ),
    # Only who asks for this format gets these; another format of the same model has other files.
    make_sign(
        "refused-configuration",
        r"(?P<what>Failed to load mistral 'params\.json' config"
        r"|Found 0 files matching the pattern[^\n]{1,200}Mistral tokenizer)",
        "the model is not in Mistral's own format, which the options ask for: {what}",
        "take tokenizer-mode, config-format and load-format with the value mistral out, or bring the files of that format",
        needs=("mistral 'params.json'", "Mistral tokenizer"),
    ),
    make_sign(
        "refused-configuration",
        r"(?:contains custom code which must be executed|requires you to execute the \w{1,40} file in that repo"
        r"|consider setting `trust_remote_code=True`)",
        "the model brings code of its own, and the recipe does not let it run",
        "read the code, set trust-remote-code in the recipe, and give --allow-code",
        needs=("custom code", "requires you to execute", "trust_remote_code"),
    ),
]
