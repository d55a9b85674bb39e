"""Simulate many made-up releases of each world, in the plans that recipes have, and count how they end."""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pool
from typing import Literal, NamedTuple

import numpy as np

from infra.bench import accuracy, answer_worlds, former, plans, speed, speed_worlds
from infra.bench.answer_worlds import BuildPair
from infra.bench.ended import EndedRelease, Known, Seen, known_from
from infra.bench.plans import AnswerPlan, RepeatPlan, Task
from vllm_qualify.evidence.sequential import FALSE_FAIL_OF_RELEASE, FALSE_PASS
from vllm_qualify.plan.cell import Between
from vllm_qualify.recipe.gates import Verdict

# How many releases one random generator makes. The results depend on it.
CHUNK = 50
# How many earlier runs each chunk draws those that the store has from; how often a run that is not passed is made again.
EARLIER, AGAIN = 8, 2
# How much a loss just past the margin is over it, and the largest loss over its margin.
PAST, TWICE = 0.0001, 2.0
STORES = (0, 1, 2, 5)
MOST_TRIES, BASELINES = 10, 5
TRIED, WORST_OF_BASELINES, SAMPLED = "ten tries", "worst of five baselines", "sampled"
# Every world is simulated with this recipe's plan. The plans of other recipes are simulated in the usual world alone.
USUAL_PLAN, USUAL_ANSWERS, USUAL_LOADS = "llama-3.3-70b", "flips 3 %", "noise 1 %"
# A release that is tried or gated ten times takes so much longer: there are fewer of these.
SLOW = {TRIED: 0.3, "twelve gates": 0.25}

Kind = Literal["answers", "loads"]


class Setting(NamedTuple):
    """A row of releases: its world, how many approved runs the store has, and what is lost, as a share; the plan is by name."""

    kind: Kind
    world: str
    store: int
    lost: float
    plan: AnswerPlan | RepeatPlan


class Rates(NamedTuple):
    """How so many releases ended. All but shares are means; `former` is the former plan's minutes, NaN if not simulated."""

    releases: int
    passed: float
    failed: float
    undecided: float
    invalid: float
    starts: float
    asked: float
    minutes: float
    former: float

    def error(self, rate: float) -> float:
        return math.sqrt(rate * (1 - rate) / self.releases)


def settings() -> list[Setting]:
    return [*_of_answers(), *_of_loads()]


def _of_answers() -> Iterator[Setting]:
    by_plan = plans.answer_plans()
    usual = next(plan for plan, recipe in by_plan.items() if recipe == USUAL_PLAN)
    alone = usual._replace(tasks=usual.tasks[:1])
    names = [*answer_worlds.WORLDS, TRIED, WORST_OF_BASELINES]
    for name in names:
        plan = alone._replace(tasks=(_sampled_task(by_plan),)) if name == SAMPLED else alone
        yield from _rows("answers", name, plan, plan.tasks[0].margin, STORES)
    for number, (plan, recipe) in enumerate(by_plan.items(), start=1):
        yield from _rows("answers", f"{USUAL_ANSWERS}, plan {number}: {recipe}", plan, plan.tasks[0].margin, STORES[:1])


def _sampled_task(by_plan: dict[AnswerPlan, str]) -> Task:
    """The catalog's task of 1,000 questions, which a model that reasons is asked at its own temperature."""
    return next(task for plan in by_plan for task in plan.tasks if task.questions == 1000)


def _of_loads() -> Iterator[Setting]:
    by_plan = plans.repeat_plans()
    usual = next(plan for plan, recipe in by_plan.items() if recipe == USUAL_PLAN)
    for name, world in speed_worlds.WORLDS.items():
        gates = world.gates
        more = usual._replace(margins=usual.margins[:1] * gates, false_fail=FALSE_FAIL_OF_RELEASE / gates) if gates else usual
        yield from _rows("loads", name, more, usual.margins[0], STORES)
    for number, (plan, recipe) in enumerate(by_plan.items(), start=1):
        yield from _rows("loads", f"{USUAL_LOADS}, plan {number}: {recipe}", plan, plan.margins[0], STORES[:1])


def _rows(kind: Kind, name: str, plan: AnswerPlan | RepeatPlan, margin: float, stores: Sequence[int]) -> Iterator[Setting]:
    for store in stores:
        for lost in (0.0, margin + PAST, TWICE * margin):
            yield Setting(kind, name, store, lost, plan)


def runs_of(setting: Setting, runs: int) -> int:
    return max(1, round(runs * SLOW.get(setting.world, 1.0)))


class _Job(NamedTuple):
    setting: Setting
    runs: int
    seed: tuple[int, ...]


class Outcome(NamedTuple):
    verdict: Verdict
    starts: int
    asked: float
    minutes: float
    former: float


def simulate(
    wanted: Sequence[Setting], runs: Sequence[int], seed: int, processes: int | None = None
) -> dict[Setting, list[Outcome]]:
    """So many releases of each setting; each depends on its setting, `runs` and `seed` alone."""
    jobs = [
        _Job(setting, min(CHUNK, of_row - start), (seed, zlib.crc32(repr(setting[:4]).encode()), start))
        for setting, of_row in zip(wanted, runs, strict=True)
        for start in range(0, of_row, CHUNK)
    ]
    outcomes: dict[Setting, list[Outcome]] = {setting: [] for setting in wanted}
    with Pool(processes) as pool:
        for job, releases in zip(jobs, pool.imap(_releases, jobs), strict=True):
            outcomes[job.setting] += releases
    return outcomes


