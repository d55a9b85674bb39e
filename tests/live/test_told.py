"""Told tokens, by the real client: a server whose usage and counters say more tokens than it sends."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.benches import client_of, server_of, silent
from tests.builders.loads import load_server
from tests.releases.service import Answer, Asked, serving
from vllm_qualify.engine.bench import Bench, running_bench
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import Client
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


class Lies:
    """Its usage and its counters agree: 32 tokens for each request, of which it sends as many as `sends` says."""

    def __init__(self) -> None:
        self.sends, self.requests, self._counting = SAID, 0, threading.Lock()

    def answer(self, asked: Asked) -> Answer:
        if asked.method == "GET":
            count = self.requests
            page = PAGE.format(prompts=16 * count, generated=SAID * count, requests=count)
            return Answer(body=page.encode(), headers={"Content-Type": "text/plain"})
        if asked.path != "/v1/completions":
            return Answer(404)
        with self._counting:
            self.requests += 1
        usage = {"prompt_tokens": 16, "completion_tokens": SAID, "total_tokens": 16 + SAID}
        chunks = [{"choices": [{"index": 0, "text": " cups", "finish_reason": None}]}] * self.sends
        events = [json.dumps(each) for each in [*chunks, {"choices": [], "usage": usage}]]
        body = "".join(f"data: {each}\n\n" for each in [*events, "[DONE]"])
        return Answer(body=body.encode(), headers={"Content-Type": "text/event-stream"})


@pytest.fixture
def server() -> Lies:
    return Lies()


@pytest.fixture
def client(engine: EngineEnvironment, server: Lies) -> Iterator[Client]:
    with serving(server.answer) as service:
        yield client_of(engine, f"http://{service.address}")


@pytest.fixture
def bench(client: Client, tmp_path: Path) -> Iterator[Bench]:
    with running_bench(client, tmp_path / "bench.log") as bench:
        yield bench


def test_sending_12_of_32_tokens_measures_nothing(client: Client, bench: Bench, server: Lies, tmp_path: Path) -> None:
    asks = server_of(client, tmp_path)
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
