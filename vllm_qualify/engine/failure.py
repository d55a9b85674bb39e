"""Why a server ended or never answered, and who must act: from its log and the way it ended. Pure.

A log has one cause and many consequences: whatever happened, vLLM's last words are "Engine core initialization failed". So the
earliest known sign in the log wins. Only lines that say what happened count: no notes, no warnings, no source lines of a
traceback, and nothing that the server survived. If the log has no sign, the way the server ended decides.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from signal import Signals
from typing import Literal, NamedTuple

from pydantic import Field

from vllm_qualify.recipe.values import Frozen

Turn = Literal["recipe", "host", "release", "hub"]
FailureClass = Literal[
    "unknown-flag",
    "invalid-value",
    "refused-configuration",
    "unknown-model",
    "unknown-revision",
    "gated-model",
    "hub-rate-limit",
    "hub-unreachable",
    "not-in-cache",
    "incomplete-model",
    "unsupported-architecture",
    "unsupported-quantization",
    "unsupported-backend",
    "cuda-out-of-memory",
    "gpu-memory-in-use",
    "kv-cache-too-small",
    "out-of-memory",
    "driver-too-old",
    "no-gpu",
    "too-few-gpus",
    "broken-installation",
    "no-compiler",
    "nccl-failure",
    "port-in-use",
    "killed",
    "crashed",
    "hung",
    "unknown",
]
MOST_LINES = 6
HIGHEST_SIGNAL = 64
READY = "Application startup complete"


class End(Frozen):
    """How a server ended, or that it was given up."""

    exit_code: int | None = Field(
        description="None: it still ran when it was given up; below zero, or 128 and a signal: that signal"
    )
    oom_killed: bool = Field(default=False, description="the container runtime says that the memory limit killed a process")
    waited_s: float | None = Field(default=None, description="how long it was waited for, if it was given up")

    @property
    def signal(self) -> int | None:
        """The signal that ended it. A container and a shell report it as 128 plus the signal."""
        code = self.exit_code or 0
        if code < 0:
            return -code
        return code - 128 if 128 < code <= 128 + HIGHEST_SIGNAL else None


class Failure(Frozen):
    """What went wrong, who must act, and the remedy."""

    kind: FailureClass
    whose_turn: Turn
    retry: bool = Field(description="whether the same thing, tried again, would plausibly succeed")
    problem: str
    remedy: str
    lines: list[str] = Field(description="the lines of the log that tell it, the most telling first; empty for an empty log")


class Meaning(NamedTuple):
    """What a kind of failure means: who must act, whether to try again, and the remedy."""

    turn: Turn
    retry: bool
    remedy: str


MEANINGS: dict[FailureClass, Meaning] = {
    "unknown-flag": Meaning("recipe", False, "correct the option's name, or take it out: this vLLM version does not have it"),
    "invalid-value": Meaning("recipe", False, "give the option a value that this vLLM version takes"),
    "refused-configuration": Meaning(
        "recipe", False, "change the options that vLLM names: they do not fit the model or each other"
    ),
    "unknown-model": Meaning("recipe", False, "check the model's name; for a private repository set HF_TOKEN"),
    "unknown-revision": Meaning("recipe", False, "name a branch, tag or commit that the repository has"),
    "gated-model": Meaning(
        "hub", False, "accept the repository's conditions on the hub, and set HF_TOKEN of an account that may read it"
    ),
    "hub-rate-limit": Meaning("hub", True, "wait some minutes, or set HF_TOKEN for a higher limit"),
    "hub-unreachable": Meaning(
        "hub", True, "check the network, the proxy and HF_ENDPOINT, and the hub's status; or serve a local folder"
    ),
    "not-in-cache": Meaning("host", False, "download the model into the hub's cache first, or unset HF_HUB_OFFLINE"),
    "incomplete-model": Meaning(
        "release", False, "complete the repository's or the folder's files; remove a broken copy from the hub's cache"
    ),
    "unsupported-architecture": Meaning("release", False, "take a vLLM version that supports the model"),
    "unsupported-quantization": Meaning("recipe", False, "choose a variant whose quantization this GPU type supports"),
    "unsupported-backend": Meaning(
        "recipe", False, "leave the option out: vLLM takes a backend that fits the model and this GPU type; or name another"
    ),
    # If the host is the cause, the kind is another one: vLLM does not start if the GPU's memory is already taken.
    "cuda-out-of-memory": Meaning(
        "recipe", False, "lower gpu-memory-utilization, max-num-seqs, max-num-batched-tokens or max-model-len, or use more GPUs"
    ),
    # The memory of a server that was just stopped becomes free a moment later.
    "gpu-memory-in-use": Meaning(
        "host", True, "stop what else uses the GPU, see `nvidia-smi`; or lower gpu-memory-utilization"
    ),
    "kv-cache-too-small": Meaning("recipe", False, "lower max-model-len, raise gpu-memory-utilization, or use more GPUs"),
    "out-of-memory": Meaning("host", False, "raise the container's or the host's memory, or stop what else uses it"),
    "driver-too-old": Meaning("host", False, "update this host's NVIDIA driver, or use an image for an older CUDA"),
    "no-gpu": Meaning("host", False, "give the server a GPU, and check it with `nvidia-smi` where the server runs"),
    "too-few-gpus": Meaning("host", False, "use a machine with more GPUs; or lower the recipe's parallel sizes"),
    "broken-installation": Meaning(
        "host", False, "install the engine and the packages that it needs anew, or serve an image, which has them all"
    ),
    "no-compiler": Meaning(
        "host", False, "install gcc, g++ and CUDA's nvcc where the server runs, on its PATH; or serve an image, which has them"
    ),
    "nccl-failure": Meaning(
        "host", False, "set NCCL_DEBUG=INFO and check the links, shared memory and drivers between the GPUs"
    ),
    "port-in-use": Meaning("host", True, "free the port, or leave --port out"),
    "killed": Meaning(
        "host", True, "find who or what stopped it: an operator, a supervisor, the kernel's OOM killer (`dmesg`)"
    ),
    "crashed": Meaning("release", False, "report it to vLLM with the log: native code of the release failed"),
    # A slow host looks the same, but nothing in the log says so, and the recipe sets the time that this release may take.
    "hung": Meaning("release", False, "see the log's last line; raise startup_timeout_s if it only needs longer"),
    "unknown": Meaning("release", False, "see the log's lines"),
}


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


def _sign(kind: FailureClass, pattern: str, problem: str, remedy: str | None = None, retry: bool | None = None) -> Sign:
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


def _first(words: str) -> str:
    """The line up to the first of these words in it: the search for what follows begins only once in a line."""
    return rf"^(?>[^\n]*?(?:{words}))"


# The log may be hostile: each pattern is bounded, or begins only once in a line. Else the work grows with the log's square.
# If several signs are in the same line, the first one here wins: the more specific signs come first.
SIGNS = [
    _sign("unknown-flag", r"error: unrecognized arguments: (?P<flags>.+)", "this vLLM version does not know {flags}"),
    _sign(
        "invalid-value",
        r"error: argument (?P<flag>\S+): \d+ validation errors? for [^\n]+\n(?P<key>\S.*)\n +(?P<why>.+?)(?= \[type=|$)",
        "vLLM refuses the value of {flag}: {key}: {why}",
    ),
    _sign(
        "invalid-value",
        r"error: argument (?P<flag>\S+): \d+ validation errors? for [^\n]+\n +(?P<why>.+?)(?= \[type=|$)",
        "vLLM refuses the value of {flag}: {why}",
    ),
    _sign("invalid-value", r"error: argument (?P<flag>\S+): (?P<why>.+)", "vLLM refuses the value of {flag}: {why}"),
    _sign("unknown-model", rf"Repository Not Found for url: {_REPOSITORY}", "the hub has no model {repo}, or hides it"),
    _sign(
        "unknown-model",
        r"(?:Repo id must be in the form '[^']+' or '[^']+'|Invalid repository ID or local directory specified): "
        r"'(?P<repo>[^']+)'",
        "{repo} is neither a folder with a model's configuration nor a repository's name that the hub takes",
        "check the folder's path, as the server sees it, or the repository's name",
    ),
    _sign(
        "unknown-model",
        r"(?<!\S)(?P<repo>\S+) is not a local folder and is not a valid model identifier",
        "there is no model {repo}: neither a folder nor a repository of the hub",
    ),
    _sign(
        "unknown-revision",
        rf"Revision Not Found for url: {_REPOSITORY}/(?:resolve|revision|tree)/(?P<revision>[^/\s]+)",
        "the model {repo} has no revision {revision}",
    ),
    _sign(
        "unknown-revision", r"(?<!\S)(?P<revision>\S+) is not a valid git identifier", "the model has no revision {revision}"
    ),
    _sign(
        "gated-model",
        rf"{_first('Cannot access gated repo for url ')}{_REPOSITORY}{_NEXT_LINES}not in the authorized list",
        "the model {repo} is gated, and the account of this HF_TOKEN is not in its list",
        "ask for access on the repository's page on the hub",
    ),
    _sign(
        "gated-model",
        rf"Cannot access gated repo for url {_REPOSITORY}",
        "the model {repo} is gated, and no account was named that may read it",
    ),
    _sign(
        "gated-model",
        r"There was a specific connection error when trying to load (?P<repo>\S+?):?\n"
        r"Client error '(?P<status>40[13] [^'\n]{1,100})'",
        "the hub refuses to give the model {repo} ({status}): it does not exist, or HF_TOKEN may not read it",
        "check the model's name, and that HF_TOKEN is valid and may read it",
    ),
    _sign(
        "hub-rate-limit",
        rf"429 (?:Client Error: )?Too Many Requests'? for url:? '?{_REPOSITORY}",
        "the hub's rate limit (429) stopped {repo}",
    ),
    _sign(
        "hub-unreachable",
        rf"Server error '(?P<status>5\d\d [^'\n]{{1,100}})' for url '{_REPOSITORY}",
        "the hub answered {status} for {repo}",
    ),
    _sign(
        "hub-unreachable",
        rf"{_first(_NO_CONNECTION)}(?P<why>.+)(?:\n(?!.*{_NO_CONNECTION}).*){{0,300}}?"
        r"(?P<telling>We couldn't connect to '(?P<url>[^'\n]+)')",
        "the hub at {url} does not answer: {why}",
    ),
    _sign("hub-unreachable", r"We couldn't connect to '(?P<url>[^'\n]+)'", "the hub at {url} does not answer"),
    _sign(
        "not-in-cache",
        r"LocalEntryNotFoundError: .{0,300}?outgoing traffic has been disabled",
        "the model is not in the hub's cache of this host, and HF_HUB_OFFLINE forbids to download it",
    ),
    _sign(
        "unsupported-architecture",
        r"Model architectures? \[?'?(?P<name>\w{1,100}+)'?.{0,300}?(?:is|are) not supported",
        "this vLLM version does not support the architecture {name}",
    ),
    _sign(
        "unsupported-quantization",
        r"quantization method (?P<method>\S+) is not supported for the current GPU\. Minimum capability: (?P<least>\d+)\. "
        r"Current capability: (?P<has>\d+)",
        "the quantization {method} needs compute capability {least}, this GPU has {has}",
    ),
    _sign(
        "unsupported-quantization",
        r"Quantization scheme is not supported for the current GPU\. Min capability: (?P<least>\d+)\. "
        r"Current capability: (?P<has>\d+)",
        "the quantization scheme needs compute capability {least}, this GPU has {has}",
    ),
    _sign(
        "unsupported-quantization",
        r"Unknown quantization method: (?P<method>[^.\n]{1,100})\.",
        "this vLLM does not know the quantization {method} on this device",
    ),
    _sign(
        "unsupported-backend",
        r"Selected backend (?:\w+\.)?(?P<name>\w+) is not valid for this configuration\. Reason: (?P<why>.+)",
        "the attention backend {name} does not fit the model or this GPU: {why}",
    ),
    _sign(
        "unsupported-backend",
        r"(?P<kind>\w{1,40}) MoE backend '?(?P<name>\w+)'? does not support the deployment configuration"
        r"(?: since (?P<why>.+))?",
        "the {kind} MoE backend {name} does not fit the model or this GPU: {why}",
    ),
    _sign(
        "invalid-value",
        r"Unknown attention backend: '(?P<name>[^'\n]{1,100})'\. Valid options are: (?P<valid>.+)",
        "this vLLM has no attention backend {name}",
    ),
    _sign(
        "kv-cache-too-small",
        rf"{_KV_CACHE_NEEDED}\. Based on the available memory, the estimated maximum model length is (?P<fits>\d+)",
        "max-model-len {asked} needs {needed} GiB of KV cache, {available} GiB are left; {fits} tokens would fit",
        "set max-model-len to {fits} or less, raise gpu-memory-utilization, or use more GPUs",
    ),
    _sign(
        "kv-cache-too-small",
        _KV_CACHE_NEEDED,
        "max-model-len {asked} needs {needed} GiB of KV cache, {available} GiB are left",
    ),
    _sign(
        "kv-cache-too-small",
        r"No available memory for the cache blocks",
        "the model leaves no memory for the KV cache",
        "raise gpu-memory-utilization, lower max-num-batched-tokens, or use more GPUs",
    ),
    _sign(
        "gpu-memory-in-use",
        rf"Free memory on device(?: \S+)? {_FREE} GPU {_SHARE}",
        "{free} of {total} GiB of the GPU's memory were free at the start, gpu-memory-utilization {share} asks for {asked} GiB",
    ),
    _sign(
        "gpu-memory-in-use",
        r"Error in memory profiling\. Initial free memory (?P<before>[\d.]+) GiB, current free memory (?P<after>[\d.]+) GiB",
        "another process gave memory of the GPU back while the server measured it: {before} GiB were free, then {after} GiB",
    ),
    _sign(
        "out-of-memory",
        rf"Available memory on node \d+ {_FREE} CPU {_SHARE}",
        "{free} of {total} GiB of the host's memory were free, gpu-memory-utilization {share} asks for {asked} GiB",
        "stop what else uses the host's memory; or lower gpu-memory-utilization, which on the CPU means the host's memory",
    ),
    # vLLM's own message follows the allocator's.
    _sign(
        "cuda-out-of-memory",
        rf"{_first('out of memory')}(?:[^\n]*\n){{1,60}}?[^\n]*?"
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
    _sign(
        "cuda-out-of-memory",
        rf"CUDA out of memory\. {_ALLOCATION}",
        "GPU {gpu} ran out of memory: {asked} asked for, {free} of {total} free",
    ),
    # NCCL noticed it, but is not the cause.
    _sign(
        "cuda-out-of-memory",
        rf"{_first('NCCL error')}{_NEXT_LINES}(?P<telling>Cuda failure(?: \d+)? 'out of memory')",
        "the GPU ran out of memory in NCCL",
    ),
    _sign(
        "cuda-out-of-memory",
        r"CUDA error: out of memory|CUDA out of memory|torch\.OutOfMemoryError",
        "the GPU ran out of memory",
    ),
    _sign(
        "cuda-out-of-memory",
        r"CUBLAS_STATUS_ALLOC_FAILED when calling `(?P<call>\w+)",
        "the GPU ran out of memory in cuBLAS ({call})",
    ),
    _sign(
        "driver-too-old",
        r"The NVIDIA driver on your system is too old \(found version (?P<major>\d\d)0?(?P<minor>\d+)\d\)",
        "this host's NVIDIA driver is too old: it has CUDA {major}.{minor} at most",
    ),
    _sign(
        "driver-too-old",
        r"unsatisfied condition: (?P<condition>(?:cuda|driver)\S*?),?(?:\s|$)",
        "this host's NVIDIA driver is too old: the image needs {condition}",
    ),
    _sign(
        "driver-too-old",
        r"CUDA driver version is insufficient for CUDA runtime version|Error 80[34]: [^(\n]+",
        "this host's NVIDIA driver does not serve this CUDA version: {whole}",
    ),
    _sign(
        "no-gpu",
        r"No CUDA GPUs are available|Found no NVIDIA driver on your system|Failed to infer device type|Error 802: [^(\n]+",
        "the server found no GPU that it can use: {whole}",
    ),
    _sign("no-gpu", r"libcuda\.so\.1: cannot open shared object file", "the server found no NVIDIA driver: {whole}"),
    _sign(
        "too-few-gpus",
        r"World size \((?P<ranks>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\)",
        "the server has {ranks} ranks, and sees {gpus} GPUs",
    ),
    _sign(
        "nccl-failure",
        rf"{_first('NCCL error|ncclInvalidUsage')}{_NEXT_LINES}"
        r"(?P<telling>Duplicate GPU detected : rank (?P<one>\d+) and rank (?P<other>\d+))",
        "NCCL: rank {one} and rank {other} are on the same GPU",
        "give each rank a GPU of its own: check CUDA_VISIBLE_DEVICES and the sum of the parallel sizes",
    ),
    _sign(
        "nccl-failure",
        rf"{_first('NCCL error|ncclSystemError|NCCL WARN')}{_NEXT_LINES}"
        r"(?P<telling>Error while creating shared memory segment (?P<name>\S+) \(size (?P<size>\d+)\))",
        "NCCL got no shared memory: {name}, {size} bytes",
        "give the container more shared memory: ipc host, or a larger shm size",
    ),
    _sign(
        "nccl-failure",
        rf"{_first('NCCL error')}{_NEXT_LINES}(?P<telling>Bootstrap : no socket interface found)",
        "NCCL: no network interface of this host fits",
        "set NCCL_SOCKET_IFNAME to an interface that the server sees, or unset it",
    ),
    # The ranks wait for one another; which one was late can be chance.
    _sign(
        "nccl-failure",
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=\d+, OpType=(?P<what>\w+),"
        r".{0,300}?ran for (?P<ms>\d+) milliseconds",
        "NCCL: a collective operation ({what}) was not over after {ms} ms",
        retry=True,
    ),
    _sign("nccl-failure", r"NCCL error(?: in)?: (?:\S+:\d+, )?(?P<what>[^(,\n]{1,300}?)(?: \(| -|,|$)", "NCCL: {what}"),
    _sign(
        "nccl-failure", r"\b(?P<what>nccl(?:System|Internal|Remote|UnhandledCuda|InvalidUsage)(?:Error)?): .+", "NCCL: {what}"
    ),
    _sign("port-in-use", r"^.*(?:\[Errno 98\]|[Aa]ddress already in use).*", "the server's port is in use: {whole}"),
    _sign("incomplete-model", r"Cannot find any model weights with `(?P<model>[^`]+)`", "{model} holds no weights"),
    _sign("incomplete-model", r"SafetensorError: (?P<why>.+)", "a file of weights is broken: {why}"),
    _sign(
        "out-of-memory",
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (?P<size>\d+) bytes",
        "the host's memory ran out: {size} bytes asked for",
    ),
    _sign(
        "out-of-memory",
        r"^MemoryError.*|std::bad_alloc|\[Errno 12\] Cannot allocate memory",
        "the host's memory ran out: {whole}",
    ),
    _sign(
        "broken-installation",
        r"No CTK flavor installed: expected one or more of (?P<what>\S+)",
        "a Python package of the engine lacks its libraries: {what}",
    ),
    # Python's own words. The engine's processes are spawned, and each imports the program that started the first one.
    _sign(
        "broken-installation",
        r"An attempt has been made to start a new process before the",
        "the program that starts the engine does so again whenever it is imported, as each of its processes does",
        'put what the program does under `if __name__ == "__main__":`, or install vLLM anew, whose own program has it',
    ),
    # An empty name means that there is no program.
    _sign(
        "no-compiler",
        r"InductorError: (?P<why>PermissionError: \[Errno 13\] Permission denied: ''|InvalidCxxCompiler: .+)",
        "what compiles the model found no compiler that it can use: {why}",
    ),
    _sign(
        "no-compiler",
        r"Could not find nvcc(?: and default cuda_home='[^'\n]{1,300}' doesn't exist)?",
        "what compiles kernels for the GPU found no nvcc: {whole}",
        _NVCC_REMEDY,
    ),
    # The words of the shells dash and bash.
    _sign(
        "no-compiler",
        r"^\S{0,100}sh: (?:line )?\d{1,6}: (?P<program>\S{0,300}nvcc): (?:(?:command )?not found|No such file or directory)",
        "what compiles kernels for the GPU found no {program}",
        _NVCC_REMEDY,
    ),
    # After the sign for the driver's own library, which has another remedy.
    _sign(
        "broken-installation",
        r"^(?:ModuleNotFoundError|ImportError): (?P<why>.+)",
        "a Python package of the engine cannot be imported: {why}",
    ),
    _sign("crashed", r"^!+ Segfault encountered !+", "native code of the server crashed with a segmentation fault (SIGSEGV)"),
    _sign(
        "refused-configuration",
        r"^ +(?:Value error|Assertion failed), (?P<why>.+?)(?= \[type=|$)",
        "vLLM refuses the configuration: {why}",
    ),
]

# A process of the server ended without a reason in the log: only its parent reports it.
_SILENT_DEATHS = [
    re.compile(r"(?:Engine core|Worker) proc (?P<name>\S+) died unexpectedly(?: \(exit code: (?P<code>-?\d+)\))?"),
    re.compile(r"MPClient: (?P<name>engine core) exited unexpectedly(?P<code>)"),
    re.compile(r"Failed core proc\(s\): \{'(?P<name>[^']+)': (?P<code>-\d+)"),
]
_STOP_REQUESTED = re.compile(r"\[shutdown\] API server: shutdown triggered")
_HUB_WAIT = re.compile(r"^Rate limited\. Waiting (?P<seconds>[\d.]+)s before retry")

_CRASHES = {Signals.SIGSEGV, Signals.SIGABRT, Signals.SIGBUS, Signals.SIGILL, Signals.SIGFPE}

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(
    r"\s{0,2}[\w.-]*\s+\| ?"  # Compose
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S* "
    r"|\s{0,2}\((?=[^()]{0,80}\bpid=\d)[^()]{1,160}\) ?"
    r"|\[(?:Stage-|rank)\d+\]:? ?"
)
_LEVEL = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\]|[^\s\]]+\]) ?|:\s+)"
)
_QUIET_LEVELS = ("DEBUG", "INFO", "WARNING")
_QUIET = re.compile(r'\[[WI][\d ]|  +File "| {4}|Traceback \(most recent|The above exception was|During handling of')

_EXCEPTION = re.compile(
    r"(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt)(?::|$)|Exception: |Fatal Python error: |vllm[\w ]*: error: "
)
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|Engine process failed to start|Frontend process failed|WorkerProc initialization failed"
    r"|EngineCore encountered an issue|EngineDeadError|Worker failed with error|ProcessRaisedException"
    # An interpreter ended while its threads were still reading.
    r"|at interpreter shutdown, possibly due to daemon threads"
    r"|CancelledError|KeyboardInterrupt|SystemExit|BrokenPipeError|ConnectionResetError"
)
# An exception whose message begins on the next line.
_WITHOUT_MESSAGE = re.compile(r"[\w.]{0,200}(?:Error|Exception):$")
_LONGEST_READ, _LONGEST_LINE = 2000, 1000
_MOST_FRAME_LINES = 400
_MESSAGE_WITHIN = 4
_LONGEST_QUOTE = 300


def classify_log(log: str, end: End, own_signs: Sequence[Sign] = ()) -> Failure:
    """The failure that a server's log and end show; an empty log is classified by the end alone.

    `own_signs` are those of its kind of engine. They come before SIGNS.

    The log is taken as it is: a caller that must not echo secrets redacts it first. At most 2000 characters of a line are
    read. Lines are returned without colours, and are cut after 1000 characters.
    """
    lines = _lines(log)
    alive = _first_after_ready(lines)
    telling = _with_messages(lines, [""] * alive + [_telling(line) for line in lines[alive:]])
    failure = _by_sign(lines, telling, [*own_signs, *SIGNS])
    # If the memory limit killed a rank, the others fail with an NCCL error. Any other sign wins over the memory limit: the
    # runtime also reports the end of a helper process, which the server may have survived.
    if end.oom_killed and (failure is None or failure.kind == "nccl-failure"):
        return _oom_killed(lines, end)
    return failure or _by_silent_death(lines, telling, alive) or _by_end(lines, telling, end)


def _lines(log: str) -> list[str]:
    """The log's lines without control characters; each state of a progress bar is a line."""
    return [_CONTROL.sub("", line).rstrip() for line in re.split(r"\r\n|\n|\r", log)]


