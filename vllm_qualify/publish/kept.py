"""Finished stages in the store, under keys made of all their inputs: a rerun measures only the missing stages.

A stage is kept as soon as it has ended, even if its run fails later. Its evidence is in the same place as that of published
runs. The run that takes it over parses and judges it again. Whoever may publish can write a note of a stage: what counts is
a stage of this machine's own folders, or of a published report (`runs.stored`).
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.errors import StoreError, writing
from vllm_qualify.evidence.measurement import EvidenceFile, StageEvidence
from vllm_qualify.evidence.stages.stage import server_inputs
from vllm_qualify.evidence.stages.table import TABLE, parse
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import within_budget
from vllm_qualify.plan.request import Reuse
from vllm_qualify.publish.bundle import evidence_key, put_evidence, read_manifest, write_evidence
from vllm_qualify.publish.door import check_open
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.metrics import StageName
from vllm_qualify.recipe.values import Frozen

REUSABLE = [name for name, stage in TABLE.items() if stage.is_reusable]


class KeptStage(Frozen):
    """One finished stage of a run. The run's report and manifest are below `prefix`, if it has any."""

    kept_version: Literal[1] = 1
    run_id: str
    prefix: str
    stage: StageEvidence

    @property
    def measured_by(self) -> str:
        """The run that measured it, also if other runs took it over."""
        return self.stage.taken_from or self.run_id


class Reusable(NamedTuple):
    """A kept stage, and how its files are read."""

    kept: KeptStage
    read: Callable[[EvidenceFile], bytes]
    judges_again: str | None = None
    """the run that measured the stage and was judged by other gates before; None for a stage of an own report"""


def keep(store: Store, plan: CellPlan, stage: StageEvidence, evidence: Path) -> None:
    """Store a finished stage, unless it was reused from another run and has not grown since. Raises StoreError, HostError."""
    if stage.stage not in REUSABLE or (stage.taken_from and not TABLE[stage.stage].grows):
        return
    check_open(store)
    for file in stage.files:
        put_evidence(store, evidence, file)
    _note_stage(store, plan, stage)


def keep_judged_again(store: Store, plan: CellPlan, stages: Iterable[StageEvidence]) -> None:
    """Note the stages of a published run that judges another one again: their files are in the store. Raises StoreError."""
    check_open(store)
    for stage in (stage for stage in stages if stage.stage in REUSABLE):
        _note_stage(store, plan, stage)


def _note_stage(store: Store, plan: CellPlan, stage: StageEvidence) -> None:
    """Record that the run has this stage. The run's outcome then decides whether other runs may use the measurement."""
    # A note is written once, so a stage that grows has one for each size.
    size = f"-{len(stage.files):06}" if TABLE[stage.stage].grows else ""
    key = f"{_stage_folder(stage.stage, plan)}{plan.run_id}{size}.json"
    if not store.exists(key):
        store.put_new(key, kept_stage(plan, stage).model_dump_json(indent=2).encode(), "application/json")


def kept_stage(plan: CellPlan, stage: StageEvidence) -> KeptStage:
    return KeptStage(run_id=plan.run_id, prefix=f"reports/{plan.cell.id}/{plan.run_id}", stage=stage)


def reuse_kept(
    store: Store, stage: StageName, plan: CellPlan, evidence: Path, reuse: Reuse, finished: Iterable[Reusable]
) -> StageEvidence | None:
    """The first finished stage that the plan can use, with its files copied into `evidence`; None if there is none.

    Raises StoreError if a file is not what was measured, and HostError if a file cannot be written.
    """
    if reuse.of == "none":
        return None
    usable = _find_usable(store, finished, reuse)
    if TABLE[stage].grows:
        # The one with most parts first, and of equally many the newest.
        usable.sort(key=lambda each: len(each.kept.stage.files), reverse=True)
    for kept, read, _ in usable:
        _copy_files(store, kept, read, evidence)
        measurements = parse(stage, plan, evidence)
        if not _has_invalid_gate(plan, stage, measurements):
            changes = {"measurements": measurements, "run_id": plan.run_id, "taken_from": kept.measured_by}
            taken = kept.stage.model_copy(update=changes)
            # The store lacks the files of a stage that was kept on this machine alone.
            for file in (file for file in taken.files if not store.exists(evidence_key(file))):
                put_evidence(store, evidence, file)
            _note_stage(store, plan, taken)
            return taken
        with writing(kept.stage.stage):
            shutil.rmtree(evidence / kept.stage.stage)
    return None


