"""The engine environment with its imports paid once: each server and each client is a fork of a process that has imported vLLM.

An import takes a core for 7 s to 10 s, and a run needs several. What is forked runs vLLM's own programs, with the arguments,
environment, files and confinement that they were started with. Their starter sees a small process that stands for the fork: it
lives as long, passes SIGTERM on, and ends with the fork's exit code; if it is killed, so is the fork. So tests that look at
processes or at their memory, kill them, or need what an import does, take `engine` itself.
"""

import inspect
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.warm.forks import Forks, Warm, answering, put_rules, write_stand_in
from vllm_qualify.drift import probe
from vllm_qualify.engine import bench_worker
from vllm_qualify.engine.confinement import confined
from vllm_qualify.engine.environment import EngineEnvironment, find_engine
from vllm_qualify.errors import HostError

IMPORTS = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.benchmarks.serve",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    # What a server imports when it starts.
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.generate.generative_scoring.api_router",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.launchers.run_batch",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.scale_out.derender.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.serve.tokenize.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.attention.backends.cpu_attn",
    "model_hosting_container_standards.sagemaker",
    "uvicorn.protocols.websockets.auto",
    "anyio._backends._asyncio",
)
# It takes 650 MB.
IDLE_S = 900
# Each process, test or recipe has its own, and no import looks at them.
OF_ONE_PROCESS = (
    *("TMPDIR", "HOME", "HF_MODULES_CACHE", "HF_TOKEN_PATH", "PYTEST_", "VLLM_QUALIFY_", "NUMBA_NUM_THREADS"),
    *("TORCHINDUCTOR_CACHE_DIR", "VLLM_CONFIG_ROOT", "VLLM_MODEL_REDIRECT_PATH"),
    *("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"),
    # What a server sets for its engine's process, which so is a fork of the same imports.
    *("LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"),
    *("TORCHINDUCTOR_CPP_DYNAMIC_THREADS", "VLLM_DISABLE_SHARED_EXPERTS_STREAM", "VLLM_WORKER_MULTIPROC_METHOD"),
)
# As the catalog's recipes for the CPU have them. A question, a client or a script computes nothing, and need not say so.
USUAL = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
# As all servers without the hub have them.
OFFLINE = {"HF_HUB_OFFLINE": "1"}
BUT = """\
source = arguments[arguments.index("-c") + 1] if "-c" in arguments else ""
# The probe imitates a GPU before it imports vLLM.
is_probe = arguments[1:2] == [{probe!r}] and not any(word in arguments[2] for word in ('"device": {{', '"resolve": true'))
if name == "python" and not is_probe and ("-I" in arguments or not source or "resource_tracker" in source):
    os.execv({python!r}, [{python!r}, *arguments])
# Else the client starts itself again, to have it.
os.environ.setdefault("PYTHONHASHSEED", "0")"""
CLIENT = inspect.getsource(bench_worker)


# The key under which each process of pytest-xdist gets the folder of the stand-ins that all of them share.
SHARED = "vllm_qualify_warm_engine"
_SHARING, _STAND_IN = pytest.StashKey[ExitStack](), pytest.StashKey[EngineEnvironment]()


@pytest.fixture(scope="session")
def warm_engine(engine: EngineEnvironment, request: pytest.FixtureRequest) -> Iterator[EngineEnvironment]:
    """As `engine`, but servers and clients are forks, and start at once."""
    shared = getattr(request.config, "workerinput", {}).get(SHARED)
    if shared:
        yield EngineEnvironment(python=Path(shared))
        return
    with _forking(engine) as warm:
        yield warm


def run_script(engine: EngineEnvironment, source: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script in the engine's Python, with the variables that servers have. Its output is captured."""
    command = [engine.python, "-c", source, *arguments]
    with confined(OFFLINE) as confinement:
        return subprocess.run(command, env=confinement.environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """The process that starts the others has the one that forks, so that all of them fork the same imports."""
    config = node.config
    if _SHARING not in config.stash:
        stack = config.stash[_SHARING] = ExitStack()
        config.add_cleanup(stack.close)
        try:
            config.stash[_STAND_IN] = stack.enter_context(_forking(find_engine()))
        except HostError:
            return
    if _STAND_IN in config.stash:
        node.workerinput[SHARED] = str(config.stash[_STAND_IN].python)


@contextmanager
def _forking(engine: EngineEnvironment) -> Iterator[EngineEnvironment]:
    """Stand-ins for the engine's programs, which are answered during the block."""
    warm = Warm(str(engine.python), IMPORTS, IDLE_S, ends_group=True)
    forks = Forks(warm, lambda name: not name.startswith(OF_ONE_PROCESS), USUAL)
    # A short name: a path of a socket has at most 107 letters.
    with TemporaryDirectory(prefix="vq-warm-") as folder:
        address, programs = Path(folder) / "socket", Path(folder) / "engine" / "bin"
        programs.mkdir(parents=True)
        for name in ("python", "vllm"):
            but = BUT.format(python=str(engine.python), probe=probe.__file__)
            write_stand_in(programs / name, address, str(engine.python), but)

        def confine(asked: dict[str, Any], line: socket.socket) -> None:
            put_rules(asked, line)
            # A client that waits for a core sends its requests late, and its load does not count.
            asked["first"] = CLIENT in asked["arguments"]
            asked["python"] = str(programs / "python")

        with answering(forks, address, confine):
            yield EngineEnvironment(python=programs / "python")
