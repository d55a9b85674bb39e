"""One qualification of one cell on disk: its folder, and the steps that need no server (judge, report, publish, rejudge)."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import TemplateError

from vllm_qualify.approval.index import index_problem
from vllm_qualify.approval.layout import JSON, manifest_key
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.engine.plan import CellPlan, new_run_id
from vllm_qualify.engine.server import gpu_count
from vllm_qualify.errors import AlreadyExistsError, CallerError, HostError, QualifyError, StoreError, writing
from vllm_qualify.evidence.measurement import EvidenceFile, Measurement, StageEvidence, describe
from vllm_qualify.evidence.stages import on_the_server, parse
from vllm_qualify.home import runs_folder
from vllm_qualify.judge.compare import compare, not_established, speedup
from vllm_qualify.judge.expectations import judge
from vllm_qualify.judge.verdict import Outcome
from vllm_qualify.publish import kept
from vllm_qualify.publish.bundle import ManifestHead, Score, Summary, evidence_key, publish
from vllm_qualify.publish.store import Store, open_store
from vllm_qualify.recipe.gates import label_of
from vllm_qualify.recipe.metrics import METRICS, STAGES, Stage
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.report.details import details_of
from vllm_qualify.report.failure import render_failure, run_failure
from vllm_qualify.report.model import Report, load_report, make_report
from vllm_qualify.report.page import render_page
from vllm_qualify.secrets import redact

DATA_DOCS = "data-docs"


class Run(Frozen):
    """The folder of one run: plan.json, stages/, evidence/, report.json, report.html, data-docs/. No file in it is edited."""

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

    @property
    def plan(self) -> CellPlan:
        return CellPlan.model_validate_json((self.folder / "plan.json").read_bytes())

    def save_stage(self, stage: StageEvidence) -> None:
        _write(self.folder / "stages" / f"{stage.stage}.json", stage.model_dump_json(indent=2))

    def stages(self) -> list[StageEvidence]:
        """The finished stages, in their order."""
        paths = [self.folder / "stages" / f"{stage}.json" for stage in STAGES]
        return [StageEvidence.model_validate_json(path.read_bytes()) for path in paths if path.exists()]

    def stage(self, name: Stage) -> StageEvidence | None:
        """A stage; None if it is not finished."""
        return next((each for each in self.stages() if each.stage == name), None)

    def report(self) -> Report:
        return load_report(self.folder)

    def save_report(self, report: Report) -> None:
        _write(self.folder / "report.json", report.model_dump_json(indent=2))
        _write(self.folder / "report.html", render_page(report, lambda file: f"evidence/{file.path}"))


class Published(Frozen):
    """Where a report was published.

    `told` is what was decided about it since then. `rejected` says that the decision was not to deploy it.
    """

    outcome: Outcome
    passed: bool
    run: Run
    page: str
    manifest: str
    index_problem: str | None = None
    told: str | None = None
    rejected: bool = False


def start_run(plan: CellPlan) -> Run:
    """Create the run's folder, with its plan.

    Raises:
        HostError: the folder cannot be written.
    """
    run = Run(folder=runs_folder() / plan.run_id)
    _write(run.folder / "plan.json", plan.model_dump_json(indent=2), place="plan")
    return run


def lacking(run: Run) -> list[Stage]:
    """The stages that still have to be measured, in their order."""
    return [stage for stage in on_the_server(run.plan) if run.stage(stage) is None]


def take_over_stages(run: Run, store: Store, reuse: kept.Reuse) -> list[StageEvidence]:
    """Take over other runs' finished stages that have the same inputs as this run's.

    If nothing is left to measure then, the stage `serve` is taken over too.

    Raises:
        StoreError: as `kept.take_over`.
    """
    taken = [found for stage in lacking(run) if (found := _take_over(run, stage, store, reuse))]
    if not lacking(run) and (found := _take_over(run, "serve", store, reuse)):
        taken.append(found)
    return taken


def _take_over(run: Run, stage: Stage, store: Store, reuse: kept.Reuse) -> StageEvidence | None:
    found = kept.take_over(store, stage, run.plan, run.evidence, reuse)
    if found:
        run.save_stage(found)
    return found


@contextmanager
def keeping_evidence(runs: list[Run]) -> Iterator[None]:
    """Add notes to an error of the block: where the evidence of each run is that has no report yet.

    Each of these runs gets a page about the error, beside its evidence.
    """
    try:
        yield
    except QualifyError as error:
        failed = [run for run in runs if not (run.folder / "report.json").exists()]
        for run in failed:
            error.add_note(_save_failure(run, error, [other.id for other in failed if other != run]))
            error.add_note(f"evidence so far: {run.evidence}")
            if run.stages():
                error.add_note(f"to judge and publish it: vllm-qualify rejudge {run.id}")
        raise


def _save_failure(run: Run, error: QualifyError, ended_with: list[str]) -> str:
    """Write the page. Returns where it is, or why there is none: no problem with it may hide the error itself."""
    page = run.folder / "failure.html"
    try:
        failure = run_failure(error, run.plan, run.folder, [stage.stage for stage in run.stages()], ended_with)
        _write(run.folder / "failure.json", failure.model_dump_json(indent=2))
        _write(page, render_failure(failure))
    except (QualifyError, OSError, ValueError, TemplateError) as problem:
        return f"no page about it could be written: {problem}"
    return f"page about it: {page}"


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


def judge_run(run: Run, stages: list[StageEvidence]) -> Report:
    """Judge the stages by the plan's gates; the report is saved in the run's folder."""
    return _report(run, run.plan, stages, None)


def publish_run(report: Report, run: Run, store: Store) -> Published:
    """Publish evidence, report, page and manifest, and update the cell's row of the index. Raises StoreError, HostError."""
    documents = {
        "report.json": redact(report.model_dump_json(indent=2)).encode(),
        "report.html": redact(render_page(report, _link_in_store(report))).encode(),
    }
    documents |= {
        f"{DATA_DOCS}/{path.relative_to(run.data_docs).as_posix()}": path.read_bytes()
        for path in sorted(run.data_docs.rglob("*"))
        if path.is_file()
    }
    head = ManifestHead(
        run_id=report.run_id,
        cell=report.plan.cell.id,
        outcome=report.outcome,
        establishes=report.is_baseline,
        summary=_summary(report),
    )
    manifest = publish(store, report.prefix, head, run.evidence, report.files, documents)
    problem = index_problem(store, report.plan.cell.id)
    page = store.locate(f"{report.prefix}/report.html")
    told = {"outcome": report.outcome, "passed": report.passed, "index_problem": problem}
    return Published(run=run, page=page, manifest=manifest, **told)


