"""One qualification of one cell on disk: its folder, and what needs no server (judge, report, publish, judge again)."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_qualify.engine.plan import CellPlan, new_run_id
from vllm_qualify.errors import CallerError, HostError, QualifyError, StoreError, writing
from vllm_qualify.evidence.measurement import EvidenceFile, StageEvidence, describe
from vllm_qualify.evidence.stages import parse
from vllm_qualify.judge.expectations import judge
from vllm_qualify.publish.bundle import evidence_key, publish, read_manifest
from vllm_qualify.publish.store import Store, open_store
from vllm_qualify.recipe.metrics import STAGES
from vllm_qualify.recipe.model import Frozen
from vllm_qualify.report.model import Report, make_report, read_report
from vllm_qualify.report.page import render_page
from vllm_qualify.secrets import redact


def home() -> Path:
    """Where runs and the default store lie: VLLM_QUALIFY_HOME, else ~/.vllm-qualify."""
    return Path(os.environ.get("VLLM_QUALIFY_HOME", "~/.vllm-qualify")).expanduser().absolute()


def make_home() -> Path:
    """`home`, made if it is not there. Raises HostError if it cannot be."""
    folder = home()
    with writing("check"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def engine_cache() -> Path:
    """What engines told when they were asked: one file for each engine and question."""
    return home() / "engines"


def default_store_url() -> str:
    return f"file://{home() / 'store'}"


class Run(Frozen):
    """The folder of one run. What is in it is never edited: plan.json, stages/, evidence/, report.json, report.html."""

    folder: Path

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def evidence(self) -> Path:
        return self.folder / "evidence"

    @property
    def plan(self) -> CellPlan:
        return CellPlan.model_validate_json((self.folder / "plan.json").read_bytes())

    def save_stage(self, stage: StageEvidence) -> None:
        _write(self.folder / "stages" / f"{stage.stage}.json", stage.model_dump_json(indent=2))

    def stages(self) -> list[StageEvidence]:
        """The finished stages, in their order."""
        paths = [self.folder / "stages" / f"{stage}.json" for stage in STAGES]
        return [StageEvidence.model_validate_json(path.read_bytes()) for path in paths if path.exists()]

    def save_report(self, report: Report) -> None:
        _write(self.folder / "report.json", report.model_dump_json(indent=2))
        _write(self.folder / "report.html", render_page(report, lambda file: f"evidence/{file.path}"))


class Published(Frozen):
    """Where a report went."""

    outcome: str
    approved: bool
    run: Run
    page: str
    manifest: str


def start_run(plan: CellPlan) -> Run:
    """The run's folder, with its plan.

    Raises:
        HostError: it cannot be written.
    """
    run = Run(folder=home() / "runs" / plan.run_id)
    _write(run.folder / "plan.json", plan.model_dump_json(indent=2))
    return run


@contextmanager
def keeping_evidence(run: Run) -> Iterator[None]:
    """An error in the block tells where the evidence is that was gathered before it."""
    try:
        yield
    except QualifyError as error:
        error.add_note(f"evidence so far: {run.evidence}")
        if run.stages():
            error.add_note(f"to judge and publish it: vllm-qualify rejudge {run.id}")
        raise


def find_run(name: str | None) -> Run:
    """A run by id or folder; without a name, the latest one that has a report. Raises CallerError if there is none."""
    runs = home() / "runs"
    if name is None:
        reported = sorted(path.parent for path in runs.glob("*/report.json"))
        if not reported:
            raise CallerError(f"no run with a report in {runs}", "qualify something first: vllm-qualify demo", "RUN")
        return Run(folder=reported[-1])
    for folder in (Path(name).expanduser(), runs / name):
        if (folder / "plan.json").is_file():
            return Run(folder=folder.resolve())
    raise CallerError(f"no run '{name}' in {runs}", "give a run's id or its folder; --store finds it in a store", "RUN")


def judge_run(run: Run, stages: list[StageEvidence]) -> Report:
    """Judge the stages by the plan's gates; the report is saved in the run's folder."""
    return _report(run, run.plan, stages, None)


def publish_run(report: Report, run: Run, store: Store) -> Published:
    """Evidence, report and page to the store, the manifest last. Raises StoreError, HostError."""
    documents = {
        "report.json": redact(report.model_dump_json(indent=2)).encode(),
        "report.html": redact(render_page(report, _link_in_store(report))).encode(),
    }
    head = (report.run_id, report.plan.cell.id, report.outcome)
    manifest = publish(store, report.prefix, head, run.evidence, report.files, documents)
    page = store.locate(f"{report.prefix}/report.html")
    return Published(outcome=report.outcome, approved=report.approved, run=run, page=page, manifest=manifest)


def rejudge(run: Run, plan: CellPlan) -> tuple[Report, Run]:
    """Parse the evidence of `run` again and judge it as `plan` says, in a new run with the same evidence.

    Raises:
        HostError: an evidence file was changed since it was measured.
    """
    for stage in run.stages():
        _check_unchanged(run, stage)
    plan = plan.model_copy(update={"run_id": new_run_id()})
    fresh = start_run(plan)
    shutil.copytree(run.evidence, fresh.evidence)
    stages = [stage.model_copy(update={"measurements": parse(stage.stage, plan, fresh.evidence)}) for stage in run.stages()]
    for stage in stages:
        fresh.save_stage(stage)
    return _report(fresh, plan, stages, run.id), fresh


def _report(run: Run, plan: CellPlan, stages: list[StageEvidence], rejudged_from: str | None) -> Report:
    measurements = [measurement for stage in stages for measurement in stage.measurements]
    report = make_report(plan, stages, judge(plan.gates, measurements, plan.cell.id), rejudged_from)
    run.save_report(report)
    return report


def _check_unchanged(run: Run, stage: StageEvidence) -> None:
    for file in stage.files:
        path = run.evidence / file.path
        if not path.is_file() or describe(path, run.evidence) != file:
            raise HostError("evidence is gone or was changed after it was measured", "qualify the cell again", str(path))


def fetch_run(store_url: str, run_id: str) -> Run:
    """A published run, brought from the store into the folder of runs.

    Raises:
        StoreError: the store has no whole run of this id, or an object is not what the report says.
    """
    store = open_store(store_url)
    report = _trusted_report(store, run_id)
    run = Run(folder=home() / "runs" / run_id)
    for file in report.files:
        path = run.evidence / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(evidence_key(file)))
        if describe(path, run.evidence) != file:
            raise StoreError(
                "a stored object is not what its report says", "do not trust this run", store.locate(evidence_key(file))
            )
    for stage in report.stages:
        run.save_stage(stage)
    run.save_report(report)
    # Last, since a run is found by it: one that was refused half-way is none.
    start_run(report.plan)
    return run


def _trusted_report(store: Store, run_id: str) -> Report:
    """The report of a run that has its manifest, held against it."""
    manifests = [key for key in store.keys("reports/") if key.endswith(f"/{run_id}/manifest.json")]
    if len(manifests) != 1:
        remedy = "check the id; a run without its manifest was not published whole"
        raise StoreError(f"no whole run '{run_id}'", remedy, store.url)
    key = manifests[0].replace("manifest.json", "report.json")
    body = store.get(key)
    report = read_report(body, key)
    stored = {entry.key: entry.sha256 for entry in read_manifest(store, manifests[0]).objects}
    if stored.get(key) != hashlib.sha256(body).hexdigest() or {report.run_id, report.plan.run_id} != {run_id}:
        raise StoreError("the report is not what its manifest says", "do not trust this run", store.locate(key))
    return report


def _link_in_store(report: Report) -> Callable[[EvidenceFile], str]:
    """Links from the page's folder to the evidence, good on a disk and behind any web server."""
    to_root = "../" * (report.prefix.count("/") + 1)
    return lambda file: to_root + evidence_key(file)


def _write(path: Path, text: str) -> None:
    """Whole or not at all: what is there was written to its end."""
    with writing(str(path.parent)):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(redact(text))
        fresh.replace(path)
