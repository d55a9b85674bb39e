"""Runs in a store: read them, reuse their stages, or fetch one to this machine."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.errors import CallerError, HostError, StoreError
from vllm_qualify.evidence.measurement import EvidenceFile, StageEvidence, describe
from vllm_qualify.evidence.stages.table import wanted_stages
from vllm_qualify.plan.gates import judges_alike
from vllm_qualify.plan.request import Reuse
from vllm_qualify.publish import kept
from vllm_qualify.publish.bundle import evidence_key, read_evidence, write_evidence
from vllm_qualify.publish.layout import cell_of, manifest_key, no_run
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.metrics import StageName
from vllm_qualify.report.model import Report
from vllm_qualify.runs.folder import DATA_DOCS, Run, lacking_stages, start_run, write_text
from vllm_qualify.runs.home import runs_folder

# In a run's folder: its finished stages, each by all its inputs.
KEPT = "kept"
_NOT_OWN = "put back what the run measured, fetch it from its store (--store), or qualify the cell again"


def save_finished(run: Run, stage: StageEvidence) -> None:
    """Save a stage in its run's folder, and note it there by all its inputs, as `kept` does in the store. Raises HostError."""
    run.save_stage(stage)
    if stage.stage in kept.REUSABLE:
        write_text(run.folder / _note_file(run, stage.stage), kept.kept_stage(run.plan, stage).model_dump_json(indent=2))


def check_own(run: Run, stage: StageEvidence) -> None:
    """Raises HostError if a stage in the run's folder is another run's, put there by hand, or was changed."""
    if stage.run_id != run.plan.run_id:
        problem = f"the stage {stage.stage} is of run {stage.run_id}, and this is run {run.plan.run_id}"
        raise HostError(problem, _NOT_OWN, str(run.folder))
    notes = [note for path in sorted((run.folder / KEPT).glob(f"{stage.stage}-*.json")) if (note := _read_note(path))]
    if notes and (run.plan.run_id, stage) not in [(note.run_id, note.stage) for note in notes]:
        raise HostError(f"the stage {stage.stage} is not the one that this run finished", _NOT_OWN, str(run.folder))


def _note_file(run: Run, stage: StageName) -> str:
    return f"{KEPT}/{stage}-{kept.stage_key(stage, run.plan)}.json"


def _stages_here(run: Run, stage: StageName) -> Iterator[kept.Reusable]:
    """The finished stages of other runs on this machine that have the same inputs as this run's, the newest first."""
    for path in sorted(runs_folder().glob(f"*/{_note_file(run, stage)}"), reverse=True):
        other = Run(folder=path.parents[1])
        kept_note = _read_note(path)
        if kept_note and other.id != run.id and all(_is_unchanged(other, file) for file in kept_note.stage.files):
            yield kept.Reusable(kept_note, other.read)


def _published_stages(store: Store, run: Run, stage: StageName) -> Iterator[kept.Reusable]:
    """The finished stages in the store that a published report has, the newest first."""
    for note in kept.read_notes(store, stage, run.plan):
        report = _published_report(store, note, kept.stage_key(stage, run.plan))
        # By weaker gates anything passes, and the key of a stage does not have all gates.
        if report and (report.rejudged_from is None or judges_alike(run.plan, report.plan)):
            yield kept.Reusable(note, partial(read_evidence, store), report.rejudged_from)


def _published_report(store: Store, note: kept.KeptStage, key: str) -> Report | None:
    """The report of the run that a note names; None if it lacks this stage, with the same files and the inputs of this key."""
    try:
        report = trusted_report(store, note.run_id)
    except (CallerError, StoreError):
        return None
    same = [each for each in report.stages if each.stage == note.stage.stage and each.files == note.stage.files]
    is_own = bool(same) and note.prefix == report.prefix and kept.stage_key(note.stage.stage, report.plan) == key
    return report if is_own else None


def _read_note(path: Path) -> kept.KeptStage | None:
    """A stage's note; None if somebody deleted or changed it: the stage is then measured again."""
    try:
        return kept.KeptStage.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _is_unchanged(run: Run, file: EvidenceFile) -> bool:
    path = run.evidence / file.path
    return path.is_file() and describe(path, run.evidence) == file


def reuse_stages(run: Run, store: Store, reuse: Reuse) -> list[StageEvidence]:
    """Take over other runs' finished stages that have the same inputs as this run's. Raises as `kept.reuse_kept`.

    If nothing is left to measure then, the stage `serve` is reused too, and further starts of the server.
    """
    taken = [reused for stage in lacking_stages(run) if (reused := reuse_stage(run, stage, store, reuse))]
    if not lacking_stages(run):
        # Those that end after the stages on the server.
        later = [stage for stage in wanted_stages(run.plan) if stage in ("serve", "starts") and run.stage(stage) is None]
        taken += [reused for stage in later if (reused := reuse_stage(run, stage, store, reuse))]
    return taken


def reuse_stage(run: Run, stage: StageName, store: Store, reuse: Reuse) -> StageEvidence | None:
    """Take over another run's finished stage, of this machine or else of a published run. Raises as `kept.reuse_kept`."""
    published = _published_stages(store, run, stage) if reuse.of == "all" else ()
    reused = kept.reuse_kept(store, stage, run.plan, run.evidence, reuse, [*_stages_here(run, stage), *published])
    if reused:
        save_finished(run, reused)
    return reused


def fetch_run(store_url: str, run_id: str) -> Run:
    """Fetch a published run into the folder of runs. Raises as `published_run` and `fetch_evidence`."""
    store = open_store(store_url)
    report = trusted_report(store, run_id)
    run = Run(folder=runs_folder() / run_id)
    fetch_evidence(store, report, run.evidence)
    for stage in report.stages:
        run.save_stage(stage)
    # The pages for people, so that the links of the report's page work.
    pages = f"{report.prefix}/{DATA_DOCS}/"
    for key in store.keys(pages):
        path = run.data_docs / key.removeprefix(pages)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(key))
    run.save_report(report)
    # Last, since its plan makes a run findable: one that was refused half-way must not be found.
    start_run(report.plan)
    return run


def fetch_evidence(store: Store, report: Report, folder: Path) -> None:
    """Fetch the evidence of a report into a folder. Raises StoreError if an object is not what the report says."""
    for file in report.files:
        if not write_evidence(folder, file, read_evidence(store, file)):
            place = store.locate(evidence_key(file))
            raise StoreError("a stored object is not what its report says", "do not trust this run", place)


def trusted_report(store: Store, run_id: str) -> Report:
    """The report of a published run. Raises as `published_run`."""
    return published_run(store, run_id).report


def published_run(store: Store, run_id: str) -> PublishedRun:
    """A published run of any cell, its report checked against its manifest. Raises as `cell_of` and `read_run`."""
    cell = cell_of(store, run_id)
    if not store.exists(manifest_key(cell, run_id)):
        raise no_run(store, run_id)
    return read_run(store, cell, run_id)