def _summary(report: Report) -> Summary:
    plan = report.plan
    engine = plan.cell.release.engine
    gpus = None if plan.cell.gpu_type == "cpu" else gpu_count(plan.server.arguments, plan.server.kind)
    output = _measured(report, "output_throughput_tok_s")
    return Summary(
        engine=engine.kind,
        engine_version=engine.version,
        image=redact(engine.image.reference) if engine.image else None,
        gpus=gpus,
        score=_score(report),
        output_tok_s_per_gpu=output.value / (gpus or 1) if output and output.value is not None else None,
    )


def _score(report: Report) -> Score | None:
    """The score that the first accuracy gate is about, even if that gate limits its loss against the baseline."""
    gate = next((gate for gate in report.plan.gates if METRICS[gate.metric].is_score), None)
    found = _measured(report, gate.metric, gate.task, gate.filter) if gate else None
    if found is None or found.value is None:
        return None
    return Score(metric=found.label, value=found.value, interval=found.interval)


def _measured(report: Report, metric: str, task: str | None = None, filter_name: str | None = None) -> Measurement | None:
    """A stage's own measurement, not its comparison with the baseline."""
    label = label_of(metric, task, filter_name, against_baseline=False)
    return next((found for stage in report.stages for found in stage.measurements if found.label == label), None)


def published_as(run: Run, store: Store) -> Published:
    """What `publish_run` returned for a run that is already published."""
    report = run.report()
    page, manifest = (store.locate(f"{report.prefix}/{name}") for name in ("report.html", "manifest.json"))
    return Published(outcome=report.outcome, passed=report.passed, run=run, page=page, manifest=manifest)


def note_attempt(store: Store, flow_run: str, plan: CellPlan) -> None:
    """Note in the store which run a flow run made, so that a restarted flow run finds it. Raises StoreError."""
    noted = {"run_id": plan.run_id, "cell": plan.cell.id, "at": datetime.now(UTC).isoformat()}
    # If the store's answer was lost, the second try finds what the first one wrote.
    with suppress(AlreadyExistsError):
        store.put_new(f"{_attempts(flow_run)}{plan.cell.id}/{plan.run_id}.json", json.dumps(noted, indent=2).encode(), JSON)


