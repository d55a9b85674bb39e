"""A report's details beside its measurements: the baseline, questions, a sweep's points, drafts, the parts of the start, …"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise, starmap
from pathlib import Path
from typing import Any, TypeVar

from vllm_qualify.errors import CallerError
from vllm_qualify.evidence import startup, watched
from vllm_qualify.evidence.idle import Idle
from vllm_qualify.evidence.load import figures, result, soak, speculation, sweep
from vllm_qualify.evidence.load.cut_prompts import OPTION, cut_prompts
from vllm_qualify.evidence.load.fitting import Tried
from vllm_qualify.evidence.load.problems import ClientUse
from vllm_qualify.evidence.load.soak import SoakCourse
from vllm_qualify.evidence.load.speculation import SpeculationDetails
from vllm_qualify.evidence.load.sweep import Swept
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words
from vllm_qualify.evidence.paths.details import PathsDetails
from vllm_qualify.evidence.serving import LAUNCHED_BY_CLOCK, launched_by_clock
from vllm_qualify.evidence.stages.fit import fit_result
from vllm_qualify.evidence.stages.paths import read_paths
from vllm_qualify.evidence.stages.serve import idle_gpus
from vllm_qualify.evidence.stages.speculation import why_not_compared
from vllm_qualify.evidence.stages.sweep import sweep_plan
from vllm_qualify.evidence.startup import Startup
from vllm_qualify.evidence.watched import Series
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.report.before import Before, Drift, find_drift, read_anchor, read_before
from vllm_qualify.report.questions import ScoredQuestions, score_questions

MOST_SAMPLES = 300
# Of each line the largest, the smallest and a missing value; of the whole course the first and the last sample.
KEPT_OF_A_LINE, KEPT_OF_ALL = 3, 2

T = TypeVar("T")


class Details(Frozen):
    """The details of a report. A missing detail is None; if it should be there, `notes` has the reason.

    `before` is the baseline, `anchor` has the anchor's scores, `drift` what the tables say about the server's options.
    `speedups` are the gains of speculative decoding, also without a gate on them. `course` is the server's course during the
    load, with fewer samples. `course_notes` are remarks on a load that still counts. `soak` has the rounds of a soak,
    `paths` how each path was taken, with the replies that differ.
    """

    before: Before | None = None
    anchor: list[Measurement] = []
    drift: Drift | None = None
    questions: list[ScoredQuestions] = []
    sweep: Swept | None = None
    speculation: SpeculationDetails | None = None
    speedups: list[Measurement] = []
    startup: Startup | None = None
    idle: Idle | None = None
    fit: Tried | None = None
    course: Series | None = None
    course_notes: list[str] = []
    soak: SoakCourse | None = None
    paths: PathsDetails | None = None
    notes: list[str] = []


def details_of(plan: CellPlan, evidence: Path, speedups: Sequence[Measurement] = ()) -> Details:
    """The details of a run, read only from its evidence folder; `speedups` are those of judge.compare.speedup."""
    notes: list[str] = []

    def read(what: str, of: Callable[[CellPlan, Path], T | None]) -> T | None:
        try:
            return of(plan, evidence)
        except _NothingError as error:
            notes.append(f"{what}: {error}")
        except UNUSABLE as error:
            notes.append(f"{what}: no usable evidence: {in_words(error)}")
        return None

    return Details(
        before=read("baseline", read_before),
        anchor=read("anchor", read_anchor) or [],
        drift=read("drift", _read_drift),
        questions=score_questions(plan, evidence),
        sweep=read("sweep", _read_sweep),
        speculation=read("speculative decoding", _read_speculation),
        speedups=list(speedups),
        startup=read("start-up", _read_startup),
        idle=read("idle GPUs", lambda plan, evidence: idle_gpus(evidence / "serve", plan)),
        fit=read("fit", lambda plan, evidence: fit_result(evidence) if plan.fit else None),
        **(read("the server during the load", _read_course) or {}),
        soak=read("soak", _read_soak),
        paths=read("paths", lambda plan, evidence: read_paths(plan, evidence) if plan.paths else None),
        # Last: all that is read before may add a note.
        notes=notes,
    )


class _NothingError(ValueError):
    """A detail that should be there is missing; the message says why."""


def _read_drift(plan: CellPlan, _evidence: Path) -> Drift | None:
    try:
        return find_drift(plan)
    except CallerError as error:
        raise _NothingError(error.problem) from error


def _read_sweep(plan: CellPlan, evidence: Path) -> Swept | None:
    return sweep.parse_sweep(_stage_folder(evidence / sweep.STAGE), sweep_plan(plan)) if plan.sweep else None


def _read_speculation(plan: CellPlan, evidence: Path) -> SpeculationDetails | None:
    if not plan.is_speculative:
        return None
    if plan.undrafted is None:
        raise _NothingError(why_not_compared(plan))
    return speculation.document(_stage_folder(evidence / speculation.STAGE), plan.load)


def _stage_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise _NothingError("the stage left nothing")
    return folder


def _read_startup(plan: CellPlan, evidence: Path) -> Startup | None:
    """The parts of the start; None if the engine's log is not read, or the launch was not recorded."""
    folder = evidence / "serve"
    wording = plan.server.engine_kind.start_log
    if wording is None or not (plan.watched or (folder / LAUNCHED_BY_CLOCK).exists()):
        return None
    whole_s, launched = float((folder / "startup_s").read_text()), launched_by_clock(folder)
    log = (folder / "server.log").read_text(errors="replace")
    return startup.startup(log, whole_s, launched, plan.pulled_s, wording=wording)


