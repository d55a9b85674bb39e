"""`vllm bench serve` in a process that stays: the real worker, with a made-up vLLM that follows the test's orders."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.processes import alive
from vllm_qualify.engine import bench as benches
from vllm_qualify.engine.bench import Bench, no_progress, prepare_commands, run_command, running_bench, stop_preparing
from vllm_qualify.engine.bench_worker import MARK, SAMPLE_EVERY_S
from vllm_qualify.engine.process import Progress, RunningProcess
from vllm_qualify.engine.server import Client
from vllm_qualify.errors import HostError, ReleaseError

PARSER = """
from argparse import ArgumentParser


class FlexibleArgumentParser(ArgumentParser):
    pass
"""
# `--say` is printed, `--busy-s` is how long it computes, and with `--fail` or `--hang` it does just that.
SERVE = """
import json
import os
import time
from pathlib import Path


def add_cli_args(parser):
    parser.add_argument("--say", default="")
    parser.add_argument("--busy-s", type=float, default=0.0)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--result-filename")


def main(args):
    print(args.say, flush=True)
    if args.fail:
        raise ValueError("the server answered nothing")
    until = time.process_time() + args.busy_s
    while time.process_time() < until:
        pass
    if args.hang:
        time.sleep(600)  # the fault itself: it never ends
    if args.result_filename:
        Path(args.result_filename).write_text(json.dumps({"pid": os.getpid(), "hash": hash("7:16")}))
"""
# The same, with prompts: each is made of random numbers, and so is what is asked after them.
PROMPTS = """
import random


class Sample:
    prompt_len = 3

    def __init__(self):
        self.prompt = random.random()


def get_samples(args, tokenizer):
    print("making prompts of", args.say, flush=True)
    args.parsed = args.say.upper()
    return [Sample() for _ in range(3)]


async def main_async(args):
    random.seed(args.say)
    prompts = get_samples(args, None)
    print("asked:", [sample.prompt for sample in prompts], args.parsed, random.random(), flush=True)
    return _main(args)
"""
WITH_PROMPTS = f"""{SERVE.replace("def main(", "def _main(")}{PROMPTS}

def main(args):
    import asyncio

    return asyncio.run(main_async(args))
"""
LIMIT_S = 30.0
URL = "http://127.0.0.1:8123"


@pytest.fixture
def serve() -> str:
    """The made-up bench, which has no prompts."""
    return SERVE


@pytest.fixture
def client(tmp_path: Path, serve: str) -> Client:
    """Its Python finds the made-up vLLM, and no other."""
    for path, text in {"benchmarks/serve.py": serve, "utils/argparse_utils.py": PARSER}.items():
        file = tmp_path / "engine" / "site" / "vllm" / path
        file.parent.mkdir(parents=True)
        file.write_text(text)
    python = tmp_path / "engine" / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "engine" / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return Client(program=str(tmp_path / "vllm"), python=str(python), url=URL, model="org/model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a stage."""
    (tmp_path / "load").mkdir()
    return tmp_path / "load"


@pytest.fixture
def bench(client: Client, tmp_path: Path) -> Iterator[Bench]:
    with running_bench(client, tmp_path / "bench.log") as bench_client:
        yield bench_client


def nothing() -> None:
    """The server is well."""


def server_ended() -> None:
    raise ReleaseError("the server ended", "see its log", "serve")


def order(bench: Bench, folder: Path, number: int, *arguments: str, progress: Progress = no_progress) -> str:
    """Run a command to its end; its log."""
    result, log = f"bench-{number}.json", folder / f"bench-{number}.log"
    run_command(bench, planned(bench, number, *arguments), result, log, LIMIT_S, nothing, progress)
    return log.read_text()


def fails(bench: Bench, folder: Path, *arguments: str) -> HostError:
    with pytest.raises(HostError) as raised:
        order(bench, folder, 1, *arguments)
    assert raised.value.place == "load"
    assert not (folder / "client-1.json").exists()
    return raised.value


def leader(bench: Bench) -> int:
    """The process of the bench, once it runs."""
    assert isinstance(bench.process, RunningProcess)
    pid: int = json.loads(bench.process.state_file.read_text())["pid"]
    return pid


def test_one_process_runs_one_order_after_another(bench: Bench, folder: Path) -> None:
    first = order(bench, folder, 1, "--say", "the first")
    second = order(bench, folder, 2, "--say", "the second")
    assert [(name in first, name in second) for name in ("the first", "the second")] == [(True, False), (False, True)]
    assert all(log.count(MARK) == 1 for log in (first, second))
    results = [json.loads((folder / f"bench-{number}.json").read_text()) for number in (1, 2)]
    assert results[0]["pid"] == results[1]["pid"]
    # Docker Engine is not done with a file when it appears: it must not be gone then.
    assert len(list(Path(bench.letter_box).glob("*.order"))) == 2
    assert bench.process.log.read_text().count("worker: ready") == 1, "it imports once for all orders"


