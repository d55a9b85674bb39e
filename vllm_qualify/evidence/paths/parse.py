"""Measurements of each path from its files alone: which answers changed, by how much, and whether the path was taken."""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from scipy import special

from vllm_qualify.engine.kinds.base import EngineKind
from vllm_qualify.evidence.contract.replies import MissingError
from vllm_qualify.evidence.measurement import UNUSABLE, Interval, Measurement, around, in_words, invalid, share_interval, valid
from vllm_qualify.evidence.paths.changes import (
    MOST_NAT,
    Tolerance,
    distance_nat,
    find_changed,
    limit_nat,
    nll_changes_nat,
    power,
)
from vllm_qualify.evidence.paths.constrained import EXCHANGES, NAMED, describe_broken, doubt_cuts, judge_replies, say_cut
from vllm_qualify.evidence.paths.kinds import BUSY_PATHS, COLD, COLD_AGAIN, PAGES, REPLIES, Seen, read_counted, read_recovered
from vllm_qualify.evidence.paths.measure import DOUBTED, INVARIANT, STAGE, Asker
from vllm_qualify.evidence.paths.replies import Reply, are_refused
from vllm_qualify.evidence.sequential import Levels, Sides, sides_of
from vllm_qualify.recipe.metrics import (
    AWAKE,
    CHANGED,
    CONSTRAINED,
    FIRST_TOKEN,
    RECOVERED,
    SCHEMA_VALID,
    TOOL_CALL_VALID,
    path_metric,
)

COLD_PASSES = (COLD, COLD_AGAIN)
NOT_COLD = "the cold answers, which all are held against, came from the prefix cache"
# The share of replies to other prompts that must be seen in place of the right ones.
LEAST_POWER = 0.9


class Colds:
    """The cold replies, which all others are held against."""

    def __init__(self, folder: Path, asker: Asker, at_once: int, kind: EngineKind) -> None:
        passes = [see_path(name, folder, asker, at_once, kind) for name in COLD_PASSES]
        self.first, self.second = (seen.replies for seen in passes)
        self.faults = [fault for seen in passes if (fault := BUSY_PATHS[COLD].fault(seen))]
        self.limit_nat = limit_nat(self.first, self.second)
        self.power = power(self.first, self.limit_nat)
        places = asker.find_doubted(folder)
        doubted = [asker.prompts[at] for at in places]
        more = [asker.read(folder, name, doubted) for name in DOUBTED] if doubted else []
        self._again = {at: [again[number] for again in more] for number, at in enumerate(places)}
        self._before_sleep = [*_read_usable(folder, asker)] if AWAKE in asker.taken else []

    def find_changed(self, path: str, replies: Sequence[Reply], tolerance: Tolerance) -> list[int]:
        """The replies that no cold one allows, nor those to the prompt once more.

        A server that was woken is asked for no further ones: they could be as wrong. All replies from before are held against
        it instead.
        """
        before = [self.first, self.second, *(self._before_sleep if path == AWAKE else [])]
        far = find_changed(replies, before, tolerance)
        return [at for at in far if not any(tolerance.allows(replies[at], cold) for cold in self._again.get(at, []))]


def _read_usable(folder: Path, asker: Asker) -> Iterator[list[Reply]]:
    """The replies on each path before the server slept, but for the cold ones."""
    for path in asker.taken:
        if path not in (COLD, CONSTRAINED, AWAKE):
            with suppress(*UNUSABLE):
                yield asker.read(folder, path)


def parse_paths(folder: Path, asker: Asker, at_once: int, kind: EngineKind, levels: Levels) -> list[Measurement]:
    """The measurements of all paths that are taken."""
    answers = _parse_answers(folder, asker, at_once, kind, levels)
    constrained = _parse_constrained(folder, asker, at_once, kind, levels)
    return [*answers, *constrained, *_measure_recovery(folder, asker)]


def refuse_all(asker: Asker, because: str, *, is_unproven: bool = False) -> list[Measurement]:
    """The measurements of all paths that are taken, all of them invalid."""
    return [row for path in asker.taken for row in _invalid_rows(path, asker, because, is_unproven=is_unproven)]


