"""The kinds of failure of a server, and what each means: who must act, whether to try again, and the remedy."""

from typing import Literal, NamedTuple

Turn = Literal["recipe", "host", "release", "hub", "unclear"]
_OfOptions = Literal["unknown-flag", "invalid-value", "refused-configuration"]
_OfModels = Literal[
    "unknown-model", "unknown-revision", "gated-model", "not-in-cache", "incomplete-model", "weights-do-not-fit"
]
_OfTheHub = Literal["hub-rate-limit", "hub-unreachable"]
_Unsupported = Literal["unsupported-architecture", "unsupported-quantization", "unsupported-backend", "unsupported-gpu"]
_OfMemory = Literal["cuda-out-of-memory", "gpu-memory-in-use", "kv-cache-too-small", "out-of-memory"]
_OfGpus = Literal["driver-too-old", "no-gpu", "too-few-gpus", "gpu-broken", "nccl-failure", "rendezvous"]
_OfTheHost = Literal[
    "broken-installation", "no-compiler", "compile-cache", "no-permission", "disk-full", "process-limit", "port-in-use"
]
_Ends = Literal["killed", "crashed", "engine-bug", "hung", "unknown"]
FailureClass = Literal[_OfOptions, _OfModels, _OfTheHub, _Unsupported, _OfMemory, _OfGpus, _OfTheHost, _Ends]


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
    "weights-do-not-fit": Meaning(
        "release", False, "take another variant, whose weights this vLLM's model has, or a vLLM version that knows this one"
    ),
    "unsupported-architecture": Meaning("release", False, "take a vLLM version that supports the model"),
    "unsupported-quantization": Meaning("recipe", False, "choose a variant whose quantization this GPU type supports"),
    "unsupported-backend": Meaning(
        "recipe", False, "leave the option out: vLLM takes a backend that fits the model and this GPU type; or name another"
    ),
    "unsupported-gpu": Meaning(
        "release", False, "take an image or a build of vLLM that is made for this GPU, or serve on another GPU type"
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
    "gpu-broken": Meaning(
        "host", False, "reset or replace the GPU (`nvidia-smi -q -d ECC,PAGE_RETIREMENT`), or use another host"
    ),
    "broken-installation": Meaning(
        "host", False, "install the engine and the packages that it needs anew, or serve an image, which has them all"
    ),
    "no-compiler": Meaning(
        "host", False, "install gcc, g++ and CUDA's nvcc where the server runs, on its PATH; or serve an image, which has them"
    ),
    "compile-cache": Meaning(
        "host", True, "remove vLLM's folder torch_compile_cache (or the named file) from this host's cache, and try again"
    ),
    "no-permission": Meaning(
        "host",
        False,
        "let the server's user write its caches: set HOME, or TRITON_CACHE_DIR and VLLM_CACHE_ROOT, to such a folder",
    ),
    "disk-full": Meaning("host", False, "free space on the disk of the hub's cache, of vLLM's cache and of /tmp"),
    "process-limit": Meaning(
        "host", False, "raise the limit of processes and threads (ulimit -u, the container's pids limit) where the server runs"
    ),
    "nccl-failure": Meaning(
        "host", False, "set NCCL_DEBUG=INFO and check the links, shared memory and drivers between the GPUs"
    ),
    "rendezvous": Meaning(
        "host", True, "check the network between the ranks: VLLM_HOST_IP, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, firewalls"
    ),
    "port-in-use": Meaning("host", True, "free the port, or leave --port out"),
    "killed": Meaning(
        "host", True, "find who or what stopped it: an operator, a supervisor, the kernel's OOM killer (`dmesg`)"
    ),
    "crashed": Meaning("release", False, "report it to vLLM with the log: native code of the release failed"),
    "engine-bug": Meaning("release", False, "report it to vLLM with the log, or take another version: its own code failed"),
    # A slow host looks the same, but nothing in the log says so, and the recipe sets the time that this release may take.
    "hung": Meaning("release", False, "see the log's last line; raise startup_timeout_s if it only needs longer"),
    # Whose fault it is nobody can say from a log that nobody has read before.
    "unknown": Meaning(
        "unclear", False, "read the log's lines: they name the last cause; and tell us of a log that should be known"
    ),
}

# What an image holds its owner alone can mend. A bare host's environment the operator can: that is the table's own meaning.
IN_AN_IMAGE: dict[FailureClass, Meaning] = {
    "broken-installation": Meaning(
        "release", False, "take another image, or let the image's builder mend its packages: nothing on the host changes them"
    ),
    "no-compiler": Meaning(
        "release", False, "take an image that has gcc, g++ and CUDA's nvcc, or let the image's builder add what is missing"
    ),
}
