"""The tokens of a candidate's answers beside its baseline's: what is longer is found, and what is not known is no number."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.builders.comparisons import (
    AVAILABLE,
    BASELINE,
    CANDIDATE,
    QUESTIONS,
    RUN,
    SETTINGS,
    against,
    all_of,
    ask,
    baseline_task,
    cell_plan,
    keep_baseline,
    loss_gate,
    reason,
    task_plan,
)
from tests.lm_eval_files import Answering, Asked, Reply
from vllm_qualify.evidence.accuracy.blocks import BLOCKS
from vllm_qualify.evidence.accuracy.thinking import REPLIES
from vllm_qualify.evidence.measurement import Interval, Measurement
from vllm_qualify.evidence.sequential import Sides, sides_of
from vllm_qualify.judge.compare.enough import not_established, unusable_baseline
from vllm_qualify.judge.compare.noise import FIRST_STARTS, rare_changes, share_unseen
from vllm_qualify.judge.compare.settings import task_differs
from vllm_qualify.judge.compare.tokens import worsening
from vllm_qualify.judge.expectations import judge
from vllm_qualify.judge.stopping import accuracy_decided
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import Gate, gate_of
from vllm_qualify.recipe.sampling import Sampling

METRIC = "output_tok_per_answer"
AT = Sides(0.05, 0.04)
OWN = Measurement(metric=METRIC, task="gsm8k", value=70.0, unit="tok", sample_count=40, source="made up")


def gate(max_worsening: float = 0.1) -> Gate:
    return gate_of(metric=METRIC, task="gsm8k", max_worsening=max_worsening, unit="fraction")


def long(times: float = 1.0, length: int = 100) -> Answering:
    """Answers with 50 to 89 tokens, by the question, or so many times that."""
    return lambda question, _: Reply(1.0, length, tokens=round(times * (50 + QUESTIONS.index(question))))


def compare_tokens(plan: CellPlan, evidence: Path) -> Measurement:
    (row,) = (row for row in all_of(plan, evidence) if row.metric == METRIC)
    return row


def interval_of(theirs: Sequence[float], ours: Sequence[float], at: Sides = AT) -> Interval:
    _, interval = worsening(theirs, ours, at)
    assert interval is not None
    return interval


def verdict(evidence: Path, bound: float = 0.1) -> str:
    plan = cell_plan([gate(bound)])
    return judge(plan.judged_gates, [compare_tokens(plan, evidence)], "one").verdict


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up pages of the server have no histogram of tokens: the mean itself has its own tests."""
    monkeypatch.setattr("vllm_qualify.evidence.accuracy.measurements._measure_tokens", lambda *_: OWN)


@pytest.mark.parametrize(("times", "expected"), [(1.0, "pass"), (1.5, "fail"), (0.5, "pass")])
def test_longer_answers_are_found(times: float, expected: str, evidence: Path) -> None:
    keep_baseline(evidence, long())
    ask(evidence, long(times))
    row = compare_tokens(cell_plan([gate()]), evidence)
    assert row.value == pytest.approx(times - 1, abs=0.01)
    assert (row.unit, row.against, row.sample_count) == ("fraction", RUN, 40)
    assert row.label == "output_tok_per_answer (gsm8k) against the baseline"
    assert all((evidence / path).is_file() for path in row.traced_to)
    assert verdict(evidence) == expected
    # By hand: 0.916 ** 40 is 3 %.
    unseen = "a change that hits fewer than 8.4 % of the questions, which 40 cannot show: 80 would show one that hits 4.3 %"
    assert row.not_in_interval == [FIRST_STARTS, unseen]


def test_a_few_answers_that_are_much_longer_leave_it_open_and_no_question_is_asked_again_for_it(evidence: Path) -> None:
    """40 times 69.5 tokens, and the first has 500 more: 1.18 times as many. Other questions could have none that is longer."""
    plan, usual = cell_plan([gate()]), long()
    keep_baseline(evidence, usual)
    ask(evidence, lambda question, _: Reply(1.0, tokens=550) if question == QUESTIONS[0] else usual(question, 1))
    assert compare_tokens(plan, evidence).value == pytest.approx(500 / 2780)
    assert verdict(evidence) == "inconclusive"
    assert accuracy_decided(plan, evidence, plan.accuracy[0])


@pytest.mark.parametrize(("samples", "value"), [(1, 0.05), (2, 0.1)])
def test_a_question_counts_by_the_mean_of_the_answers_that_are_wanted(samples: int, value: float, evidence: Path) -> None:
    """What is asked beyond that, for the sake of a comparison of scores, would be a further look."""
    sampled = SETTINGS.model_copy(update={"sampling": Sampling(temperature=0.7), "samples_per_question": samples})
    config = {"generation_kwargs": {"temperature": 0.7}}
    task = task_plan(sampled)
    then = Asked(baseline_task(sampled), AVAILABLE, config=config)
    keep_baseline(evidence, lambda _, repetition: Reply(1.0, tokens=(80, 100, 120)[repetition - 1]), then)
    now = Asked(task, AVAILABLE, config=config)
    ask(evidence, lambda _, repetition: Reply(1.0, tokens=(105, 115, 500)[repetition - 1]), 3 * BLOCKS, now)
    row = compare_tokens(cell_plan([gate()], accuracy=[task]), evidence)
    assert row.value == pytest.approx(value)
    assert row.sample_count == 40
    assert row.interval is not None


