"""Which variables a recipe may set for its server, and which of them load code or open the server.

A recipe tunes an engine. Where downloads come from, where secrets and results go, and how Python and the linker start are
settings of the host: no recipe sets them.
"""

import re

PREFIXES = (
    *("VLLM", "TLLM", "TRTLLM"),
    *("TORCH", "TORCHDYNAMO", "TORCHINDUCTOR", "PYTORCH", "TRITON", "FLASHINFER"),
    *("CUDA", "CUBLAS", "CUBLASLT", "NCCL", "NVSHMEM", "UCX"),
    *("OMP", "KMP"),
)
"""The first words of the names that a recipe may set: those of the engines and of the libraries that compute for them."""

# Published recipes set the first; it only seeds the hashes of texts. The last is of vLLM's own n-gram drafts.
_ALLOWED = ("PYTHONHASHSEED", "GLOO_SOCKET_IFNAME", "SAFETENSORS_FAST_GPU", "TOKENIZERS_PARALLELISM", "NUMBA_NUM_THREADS")
_REFUSED = {
    "VLLM_MODEL_REDIRECT_PATH": "makes vLLM serve another model than the recipe's",
    "VLLM_USE_MODELSCOPE": "makes vLLM take the model from another hub",
    "VLLM_USAGE_STATS_SERVER": "sends what vLLM reports about this host to another address",
    "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "hands variables of this host on to other processes",
    "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY": "hands variables of this host on to other processes",
}

_LOADS_CODE = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "the server unpickles what it is sent",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "weights are unpickled",
    "TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN": "names a function",
    "TRITON_KERNEL_OVERRIDE": "Triton's kernels are replaced",
    "TRITON_REMOTE_CACHE_BACKEND": "names a class",
    "NCCL_COMM_ID": "names another host, whose objects are unpickled",
    "OMP_PREFIX": "names a place that the server's kernels are compiled with",
}
# What vLLM's routers offer then, beside the API.
_OPENS = {
    "VLLM_SERVER_DEV_MODE": "whoever reaches the server may call its workers' methods, also those that change weights",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "whoever reaches the server may add adapters and replace them",
}
_A_PLACE = "names a file, a folder or an address that the server may load code from"
_PLACES = {
    *("PATH", "PATHS", "DIR", "DIRS", "DIRECTORY", "FOLDER", "ROOT", "HOME", "BASE", "FILE", "FILENAME", "LOCATION"),
    *("LIB", "LIBRARY", "LIBRARIES", "SO", "PLUGIN", "PLUGINS", "PRELOAD", "BINARY", "MANAGER"),
    *("CC", "CXX", "NVCC", "COMPILER", "CFLAGS", "CUDAFLAGS", "LDFLAGS"),
    *("REPO", "REPOSITORY", "HUB", "ZOO", "REDIS", "REMOTE", "URL", "URI", "ENDPOINT", "HOST", "IP", "ADDR", "ADDRESS"),
}
# A path or an address.
_LOOKS_LIKE_A_PLACE = re.compile(r"[/\\]|^~|\$")


def check_name(name: str) -> str:
    """The name of a variable that a recipe may set. Raises ValueError for any other."""
    if name in _REFUSED:
        raise ValueError(f"'{name}' {_REFUSED[name]}: leave it out, no recipe may set it")
    if not may_be_set(name):
        raise ValueError(
            f"'{name}' is not a variable that a recipe may set: leave it out. Which may be set, and which of the host's a "
            'server has, is in docs/recipes.md, "Environment"'
        )
    return name


def may_be_set(name: str) -> bool:
    allowed = name in _ALLOWED or bool(re.fullmatch(rf"({'|'.join(PREFIXES)})_[A-Z0-9_]+", name))
    return allowed and name not in _REFUSED


def may_be_left_out(name: str, value: str) -> bool:
    """Whether a server without this variable, which no recipe may set, is still the server that is meant.

    It is not if the variable names where code, data or the model comes from.
    """
    return not may_be_set(name) and name not in _REFUSED and not _names_a_place(name, value)


def why_code(name: str, value: str) -> str | None:
    """Why a variable with this value runs code or names a place that code comes from; None if it does not."""
    if name in _LOADS_CODE:
        return None if value in ("", "0") else _LOADS_CODE[name]
    return _A_PLACE if _names_a_place(name, value) else None


def _names_a_place(name: str, value: str) -> bool:
    return bool(_PLACES.intersection(name.split("_"))) or bool(_LOOKS_LIKE_A_PLACE.search(value))


def why_open(name: str, value: str) -> str | None:
    """What whoever reaches the server may do with this variable; None if no more than before."""
    return None if value.strip().lower() in ("", "0", "false") else _OPENS.get(name)
