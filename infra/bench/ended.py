"""How a simulated release ended, and what it leaves in the store for later ones."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_qualify.judge.start_means import StartMeans, between_starts
from vllm_qualify.judge.verdict import worst_verdict as worst_of
from vllm_qualify.plan.cell import BetweenStarts
from vllm_qualify.recipe.gates import Verdict


class Seen(NamedTuple):
    """What an approved run publishes of its starts at one gate: of the build itself, and of its pairs in turns."""

    build: StartMeans | None = None
    pair: StartMeans | None = None


class EndedRelease(NamedTuple):
    """One release. `asked` is in answers to each question of each task, or in repeats of the load; `minutes` are a server's.

    `baseline_asked` is how often the baseline was asked a question. `seen` is by gate.
    """

    verdict: Verdict
    starts: int
    asked: float
    minutes: float
    baseline_asked: int = 0
    seen: Sequence[Seen | None] = ()


class Known(NamedTuple):
    """What earlier runs show at one gate."""

    start: BetweenStarts | None = None
    pair: BetweenStarts | None = None
    day: BetweenStarts | None = None


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """A failed gate decides; else one that is undecided."""
    return worst_of(list(verdicts))


def known_from(runs: Sequence[Sequence[Seen | None]], gates: int, *, one_build: bool) -> list[Known]:
    """What approved runs show, gate by gate, as the store has it. With `one_build` they are of one release, on other days."""
    known = []
    for gate in range(gates):
        builds: dict[str, list[StartMeans]] = {}
        for number, run in enumerate(runs):
            seen = run[gate]
            means = [each for each in (seen or ()) if each is not None]
            builds.setdefault("one" if one_build else str(number), []).extend(means)
        label = next((means[0].label for means in builds.values() if means), "")
        shown = between_starts(label, builds, [str(number) for number in range(len(runs))])
        about = {each.of: each for each in shown}
        known.append(Known(about.get("start"), about.get("pair"), about.get("day")))
    return known