def _first_after_ready(lines: list[str]) -> int:
    """The line after the server's start was complete. Nothing before it stopped the server."""
    return max((index + 1 for index, line in enumerate(lines) if READY in line), default=0)


def _telling(line: str) -> str:
    """What the line says happened; empty for a note, a warning or a traceback's source line."""
    said, is_quiet = _said(line)
    return "" if is_quiet or _QUIET.match(said) else said


def _said(line: str) -> tuple[str, bool]:
    """The line without its prefixes, and whether its level is that of a note or a warning."""
    line = line[:_LONGEST_READ]
    while prefix := _PREFIX.match(line):
        line = line[prefix.end() :]
    level = _LEVEL.match(line)
    return (line[level.end() :], level["level"] in _QUIET_LEVELS) if level else (line, False)


def _with_messages(lines: list[str], telling: list[str]) -> list[str]:
    """The telling lines, and the first line of each message that is not on its exception's own line."""
    with_messages = list(telling)
    for index, line in enumerate(telling):
        if _WITHOUT_MESSAGE.match(line) and (place := _message_of(lines, index)) is not None:
            with_messages[place] = _said(lines[place])[0].strip()
    return with_messages


def _message_of(lines: list[str], index: int) -> int | None:
    """Where the message of the exception at `index` begins: it may be indented like a traceback's source lines."""
    following = range(index + 1, min(index + 1 + _MESSAGE_WITHIN, len(lines)))
    return next((place for place in following if _said(lines[place])[0].strip()), None)