def stage_key(stage: StageName, plan: CellPlan) -> str:
    """SHA-256 of all inputs of a stage of the plan."""
    inputs = {"stage": stage, "common": _common_inputs(plan), "own": TABLE[stage].inputs(plan)}
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_the_same(ours: CellPlan, theirs: CellPlan) -> bool:
    """Whether two plans qualify the same thing in the same way. Their baselines, anchors, deadlines and tries do not count."""
    alone: dict[str, Any] = {"baseline": None, "beside": None, "anchor": None, "load_alone": "", "tries": [], "between": []}
    alone |= {"establishes": False, "new_anchor": False}
    asked, keys = [], []
    for plan in (ours, theirs):
        # What the plan asks of its anchor, whichever that is. Without an anchor, such gates are not among the judged ones.
        asked.append([plan.named_anchor, *(gate for gate in plan.gates if gate.is_against_anchor)])
        # A run that becomes a baseline asks every question.
        tasks = [task.model_copy(update={"sequential": False}) for task in plan.accuracy]
        bare = within_budget(plan.model_copy(update=alone | {"accuracy": tasks}), None)
        keys.append([stage_key(stage, bare) for stage in REUSABLE])
    return asked[0] == asked[1] and keys[0] == keys[1]


def _common_inputs(plan: CellPlan) -> dict[str, Any]:
    release = plan.cell.release
    return {
        "vllm-qualify": metadata.version("vllm-qualify"),
        "engine": _engine_inputs(release.engine),
        "client": _engine_inputs(plan.client) if plan.client else None,
        "model": [None if plan.server.is_local else release.model, release.revision],
        "server": server_inputs(plan.server),
        "machine": plan.fingerprint.id,
    }


def _engine_inputs(engine: EngineIdentity) -> dict[str, Any]:
    return {"kind": engine.kind, "version": engine.version, "digest": engine.digest, "packages": engine.packages}


def _stage_folder(stage: StageName, plan: CellPlan) -> str:
    return f"stages/{stage}/{stage_key(stage, plan)}/"


def _find_usable(store: Store, kept: Iterable[Reusable], reuse: Reuse) -> list[Reusable]:
    """The usable ones, in their order. A measurement that may not be used from one run is not used from any run."""
    now, most_age = datetime.now(UTC), timedelta(days=reuse.most_age_days)
    young = [each for each in kept if now - each.kept.stage.started_at <= most_age]
    allowed = [each for each in young if _may_be_used(store, each.kept, reuse)]
    # The first verdict on a run does not count where the run was judged again by the gates of now, and passed.
    judged_again = {each.judges_again for each in allowed}
    refused = {each.kept.measured_by for each in young if each not in allowed and each.kept.run_id not in judged_again}
    return [each for each in allowed if each.kept.measured_by not in refused]


def read_notes(store: Store, stage: StageName, plan: CellPlan) -> Iterator[KeptStage]:
    """What the store says of finished stages that have the same inputs, the newest first. Anyone may have said so."""
    for key in reversed(list(store.keys(_stage_folder(stage, plan)))):
        with suppress(StoreError):  # whoever wrote a note that cannot be read keeps no run from measuring
            yield read_kept(store, key)


def read_kept(store: Store, key: str) -> KeptStage:
    """Raises StoreError, also if it is not a kept stage."""
    try:
        return KeptStage.model_validate_json(store.get(key))
    except ValidationError as error:
        raise StoreError("not a kept stage", "delete it: it is then measured again", store.locate(key)) from error


def _may_be_used(store: Store, kept: KeptStage, reuse: Reuse) -> bool:
    """Whether the outcome of its run allows the use. After a run that did not pass, a new run measures again."""
    manifest = f"{kept.prefix}/manifest.json"
    if not store.exists(manifest):
        return True
    return reuse.of == "all" and read_manifest(store, manifest).outcome == "passed"


def _has_invalid_gate(plan: CellPlan, stage: StageName, measurements: list[Any]) -> bool:
    """Whether a gate's own measurement is invalid: then it is better measured again, also for a run that becomes a baseline.

    A path that the server cannot be proven to take is no more proven the next time.

    Of further starts only what is judged counts: a start that says nothing of a gate is left as it is.
    """
    gated = {gate.metric for gate in (plan.judged_gates if stage == "starts" else plan.gates)}
    return any(row.metric in gated and row.invalid_because and not row.is_unproven for row in measurements)


def _copy_files(store: Store, kept: KeptStage, read: Callable[[EvidenceFile], bytes], evidence: Path) -> None:
    for file in kept.stage.files:
        with writing(kept.stage.stage):
            is_measured = write_evidence(evidence, file, read(file))
        if not is_measured:
            problem = "a stored object is not what the run measured"
            raise StoreError(problem, "do not trust it: restore it from an earlier version", store.locate(evidence_key(file)))
