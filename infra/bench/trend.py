"""How often a slope without a trend is taken for one: that of `evidence.trend`, and that of plain least squares.

    .venv/bin/python -m infra.bench.trend

takes some seconds. Each world is noise without a trend, of as many rounds as a soak has after its warm-up. Its figure is the
share of series in which the lower bound is above zero: 5 % are meant.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import special

from vllm_qualify.evidence.sequential import Sides
from vllm_qualify.evidence.trend import COSINES, slope_of

SERIES, ROUNDS, ALPHA = 4000, 72, 0.05
FORGOTTEN = 200
AT = Sides(ALPHA, ALPHA)


def alike(random: np.random.Generator, share: float) -> np.ndarray:
    """A series in which each value has this share of the one before it: AR(1)."""
    shocks, value, values = random.standard_normal(FORGOTTEN + ROUNDS), 0.0, []
    for shock in shocks:
        value = share * value + float(shock)
        values.append(value)
    return np.asarray(values[FORGOTTEN:])


def with_outliers(random: np.random.Generator) -> np.ndarray:
    """One round in twenty is ten times as far off."""
    return np.asarray(random.standard_normal(ROUNDS) * np.where(random.random(ROUNDS) < 0.05, 10, 1))


WORLDS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "independent rounds": lambda random: alike(random, 0.0),
    "outliers": with_outliers,
    "alike by 0.3": lambda random: alike(random, 0.3),
    "alike by 0.6": lambda random: alike(random, 0.6),
    "alike by 0.8": lambda random: alike(random, 0.8),
    "alike by 0.9": lambda random: alike(random, 0.9),
}


def by_waves(series: np.ndarray) -> bool:
    return slope_of(range(ROUNDS), list(series)).interval(AT).lower > 0


def by_least_squares(series: np.ndarray) -> bool:
    centred = np.arange(ROUNDS) - (ROUNDS - 1) / 2
    slope = centred @ series / (centred @ centred)
    residuals = series - series.mean() - slope * centred
    error = math.sqrt(residuals @ residuals / (ROUNDS - 2) / (centred @ centred))
    return bool(slope > special.stdtrit(ROUNDS - 2, 1 - ALPHA) * error)


def false_alarms(judge: Callable[[np.ndarray], bool], world: Callable[[np.random.Generator], np.ndarray], seed: int) -> float:
    random = np.random.default_rng(seed)
    return sum(judge(world(random)) for _ in range(SERIES)) / SERIES


def main() -> None:
    print(f"{ROUNDS} rounds, {COSINES} cosines, {SERIES} series, false alarms at {ALPHA:.0%}")
    print("| rounds | slow waves | least squares |\n|---|---|---|")
    for seed, (name, world) in enumerate(WORLDS.items()):
        waves, plain = (false_alarms(judge, world, seed) for judge in (by_waves, by_least_squares))
        print(f"| {name} | {waves:.1%} | {plain:.1%} |")


if __name__ == "__main__":
    main()
