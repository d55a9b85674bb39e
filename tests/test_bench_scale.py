"""How the store's benchmark sums up what its publishers took."""

from infra.bench.scale import Took, Turn, publisher_figures


def turn(slowest_s: float, cpu_s: float, apart_s: float, alone_s: float) -> Turn:
    """16 in one store, of whom one is the slowest and another needs most of the cores."""
    together = [Took(0.04, 0.03)] * 14 + [Took(slowest_s, 0.03), Took(0.04, cpu_s)]
    return Turn(together, [Took(apart_s, 0.03)] * 9 + [Took(9.0, 9.0)] * 7, Took(alone_s, 0.02))


def test_each_ratio_is_that_of_the_worst_turn() -> None:
    turns = [turn(0.06, 0.05, 0.03, 0.03), turn(0.09, 0.04, 0.06, 0.03), turn(0.05, 0.04, 0.05, 3.0)]
    assert publisher_figures(turns) == {
        "publishers_ratio": 3.0,
        "publishers_apart_ratio": 2.0,
        "publishers_cpu_ratio": 2.5,
        "alone_ms": 30.0,
        "alone_cpu_ms": 20.0,
        "slowest_ms": [60.0, 90.0, 50.0],
        "most_cpu_ms": [50.0, 40.0, 40.0],
    }