def _by_sign(lines: list[str], telling: list[str], signs: Sequence[Sign]) -> Failure | None:
    text = "\n".join(telling)
    places = [(text.count("\n", 0, match.start()), order, match) for order, match in _matches(text, signs)]
    matches = [place for place in places if _is_through(signs[place[1]].through, lines, place[0])]
    if not matches:
        return None
    first, order, match = min(matches, key=lambda candidate: candidate[:2])
    sign = signs[order]
    groups = match.groupdict(default="")
    problem = sign.problem.format_map(groups | {"whole": match[0].strip()})
    head = text.count("\n", 0, match.start("telling")) if "telling" in groups else first
    others = range(first, first + match[0].count("\n") + 1)
    shown = [head, *(index for index in others if index != head and telling[index])]
    return _failure(sign.kind, problem, [lines[index] for index in shown], sign.remedy, sign.retry)


def _matches(text: str, signs: Sequence[Sign]) -> Iterator[tuple[int, re.Match[str]]]:
    for order, sign in enumerate(signs):
        match = sign.pattern.search(text)
        if match:
            yield order, match


def _is_through(path: str | None, lines: list[str], last: int) -> bool:
    """Whether the traceback that ends in this line goes through the path."""
    if path is None:
        return True
    frames = itertools.takewhile(lambda line: "Traceback (most recent call last)" not in line, reversed(lines[:last]))
    return any(path in line for line in itertools.islice(frames, _MOST_FRAME_LINES))


