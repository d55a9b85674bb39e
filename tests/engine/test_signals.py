"""A signal within the block takes effect after it, once, and as the program wanted it."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_qualify.engine.process import HELD, signals_held


class Stopped(BaseException):
    """What the handler under test raises."""


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """The numbers of the signals that were handled; each raises."""
    handled: list[int] = []

    def stop(number: int, _frame: object) -> None:
        handled.append(number)
        raise Stopped

    before = {number: signal.signal(number, stop) for number in HELD}
    yield handled
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", HELD)
def test_a_signal_waits_for_the_end_of_the_outer_block(seen: list[int], number: signal.Signals) -> None:
    steps = []
    with pytest.raises(Stopped), signals_held():
        with signals_held():
            signal.raise_signal(number)
        steps.append("cleaned up")
        assert seen == []
    assert (steps, seen) == (["cleaned up"], [number])
    with pytest.raises(Stopped):
        signal.raise_signal(number)


def test_an_error_in_the_block_is_the_context_of_the_signal(seen: list[int]) -> None:
    with pytest.raises(Stopped) as raised, signals_held():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("half done")
    assert isinstance(raised.value.__context__, ValueError)
    assert seen == [signal.SIGINT]


def test_another_thread_needs_nothing_held() -> None:
    def handler_within() -> object:
        with signals_held():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor() as pool:
        assert pool.submit(handler_within).result() == signal.getsignal(signal.SIGTERM)
