"""The signs of failures in a server's log, the more specific ones first."""

import re
from typing import NamedTuple

from vllm_qualify.engine.failure.meanings import FailureClass


class Sign(NamedTuple):
    """A pattern for the log's telling lines, and the failure that it shows.

    The pattern's groups, and `whole` for the whole match, fill the problem's braces. In a match over several lines, the line
    where the group `telling` begins is shown first, or else the match's first line. With `through`, the match counts only as
    the end of a traceback that has this path in a frame.
    """

    kind: FailureClass
    pattern: re.Pattern[str]
    problem: str
    remedy: str | None = None
    retry: bool | None = None
    through: str | None = None


def _make_sign(kind: FailureClass, pattern: str, problem: str, remedy: str | None = None, retry: bool | None = None) -> Sign:
    return Sign(kind, re.compile(pattern, re.M), problem, remedy, retry)


_REPOSITORY = r"https?://[^/\s]+/(?:api/models/)?(?P<repo>[^/\s]+/[^/\s'.]+(?:\.[^/\s'.]+)*)"
_KV_CACHE_NEEDED = (
    r"max seq len \((?P<asked>\d+)\), \((?P<needed>[\d.]+) GiB KV cache is needed, "
    r"which is larger than the available KV cache memory \((?P<available>[\d.]+) GiB\)"
)
# vLLM's words for GPU and CPU: the memory that was free at the start, and the share of all memory that it wants.
_FREE = r"\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired"
_SHARE = r"memory utilization \((?P<share>[\d.]+), (?P<asked>[\d.]+) GiB\)"
_ALLOCATION = (
    r"Tried to allocate (?P<asked>[\d.]+ \w+)\. GPU (?P<gpu>\d+) has a total capacity of "
    r"(?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free"
)
_NO_CONNECTION = r"(?:ConnectError|ConnectTimeout|ReadTimeout|ConnectionError): "
_NVCC_REMEDY = (
    "install CUDA's toolkit where the server runs, and name it in CUDA_HOME, or serve an image, which has it; for "
    "FlashInfer's sampler VLLM_USE_FLASHINFER_SAMPLER=0 does too"
)
_NEXT_LINES = r"(?:[^\n]*\n){0,4}?[^\n]*?"


def _line_up_to(words: str) -> str:
    """The line up to the first of these words in it: the search for what follows begins only once in a line."""
    return rf"^(?>[^\n]*?(?:{words}))"