def _by_silent_death(lines: list[str], telling: list[str], alive: int) -> Failure | None:
    """A process's end is the cause only if no exception comes before it. Its parent may report it in a warning."""
    for line, text in zip(lines[alive:], telling[alive:], strict=True):
        if _is_cause(text):
            return None
        death = next((match for pattern in _SILENT_DEATHS if (match := pattern.search(line))), None)
        code = int(death["code"] or 0) if death else 0
        if death and (code < 0 or not death["code"]):
            how = f"was ended by {_signal_name(-code)}" if code else "ended without telling why"
            return _failure(_kind_of_signal(-code), f"the server's process {death['name']} {how}", [line])
    return None


def _by_end(lines: list[str], telling: list[str], end: End) -> Failure:
    if end.exit_code is None:
        return _given_up(lines, telling, end)
    if end.signal is not None:
        return _failure(_kind_of_signal(end.signal), f"the server was ended by {_signal_name(end.signal)}", _last(lines))
    # vLLM ends with exit code 0 after a SIGTERM.
    stopped = [line for line in lines if _STOP_REQUESTED.search(line)]
    if stopped:
        return _failure("killed", f"the server was stopped from outside, and ended with exit code {end.exit_code}", stopped)
    exceptions = _exceptions(lines, telling)
    said = f": {_short(exceptions[0].text)}" if exceptions else "" if _last(lines) else " and left no log"
    return _failure("unknown", f"the server ended with exit code {end.exit_code}{said}", _shown(exceptions) or _last(lines))


