"""Finished stages in the store, under keys made of all their inputs: a rerun measures only the missing stages.

A stage is kept as soon as it has ended, even if its run fails later. Its evidence is in the same place as that of published
runs. The run that takes it over parses and judges it again. A stage that the store could not be given can be taken from the
folder of its run.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.errors import StoreError, writing
from vllm_qualify.evidence.measurement import EvidenceFile, StageEvidence, describe
from vllm_qualify.evidence.stages import TABLE, parse
from vllm_qualify.evidence.stages.stage import server_inputs
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import within_budget
from vllm_qualify.publish.bundle import evidence_key, put_evidence, read_manifest
from vllm_qualify.publish.door import check_open
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.metrics import Stage
from vllm_qualify.recipe.values import Frozen

# The stages that can be reused, each with the function that gives its inputs.
INPUTS = {name: kind.inputs for name, kind in TABLE.items() if kind.inputs}


class Reuse(Frozen):
    """Which finished stages a run takes over, if their inputs are the same.

    `unfinished`: those of runs that were interrupted. `all`: also those of runs that passed. `none`: everything is measured.
    """

    of: Literal["none", "unfinished", "all"] = "unfinished"
    most_age_days: float = Field(default=7, gt=0, description="How old evidence may be, in days.")


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


def keep(store: Store, plan: CellPlan, stage: StageEvidence, evidence: Path) -> None:
    """Store a finished stage, unless it was reused from another run and has not grown since. Raises StoreError, HostError."""
    if stage.stage not in INPUTS or (stage.taken_from and not TABLE[stage.stage].grows):
        return
    check_open(store)
    for file in stage.files:
        put_evidence(store, evidence, file)
    _note(store, plan, stage)


def _note(store: Store, plan: CellPlan, stage: StageEvidence) -> None:
    """Record that the run has this stage. The run's outcome then decides whether other runs may use the measurement."""
    kept = kept_stage(plan, stage)
    # A note is written once, so a stage that grows has one for each size.
    size = f"-{len(stage.files):06}" if TABLE[stage.stage].grows else ""
    key = f"{_folder(stage.stage, plan)}{plan.run_id}{size}.json"
    if not store.exists(key):
        store.put_new(key, kept.model_dump_json(indent=2).encode(), "application/json")


def kept_stage(plan: CellPlan, stage: StageEvidence) -> KeptStage:
    return KeptStage(run_id=plan.run_id, prefix=f"reports/{plan.cell.id}/{plan.run_id}", stage=stage)


def reuse_kept(
    store: Store, stage: Stage, plan: CellPlan, evidence: Path, reuse: Reuse, here: Sequence[Reusable] = ()
) -> StageEvidence | None:
    """The newest kept stage that the plan can use, with its files copied into `evidence`; None if there is none.

    Those that are `here`, on this machine, come before those in the store.

    Raises:
        StoreError: the kept stage cannot be read, or a file is not what was measured.
        HostError: a file cannot be written.
    """
    if reuse.of == "none":
        return None
    usable = _usable(store, [*here, *_newest_first(store, stage, plan)], reuse)
    if TABLE[stage].grows:
        # The one with most parts first, and of equally many the newest.
        usable.sort(key=lambda each: len(each.kept.stage.files), reverse=True)
    for kept, read in usable:
        _bring(store, kept, read, evidence)
        measurements = parse(stage, plan, evidence)
        if not _lacks(plan, stage, measurements):
            changes = {"measurements": measurements, "run_id": plan.run_id, "taken_from": kept.measured_by}
            taken = kept.stage.model_copy(update=changes)
            _complete(store, taken, evidence)
            _note(store, plan, taken)
            return taken
        _remove(kept, evidence)
    return None


def _complete(store: Store, taken: StageEvidence, evidence: Path) -> None:
    """Store the files that the store lacks: of a stage that was kept on this machine alone."""
    for file in taken.files:
        if not store.exists(evidence_key(file)):
            put_evidence(store, evidence, file)


