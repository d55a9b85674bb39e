"""Prompts that are made ahead: what the server is asked is byte for byte what plain `vllm bench serve` asks it."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.benches import client_of, nothing, server_of, silent
from tests.releases.service import Answer, Asked, Service, serving
from vllm_qualify.engine.bench import Bench, give_file, prepare_commands, results_folder, run_command, running_bench
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import Client
from vllm_qualify.evidence.load.client import command_of, driven_by, run_repeat
from vllm_qualify.recipe.load import Load

pytestmark = pytest.mark.engine
CHUNK = {"choices": [{"index": 0, "text": " It", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
# One after another, so that they come in their order.
LOAD = Load(
    input_len=64,
    output_len=8,
    length_spread=0.5,
    max_concurrency=1,
    num_prompts=6,
    num_warmups=1,
    repeats=2,
    most_repeats=2,
    min_duration_s=0.001,
)
LIMIT_S = 300.0


def answer(asked: Asked) -> Answer:
    """A word for each completion."""
    if asked.method != "POST" or not asked.path.endswith("/completions"):
        return Answer(404)
    events = f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n"
    return Answer(body=events.encode(), headers={"Content-Type": "text/event-stream"})


@pytest.fixture(scope="module")
def server() -> Iterator[Service]:
    with serving(answer) as service:
        yield service


def take_bodies(server: Service) -> list[bytes]:
    """What it was asked to complete since this was called last."""
    asked, server.asked = server.asked, []
    return [each.body for each in asked if each.path.endswith("/completions")]


@pytest.fixture(scope="module")
def client(engine: EngineEnvironment, server: Service) -> Client:
    return client_of(engine, f"http://{server.address}")


@pytest.fixture(scope="module")
def bench(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One for all tests but the one that counts what it has drawn: its start takes longer than their loads."""
    with running_bench(client, tmp_path_factory.mktemp("bench") / "bench.log") as bench:
        yield bench


def file_of_prompts(folder: Path) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"How many are {number} and 3?"}) + "\n" for number in range(9)))
    return str(path)


@pytest.mark.parametrize("dataset", ["random", "file", "rate"])
def test_it_asks_what_plain_bench_asks(dataset: str, client: Client, bench: Bench, server: Service, tmp_path: Path) -> None:
    prompts, rate = file_of_prompts(tmp_path) if dataset == "file" else None, 50.0 if dataset == "rate" else None
    settings = LOAD.model_copy(update={"request_rate": rate} | ({"length_spread": 0.0} if dataset == "file" else {}))
    (tmp_path / "load").mkdir()

    def commands_of(into: str, file: str | None) -> list[list[str]]:
        return [command_of(client, "reference", settings, into, repeat, file) for repeat in (1, 2)]

    plain = []
    for command in commands_of(str(tmp_path / "load"), prompts)[: 2 if dataset == "random" else 1]:
        subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
        plain.append(take_bodies(server))
    commands = commands_of(results_folder(bench), give_file(bench, Path(prompts)) if prompts else None)
    made_before = bench.process.log.read_text().count("prompts made ahead")
    prepare_commands(bench, commands)
    deadline = time.monotonic() + LIMIT_S
    while bench.process.log.read_text().count("prompts made ahead") < made_before + len(commands):
        assert time.monotonic() < deadline, bench.process.log.read_text()
        time.sleep(0.1)  # another process writes the log: it can only be read again
    assert take_bodies(server) == [], "the server is not asked ahead of time"
    for number, expected in enumerate(plain, start=1):
        log = tmp_path / "load" / f"bench-{number}.log"
        run_command(bench, commands[number - 1], f"bench-{number}.json", log, LIMIT_S, nothing, silent)
        assert "with prompts made ahead" in log.read_text()
        assert sorted(take_bodies(server)) == sorted(expected) if rate else take_bodies(server) == expected
        assert len(expected) == settings.num_prompts


@pytest.mark.parametrize("dataset", ["random", "shared", "file"])
def test_a_warm_up_asks_nothing_measured(dataset: str, client: Client, bench: Bench, server: Service, tmp_path: Path) -> None:
    """By bench itself: each repeat asks its warm-ups first, and no prompt comes twice over all repeats but a file's."""
    prefix, spread = 32 if dataset == "shared" else 0, 0.0 if dataset == "file" else 0.5
    settings = LOAD.model_copy(update={"num_warmups": 3, "shared_prefix_len": prefix, "length_spread": spread})
    prompts = Path(file_of_prompts(tmp_path)) if dataset == "file" else None
    asks = server_of(client, tmp_path)
    asked: list[list[str]] = []
    for repeat in (1, 2):
        run_repeat(driven_by(asks, bench, settings, prompts), settings, tmp_path, repeat, silent)
        asked.append([json.loads(body)["prompt"] for body in take_bodies(server)])
    warm_ups = {prompt for each in asked for prompt in each[: settings.num_warmups]}
    measured = [prompt for each in asked for prompt in each[settings.num_warmups :]]
    assert len(measured) == 2 * settings.num_prompts
    # Tokens of the same beginning may be read as other tokens at its end.
    assert not {prompt[:8] for prompt in measured} & {prompt[:8] for prompt in warm_ups}
    assert dataset == "file" or len(set(measured)) == len(measured)
    if dataset == "shared":
        assert len({prompt[:8] for prompt in measured}) == 2, "a beginning of its own in each repeat"


def test_random_prompts_that_bench_draws_again_are_counted(client: Client, server: Service, tmp_path: Path) -> None:
    """Its prompts are runs of consecutive tokens, and this vocabulary has 718: of 150 some are the same."""
    settings = LOAD.model_copy(update={"num_prompts": 150, "length_spread": 0.0, "output_len": 1, "num_warmups": 0})
    asks = server_of(client, tmp_path)
    told, asked = list[float](), list[str]()
    with running_bench(client, tmp_path / "bench.log") as bench:
        for repeat in (1, 2):
            run_repeat(driven_by(asks, bench, settings, None), settings, tmp_path, repeat, silent)
            asked += [json.loads(body)["prompt"] for body in take_bodies(server)]
            told.append(json.loads((tmp_path / f"client-{repeat}.json").read_text())["drawn_before"])
    begins = [prompt[:40] for prompt in asked]
    again = [begin in begins[:at] for at, begin in enumerate(begins)]
    assert told == pytest.approx([sum(again[:150]) / 150, sum(again[150:]) / 150])
    assert 0 < told[0] < told[1] < 0.6