def rates_of(ended: Sequence[Outcome]) -> Rates:
    def share(verdict: str) -> float:
        return sum(one.verdict == verdict for one in ended) / len(ended)

    means = (math.fsum(each) / len(ended) for each in list(zip(*ended, strict=True))[1:])
    return Rates(len(ended), share("pass"), share("fail"), share("inconclusive"), share("invalid"), *means)


def _releases(job: _Job) -> list[Outcome]:
    rng = np.random.default_rng(job.seed)
    if isinstance(job.setting.plan, AnswerPlan):
        return list(_of_answers_in(rng, job, job.setting.plan))
    return list(_of_loads_in(rng, job, job.setting.plan))


def _earlier(setting: Setting, make: Callable[[], EndedRelease]) -> list[Sequence[Seen | None]]:
    """Runs that were approved: those that pass, or the last of AGAIN more."""
    approved = []
    for _ in range(min(EARLIER, 2 * setting.store)):
        for _ in range(1 + AGAIN):
            ended = make()
            if ended.verdict == "pass":
                break
        approved.append(ended.seen)
    return approved


def _drawn(
    rng: np.random.Generator, approved: Sequence[Sequence[Seen | None]], store: int, gates: int, *, one_build: bool
) -> list[Known]:
    chosen = [approved[number] for number in rng.permutation(len(approved))[:store]]
    return known_from(chosen, gates, one_build=one_build)


def _of_answers_in(rng: np.random.Generator, job: _Job, plan: AnswerPlan) -> Iterator[Outcome]:
    setting, world = job.setting, _world_of(job.setting.world)
    approved = _earlier(setting, lambda: accuracy.release(rng, plan, _pairs(rng, plan, world, 0.0)))
    for _ in range(job.runs):
        pairs = _pairs(rng, plan, world, setting.lost)
        known = [each.start for each in _drawn(rng, approved, setting.store, len(plan.tasks), one_build=False)]
        ended = _ended(rng, setting.world, plan, pairs, known)
        before = math.nan if setting.store or setting.world == TRIED else former.minutes_of_answers(rng, plan, pairs)
        yield Outcome(ended.verdict, ended.starts, ended.asked, ended.minutes, before)


def _world_of(name: str) -> answer_worlds.World:
    return answer_worlds.WORLDS.get(name.partition(", ")[0], answer_worlds.WORLDS[USUAL_ANSWERS])


def _pairs(rng: np.random.Generator, plan: AnswerPlan, world: answer_worlds.World, lost: float) -> list[BuildPair]:
    """A pair for each task; only the first task loses anything."""
    return [world(rng, task.questions, lost if not number else 0.0) for number, task in enumerate(plan.tasks)]


def _ended(
    rng: np.random.Generator, name: str, plan: AnswerPlan, pairs: Sequence[BuildPair], known: Sequence[Between | None]
) -> EndedRelease:
    if name == TRIED:
        return _tried(rng, plan, pairs, known)
    if name == WORST_OF_BASELINES:
        (pair,) = pairs
        several = [accuracy.establish(rng, plan, plan.tasks[0], pair.baseline) for _ in range(BASELINES)]
        lowest = min(several, key=lambda answers: float(answers.mean.mean()))
        return accuracy.against(rng, plan, [lowest], [pair.candidate], known)
    return accuracy.release(rng, plan, pairs, known)


def _tried(
    rng: np.random.Generator, plan: AnswerPlan, pairs: Sequence[BuildPair], known: Sequence[Between | None]
) -> EndedRelease:
    """A candidate that is qualified again until it passes, with one baseline; each try has less chance of a wrong pass."""
    baselines = [accuracy.establish(rng, plan, task, pair.baseline) for task, pair in zip(plan.tasks, pairs, strict=True)]
    for number in range(MOST_TRIES):
        level = plan._replace(false_pass=FALSE_PASS / (number + 1) ** 3)
        ended = accuracy.against(rng, level, baselines, [pair.candidate for pair in pairs], known)
        if ended.verdict == "pass":
            break
    return ended


def _of_loads_in(rng: np.random.Generator, job: _Job, plan: RepeatPlan) -> Iterator[Outcome]:
    setting, name = job.setting, job.setting.world.partition(", plan")[0]
    world = speed_worlds.WORLDS[name]
    approved = _earlier(setting, lambda: speed.release(rng, plan, world.before(), 0.0))
    for _ in range(job.runs):
        # Runs of one build show how much days differ.
        known = _drawn(rng, approved, setting.store, len(plan.margins), one_build=world.machine.days > 0)
        ended = speed.release(rng, plan, world, setting.lost, known)
        before = math.nan if setting.store else former.minutes_of_loads(rng, plan, world, setting.lost)
        yield Outcome(ended.verdict, ended.starts, ended.asked, ended.minutes, before)
