"""A real load client for tests, and what they say of its model and server."""

from pathlib import Path

from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.process import RunningProcess
from vllm_qualify.engine.server import Client, Server
from vllm_qualify.recipe.loading import catalog_folder

MODEL = str(catalog_folder() / "reference" / "model")


def client_of(engine: EngineEnvironment, url: str = "") -> Client:
    return Client(program=str(engine.vllm), python=str(engine.python), url=url, model=MODEL, paths=[Path(MODEL)])


def server_of(client: Client, folder: Path) -> Server:
    """The server that the client asks, which is no process."""
    process = RunningProcess(guard_pid=1, state_file=folder / "state", log=folder / "server.log")
    return Server(url=client.url, served_model_name="reference", process=process, command=[], startup_s=1.0, client=client)


def nothing() -> None:
    """The server is well."""


def silent(_done: int, _total: int, _part: str = "", /) -> None:
    """Nobody watches."""
