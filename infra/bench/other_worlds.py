"""Releases of other worlds: what each world is, how it is measured, and how one release of it ends at this project's gate."""

from typing import NamedTuple

import numpy as np

from infra.bench import accuracy, answer_worlds, speed_worlds
from infra.bench.accuracy import AskingRules, EndedRelease, GateName
from vllm_qualify.evidence.sequential import Levels, levels_of
from vllm_qualify.recipe.gates import Gate

# The number of starts that the history of a GPU type is made of.
IN_HISTORY = 21
ONCE, RESTARTED, KNOWN = "one start", "restarted", "restarted, with history"
MOST_STARTS = 12
ASKED = {
    ONCE: AskingRules(),
    RESTARTED: AskingRules(restarted=True, most=MOST_STARTS),
    KNOWN: AskingRules(restarted=True, most=MOST_STARTS),
}

# Each world of answers, and how its releases are asked.
ANSWERS: dict[str, tuple[answer_worlds.World, str]] = {
    "heterogeneous": (answer_worlds.heterogeneous, ONCE),
    "deterministic": (answer_worlds.steady, ONCE),
    "starts": (answer_worlds.starts, KNOWN),
    "topics": (answer_worlds.topics, ONCE),
    "noise of topics": (answer_worlds.topics_noise, ONCE),
    "concentrated": (answer_worlds.concentrated, ONCE),
    "noisier": (answer_worlds.noisier, ONCE),
}


class OfAnswers(NamedTuple):
    """A row of releases of a world of answers: shares of the questions."""

    world: str
    asked: str
    questions: int
    lost: float
    margin: float

    @property
    def is_usual(self) -> bool:
        return self.asked == ANSWERS[self.world][1]


class OfLoads(NamedTuple):
    """A row of releases of a world of loads: shares of the time. With `before` they are measured as nothing is known of it."""

    world: str
    before: bool
    slowdown: float
    margin: float


Setting = OfAnswers | OfLoads


def settings(margin: float, losses: tuple[float, ...], of_speed: float, slowdowns: tuple[float, ...]) -> list[Setting]:
    usual = [OfAnswers(name, asked, 1319, lost, margin) for name, (_, asked) in ANSWERS.items() for lost in losses]
    others = [OfAnswers("starts", asked, 1319, lost, margin) for asked in (ONCE, RESTARTED) for lost in losses]
    loads = [
        OfLoads(name, before, slowdown, of_speed)
        for name in speed_worlds.WORLDS
        for before in (True, False)
        for slowdown in slowdowns
    ]
    return [*usual, *others, *loads]


def release(rng: np.random.Generator, setting: Setting, levels: Levels, gates: list[Gate]) -> dict[GateName, EndedRelease]:
    if isinstance(setting, OfLoads):
        world = speed_worlds.WORLDS[setting.world]
        plan = world.before if setting.before else world.now
        shared = levels_of([gates[-1]] * plan.gates) if plan.gates > 1 else levels
        name = f"{setting.world}, as before" if setting.before else setting.world
        ended = speed_worlds.release(rng, world, setting.slowdown, setting.margin, shared, before=setting.before)
        return {f"loads: {name}": ended}
    baseline, candidate = ANSWERS[setting.world][0](rng, setting.questions, setting.lost)
    asked = ASKED[setting.asked]
    if setting.asked == KNOWN:
        asked = asked._replace(history=accuracy.history(rng, baseline, IN_HISTORY))
    old = accuracy.establish(rng, baseline, setting.margin, asked)
    alike = accuracy.Setting(setting.questions, 0.0, setting.lost, setting.margin)
    (ended,) = accuracy.against(rng, alike, old, candidate, {"": levels}, asked).values()
    name = setting.world if setting.is_usual else f"{setting.world}, {setting.asked}"
    return {f"answers: {name}": ended}
