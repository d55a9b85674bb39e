"""How much starts of one build differ, by the store's approved runs of cells that are alike.

Alike are cells of one recipe, GPU type and profile. Others are other models and other loads, whose starts differ otherwise.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from vllm_qualify.approval.index import read_index
from vllm_qualify.approval.matrix import matrix
from vllm_qualify.approval.pointer import read_pointer
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.engine.process import Tell
from vllm_qualify.judge.start_means import StartMeans, between_starts
from vllm_qualify.plan.cell import BetweenStarts, CellPlan
from vllm_qualify.publish.bundle import Manifest, UnreadableError, read_manifest
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.store import MissingObjectError, Store
from vllm_qualify.recipe.gates import label_of

# So many cells that are alike, and the newest runs of each: more would tell little more, and each is read for each plan.
MOST_CELLS, MOST_RUNS = 20, 5


class _Approved(NamedTuple):
    """A cell of which a run is approved, and when the last one was."""

    cell: str
    at: datetime


def with_between(plan: CellPlan, store: Store, tell: Tell) -> CellPlan:
    """The plan, with the differences between starts that approved runs of cells like it show.

    Raises:
        TamperedError: a cell's pointer is not as it was written.
        StoreError: the store cannot be read.
    """
    if not plan.over_starts or plan.establishes:
        return plan
    between = _between(plan, store, _by_index(store))
    for known in between:
        tell(f"{plan.cell.id}: {known.label} from {known.of} to {known.of} is known from {_counted(known.runs)}")
    return plan.model_copy(update={"between": between})


def _counted(runs: Sequence[str]) -> str:
    return f"{len(runs)} approved run{'' if len(runs) == 1 else 's'}"


def between_by_pointers(run: PublishedRun, store: Store) -> list[BetweenStarts]:
    """The same for the plan of a run, by pointers: every publisher can change the index. Raises as `with_between`."""
    cells = matrix(store, datetime.now(UTC).date())
    approved = [_Approved(cell.cell, cell.last.at) for cell in cells if cell.state != "revoked"]
    return _between(run.report.plan, store, approved)


def _by_index(store: Store) -> list[_Approved]:
    cells = read_index(store).cells
    return [_Approved(cell.cell, cell.last.at) for cell in cells if cell.last and not cell.last.is_revoked]


def _between(plan: CellPlan, store: Store, approved: Iterable[_Approved]) -> list[BetweenStarts]:
    """The differences in each metric of the plan's gates.

    The plan's own run does not count, nor its baseline, whose starts are compared themselves.
    """
    recipe, _, gpu_type, profile = plan.cell.id.split("/")
    alike = [each for each in approved if _parts(each.cell) == (recipe, gpu_type, profile)]
    own = {plan.run_id, plan.baseline and plan.baseline.run_id}
    newest = sorted(alike, key=lambda each: (each.at, each.cell))[-MOST_CELLS:]
    manifests = [manifest for each in newest for manifest in _manifests(store, each.cell) if manifest.run_id not in own]
    labels = {label_of(gate.metric, gate.task, gate.filter, against_baseline=False): None for gate in plan.over_starts}
    return [each for label in labels for each in _of(label, manifests)]


def _parts(cell: str) -> tuple[str, str, str]:
    recipe, _, gpu_type, profile = cell.split("/")
    return recipe, gpu_type, profile


def _manifests(store: Store, cell: str) -> list[Manifest]:
    """Those of a cell's newest approved runs."""
    pointer = read_pointer(store, cell)
    runs = [entry.run_id for entry in (pointer.entries if pointer else []) if not entry.revoked]
    manifests = []
    for run_id in runs[-MOST_RUNS:]:
        try:
            manifests.append(read_manifest(store, manifest_key(cell, run_id)))
        except (MissingObjectError, UnreadableError):
            continue
    return manifests


def _of(label: str, manifests: Sequence[Manifest]) -> list[BetweenStarts]:
    """Runs of one release in one cell are runs of one build."""
    builds: dict[str, list[StartMeans]] = {}
    runs = []
    for manifest in manifests:
        if means := [each for each in manifest.starts if each.label == label]:
            release = manifest.tried.release if manifest.tried else manifest.run_id
            builds.setdefault(f"{manifest.cell} {release}", []).extend(means)
            runs.append(manifest.run_id)
    return between_starts(label, builds, runs)
