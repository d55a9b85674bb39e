"""The report of one cell: its verdict and everything that led to it, as versioned JSON."""

from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from vllm_qualify.engine.host import machine_name
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.evidence.measurement import EvidenceFile, Measurement, StageEvidence
from vllm_qualify.judge.chance import CellChance, p_of_cell
from vllm_qualify.judge.verdict import Judgement, Outcome
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.report.details import Details

REPORT_VERSION: Literal[2] = 2


class Report(Frozen):
    """Everything that a release manager needs for a decision, in one document.

    `rejudged_from` is the run whose evidence was judged again; None for a run's own report. `judged_on` is the machine that
    judged, by its name in the fleet.
    """

    report_version: Literal[2] = 2
    made_by: str
    created_at: datetime
    run_id: str
    rejudged_from: str | None = None
    judged_on: str = ""
    plan: CellPlan
    stages: list[StageEvidence]
    judgement: Judgement
    details: Details = Details()

    @property
    def passed(self) -> bool:
        return self.judgement.passed

    @property
    def outcome(self) -> Outcome:
        return "passed" if self.passed else "not passed"

    @property
    def is_baseline(self) -> bool:
        """Whether it becomes a baseline when it is approved. A run that is judged again does not become one."""
        return self.plan.establishes and self.rejudged_from is None

    @property
    def is_baseline_again(self) -> bool:
        """Whether it judges a run again that was made to be a baseline: it can be that of runs with the same gates."""
        return self.plan.establishes and self.rejudged_from is not None

    @property
    def is_new_anchor(self) -> bool:
        """Whether it becomes the cell's anchor when it is approved."""
        return self.plan.new_anchor and self.is_baseline

    @property
    def chance(self) -> CellChance:
        """How likely a cell that lost nothing and meets all its bounds would be judged so, by chance alone."""
        verdict = self.judgement.verdict
        return CellChance(cell=self.plan.cell.id, verdict=verdict, p_value=p_of_cell(self.judgement.gates, verdict))

    @property
    def prefix(self) -> str:
        """The folder of this report in the store."""
        return f"reports/{self.plan.cell.id}/{self.run_id}"

    @property
    def measurements(self) -> list[Measurement]:
        return [row for stage in self.stages for row in stage.measurements]

    @property
    def baseline_measurements(self) -> list[Measurement]:
        """The baseline's own measurements; empty without a baseline."""
        return self.details.before.measurements if self.details.before else []

    @property
    def files(self) -> list[EvidenceFile]:
        return [file for stage in self.stages for file in stage.files]


def make_report(
    plan: CellPlan,
    stages: list[StageEvidence],
    judgement: Judgement,
    rejudged_from: str | None = None,
    details: Details | None = None,
) -> Report:
    return Report(
        made_by=f"vllm-qualify {metadata.version('vllm-qualify')}",
        created_at=datetime.now(UTC),
        run_id=plan.run_id,
        rejudged_from=rejudged_from,
        judged_on=machine_name(),
        plan=plan,
        stages=stages,
        judgement=judgement,
        details=details or Details(),
    )


def read_report(body: bytes | str, place: str) -> Report:
    """Raises StoreError if it is not a report of this version."""
    try:
        return Report.model_validate_json(body)
    except ValidationError as error:
        problem = f"not a report of version {REPORT_VERSION}: {error.errors()[0]['msg']}"
        raise StoreError(problem, "read it with the version that wrote it", place) from error


def load_report(path: Path) -> Report:
    """The report in a file, or in the `report.json` of a folder. Raises CallerError if there is none."""
    file = path / "report.json" if path.is_dir() else path
    if not file.is_file():
        raise CallerError(f"no report at {path}", "give a run's id, its folder, or a report.json", "REPORT")
    return read_report(file.read_bytes(), str(file))
