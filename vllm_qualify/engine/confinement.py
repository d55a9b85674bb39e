"""What a process that runs foreign code may see of this machine: its environment by name, its files by rules.

Code of a model under test runs in the server, in its load client and in the probe of the engine; code of a task in lm-eval.
None of them needs this process's keys. `landlock.py` applies the rules.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from pydantic import JsonValue

from vllm_qualify.engine import guard
from vllm_qualify.engine.landlock import LEAST_VERSION, can_confine
from vllm_qualify.engine.namespaces import SHARED_MEMORY
from vllm_qualify.engine.seccomp import can_filter
from vllm_qualify.errors import writing
from vllm_qualify.recipe.environment import may_be_set
from vllm_qualify.recipe.serving import is_secret_name
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.secrets import has_password

STAGE = "check"
USE_LANDLOCK = (
    f"use a kernel with Landlock of version {LEAST_VERSION} or later (Linux 5.19); "
    "--launcher docker confines a model's code too, but not a task's"
)

# Set to "off", confined processes get no namespaces: for a machine where an engine does not start in them.
NAMESPACES = "VLLM_QUALIFY_NAMESPACES"
GIVE_NAMESPACES = (
    "let this user make namespaces: as root with CAP_SYS_ADMIN, or by kernel.unprivileged_userns_clone=1 and "
    "kernel.apparmor_restrict_unprivileged_userns=0, where the kernel has them; --launcher docker isolates a model's code too"
)

# --- the environment

NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "NO_COLOR"),
        *("FORCE_COLOR", "COLUMNS", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_ARENA_MAX", "MALLOC_CONF", "HF_HOME"),
        *("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_ASSETS_CACHE"),
        *("HF_XET_CACHE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "NLTK_DATA", "LMEVAL_LOG_LEVEL"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CC", "CXX", "CPATH", "MAX_JOBS"),
        *("NVCC_THREADS", "DO_NOT_TRACK", "LOCAL_RANK"),
    )
)
# PYTHON: the paths and switches of the interpreter itself.
PREFIXES = (
    *("LC_", "PYTHON", "VLLM_", "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NCCL_", "NVSHMEM_", "UCX_", "GLOO_", "TP_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "ONEDNN_", "DNNL_", "NUMBA_"),
    *("TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_", "HF_HUB_", "HF_DATASETS_", "HF_XET_", "ROCR_", "HIP_", "HSA_"),
)
OURS = "VLLM_QUALIFY_"
# The only secrets that a process may get, and only one that downloads: a token for gated models and data sets, a proxy or an
# address of the hub with a password in it. To be deleted as soon as the orchestrator downloads by itself.
FOR_DOWNLOADS = frozenset({"HF_TOKEN", "HF_ENDPOINT", *(name for name in NAMES if name.upper().endswith("_PROXY"))})

NO_STATISTICS = {
    "DO_NOT_TRACK": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# The switches of an engine and of its libraries. The others name programs that only the parent runs.
STATISTICS_OFF = {name: value for name, value in NO_STATISTICS.items() if name.startswith(("VLLM_", "HF_", "DO_NOT"))}


def quiet_environment(*, downloads: bool = False) -> dict[str, str]:
    """The environment of a child process: of this one's only what is on the list and no secret; and statistics are off.

    One that `downloads` gets what the hub asks for.
    """
    inherited = {name: value for name, value in os.environ.items() if _is_inherited(name, value, downloads)}
    return inherited | STATISTICS_OFF


def _is_inherited(name: str, value: str, downloads: bool) -> bool:
    if name in FOR_DOWNLOADS and downloads:
        return True
    is_listed = name in NAMES or (name.startswith(PREFIXES) and not name.startswith(OURS))
    return is_listed and not is_secret_name(name) and not has_password(value)


def inherited_by_engines() -> dict[str, str]:
    """The variables of this process that a recipe could set too, and that an engine's process gets: they tune what it serves.

    Places of caches, the choice of GPUs and the switches of statistics are not among them.
    """
    left_out = CACHES | NO_STATISTICS.keys() | {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name not in left_out and may_be_set(name) and _is_inherited(name, value, False)
    }


# --- the files

# Not /etc, /opt, /run, /var, /home or /tmp as a whole: keys and configurations of services are there.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/sys"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/alternatives"),
    *("/etc/hosts", "/etc/host.conf", "/etc/hostname", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/gai.conf"),
    *("/etc/protocols", "/etc/services", "/etc/passwd", "/etc/group", "/etc/localtime", "/etc/timezone", "/etc/locale.conf"),
    *("/etc/os-release", "/etc/debian_version", "/etc/lsb-release", "/etc/mime.types", "/etc/magic", "/etc/inputrc"),
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ssl/cert.pem", "/etc/ca-certificates.conf", "/etc/crypto-policies"),
    *("/etc/pki/tls/certs", "/etc/pki/tls/cert.pem", "/etc/pki/tls/openssl.cnf", "/etc/pki/ca-trust"),
    *("/etc/nccl.conf", "/etc/nvidia", "/etc/OpenCL", "/etc/vulkan", "/etc/libibverbs.d", "/etc/ibverbs.d"),
    *("/opt/nvidia", "/opt/rocm", "/opt/intel", "/opt/amazon", "/opt/hpcx", "/opt/conda"),
    *("/run/nvidia-persistenced", "/run/nvidia-fabricmanager", "/run/systemd/resolve"),
)
SHARED = (SHARED_MEMORY,)
# Never /dev as a whole: root would read whole disks there. No terminal: who types there may type a password.
DEVICES = (
    *("null", "zero", "full", "random", "urandom", "kfd", "dri", "infiniband", "gdrdrv", "gds"),
    *("nvidia*", "nvidia-caps*", "nvgpu", "nvmap", "nvhost*", "knem", "xpmem"),
)
HUB_CACHES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_XET_CACHE", "HF_ASSETS_CACHE")
# Each holds something that is written while the engine runs.
CACHES = frozenset(
    (
        *HUB_CACHES,
        *("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_ASSETS_CACHE", "VLLM_XLA_CACHE_PATH", "VLLM_RPC_BASE_PATH"),
        *("VLLM_DEBUG_DUMP_PATH", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME"),
        *("TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "FLASHINFER_WORKSPACE_BASE"),
        *("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", "NUMBA_CACHE_DIR"),
    )
)
# The home of engines, in the user's folder of caches. No path that an engine sees says who runs it.
KEPT_HOME = "engines"
# Of HF_HOME: not itself, since the token of a login is in it.
HUB_FOLDERS = ("hub", "datasets", "xet")
# In the user's home, or named by a variable: no recipe opens them.
KEY_FOLDERS = (".aws", ".azure", ".config", ".docker", ".gnupg", ".kube", ".netrc", ".prefect", ".ssh")
KEY_VARIABLES = ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "DOCKER_CONFIG", "PREFECT_HOME", "KUBECONFIG", "NETRC")

# What the engine's Python says about where it is. A package that was installed as editable lies anywhere.
WHERE = """
import importlib.metadata as m, json, os, sys
from urllib.parse import unquote, urlsplit
folders = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *sys.path]
for each in m.distributions():
    about = json.loads(each.read_text("direct_url.json") or "{}")
    if about.get("dir_info", {}).get("editable"):
        folders.append(unquote(urlsplit(about["url"]).path))
