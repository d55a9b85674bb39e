"""Told tokens, by the real client: a server whose usage and counters say more tokens than it sends."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.builders.benches import MODEL, silent
from tests.builders.loads import load_server
from vllm_qualify.engine.bench import Bench, running_bench
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.process import RunningProcess
from vllm_qualify.engine.server import Client, Server
from vllm_qualify.evidence.load.client import driven_by, run_repeat
from vllm_qualify.evidence.load.figures import parse_load
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.recipe.load import Load

pytestmark = pytest.mark.engine
SAID = 32
LOAD = Load(
    input_len=16,
    output_len=SAID,
    max_concurrency=4,
    num_prompts=20,
    num_warmups=0,
    repeats=2,
    most_repeats=2,
    min_duration_s=0.001,
    window="whole",
)
PAGE = """\
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total 0.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total {prompts}.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total {generated}.0
# TYPE vllm:request_success counter
vllm:request_success_total {requests}.0
"""


class Lies(ThreadingHTTPServer):
    """Its usage and its counters agree: 32 tokens for each request, of which it sends as many as `sends` says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.sends, self.requests, self.counting = SAID, 0, threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Lies

    def do_GET(self) -> None:
        count = self.server.requests
        self.answer("text/plain", PAGE.format(prompts=16 * count, generated=SAID * count, requests=count))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/completions":
            self.send_error(404)
            return
        with self.server.counting:
            self.server.requests += 1
        usage = {"prompt_tokens": 16, "completion_tokens": SAID, "total_tokens": 16 + SAID}
        chunks = [{"choices": [{"index": 0, "text": " cups", "finish_reason": None}]}] * self.server.sends
        events = [json.dumps(each) for each in [*chunks, {"choices": [], "usage": usage}]]
        self.answer("text/event-stream", "".join(f"data: {each}\n\n" for each in [*events, "[DONE]"]))

    def answer(self, kind: str, body: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def server() -> Iterator[Lies]:
    with Lies() as lies:
        threading.Thread(target=lies.serve_forever, daemon=True).start()
        yield lies
        lies.shutdown()


@pytest.fixture
def client(engine: EngineEnvironment, server: Lies) -> Client:
    url = f"http://127.0.0.1:{server.server_port}"
    return Client(program=str(engine.vllm), python=str(engine.python), url=url, model=MODEL, paths=[Path(MODEL)])


@pytest.fixture
def bench(client: Client, tmp_path: Path) -> Iterator[Bench]:
    with running_bench(client, tmp_path / "bench.log") as bench:
        yield bench


def test_a_server_that_sends_12_of_32_tokens_measured_nothing(
    client: Client, bench: Bench, server: Lies, tmp_path: Path
) -> None:
    process = RunningProcess(guard_pid=1, state_file=tmp_path / "state", log=tmp_path / "server.log")
    asks = Server(url=client.url, served_model_name="reference", process=process, command=[], startup_s=1.0, client=client)
    reasons = []
    for sends in (SAID, 12):
        server.sends, folder = sends, tmp_path / str(sends)
        folder.mkdir()
        for repeat in (1, 2):
            run_repeat(driven_by(asks, bench, LOAD, None), LOAD, folder, repeat, silent)
        told = json.loads((folder / "tokens-1.json").read_text())["tokens"]
        assert told == [sends] * LOAD.num_prompts, "each ' cups' is one token of this model"
        rows = parse_load(folder, LOAD, Levels(), load_server({"no-enable-prefix-caching": True}, model=asks.served_model_name))
        reasons.append(next(row.invalid_because or "" for row in rows if row.metric == "output_throughput_tok_s"))
    honest, lying = reasons
    assert "brought" not in honest
    assert "its replies have 640 tokens by the server's usage, and brought 240 at most" in lying
