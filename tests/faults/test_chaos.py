"""Random schedules: hosts publish, people approve, reject and revoke, while the store fails and processes are killed.

After each step, and at the end when everybody has tried again, nothing may be approved wrongly or twice, nothing may be lost,
and every end is explained. `make chaos` runs thousands of schedules.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.approval.builder import CELL, NOW, VALID_DAYS, made_key, of_variant, publish_report, with_gate
from tests.faults.faulty_store import Fault, child_ends_well, ends_well, faulty, parts_and_size
from vllm_qualify.approval import published
from vllm_qualify.approval.actions import approve, reject, revoke
from vllm_qualify.approval.decision import ruling
from vllm_qualify.approval.errors import NotApprovedError
from vllm_qualify.approval.index import index_problem, make_again, read_index, refresh, write_index
from vllm_qualify.approval.layout import approval_key
from vllm_qualify.approval.pointer import read_pointer, revocation
from vllm_qualify.approval.published import read_run
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.approval.verify import verify
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.evidence.measurement import EvidenceFile
from vllm_qualify.publish.bundle import read_manifest
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.store import PrunableStore
from vllm_qualify.publish.stores import open_store
from vllm_qualify.report.model import Report
from vllm_qualify.report.page import render_page
from vllm_qualify.runs import prune, publishing
from vllm_qualify.runs.folder import Run

PARTS, SCHEDULES = parts_and_size(12)
OTHER_CELL = CELL.replace("fp8", "bf16")
PEOPLE = ("Ada", "Bob")
Action = Literal["publish", "approve", "reject", "revoke", "index", "prune"]
# All runs but the newest of each cell may go then, unless somebody decided about them.
POLICY, LATER = prune.Policy(keep=1, older_than_days=1), datetime(2027, 1, 1, tzinfo=UTC)


class Made(NamedTuple):
    """A run that the schedules publish. Runs are named in the order in which they were made."""

    run_id: str
    cell: str
    passes: bool


RUNS = [
    Made("20260314T080000Z-000001", CELL, passes=True),
    Made("20260314T090000Z-000002", CELL, passes=True),
    Made("20260314T100000Z-000003", CELL, passes=False),
    Made("20260314T110000Z-000004", OTHER_CELL, passes=True),
]


@dataclass(frozen=True, repr=False)
class Prepared:
    """A judged run on its host, before it is published."""

    run: Run
    report: Report


@dataclass(frozen=True)
class Step:
    """One thing that somebody does, and what goes wrong at which of the calls to the store."""

    action: Action
    run: int
    person: str
    faults: tuple[tuple[int, Fault], ...] = ()
    meanwhile: tuple[tuple[int, "Step"], ...] = ()


ACTIONS = st.sampled_from(["publish", "publish", "approve", "approve", "reject", "revoke", "index", "prune"])
FAULTS = st.sampled_from(["refused", "lost", "dies before", "dies after"])
CALLS = st.integers(0, 45)


def steps(meanwhile: st.SearchStrategy[tuple[tuple[int, Step], ...]]) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        action=ACTIONS,
        run=st.integers(0, len(RUNS) - 1),
        person=st.sampled_from(PEOPLE),
        faults=st.lists(st.tuples(CALLS, FAULTS), max_size=2).map(tuple),
        meanwhile=meanwhile,
    )


MEANWHILE = st.lists(st.tuples(CALLS, steps(st.just(()))), max_size=2).map(tuple)
SCHEDULE = st.lists(steps(MEANWHILE), min_size=3, max_size=14)


# What was done before, without a fault: a store that has something to lose.
BEFORE: list[list[Step]] = [
    [],
    [Step("publish", 0, "Ada"), Step("approve", 0, "Ada")],
    [Step("publish", 0, "Ada"), Step("approve", 0, "Ada"), Step("publish", 1, "Ada"), Step("publish", 2, "Ada")],
    [Step("publish", 0, "Ada"), Step("reject", 0, "Bob"), Step("publish", 1, "Ada"), Step("approve", 1, "Ada")],
]


@dataclass
class World:
    """A store, and what people began and finished in it."""

    store: PrunableStore
    runs: dict[str, Prepared]
    key: PrivateKey
    begun: set[tuple[Action, int, str]] = field(default_factory=set)
    finished: set[tuple[Action, int]] = field(default_factory=set)

    def take(self, step: Step) -> None:
        """Take a step. A process that is to be killed is a child, of which nothing is known but its end."""
        self.begun.add((step.action, step.run, step.person))
        if any(fault.startswith("dies") for _, fault in step.faults):
            self.begun |= {(other.action, other.run, other.person) for _, other in step.meanwhile}
            ended_well = child_ends_well(partial(self._act, step), step)
        else:
            ended_well = ends_well(partial(self._act, step), step)
        if ended_well:
            self.finished.add((step.action, step.run))

    def _act(self, step: Step) -> None:
        meanwhile = {number: partial(self.take, other) for number, other in step.meanwhile}
        self._do(faulty(self.store, step.faults, meanwhile), step)

    def _do(self, store: PrunableStore, step: Step) -> None:
        made = RUNS[step.run]
        match step.action:
            case "publish":
                publishing.publish_run(self.runs[made.run_id].report, self.runs[made.run_id].run, store)
            case "approve":
                why = ruling("approve", step.person, "it is good")
                approve(store, read_run(store, made.cell, made.run_id), why, VALID_DAYS, self.key, NOW)
            case "reject":
                reject(store, read_run(store, made.cell, made.run_id), ruling("reject", step.person, "it is bad"), NOW)
            case "revoke":
                revoke(store, made.cell, made.run_id, revocation(step.person, "it answers in Latin", NOW))
            case "index":
                index_problem(store, made.cell)
            case "prune":
                prune.prune_store(store, POLICY, LATER, lambda _: None, grace_s=0)

    def check(self) -> None:
        """What holds at any time, whatever was killed."""
        for number, made in enumerate(RUNS):
            key = manifest_key(made.cell, made.run_id)
            if self.store.exists(key):
                for stored in read_manifest(self.store, key).objects:
                    assert hashlib.sha256(self.store.get(stored.key)).hexdigest() == stored.sha256
            else:
                assert ("publish", number) not in self.finished or self._may_be_pruned(number)
        for cell in {made.cell for made in RUNS}:
            self._check_approved(cell)

    def _may_be_pruned(self, number: int) -> bool:
        is_decided = {("approve", number), ("reject", number)} & self.finished
        return any(action == "prune" for action, _, _ in self.begun) and not is_decided

    def _check_approved(self, cell: str) -> None:
        for number in (number for number, made in enumerate(RUNS) if made.cell == cell):
            made = RUNS[number]
            try:
                verified = verify(self.store, approval_key(cell, made.run_id), [self.key.public_key], NOW)
            except (NotApprovedError, CallerError, StoreError):
                continue
            assert verified.run_id == made.run_id
            assert made.passes
            assert ("approve", number, verified.by) in self.begun
            assert not {("revoke", number), ("reject", number)} & self.finished
        pointer = read_pointer(self.store, cell)
        assert pointer is None or len(pointer.entries) == len({entry.run_id for entry in pointer.entries})

    def settle(self) -> None:
        """Everybody who was cut short tries again, in any order, and now nothing fails."""
        for action, run, person in sorted(self.begun):
            self.take(Step(action, run, person))
        self.check()
        for action, number, _ in self.begun:
            if action == "publish":
                assert (action, number) in self.finished
        for cell in {RUNS[number].cell for action, number in self.finished if action == "publish"}:
            self._check_index(cell)

    def _check_index(self, cell: str) -> None:
        """The indexes name each report, and say the same as when they are made anew."""
        assert index_problem(self.store, cell) is None
        kept, above = refresh(self.store, cell), read_index(self.store).cells
        fresh = make_again(self.store, cell)
        assert (kept.reports, kept.last, kept.baseline) == (fresh.reports, fresh.last, fresh.baseline)
        assert [row.model_copy(update={"revision": 0}) for row in write_index(self.store).cells if row.cell == cell] == [
            row.model_copy(update={"revision": 0}) for row in above if row.cell == cell
        ]
        done = {number for action, number in self.finished if action == "publish"}
        assert {line.run_id for line in kept.reports} == {RUNS[number].run_id for number in done if RUNS[number].cell == cell}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prepared]:
    """The runs as they lie on their hosts."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "store").mkdir()
    scratch = open_store((folder / "store").as_uri())
    made = {}
    for each in RUNS:
        change = (lambda report: report) if each.passes else with_gate("fail")
        if each.cell == OTHER_CELL:
            change = of_variant("bf16")
        report = publish_report(scratch, folder, each.run_id, change).report
        made[each.run_id] = Prepared(Run(folder=folder / each.run_id), report)
    return made


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> PrivateKey:
    return made_key(tmp_path_factory.mktemp("key") / "approver.pem")


