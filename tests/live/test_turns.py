"""Chats of several turns by the real bench: the next turn is sent after the reply came, and has it."""

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.builders.benches import client_of, nothing, silent
from tests.builders.loads import load_server
from vllm_qualify.engine.bench import prepare_commands, results_folder, run_command, running_bench
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.evidence.load.agreement import result_problems
from vllm_qualify.evidence.load.client import command_of
from vllm_qualify.recipe.load import Load

pytestmark = pytest.mark.engine

TURNS, CHATS, CLIENTS = 3, 4, 2
LOAD = Load(
    input_len=12,
    output_len=2,
    shared_prefix_len=24,
    api="chat",
    turns=TURNS,
    window="whole",
    max_concurrency=CLIENTS,
    num_prompts=TURNS * CHATS,
    num_warmups=0,
    min_duration_s=0.001,
)
LIMIT_S = 300.0


class Chats(ThreadingHTTPServer):
    """A server whose replies differ, and are late; it remembers what it was asked, and what it had said by then."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.numbers, self.bodies, self.said = count(1), list[dict[str, Any]](), set[str]()


class Handler(BaseHTTPRequestHandler):
    server: Chats

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.path.endswith("/chat/completions"):
            self.send_error(404)
            return
        reply = f"reply {next(self.server.numbers)}"
        earlier = [message["content"] for message in body["messages"] if message["role"] == "assistant"]
        body["all_said"] = set(earlier) <= self.server.said
        self.server.bodies.append(body)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        # As many tokens as words.
        words = sum(12 + len(str(message["content"]).split()) for message in body["messages"])
        usage = {"prompt_tokens": words, "completion_tokens": 2, "total_tokens": words + 2}
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in reply.split(" ")]
        chunks[1]["choices"][0]["delta"]["content"] = f" {reply.split(' ')[1]}"
        for chunk in chunks:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()
        self.server.said.add(reply)
        self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def server() -> Iterator[Chats]:
    with Chats() as chats:
        threading.Thread(target=chats.serve_forever, daemon=True).start()
        yield chats
        chats.shutdown()


def test_each_turn_has_all_that_was_said_before_it(engine: EngineEnvironment, server: Chats, tmp_path: Path) -> None:
    """The first repeat's prompts are made ahead; between the two, a load without turns is run."""
    client = client_of(engine, f"http://127.0.0.1:{server.server_port}")
    (tmp_path / "load").mkdir()
    single = LOAD.model_copy(update={"turns": 1, "num_prompts": 4})
    bodies: dict[int, list[dict[str, Any]]] = {}
    with running_bench(client, tmp_path / "bench.log") as bench:
        into = results_folder(bench)
        prepare_commands(bench, [command_of(client, "reference", LOAD, into, 1)])
        for repeat, settings in ((1, LOAD), (2, single), (3, LOAD)):
            command = command_of(client, "reference", settings, into, repeat)
            log = tmp_path / "load" / f"bench-{repeat}.log"
            run_command(bench, command, f"bench-{repeat}.json", log, LIMIT_S, nothing, silent)
            bodies[repeat], server.bodies = server.bodies, []
    assert [len(body["messages"]) for body in bodies[2]] == [1] * 4
    for repeat in (1, 3):
        assert_chats(bodies[repeat])
        result = json.loads((tmp_path / "load" / f"bench-{repeat}.json").read_text())
        assert result["turns"] == str(TURNS)
        problems = result_problems(result, LOAD, load_server({}))
        assert [problem for problem in problems if "turns" in problem] == []
        # As if no turn had waited for the one before.
        moved = result | {"start_times": [min(result["start_times"]) + 1e-4 * at for at in range(TURNS * CHATS)]}
        assert any("turns began before the reply" in each for each in result_problems(moved, LOAD, load_server({})))
    plain = json.loads((tmp_path / "load" / "bench-2.json").read_text())
    assert "turns" not in plain


def assert_chats(bodies: list[dict[str, Any]]) -> None:
    assert len(bodies) == TURNS * CHATS
    assert all(body["all_said"] for body in bodies), "a reply is in no prompt before it came"
    (system,) = {body["messages"][0]["content"] for body in bodies}
    assert len(system) > 24, "a character or more for each token"
    of_chat = defaultdict(list)
    for body in bodies:
        roles = [message["role"] for message in body["messages"]]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2 - 1), "user"]
        of_chat[body["messages"][1]["content"]].append(body["messages"])
    assert len(of_chat) == CHATS
    for first, second, third in of_chat.values():
        assert second[:2] == first
        assert third[:4] == second
        replies = {message["content"] for message in third if message["role"] == "assistant"}
        assert len(replies) == 2
        assert all(reply.startswith("reply ") for reply in replies)
