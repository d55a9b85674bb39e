"""When a comparison knows enough: its margin holds how far the difference can be off, for a wrong verdict and for none."""

import math
from collections.abc import Callable
from typing import TypeVar

from scipy import special

from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.sequential import Levels

# The chance that a release without a loss, or one with twice the margin, stays undecided after what is planned by a first look
# at the noise. A comparison goes on from there until its information is complete.
UNDECIDED = 0.05
# The part of a chance of error that the last look has, about: the others spent the rest.
PART_OF_A_LOOK = 0.5
# With less than this chance of a verdict, more of the same is not worth its minutes.
HARDLY = 0.05
# A normal distribution is further off than its standard deviation with this chance, on one side.
OF_A_DEVIATION = float(special.ndtr(-1.0))

# How far a difference is off at most, by the chance that it is further off.
Reach = Callable[[float], float]
IntervalOrNone = TypeVar("IntervalOrNone", Interval, Interval | None)


def share_of_information(reach: Reach, margin: float, levels: Levels, undecided: float) -> float:
    """The share of what a margin needs, from how far a difference can be off with a chance; at most 1.

    When it is complete, a release without a loss has no verdict with the chance `undecided`. It depends on how exactly the
    difference is known, and not on the difference. So measuring can go on until it is complete, and hold its error rates
    (information-based monitoring: Lan & DeMets 1983; Mehta & Tsiatis 2001, Drug Inf. J. 35).
    """
    missed = reach(undecided)
    needed = max(reach(PART_OF_A_LOOK * alpha) for alpha in (levels.false_pass, levels.at_margin.false_fail)) + missed
    return min(1.0, (margin / needed) ** 2) if needed else 1.0


def is_hardly_decided(difference: float, reach: Reach, margin: float, levels: Levels, least_error: float = 0.0) -> bool:
    """Whether a comparison would likely stay undecided, were it measured until its information is complete.

    `least_error` is about the standard error after all that its plan allows: if that is too large for the margin, the
    information is not complete even then. The chance of a verdict is that of the difference which will be seen then, if any
    difference was as likely before (predictive power: Spiegelhalter, Freedman & Blackburn 1986, Control. Clin. Trials 7). To
    end so makes no verdict wrong.
    """
    now, enough = reach(OF_A_DEVIATION), margin / errors_in_margin(levels)
    then = max(enough, least_error)
    if now <= then:
        return now > enough
    room, apart = margin - difference, math.sqrt(now**2 - then**2)
    passes = special.ndtr((room - then * _critical_value(levels.false_pass)) / apart)
    fails = special.ndtr((-room - then * _critical_value(levels.at_margin.false_fail)) / apart)
    return float(passes + fails) < HARDLY


def interval_of_loss(interval_at: Callable[[Levels], IntervalOrNone], levels: Levels) -> IntervalOrNone:
    """The interval of a loss, which is above 0 if something is lost; `interval_at` makes one of any levels, or None.

    Its lower bound decides `fail`. A release that lost nothing has more protection than one that lost what its gate allows: the
    bound is that of `at_margin` only where the bound of the levels themselves shows that anything was lost.
    """
    interval = interval_at(levels)
    return interval_at(levels.at_margin) if interval and interval.lower > 0 else interval


def errors_in_margin(levels: Levels) -> float:
    """How many standard errors a margin holds when the information is complete, if the error is normal."""
    return _critical_value(min(levels.false_pass, levels.at_margin.false_fail)) - float(special.ndtri(UNDECIDED))


def _critical_value(alpha: float) -> float:
    """The critical value of the last look, about."""
    return -float(special.ndtri(PART_OF_A_LOOK * alpha))