def _given_up(lines: list[str], telling: list[str], end: End) -> Failure:
    last = _last(lines)
    wait = _HUB_WAIT.match(last[0]) if last else None
    if wait:
        return _failure("hub-rate-limit", f"the server waits {wait['seconds']} s for the hub's rate limit (429)", last)
    what = (
        f"no completion came back within {end.waited_s:g} s"
        if end.waited_s is not None
        else "the server does not answer any more"
    )
    said = f"; the log's last line: {_short(last[0])}" if last else "; it left no log"
    return _failure("hung", what + said, [*_shown(_exceptions(lines, telling)), *last])


def _oom_killed(lines: list[str], end: End) -> Failure:
    how = f"; the server ended by {_signal_name(end.signal)}" if end.signal else ""
    return _failure("out-of-memory", f"the memory limit killed a process of the server{how}", _last(lines))


class Raised(NamedTuple):
    """An exception that the log names: what it says, in one line, and the lines of the log that say it."""

    text: str
    lines: list[str]


def _exceptions(lines: list[str], telling: list[str]) -> list[Raised]:
    """Each exception once, the last one first, and a consequence only if there is nothing else."""
    named = [index for index, line in enumerate(telling) if _EXCEPTION.match(line)]
    causes = [index for index in named if _is_cause(telling[index])]
    raised = [_raised(lines, telling, index) for index in causes or named]
    return list({each.text: each for each in raised}.values())[::-1]


