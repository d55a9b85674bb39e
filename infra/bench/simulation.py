"""Simulate many made-up releases of each setting, and count how they end at the gates."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from multiprocessing import Pool
from typing import NamedTuple

import numpy as np

from infra.bench import accuracy, other_worlds, speed, tries
from infra.bench.accuracy import EndedRelease, GateName
from vllm_qualify.evidence.sequential import Levels, levels_of
from vllm_qualify.recipe.gates import Gate, gate_of

# How many releases one random generator makes. The results depend on it.
CHUNK = 100
# The gates' margins: shares of the questions, and of the time.
MARGIN, OTHER_MARGINS, MARGIN_OF_250, MARGIN_OF_SPEED = 0.0075, (0.008, 0.007), 0.02, 0.025
# How much a loss just past the margin is over it.
PAST, PAST_OF_SPEED = 0.0001, 0.0001
FLIPS, MIDDLE = (0.01, 0.02, 0.03, 0.05), 0.03
LOSSES, FEWER_LOSSES = (0.0, 0.005, 0.015, 0.02, 0.03, 0.04, 0.06), (0.0, 0.015, 0.03)
NOISES, SLOWDOWNS = (0.005, 0.01, 0.03), (0.0, 0.05, 0.10)
ALONE, RELEASE = "alone", "in a release"

Setting = accuracy.Setting | speed.Setting | tries.Setting | other_worlds.Setting


@lru_cache(maxsize=1)
def levels_by_gates() -> dict[str, Levels]:
    """A gate's levels if it is the only gate, and if its release has four gates with noise."""
    return {ALONE: levels_of(_gates()[:1]), RELEASE: levels_of(_gates())}


def _gates() -> list[Gate]:
    return [
        gate_of(metric="exact_match", filter="strict-match", minimum=0.878, unit="fraction"),
        gate_of(metric="exact_match", filter="strict-match", max_loss=MARGIN, unit="fraction"),
        gate_of(metric="output_throughput_tok_s", max_worsening=MARGIN_OF_SPEED, unit="fraction"),
        gate_of(metric="tpot_mean_ms", max_worsening=MARGIN_OF_SPEED, unit="fraction"),
    ]


class Rates(NamedTuple):
    """How releases ended at one gate. `asked` is in questions or repeats, `share` of those that were allowed.

    `baseline_repetitions` and `starts` are means.
    """

    passed: float
    failed: float
    undecided: float
    asked: float
    share: float
    baseline_repetitions: float
    starts: float


def settings() -> list[Setting]:
    slowdowns = (0.0, MARGIN_OF_SPEED + PAST_OF_SPEED, 0.05)
    others = other_worlds.settings(MARGIN, (0.0, MARGIN + PAST, 0.015), MARGIN_OF_SPEED, slowdowns)
    return [*_accuracy_settings(), *_speed_settings(), *_settings_of_tries(), *others]


def _accuracy_settings() -> list[accuracy.Setting]:
    whole = [
        accuracy.Setting(1319, flips, lost, MARGIN)
        for flips in FLIPS
        for lost in sorted({*(LOSSES if flips == MIDDLE else FEWER_LOSSES), MARGIN + PAST})
    ]
    others = [
        accuracy.Setting(1319, flips, lost, margin)
        for margin in OTHER_MARGINS
        for flips in (MIDDLE, FLIPS[-1])
        for lost in (0.0, margin + PAST, 0.015)
    ]
    few = [
        accuracy.Setting(250, flips, lost, MARGIN_OF_250)
        for flips in (MIDDLE, FLIPS[-1])
        for lost in sorted({*(LOSSES if flips == MIDDLE else FEWER_LOSSES), MARGIN_OF_250 + PAST})
    ]
    return [*whole, *others, *few]


def _speed_settings() -> list[speed.Setting]:
    slowdowns = sorted({*SLOWDOWNS, MARGIN_OF_SPEED + PAST_OF_SPEED})
    return [speed.Setting(noise, slowdown, MARGIN_OF_SPEED) for noise in NOISES for slowdown in slowdowns]


def _settings_of_tries() -> list[tries.Setting]:
    return [tries.Setting(1319, flips, lost, MARGIN) for flips in (FLIPS[0], FLIPS[-1]) for lost in (0.0, MARGIN + PAST)]


def _runs_of(setting: Setting, runs: int) -> int:
    """A release that is tried up to ten times takes ten times as long: there are fewer of them. Of loads as they are measured
    now there are more: a rate of 95 % then is within 0.7 points (two standard errors), instead of 1.4.
    """
    match setting:
        case tries.Setting():
            return max(1, runs // 2)
        case speed.Setting() | other_worlds.OfLoads(before=False):
            return 4 * runs
        case _:
            return runs


class _Job(NamedTuple):
    setting: Setting
    runs: int
    seed: tuple[int, int, int]


def simulate(
    wanted: Sequence[Setting], runs: int, seed: int, processes: int | None = None
) -> dict[Setting, dict[GateName, Rates]]:
    """The rates of each setting at every gate; they depend on the settings and their order, `runs` and `seed` alone.

    There is a process for each core, or as many `processes` as are given.
    """
    jobs = [
        _Job(setting, min(CHUNK, wanted_runs - start), (seed, line, start))
        for line, setting in enumerate(wanted)
        for wanted_runs in [_runs_of(setting, runs)]
        for start in range(0, wanted_runs, CHUNK)
    ]
    outcomes: dict[Setting, list[dict[GateName, EndedRelease]]] = {setting: [] for setting in wanted}
    with Pool(processes) as pool:
        for job, releases in zip(jobs, pool.imap(_releases, jobs), strict=True):
            outcomes[job.setting] += releases
    return {
        setting: {gate: _rates([one[gate] for one in releases]) for gate in releases[0]}
        for setting, releases in outcomes.items()
    }


def _releases(job: _Job) -> list[dict[GateName, EndedRelease]]:
    rng, both = np.random.default_rng(job.seed), levels_by_gates()
    # Peers' gates, and this project's gate as the only one, are simulated at one noise only.
    beside, of_release = _is_beside_peers(job.setting), {RELEASE: both[RELEASE]}
    if isinstance(job.setting, speed.Setting):
        return [speed.release(rng, job.setting, of_release) for _ in range(job.runs)]
    if isinstance(job.setting, other_worlds.OfAnswers | other_worlds.OfLoads):
        return [other_worlds.release(rng, job.setting, both[RELEASE], _gates()) for _ in range(job.runs)]
    if isinstance(job.setting, tries.Setting):
        return [tries.release(rng, job.setting, _gates()) for _ in range(job.runs)]
    named = both if beside else of_release
    return [accuracy.release(rng, job.setting, named, beside_peers=beside) for _ in range(job.runs)]


def _is_beside_peers(setting: Setting) -> bool:
    return isinstance(setting, accuracy.Setting) and setting.flips == MIDDLE and setting.margin not in OTHER_MARGINS


def _rates(ended: Sequence[EndedRelease]) -> Rates:
    def share(verdict: str) -> float:
        return sum(one.verdict == verdict for one in ended) / len(ended)

    def mean(of: Callable[[EndedRelease], float]) -> float:
        return math.fsum(map(of, ended)) / len(ended)

    return Rates(
        passed=share("pass"),
        failed=share("fail"),
        undecided=share("inconclusive"),
        asked=mean(lambda one: one.asked),
        share=mean(lambda one: one.asked / one.allowed),
        baseline_repetitions=mean(lambda one: one.baseline_repetitions),
        starts=mean(lambda one: one.starts),
    )
