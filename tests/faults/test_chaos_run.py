"""Random schedules over whole qualifications: hosts take over, measure, keep and publish, are killed, and start again.

Measuring is a copy of captured evidence; the rest is the product's own. Whatever was killed, no evidence is lost, no finished
stage is measured twice, and every end is explained. `make chaos` runs thousands of schedules.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.builders.captured_runs import judged, store_in
from tests.faults.faulty_store import Fault, child_ends_well, faulty, parts_and_size
from vllm_qualify.approval.index import index_problem, refresh
from vllm_qualify.errors import StoreError
from vllm_qualify.plan.request import Reuse
from vllm_qualify.publish.bundle import evidence_key, read_manifest
from vllm_qualify.publish.kept import KeptStage, keep
from vllm_qualify.publish.store import PrunableStore, Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.metrics import StageName
from vllm_qualify.runs import publishing
from vllm_qualify.runs.folder import Run, lacking_stages, start_run
from vllm_qualify.runs.stored import published_run, reuse_stages, save_finished

__all__ = ["judged"]

PARTS, SCHEDULES = parts_and_size(12)
HOSTS = ("one", "two")
# One line for each stage that this host measured.
MEASURED = "measured"


class Start(NamedTuple):
    """A host starts a qualification, and what goes wrong at which of its calls to the store."""

    host: str
    faults: tuple[tuple[int, Fault], ...] = ()


FAULTS = st.tuples(st.integers(0, 80), st.sampled_from(["refused", "lost", "dies before", "dies after"]))
STARTS = st.builds(Start, st.sampled_from(HOSTS), st.lists(FAULTS, max_size=3).map(tuple))
SCHEDULE = st.lists(STARTS, min_size=2, max_size=6)


@dataclass
class World:
    """A store, and hosts that qualify the same release. `whole` is a judged run, which their runs are copies of."""

    folder: Path
    store: PrunableStore
    whole: Run
    started: list[str] = field(default_factory=list)

    def start(self, start: Start) -> bool:
        """Whether the qualification ended well. It is a child process, so that it can be killed."""
        run_id = f"20260314T{len(self.started):02}0000Z-{len(self.started):06x}"
        self.started.append(run_id)
        return child_ends_well(partial(self._start_here, start, run_id), start)

    def _start_here(self, start: Start, run_id: str) -> None:
        os.environ["VLLM_QUALIFY_HOME"] = str(self.folder / start.host)
        self._qualify(faulty(self.store, start.faults), run_id)

    def _qualify(self, store: Store, run_id: str) -> None:
        """As `qualify_cells` does."""
        run = start_run(self.whole.plan.model_copy(update={"run_id": run_id}))
        reuse_stages(run, store, Reuse())
        for stage in lacking_stages(run):
            self._measure(run, stage, store)
        if not run.stage("serve"):
            self._measure(run, "serve", store)
        run.data_docs.mkdir()
        report = self.whole.report().model_copy(update={"run_id": run_id, "plan": run.plan, "stages": run.stages()})
        publishing.publish_run(report, run, store)

    def _measure(self, run: Run, name: StageName, store: Store) -> None:
        shutil.copytree(self.whole.evidence / name, run.evidence / name)
        (stage,) = (each for each in self.whole.stages() if each.stage == name)
        save_finished(run, stage.model_copy(update={"started_at": datetime.now(UTC)}))
        with (run.folder.parents[1] / MEASURED).open("a") as measured:
            measured.write(f"{name}\n")
        try:
            keep(store, run.plan, next(each for each in run.stages() if each.stage == name), run.evidence)
        except StoreError:
            # The run goes on: its end publishes the stage.
            return

    def check(self) -> None:
        """What holds at any time, whatever was killed."""
        manifests = [read_manifest(self.store, key) for key in self.store.keys("reports/") if key.endswith("/manifest.json")]
        for named in (named for manifest in manifests for named in manifest.objects):
            assert hashlib.sha256(self.store.get(named.key)).hexdigest() == named.sha256
        for key in self.store.keys("stages/"):
            for file in KeptStage.model_validate_json(self.store.get(key)).stage.files:
                assert hashlib.sha256(self.store.get(evidence_key(file))).hexdigest() == file.sha256
        # A published run's stages are not taken over: its release is then measured once more.
        for host in HOSTS:
            measured = self.folder / host / MEASURED
            lines = measured.read_text().split() if measured.exists() else []
            assert all(lines.count(stage) <= 1 + len(manifests) for stage in lines), host

    def settle(self) -> None:
        """Each host starts once more, and now nothing fails."""
        for host in HOSTS:
            assert self.start(Start(host))
            run = published_run(self.store, self.started[-1])
            assert {stage.stage for stage in run.report.stages} == {stage.stage for stage in self.whole.stages()}
            self.check()
        cell = self.whole.plan.cell.id
        assert index_problem(self.store, cell) is None
        there = {key.split("/")[-2] for key in self.store.keys("reports/") if key.endswith("/manifest.json")}
        assert {line.run_id for line in refresh(self.store, cell).reports} == there


@pytest.fixture(scope="module", autouse=True)
def _only_what_counts() -> Iterator[None]:
    """Pages are not drawn, which takes longer than all else here. A killed process loses no file that the disk lacks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(publishing, "render_page", lambda *_: "<!doctype html>")
        yield


@pytest.mark.thorough
@pytest.mark.parametrize("_part", range(PARTS))
@settings(max_examples=SCHEDULES, suppress_health_check=list(HealthCheck))
@given(schedule=SCHEDULE)
def test_no_evidence_is_lost_and_nothing_is_measured_twice(_part: int, schedule: list[Start], judged: Path) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        store_in(folder / "store")
        world = World(folder, open_store((folder / "store").as_uri()), Run(folder=judged))
        for start in schedule:
            world.start(start)
            world.check()
        world.settle()
