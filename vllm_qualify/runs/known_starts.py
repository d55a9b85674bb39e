"""How much starts of one build differ, by the store's approved runs of cells that are alike.

Alike are cells of one recipe, GPU type and profile. Others are other models and other loads, whose starts differ otherwise.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from vllm_qualify.approval.index import read_index
from vllm_qualify.approval.matrix import matrix
from vllm_qualify.approval.pointer import read_pointer
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.engine.process import Tell
from vllm_qualify.judge.compare.places import own_label
from vllm_qualify.judge.start_means import StartMeans, between_starts
from vllm_qualify.plan.cell import BetweenStarts, CellPlan
from vllm_qualify.publish.bundle import Manifest, UnreadableError, read_manifest
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.store import MissingObjectError, Store

# So many cells that are alike, and the newest runs of each: more would tell little more, and each is read for each plan.
MOST_CELLS, MOST_RUNS = 20, 5


def with_between(plan: CellPlan, store: Store, tell: Tell) -> CellPlan:
    """The plan, with how starts differ in approved runs of cells like it. Raises StoreError, TamperedError."""
    if not plan.gates_over_starts or plan.establishes:
        return plan
    cells = read_index(store).cells
    approved = {cell.cell: cell.last.at for cell in cells if cell.last and not cell.last.is_revoked}
    between = _find_between(plan, store, approved)
    for known in between:
        runs = f"{len(known.runs)} approved run{'' if len(known.runs) == 1 else 's'}"
        tell(f"{plan.cell.id}: {known.label} from {known.of} to {known.of} is known from {runs}")
    return plan.model_copy(update={"between": between})


def between_by_pointers(run: PublishedRun, store: Store) -> list[BetweenStarts]:
    """The same for the plan of a run, by pointers: every publisher can change the index. Raises as `with_between`."""
    cells = matrix(store, datetime.now(UTC).date())
    approved = {cell.cell: cell.last.at for cell in cells if cell.state != "revoked"}
    return _find_between(run.report.plan, store, approved)


def _find_between(plan: CellPlan, store: Store, approved: Mapping[str, datetime]) -> list[BetweenStarts]:
    """The differences in each metric of the plan's gates, by the cells with an approved run and when the last one was approved.

    The plan's own run does not count, nor its baseline, whose starts are compared themselves.
    """
    alike = [cell for cell in approved if _parts_alike(cell) == _parts_alike(plan.cell.id)]
    own = {plan.run_id, plan.baseline and plan.baseline.run_id}
    newest = sorted(alike, key=lambda cell: (approved[cell], cell))[-MOST_CELLS:]
    manifests = [manifest for cell in newest for manifest in _approved_manifests(store, cell) if manifest.run_id not in own]
    labels = dict.fromkeys(map(own_label, plan.gates_over_starts))
    return [each for label in labels for each in _between_of_metric(label, manifests)]


def _parts_alike(cell: str) -> tuple[str, str, str]:
    recipe, _, gpu_type, profile = cell.split("/")
    return recipe, gpu_type, profile


def _approved_manifests(store: Store, cell: str) -> list[Manifest]:
    """Those of a cell's newest approved runs."""
    pointer = read_pointer(store, cell)
    runs = [entry.run_id for entry in (pointer.entries if pointer else []) if not entry.revoked]
    manifests = []
    for run_id in runs[-MOST_RUNS:]:
        with suppress(MissingObjectError, UnreadableError):
            manifests.append(read_manifest(store, manifest_key(cell, run_id)))
    return manifests


def _between_of_metric(label: str, manifests: Sequence[Manifest]) -> list[BetweenStarts]:
    """Runs of one release in one cell are runs of one build."""
    builds: dict[str, list[StartMeans]] = {}
    runs = []
    for manifest in manifests:
        if means := [each for each in manifest.starts if each.label == label]:
            release = manifest.tried.release if manifest.tried else manifest.run_id
            builds.setdefault(f"{manifest.cell} {release}", []).extend(means)
            runs.append(manifest.run_id)
    return between_starts(label, builds, runs)
