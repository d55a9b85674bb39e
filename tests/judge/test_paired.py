"""The paired comparison, on answers that are made up by a stated chance."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from infra.bench import accuracy, answer_worlds, worlds
from infra.bench.plans import AnswerPlan, Task
from infra.bench.rare import TOGETHER, released
from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.sequential import Levels, Sides
from vllm_qualify.judge.between import NO_SPREAD, OF_ANSWERS, Repeated, RepetitionNoise, Spread, spread
from vllm_qualify.judge.paired import (
    Answers,
    Loss,
    Record,
    Starts,
    answers_by_question,
    information_share,
    interval_of,
    looks,
    loss,
    noise,
    repetitions_for,
)
from vllm_qualify.plan.cell import Between

QUESTIONS = 1319
MARGIN = 0.0075


def answers(right: list[int], asked: list[int]) -> Answers:
    """Of questions whose answers are right or wrong."""
    return Answers(np.array(right, dtype=float), np.array(right, dtype=float), np.array(asked))


def test_noise_is_half_the_rate_at_which_two_repetitions_differ() -> None:
    """Of 1,000 questions, each asked twice, 40 are answered once right and once wrong."""
    totals = answers([2] * 900 + [0] * 60 + [1] * 40, [2] * 1000)
    assert totals.noise == pytest.approx(0.04 / 2, abs=0.001)
    # No difference in a few answers is not none at all.
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
    difference = loss(baseline, candidate, MARGIN)
    assert difference.value == pytest.approx((900 + 40 * 0.6 - 880 - 40 * 0.5) / 1000)
    assert difference.error == pytest.approx(math.sqrt((baseline.noise / 5 + noise(baseline, candidate) / 2) / 1000))
    assert difference.asked == 2000


def test_questions_that_were_not_asked_add_to_the_error() -> None:
    baseline = answers([5] * 900 + [3] * 100, [5] * 1000)
    half = answers([1] * 500 + [0] * 500, [1] * 500 + [0] * 500)
    whole = answers([1] * 1000, [1] * 1000)
    assert loss(baseline, half, MARGIN).error > math.sqrt(2) * loss(baseline, whole, MARGIN).error


def test_a_candidate_that_is_noisier_than_its_baseline_is_judged_by_its_own_noise_and_others_by_that_of_both() -> None:
    noisy, calm = answers([1] * 200 + [2] * 800, [2] * 1000), answers([5] * 1000, [5] * 1000)
    assert noise(calm, noisy) == noisy.noise
    assert noise(calm, answers([1] * 1000, [1] * 1000)) == calm.noise
    as_often = answers([2] * 1000, [2] * 1000)
    assert noise(noisy, as_often) == pytest.approx((noisy.noise + as_often.noise) / 2)


@pytest.mark.parametrize(
    ("baseline", "candidate", "message"),
    [
        (answers([1, 0, 1], [1, 1, 1]), answers([1, 1, 1], [1, 1, 1]), "the noise is unknown"),
        (answers([2, 0, 2], [2, 2, 2]), answers([1, 0, 0], [1, 0, 0]), "fewer than two questions in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(baseline: Answers, candidate: Answers, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(baseline, candidate, MARGIN)


def make_loss(value: float, error: float, asked: int, spread: Spread = NO_SPREAD) -> Loss:
    return Loss(value, error, asked, spread, 1.0)


@pytest.mark.parametrize(("below", "above"), [(0.05, 0.05), (0.0125, 0.05)])
def test_an_interval_is_as_wide_as_its_sides_ask(below: float, above: float) -> None:
    interval = interval_of(make_loss(0.004, 0.002, QUESTIONS), Sides(below, above))
    assert interval.lower == pytest.approx(stats.norm.ppf(below, 0.004, 0.002))
    assert interval.upper == pytest.approx(stats.norm.isf(above, 0.004, 0.002))
    # No loss lies outside of all questions.
    assert interval_of(make_loss(0.5, 1.0, 2), Sides(0.01, 0.01)) == Interval(lower=-1, upper=1)


def record(scores: list[list[float]], starts: list[int] | None = None, topics: list[int] | None = None) -> Record:
    """Whole repetitions, each with the score of every question; by default all of one start."""
    questions = len(scores[0])
    repetitions = np.repeat(np.arange(len(scores)), questions)
    return Record(
        question=np.tile(np.arange(questions), len(scores)),
        score=np.array(scores, dtype=float).ravel(),
        repetition=repetitions,
        start=np.array([0] * len(scores) if starts is None else starts)[repetitions],
        questions=questions,
        topics=None if topics is None else np.array(topics),
    )


def test_a_record_is_summed_by_its_questions() -> None:
    answers = answers_by_question(record([[1, 0, 0.5], [1, 1, 0.5]]))
    assert answers.total.tolist() == [2, 1, 1]
    assert answers.squares.tolist() == [2, 1, 0.5]
    assert answers.asked.tolist() == [2, 2, 2]
    assert (answers.starts.weight, answers.start_means) == (1, [])
    assert answers_by_question(record([[1, 0, 0.5], [1, 1, 0.5]]).first_answers(4)).asked.tolist() == [2, 1, 1]


def test_the_means_of_starts_are_beside_that_of_all() -> None:
    """By hand: three starts of ten questions with 8, 9 and 7 right."""
    rows = [[1] * right + [0] * (10 - right) for right in (8, 9, 7)]
    answers = answers_by_question(record([[float(score) for score in row] for row in rows], starts=[0, 1, 2])).starts
    assert answers.weight == pytest.approx(1 / 3)
    assert answers.shifts == pytest.approx((0.0, 0.1, -0.1))
    assert answers.repeated == (1, 1, 1)


def test_a_start_that_was_asked_twice_has_half_of_the_noise() -> None:
    scores = [[1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 1.0]]
    answers = answers_by_question(record(scores, starts=[0, 0, 1]))
    first, second = answers.start_means
    assert first.mean - second.mean == pytest.approx(7 / 8 - 2 / 4)
    assert (first.noise, second.noise) == pytest.approx((answers.noise / 8, answers.noise / 4))


def test_a_start_that_was_asked_only_some_questions_weighs_less_and_shows_no_mean() -> None:
    """Of two starts, the second had 4 of 10 questions: shares of 10 and 4 of 14 answers."""
    answers = answers_by_question(record([[1.0] * 10, [0.0] * 10], starts=[0, 1]).first_answers(14)).starts
    assert answers.weight == pytest.approx((10 / 14) ** 2 + (4 / 14) ** 2)
    assert answers.shifts == ()


def test_what_a_topics_answers_share_counts_together() -> None:
    """By hand: of two topics of two questions, one is right in the first of two repetitions and wrong in the second.

    Each of its four answers is 0.5 off, or 0.5 · √2 for the answers' part in their mean. In a repetition both are off together,
    by √2. The four squares are 2, 2, 0 and 0, over 8 answers: 0.5. Taken alone, the variance is (2 · 0.5 + 0.5) / 4.
    """
    both = [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]]
    alone, together = answers_by_question(record(both)), answers_by_question(record(both, topics=[0, 0, 1, 1]))
    assert alone.noise == pytest.approx(0.375)
    assert together.shared == pytest.approx(0.5)
    assert together.noise == pytest.approx(0.5)


def test_without_topics_a_repetition_is_one_draw() -> None:
    """By hand: of ten questions 8, 9 and 7 are right in a start's three repetitions, so that the variance of the means is .01.

    In another start 6 and 8: .02, with one degree of freedom. Together it is (2 · .01 + .02) / 3.
    """
    rows = [[1.0] * right + [0.0] * (10 - right) for right in (8, 9, 7, 6, 8)]
    one, two = answers_by_question(record(rows[:3])), answers_by_question(record(rows, starts=[0, 0, 0, 1, 1]))
    assert tuple(one.repeated) == pytest.approx((1 / 3, 0.01, 2))
    assert tuple(two.repeated) == pytest.approx((1 / 5, 0.04 / 3, 3))
    (part,) = one.together
    assert (part.variance, part.noise, part.freedom) == pytest.approx((0.01, one.noise / 10, 2))


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param(record([[1.0] * 10, [0.0] * 10]).first_answers(18), id="a part of a second one"),
        pytest.param(record([[1.0] * 10, [0.0] * 10], starts=[0, 1]), id="one of each start"),
        pytest.param(record([[1.0] * 10, [0.0] * 10], topics=[0, 1] * 5), id="topics are named"),
    ],
)
def test_what_repetitions_have_in_common_is_not_known_of(answers: Record) -> None:
    assert answers_by_question(answers).together == []


def test_repetitions_add_their_variance_by_their_numbers() -> None:
    """The means of both builds' repetitions have 0.03 and 0.01, with 3 degrees of freedom and 1; by hand 0.025 of both."""
    noisy = answers([3] * 100, [4] * 100)
    still, other = (replace(noisy, repeated=Repeated(*each)) for each in ((1 / 4, 0.03, 3), (1 / 2, 0.01, 1)))
    difference = loss(still, other, MARGIN, over_starts=False)
    assert difference.together is not None
    assert loss(still, other, MARGIN).together is None
    assert difference.together.weight == pytest.approx(3 / 4)
    assert (difference.together.between.variance, difference.together.between.freedom) == pytest.approx((0.025, 4))
    alone = difference._replace(together=None)
    assert difference.reach(0.04) > 1.5 * alone.reach(0.04)
    assert alone.reach(0.04) == pytest.approx(-stats.norm.ppf(0.04) * alone.error)


