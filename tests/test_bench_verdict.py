"""`make bench`: what it makes of what it measured. The measuring itself takes 40 minutes."""

from pathlib import Path

import pytest

from infra.bench import verdict
from infra.bench.orchestrator import Cost
from infra.bench.timeline import Span, by_hand, merged, timetable
from infra.bench.verdict import BY_HAND, FLOW, SEQUENTIAL, Took, _took, figures, recipe
from vllm_qualify.engine.watch import Scrape
from vllm_qualify.recipe.loading import load_recipe


def scraped(at: float, running: float | None, waiting: float = 0.0, answered: float = 1.0, tokens: float = 7.0) -> Scrape:
    if running is None:
        return Scrape(time=at, error="nobody listens")
    values = {verdict.RUNNING: running, verdict.WAITING: waiting, verdict.ANSWERED: answered}
    values |= {verdict.TOKENS[0]: 5.0, verdict.TOKENS[1]: tokens}
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
    smoke = Span("smoke", 3.0, 3.5)
    took = _took(9.0, 0.5, 7.5, samples, [smoke])
    assert took._replace(timeline=()) == Took(whole_s=9.0, held_s=7.0, ready_s=2.5, idle_share=0.25)
    assert [" ".join(line.split()) for line in took.timeline] == [
        "0.0 2.5 2.5 start, to the first completion",
        "2.5 3.0 0.5 smoke",
        "2.5 3.5 1.0 idle: in smoke",
        "3.0 7.0 4.0 the rest, and the server's end",
    ]


def test_gaps_without_work_are_reported_with_what_ran_in_them() -> None:
    spans = [Span("smoke", 10.0, 11.0), Span("accuracy r1-b1", 11.5, 20.0), Span("repeat 1", 30.0, 40.0)]
    idle = [(11.0, 11.2), (11.2, 11.4), (12.0, 12.3), (12.3, 12.7), (20.5, 25.0), (25.0, 29.0), (40.2, 41.0)]
    gaps = merged(idle)
    assert [(gap.began, gap.ended) for gap in gaps] == [(12.0, 12.7), (20.5, 29.0), (40.2, 41.0)]
    lines = [" ".join(line.split()) for line in timetable(0.0, 9.0, 45.0, spans, gaps)]
    assert [line for line in lines if "idle" in line] == [
        "12.0 12.7 0.7 idle: in accuracy r1-b1",
        "20.5 29.0 8.5 idle: between accuracy r1-b1 and repeat 1",
        "40.2 41.0 0.8 idle: between repeat 1 and the end",
    ]


def test_what_was_done_by_hand_is_known_by_its_marks(tmp_path: Path) -> None:
    (tmp_path / "marks").write_text("10.5 smoke\n11.0 accuracy\n20.0 repeat 1\n30.25 end\n")
    assert by_hand(tmp_path) == [Span("smoke", 10.5, 11.0), Span("accuracy", 11.0, 20.0), Span("repeat 1", 20.0, 30.25)]


def test_ratios_are_over_the_same_round_and_the_idle_share_is_the_flows() -> None:
    by_way = {
        BY_HAND: [Took(300, 200, 30, 0.4), Took(300, 400, 30, 0.6)],
        FLOW: [Took(250, 100, 30, 0.04), Took(250, 200, 30, 0.06)],
        SEQUENTIAL: [Took(200, 50, 30, 0.05), Took(200, 100, 30, 0.05)],
    }
    costs = [Cost(10, 10, 0.5, 0.6, 0.7, 30.0), Cost(100, 100, 0.4, 0.5, 0.3, 30.0)]
    assert figures(by_way, costs) == {
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
    load = loaded.gpu_types["cpu"].profiles["balanced"].load.make_load(None, 1)
    assert (task.sequential, task.num_questions) == (sequential, 1319)
    assert task.questions is not None
    assert len(set((tmp_path / task.questions.test).read_text().splitlines())) == 1319
    assert verdict.LOAD.items() <= load.model_dump().items()
    assert load.repeats == load.most_repeats
    assert not any(gate.is_against_baseline for gate in loaded.gates)
    assert (loaded.likelihood, loaded.gpu_types["cpu"].starts) == (None, 1)