print(json.dumps(folders))
"""


class Confinement(Frozen):
    """Paths by what is allowed in them and beneath. A path that does not exist opens nothing."""

    readable: list[str] = []
    listable: list[str] = []
    writable: list[str] = []
    devices: list[str] = []
    processes: list[str] = []
    isolated: bool = False
    """Whether it has namespaces of its own besides; without them it does not start then."""


class Confined(NamedTuple):
    """All that a process needs to be run confined: see `running_guarded`."""

    environment: dict[str, str]
    rules: Confinement


@contextmanager
def confining_process(
    extra: Mapping[str, str],
    named: Iterable[Path] = (),
    readable: Iterable[Path] = (),
    writable: Iterable[Path] = (),
    listable: Iterable[Path] = (),
    *,
    downloads: bool = False,
    is_trusting: bool = False,
) -> Iterator[Confined]:
    """The environment and the rules of one process, with a temporary folder of its own for the length of the block.

    One that `downloads` may read and write the hub's whole cache. One `is_trusting` that runs code which came with a model or a
    task: it gets no token for that, and its home is the temporary folder, so that nothing that it leaves runs in a later
    qualification.

    `extra` variables come last. `named` paths come from a recipe or an environment, and are read unless that would open a key
    of this user. So are the paths in variables; those of caches are written, too. Raises HostError if the folder of caches
    cannot be made.
    """
    hub = hub_cache()
    with writing(STAGE):
        # What engines compile is kept here from one run to the next.
        kept = _make_folder(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / KEPT_HOME)
        hub_folders = [_make_folder(hub / name) for name in HUB_FOLDERS] if downloads else []
    # A short name, which any program may have: it holds sockets, and a path of a socket has at most 107 letters.
    with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        cache = _make_folder(Path(temporary, "home")) if is_trusting else kept
        own = {
            "HOME": str(cache),
            "TMPDIR": temporary,
            "HF_HOME": str(hub),
            # No other process runs code that this one writes.
            "HF_MODULES_CACHE": f"{temporary}/modules",
            # The hub's client fails on a file that is there and cannot be read.
            "HF_TOKEN_PATH": f"{temporary}/none",
        }
        # Else torch keeps what it compiles in TMPDIR, and the first request for log-probabilities of a run waits 14 s for it.
        compiled = {
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/.cache/torchinductor",
            # Torch keeps these headers in TMPDIR all the same, so that each server would compile them, though all else is kept.
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        }
        environment = compiled | quiet_environment(downloads=downloads and not is_trusting) | own | dict(extra)
        closed = {*own, *(() if downloads else HUB_CACHES), *(CACHES if is_trusting else ())}
        parts = [(name, part) for name, value in environment.items() if name not in closed for part in re.split("[: ]", value)]
        in_variables = [(name, Path(part)) for name, part in parts if part.startswith("/")]
        tools = _with_libraries(path for _, path in in_variables)
        caches = [path for name, path in in_variables if name in CACHES]
        rules = Confinement(
            readable=_unique_paths(SYSTEM, readable, _without_keys([*named, *tools])),
            listable=_unique_paths(listable),
            writable=_unique_paths(SHARED, [temporary, cache], writable, hub_folders, _without_keys(caches)),
            devices=[str(path) for pattern in DEVICES for path in sorted(Path("/dev").glob(pattern))],
            # CUDA writes the names of its threads there, and does not start where it may not.
            processes=["/proc"],
            isolated=not isolation_problem(),
        )
        yield Confined(environment, rules)


def isolation_problem() -> str:
    """Why confined processes get no namespaces of their own here; empty if they get them."""
    return f"{NAMESPACES} is off" if os.environ.get(NAMESPACES) == "off" else _problem_of_this_machine()


@lru_cache
def _problem_of_this_machine() -> str:
    """Whether a guard can isolate a process here is known only when one has tried."""
    if not can_confine():
        return f"this kernel has no Landlock of version {LEAST_VERSION}"
    if not can_filter():
        return "this kernel has no filter of system calls, or none is known for its architecture"
    with TemporaryDirectory(prefix="vq-") as folder:
        rules = Confinement(readable=list(SYSTEM), writable=[*SHARED, folder], processes=["/proc"], isolated=True)
        command = [sys.executable, "-I", "-S", guard.__file__, f"{folder}/state", "1", rules.model_dump_json(), "true"]
        # Its standard input stays open: a guard whose parent has left ends its command.
        # What it says of its command is in its output.
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True) as tried:
            assert tried.stdout is not None  # noqa: S101  (a pipe was asked for)
            lines = tried.stdout.read().splitlines()
    if tried.returncode == 0 and not lines:
        return ""
    reasons = [line.removeprefix(guard.REFUSED) for line in lines if line.startswith(guard.REFUSED)] or lines
    return reasons[-1] if reasons else f"a guard ended with exit code {tried.returncode}"


def hub_cache() -> Path:
    """HF_HOME of this machine."""
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser().absolute()


def paths_within(value: JsonValue) -> Iterator[Path]:
    """The absolute paths among the values of server options."""
    if isinstance(value, str) and value.startswith("/"):
        yield Path(value)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from paths_within(inner)


def folders_of(python: Path) -> list[Path]:
    """Where a Python and its packages are. One that does not run says so itself when it is used."""
    try:
        folders = _reported_folders(python)
    except (OSError, subprocess.SubprocessError, ValueError):
        folders = []
    return [python.parents[1], *folders]


@lru_cache
def _reported_folders(python: Path) -> list[Path]:
    command = [str(python), "-I", "-c", WHERE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=quiet_environment(), check=True)
    return [Path(folder) for folder in json.loads(done.stdout) if folder.startswith("/")]


def folders_here() -> tuple[list[Path], list[Path]]:
    """Where this Python, its packages and this package are; and what Python must list to find them."""
    executable, package = Path(sys.executable), Path(__file__).parents[1]
    read = [Path(sys.prefix), Path(sys.base_prefix), executable.parents[1], executable.resolve().parent, package]
    return read, [package.parent]


def _make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _unique_paths(*groups: Iterable[str | Path]) -> list[str]:
    return list(dict.fromkeys(str(path) for group in groups for path in group))


def _with_libraries(paths: Iterable[Path]) -> Iterator[Path]:
    """The paths; and of tools also the folder with their libraries and headers: /opt/gcc of /opt/gcc/bin/gcc."""
    for path in paths:
        yield path
        folder = path if path.name == "bin" else path.parent
        if folder.name == "bin" and (folder.parent / "lib").is_dir():
            yield folder.parent


def _without_keys(paths: Iterable[Path]) -> list[Path]:
    """The paths by which no key of this user would be opened."""
    homes, keys = [path.resolve() for path in _home_folders()], [path.resolve() for path in _key_places()]

    def opens_key(path: Path) -> bool:
        return any(each.is_relative_to(path) for each in (*homes, *keys)) or any(path.is_relative_to(key) for key in keys)

    return [path for path in paths if not opens_key(path.resolve())]


def _home_folders() -> list[Path]:
    """The user's home and that of the runs: parts of them may be opened, such as a model's folder."""
    ours = os.environ.get("VLLM_QUALIFY_HOME") or "~/.vllm-qualify"
    return [Path.home(), Path(ours).expanduser()]


def _key_places() -> list[Path]:
    """Also what a variable names a file with a secret, such as VLLM_QUALIFY_PRIVATE_KEY_FILE."""
    of_keys = {name for name in os.environ if name.endswith("_FILE") and is_secret_name(name.removesuffix("_FILE"))}
    named = [value for name, value in os.environ.items() if value and name in of_keys.union(KEY_VARIABLES)]
    login = [hub_cache() / name for name in ("token", "stored_tokens")]
    return [*(Path.home() / name for name in KEY_FOLDERS), *login, *(Path(value).expanduser() for value in named)]
