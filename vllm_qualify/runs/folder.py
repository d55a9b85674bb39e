"""One qualification of one cell on disk: its folder, by its id or as the newest."""

from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from vllm_qualify.errors import CallerError, HostError, writing
from vllm_qualify.evidence.measurement import EvidenceFile, StageEvidence
from vllm_qualify.evidence.stages.table import on_the_server
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import STAGES, StageName
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.report.model import Report, load_report
from vllm_qualify.report.page import render_page, render_words
from vllm_qualify.runs.home import runs_folder
from vllm_qualify.secrets import redact

DATA_DOCS = "data-docs"

F = TypeVar("F", bound=Frozen)


class Run(Frozen):
    """The folder of one run: its plan, stages/, kept/, evidence/, data-docs/, and its report. None of its files is edited.

    A file that is damaged raises HostError when it is read.
    """

    folder: Path

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def evidence(self) -> Path:
        return self.folder / "evidence"

    @property
    def data_docs(self) -> Path:
        return self.folder / DATA_DOCS

    @cached_property
    def plan(self) -> CellPlan:
        return _read_model(CellPlan, self.folder / "plan.json")

    def save_stage(self, stage: StageEvidence) -> None:
        write_text(self._file_of(stage.stage), stage.model_dump_json(indent=2))

    def stages(self) -> list[StageEvidence]:
        """The finished stages, in their order."""
        return [found for name in STAGES if (found := self.stage(name))]

    def stage(self, name: StageName) -> StageEvidence | None:
        """A stage; None if it is not finished."""
        path = self._file_of(name)
        return _read_model(StageEvidence, path) if path.exists() else None

    def _file_of(self, name: StageName) -> Path:
        return self.folder / "stages" / f"{name}.json"

    def read(self, file: EvidenceFile) -> bytes:
        """The content of a file of its evidence. Raises OSError."""
        return (self.evidence / file.path).read_bytes()

    def report(self) -> Report:
        return load_report(self.folder)

    def save_report(self, report: Report) -> None:
        write_text(self.folder / "report.json", report.model_dump_json(indent=2))
        write_text(self.folder / "report.html", render_page(report, lambda file: f"evidence/{file.path}"))
        for name, page in render_words(report, self.evidence).items():
            write_text(self.folder / name, page)


def _read_model(kind: type[F], file: Path) -> F:
    try:
        return kind.model_validate_json(file.read_bytes())
    except ValidationError as error:
        problem = f"damaged, or of another version: {error.errors()[0]['msg']}"
        remedy = "delete the run's folder; then fetch the run from its store (--store), or qualify the cell again"
        raise HostError(problem, remedy, str(file)) from error


def start_run(plan: CellPlan) -> Run:
    """Create the run's folder, with its plan. Raises HostError if the folder cannot be written."""
    run = Run(folder=runs_folder() / plan.run_id)
    write_text(run.folder / "plan.json", plan.model_dump_json(indent=2), place="plan")
    return run


def lacking_stages(run: Run) -> list[StageName]:
    """The stages that still have to be measured, in their order."""
    return [stage for stage in on_the_server(run.plan) if run.stage(stage) is None]


def find_run(name: str | None) -> Run:
    """A run by id or folder; without a name, the latest one that has a report. Raises CallerError if there is none."""
    runs = runs_folder()
    if name is None:
        reported = sorted(path.parent for path in runs.glob("*/report.json"))
        if not reported:
            raise CallerError(f"no run with a report in {runs}", "qualify something first: vllm-qualify demo", "RUN")
        return Run(folder=reported[-1])
    for folder in (Path(name).expanduser(), runs / name):
        if (folder / "plan.json").is_file():
            return Run(folder=folder.resolve())
    raise CallerError(f"no run '{name}' in {runs}", "give a run's id or its folder; --store finds it in a store", "RUN")


def run_id_of(name: str) -> str:
    """The id of a run that is given by id, folder or report.json. Raises CallerError if a path has no report."""
    file = report_file(name)
    return load_report(file).run_id if file else name


def report_file(name: str) -> Path | None:
    """The file of a report that is given by its folder or its path; None for an id."""
    path = Path(name).expanduser()
    if "/" not in name and not name.endswith(".json") and not path.is_dir():
        return None
    return path / "report.json" if path.is_dir() else path


def write_text(path: Path, text: str, place: str = "") -> None:
    """Write a file completely or not at all."""
    with writing(place or str(path.parent)):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(redact(text))
        fresh.replace(path)