@pytest.fixture(scope="module", autouse=True)
def _reports_are_drawn_and_read_once() -> Iterator[None]:
    """Both take longer than all else here, and always have the same result: a report is read again after each step."""
    drawn: dict[str, str] = {}

    def render(report: Report, link: Callable[[EvidenceFile], str]) -> str:
        return drawn.get(report.run_id) or drawn.setdefault(report.run_id, render_page(report, link))

    with pytest.MonkeyPatch.context() as patch:
        # A killed process loses no file that the disk lacks.
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(publishing, "render_page", render)
        for name in ("read_report", "parse_manifest", "parse_object"):
            patch.setattr(published, name, lru_cache(maxsize=64)(getattr(published, name)))
        # One call after the other: a schedule that fails must fail again.
        patch.setattr(prune, "AT_ONCE", 1)
        yield


@pytest.mark.thorough
@pytest.mark.parametrize("_part", range(PARTS))
@settings(max_examples=SCHEDULES, suppress_health_check=list(HealthCheck))
@given(before=st.sampled_from(BEFORE), schedule=SCHEDULE)
def test_nothing_is_approved_wrongly_and_nothing_is_lost(
    _part: int, before: list[Step], schedule: list[Step], prepared: dict[str, Prepared], signer: PrivateKey
) -> None:
    with TemporaryDirectory() as folder:
        world = World(open_store(Path(folder).as_uri()), prepared, signer)
        for step in [*before, *schedule]:
            world.take(step)
            world.check()
        world.settle()
