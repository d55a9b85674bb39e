"""The slope of a series over time whose neighbouring values may be alike, with an interval.

Least squares gives the slope. Its usual error takes neighbours for independent, and is too small if they are alike. Here the
error is taken from the series' own slow waves: COSINES cosines of low frequency, made orthogonal to the mean, to the slope and
to each other. Noise that lasts a short time moves each of them as far as it moves the slope. So the slope over their root mean
square follows Student's t with COSINES degrees of freedom (Müller 2007, "A theory of robust long-run variance estimation",
Journal of Econometrics 141; for trends: Sun 2011, "Autocorrelation robust trend inference with series variance estimator and
testing-optimal smoothing parameter", Journal of Econometrics 164). For independent values this is exact.

With fewer cosines noise may last longer, and the interval is wider. `infra/bench/trend.py` simulates both.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from vllm_qualify.evidence.measurement import Interval, around
from vllm_qualify.evidence.sequential import Sides
from vllm_qualify.recipe.values import Frozen, NotNegative, Number

COSINES = 4
# With fewer, neither the slope nor its waves show much.
LEAST_VALUES = 15


class Slope(Frozen):
    """The mean change of a series per unit of time, its standard error, and the series' mean."""

    per_time: Number
    error: NotNegative
    mean: Number

    def interval(self, at: Sides) -> Interval:
        lower, upper = (-float(special.stdtrit(COSINES, alpha)) * self.error for alpha in at)
        return around(self.per_time, self.per_time - lower, self.per_time + upper)


def slope_of(times: Sequence[float], values: Sequence[float]) -> Slope:
    """The slope of values at rising times.

    Raises ValueError if there are fewer than LEAST_VALUES, a number is not finite, or the times do not rise.
    """
    at, series = np.asarray(times, dtype=float), np.asarray(values, dtype=float)
    if len(at) != len(series) or len(at) < LEAST_VALUES:
        raise ValueError(f"a slope needs {LEAST_VALUES} values, each with its time, and there are {len(series)}")
    if not (np.isfinite(at).all() and np.isfinite(series).all() and (np.diff(at) > 0).all()):
        raise ValueError("a slope needs finite values at times that rise")
    centred, residuals = at - at.mean(), series - series.mean()
    length = math.sqrt(float(centred @ centred))
    waves = _slow_waves(at, centred / length).T @ residuals
    error = math.sqrt(float(waves @ waves) / COSINES) / length
    return Slope(per_time=float(centred @ residuals) / length**2, error=error, mean=float(series.mean()))


def _slow_waves(at: np.ndarray, line: np.ndarray) -> np.ndarray:
    """Cosines of 1 to COSINES half waves more than the line's one, made orthogonal to the mean, the line and each other."""
    whole = at[-1] - at[0]
    margin = whole / (len(at) - 1)
    shares = (at - at[0] + margin / 2) / (whole + margin)
    cosines = [np.cos(math.pi * (2 + wave) * shares) for wave in range(COSINES)]
    orthonormal, _ = np.linalg.qr(np.column_stack([np.ones(len(at)), line, *cosines]))
    return np.asarray(orthonormal[:, 2:])
