"""Remove old reports, and the evidence that no other report and no kept stage has.

Three things always stay: a run about which somebody decided, a run that was made to be a baseline and passed, and the newest
runs of each cell. Before a manifest goes, it is copied to `pruned/`; that copy goes when nothing else is left. So a stopped
prune is called again, with any policy.
"""

import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial

from pydantic import Field

from vllm_qualify.approval.index import make_again, read_row, write_index
from vllm_qualify.approval.row import started_at
from vllm_qualify.engine.process import Tell
from vllm_qualify.errors import AlreadyExistsError, StoreBusyError
from vllm_qualify.publish.bundle import Manifest, evidence_key, read_manifest
from vllm_qualify.publish.door import set_door
from vllm_qualify.publish.kept import KeptStage, read_kept
from vllm_qualify.publish.layout import check_layout, manifest_key, run_key
from vllm_qualify.publish.order import order
from vllm_qualify.publish.store import PrunableStore, Store
from vllm_qualify.recipe.values import Frozen

AT_ONCE = 16
# Time for a stage that was being kept when the door was closed.
GRACE_S = 60.0
# A century: what is older than the calendar is no day.
MOST_DAYS = 36_500
MANIFEST = "/manifest.json"
_OF_A_RUN = re.compile(r"(?P<cell>[^/]+(?:/[^/]+){3})/(?P<run_id>[^/]+)/manifest\.json")

StoredRun = tuple[str, str]
"""Cell and run."""


class Policy(Frozen):
    """What may go: reports and kept stages of more than `older_than_days` days, but the newest `keep` reports of each cell."""

    keep: int = Field(ge=1)
    older_than_days: int = Field(ge=1, le=MOST_DAYS)

    def oldest_kept(self, now: datetime) -> datetime:
        """What is from then or later stays."""
        return now.astimezone(UTC) - timedelta(days=self.older_than_days)


class Pruning(Frozen):
    """What goes. `objects` are keys of evidence, of `size_bytes` together; `stages` are keys of notes of kept stages."""

    runs: list[StoredRun]
    objects: list[str]
    stages: list[str]
    size_bytes: int

    @property
    def summary(self) -> str:
        files = f"{len(self.objects)} files of evidence ({self.size_bytes / 2**20:.1f} MiB)"
        return f"{len(self.runs)} reports, {files} and {len(self.stages)} notes of kept stages"


def plan_pruning(store: Store, policy: Policy, now: datetime) -> Pruning:
    """What goes by the policy. Nothing is changed. Raises StoreError."""
    check_layout(store)
    before, manifests = policy.oldest_kept(now), _read_all_manifests(store)
    decided = {tuple(key.removeprefix("approvals/").rsplit("/", 2)[:2]) for key in store.keys("approvals/")}
    # The runs that an earlier call began to remove. They go in any case: something of them may be gone.
    begun = {run: read_manifest(store, key) for key, run in _manifests_in(store, "pruned/")}
    going = [run for run in _older_runs(manifests, policy.keep) if run not in decided and _may_go(manifests[run], before)]
    going = sorted({*going, *(run for run in begun if run in manifests)})
    stages = _read_kept_stages(store)
    old = [key for key, kept in stages.items() if kept.stage.started_at < before]
    staying = {named.key for run in manifests.keys() - going for named in manifests[run].objects}
    staying |= {evidence_key(file) for key in stages.keys() - old for file in stages[key].stage.files}
    removed = [*begun.values(), *(manifests[run] for run in going)]
    sizes = {named.key: named.size for manifest in removed for named in manifest.objects}
    sizes |= {evidence_key(file): file.size for key in old for file in stages[key].stage.files}
    there = set(store.keys("evidence/"))
    objects = sorted(key for key in sizes if key in there - staying)
    return Pruning(runs=going, objects=objects, stages=old, size_bytes=sum(sizes[key] for key in objects))


