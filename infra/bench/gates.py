"""How often gates are wrong in the plans that recipes have by default, and what that costs: on made-up releases.

    .venv/bin/python -m infra.bench.gates [--runs N] [--seed S] [--only WORLD]

The verdicts come from the product's own functions. The plans are those of the catalog and of the README. The store is new, or
has one, two or five approved runs. The last line is one JSON object with the worst figures over all of these. The same seed
gives the same numbers. A row that misses a promise, not by far, is simulated again with MORE times as many releases, and all of
them count: so few rows miss one by chance. The table has each row's largest standard error. The default number of releases
takes three quarters of an hour on two cores.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from infra.bench import peers, worlds
from infra.bench.plans import AnswerPlan
from infra.bench.simulation import Rates, Setting, rates_of, runs_of, settings, simulate

RUNS, SEED, MORE = 120, 1, 4
PEERS_LOSSES, PEERS_FLIPS, PEERS_RUNS = (0.0, 0.015, 0.03, 0.06), 0.03, 1000
Results = Mapping[Setting, Rates]


class Promise(NamedTuple):
    """A figure, and the bound that it keeps: it may not be above it, or with `at_least` not below."""

    figure: str
    bound: float
    at_least: bool = False

    def is_kept(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


PAST_MARGIN = Promise("pass_past_margin", 0.05)
FAIL, UNDECIDED = Promise("fail_no_loss", 0.01), Promise("undecided_no_loss", 0.10)
CAUGHT, SLOWDOWN = Promise("caught_1_5_points", 0.85, at_least=True), Promise("caught_5_percent_slowdown", 0.95, at_least=True)
PROMISES = (PAST_MARGIN, FAIL, UNDECIDED, CAUGHT, SLOWDOWN)


def values_of(setting: Setting, rates: Rates) -> list[tuple[Promise, float]]:
    """What a row says of each promise that is about its loss: none, just past the margin, or twice the margin."""
    margin = _margin(setting)
    if setting.lost == 0:
        return [(FAIL, rates.failed), (UNDECIDED, rates.undecided)]
    if setting.lost < 1.5 * margin:
        return [(PAST_MARGIN, rates.passed)]
    return [(CAUGHT if setting.kind == "answers" else SLOWDOWN, rates.failed)]


def _margin(setting: Setting) -> float:
    plan = setting.plan
    return plan.tasks[0].margin if isinstance(plan, AnswerPlan) else plan.margins[0]


def world_of(setting: Setting) -> str:
    return f"{setting.kind}: {setting.world}"


def missed(results: Results) -> list[tuple[Setting, Promise, float]]:
    return [
        (setting, promise, value)
        for setting, rates in results.items()
        for promise, value in values_of(setting, rates)
        if not promise.is_kept(value)
    ]


def results_of(wanted: Sequence[Setting], runs: int, seed: int, processes: int | None = None) -> Results:
    """The rates of each row; rows that miss a promise have more releases."""
    outcomes = simulate(wanted, [runs_of(setting, runs) for setting in wanted], seed, processes)
    doubtful = list(dict.fromkeys(setting for setting, *_ in missed({key: rates_of(each) for key, each in outcomes.items()})))
    doubtful = [setting for setting in doubtful if not _is_clear(setting, rates_of(outcomes[setting]))]
    again = simulate(doubtful, [MORE * runs_of(setting, runs) for setting in doubtful], seed + 1, processes)
    return {setting: rates_of([*each, *again.get(setting, [])]) for setting, each in outcomes.items()}


def _is_clear(setting: Setting, rates: Rates) -> bool:
    """Whether a promise is missed by more than chance explains: more releases would not keep it."""
    return any(
        not promise.is_kept(value) and abs(value - promise.bound) > 4 * max(rates.error(value), rates.error(promise.bound))
        for promise, value in values_of(setting, rates)
    )


def table(results: Results) -> Iterator[str]:
    """One line for each world, store and loss."""
    columns = ("runs", "lost %", "pass %", "fail %", "undec. %", "inval. %", "± %", "starts", "asked", "minutes", "former", "n")
    yield f"{'world':52}" + "".join(f"{name:>9}" for name in columns)
    for setting, rates in results.items():
        shares = (rates.passed, rates.failed, rates.undecided, rates.invalid, max(map(rates.error, rates[1:5])))
        numbers = "".join(f"{100 * share:9.1f}" for share in shares)
        prices = "".join(f"{price:9.1f}" for price in (rates.starts, rates.asked, rates.minutes, rates.former))
        yield f"{world_of(setting):52}{setting.store:9}{100 * setting.lost:9.2f}{numbers}{prices}{rates.releases:9}"


def price_ratio(results: Results) -> float:
    """Server minutes of today's plan over those of the former one: means over all worlds, stores and losses."""
    former = {
        (setting.kind, setting.world, setting.lost): rates.former for setting, rates in results.items() if not setting.store
    }
    of_rows = [
        (rates.minutes, former[setting.kind, setting.world, setting.lost])
        for setting, rates in results.items()
        if former.get((setting.kind, setting.world, setting.lost), float("nan")) > 0
    ]
    return fmean(new for new, _ in of_rows) / fmean(old for _, old in of_rows)