def test_until_all_were_asked_nothing_is_decided(evidence: Path) -> None:
    keep_baseline(evidence, long())
    ask(evidence, long(1.5), steps=2)
    plan = cell_plan([gate()])
    row = compare_tokens(plan, evidence)
    assert row.value == pytest.approx(0.5, abs=0.01)
    assert (row.sample_count, row.interval) == (16, None)
    assert not accuracy_decided(plan, evidence, plan.accuracy[0])


# --- What is not known


def test_an_answer_whose_tokens_were_not_kept_is_no_answer_of_0_tokens(evidence: Path) -> None:
    keep_baseline(evidence, long())
    path = ask(evidence, long(0.5)) / "r1-b2" / REPLIES
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    message = reason(compare_tokens(cell_plan([gate()]), evidence))
    assert "of 1 of 40 answers it was not kept how many tokens they have" in message
    assert verdict(evidence) == "invalid"


def test_a_reply_more_than_was_asked_for_is_not_taken_for_the_answers(evidence: Path) -> None:
    """An attack: a short reply before the true one, to the same prompt."""
    keep_baseline(evidence, long())
    path = ask(evidence, long(2.0)) / "r1-b2" / REPLIES
    first = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps(first | {"output_tok": 1}) + "\n" + path.read_text())
    assert "of 1 of 40 answers" in reason(compare_tokens(cell_plan([gate()]), evidence))