def prune_store(store: PrunableStore, policy: Policy, now: datetime, tell: Tell, grace_s: float = GRACE_S) -> Pruning:
    """Remove what goes by the policy. Meanwhile nothing is published.

    Raises StoreBusyError if a run is being published: nothing was removed. StoreError: the store cannot be trusted or read.
    """
    set_door(store, is_closed=True)
    tell(f"nothing can be published now; what is being written has {grace_s:.0f} s")
    time.sleep(grace_s)
    doomed = plan_pruning(store, policy, now)
    # While removed runs are noted the door was never open: who is coming since then has written nothing.
    coming = None if _manifests_in(store, "pruned/") else _find_coming(store, policy.oldest_kept(now))
    if coming:
        set_door(store, is_closed=False)
        problem = f"run {coming[1]} of {coming[0]} is being published, or its publication broke off"
        raise StoreBusyError(problem, "try again when it is published; it hinders no longer when it is old enough to go")
    for run in doomed.runs:
        with suppress(AlreadyExistsError):
            store.put_new(_note_key(run), store.get(manifest_key(*run)), "application/json")
    _delete_keys(store, (manifest_key(*run) for run in doomed.runs))
    _delete_keys(store, doomed.stages)
    _delete_keys(store, doomed.objects)
    _finish_removal(store)
    write_index(store)
    set_door(store, is_closed=False)
    return doomed


def _read_all_manifests(store: Store) -> dict[StoredRun, Manifest]:
    found = _manifests_in(store, "reports/")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        manifests = pool.map(partial(read_manifest, store), [key for key, _ in found])
        return {run: manifest for (_, run), manifest in zip(found, manifests, strict=True)}


def _manifests_in(store: Store, folder: str) -> list[tuple[str, StoredRun]]:
    """The keys of manifests in a folder, each with its run. Whoever may publish can write other keys there, of no run."""
    matches = ((key, _OF_A_RUN.fullmatch(key.removeprefix(folder))) for key in store.keys(folder))
    return [(key, (match["cell"], match["run_id"])) for key, match in matches if match]


def _older_runs(manifests: Mapping[StoredRun, Manifest], keep: int) -> list[StoredRun]:
    """All but the newest of each cell."""
    cells: dict[str, list[StoredRun]] = {}
    for run in sorted(manifests, key=lambda run: order(manifests[run])):
        cells.setdefault(run[0], []).append(run)
    return [run for own in cells.values() for run in own[:-keep]]


def _may_go(manifest: Manifest, before: datetime) -> bool:
    at = started_at(manifest.run_id)
    return at is not None and at < before and not (manifest.is_baseline or manifest.is_baseline_again)


def _read_kept_stages(store: Store) -> dict[str, KeptStage]:
    keys = list(store.keys("stages/"))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(keys, pool.map(partial(read_kept, store), keys), strict=True))


def _find_coming(store: Store, before: datetime) -> StoredRun | None:
    """A run that is being published, and is not so old that it broke off."""
    indexes = [key for key in store.keys("cells/") if key.endswith("/index.json")]
    for cell in (key.removeprefix("cells/").removesuffix("/index.json") for key in indexes):
        for run_id in read_row(store, cell).coming:
            at = started_at(run_id)
            if at is None or at >= before:
                return cell, run_id
    return None


def _note_key(run: StoredRun) -> str:
    return f"pruned/{'/'.join(run)}{MANIFEST}"


def _finish_removal(store: PrunableStore) -> None:
    """Remove all that is left of the noted runs, and make the indexes of their cells again."""
    runs = [run for _, run in _manifests_in(store, "pruned/")]
    for run in runs:
        _delete_keys(store, store.keys(f"reports/{'/'.join(run)}/"))
        _delete_keys(store, [run_key(run[1])])
    for cell in {cell for cell, _ in runs}:
        make_again(store, cell)
    _delete_keys(store, map(_note_key, runs))


def _delete_keys(store: PrunableStore, keys: Iterable[str]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(store.delete, keys))
