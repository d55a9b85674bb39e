"""`make bench-gates`: its plans are the recipes', its worlds are what they say, and the peers' gates are theirs."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from infra.bench import accuracy, answer_worlds, former, gates, peers, plans, price, simulation, speed, speed_worlds, worlds
from infra.bench.answer_worlds import Build, BuildPair
from infra.bench.ended import Seen, known_from
from infra.bench.plans import AnswerPlan, RepeatPlan, Task
from infra.bench.simulation import Rates, Setting
from infra.bench.speed_worlds import LoadWorld, Machine
from vllm_qualify.evidence.accuracy.blocks import BLOCKS
from vllm_qualify.evidence.starts import LEAST
from vllm_qualify.judge.start_means import StartMeans

HERE = Path(__file__).parent.parent
QUESTIONS = 1319
KEYS = {"worlds", "pass_past_margin", "fail_no_loss", "undecided_no_loss", "caught_1_5_points", "caught_5_percent_slowdown"}
KEYS |= {"price_ratio", "not_kept", "called_unsteady"}
GSM8K = AnswerPlan(8, (Task(QUESTIONS, 10, 0.0075),), 0.04, 0.0125)
IN_TURNS = RepeatPlan(8, 3, 10, (0.025, 0.025), 0.04, 0.0125)
QUIET = LoadWorld(Machine(speed_worlds.normal(1e-4)))
RATES = Rates(100, 1.0, 0.0, 0.0, 0.0, 2.0, 2.0, 10.0, 8.0)


@pytest.mark.thorough
def test_the_last_line_has_the_figures() -> None:
    """How good they are is for a run with many releases to say."""
    command = [sys.executable, "-m", "infra.bench.gates", "--runs", "1", "--seed", "7"]
    only = ["--only", "answers: flips 1", "--only", "loads: noise 0.5"]
    messages = subprocess.run([*command, *only], cwd=HERE, capture_output=True, text=True, check=True).stdout.splitlines()
    figures = json.loads(messages[-1])
    assert figures.keys() == KEYS
    assert figures["worlds"] == 2
    assert all(any(line.startswith(gate) for line in messages) for gate in (*peers.ACCURACY, "answers: flips", "loads: noise"))


@pytest.mark.thorough
def test_one_seed_gives_the_same_releases_whatever_the_processes() -> None:
    wanted = [Setting("answers", "flips 1 %", 1, 0.015, GSM8K), Setting("loads", "noise 0.5 %", 1, 0.05, IN_TURNS)]
    first = simulation.simulate(wanted, [60, 4], seed=3, processes=1)
    again = simulation.simulate(wanted, [60, 4], seed=3, processes=2)
    assert str(first) == str(again)
    assert str(first) != str(simulation.simulate(wanted, [60, 4], seed=4, processes=1))


def test_there_are_at_least_thirty_worlds_in_every_store() -> None:
    wanted = simulation.settings()
    assert len({gates.world_of(setting).partition(", plan")[0] for setting in wanted}) >= 30
    assert {setting.store for setting in wanted} == {0, 1, 2, 5}


def test_the_plans_are_those_of_the_recipes() -> None:
    """As the README's example and the catalog have them."""
    readme = [plan for plan, recipe in plans.repeat_plans().items() if recipe == "qwen2.5-7b"]
    assert [(plan.starts, plan.repeats, plan.most_repeats, plan.margins) for plan in readme] == [(16, 3, 10, (0.025,))]
    catalog = [plan for plan, recipe in plans.answer_plans().items() if recipe == "gpt-oss-120b"]
    assert [[(task.questions, task.margin) for task in plan.tasks] for plan in catalog] == [[(1319, 0.0075), (1240, 0.02)]]
    # Six gates with noise share 5 %.
    assert catalog[0].false_fail == pytest.approx(0.05 / 6)


def test_builds_that_always_answer_alike_are_asked_twice_and_started_three_times() -> None:
    """No answer differs: the candidate passes on its first start and has two more; the baseline is asked 2 + 1 + 1 times."""
    same = Build(np.repeat([1.0, 0.0], [1200, 119]))
    ended = accuracy.release(np.random.default_rng(1), GSM8K, [BuildPair(same, same)])
    assert (ended.verdict, ended.starts, ended.baseline_asked) == ("pass", 3, 4)
    lost = Build(np.repeat([1.0, 0.0], [1100, 219]))
    failed = accuracy.release(np.random.default_rng(1), GSM8K, [BuildPair(same, lost)])
    assert (failed.verdict, failed.starts) == ("fail", 1)


