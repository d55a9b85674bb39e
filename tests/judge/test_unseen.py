"""What a sample cannot show."""

import numpy as np
import pytest

from vllm_qualify.judge.unseen import rare_changes, share_unseen


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
