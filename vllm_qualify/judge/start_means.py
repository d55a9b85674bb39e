"""The means of compared metrics in each start of a server. They show other runs how much starts of one build differ."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pvariance
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from vllm_qualify.evidence import starts
from vllm_qualify.evidence.accuracy.answers import Answer
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement
from vllm_qualify.judge import relative
from vllm_qualify.judge.compare.loads import loads_of_gate
from vllm_qualify.judge.compare.looks import group_by_question, score_key
from vllm_qualify.judge.compare.places import find_task, own_label
from vllm_qualify.plan.cell import BetweenStarts, CellPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.recipe import MOST_STARTS
from vllm_qualify.recipe.values import Count, Frozen, NotNegative, Number


class StartMeans(Frozen):
    """The mean of each start in one metric, and the variance that the noise within each start gives it.

    They are `of` the build itself, or of a load's pairs in turns, of the cell's time over the baseline's: a neighbour that both
    had is not in these. Both are in shares of the questions, or in logarithms of times and rates. `label` is that of the metric
    itself. `repeats` is how many repeats of the load each start had; empty for answers.
    """

    label: str
    of: Literal["build", "pair"] = "build"
    means: Annotated[list[Number], Field(min_length=1, max_length=MOST_STARTS)]
    noises: Annotated[list[NotNegative], Field(min_length=1, max_length=MOST_STARTS)]
    repeats: Annotated[list[Count], Field(max_length=MOST_STARTS)] = []

    @model_validator(mode="after")
    def _are_of_the_same_starts(self) -> Self:
        if len(self.means) != len(self.noises) or (self.repeats and len(self.repeats) != len(self.means)):
            raise ValueError("each start has a mean and a noise, and all have their repeats or none")
        return self


class _Start(NamedTuple):
    mean: float
    noise: float
    repeats: int = 0


def start_means(plan: CellPlan, evidence: Path, measured: Sequence[Measurement]) -> list[StartMeans]:
    """The means of all starts in each metric that a gate compares. A metric is left out if its noise is not known."""
    means_of_gates = []
    for gate in plan.gates_over_starts:
        try:
            each = _of_answers(gate, plan, evidence) if gate.against == "answers" else _of_loads(gate, measured)
            pairs = _of_pairs(gate, plan, evidence, measured) if gate.against == "load" and plan.beside else []
        except UNUSABLE:
            # The report says what is wrong with the evidence.
            continue
        means_of_gates += [_means_of_gate(gate, "build", each)] if each else []
        means_of_gates += [_means_of_gate(gate, "pair", pairs)] if pairs else []
    return means_of_gates


def _means_of_gate(gate: Gate, of: Literal["build", "pair"], each: Sequence[_Start]) -> StartMeans:
    means, noises = [start.mean for start in each], [start.noise for start in each]
    repeats = [start.repeats for start in each if start.repeats]
    return StartMeans(label=own_label(gate), of=of, means=means, noises=noises, repeats=repeats)


def between_starts(label: str, builds: Mapping[str, Sequence[StartMeans]], runs: Sequence[str]) -> list[BetweenStarts]:
    """How much a metric differs between starts of a run, between pairs of starts in turns, and between runs of a build.

    A difference that nothing shows is left out. `builds` has the means that each run of a build showed.
    """
    of_builds, of_pairs = (
        [[_list_starts(means) for means in of_build if (means.label, means.of) == (label, of)] for of_build in builds.values()]
        for of in ("build", "pair")
    )
    of_days = [
        [_Start(fmean(start.mean for start in run), fmean(start.noise for start in run) / len(run)) for run in of_build]
        for of_build in of_builds
    ]
    by_source = {
        "start": _around_means(list(itertools.chain(*of_builds))),
        "pair": _around_means(list(itertools.chain(*of_pairs))),
        "day": _around_means(of_days),
    }
    return [BetweenStarts(label=label, of=of, runs=list(runs), **part) for of, part in by_source.items() if part]


def _list_starts(means: StartMeans) -> list[_Start]:
    return [_Start(*each) for each in zip(means.means, means.noises, means.repeats or [0] * len(means.means), strict=True)]


def _around_means(groups: Sequence[Sequence[_Start]]) -> dict[str, float]:
    """The variance around each group's own mean; empty if no group has two."""
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    if not freedom:
        return {}
    squares = math.fsum(len(group) * pvariance([start.mean for start in group]) for group in several)
    noise = math.fsum((len(group) - 1) * fmean(start.noise for start in group) for group in several)
    return {"variance": squares / freedom, "noise": noise / freedom, "freedom": float(freedom)}


def _of_answers(gate: Gate, plan: CellPlan, evidence: Path) -> list[_Start]:
    """By start. The noise is that of the first start. Raises one of UNUSABLE."""
    key, by_start = score_key(gate), dict[int, list[Answer]]()
    for answer in starts.answers_of(plan, evidence, find_task(plan, gate)).answers:
        by_start.setdefault(answer.start, []).append(answer)
    noise = _noise_of_answers(by_start[starts.FIRST], key)
    return [_mean_of_start(of_start, key, noise) for of_start in by_start.values()] if noise is not None else []


def _noise_of_answers(answers: Iterable[Answer], key: str) -> float | None:
    """The variance of one answer around its question's share, as in `paired.Answers.noise`; None if none was asked twice."""
    by_question = group_by_question(answers).values()
    spare = sum(len(alike) - 1 for alike in by_question)
    within = math.fsum(len(alike) * pvariance([answer.score(key) for answer in alike]) for alike in by_question)
    return (within + 0.5) / spare if spare else None


def _mean_of_start(answers: Sequence[Answer], key: str, noise: float) -> _Start:
    """Each question counts once, however often it was asked."""
    questions = group_by_question(answers).values()
    means = [fmean(answer.score(key) for answer in answers) for answers in questions]
    return _Start(fmean(means), noise * math.fsum(1 / len(answers) for answers in questions) / len(questions) ** 2)


def _of_loads(gate: Gate, measured: Sequence[Measurement]) -> list[_Start]:
    """By start, the first one first. Raises ValueError."""
    rows = [row for row in measured if row.metric == gate.metric and row.against is None and row.repeats]
    rows.sort(key=lambda row: row.start or starts.FIRST)
    repeats = [(repeat, row.start or starts.FIRST) for row in rows for repeat in row.repeats]
    return _of_repeats([repeat for repeat, _ in repeats], [start for _, start in repeats])


def _of_pairs(gate: Gate, plan: CellPlan, evidence: Path, measured: Sequence[Measurement]) -> list[_Start]:
    """The logarithms of the cell's repeats over the baseline's in turns, by start. Raises one of UNUSABLE."""
    _, ours, theirs = loads_of_gate(gate, plan, evidence, measured)
    return _of_repeats([one / other for one, other in zip(ours.values, theirs.values, strict=True)], ours.started)


def _of_repeats(values: Sequence[float], started: Sequence[int]) -> list[_Start]:
    """By start, with the noise of a repeat in all of them; empty if no start has two repeats. Raises as `relative.build_of`."""
    build = relative.build_of(values, started)
    if not build.freedom:
        return []
    means = build.start_means(build.noise)
    return [_Start(*each, len(group)) for each, group in zip(means, build.groups, strict=True)]