# The log may be hostile: each pattern is bounded, or begins only once in a line. Else the work grows with the log's square.
# If several signs are in the same line, the first one here wins: the more specific signs come first.
SIGNS = [
    _make_sign("unknown-flag", r"error: unrecognized arguments: (?P<flags>.+)", "this vLLM version does not know {flags}"),
    _make_sign(
        "invalid-value",
        r"error: argument (?P<flag>\S+): \d+ validation errors? for [^\n]+\n(?P<key>\S.*)\n +(?P<why>.+?)(?= \[type=|$)",
        "vLLM refuses the value of {flag}: {key}: {why}",
    ),
    _make_sign(
        "invalid-value",
        r"error: argument (?P<flag>\S+): \d+ validation errors? for [^\n]+\n +(?P<why>.+?)(?= \[type=|$)",
        "vLLM refuses the value of {flag}: {why}",
    ),
    _make_sign("invalid-value", r"error: argument (?P<flag>\S+): (?P<why>.+)", "vLLM refuses the value of {flag}: {why}"),
    _make_sign("unknown-model", rf"Repository Not Found for url: {_REPOSITORY}", "the hub has no model {repo}, or hides it"),
    _make_sign(
        "unknown-model",
        r"(?:Repo id must be in the form '[^']+' or '[^']+'|Invalid repository ID or local directory specified): "
        r"'(?P<repo>[^']+)'",
        "{repo} is neither a folder with a model's configuration nor a repository's name that the hub takes",
        "check the folder's path, as the server sees it, or the repository's name",
    ),
    _make_sign(
        "unknown-model",
        r"(?<!\S)(?P<repo>\S+) is not a local folder and is not a valid model identifier",
        "there is no model {repo}: neither a folder nor a repository of the hub",
    ),
    _make_sign(
        "unknown-revision",
        rf"Revision Not Found for url: {_REPOSITORY}/(?:resolve|revision|tree)/(?P<revision>[^/\s]+)",
        "the model {repo} has no revision {revision}",
    ),
    _make_sign(
        "unknown-revision", r"(?<!\S)(?P<revision>\S+) is not a valid git identifier", "the model has no revision {revision}"
    ),
    _make_sign(
        "gated-model",
        rf"{_line_up_to('Cannot access gated repo for url ')}{_REPOSITORY}{_NEXT_LINES}not in the authorized list",
        "the model {repo} is gated, and the account of this HF_TOKEN is not in its list",
        "ask for access on the repository's page on the hub",
    ),
    _make_sign(
        "gated-model",
        rf"Cannot access gated repo for url {_REPOSITORY}",
        "the model {repo} is gated, and no account was named that may read it",
    ),
    _make_sign(
        "gated-model",
        r"There was a specific connection error when trying to load (?P<repo>\S+?):?\n"
        r"Client error '(?P<status>40[13] [^'\n]{1,100})'",
        "the hub refuses to give the model {repo} ({status}): it does not exist, or HF_TOKEN may not read it",
        "check the model's name, and that HF_TOKEN is valid and may read it",
    ),
    _make_sign(
        "hub-rate-limit",
        rf"429 (?:Client Error: )?Too Many Requests'? for url:? '?{_REPOSITORY}",
        "the hub's rate limit (429) stopped {repo}",
    ),
    _make_sign(
        "hub-unreachable",
        rf"Server error '(?P<status>5\d\d [^'\n]{{1,100}})' for url '{_REPOSITORY}",
        "the hub answered {status} for {repo}",
    ),
    _make_sign(
        "hub-unreachable",
        rf"{_line_up_to(_NO_CONNECTION)}(?P<why>.+)(?:\n(?!.*{_NO_CONNECTION}).*){{0,300}}?"
        r"(?P<telling>We couldn't connect to '(?P<url>[^'\n]+)')",
        "the hub at {url} does not answer: {why}",
    ),
    _make_sign("hub-unreachable", r"We couldn't connect to '(?P<url>[^'\n]+)'", "the hub at {url} does not answer"),
    _make_sign(
        "not-in-cache",
        r"LocalEntryNotFoundError: .{0,300}?outgoing traffic has been disabled",
        "the model is not in the hub's cache of this host, and HF_HUB_OFFLINE forbids to download it",
    ),
    _make_sign(
        "unsupported-architecture",
        r"Model architectures? \[?'?(?P<name>\w{1,100}+)'?.{0,300}?(?:is|are) not supported",
        "this vLLM version does not support the architecture {name}",
    ),
    _make_sign(
        "unsupported-quantization",
        r"quantization method (?P<method>\S+) is not supported for the current GPU\. Minimum capability: (?P<least>\d+)\. "
        r"Current capability: (?P<has>\d+)",
        "the quantization {method} needs compute capability {least}, this GPU has {has}",
    ),
    _make_sign(
        "unsupported-quantization",
        r"Quantization scheme is not supported for the current GPU\. Min capability: (?P<least>\d+)\. "
        r"Current capability: (?P<has>\d+)",
        "the quantization scheme needs compute capability {least}, this GPU has {has}",
    ),
    _make_sign(
        "unsupported-quantization",
        r"Unknown quantization method: (?P<method>[^.\n]{1,100})\.",
        "this vLLM does not know the quantization {method} on this device",
    ),
    _make_sign(
        "unsupported-backend",
        r"Selected backend (?:\w+\.)?(?P<name>\w+) is not valid for this configuration\. Reason: (?P<why>.+)",
        "the attention backend {name} does not fit the model or this GPU: {why}",
    ),
    _make_sign(
        "unsupported-backend",
        r"(?P<kind>\w{1,40}) MoE backend '?(?P<name>\w+)'? does not support the deployment configuration"
        r"(?: since (?P<why>.+))?",
        "the {kind} MoE backend {name} does not fit the model or this GPU: {why}",
    ),
    _make_sign(
        "invalid-value",
        r"Unknown attention backend: '(?P<name>[^'\n]{1,100})'\. Valid options are: (?P<valid>.+)",
        "this vLLM has no attention backend {name}",
    ),
    _make_sign(
        "kv-cache-too-small",
        rf"{_KV_CACHE_NEEDED}\. Based on the available memory, the estimated maximum model length is (?P<fits>\d+)",
        "max-model-len {asked} needs {needed} GiB of KV cache, {available} GiB are left; {fits} tokens would fit",
        "set max-model-len to {fits} or less, raise gpu-memory-utilization, or use more GPUs",
    ),
    _make_sign(
        "kv-cache-too-small", _KV_CACHE_NEEDED, "max-model-len {asked} needs {needed} GiB of KV cache, {available} GiB are left"
    ),
    _make_sign(
        "kv-cache-too-small",
        r"No available memory for the cache blocks",
        "the model leaves no memory for the KV cache",
        "raise gpu-memory-utilization, lower max-num-batched-tokens, or use more GPUs",
    ),
    _make_sign(
        "gpu-memory-in-use",
        rf"Free memory on device(?: \S+)? {_FREE} GPU {_SHARE}",
        "{free} of {total} GiB of the GPU's memory were free at the start, gpu-memory-utilization {share} asks for {asked} GiB",
    ),
    _make_sign(
        "gpu-memory-in-use",
        r"Error in memory profiling\. Initial free memory (?P<before>[\d.]+) GiB, current free memory (?P<after>[\d.]+) GiB",
        "another process gave memory of the GPU back while the server measured it: {before} GiB were free, then {after} GiB",
    ),
    _make_sign(
        "out-of-memory",
        rf"Available memory on node \d+ {_FREE} CPU {_SHARE}",
        "{free} of {total} GiB of the host's memory were free, gpu-memory-utilization {share} asks for {asked} GiB",
        "stop what else uses the host's memory; or lower gpu-memory-utilization, which on the CPU means the host's memory",
    ),
    # vLLM's own message follows the allocator's.
    _make_sign(
        "cuda-out-of-memory",
        rf"{_line_up_to('out of memory')}(?:[^\n]*\n){{1,60}}?[^\n]*?"
        r"(?P<telling>CUDA out of memory occurred when warming up sampler with (?P<requests>\d+) dummy requests)",
        "the GPU ran out of memory when the sampler was warmed up with {requests} requests",
        "lower max-num-seqs or gpu-memory-utilization",
    ),
    # No setting of the KV cache helps here.
    Sign(
        "cuda-out-of-memory",
        re.compile(rf"CUDA out of memory\. {_ALLOCATION}"),
        "the weights do not fit: GPU {gpu} ran out of memory while they were loaded: {asked} asked for, {free} of {total} free",
        "use more GPUs (tensor-parallel-size), a variant with smaller weights, or GPUs with more memory",
        through="/model_executor/model_loader/",
    ),
    _make_sign(
        "cuda-out-of-memory",
        rf"CUDA out of memory\. {_ALLOCATION}",
        "GPU {gpu} ran out of memory: {asked} asked for, {free} of {total} free",
    ),
    # NCCL noticed it, but is not the cause.
    _make_sign(
        "cuda-out-of-memory",
        rf"{_line_up_to('NCCL error')}{_NEXT_LINES}(?P<telling>Cuda failure(?: \d+)? 'out of memory')",
        "the GPU ran out of memory in NCCL",
    ),
    _make_sign(
        "cuda-out-of-memory",
        r"CUDA error: out of memory|CUDA out of memory|torch\.OutOfMemoryError",
        "the GPU ran out of memory",
    ),
    _make_sign(
        "cuda-out-of-memory",
        r"CUBLAS_STATUS_ALLOC_FAILED when calling `(?P<call>\w+)",
        "the GPU ran out of memory in cuBLAS ({call})",
    ),
    _make_sign(
        "driver-too-old",
        r"The NVIDIA driver on your system is too old \(found version (?P<major>\d\d)0?(?P<minor>\d+)\d\)",
        "this host's NVIDIA driver is too old: it has CUDA {major}.{minor} at most",
    ),
    _make_sign(
        "driver-too-old",
        r"unsatisfied condition: (?P<condition>(?:cuda|driver)\S*?),?(?:\s|$)",
        "this host's NVIDIA driver is too old: the image needs {condition}",
    ),
    _make_sign(
        "driver-too-old",
        r"CUDA driver version is insufficient for CUDA runtime version|Error 80[34]: [^(\n]+",
        "this host's NVIDIA driver does not serve this CUDA version: {whole}",
    ),
    _make_sign(
        "no-gpu",
        r"No CUDA GPUs are available|Found no NVIDIA driver on your system|Failed to infer device type|Error 802: [^(\n]+",
        "the server found no GPU that it can use: {whole}",
    ),
    _make_sign("no-gpu", r"libcuda\.so\.1: cannot open shared object file", "the server found no NVIDIA driver: {whole}"),
    _make_sign(
        "too-few-gpus",
        r"World size \((?P<ranks>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\)",
        "the server has {ranks} ranks, and sees {gpus} GPUs",
    ),
    _make_sign(
        "nccl-failure",
        rf"{_line_up_to('NCCL error|ncclInvalidUsage')}{_NEXT_LINES}"
        r"(?P<telling>Duplicate GPU detected : rank (?P<one>\d+) and rank (?P<other>\d+))",
        "NCCL: rank {one} and rank {other} are on the same GPU",
        "give each rank a GPU of its own: check CUDA_VISIBLE_DEVICES and the sum of the parallel sizes",
    ),
    _make_sign(
        "nccl-failure",
        rf"{_line_up_to('NCCL error|ncclSystemError|NCCL WARN')}{_NEXT_LINES}"
        r"(?P<telling>Error while creating shared memory segment (?P<name>\S+) \(size (?P<size>\d+)\))",
        "NCCL got no shared memory: {name}, {size} bytes",
        "give the container more shared memory: ipc host, or a larger shm size",
    ),
    _make_sign(
        "nccl-failure",
        rf"{_line_up_to('NCCL error')}{_NEXT_LINES}(?P<telling>Bootstrap : no socket interface found)",
        "NCCL: no network interface of this host fits",
        "set NCCL_SOCKET_IFNAME to an interface that the server sees, or unset it",
    ),
    # The ranks wait for one another; which one was late can be chance.
    _make_sign(
        "nccl-failure",
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=\d+, OpType=(?P<what>\w+),"
        r".{0,300}?ran for (?P<ms>\d+) milliseconds",
        "NCCL: a collective operation ({what}) was not over after {ms} ms",
        retry=True,
    ),
    _make_sign("nccl-failure", r"NCCL error(?: in)?: (?:\S+:\d+, )?(?P<what>[^(,\n]{1,300}?)(?: \(| -|,|$)", "NCCL: {what}"),
    _make_sign(
        "nccl-failure", r"\b(?P<what>nccl(?:System|Internal|Remote|UnhandledCuda|InvalidUsage)(?:Error)?): .+", "NCCL: {what}"
    ),
    _make_sign("port-in-use", r"^.*(?:\[Errno 98\]|[Aa]ddress already in use).*", "the server's port is in use: {whole}"),
    _make_sign("incomplete-model", r"Cannot find any model weights with `(?P<model>[^`]+)`", "{model} holds no weights"),
    _make_sign("incomplete-model", r"SafetensorError: (?P<why>.+)", "a file of weights is broken: {why}"),
    _make_sign(
        "out-of-memory",
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (?P<size>\d+) bytes",
        "the host's memory ran out: {size} bytes asked for",
    ),
    _make_sign(
        "out-of-memory",
        r"^MemoryError.*|std::bad_alloc|\[Errno 12\] Cannot allocate memory",
        "the host's memory ran out: {whole}",
    ),
    _make_sign(
        "broken-installation",
        r"No CTK flavor installed: expected one or more of (?P<what>\S+)",
        "a Python package of the engine lacks its libraries: {what}",
    ),
    # Python's own words. The engine's processes are spawned, and each imports the program that started the first one.
    _make_sign(
        "broken-installation",
        r"An attempt has been made to start a new process before the",
        "the program that starts the engine does so again whenever it is imported, as each of its processes does",
        'put what the program does under `if __name__ == "__main__":`, or install vLLM anew, whose own program has it',
    ),
    # An empty name means that there is no program.
    _make_sign(
        "no-compiler",
        r"InductorError: (?P<why>PermissionError: \[Errno 13\] Permission denied: ''|InvalidCxxCompiler: .+)",
        "what compiles the model found no compiler that it can use: {why}",
    ),
    _make_sign(
        "no-compiler",
        r"Could not find nvcc(?: and default cuda_home='[^'\n]{1,300}' doesn't exist)?",
        "what compiles kernels for the GPU found no nvcc: {whole}",
        _NVCC_REMEDY,
    ),
    # The words of the shells dash and bash.
    _make_sign(
        "no-compiler",
        r"^\S{0,100}sh: (?:line )?\d{1,6}: (?P<program>\S{0,300}nvcc): (?:(?:command )?not found|No such file or directory)",
        "what compiles kernels for the GPU found no {program}",
        _NVCC_REMEDY,
    ),
    # After the sign for the driver's own library, which has another remedy.
    _make_sign(
        "broken-installation",
        r"^(?:ModuleNotFoundError|ImportError): (?P<why>.+)",
        "a Python package of the engine cannot be imported: {why}",
    ),
    _make_sign(
        "crashed", r"^!+ Segfault encountered !+", "native code of the server crashed with a segmentation fault (SIGSEGV)"
    ),
    _make_sign(
        "refused-configuration",
        r"^ +(?:Value error|Assertion failed), (?P<why>.+?)(?= \[type=|$)",
        "vLLM refuses the configuration: {why}",
    ),
]
