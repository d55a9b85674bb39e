"""Loads whose requests are sent at a rate: what bench is asked, what counts, and what is no number."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.builders.loads import measure
from tests.evidence.commands import CLIENT, options
from tests.fakes.capacity import Capacity, Change
from vllm_qualify.evidence.load.client import command_of
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.recipe.load import Load

Document = dict[str, Any]

# Of a server that takes about 25 ms for 20 tokens of one request, and 256 at once.
LOAD = Load.model_validate(
    {"input_len": 16, "output_len": 20, "max_concurrency": 1, "num_prompts": 400, "num_warmups": 0, "request_rate": 20.0}
    | {"repeats": 2, "most_repeats": 2, "min_duration_s": 1.0}
)
WHOLE = LOAD.model_copy(update={"window": "whole"})


def measured(folder: Path, load: Load = LOAD, server: Capacity | None = None) -> dict[str, Measurement]:
    """Two repeats of a load on a simulated server."""
    server = server or Capacity(noise=0.05)
    change = server.change
    for repeat in (1, 2):
        server.change = partial(begun_at, change, 1000.0 * repeat)
        into = folder / str(repeat)
        into.mkdir(parents=True)
        server.run(load.model_copy(update={"seed": repeat}), into)
        for path in into.iterdir():
            path.rename(folder / path.name.replace("-1", f"-{repeat}", 1))
        into.rmdir()
    return measure(folder, load)


def begun_at(change: Change, began: float, result: Document) -> Document:
    changed = change(result)
    return changed | {"start_times": [began + start for start in changed["start_times"]]}


def late(result: Document) -> Document:
    """The same as sent by a client that takes 1.2 times as long for each."""
    first = result["start_times"][0]
    starts = [first + 1.2 * (start - first) for start in result["start_times"]]
    return result | {"start_times": starts}


@pytest.mark.parametrize("rate", [20.0, 12.3456789])
def test_bench_is_asked_for_a_rate_and_has_no_clients(tmp_path: Path, rate: float) -> None:
    load = LOAD.model_copy(update={"burstiness": 0.25, "request_rate": rate})
    command = command_of(CLIENT, "reference", load, str(tmp_path), 1)
    assert (options(command)["--request-rate"], options(command)["--burstiness"]) == (str(rate), "0.25")
    assert "--max-concurrency" not in command


def test_its_figures_are_those_of_the_steady_state(tmp_path: Path) -> None:
    rows = measured(tmp_path)
    rate, latency = rows["request_throughput_req_s"], rows["e2el_mean_ms"]
    assert (rate.invalid_because, latency.invalid_because) == (None, None)
    assert rate.value == pytest.approx(20, rel=0.1)
    # By Little's law 20 req/s times the latency are under way, and 20 tokens take 10 ms each and 1 ms for each of these:
    # 0.2 s / (1 - 0.4), and half a step until a request begins.
    assert latency.value == pytest.approx(340, rel=0.12)


def test_a_server_that_does_not_keep_up_has_no_steady_state(tmp_path: Path) -> None:
    rows = measured(tmp_path, server=Capacity(slots=2))
    because = rows["ttft_p50_ms"].invalid_because or ""
    assert "repeat 1: the server does not keep up with 20 req/s: its requests took ever longer" in because
    assert "lower request_rate, or set `window: whole`" in because


def test_over_a_whole_run_it_is_slow(tmp_path: Path) -> None:
    slow, fast = (measured(tmp_path / str(slots), WHOLE, Capacity(slots=slots))["ttft_p50_ms"].value for slots in (2, 256))
    assert slow is not None
    assert fast is not None
    assert slow > 100 * fast


def test_a_client_that_falls_behind_is_no_slow_server(tmp_path: Path) -> None:
    rows = measured(tmp_path, WHOLE, Capacity(change=late))
    assert "and 20 s were asked: the client fell behind" in (rows["ttft_p50_ms"].invalid_because or "")


def test_another_burstiness_than_the_asked_one_leaves_no_number(tmp_path: Path) -> None:
    bursts = LOAD.model_copy(update={"burstiness": 0.5})
    rows = measured(tmp_path, bursts, Capacity(change=lambda result: result | {"burstiness": 1.0}))
    assert "bench had burstiness 1.0, not 0.5" in (rows["ttft_p50_ms"].invalid_because or "")
