"""What tests of several files here share."""

from collections.abc import Iterator

import pytest

from tests.warm import lm_eval
from vllm_qualify.engine import process


@pytest.fixture(scope="module")
def warm_lm_eval() -> Iterator[None]:
    """lm-eval's workers start at once. Without it they start as in production, as in test_gsm8k.py."""
    with pytest.MonkeyPatch.context() as patch:
        lm_eval.use(patch)
        # The workers answer in less time than a poll.
        patch.setattr(process, "POLL_S", 0.01)
        yield