def test_a_history_of_equal_starts_does_not_make_one_start_enough() -> None:
    same = Build(np.repeat([1.0, 0.0], [1200, 119]))
    seen = [Seen(build=StartMeans(label="score", means=[0.9, 0.9 + 1e-6], noises=[1e-12, 1e-12]))]
    (known,) = known_from([seen] * 5, 1, one_build=False)
    assert known.start is not None
    assert (known.start.freedom, len(known.start.runs), known.day) == (5, 5, None)
    assert known.start.variance == pytest.approx(5e-13)
    ended = accuracy.release(np.random.default_rng(1), GSM8K, [BuildPair(same, same)], [known.start])
    assert (ended.verdict, ended.starts) == ("pass", 3)


def test_quiet_loads_are_decided_by_few_starts_of_few_repeats() -> None:
    rng = np.random.default_rng(1)
    same = speed.release(rng, IN_TURNS, QUIET, 0.0)
    assert (same.verdict, same.asked) == ("pass", 3 + 2 * (same.starts - 1))
    assert same.starts == 3
    slower = speed.release(rng, IN_TURNS, QUIET, 0.5)
    assert (slower.verdict, slower.starts, slower.asked) == ("fail", 1, 3)
    seen = same.seen[0]
    assert seen is not None
    assert seen.pair is not None
    assert seen.pair.repeats == [3] + [2] * (same.starts - 1)
    # What both sides of a pair have cancels.
    assert speed.release(np.random.default_rng(1), IN_TURNS, QUIET._replace(shared=0.3), 0.0).verdict == "pass"


def test_noisy_loads_have_more_repeats_up_to_what_the_plan_allows_and_end_where_no_start_would_help() -> None:
    """By 30 % of noise, a margin of 2.5 % needs thousands of repeats."""
    noisy = LoadWorld(Machine(speed_worlds.normal(0.3)))
    ended = [speed.release(np.random.default_rng(seed), IN_TURNS, noisy, 0.0) for seed in range(5)]
    assert sum(each.verdict == "inconclusive" for each in ended) >= 4
    assert all(each.asked == 10 + 5 * (each.starts - 1) for each in ended)
    assert min(each.starts for each in ended) >= LEAST
    assert sum(each.starts < IN_TURNS.starts for each in ended) >= 3


def test_a_candidate_that_is_cold_after_each_start_is_unsteady_and_does_not_fail() -> None:
    cold = speed_worlds.WORLDS["only the candidate warms up"]
    ended = [speed.release(np.random.default_rng(seed), IN_TURNS, cold, 0.0) for seed in range(10)]
    assert {each.verdict for each in ended} == {"invalid"}


def test_the_price_is_that_of_starts_answers_and_repeats() -> None:
    assert price.of_answers(2, 3 * 1319) == pytest.approx((2 * 54 + 3 * 40) / 60)
    assert price.of_loads(3, 7, in_turns=True) == pytest.approx((3 * 54 + 7 * 120) / 60)
    assert price.of_loads(3, 7, in_turns=False) == pytest.approx((3 * 54 + 7 * 60) / 60)
    # Quiet loads were decided by five repeats, and three more on a second start; slower ones by five alone.
    rng = np.random.default_rng(1)
    assert former.minutes_of_loads(rng, IN_TURNS, QUIET, 0.0) == pytest.approx((2 * 54 + 8 * 120) / 60)
    assert former.minutes_of_loads(rng, IN_TURNS, QUIET, 0.5) == pytest.approx((54 + 5 * 120) / 60)


def test_the_worst_row_counts_and_a_world_that_misses_a_promise_is_named() -> None:
    same, past, twice = (Setting("answers", "a", 0, lost, GSM8K) for lost in (0.0, 0.0076, 0.015))
    other = Setting("loads", "b", 5, 0.0251, IN_TURNS)
    results = {
        same: RATES._replace(passed=0.95, undecided=0.05),
        past: RATES._replace(passed=0.03, undecided=0.97),
        twice: RATES._replace(passed=0.0, failed=0.9, undecided=0.1),
        other: RATES._replace(passed=0.3, undecided=0.7, former=math.nan),
    }
    figures = gates.figures(results)
    expected = {"worlds": 2, "pass_past_margin": 0.03, "undecided_no_loss": 0.05, "caught_1_5_points": 0.9}
    assert {name: figures[name] for name in expected} == expected
    assert figures["not_kept"] == [{"world": "loads: b", "figure": "pass_past_margin", "store": 5, "value": 0.3}]
    assert figures["price_ratio"] == 1.25


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