def stage_key(stage: Stage, plan: CellPlan) -> str:
    """SHA-256 of all inputs of a stage of the plan. Raises KeyError for a stage that cannot be reused."""
    inputs = {"stage": stage, "common": _common(plan), "own": INPUTS[stage](plan)}
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_the_same(ours: CellPlan, theirs: CellPlan) -> bool:
    """Whether two plans qualify the same thing in the same way. Their baselines, anchors, deadlines and tries do not count."""
    alone: dict[str, Any] = {
        "baseline": None,
        "beside": None,
        "establishes": False,
        "load_alone": "",
        "new_anchor": False,
        "anchor": None,
        "tries": [],
        "between": [],
    }
    mine, other = (within_budget(_with_tasks_alike(plan.model_copy(update=alone)), None) for plan in (ours, theirs))
    return _anchoring(ours) == _anchoring(theirs) and all(stage_key(stage, mine) == stage_key(stage, other) for stage in INPUTS)


def _anchoring(plan: CellPlan) -> list[Any]:
    """What the plan asks of its anchor, whichever run that is. Without an anchor, such gates are not among the judged ones."""
    return [plan.named_anchor, *(gate for gate in plan.gates if gate.is_against_anchor)]


def _with_tasks_alike(plan: CellPlan) -> CellPlan:
    """A run that becomes a baseline asks every question; this difference does not count."""
    return plan.model_copy(update={"accuracy": [task.model_copy(update={"sequential": False}) for task in plan.accuracy]})


def _common(plan: CellPlan) -> dict[str, Any]:
    release = plan.cell.release
    return {
        "vllm-qualify": metadata.version("vllm-qualify"),
        "engine": _engine(release.engine),
        "client": _engine(plan.client) if plan.client else None,
        "model": [None if plan.server.is_local else release.model, release.revision],
        "server": server_inputs(plan.server),
        "machine": plan.fingerprint.id,
    }


def _engine(engine: EngineIdentity) -> dict[str, Any]:
    return {"kind": engine.kind, "version": engine.version, "digest": engine.digest, "packages": engine.packages}


def _folder(stage: Stage, plan: CellPlan) -> str:
    return f"stages/{stage}/{stage_key(stage, plan)}/"


def _usable(store: Store, kept: Iterable[Reusable], reuse: Reuse) -> list[Reusable]:
    """The usable ones, in their order. A measurement that may not be used from one run is not used from any run."""
    young = [each for each in kept if _is_young(each.kept, reuse)]
    refused = {each.kept.measured_by for each in young if not _may_be_used(store, each.kept, reuse)}
    return [each for each in young if each.kept.measured_by not in refused]


def _newest_first(store: Store, stage: Stage, plan: CellPlan) -> Iterator[Reusable]:
    for key in reversed(list(store.keys(_folder(stage, plan)))):
        try:
            yield Reusable(KeptStage.model_validate_json(store.get(key)), lambda file: store.get(evidence_key(file)))
        except ValidationError as error:
            raise StoreError("not a kept stage", "delete it: it is then measured again", store.locate(key)) from error


def _is_young(kept: KeptStage, reuse: Reuse) -> bool:
    return datetime.now(UTC) - kept.stage.started_at <= timedelta(days=reuse.most_age_days)


def _may_be_used(store: Store, kept: KeptStage, reuse: Reuse) -> bool:
    """Whether the outcome of its run allows the use. After a run that did not pass, a new run measures again."""
    manifest = f"{kept.prefix}/manifest.json"
    if not store.exists(manifest):
        return True
    return reuse.of == "all" and read_manifest(store, manifest).outcome == "passed"


def _lacks(plan: CellPlan, stage: Stage, measurements: list[Any]) -> bool:
    """Whether a gate's own measurement is invalid: then it is better measured again, also for a run that becomes a baseline.

    Of further starts only what is judged counts: a start that says nothing of a gate is left as it is.
    """
    gated = {gate.metric for gate in (plan.judged if stage == "starts" else plan.gates)}
    return any(measurement.metric in gated and measurement.invalid_because for measurement in measurements)


def _bring(store: Store, kept: KeptStage, read: Callable[[EvidenceFile], bytes], evidence: Path) -> None:
    for file in kept.stage.files:
        path = evidence / file.path
        with writing(kept.stage.stage):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(read(file))
        if describe(path, evidence) != file:
            problem = "a stored object is not what the run measured"
            raise StoreError(problem, "do not trust it: restore it from an earlier version", store.locate(evidence_key(file)))


def _remove(kept: KeptStage, evidence: Path) -> None:
    with writing(kept.stage.stage):
        shutil.rmtree(evidence / kept.stage.stage)
