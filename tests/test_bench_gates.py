"""`make bench-gates`: its figures can be read, are the same for a seed, and the peers' gates are theirs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from infra.bench import accuracy, answer_worlds, other_worlds, peers, simulation, speed, speed_worlds, worlds
from vllm_qualify.evidence.answers import BLOCKS

HERE = Path(__file__).parent.parent
QUESTIONS = 1319
KEYS = {
    "false_alarm",
    "undecided",
    "detected_at_1_5_points",
    "approved_past_margin",
    "approved_past_margin_in_10_tries",
    "approved_no_loss_in_10_tries",
    "questions_share",
    "slowdown_detected",
    "slowdown_false_alarm",
    "worlds",
    "pass_past_margin",
    "fail_no_loss",
    "caught_1_5_points",
    "undecided_no_loss",
    "caught_5_percent_slowdown",
}


@pytest.mark.thorough
def test_the_last_line_has_the_figures() -> None:
    """How good they are is for a run with many releases to say."""
    command = [sys.executable, "-m", "infra.bench.gates", "--runs", "1", "--seed", "7"]
    messages = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout.splitlines()
    figures = json.loads(messages[-1])
    assert figures.keys() == KEYS
    assert all(value >= 0 for value in figures.values())
    assert all(
        any(line.startswith(gate) for line in messages) for gate in (*peers.ACCURACY, *peers.SPEED, "paired", "in turns")
    )


@pytest.mark.thorough
def test_one_seed_gives_the_same_rates_whatever_the_processes() -> None:
    wanted: list[simulation.Setting] = [accuracy.Setting(250, 0.01, 0.04, 0.02), speed.Setting(0.01, 0.05, 0.025)]
    first = simulation.simulate(wanted, 130, seed=3, processes=1)
    assert first == simulation.simulate(wanted, 130, seed=3, processes=2)
    assert first != simulation.simulate(wanted, 130, seed=4, processes=1)


@pytest.mark.parametrize("flips", [0.01, 0.05])
@pytest.mark.parametrize("lost", [0.0, 0.015, 0.06])
def test_builds_differ_by_just_what_is_lost(flips: float, lost: float) -> None:
    rng = np.random.default_rng(1)
    pairs = [worlds.builds(rng, QUESTIONS, flips, lost) for _ in range(50)]
    for pair in pairs:
        assert pair.baseline.mean() == pytest.approx(worlds.BASE_ACCURACY, abs=0.5 / QUESTIONS)
        assert pair.baseline.mean() - pair.candidate.mean() == pytest.approx(lost)
        assert (pair.candidate > pair.baseline).any()
        assert ((pair.candidate > -1e-9) & (pair.candidate < 1 + 1e-9)).all()
    assert np.mean([2 * chance * (1 - chance) for chance, _ in pairs]) == pytest.approx(flips, rel=0.1)


def test_tensorrt_llms_threshold_is_the_published_one() -> None:
    assert peers.tensorrt_llm_threshold(91.0, QUESTIONS) == pytest.approx(91 - 3.20, abs=0.005)
    assert peers.tensorrt_llm_visible(QUESTIONS) == pytest.approx(4.84, abs=0.005)


def test_wilsons_lower_bound_is_scipys() -> None:
    wilson = stats.binomtest(1200, QUESTIONS).proportion_ci(0.9, method="wilson")
    assert peers.wilson_lower(1200, QUESTIONS) == pytest.approx(wilson.low)


@pytest.mark.parametrize(
    ("gate", "least"),
    [
        ("vLLM, 8 % relative", 1105),  # .91 * .92 of 1,319 is 1,104.3
        ("vLLM, .08 absolute", 1095),  # .83 of them is 1,094.8
        ("TensorRT-LLM, hypothesis test", 1159),  # .8780 of them is 1,158.05
        ("InferenceX, .90", 1188),  # .9 of them is 1,187.1
        ("tt-inference-server, 5 %", 1140),  # .91 * .95 of them is 1,140.3, rounded down
    ],
)
def test_a_peer_passes_from_its_published_bound_on(gate: str, least: int) -> None:
    passes = peers.ACCURACY[gate]
    assert passes(least, QUESTIONS, 0.91)
    assert not passes(least - 1, QUESTIONS, 0.91)


def test_a_tolerance_of_8_percent_lets_five_points_go() -> None:
    rng, passed = np.random.default_rng(1), []
    for _ in range(1000):
        chance = worlds.builds(rng, QUESTIONS, 0.03, 0.05).candidate
        passed.append(peers.vllm_relative(int(worlds.drawn_answers(rng, chance).sum()), QUESTIONS, 0.91))
    assert np.mean(passed) >= 0.999


def test_a_slower_candidate_is_one_that_takes_longer() -> None:
    ten = peers.one_number(0.10)
    assert ten(109.0, 100.0)
    assert not ten(111.0, 100.0)


def test_without_early_looks_as_many_answers_are_needed_as_the_rates_say() -> None:
    """Then the bound at 5 % is as far from no loss as 5 % of releases come."""
    setting = accuracy.Setting(QUESTIONS, 0.03, 0.0, 0.0075)
    repetitions = accuracy.fixed_answers(setting, 0.05, 0.05, baseline_repetitions=6)
    error = np.sqrt(0.015 / QUESTIONS * (1 / 6 + 1 / repetitions))
    assert error * 2 * stats.norm.isf(0.05) == pytest.approx(0.0075, rel=0.01)
    assert accuracy.fixed_answers(setting, 0.05, 1e-9, baseline_repetitions=1) == float("inf")


def test_looks_are_after_each_block_of_the_products_steps() -> None:
    looks = accuracy.planned_looks(QUESTIONS, 3)
    assert len(looks) == 3 * BLOCKS
    assert looks[BLOCKS - 1 :: BLOCKS] == (QUESTIONS, 2 * QUESTIONS, 3 * QUESTIONS)


@pytest.mark.parametrize("lost", [0.0, 0.0076, 0.015])
@pytest.mark.parametrize("world", other_worlds.ANSWERS)
def test_a_world_of_answers_loses_just_what_it_says(world: str, lost: float) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        baseline, candidate = other_worlds.ANSWERS[world][0](rng, QUESTIONS, lost)
        # Builds that always answer alike lose whole questions.
        rounded = 0.5 / QUESTIONS if world == "deterministic" else 1e-5
        assert baseline.chance.mean() - candidate.chance.mean() == pytest.approx(lost, abs=rounded)
        for build in (baseline, candidate):
            assert ((build.chance > -1e-9) & (build.chance < 1 + 1e-9)).all()


def test_starts_shift_a_build_and_repetitions_shift_topics() -> None:
    rng = np.random.default_rng(1)
    build = answer_worlds.starts(rng, QUESTIONS, 0.0).baseline
    means = [build.started(rng).chance.mean() for _ in range(400)]
    assert np.std(means) == pytest.approx(answer_worlds.BETWEEN_STARTS, rel=0.15)
    build = answer_worlds.topics_noise(rng, QUESTIONS, 0.0).baseline
    alone = np.sqrt((build.chance * (1 - build.chance)).sum()) / QUESTIONS
    assert np.std([build.answered(rng).mean() for _ in range(400)]) > 1.15 * alone


def test_a_history_of_starts_shows_how_much_they_differ() -> None:
    rng = np.random.default_rng(1)
    build = answer_worlds.starts(rng, QUESTIONS, 0.0).baseline
    between = accuracy.history(rng, build, 200)
    assert np.sqrt(between.part) == pytest.approx(answer_worlds.BETWEEN_STARTS, rel=0.15)
    assert (between.freedom, between.runs) == (199, 200)


@pytest.mark.parametrize("world", speed_worlds.WORLDS)
def test_a_world_of_loads_has_its_noise_and_no_slowdown_of_its_own(world: str) -> None:
    rng, machine = np.random.default_rng(1), speed_worlds.WORLDS[world].machine
    apart = [float((machine.started(rng, 10) - machine.started(rng, 10)).mean()) for _ in range(2000)]
    assert np.mean(apart) == pytest.approx(0, abs=0.001)
    repeats = np.concatenate([machine.own(rng, 10) for _ in range(500)])
    assert repeats.std() == pytest.approx({"neighbours": 0.018, "twelve gates": 0.015}.get(world, 0.01), rel=0.1)
