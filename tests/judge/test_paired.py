"""The paired comparison, on answers that are made up by a stated chance."""

import math

import numpy as np
import pytest
from scipy import stats

from infra.bench import accuracy, worlds
from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.sequential import Levels, Sides
from vllm_qualify.judge.paired import Answers, Loss, information, interval_of, loss, noise, repetitions_for

QUESTIONS = 1319
MARGIN = 0.0075


def answers(right: list[int], asked: list[int]) -> Answers:
    """Of questions whose answers are right or wrong."""
    return Answers(np.array(right, dtype=float), np.array(right, dtype=float), np.array(asked))


def test_noise_is_half_the_rate_at_which_two_repetitions_differ() -> None:
    """Of 1,000 questions, each asked twice, 40 are answered once right and once wrong."""
    found = answers([2] * 900 + [0] * 60 + [1] * 40, [2] * 1000)
    assert found.noise == pytest.approx(0.04 / 2, abs=0.001)


def test_no_difference_in_a_few_answers_is_not_none_at_all() -> None:
    assert answers([2] * 100, [2] * 100).noise == pytest.approx(0.005)
    assert math.isnan(answers([1] * 100, [1] * 100).noise)


def test_scores_between_right_and_wrong_scatter_less() -> None:
    """Half of the questions score .5 and 1 in two repetitions: a variance of 1/8 within each."""
    halves = Answers(np.full(1000, 1.5), np.full(1000, 1.25), np.full(1000, 2))
    assert halves.noise == pytest.approx(1 / 8, abs=0.001)
    assert halves.mean.mean() == 0.75


def test_a_loss_is_the_mean_of_the_differences_and_its_error_is_the_noise() -> None:
    """The baseline of 5 repetitions, the candidate of 2, every question asked: nothing is left of sampling."""
    baseline = answers([5] * 900 + [0] * 60 + [3] * 40, [5] * 1000)
    candidate = answers([2] * 880 + [0] * 80 + [1] * 40, [2] * 1000)
    found = loss(baseline, candidate, MARGIN)
    assert found.value == pytest.approx((900 + 40 * 0.6 - 880 - 40 * 0.5) / 1000)
    assert found.error == pytest.approx(math.sqrt(noise(baseline, candidate) * (1 / 5 + 1 / 2) / 1000))
    assert found.asked == 2000


def test_questions_that_were_not_asked_add_to_the_error() -> None:
    baseline = answers([5] * 900 + [3] * 100, [5] * 1000)
    half = answers([1] * 500 + [0] * 500, [1] * 500 + [0] * 500)
    whole = answers([1] * 1000, [1] * 1000)
    assert loss(baseline, half, MARGIN).error > math.sqrt(2) * loss(baseline, whole, MARGIN).error


def test_a_candidate_that_is_noisier_than_its_baseline_is_judged_by_its_own_noise() -> None:
    calm = answers([5] * 1000, [5] * 1000)
    noisy = answers([1] * 200 + [2] * 800, [2] * 1000)
    assert noise(calm, noisy) == noisy.noise
    assert noise(calm, answers([1] * 1000, [1] * 1000)) == calm.noise


def test_builds_that_were_asked_equally_often_tell_of_the_noise_together() -> None:
    noisy, calm = answers([1] * 200 + [2] * 800, [2] * 1000), answers([2] * 1000, [2] * 1000)
    assert noise(noisy, calm) == pytest.approx((noisy.noise + calm.noise) / 2)