@pytest.mark.parametrize("freedom", [1.0, 4.0])
def test_with_no_other_noise_repetitions_have_the_bounds_of_students_t(freedom: float) -> None:
    part = RepetitionNoise(0.5, Between(variance=2e-4, noise=0.0, freedom=freedom))
    assert part.reach(0.04, 0.0) == pytest.approx(-stats.t.ppf(0.04, freedom) * 1e-2, rel=0.02)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["30 topics, 1 point", "each repetition, 0.3 points"])
def test_a_loss_is_no_smaller_where_answers_change_together(name: str) -> None:
    rng, releases = np.random.default_rng(4), 150
    passed = sum(released(rng, TOGETHER[name], 0.0076).verdict == "pass" for _ in range(releases))
    # 4 % are meant, 5 % promised; before, 11 to 15 % passed. There is room for the chance of so many releases.
    assert passed / releases < 0.05 + 0.03


def test_topics_whose_answers_differ_alone_add_nothing() -> None:
    rng = np.random.default_rng(1)
    chance = rng.random(600)
    scores = [(rng.random(600) < chance).astype(float).tolist() for _ in range(40)]
    answers = answers_by_question(record(scores, topics=[place // 20 for place in range(600)]))
    assert answers.shared == pytest.approx(answers_by_question(record(scores)).noise, rel=0.1)


def of_starts(*shifts: float) -> Answers:
    """Questions that are always right, of starts with these shifts."""
    totals = answers([4] * 1000, [4] * 1000)
    return replace(totals, starts=Starts(1 / len(shifts), len(shifts), shifts, (1.0,) * len(shifts)))


def test_starts_add_their_variance_by_their_numbers() -> None:
    """4 and 2 starts: a quarter and a half of it."""
    difference = loss(of_starts(0, 0, 0.01, -0.01), of_starts(0.01, -0.01), MARGIN)
    assert difference.weight == pytest.approx(1 / 4 + 1 / 2)
    calm = loss(of_starts(0, 0, 0, 0), of_starts(0, 0), MARGIN)
    assert difference.reach(0.05) > 2.5 * calm.reach(0.05)


def test_what_is_not_seen_of_starts_is_assumed_unless_they_are_left_out() -> None:
    one = answers([4] * 1000, [4] * 1000)
    difference, alone = loss(one, one, MARGIN), loss(one, one, MARGIN, over_starts=False)
    assert difference.weight == 2
    assert difference.reach(0.05) > math.sqrt(2) * OF_ANSWERS.scale
    assert alone.reach(0.05) == pytest.approx(alone.error * stats.norm.isf(0.05), rel=1e-4)
    calm = Between(variance=1e-10, noise=0.0, freedom=20.0)
    assert loss(one, one, MARGIN, calm).reach(0.05) < difference.reach(0.05)


def test_a_loss_is_known_enough_when_the_margin_is_so_many_errors() -> None:
    twice, once = answers([2] * 1000, [2] * 1000), answers([1] * 1000, [1] * 1000)
    error = MARGIN / (stats.norm.isf(0.03 / 2) + stats.norm.isf(0.02))
    assert information_share(make_loss(0.5, error, 2000), twice, MARGIN, Levels()) == pytest.approx(1, rel=1e-4)
    assert information_share(make_loss(-0.5, 2 * error, 2000), twice, MARGIN, Levels()) == pytest.approx(1 / 4, rel=1e-4)
    assert information_share(make_loss(0.0, error / 9, 1000), once, MARGIN, Levels()) < 1
    assert information_share(make_loss(0.0, error, 2000, spread(OF_ANSWERS, [])), twice, MARGIN, Levels()) < 0.9


def test_looking_ends_when_enough_is_known() -> None:
    """Builds that always answer alike, with a loss near the margin: after one repetition, since more would hardly decide."""
    baseline, half = answers([4] * 1000, [4] * 1000), [1] * 500 + [0] * 500
    lost = [0] * 7 + [1] * 993
    growing = [
        answers([0] * 3 + [1] * 497 + [0] * 500, half),
        answers(lost, [1] * 1000),
        answers([2 * right for right in lost], [2] * 1000),
    ]
    fitted = list(looks(baseline, growing, MARGIN, Levels(), most=20, over_starts=False))
    assert [look.is_last for look in fitted] == [False, True, True]
    assert all(look.interval.lower <= MARGIN <= look.interval.upper for look in fitted)
    assert [look.is_last for look in looks(baseline, growing[:2], MARGIN, Levels(), most=2, over_starts=False)] == [False, True]


def test_the_repetitions_follow_from_noise_margin_and_levels() -> None:
    """3 % flips on gsm8k and a margin of 0.8 points: by hand 2 · 0.015 · ((2.170 + 1.645) / 0.008)² / 1319 = 5.2."""
    assert repetitions_for(0.008, 0.015, QUESTIONS, Levels()) == 6
    assert repetitions_for(0.008, 0.025, QUESTIONS, Levels()) == 9
    assert repetitions_for(0.008, 0.005, QUESTIONS, Levels()) == 2
    assert repetitions_for(0.008, 0.0, QUESTIONS, Levels()) == 2
    assert repetitions_for(0.008, 0.015, 250, Levels()) * 250 == pytest.approx(5.2 * QUESTIONS, rel=0.05)
    # Eight gates share the chance with which a release that lost nothing fails, and none of what a margin needs.
    assert repetitions_for(0.008, 0.015, QUESTIONS, Levels(false_fail=0.05 / 8)) == 6


@given(data=st.data(), questions=st.integers(2, 30), repetitions=st.integers(2, 6))
def test_a_loss_does_not_depend_on_the_order_of_the_questions(data: st.DataObject, questions: int, repetitions: int) -> None:
    def scores() -> list[list[float]]:
        row = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=questions, max_size=questions)
        return data.draw(st.lists(row, min_size=repetitions, max_size=repetitions))

    both, starts, topics = [scores(), scores()], list(range(repetitions)), [place // 2 for place in range(questions)]
    order = data.draw(st.permutations(range(questions)))
    moved = [[[row[place] for place in order] for row in one] for one in both]

    def loss_of(builds: list[list[list[float]]], of: list[int]) -> Loss:
        baseline, candidate = (answers_by_question(record(rows, starts, of)) for rows in builds)
        return loss(baseline, candidate, MARGIN)

    one, other = loss_of(both, topics), loss_of(moved, [topics[place] for place in order])
    assert one.value == pytest.approx(other.value)
    assert one.reach(0.05) == pytest.approx(other.reach(0.05), rel=1e-6)


ONE_START = AnswerPlan(1, (Task(QUESTIONS, 10, 0.008),), Levels().false_pass, Levels().false_fail)


def rates(flips: float, lost: float, runs: int = 300) -> dict[str, float]:
    """How comparisons with a margin of 0.8 points end, and the share of the allowed answers that they took."""
    rng, world = np.random.default_rng(1), answer_worlds.usual(flips)
    ended = [accuracy.of_one_start(rng, ONE_START, world(rng, QUESTIONS, lost)) for _ in range(runs)]
    words = [one.verdict for one in ended]
    share = sum(one.asked for one in ended) / runs / (ONE_START.tasks[0].most_repetitions * QUESTIONS)
    return {word: words.count(word) / runs for word in ("pass", "fail", "inconclusive")} | {"share": share}


@pytest.mark.thorough
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
        pairs = (map(answer_worlds.Build, worlds.steady_builds(rng, QUESTIONS, changed, lost)) for _ in range(40))
        ended = [accuracy.of_one_start(rng, ONE_START, answer_worlds.BuildPair(*builds)) for builds in pairs]
        verdicts[lost] = [one.verdict for one in ended]
        asked += sum(one.asked for one in ended) if lost == 0 else 0
    assert set(verdicts[0.0]) == {"pass"}
    assert verdicts[0.0084].count("pass") <= 0.05 * 40
    assert set(verdicts[0.015]) == {"fail"}
    assert asked <= 1.25 * 40 * QUESTIONS
