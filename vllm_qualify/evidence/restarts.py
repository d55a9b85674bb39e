"""Whether a server was started anew while it was measured: what it measured then is no longer one server's.

Its metrics pages tell it: counters go back, and the process that answers says when it began. A page of several processes does
not say that, and counters that are kept in one process outlive an engine in another: so a load also notes the engine's
processes, see `engine.process_tree`.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.engine.metrics_page import samples_of
from vllm_qualify.engine.process_tree import EngineProcess
from vllm_qualify.recipe.values import Frozen

# Prometheus's own name for when the process that answers began, in s since 1970.
BEGAN = "process_start_time_seconds"
REMEDY = "see in the server's log why it ended, and measure again"


class Processes(Frozen):
    """`processes-N.json`: the engine's own processes right before a repeat and right after; None if they are not known."""

    before: list[EngineProcess] | None
    after: list[EngineProcess] | None


class Moment(NamedTuple):
    """What was seen of a server at one moment. `when` completes "the server was started anew between … and …".

    `processes` is None if they are not known. Such a moment `is_noted`, if only not known, unless it is of an older run.
    """

    when: str
    page: str
    processes: list[EngineProcess] | None = None
    is_noted: bool = False


def labelled_totals(page: str) -> dict[str, float]:
    """A page's counters by name and labels. Raises ValueError if it is no page of metrics."""
    return {
        f"{sample.name}{{{sorted(sample.labels.items())}}}": sample.value
        for sample in samples_of(page, lambda line: "_total" in line)
        if sample.name.endswith("_total")
    }


def restart_problems(moments: Sequence[Moment]) -> list[str]:
    """That the server was started anew between two moments, in the order of time; the first time only.

    Raises ValueError if a page is no page of metrics.
    """
    for one, other in pairwise(moments):
        if signs := list(_find_signs(moments[0], one, other)):
            return [f"the server was started anew between {one.when} and {other.when}: {'; '.join(signs)}: {REMEDY}"]
    return []


def _find_signs(first: Moment, one: Moment, other: Moment) -> Iterator[str]:
    earlier, later = _read_began(one.page), _read_began(other.page)
    if earlier and later and earlier != later:
        clocks = (datetime.fromtimestamp(max(began), UTC).strftime("%H:%M:%S") for began in (earlier, later))
        yield f"it began at {', and then at '.join(clocks)}"
    if one.processes is not None and other.processes is not None:
        gone = [str(each.pid) for each in one.processes if each not in other.processes]
        if gone:
            yield f"its process {', '.join(gone)} is no more"
    # Evidence of older runs may be of repeats that were put together: there a count may not be less than at the first.
    is_whole = (one.is_noted and other.is_noted) or (earlier and later)
    before, after = labelled_totals((one if is_whole else first).page), labelled_totals(other.page)
    if back := sorted({key.partition("{")[0] for key, value in before.items() if after.get(key, value) < value}):
        more = f" and {len(back) - 1} more" if len(back) > 1 else ""
        yield f"its count of {back[0]}{more} went back"


def _read_began(page: str) -> set[float]:
    return {sample.value for sample in samples_of(page, lambda line: BEGAN in line) if sample.name == BEGAN}


def processes_path(folder: Path, repeat: int) -> Path:
    return folder / f"processes-{repeat}.json"


def moments_of_repeats(folder: Path, numbers: Sequence[int]) -> list[Moment]:
    """What was seen of a load's server before and after each repeat. Raises one of UNUSABLE."""
    return [moment for number in numbers for moment in _read_moments(folder, number)]


def _read_moments(folder: Path, number: int) -> list[Moment]:
    path = processes_path(folder, number)
    noted = Processes.model_validate_json(path.read_bytes()) if path.exists() else Processes(before=None, after=None)
    edges = (("before", "start", noted.before), ("after", "end", noted.after))
    return [
        Moment(f"the {edge} of repeat {number}", (folder / f"metrics-{number}-{when}.txt").read_text(), seen, path.exists())
        for when, edge, seen in edges
    ]
