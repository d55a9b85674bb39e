"""Servers of the fake vLLM: their plans, and those that answer in this process, with a defect."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.vllm import FakeServer, Handler, make_engine
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import ServerPlan


def plan_for(folder: Path, behaviour: str, startup_timeout_s: float = 30) -> ServerPlan:
    engine = make_engine(folder / "engine")
    return ServerPlan(
        engine=EngineEnvironment(python=engine / "bin" / "python"),
        model="/models/tiny",
        revision=None,
        served_model_name="tiny",
        arguments={"max-model-len": 64},
        environment={"TORCH_FAKE_VLLM": behaviour},
        startup_timeout_s=startup_timeout_s,
    )


def silent(_line: str) -> None:
    pass


@contextmanager
def serving(handler: type[Handler]) -> Iterator[str]:
    """The address of a server that answers so, for the length of the block."""
    with FakeServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