def test_two_clients_make_the_same_prompts_of_a_trace(client: Client, folder: Path, tmp_path: Path) -> None:
    """Bench draws the tokens of a trace's block by Python's `hash` of a text, which by default differs in each process."""
    hashes = []
    for number in (1, 2):
        with running_bench(client, tmp_path / f"bench-{number}.log") as bench:
            order(bench, folder, number)
        hashes.append(json.loads((folder / f"bench-{number}.json").read_text())["hash"])
    assert hashes[0] == hashes[1]


def test_what_the_client_used_lies_beside_each_log(bench: Bench, folder: Path) -> None:
    began = time.time()
    order(bench, folder, 1, "--busy-s", str(3 * SAMPLE_EVERY_S))
    order(bench, folder, 2)
    used = json.loads((folder / "client-1.json").read_text())
    times, spent = zip(*used["cpu_s"], strict=True)
    assert began - 1 < times[0] < times[-1] < time.time() + 1
    assert sorted(times) == list(times)
    assert sorted(spent) == list(spent)
    assert spent[-1] > spent[0]
    assert used["max_rss_mib"] > 1
    assert set(json.loads((folder / "client-2.json").read_text())) == set(used)


def test_progress_is_reported_from_the_bar(bench: Bench, folder: Path) -> None:
    shown: list[tuple[int, int]] = []

    def progress(done: int, total: int, _part: str = "", /) -> None:
        shown.append((done, total))

    bar = "".join(f"\r {done / 40:4.0%}|##  | {done}/40 [00:01<00:02]" for done in (1, 12, 40))
    order(bench, folder, 1, "--say", bar, progress=progress)
    assert shown == [(40, 40)]
    order(bench, folder, 2, "--say", "no bar, 12/40 of it", progress=progress)
    assert shown == [(40, 40)]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--fail"], 1, "ValueError: the server answered nothing"),
        (["--no-such-option"], 2, "unrecognized arguments: --no-such-option"),
    ],
)
def test_a_command_that_fails_ends_it_with_the_telling_lines(
    bench: Bench, folder: Path, arguments: list[str], exit_code: int, message: str
) -> None:
    error = fails(bench, folder, *arguments)
    assert error.problem == f"vllm bench serve ended with exit code {exit_code}"
    assert message in "\n".join(error.log_tail)


@pytest.mark.parametrize("missing", ["benchmarks/serve.py", "utils/argparse_utils.py"])
def test_a_bench_that_cannot_be_imported_is_shown_with_why(client: Client, folder: Path, tmp_path: Path, missing: str) -> None:
    (tmp_path / "engine" / "site" / "vllm" / missing).unlink()
    with running_bench(client, tmp_path / "bench.log") as bench:
        error = fails(bench, folder)
    assert error.problem == "vllm bench serve ended with exit code 1"
    assert "ModuleNotFoundError: No module named 'vllm." in "\n".join(error.log_tail)


def test_a_command_over_its_time_limit_is_reported_and_ended(client: Client, folder: Path, tmp_path: Path) -> None:
    command = ["vllm", "bench", "serve", "--hang", "--say", "connecting"]
    with (
        pytest.raises(HostError, match=r"load took longer than its 0\.5 s") as raised,
        running_bench(client, tmp_path / "log") as bench,
    ):
        pid = leader(bench)
        run_command(bench, command, "bench-1.json", folder / "bench-1.log", 0.5, nothing, no_progress)
    assert "time_limit_s" in raised.value.remedy
    assert raised.value.place == "load"
    assert not alive(pid)


def test_a_server_that_ended_is_reported_and_not_that_its_client_hangs(bench: Bench, folder: Path) -> None:
    command = ["vllm", "bench", "serve", "--hang"]
    with pytest.raises(ReleaseError, match="the server ended"):
        run_command(bench, command, "bench-1.json", folder / "bench-1.log", LIMIT_S, server_ended, no_progress)


def test_nothing_is_left_after_the_block_and_no_key_of_the_store_reaches_it(
    client: Client, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "shhhhhhhh")
    with running_bench(client, tmp_path / "bench.log") as bench:
        order(bench, folder, 1)
        pid = leader(bench)
        environment = Path(f"/proc/{pid}/environ").read_text()
    assert "AWS_" not in environment
    assert "VLLM_NO_USAGE_STATS=1" in environment
    assert not alive(pid)
    assert not Path(bench.letter_box).exists()


