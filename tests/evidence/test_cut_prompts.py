"""Prompts that max-num-batched-tokens cut, by a histogram like vLLM's, written by the library that vLLM uses."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from vllm_qualify.evidence.load.cut_prompts import cut_prompts

# Of vLLM 0.32: vllm/v1/metrics/buckets.py.
BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Server:
    """Counts the tokens of its steps, of two engines."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.steps = Histogram(
            "vllm:iteration_tokens_total", "tokens per step", ["engine"], buckets=BUCKETS, registry=self.registry
        )

    def step(self, tokens: int, times: int, engine: str = "0") -> None:
        for _ in range(times):
            self.steps.labels(engine).observe(tokens)

    def write(self, path: Path) -> None:
        path.write_bytes(generate_latest(self.registry))


def loaded(folder: Path, *repeats: dict[int, int]) -> Path:
    """What a load leaves whose repeats have so many steps of so many tokens; something was computed before it."""
    server = Server()
    server.step(9000, 50)
    for number, steps in enumerate(repeats, start=1):
        server.write(folder / f"metrics-{number}-before.txt")
        for place, (tokens, times) in enumerate(steps.items()):
            server.step(tokens, times, engine=str(place % 2))
        server.write(folder / f"metrics-{number}-after.txt")
        server.step(9000, 50)
    return folder


def test_steps_that_count_more_than_the_limit_ended_prompts_that_were_cut(tmp_path: Path) -> None:
    (note,) = cut_prompts(loaded(tmp_path, {64: 80, 9000: 20}, {64: 99, 8300: 1}), 8192)
    assert note.startswith("in 21 of 200 steps the server ended prompts that max-num-batched-tokens 8192 had cut into pieces")


@pytest.mark.parametrize("limit", [16384, 9000, None, "8192", True])
def test_what_is_within_the_limit_or_without_one_says_nothing(limit: object, tmp_path: Path) -> None:
    """Between two buckets' bounds a step may be within the limit, so it does not count."""
    assert cut_prompts(loaded(tmp_path, {64: 80, 9000: 20}), limit) == []


def test_a_prompt_now_and_then_is_no_note_nor_is_a_server_that_does_not_count_its_steps(tmp_path: Path) -> None:
    assert cut_prompts(loaded(tmp_path, {64: 1000, 9000: 9}), 8192) == []
    for when in ("before", "after"):
        (tmp_path / f"metrics-1-{when}.txt").write_text("# TYPE other counter\nother_total 1.0\n")
    assert cut_prompts(tmp_path, 8192) == []
