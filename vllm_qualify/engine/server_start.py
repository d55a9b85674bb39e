"""Start a server. It is ready when it has returned a completion, and it leaves nothing behind."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_qualify.engine import server
from vllm_qualify.engine.failure.end import End
from vllm_qualify.engine.launchers.registry import launcher_of
from vllm_qualify.engine.process import tail, text_of
from vllm_qualify.engine.server import STAGE, Labels, Server, ServerPlan, Starting
from vllm_qualify.engine.server_identity import check_identity
from vllm_qualify.errors import HostError, writing
from vllm_qualify.lazy import Lazy

if TYPE_CHECKING:
    import httpx

    from vllm_qualify import answers
else:
    answers, httpx = Lazy("vllm_qualify.answers"), Lazy("httpx")

ASK_EVERY_S = 0.5


@contextmanager
def serve(
    plan: ServerPlan, folder: Path, progress: Callable[[str], None], port: int | None = None, labels: Labels | None = None
) -> Iterator[Server]:
    """Serve within the block: `launch` and `await_ready`. Raises HostError, QualifyError."""
    with launch(plan, folder, port, labels) as starting:
        yield await_ready(plan, starting, progress)


@contextmanager
def launch(plan: ServerPlan, folder: Path, port: int | None = None, labels: Labels | None = None) -> Iterator[Starting]:
    """Run the server within the block. `folder` gets `server.yaml`, the config file, and `server.log`.

    `labels` name the run and the cell, if the launcher can label a server. Raises HostError if the port is in use, the server
    cannot be started, or Docker Engine went away; if the server ended on its own, the failure's own error.
    """
    port = _choose_port(port)
    with writing(STAGE):
        (folder / server.CONFIG_FILE).write_text(server.config_text(plan, port))
    with launcher_of(plan.engine).serve(plan, folder, port, labels or {}) as starting:
        yield starting
        # Evidence does not count if its server died before the stages were over.
        server.check_alive(starting.process)


def await_ready(
    plan: ServerPlan, starting: Starting, progress: Callable[[str], None], check: Callable[[], None] = lambda: None
) -> Server:
    """Wait until the server has returned a completion. `check` is called until then, and may raise.

    Raises the failure's own error if it ended or hung before, and RecipeError if it serves something else than the plan names.
    """
    _await_completion(plan, starting, progress, check)
    check_identity(plan, text_of(starting.process.log))
    return Server(
        url=starting.url,
        metrics_path=plan.engine_kind.metrics_path,
        served_model_name=plan.served_model_name,
        kind=plan.kind,
        process=starting.process,
        command=starting.command,
        startup_s=time.monotonic() - starting.launched_at,
        client=starting.client,
    )


def _choose_port(asked: int | None) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.HOST, asked or 0))
        except OSError as error:
            problem = f"port {asked} is in use: {error.strerror}"
            raise HostError(problem, "free it, or leave --port out", STAGE, kind="port-in-use") from error
        return int(probe.getsockname()[1])


def _await_completion(plan: ServerPlan, starting: Starting, progress: Callable[[str], None], check: Callable[[], None]) -> None:
    """Wait for a completion. /health is not enough: it can answer 200 while every completion fails."""
    process, shown = starting.process, ""
    while not _returns_completion(starting.url, plan.served_model_name):
        server.check_alive(process)
        check()
        if time.monotonic() - starting.launched_at > plan.startup_timeout_s:
            raise server.error_of(process, End(exit_code=None, waited_s=plan.startup_timeout_s))
        last = (tail(process.log, 1) or [""])[0]
        if last != shown:
            progress(f"server starting: {last}")
            shown = last
        time.sleep(ASK_EVERY_S)


def _returns_completion(url: str, model: str) -> bool:
    try:
        answer = answers.ask_within("POST", f"{url}/v1/completions", 60, json={"model": model, "prompt": "1", "max_tokens": 1})
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK
