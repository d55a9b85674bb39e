"""Flips by topic, by hand."""

import pytest
from scipy import stats

from vllm_qualify.report.question_blocks import TopicRow, difference_interval, topic_rows
from vllm_qualify.report.questions import ScoredQuestions

# Two topics of 4 and 3 questions, and one question without a topic. Of the first topic two are lost and one is gained; of the
# second one is gained, and one has no answer of the baseline. The question without a topic is lost.
SCORED = ScoredQuestions(
    task="t",
    metric="exact_match",
    filter="f",
    against="r",
    numbers=list(range(8)),
    ours=[0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0],
    theirs=[1.0, 1.0, 0.0, 1.0, 0.0, 1.0, None, 1.0],
    asked=8,
    lost=3,
    gained=2,
    topics=["law", "<b>maths"],
    about=[0, 0, 0, 0, 1, 1, 1, None],
)


def test_each_topic_has_what_it_lost_and_gained() -> None:
    """Law: 1 less 2 of 4 is -25 points; maths: 1 of 2 is 50.

    Law: b = 2.5, c = 1.5, n = 6: the middle is -1/6 = -16.7, and the error 1.96 sqrt(4 - 1/6) / 6 = 0.6396.
    Maths: b = 0.5, c = 1.5, n = 4: the middle is 1/4, and the error 1.96 sqrt(2 - 1/4) / 4 = 0.6482.
    """
    assert topic_rows(SCORED) == [
        TopicRow("law", 4, 2, 1, "-25.0 pp", "-80.6 to +47.3 pp"),
        TopicRow("<b>maths", 2, 0, 1, "+50.0 pp", "-39.8 to +89.8 pp"),
    ]


def test_there_is_no_table_where_it_would_say_something_else() -> None:
    whole = SCORED.model_dump()
    changes: list[dict[str, object]] = [{"theirs": []}, {"asked": 9}, {"topics": [], "about": []}]
    for change in changes:
        assert topic_rows(ScoredQuestions.model_validate(whole | change)) == []


@pytest.mark.parametrize(("lost", "gained", "same"), [(0.02, 0.02, 0.96), (0.05, 0.01, 0.94), (0.0, 0.0, 1.0)])
def test_the_interval_has_the_true_difference_as_often_as_it_says(lost: float, gained: float, same: float) -> None:
    """By the exact probabilities of the outcomes of 100 questions."""
    outcomes = [(b, c) for b in range(40) for c in range(40)]
    chance = stats.multinomial(100, [lost, gained, same])
    covered = sum(
        chance.pmf([b, c, 100 - b - c])
        for b, c in outcomes
        if (at := difference_interval(b, c, 100))[0] <= gained - lost <= at[1]
    )
    assert covered > 0.94