def _parse_answers(folder: Path, asker: Asker, at_once: int, kind: EngineKind, levels: Levels) -> Iterator[Measurement]:
    paths = [path for path in asker.taken if path != CONSTRAINED]
    try:
        colds = Colds(folder, asker, at_once, kind)
    except UNUSABLE as error:
        is_refused = are_refused(folder / COLD / REPLIES)
        for path in paths:
            yield from _invalid_rows(path, asker, f"no usable cold answers: {in_words(error)}", is_unproven=is_refused)
        return
    for path in paths:
        try:
            yield from _parse_path(path, folder, asker, at_once, kind, levels, colds)
        except UNUSABLE as error:
            is_refused = are_refused(folder / path / REPLIES)
            yield from _invalid_rows(path, asker, f"no usable answers: {in_words(error)}", is_unproven=is_refused)


def _parse_path(
    path: str, folder: Path, asker: Asker, at_once: int, kind: EngineKind, levels: Levels, colds: Colds
) -> list[Measurement]:
    seen = see_path(path, folder, asker, at_once, kind)
    doubts = [*BUSY_PATHS[path].doubts(seen), *([_say_power(colds)] if colds.power < LEAST_POWER else [])]
    replies, changed = find_changed_on(path, seen.replies, asker, colds)
    if path == COLD:
        fault = "; ".join(colds.faults)
    else:
        fault = BUSY_PATHS[path].fault(seen)
        doubts += [NOT_COLD] if colds.faults else []
    # A fault is one, whichever path its answer took, and whatever else would not be seen.
    if doubts and not changed and not fault:
        return _invalid_rows(path, asker, "; ".join(doubts), is_unproven=True)
    count, source = len(replies), _source(path)
    changes = nll_changes_nat(replies, colds.first)
    traced = [f"{source}:{at + 1}" for at in changed]
    name = path_metric(path)
    shared = {"sample_count": count, "traced_to": traced or [source]}
    sides = sides_of("lower", levels.false_pass, levels.false_fail)
    to_the_letter = asker.tolerance_for(path, colds.limit_nat).to_the_letter
    noise = f"where {INVARIANT} promises the same tokens" if to_the_letter else f"where {colds.limit_nat:.1f} nat are noise"
    finding = "; ".join(filter(None, [fault, _describe_changes(changed, replies, colds, noise), *doubts]))
    return [
        valid(name, float(not finding), source, finding=finding, **shared),
        valid(
            path_metric(path, CHANGED),
            len(changed) / count,
            source,
            interval=share_interval(len(changed), count, sides),
            **shared,
        ),
        valid(
            path_metric(path, FIRST_TOKEN), statistics.fmean(changes), source, interval=_mean_interval(changes, sides), **shared
        ),
    ]


def _say_power(colds: Colds) -> str:
    seen = f"of other prompts' replies only {colds.power:.0%} would be seen in place of the right ones"
    return f"{seen}, where {colds.limit_nat:.1f} nat are noise, and {LEAST_POWER:.0%} must: raise reply_tok"


def find_changed_on(path: str, replies: Sequence[Reply], asker: Asker, colds: Colds) -> tuple[Sequence[Reply], list[int]]:
    """The replies of a path that are held against cold ones, and which of them changed, by their places."""
    if path == COLD:
        # Two cold answers that are this far apart have no noise that could be allowed.
        return colds.second, find_changed(colds.second, [colds.first], asker.tolerance_for(path, MOST_NAT))
    return replies, colds.find_changed(path, replies, asker.tolerance_for(path, colds.limit_nat))


