"""What the tests of the tools' command lines share."""

from pathlib import Path

from vllm_qualify.engine.bench import Bench
from vllm_qualify.engine.process import RunningProcess
from vllm_qualify.engine.server import Client, Server, Starting
from vllm_qualify.evidence.load.client import Driven

CLIENT = Client(program="/engine/bin/vllm", python="/engine/bin/python", url="http://127.0.0.1:8123", model="org/model")
PROCESS = RunningProcess(guard_pid=1, state_file=Path("server.state"), log=Path("server.log"))
STARTING = Starting(url=CLIENT.url, process=PROCESS, command=["vllm", "serve"], client=CLIENT, launched_at=0.0)
SERVER = Server(
    url=CLIENT.url, served_model_name="reference", process=PROCESS, command=STARTING.command, startup_s=1.0, client=CLIENT
)
BENCH = Bench(client=CLIENT, process=PROCESS, letter_box="/letters")


def driven(url: str = SERVER.url) -> Driven:
    """The server at an address, and a bench beside it."""
    client = CLIENT.model_copy(update={"url": url})
    return Driven(SERVER.model_copy(update={"url": url, "client": client}), BENCH.model_copy(update={"client": client}))


def options(command: list[str]) -> dict[str, str]:
    """Each option with the word after it."""
    return {word: after for word, after in zip(command, [*command[1:], ""], strict=True) if word.startswith("--")}
