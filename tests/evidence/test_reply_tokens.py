"""Tokens of answers from a real server's pages. The attacks on such pages are in `test_accuracy`."""

from pathlib import Path

import pytest

from vllm_qualify.evidence.accuracy.reply_tokens import reply_tokens

CAPTURED = Path(__file__).parent / "captured" / "tokens"


def test_the_captured_pages_give_tokens_per_answer() -> None:
    """From 78 replies with 369 tokens to 86 with 809: 440 of 8. Three have 21 to 50 tokens and five 51 to 100.

    At the lower ends they have 60 + 250 = 310 tokens, with squares of 1,200 + 12,500 = 13,700. The other 130 tokens are of the
    highest bucket, and add 130 times 50 + 100. That makes 33,200: the variance is at most 4,150 - 3,025.
    """
    before, after = ((CAPTURED / f"metrics-{when}.txt").read_text() for when in ("before", "after"))
    counted = reply_tokens([(before, after, 8, "r1-b1")])
    assert (counted.answers, counted.tokens, counted.mean) == (8, 440, 55.0)
    assert counted.most_variance == pytest.approx(1125)
    # A request that was asked again counts too.
    assert reply_tokens([(before, after, 7, "r1-b1")]).mean == 55.0
    with pytest.raises(ValueError, match="440 tokens of 8 answers to 9 questions of r1-b1"):
        reply_tokens([(before, after, 9, "r1-b1")])
    # The engine was started again meanwhile.
    with pytest.raises(ValueError, match="counts -440 tokens"):
        reply_tokens([(after, before, 8, "r1-b1")])