def test_tensorrt_llms_threshold_is_the_published_one_and_wilsons_lower_bound_is_scipys() -> None:
    assert peers.tensorrt_llm_threshold(91.0, QUESTIONS) == pytest.approx(91 - 3.20, abs=0.005)
    assert peers.tensorrt_llm_visible(QUESTIONS) == pytest.approx(4.84, abs=0.005)
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


def test_looks_are_after_each_block_of_the_products_steps() -> None:
    looks = accuracy.planned_looks(Task(QUESTIONS, 3, 0.0075))
    assert len(looks) == 3 * BLOCKS
    assert looks[BLOCKS - 1 :: BLOCKS] == (QUESTIONS, 2 * QUESTIONS, 3 * QUESTIONS)


@pytest.mark.parametrize("lost", [0.0, 0.0076, 0.015])
@pytest.mark.parametrize("world", sorted(set(answer_worlds.WORLDS) - {"lost after a fifth"}))
def test_a_world_of_answers_loses_just_what_it_says(world: str, lost: float) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        baseline, candidate = answer_worlds.WORLDS[world](rng, QUESTIONS, lost)
        # Builds that always answer alike lose whole questions.
        rounded = 0.5 / QUESTIONS if world == "deterministic" else 1e-5
        assert baseline.chance.mean() - candidate.chance.mean() == pytest.approx(lost, abs=rounded)
        for build in (baseline, candidate):
            assert ((build.chance > -1e-9) & (build.chance < 1 + 1e-9)).all()


def test_a_loss_after_a_fifth_is_that_of_the_first_repetition() -> None:
    rng = np.random.default_rng(1)
    baseline, candidate = answer_worlds.WORLDS["lost after a fifth"](rng, QUESTIONS, 0.015)
    first, before = rng.permutation(QUESTIONS)[: round(0.2 * QUESTIONS)], baseline.chance.mean()
    means = [candidate.answered(rng, first).mean() for _ in range(2000)]
    assert before - np.mean(means) == pytest.approx(0.015, abs=0.002)


def test_starts_shift_a_build_and_repetitions_shift_topics() -> None:
    rng = np.random.default_rng(1)
    build = answer_worlds.starts(answer_worlds.SHIFTED)(rng, QUESTIONS, 0.0).baseline
    means = [build.started(rng).chance.mean() for _ in range(400)]
    assert np.std(means) == pytest.approx(answer_worlds.SHIFTED, rel=0.15)
    build = answer_worlds.topics_noise(named=True)(rng, QUESTIONS, 0.0).baseline
    alone = np.sqrt((build.chance * (1 - build.chance)).sum()) / QUESTIONS
    assert np.std([build.answered(rng).mean() for _ in range(400)]) > 1.15 * alone


@pytest.mark.parametrize(
    "world", sorted(set(speed_worlds.WORLDS) - {"only the candidate warms up", "only the baseline warms up", "slow leak"})
)
def test_a_world_of_loads_is_slower_by_just_what_it_says(world: str) -> None:
    rng, of = np.random.default_rng(1), speed_worlds.WORLDS[world]
    pairs = [of.start(rng, 10, max(1, of.gates), 0.05) for _ in range(2000)]
    apart = [float((candidate[0] - baseline[0]).mean()) for candidate, baseline in pairs]
    assert np.mean(apart) == pytest.approx(math.log(1.05), abs=0.002)


def test_a_leak_is_its_slowdown_over_ten_repeats_and_a_cold_side_is_slow_at_first() -> None:
    rng, leak = np.random.default_rng(1), QUIET._replace(leaks=True)
    candidate, _ = leak.start(rng, 10, 1, 0.05)
    assert candidate[0].mean() == pytest.approx(math.log(1.05), abs=3e-4)
    assert candidate[0][-1] == pytest.approx(1.9 * math.log(1.05), abs=1e-3)
    _, baseline = QUIET._replace(cold=(0.0, 0.06)).start(rng, 10, 1, 0.0)
    assert baseline[0][:3] == pytest.approx([0.06, 0.06 * math.exp(-0.5), 0.06 * math.exp(-1)], abs=1e-3)
