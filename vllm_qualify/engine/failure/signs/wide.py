"""Signs of whole families of words: those of older versions, and of programs whose messages no table has."""

from vllm_qualify.engine.failure.signs.sign import make_sign

GENERAL_SIGNS = [
    make_sign(
        "broken-installation",
        r"(?P<why>PackageNotFoundError: [^\n]{1,200}|DistributionNotFound: [^\n]{1,200}|Numpy is not available"
        r"|numpy\.dtype size changed[^\n]{0,200}|Descriptors cannot be created directly"
        r"|compiled with different CUDA major versions"
        r"|The detected CUDA version \([^)\n]{1,20}\) mismatches|SystemError: initialization of [^\n]{1,100} without raising"
        r"|Failed to import \S{1,200} because of the following error"
        r"|Could not run '_\w{1,40}::\w{1,60}' with arguments from the"
        r"|incompatible with (?:the )?installed version[^\n]{0,100})",
        "packages of the engine do not fit together, or one is missing: {why}",
    ),
    make_sign(
        "unsupported-gpu",
        r"ptxas[^\n]{0,200}fatal\s{0,5}: (?P<what>Unsupported \.(?:version|target) [^\n]{1,100})",
        "the assembler that Triton takes (ptxas) is too old: {what}",
        "take an image whose CUDA is newer, or name a newer ptxas in TRITON_PTXAS_PATH",
    ),
    make_sign(
        "no-compiler",
        r"unsupported GNU version! [^\n]{0,100}|error: identifier \"[^\"\n]{1,60}\" is undefined"
        r"|fatal error: \S{1,100}\.(?:h|hpp|cuh): No such",
        "a kernel could not be built with this host's compilers and headers: {whole}",
        needs=("unsupported GNU", "is undefined", "fatal error"),
    ),
    make_sign(
        "engine-bug",
        r"^(?:\w{1,40}\.){0,6}(?P<what>(?:CompilationError|PTXASError|CompileTimeAssertionFailure|UnsupportedLanguageConstruct)"
        r"(?:: [^\n]{0,200})?|RuntimeError: `?ptxas`? failed with [^\n]{1,100}"
        r"|\w{1,40}: (?:Duplicate layer name|call aclnn\w{1,60} failed)[^\n]{0,200})",
        "the engine's own code or its compiler failed: {what}",
        needs=(
            "CompilationError",
            "PTXASError",
            "CompileTimeAssertion",
            "UnsupportedLanguage",
            "ptxas",
            "Duplicate layer",
            "aclnn",
        ),
    ),
    make_sign(
        "engine-bug",
        r"ptxas fatal\s{0,5}: (?P<what>[^\n]{1,200})"
        r"|ArgumentError: (?P<other>argument [^\n]{1,100}conflicting option string[^\n]{0,60})",
        "the engine's own code or its compiler failed: {whole}",
    ),
    make_sign(
        "nccl-failure",
        r"(?P<what>(?:NCCL|RCCL|HCCL|XCCL|oneCCL) [Ee]rror[^\n]{0,10}: [^\n]{1,200}|HCCL function error: [^\n]{1,200})",
        "the ranks' library failed: {what}",
        needs=("CCL ",),
    ),
    make_sign("no-gpu", r"ProcessGroupNCCL is only supported with GPUs", "the server found no GPU that it can use: {whole}"),
    make_sign(
        "rendezvous",
        r"(?P<why>\[Errno 99\] [^\n]{1,100}|Unable to find address for: [^\n]{1,60}"
        r"|[Tt]imed out waiting for engine core processes"
        r"|TCPStore[^\n]{0,100}(?:failed|timed out)[^\n]{0,100})",
        "the ranks did not meet: {why}",
    ),
    make_sign(
        "no-permission",
        r"\[Errno 13\] error while attempting to bind on address (?P<address>\([^)\n]{1,60}\))",
        "the server's user may not listen at {address}",
        "name a port of 1024 or more, or let the server listen at this one",
    ),
    make_sign(
        "cuda-out-of-memory",
        r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|\bout of memory \(allocat[^\n]{0,100}",
        "the GPU ran out of memory: {whole}",
        needs=("CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "out of memory (alloc"),
    ),
    make_sign(
        "refused-configuration",
        r"^\w{1,40}(?:Error|Exception): (?P<why>[^\n]{0,200}(?:not divisible by|must be divisible by)[^\n]{0,200}"
        r"|[^\n]{0,100}should have the same vocabulary size[^\n]{0,200}|LoRA is not enabled[^\n]{0,100})",
        "the engine refuses the configuration: {why}",
        needs=("divisible by", "same vocabulary size", "LoRA is not enabled"),
    ),
    make_sign(
        "unsupported-backend",
        r"^\w{1,40}(?:Error|Exception): (?P<why>No suitable kernel[^\n]{0,200}|[^\n]{0,60}only supports head dim[^\n]{0,100}"
        r"|Head size \d{1,4} is not supported by [^\n]{1,200})",
        "a kernel or backend does not fit the model or this GPU: {why}",
        needs=("No suitable kernel", "only supports head dim", "Head size"),
    ),
    make_sign(
        "invalid-value",
        r"^\w{1,40}Error: (?P<why>Invalid value '?[^\n]{1,100}'? for VLLM_[^\n]{1,200}"
        r"|[^\n]{0,100}VLLM_\w{1,60} is invalid[^\n]{0,100})",
        "the engine refuses a value: {why}",
        needs=("VLLM_",),
    ),
    make_sign(
        "invalid-value",
        r"error: (?P<why>the following arguments are required: [^\n]{1,200}|ambiguous option: [^\n]{1,200})",
        "vLLM's command line is not complete or not clear: {why}",
    ),
    make_sign(
        "incomplete-model",
        r"^\w{1,40}(?:Error|Exception)?: (?P<why>[^\n]{0,100}(?:default chat template is no longer allowed"
        r"|could not parse ModelProto"
        r"|rope_scaling`? (?:must be a dictionary|should have)|Unrecognized (?:image|video|feature) \w{1,20} in"
        r"|expected value at line)"
        r"[^\n]{0,200})",
        "a file of the model is missing or broken, or its configuration is not one that this engine takes: {why}",
        needs=("chat template", "ModelProto", "rope_scaling", "Unrecognized ", "expected value at line"),
    ),
    make_sign(
        "incomplete-model",
        r"(?P<why>Found \d{1,3} files matching the pattern[^\n]{0,200}|Make sure (?:that a"
        r"|only one) Mistral tokenizer is present[^\n]{0,100})",
        "the model's folder lacks its tokenizer: {why}",
    ),
    make_sign(
        "refused-configuration",
        r"(?P<why>Failed to load LoRA adapter[^\n]{0,200}|No adapter found for [^\n]{1,200})",
        "the adapter cannot be loaded: {why}",
        "check the adapter's path, as the server sees it, or take another adapter",
    ),
    make_sign(
        "no-permission",
        r"(?P<what>(?:numa_migrate_pages|set_mempolicy|sched_setaffinity|mbind)\b[^\n]{0,40}(?:failed"
        r"|not permitted)[^\n]{0,60})",
        "the server may not bind its memory or its threads to a part of this host: {what}",
        "give the container the right to (SYS_NICE, or a security profile that allows it), or leave the binding out",
        needs=("numa_migrate_pages", "set_mempolicy", "sched_setaffinity", "mbind"),
    ),
    make_sign(
        "nccl-failure",
        r"(?P<what>nixlBackendError: [^\n]{1,100}|NIXL_ERR_\w{1,40})",
        "NIXL, which moves the KV cache between servers, found no way: {what}",
        "check that the server may use this host's network cards, and what UCX_TLS and UCX_NET_DEVICES name",
    ),
    make_sign(
        "unsupported-gpu",
        r"ptxas [^\n]{0,300}error\s{0,5}: (?P<what>[^\n]{1,200}not supported on \.target '\w{1,20}')",
        "a kernel was compiled for another kind of this GPU: {what}",
    ),
    make_sign(
        "unsupported-backend",
        r"(?P<what>This kernel only supports sm\w{1,10}|kernels? (?:is "
        r"|are )?unavailable for [^\n]{1,80} on (?:the )?current platform)",
        "a kernel or backend does not fit this GPU: {what}",
    ),
    make_sign(
        "incomplete-model",
        r"(?:jinja2\.exceptions\.)?(?P<why>TemplateSyntaxError: [^\n]{1,200}"
        r"|Not found: \"[^\"\n]{1,200}\": No such file or directory)",
        "a file of the model is missing or broken: {why}",
        needs=("TemplateSyntaxError", "Not found: "),
    ),
    make_sign(
        "incomplete-model",
        r"No such file or directory: ['\"](?P<file>[^'\"\n]{0,200}\.(?:safetensors|bin|pt|pth|gguf|model|tiktoken|jinja)|"
        r"(?:[^'\"\n]{0,200}/)?(?:tekken|tokenizer|config|adapter_config|generation_config|preprocessor_config|params"
        r"|\w{1,40}\.index)\w{0,20}\.json)",
        "a file of the model is not there: {file}",
    ),
    make_sign(
        "unsupported-architecture",
        r"^\w{1,40}: (?P<why>Unrecognized configuration class [^\n]{1,200})",
        "the engine's transformers does not know the model: {why}",
        needs=("Unrecognized configuration class",),
    ),
    make_sign(
        "weights-do-not-fit",
        r"^\w{1,40}: (?P<why>Trying to set a tensor of shape [^\n]{1,200}|'[\w.]{1,200}\.(?:weight|bias"
        r"|scales?)(?:[._]\w{1,40})?'$"
        r"|Error\(s\) in loading state_dict for [^\n]{1,100})",
        "the checkpoint's weights are not those of the engine's model: {why}",
    ),
    make_sign(
        "hub-unreachable",
        r"(?P<status>5\d\d) Server Error: (?P<why>[^\n]{1,60}) for url: (?P<url>\S{1,200})",
        "the hub answered {status} ({why}) for {url}",
    ),
    make_sign("unknown-model", r"modelscope\S{0,60}\.(?P<why>NotExistError: [^\n]{1,200})", "the hub has no such model: {why}"),
    make_sign(
        "gated-model",
        r"(?P<why>NoCredentialsError: [^\n]{1,100}|An error occurred \((?:403|AccessDenied|InvalidAccessKeyId"
        r"|SignatureDoesNotMatch)\)"
        r"[^\n]{1,200}|DefaultCredentialsError: [^\n]{1,200})",
        "the storage of the model refuses to give it: {why}",
        "give the server credentials that may read the storage",
    ),
    make_sign(
        "too-few-gpus", r"Insufficient (?:nvidia|amd)\.com/gpu", "the cluster has no node with as many free GPUs: {whole}"
    ),
    make_sign(
        "too-few-gpus",
        r"please set tensor_parallel_size \((?P<ranks>\d+)\) to less than max local gpu count \((?P<gpus>\d+)\)",
        "the server has {ranks} ranks, and sees {gpus} GPUs",
    ),
    make_sign(
        "refused-configuration",
        r"^\w{1,40}(?:Error|Exception): (?P<why>[^\n]{0,300}(?:not (?:yet|currently) (?:been )?supported|isn't supported"
        r"|is incompatible with"
        r"|(?:is|are) not compatible with|cannot be used (?:with|together)|can't be used with)[^\n]{0,200})",
        "the engine refuses the configuration: {why}",
        needs=("supported", "compatible with", "be used "),
    ),
    make_sign(
        "unsupported-backend",
        r"^\w{1,40}(?:Error|Exception): (?P<why>[^\n]{0,100}(?:supports only|only supports|requires|is only for|needs) "
        r"(?:Ampere|Ada|Hopper|Blackwell|[Ss][Mm] ?\d|gfx\d|MI\d{3}|compute capability)[^\n]{0,100})",
        "a kernel or backend does not fit this GPU: {why}",
        needs=("supports only", "only supports", "requires ", "is only for", "needs "),
    ),
    make_sign(
        "unsupported-gpu",
        r"(?P<what>(?:rocBLAS|hipBLASLt|MIOpen)[^\n]{0,100}(?:No such file or directory|not found"
        r"|[Cc]annot read)[^\n]{0,60}[Gg][Pp][Uu] arch[^\n]{0,40}"
        r"|[Cc]annot find \w{1,40} kernel for gfx\d{3,4}\w?)",
        "the engine was not built for this GPU: {what}",
        needs=("rocBLAS", "hipBLASLt", "MIOpen", " kernel for gfx"),
    ),
    make_sign(
        "driver-too-old",
        r"(?P<what>Driver/library version mismatch|This container was built for NVIDIA Driver Release [\d.]{1,20} or later, but"
        r"|Incompatible kernel and userspace[^\n]{0,60})",
        "this host's driver does not fit the image or its own library: {what}",
    ),
    make_sign(
        "no-gpu",
        r"(?P<what>NVIDIA-SMI has failed because it couldn't communicate[^\n]{0,60}|CUDA_VISIBLE_DEVICES is set (?:but"
        r"|to) (?:an )?empty)",
        "the server found no GPU that it can use: {what}",
    ),
    make_sign(
        "rendezvous",
        r"(?P<what>The current node timed out during startup|Failed to connect to GCS\b[^\n]{0,60}"
        r"|RuntimeEnvSetupError: [^\n]{1,200})",
        "Ray did not start: {what}",
    ),
    make_sign(
        "no-permission",
        r"(?P<what>AF_UNIX path too long|ipc path \"[^\"\n]{1,200}\" is longer than|ZMQError: (?:No such file"
        r"|Operation not permitted|Permission denied)"
        r"[^\n]{0,100}ipc://[^\n]{1,100})",
        "the server's processes cannot make a socket: {what}",
        "name a short path that the server's user may write in VLLM_RPC_BASE_PATH or TMPDIR",
    ),
    make_sign(
        "out-of-memory",
        r"(?P<what>Too large swap space[^\n]{0,100}|\bOOM[ -][Kk]illed?\b[^\n]{0,100}"
        r"|Out of memory: Killed process[^\n]{0,100})",
        "the host's memory ran out: {what}",
        needs=("swap space", "OOM", "Out of memory: Killed"),
    ),
]

# Python's words on a mistake in code, and by where an exception comes from: its own words are nobody's that we know.
LAST_SIGNS = [
    make_sign(
        "engine-bug",
        r"^(?P<what>TypeError: [^\n]{0,200}(?:required positional argument|unexpected keyword argument"
        r"|multiple values for argument|takes \d+ positional"
        r"|is not (?:callable|iterable|subscriptable)|unsupported operand)"
        r"[^\n]{0,100}|(?:NameError|UnboundLocalError|SyntaxError|IndentationError|ZeroDivisionError|RecursionError"
        r"|PydanticUserError): [^\n]{1,200}"
        r"|AttributeError: '[^'\n]{1,60}' object has no attribute [^\n]{1,100}|pydantic\.errors\.\w{1,40}: [^\n]{1,200}"
        r"|RuntimeError: shape '[^\n]{1,100}"
        r"|ValueError: mutable default [^\n]{1,100})",
        "the engine's own code failed: {what}",
    ),
    # Mostly another rank ended first, and its log tells why.
    make_sign("rendezvous", r"Connection closed by peer \[[^\n]{1,100}", "a rank lost another one: {whole}"),
    make_sign(
        "refused-configuration",
        r"^(?:ValueError|AssertionError|NotImplementedError|TypeError|KeyError)(?:: (?P<why>[^\n]{1,300}))?$",
        "the engine refuses the configuration: {why}",
        through=r"/vllm/(?:config[/.]|engine/arg_utils\.py)[^\n]{0,100}, in (?:__post_init__|_*(?:verify|validate"
        r"|get_and_verify)\w*)",
    ),
    make_sign(
        "weights-do-not-fit",
        r"^(?:ValueError|AssertionError|KeyError|RuntimeError|IndexError|TypeError"
        r"|AttributeError)(?:: (?P<why>[^\n]{1,300}))?$",
        "the checkpoint's weights could not be loaded: {why}",
        through=r", in (?:load_weights|weight_loader\w*|load_\w{0,40}weights?)$",
    ),
    make_sign(
        "incomplete-model",
        r"^(?:ValueError|OSError|KeyError|TypeError|Exception|RuntimeError)(?:: (?P<why>[^\n]{1,300}))?$",
        "the model's configuration, tokenizer or processor could not be loaded: {why}",
        through=r"/transformers/(?:models/auto|configuration_|tokenization_|processing_|image_processing|modeling_rope"
        r"|feature_ext)",
    ),
]