@pytest.mark.parametrize("tokens", [-1, 1.5, "9", True])
def test_a_number_of_tokens_that_is_none_spoils_the_evidence(tokens: object, evidence: Path) -> None:
    keep_baseline(evidence, long())
    path = ask(evidence, long()) / "r1-b2" / REPLIES
    lines = [json.loads(line) | {"output_tok": tokens} for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert verdict(evidence) == "invalid"


def test_a_baseline_of_before_tokens_were_kept_is_refused_before_anything_is_asked(evidence: Path) -> None:
    keep_baseline(evidence, lambda *_: Reply(1.0))
    ask(evidence, long())
    plan = cell_plan([gate()])
    words = "of 120 of 120 answers it was not kept how many tokens they have"
    assert unusable_baseline(plan, evidence / "baseline") == f"baseline: {words}"
    assert reason(compare_tokens(plan, evidence)) == f"the baseline's: {words}"


NOT_KEPT = "it cannot be a baseline for this: of 120 of 120 answers it was not kept how many tokens they have"


@pytest.mark.parametrize(("answering", "problems"), [(long(), []), (lambda *_: Reply(1.0), [NOT_KEPT])])
def test_a_baseline_is_made_only_with_tokens(answering: Answering, problems: list[str], evidence: Path) -> None:
    plan = cell_plan([gate()], baseline=None, accuracy=[BASELINE.task])
    ask(evidence, answering, steps=3, asked=BASELINE)
    assert [row.invalid_because for _, row in not_established(plan, evidence, [OWN])] == problems


def test_answers_to_other_questions_or_asked_otherwise_are_not_compared(evidence: Path) -> None:
    keep_baseline(evidence, long())
    ask(evidence, long(), asked=CANDIDATE._replace(prompt="Q"))
    plan = cell_plan([gate()])
    assert "40 questions are not the baseline's" in reason(compare_tokens(plan, evidence))
    then = plan.accuracy[0].settings.model_copy(update={"max_gen_toks": 512})
    message = "the baseline was asked gsm8k in another way: max_gen_toks 512, now 48"
    assert task_differs(against(plan, accuracy=[then]), plan.accuracy[0]) == message


# --- Beside a comparison of scores


@pytest.mark.parametrize(("gates", "is_valid"), [([loss_gate(0.5)], False), ([loss_gate(0.5), gate(2.0)], True)])
def test_with_a_gate_on_tokens_longer_replies_are_no_reason_not_to_compare_scores(
    gates: list[Gate], is_valid: bool, evidence: Path
) -> None:
    keep_baseline(evidence, long())
    ask(evidence, long(1.5, length=150), steps=2 * BLOCKS)
    row = next(row for row in all_of(cell_plan(gates), evidence) if row.metric == "exact_match")
    assert (row.value is not None) == is_valid
    assert is_valid or "1.50 times as long" in (row.invalid_because or "")


# --- The interval


def test_without_skew_the_interval_is_fiellers() -> None:
    """By hand: with the bound as the ratio, Student's t of ours less the ratio times theirs is that of the level.

    The baseline's answers are all alike, and ours lie evenly about their mean.
    """
    theirs, ours = np.full(5, 20.0), np.array([20.0, 21.0, 22.0, 23.0, 24.0])
    assert worsening(theirs.tolist(), ours.tolist(), AT)[0] == pytest.approx(0.1)
    interval = interval_of(theirs.tolist(), ours.tolist())
    # The quantiles of Student's t with 4 degrees of freedom are 2.132 at 5 %, and 2.333 at 4 %; the error of the mean is √0.5.
    assert interval.lower == pytest.approx(0.1 - 2.132 * 0.5**0.5 / 20, abs=1e-4)
    assert interval.upper == pytest.approx(0.1 + 2.333 * 0.5**0.5 / 20, abs=1e-4)


def test_an_answer_far_longer_than_the_rest_reaches_further_up_than_students_t() -> None:
    """Hall's t by hand, of 19 answers as before and one 11 times as long."""
    theirs, ours = [100.0] * 20, [100.0] * 19 + [1100.0]
    left = np.array(ours) - (1 + interval_of(theirs, ours).upper) * 100
    t = left.mean() / (left.std(ddof=1) / 20**0.5)
    skew = ((left - left.mean()) ** 3).mean() / left.std(ddof=1) ** 3 / 20**0.5
    # Student's t with 19 degrees of freedom is 1.850 at 4 %.
    assert t + skew * t**2 / 3 + skew**2 * t**3 / 27 + skew / 6 == pytest.approx(-1.850, abs=2e-3)
    assert t < -1.850


def test_one_question_or_a_baseline_that_scatters_too_much_has_no_interval_and_no_tokens_have_no_value() -> None:
    assert worsening([10.0], [15.0], AT) == (0.5, None)
    assert worsening([1.0, 1.0, 1.0, 1000.0], [1.0, 1.0, 1000.0, 1.0], AT)[1] is None
    interval = interval_of([10.0, 20.0] * 10, [15.0, 30.0] * 10)
    assert (interval.lower, interval.upper) == pytest.approx((0.5, 0.5)), "answers that are all alike leave no doubt"
    with pytest.raises(ValueError, match="have no tokens"):
        worsening([0.0, 0.0], [1.0, 2.0], AT)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "scatter", "share", "longer", "samples"),
    [
        (30, 0.5, 1.0, 1.1, 4),
        (500, 1.0, 1.0, 1.1, 1),
        (200, 0.5, 0.1, 2.0, 4),
        (1319, 1.0, 0.1, 2.0, 1),
        (541, 0.5, 0.02, 6.0, 1),
    ],
)
def test_the_gate_errs_as_often_as_it_says(number: int, scatter: float, share: float, longer: float, samples: int) -> None:
    """Where answers are just as much longer as the bound allows, some 4 % may pass, and 5 % may fail.

    Lengths of questions are lognormal, and so is what differs from answer to answer. A share of them is `longer`: all alike, or
    a few much. There is room for the chance of 1,000 runs, and 1 % for the skew.
    """
    rng, runs, at = np.random.default_rng(11), 1000, sides_of("lower", 0.04, 0.05)
    passed = failed = 0
    for _ in range(runs):
        usual = rng.lognormal(5.0, scatter, number)
        meant = usual * np.where(rng.random(number) < share, longer, 1.0)
        ours = meant[:, None] * rng.lognormal(-0.02, 0.2, (number, samples))
        theirs = usual[:, None] * rng.lognormal(-0.02, 0.2, (number, 4))
        interval = interval_of(theirs.mean(axis=1).tolist(), ours.mean(axis=1).tolist(), at)
        passed, failed = passed + (interval.upper <= 0.1), failed + (interval.lower > 0.1)
    print(f"\n{number} questions, {share:g} longer, {samples} samples: pass {passed / runs:.3f}, fail {failed / runs:.3f}")
    assert passed / runs < 0.05 + 0.015
    assert failed / runs < 0.05 + 0.018


# --- What a sample cannot show


@pytest.mark.parametrize(("number", "alpha"), [(200, 0.04), (8, 0.04), (500, 0.005)])
def test_a_share_that_is_as_large_is_seldom_missed(number: int, alpha: float) -> None:
    share, draws = share_unseen(number, alpha), 40_000
    missed = (np.random.default_rng(1).binomial(number, share, draws) == 0).mean()
    assert missed == pytest.approx(alpha, abs=4 * (alpha / draws) ** 0.5)


def test_it_says_what_is_unseen_and_how_many_would_show_more() -> None:
    """0.984 ** 200 and 0.992 ** 400 are some 4 %."""
    assert rare_changes(200, 0.04, "answers") == (
        "a change that hits fewer than 1.6 % of the answers, which 200 cannot show: 400 would show one that hits 0.8 %"
    )
    assert "fewer than 0.24 % of the questions, which 1,319 cannot show" in rare_changes(1319, 0.04, "questions")
