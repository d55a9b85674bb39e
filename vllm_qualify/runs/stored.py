"""Runs in a store: read them, reuse their stages, or fetch one to this machine."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.errors import HostError, StoreError
from vllm_qualify.evidence.measurement import EvidenceFile, StageEvidence, describe
from vllm_qualify.evidence.stages import wanted
from vllm_qualify.publish import kept
from vllm_qualify.publish.bundle import evidence_key
from vllm_qualify.publish.layout import cell_of, manifest_key, no_run
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.metrics import Stage
from vllm_qualify.report.model import Report
from vllm_qualify.runs.folder import DATA_DOCS, Run, lacking, start_run, write_text
from vllm_qualify.runs.home import runs_folder

# In a run's folder: its finished stages, each by all its inputs.
KEPT = "kept"
_NOT_OWN = "put back what the run measured, fetch it from its store (--store), or qualify the cell again"


def save_finished(run: Run, stage: StageEvidence) -> None:
    """Save a stage in its run's folder, and note it there by all its inputs, as `kept` does in the store. Raises HostError."""
    run.save_stage(stage)
    if stage.stage in kept.INPUTS:
        write_text(run.folder / _note(run, stage.stage), kept.kept_stage(run.plan, stage).model_dump_json(indent=2))


def check_own(run: Run, stage: StageEvidence) -> None:
    """Check that a stage in the run's folder is the run's own, measured or taken over: it says so, and its note says the same.

    Older stages do not say whose they are. If any stage of the run does, all must.

    Raises:
        HostError: it is another run's stage, put there by hand, or was changed.
    """
    others = {each.run_id for each in run.stages()}
    if stage.run_id not in (None, run.plan.run_id) or (stage.run_id is None and others != {None}):
        whose = f"of run {stage.run_id}" if stage.run_id else "of an older run"
        raise HostError(f"the stage {stage.stage} is {whose}, and this is run {run.plan.run_id}", _NOT_OWN, str(run.folder))
    notes = [note for path in sorted((run.folder / KEPT).glob(f"{stage.stage}-*.json")) if (note := _noted(path))]
    if notes and (run.plan.run_id, stage) not in [(note.run_id, note.stage) for note in notes]:
        raise HostError(f"the stage {stage.stage} is not the one that this run finished", _NOT_OWN, str(run.folder))


def _note(run: Run, stage: Stage) -> str:
    return f"{KEPT}/{stage}-{kept.stage_key(stage, run.plan)}.json"


def _here(run: Run, stage: Stage) -> Iterator[kept.Reusable]:
    """The finished stages of other runs on this machine that have the same inputs as this run's, the newest first."""
    for path in sorted(runs_folder().glob(f"*/{_note(run, stage)}"), reverse=True):
        other = Run(folder=path.parents[1])
        kept_note = _noted(path)
        if kept_note and other.id != run.id and all(_is_unchanged(other, file) for file in kept_note.stage.files):
            yield kept.Reusable(kept_note, partial(_read_here, other))


def _noted(path: Path) -> kept.KeptStage | None:
    """A stage's note; None if somebody deleted or changed it: the stage is then measured again."""
    try:
        return kept.KeptStage.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _is_unchanged(run: Run, file: EvidenceFile) -> bool:
    path = run.evidence / file.path
    return path.is_file() and describe(path, run.evidence) == file


def _read_here(run: Run, file: EvidenceFile) -> bytes:
    return (run.evidence / file.path).read_bytes()


def reuse_stages(run: Run, store: Store, reuse: kept.Reuse) -> list[StageEvidence]:
    """Take over other runs' finished stages that have the same inputs as this run's.

    If nothing is left to measure then, the stage `serve` is reused too, and further starts of the server.

    Raises:
        StoreError: as `kept.reuse_kept`.
    """
    taken = [reused for stage in lacking(run) if (reused := reuse_stage(run, stage, store, reuse))]
    if not lacking(run):
        taken += [reused for stage in _afterwards(run) if (reused := reuse_stage(run, stage, store, reuse))]
    return taken


def _afterwards(run: Run) -> list[Stage]:
    """The stages of a run that end after those on its server."""
    of_server: list[Stage] = ["serve", "starts"]
    return [stage for stage in wanted(run.plan) if stage in of_server and run.stage(stage) is None]


def reuse_stage(run: Run, stage: Stage, store: Store, reuse: kept.Reuse) -> StageEvidence | None:
    """Take over another run's finished stage, of this machine or else of the store. Raises as `kept.reuse_kept`."""
    reused = kept.reuse_kept(store, stage, run.plan, run.evidence, reuse, list(_here(run, stage)))
    if reused:
        save_finished(run, reused)
    return reused


def fetch_run(store_url: str, run_id: str) -> Run:
    """Fetch a published run from the store into the folder of runs.

    Raises:
        StoreError: the store has no complete run with this id, or an object is not what the report says.
    """
    store = open_store(store_url)
    report = trusted_report(store, run_id)
    run = Run(folder=runs_folder() / run_id)
    fetch_evidence(store, report, run.evidence)
    for stage in report.stages:
        run.save_stage(stage)
    _fetch_data_docs(store, report, run)
    run.save_report(report)
    # Last, since its plan makes a run findable: one that was refused half-way must not be found.
    start_run(report.plan)
    return run


def fetch_evidence(store: Store, report: Report, folder: Path) -> None:
    """Fetch the evidence of a report into a folder. Raises StoreError if an object is not what the report says."""
    for file in report.files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(evidence_key(file)))
        if describe(path, folder) != file:
            raise StoreError(
                "a stored object is not what its report says", "do not trust this run", store.locate(evidence_key(file))
            )


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
        MissingObjectError: the store has no complete run with this id.
        StoreError: the report is not what its manifest says, or the store has an earlier layout.
    """
    cell = cell_of(store, run_id)
    if not store.exists(manifest_key(cell, run_id)):
        raise no_run(store, run_id)
    return read_run(store, cell, run_id)