@pytest.mark.parametrize(
    ("baseline", "candidate", "told"),
    [
        (answers([1, 0, 1], [1, 1, 1]), answers([1, 1, 1], [1, 1, 1]), "the noise is unknown"),
        (answers([2, 0, 2], [2, 2, 2]), answers([1, 0, 0], [1, 0, 0]), "fewer than two questions in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(baseline: Answers, candidate: Answers, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        loss(baseline, candidate, MARGIN)


@pytest.mark.parametrize(("below", "above"), [(0.05, 0.05), (0.0125, 0.05)])
def test_an_interval_is_as_wide_as_its_sides_ask(below: float, above: float) -> None:
    found = interval_of(Loss(0.004, 0.002, QUESTIONS), Sides(below, above))
    assert found.lower == pytest.approx(stats.norm.ppf(below, 0.004, 0.002))
    assert found.upper == pytest.approx(stats.norm.isf(above, 0.004, 0.002))


def test_no_loss_lies_outside_of_all_questions() -> None:
    assert interval_of(Loss(0.5, 1.0, 2), Sides(0.01, 0.01)) == Interval(lower=-1, upper=1)


def test_information_rises_with_each_block_and_is_that_of_the_loss() -> None:
    """After whole repetitions it is one over the variance that `loss` finds, in units of one answer's over the questions."""
    looks = list(range(330, 5 * QUESTIONS + 1, 330))
    known = information(looks, QUESTIONS, 5)
    assert known == sorted(set(known))
    assert information([2 * 1000], 1000, 5)[0] == pytest.approx(1 / (1 / 5 + 1 / 2))
    baseline = answers([5] * 900 + [0] * 60 + [3] * 40, [5] * 1000)
    candidate = answers([2] * 880 + [0] * 80 + [1] * 40, [2] * 1000)
    variance = noise(baseline, candidate) / information([2000], 1000, 5)[0] / 1000
    assert loss(baseline, candidate, MARGIN).error ** 2 == pytest.approx(variance)


def test_the_repetitions_follow_from_noise_and_margin() -> None:
    """3 % flips on gsm8k and a margin of 0.8 points: 6. As few questions as 250 need as many answers in all."""
    assert repetitions_for(0.008, 0.015, QUESTIONS) == 6
    assert repetitions_for(0.008, 0.025, QUESTIONS) == 9
    assert repetitions_for(0.008, 0.005, QUESTIONS) == 2
    assert repetitions_for(0.008, 0.0, QUESTIONS) == 2
    assert repetitions_for(0.008, 0.015, 250) * 250 == pytest.approx(5 * QUESTIONS, rel=0.05)


def rates(flips: float, lost: float, runs: int = 300) -> dict[str, float]:
    """How comparisons with a margin of 0.8 points end, and the share of the allowed answers that they took."""
    rng, setting = np.random.default_rng(1), accuracy.Setting(QUESTIONS, flips, lost, 0.008)
    chances = (worlds.builds(rng, QUESTIONS, flips, lost) for _ in range(runs))
    ended = [accuracy.compared(rng, setting, pair, {"one": Levels()})["paired, one"] for pair in chances]
    words = [one.verdict for one in ended]
    share = sum(one.asked / one.allowed for one in ended) / runs
    return {word: words.count(word) / runs for word in ("pass", "fail", "inconclusive")} | {"share": share}


def test_error_rates_and_questions_at_three_percent_flips() -> None:
    """The bounds are the issue's, with room for the simulation's own noise; `make bench-gates` runs it with many more."""
    same, past, lost = rates(0.03, 0.0), rates(0.03, 0.0084), rates(0.03, 0.015)
    assert same["fail"] == 0
    assert same["inconclusive"] <= 0.07
    assert same["share"] <= 0.5
    assert past["pass"] <= 0.07
    assert lost["fail"] >= 0.8


@pytest.mark.parametrize("changed", [0.0, 0.02, 0.04, 0.08])
def test_builds_that_always_answer_alike_are_decided(changed: float) -> None:
    """Asked once, 95 of 100 such releases without a loss stayed undecided where 4 % of the answers had changed."""
    rng = np.random.default_rng(1)
    verdicts, asked = {}, 0
    for lost in (0.0, 0.0084, 0.015):
        ended = [_steady(rng, changed, lost) for _ in range(40)]
        verdicts[lost] = [one.verdict for one in ended]
        asked += sum(one.asked for one in ended) if lost == 0 else 0
    assert set(verdicts[0.0]) == {"pass"}
    assert "pass" not in verdicts[0.0084]
    assert set(verdicts[0.015]) == {"fail"}
    assert asked <= 1.25 * 40 * QUESTIONS


def _steady(rng: np.random.Generator, changed: float, lost: float) -> accuracy.Ended:
    chances = worlds.steady_builds(rng, QUESTIONS, changed, lost)
    setting = accuracy.Setting(QUESTIONS, 0.0, lost, 0.008)
    return accuracy.compared(rng, setting, chances, {"one": Levels()})["paired, one"]
