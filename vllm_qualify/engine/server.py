"""`vllm serve` as a local process: started, ready when a completion came back, and never left behind."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from ruamel.yaml import YAML

from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.process import RunningProcess, guarded, quiet_environment, tail
from vllm_qualify.errors import HostError, ReleaseError, writing
from vllm_qualify.recipe.model import Environment, Frozen, ServerArguments

HOST = "127.0.0.1"
STAGE = "serve"
ASK_EVERY_S = 0.5


class ServerPlan(Frozen):
    """All that determines a server: one server serves every stage whose plan is equal."""

    engine: EngineEnvironment
    model: str
    revision: str | None
    served_model_name: str
    arguments: ServerArguments
    environment: Environment
    startup_timeout_s: float

    def config(self, port: int) -> ServerArguments:
        """The content of the `--config` file, vLLM's option names as keys."""
        ours: ServerArguments = {"model": self.model, "served-model-name": [self.served_model_name], "host": HOST, "port": port}
        pinned: ServerArguments = {"revision": self.revision, "tokenizer-revision": self.revision} if self.revision else {}
        return ours | pinned | self.arguments


class Server(Frozen):
    """A server that answers: its address and ids, no handle."""

    url: str
    served_model_name: str
    process: RunningProcess
    command: list[str]
    startup_s: float

    def check_alive(self) -> None:
        """Raises ReleaseError with the log's last lines if the server has ended."""
        _check_alive(self.process)


@contextmanager
def serve(plan: ServerPlan, folder: Path, progress: Callable[[str], None], port: int | None = None) -> Iterator[Server]:
    """Serve within the block. `folder` gets `server.yaml`, the config file, and `server.log`.

    Raises:
        HostError: the port is in use, or the command cannot be started.
        ReleaseError: the server ended or hung before its first completion, or ended by itself later.
    """
    port = _free_port(port)
    config = folder / "server.yaml"
    with writing(STAGE):
        YAML(typ="safe").dump(plan.config(port), config)
    command = [str(plan.engine.vllm), "serve", "--config", str(config)]
    with guarded(command, quiet_environment(plan.environment), folder / "server.log") as process:
        url = f"http://{HOST}:{port}"
        startup_s = _await_completion(plan, url, process, progress)
        server = Server(
            url=url, served_model_name=plan.served_model_name, process=process, command=command, startup_s=startup_s
        )
        yield server
        # Evidence from a server that died before its stages were over is not evidence.
        server.check_alive()


def _free_port(asked: int | None) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, asked or 0))
        except OSError as error:
            raise HostError(f"port {asked} is in use: {error.strerror}", "free it, or leave --port out", STAGE) from error
        return int(probe.getsockname()[1])


def _await_completion(plan: ServerPlan, url: str, process: RunningProcess, progress: Callable[[str], None]) -> float:
    """Seconds until a completion came back. /health is not asked: it can answer 200 while every completion fails."""
    started = time.monotonic()
    told = ""
    while not _completes(url, plan.served_model_name):
        _check_alive(process)
        if time.monotonic() - started > plan.startup_timeout_s:
            raise ReleaseError(
                f"no completion came back within {plan.startup_timeout_s:g} s",
                "see the last lines of the server's log; raise startup_timeout_s if it only needs longer",
                STAGE,
                tail(process.log),
            )
        last = (tail(process.log, 1) or [""])[0]
        if last != told:
            progress(f"server starting: {last}")
            told = last
        time.sleep(ASK_EVERY_S)
    return time.monotonic() - started


def _completes(url: str, model: str) -> bool:
    try:
        answer = httpx.post(f"{url}/v1/completions", json={"model": model, "prompt": "1", "max_tokens": 1}, timeout=60)
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK


def _check_alive(process: RunningProcess) -> None:
    exit_code = process.exit_code()
    if exit_code is not None:
        how = f"by signal {-exit_code}" if exit_code < 0 else f"with exit code {exit_code}"
        raise ReleaseError(f"the server ended {how}", "see the last lines of its log for the cause", STAGE, tail(process.log))