def _read_course(plan: CellPlan, evidence: Path) -> dict[str, Any] | None:
    """The details `course` and `course_notes`."""
    # Other engines give no figures to draw.
    if not plan.watched or not plan.server.engine_kind.tells_its_queue:
        return None
    began, ended = _span_of_load(evidence / figures.STAGE)
    folder = evidence / "serve"
    series = watched.series(folder, began, ended)
    if len(series.time_s) == 1:
        raise _NothingError("one sample of it alone draws no line")
    if not any(value is not None for line in _course_lines(series) for value in line):
        raise _NothingError("no sample of it has a value")
    cut = cut_prompts(evidence / figures.STAGE, plan.server.arguments.get(OPTION))
    return {"course": thin_course(series), "course_notes": [*watched.notes(folder, began, ended), *cut]}


def _read_soak(plan: CellPlan, evidence: Path) -> SoakCourse | None:
    if plan.soak is None:
        return None
    folder = _stage_folder(evidence / soak.STAGE)
    return soak.soak_course(folder, plan.server.gpus, watched.watched_in(folder, evidence / "serve"))


def _span_of_load(folder: Path) -> tuple[float, float]:
    """From the start of the first repeat's measured part to the end of the last one's, by the client's clock."""
    began, ends = [], []
    for path in _stage_folder(folder).glob("client-*.json"):
        number = int(path.stem.removeprefix("client-"))
        ended, _ = ClientUse.model_validate_json(path.read_bytes()).cpu_s[-1]
        duration = float(result.read_repeat(folder, folder.name, number).summary["duration"])
        if not 0 < duration < math.inf:
            raise _NothingError(f"repeat {number} lasted {duration} s")
        began.append(ended - duration)
        ends.append(ended)
    if not ends:
        raise _NothingError("no client recorded when it asked")
    return min(began), max(ends)


def thin_course(course: Series, most: int = MOST_SAMPLES) -> Series:
    """At most `most` of the samples, unchanged, with every peak and every dip.

    Of stretches of equal counts each line keeps its largest value, its smallest, and a missing one, so that it stays broken
    there. Stretches become longer until few enough are kept. Raises ValueError if `most` is too small for one stretch.
    """
    count = len(course.time_s)
    if count <= most:
        return course
    largest = KEPT_OF_A_LINE * len(_course_lines(course)) + KEPT_OF_ALL
    if most < largest:
        raise ValueError(f"a course cannot be thinned to fewer than {largest} samples")
    stretches = most
    while len(kept := _kept_places(course, stretches)) > most:
        stretches = stretches * 3 // 4
    return Series.model_validate({name: [line[at] for at in kept] for name, line in course.model_dump().items()})


def _course_lines(course: Series) -> list[list[float | None]]:
    return [course.running, course.waiting, course.kv_cache_usage, course.output_tok_s]


def _kept_places(course: Series, stretches: int) -> list[int]:
    count = len(course.time_s)
    places = starmap(range, pairwise(count * number // stretches for number in range(stretches + 1)))
    telling = {at for stretch in places for line in _course_lines(course) for at in _telling_places(line, stretch)}
    return sorted({0, count - 1} | telling)


def _telling_places(line: Sequence[float | None], stretch: range) -> Iterator[int]:
    known = [(value, at) for at in stretch if (value := line[at]) is not None]
    if known:
        yield max(known)[1]
        yield min(known)[1]
    yield from islice((at for at in stretch if line[at] is None), 1)
