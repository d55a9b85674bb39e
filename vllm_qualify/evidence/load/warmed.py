"""Whether a server of a load in turns was warmed up as planned, by the files that `client.measure_load` leaves of that.

Both servers are held to the same plan. So both were asked alike if neither has a problem.
"""

from pathlib import Path

from vllm_qualify.evidence.load import agreement
from vllm_qualify.evidence.load.agreement import Asked
from vllm_qualify.evidence.load.problems import counters_of, request_problems
from vllm_qualify.evidence.load.replay import planned_trace
from vllm_qualify.evidence.load.result import Repeat, read_repeat
from vllm_qualify.evidence.load.warm_up import WARM_UP, warm_up_of_both
from vllm_qualify.evidence.measurement import UNUSABLE, in_words
from vllm_qualify.recipe.serving import EngineName, ServerArguments
from vllm_qualify.recipe.workload import Load

REMEDY = "measure the load again"


def warm_up_problems(
    folder: Path, settings: Load, kind: EngineName, arguments: ServerArguments, model: str | None
) -> list[str]:
    """Why the server was not warmed up as planned before the first repeat in a folder; `kind` and `arguments` are its own."""
    try:
        problems = _problems(folder, settings, kind, arguments, model)
    except UNUSABLE as error:
        problems = [in_words(error)]
    # Unlike warmth, and no slowness of a release, could then be what the load shows.
    return [f"the server was not warmed up like the one that it ran in turns with: {each}: {REMEDY}" for each in problems]


def _problems(folder: Path, settings: Load, kind: EngineName, arguments: ServerArguments, model: str | None) -> list[str]:
    asked, repeat = warm_up_of_both(settings, planned_trace(folder, settings)), read_repeat(folder, folder.name, WARM_UP)
    if problems := request_problems(repeat.about, asked):
        return problems
    (before, after), counted = counters_of(*_pages(folder, WARM_UP))
    (first, _), _ = counters_of(*_pages(folder, 1))
    return [
        *_copied(folder, repeat),
        *agreement.result_problems(repeat.result, Asked(asked, model, asked.request_rate), kind, arguments),
        *(agreement.went_back(before, after) or agreement.went_back(after, first)),
        *agreement.counter_problems(repeat.about, counted, asked, kind),
    ]


def _copied(folder: Path, repeat: Repeat) -> list[str]:
    is_copy = agreement.share_requests([repeat], [read_repeat(folder, folder.name, 1)])
    return ["it has the requests of repeat 1, or ran at the same time"] if is_copy else []


def _pages(folder: Path, number: int) -> list[Path]:
    return [folder / f"metrics-{number}-{when}.txt" for when in ("before", "after")]