def _raised(lines: list[str], telling: list[str], index: int) -> Raised:
    place = _message_of(lines, index) if _WITHOUT_MESSAGE.match(telling[index]) else None
    if place is None:
        return Raised(telling[index], [lines[index]])
    return Raised(f"{telling[index]} {telling[place]}", [lines[index], lines[place]])


def _shown(exceptions: list[Raised]) -> list[str]:
    return [line for each in exceptions for line in each.lines]


def _is_cause(line: str) -> bool:
    return bool(_EXCEPTION.match(line)) and not _CONSEQUENCE.search(line)


def _last(lines: list[str]) -> list[str]:
    """The last lines that are not empty, the last one first."""
    return [line for line in lines if line.strip()][:-4:-1]


def _kind_of_signal(signal: int) -> FailureClass:
    return "crashed" if signal in _CRASHES else "killed"


def _signal_name(signal: int) -> str:
    try:
        return f"signal {signal} ({Signals(signal).name})"
    except ValueError:
        return f"signal {signal}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]} …"


def _failure(
    kind: FailureClass, problem: str, lines: list[str], remedy: str | None = None, retry: bool | None = None
) -> Failure:
    meaning = MEANINGS[kind]
    return Failure(
        kind=kind,
        whose_turn=meaning.turn,
        retry=meaning.retry if retry is None else retry,
        problem=problem,
        remedy=remedy or meaning.remedy,
        lines=[line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} …" for line in lines[:MOST_LINES]],
    )