def _parse_constrained(folder: Path, asker: Asker, at_once: int, kind: EngineKind, levels: Levels) -> list[Measurement]:
    """Of the replies that must have a form. Those that were cut tell nothing."""
    path, inside = CONSTRAINED, folder / CONSTRAINED
    if path not in asker.taken:
        return []
    try:
        judged = judge_replies(inside / EXCHANGES, asker.forms, asker.requests, kind, asker.asking)
        seen = Seen(inside, kind, asker.settings, (), at_once, read_counted(inside / PAGES[0], inside / PAGES[1]))
        doubts = [*BUSY_PATHS[path].doubts(seen)]
    except (*UNUSABLE, MissingError) as error:
        return _invalid_rows(path, asker, f"no usable replies: {in_words(error)}")
    whole = [reply for reply in judged if not reply.is_cut]
    broken = [reply for reply in whole if reply.problem]
    doubts += doubt_cuts(judged, asker.asking)
    if doubts and not broken:
        return _invalid_rows(path, asker, "; ".join(doubts), is_unproven=True)
    source, sides = _source(path), sides_of("higher", levels.false_pass, levels.false_fail)
    finding = "; ".join(filter(None, [describe_broken(judged), *doubts]))
    traced = [f"{source}:{reply.line}" for reply in broken] or [source]
    rows = [valid(path_metric(path), float(not broken), source, finding=finding, sample_count=len(whole), traced_to=traced)]
    for metric, is_schema in _shares_of(asker):
        problems = [reply.problem for reply in whole if (reply.form.schema is not None) == is_schema]
        if not problems:
            rows.append(invalid(metric, f"all of its replies were cut, {say_cut(asker.asking)}", source))
            continue
        fitting = problems.count("")
        interval = share_interval(fitting, len(problems), sides)
        rows.append(valid(metric, fitting / len(problems), source, interval=interval, sample_count=len(problems)))
    return rows


def _shares_of(asker: Asker) -> list[tuple[str, bool]]:
    """The shares that there are, each with whether it is of replies to a schema."""
    shares = (("json_schema", SCHEMA_VALID, True), ("tools", TOOL_CALL_VALID, False))
    return [(metric, is_schema) for capability, metric, is_schema in shares if capability in asker.capabilities]


def see_path(path: str, folder: Path, asker: Asker, at_once: int, kind: EngineKind) -> Seen:
    """Raises one of UNUSABLE."""
    inside = folder / path
    counted = read_counted(inside / PAGES[0], inside / PAGES[1])
    return Seen(inside, kind, asker.settings, asker.read(folder, path), at_once, counted)


def _describe_changes(changed: Sequence[int], replies: Sequence[Reply], colds: Colds, noise: str) -> str:
    if not changed:
        return ""
    far = {at: distance_nat(replies[at], colds.first[at]) for at in changed}
    worst = sorted(far, key=lambda at: -far[at])[:NAMED]
    named = ", ".join(f"prompt {at + 1} by {far[at]:.1f} nat" for at in worst)
    more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
    return f"{len(changed)} of {len(replies)} answers changed, {noise}: {named}{more}"


def _mean_interval(values: Sequence[float], sides: Sides) -> Interval | None:
    """Student's t bounds for a mean."""
    if len(values) < 2:
        return None
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    below, above = (-float(special.stdtrit(len(values) - 1, alpha)) * error for alpha in sides)
    return around(mean, mean - below, mean + above)


def _measure_recovery(folder: Path, asker: Asker) -> list[Measurement]:
    if "aborted" not in asker.taken:
        return []
    source = f"{STAGE}/aborted/recovered.json"
    try:
        return [valid(RECOVERED, read_recovered(folder / "aborted").waited_s, source, sample_count=asker.settings.num_aborts)]
    except UNUSABLE as error:
        return [invalid(RECOVERED, f"it is not known: {in_words(error)}", source)]


def _invalid_rows(path: str, asker: Asker, because: str, *, is_unproven: bool = False) -> list[Measurement]:
    of_answers = [path_metric(path, CHANGED), path_metric(path, FIRST_TOKEN)]
    names = [path_metric(path), *([metric for metric, _ in _shares_of(asker)] if path == CONSTRAINED else of_answers)]
    return [invalid(name, because, _source(path), is_unproven=is_unproven) for name in names]


def _source(path: str) -> str:
    return f"{STAGE}/{path}/{EXCHANGES if path == CONSTRAINED else REPLIES}"
