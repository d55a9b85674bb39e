"""Signs of code that crashed, and refusals whose words say no more."""

from vllm_qualify.engine.failure.signs.sign import make_sign

SIGNS = [
    make_sign(
        "engine-bug",
        r"operation not permitted when stream is capturing",
        "vLLM did what a CUDA graph does not allow while it captured one",
        "set enforce-eager, which captures none, or take another vLLM",
    ),
    make_sign(
        "crashed", r"^!+ Segfault encountered !+", "native code of the server crashed with a segmentation fault (SIGSEGV)"
    ),
]

# Words that a cause with a remedy of its own may come with: they count where no sign above is in the log.
GENERAL_SIGNS = [
    # A start may survive these three: a cache that it cannot write, statistics that it cannot send.
    make_sign(
        "hub-unreachable",
        r"(?:HTTPS?ConnectionPool\(host=\\?'(?P<host>[^'\\\n]{1,200})\\?', port=\d{1,5}\): (?P<why>[^\n]{1,200}))",
        "the hub's host {host} did not answer: {why}",
    ),
    make_sign(
        "no-permission",
        r"PermissionError: \[Errno 1(?:3)?\] (?P<why>[^:\n]{1,60}): '(?P<path>[^'\n]{1,300})'",
        "the server's user may not write {path}: {why}",
    ),
    make_sign(
        "disk-full",
        r"(?:\[Errno 28\] )?No space left on device(?:[^\n]{0,3}: '(?P<path>[^'\n]{1,300})')?"
        r"|\[Errno 122\] Disk quota exceeded[^\n]{0,100}",
        "a disk of this host is full: {whole}",
        needs=("No space left on device", "Disk quota exceeded"),
    ),
    make_sign(
        "unsupported-backend",
        r"^\w{1,40}(?:Error|Exception): (?P<why>(?!(?:CUDA|HIP|XPU|NPU)\b[^\n]{0,20} error)(?=[^\n]{0,300}(?:backend|kernel"
        r"|tensor core|attention|\bGPU|device"
        r"|\barch|[Ss][Mm][ _]?\d|capability))"
        r"[^\n]{0,300}(?:not supported|[Uu]nsupported|does not support|not implemented for"
        r"|[Oo]nly [^\n]{1,80} (?:is|are) supported)[^\n]{0,200})",
        "a kernel or backend does not fit the model or this GPU: {why}",
        needs=("support", "not implemented for"),
    ),
    make_sign(
        "refused-configuration",
        r"^\w{1,40}(?:Error|Exception): (?P<why>(?!(?:CUDA|HIP|XPU|NPU)\b[^\n]{0,20} error)[^\n]{0,300}(?:not supported"
        r"|[Uu]nsupported|does not support"
        r"|mutually exclusive)[^\n]{0,200})",
        "the engine refuses the configuration: {why}",
        needs=("support", "mutually exclusive"),
    ),
    # Before the sign of the engine's own code: what is asserted of a configuration is no fault of the code.
    make_sign(
        "refused-configuration",
        r"^AssertionError(?:: (?P<why>[^\n]{1,300}))?$",
        "the engine refuses the configuration: {why}",
        through=r"/vllm/(?:config[/.]|engine/arg_utils\.py)[^\n]{0,100}, in (?:__post_init__|_*(?:verify|validate"
        r"|get_and_verify)\w*)",
    ),
    make_sign(
        "engine-bug",
        r"^RuntimeError: (?P<why>Cannot re-initialize CUDA in forked subprocess)",
        "a process of the engine was forked after CUDA was used: {why}",
        "set VLLM_WORKER_MULTIPROC_METHOD to spawn, and report it with the log",
    ),
    make_sign(
        "engine-bug",
        r"^(?P<what>(?:TypeError|AttributeError|NameError|UnboundLocalError|IndexError|KeyError|ZeroDivisionError"
        r"|RecursionError|AssertionError"
        r"|RuntimeError: (?:shape '|mat1 and mat2|The size of tensor a|Expected all tensors|expected scalar type"
        r"|Tensors must have same))[^\n]{0,300})",
        "the engine's own code failed: {what}",
        through=r"/(?:vllm|sglang|tensorrt_llm|vllm_\w{1,30})/",
    ),
    make_sign(
        "crashed",
        r"(?:CUDA error|HIP error|CUDA driver error|Triton Error \[\w{1,10}\]|Cuda failure|Failed: (?:Cuda"
        r"|HIP) error \S{1,200}):? '?(?P<what>[^'\n]{1,200})",
        "native code of the release failed on the GPU: {what}",
    ),
    make_sign(
        "crashed",
        r"(?P<what>NPU function error[^\n]{0,160}|call acl api failed[^\n]{0,60}|CU(?:BLAS|DNN|SPARSE|SOLVER"
        r"|FFT)_STATUS_\w{1,60}"
        r"|HSA_STATUS_ERROR_\w{1,60}|UR_RESULT_ERROR_\w{1,60}|Memory access fault by GPU node[^\n]{0,100})",
        "native code of the release failed on the GPU: {what}",
    ),
    make_sign(
        "engine-bug",
        r"torch\._(?:inductor|dynamo)\.exc\.(?P<what>\w{1,60}\b(?!: [^\n]{1,100} raised:$)(?:: [^\n]{1,300})?)",
        "the model could not be compiled: {what}",
        "report it to vLLM with the log; enforce-eager starts without compiling, and is slower",
    ),
    # What takes NCCL's place: between nodes for experts, and on Intel's cards.
    make_sign(
        "nccl-failure",
        r"(?P<what>/nvshmem/[^\n]{1,200}: (?:non-zero status|NULL value)[^\n]{1,100}|nvshmem initialization failed"
        r"|oneCCL: [^\n]{1,100}EXCEPTION: [^\n]{1,100})",
        "the GPUs could not be connected: {what}",
        "check that the server may use this host's GPUs and network cards: their devices, and the container's rights",
        needs=("nvshmem", "oneCCL"),
    ),
    # Ray tries again for a while.
    make_sign("rendezvous", r"Failed to connect to GCS at address [^\n]{1,100}", "the ranks did not meet: {whole}"),
    make_sign(
        "driver-too-old",
        r"NVMLError_LibRmVersionMismatch: [^\n]{0,100}|RM has detected an NVML/RM version mismatch",
        "the driver's library is of another version than the driver that this host has loaded: {whole}",
        "restart this host, or load the driver anew: it was updated while it ran",
    ),
    make_sign(
        "no-gpu",
        r"NVMLError(?!_NotSupported)(?P<name>_\w{1,60})?: (?P<why>[^\n]{1,100})",
        "this host's driver refuses to name its GPUs: {why}",
    ),
    make_sign(
        "unsupported-gpu",
        r"LLVM ERROR: Cannot select: (?P<what>[^\n]{1,200})",
        "Triton's compiler has no such instruction for this GPU: {what}",
    ),
    make_sign(
        "engine-bug", r"(?P<what>PassManager::run failed|LLVM ERROR: [^\n]{1,200})", "Triton could not compile a kernel: {what}"
    ),
    make_sign(
        "engine-bug",
        r"Assertion error \(\S{0,200}(?:deepgemm|deep_gemm)\S{0,200}\): (?P<why>Unknown [^\n]{1,200})",
        "DeepGEMM does not know what vLLM hands to it: {why}",
    ),
    # DeepGEMM names the line of its own code, and what it does not take.
    make_sign(
        "unsupported-backend",
        r"Assertion error \(\S{0,200}(?:deepgemm|deep_gemm)\S{0,200}\): (?P<why>[^\n]{1,200})",
        "DeepGEMM does not take this model on this GPU: {why}",
    ),
    make_sign("no-compiler", r"Error building extension '(?P<name>[^'\n]{1,100})'", "a kernel could not be built: {name}"),
    make_sign(
        "no-compiler",
        r"ninja: build stopped: [^\n]{1,100}|Ninja build failed[^\n]{0,100}"
        r"|Command '\['?\S{0,200}(?:gcc|g\+\+|clang|nvcc|ninja)'[^\n]{1,1000} returned non-zero exit status",
        "kernels for the GPU could not be built: {whole}",
    ),
    make_sign(
        "broken-installation",
        r"(?P<what>Model architectures? [^\n]{1,200} failed to be inspected)",
        "the engine could not import the model's code: {what}; the reason stands in the lines before",
    ),
    make_sign(
        "refused-configuration",
        r"^ +(?:Value error|Assertion failed), (?P<why>.+?)(?= \[type=|$)",
        "vLLM refuses the configuration: {why}",
    ),
]

# Words that a healthy start may have, too: they count only where nothing else tells why the server ended.
LAST_SIGNS = [
    # NCCL warns of what it does without, and of what may become slow.
    make_sign(
        "nccl-failure",
        r"NCCL WARN (?P<what>(?!NET/(?!IB\b[^\n]{0,60}(?:error|failed|timed out))|MSCCL|Failed to open lib|NUMA auto|Missing \""
        r"|(?i:[^\n]{0,200}(?:ignor|retry|falling|disabl|skip|can lead to)))[^\n]{1,200})",
        "NCCL: {what}",
    )
]