def test_a_file_is_given_to_a_process_as_a_copy(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("{}")
    given = Path(benches.give_file(bench, tmp_path / "prompts.jsonl"))
    assert given.is_relative_to(bench.letter_box)
    assert given.read_text() == "{}"


def test_a_folder_that_cannot_be_written_is_reported(bench: Bench, tmp_path: Path) -> None:
    """The order comes back, and its log has nowhere to go."""
    command = ["vllm", "bench", "serve"]
    with pytest.raises(HostError, match="No such file or directory"):
        run_command(bench, command, "bench-1.json", tmp_path / "no-folder" / "bench-1.log", LIMIT_S, nothing, no_progress)


# --- prompts that are made ahead


def asked(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("asked: ")]


def planned(bench: Bench, number: int, *arguments: str) -> list[str]:
    return ["vllm", "bench", "serve", *arguments, "--result-filename", f"{benches.results_folder(bench)}/bench-{number}.json"]


def until_said(bench: Bench, words: str, times: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while bench.process.log.read_text().count(words) < times:
        assert time.monotonic() < deadline, bench.process.log.read_text()
        time.sleep(0.02)  # another process writes the log: it can only be read again


MADE, GIVEN = "prompts made ahead\n", "with prompts made ahead"
made_ahead = pytest.mark.parametrize("serve", [WITH_PROMPTS])


@made_ahead
def test_prompts_that_are_made_ahead_are_those_of_the_command_alone(bench: Bench, folder: Path) -> None:
    alone = [order(bench, folder, number, "--say", name) for number, name in enumerate(("first", "second"), start=1)]
    assert not any(GIVEN in log for log in alone)
    prepare_commands(bench, [planned(bench, number, "--say", name) for number, name in enumerate(("first", "second"), start=1)])
    until_said(bench, f"worker: {MADE}", 2)
    # Another order than planned changes nothing, and neither does a command between them.
    second, between, first = (
        order(bench, folder, number, "--say", name) for number, name in ((2, "second"), (3, "third"), (1, "first"))
    )
    assert [asked(first), asked(second)] == [asked(log) for log in alone]
    assert asked(first) != asked(second)
    assert [GIVEN in log for log in (first, second, between)] == [True, True, False]
    assert not any("making prompts" in log for log in (first, second))
    assert "making prompts of third" in between


@made_ahead
def test_only_the_same_command_gets_them_and_once(bench: Bench, folder: Path) -> None:
    prepare_commands(bench, [planned(bench, 1, "--say", "first")])
    until_said(bench, f"worker: {MADE}", 1)
    assert GIVEN not in order(bench, folder, 1, "--say", "first", "--busy-s", "0.01")
    assert GIVEN in order(bench, folder, 1, "--say", "first")
    assert GIVEN not in order(bench, folder, 1, "--say", "first")


@made_ahead
def test_once_settled_none_are_made_ahead(bench: Bench, folder: Path) -> None:
    prepare_commands(bench, [planned(bench, number, "--say", f"number {number}") for number in range(1, 2000)])
    stop_preparing(bench, LIMIT_S, nothing)
    made = bench.process.log.read_text().count("making prompts")
    assert made < 1999
    log = order(bench, folder, 1999, "--say", "number 1999")
    assert "making prompts of number 1999" in log
    assert bench.process.log.read_text().count("making prompts") == made + 1


@made_ahead
def test_who_settles_watches_the_server(bench: Bench) -> None:
    prepare_commands(bench, [planned(bench, 1, "--say", "x")])
    with pytest.raises(ReleaseError):
        stop_preparing(bench, LIMIT_S, server_ended)


# It has the function, and its command uses another one: replacing it would replace nothing, and a command that is to be broken
# off would run to its end.
ELSEWHERE = WITH_PROMPTS.replace("get_samples(args, None)", "datasets.get_samples(args, None)")
ELSEWHERE += "\n\nclass datasets:\n    get_samples = staticmethod(get_samples)\n"


@pytest.mark.parametrize(("serve", "words"), [(SERVE, "first"), (ELSEWHERE, "asked: ")], ids=["no function", "another one"])
def test_a_version_that_makes_them_elsewhere_runs_as_ever_and_says_so(bench: Bench, folder: Path, words: str) -> None:
    prepare_commands(bench, [planned(bench, 1, "--say", "first")])
    stop_preparing(bench, LIMIT_S, nothing)
    assert words in order(bench, folder, 1, "--say", "first")
    log_text = bench.process.log.read_text()
    assert "this version makes its prompts elsewhere, so that none are made ahead" in log_text
    assert log_text.count(words) == 1, "it ran when it was ordered, and not before"
