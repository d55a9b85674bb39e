"""What the tests of the tools' command lines share."""

from pathlib import Path

from vllm_qualify.engine.process import RunningProcess
from vllm_qualify.engine.server import Client, Server

CLIENT = Client(program="/engine/bin/vllm", url="http://127.0.0.1:8123", model="org/model")
SERVER = Server(
    url="http://127.0.0.1:8123",
    served_model_name="reference",
    process=RunningProcess(guard_pid=1, state_file=Path("server.state"), log=Path("server.log")),
    command=["vllm", "serve"],
    startup_s=1.0,
    client=CLIENT,
)


def options(command: list[str]) -> dict[str, str]:
    """Each option with the word after it."""
    return {word: after for word, after in zip(command, [*command[1:], ""], strict=True) if word.startswith("--")}