def _of_any_store(setting: Setting) -> tuple[str, str, float]:
    return setting.kind, setting.world, setting.lost


def figures(results: Results) -> dict[str, object]:
    """The worst over all worlds, stores and losses, but for worlds that do not keep a promise, which are named."""
    rows = missed(results)
    named = {world_of(setting) for setting, *_ in rows}
    kept = {setting: rates for setting, rates in results.items() if world_of(setting) not in named}
    worst: dict[str, object] = {"worlds": len({world_of(setting).partition(", plan")[0] for setting in results})}
    for promise in PROMISES:
        values = [value for setting, rates in kept.items() for each, value in values_of(setting, rates) if each == promise]
        worst[promise.figure] = (min if promise.at_least else max)(values) if values else None
    not_kept: dict[tuple[str, str], tuple[float, int]] = {}
    for setting, promise, value in rows:
        key = world_of(setting), promise.figure
        worse = min if promise.at_least else max
        not_kept[key] = worse(not_kept.get(key, (value, setting.store)), (value, setting.store))
    return {
        **worst,
        "price_ratio": round(price_ratio(results), 3),
        "not_kept": [
            {"world": world, "figure": figure, "store": store, "value": round(value, 4)}
            for (world, figure), (value, store) in not_kept.items()
        ],
        "called_unsteady": _called_unsteady(results),
    }


def _called_unsteady(results: Results) -> dict[str, float]:
    """The worlds in which more releases without a loss than may fail are invalid, by a trend, with the largest share."""
    shares: dict[str, float] = {}
    for setting, rates in results.items():
        if setting.lost == 0 and rates.invalid > FAIL.bound:
            shares[world_of(setting)] = max(round(rates.invalid, 4), shares.get(world_of(setting), 0.0))
    return shares


def of_peers(seed: int) -> Iterator[str]:
    """How often the gates of other projects pass a run of 1,319 questions. Each gate knows the true score of the baseline."""
    yield f"{'peers gates, base 91 %, flips 3 %: pass %':52}" + "".join(f"{100 * lost:9.1f}" for lost in PEERS_LOSSES)
    rng = np.random.default_rng(seed)
    right = [[_right(rng, lost) for _ in range(PEERS_RUNS)] for lost in PEERS_LOSSES]
    for name, passes in peers.ACCURACY.items():
        shares = (fmean(passes(each, 1319, worlds.BASE_ACCURACY) for each in of_loss) for of_loss in right)
        yield f"{name:52}" + "".join(f"{100 * share:9.1f}" for share in shares)


def _right(rng: np.random.Generator, lost: float) -> int:
    return int(worlds.drawn_answers(rng, worlds.builds(rng, 1319, PEERS_FLIPS, lost).candidate).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS, help="releases of each line")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--only", action="append", default=[], help="only worlds whose names begin with this, like 'loads: noise 1 %%'"
    )
    parser.add_argument("--processes", type=int, default=None, help="one for each core by default")
    args = parser.parse_args()
    wanted = [each for each in settings() if not args.only or world_of(each).startswith(tuple(args.only))]
    results = results_of(wanted, args.runs, args.seed, args.processes)
    for line in (*table(results), "", *of_peers(args.seed)):
        print(line)
    print(json.dumps(figures(results)))


if __name__ == "__main__":
    main()
