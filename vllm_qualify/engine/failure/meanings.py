"""The kinds of failure of a server, and what each means: who must act, whether to try again, and the remedy."""

from typing import Literal, NamedTuple

Turn = Literal["recipe", "host", "release", "hub"]
_OfOptions = Literal["unknown-flag", "invalid-value", "refused-configuration"]
_OfModels = Literal["unknown-model", "unknown-revision", "gated-model", "not-in-cache", "incomplete-model"]
_OfTheHub = Literal["hub-rate-limit", "hub-unreachable"]
_Unsupported = Literal["unsupported-architecture", "unsupported-quantization", "unsupported-backend"]
_OfMemory = Literal["cuda-out-of-memory", "gpu-memory-in-use", "kv-cache-too-small", "out-of-memory"]
_OfGpus = Literal["driver-too-old", "no-gpu", "too-few-gpus", "nccl-failure"]
_OfTheHost = Literal["broken-installation", "no-compiler", "port-in-use"]
_Ends = Literal["killed", "crashed", "hung", "unknown"]
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