def attempts(store: Store, flow_run: str, cell: str = "") -> list[str]:
    """The completely published runs of a flow run, of one cell or of all. Raises StoreError."""
    found = []
    for key in store.keys(f"{_attempts(flow_run)}{cell}"):
        of, _, name = key.removeprefix(_attempts(flow_run)).rpartition("/")
        run_id = name.removesuffix(".json")
        if store.exists(manifest_key(of, run_id)):
            found.append(run_id)
    return found


def _attempts(flow_run: str) -> str:
    return f"attempts/{flow_run}/"


def rejudge(run: Run, plan: CellPlan) -> tuple[Report, Run]:
    """Parse the evidence of `run` again and judge it as `plan` says, in a new run with the same evidence.

    Raises:
        HostError: an evidence file is gone, or was changed after it was measured.
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
    measured = [measurement for stage in stages for measurement in stage.measurements]
    gained = speedup(plan, run.evidence, measured)
    measured += [*compare(plan, run.evidence, measured), *gained]
    # Great Expectations accepts no slash in this name.
    name = plan.cell.id.replace("/", ".")
    lacking = not_established(plan, run.evidence, measured)
    gates = [*plan.judged, *(gate for gate, _ in lacking)]
    measured += [measurement for _, measurement in lacking]
    judgement = judge(gates, measured, name, waivers=plan.waivers, docs=run.data_docs)
    left = [gate for gate in plan.gates if gate not in gates]
    judgement = judgement.model_copy(update={"not_judged": left})
    report = make_report(plan, stages, judgement, rejudged_from, details_of(plan, run.evidence, gained))
    run.save_report(report)
    return report


def _check_unchanged(run: Run, stage: StageEvidence) -> None:
    for file in stage.files:
        path = run.evidence / file.path
        if not path.is_file() or describe(path, run.evidence) != file:
            raise HostError("evidence is gone or was changed after it was measured", "qualify the cell again", str(path))


def fetch_run(store_url: str, run_id: str) -> Run:
    """Fetch a published run from the store into the folder of runs.

    Raises:
        StoreError: the store has no complete run with this id, or an object is not what the report says.
    """
    store = open_store(store_url)
    report = trusted_report(store, run_id)
    run = Run(folder=runs_folder() / run_id)
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
    _fetch_data_docs(store, report, run)
    run.save_report(report)
    # Last, since its plan makes a run findable: one that was refused half-way must not be found.
    start_run(report.plan)
    return run


def _fetch_data_docs(store: Store, report: Report, run: Run) -> None:
    """Fetch the pages for people, so that the links of the report's page work."""
    pages = f"{report.prefix}/{DATA_DOCS}/"
    for key in store.keys(pages):
        path = run.data_docs / key.removeprefix(pages)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(key))


def trusted_report(store: Store, run_id: str) -> Report:
    """The report of a published run, checked against its manifest. Raises StoreError as `published_run`."""
    return published_run(store, run_id).report


def published_run(store: Store, run_id: str) -> PublishedRun:
    """A published run of any cell, its report checked against its manifest.

    Raises:
        StoreError: the store has no complete run with this id, or the report is not what its manifest says.
    """
    end = f"/{run_id}/manifest.json"
    manifests = [key for key in store.keys("reports/") if key.endswith(end)]
    if len(manifests) != 1:
        remedy = "check the id; a run without its manifest was not published whole"
        raise StoreError(f"no whole run '{run_id}'", remedy, store.url)
    return read_run(store, manifests[0].removeprefix("reports/").removesuffix(end), run_id)


def run_id_of(name: str) -> str:
    """The id of a run that is given by id, folder or report.json. Raises CallerError if a path has no report."""
    is_path = "/" in name or name.endswith(".json") or Path(name).is_dir()
    return load_report(Path(name).expanduser()).run_id if is_path else name


def _link_in_store(report: Report) -> Callable[[EvidenceFile], str]:
    """Links from the page's folder to the evidence, which work on a disk and behind any web server."""
    to_root = "../" * (report.prefix.count("/") + 1)
    return lambda file: to_root + evidence_key(file)


def _write(path: Path, text: str, place: str = "") -> None:
    """Write a file completely or not at all."""
    with writing(place or str(path.parent)):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(redact(text))
        fresh.replace(path)
