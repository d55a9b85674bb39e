"""`make bench`: what it makes of what it measured. The measuring itself takes 40 minutes."""

from pathlib import Path

import pytest

from infra.bench.orchestrator import Cost
from infra.bench.verdict import (
    ANSWERED,
    BY_HAND,
    FLOW,
    LOAD,
    RUNNING,
    SEQUENTIAL,
    TOKENS,
    WAITING,
    Took,
    _took,
    figures,
    recipe,
)
from vllm_qualify.engine.watch import Scrape
from vllm_qualify.recipe.loading import load_recipe


def scraped(at: float, running: float | None, waiting: float = 0.0, answered: float = 1.0, tokens: float = 7.0) -> Scrape:
    if running is None:
        return Scrape(time=at, error="nobody listens")
    values = {RUNNING: running, WAITING: waiting, ANSWERED: answered, TOKENS[0]: 5.0, TOKENS[1]: tokens}
    return Scrape(time=at, values={f"{name}{{}}": value for name, value in values.items()})


def test_a_server_idles_while_it_has_no_request_from_its_first_completion_on() -> None:
    samples = [
        scraped(1.0, None),
        scraped(2.0, 0, answered=0),
        scraped(3.0, 0),
        scraped(4.0, 0),
        scraped(5.0, 5),
        scraped(6.0, 0, waiting=1),
        # whatever it did is over, and it did something
        scraped(7.0, 0, tokens=8.0),
        scraped(7.5, None),
    ]
    assert _took(9.0, 0.5, 7.5, samples) == Took(whole_s=9.0, held_s=7.0, ready_s=2.5, idle_share=0.25)


def test_ratios_are_over_the_same_round_and_the_idle_share_is_the_flows() -> None:
    found = {
        BY_HAND: [Took(300, 200, 30, 0.4), Took(300, 400, 30, 0.6)],
        FLOW: [Took(250, 100, 30, 0.04), Took(250, 200, 30, 0.06)],
        SEQUENTIAL: [Took(200, 50, 30, 0.05), Took(200, 100, 30, 0.05)],
    }
    costs = [Cost(10, 10, 0.5, 0.6, 0.7, 30.0), Cost(100, 100, 0.4, 0.5, 0.3, 30.0)]
    assert figures(found, costs) == {
        "held_ratio": 0.5,
        "idle_share": pytest.approx(0.05),
        "sequential_held_ratio": 0.25,
        "seconds_per_cell": {"10": 0.5, "100": 0.4},
        "mib_per_cell": {"10": 0.7, "100": 0.3},
    }


@pytest.mark.parametrize("sequential", [False, True])
def test_both_do_the_same_work(tmp_path: Path, sequential: bool) -> None:
    loaded = load_recipe(str(recipe(tmp_path, sequential=sequential))).recipe
    (task,) = loaded.accuracy
    load = loaded.gpu_types["cpu"].profiles["balanced"].load.of(None, 1)
    assert (task.sequential, task.num_questions) == (sequential, 1319)
    assert task.questions is not None
    assert len(set((tmp_path / task.questions.test).read_text().splitlines())) == 1319
    assert LOAD.items() <= load.model_dump().items()
    assert load.repeats == load.most_repeats
    assert not any(gate.is_against_baseline for gate in loaded.gates)
