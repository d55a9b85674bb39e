"""Simulate a release that is qualified again until it passes."""

from typing import NamedTuple

import numpy as np

from infra.bench import accuracy, worlds
from infra.bench.accuracy import EndedRelease, GateName
from infra.bench.answer_worlds import Build
from vllm_qualify.evidence.sequential import levels_of
from vllm_qualify.recipe.gates import Gate

MOST_TRIES = 10
COUNTED, UNCOUNTED = f"paired, {MOST_TRIES} tries", f"each of {MOST_TRIES} tries as the first"


class Setting(NamedTuple):
    """One row of releases, as `accuracy.Setting`; each is tried until it passes, at most `most` times."""

    questions: int
    flips: float
    lost: float
    margin: float
    most: int = MOST_TRIES


def release(rng: np.random.Generator, setting: Setting, gates: list[Gate]) -> dict[GateName, EndedRelease]:
    """One candidate and one baseline; the candidate answers anew in each try. The answers of all tries are counted."""
    alike = accuracy.Setting(setting.questions, setting.flips, setting.lost, setting.margin)
    chances = worlds.builds(rng, setting.questions, setting.flips, setting.lost)
    asked = accuracy.AskingRules()
    baseline = accuracy.establish(rng, Build(chances.baseline), setting.margin, asked)
    outcomes = {}
    for name, counts in ((COUNTED, True), (UNCOUNTED, False)):
        used = allowed = 0
        for tries in range(setting.most):
            level = levels_of(gates, tries if counts else 0)
            (ended,) = accuracy.against(rng, alike, baseline, Build(chances.candidate), {name: level}, asked).values()
            used, allowed = used + ended.asked, allowed + ended.allowed
            if ended.verdict == "pass":
                break
        outcomes[name] = EndedRelease(ended.verdict, used, allowed, ended.baseline_repetitions)
    return outcomes
