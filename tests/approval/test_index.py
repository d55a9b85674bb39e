"""What the index tells of each report, what each manifest tells it, and indexes of another version."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from tests.approval.builder import (
    BOB_REJECTS,
    CELL,
    NEWER,
    NOW,
    OLDER,
    RUN,
    Change,
    approved,
    of_plan,
    of_variant,
    publish_report,
    row_of,
    with_gate,
)
from tests.approval.stores import Interrupted, KilledError, Mortal, rewrite
from tests.builders.boards import TAKEN_BACK
from tests.builders.captured_runs import WITHOUT_BASELINE, captured_plan, captured_stage
from tests.builders.changed import changed
from tests.publish.conftest import RADOSGW
from tests.report.builder import image_report, passed_report
from vllm_qualify.approval import index
from vllm_qualify.approval.actions import reject, revoke
from vllm_qualify.approval.board import render_board
from vllm_qualify.approval.head import differing_fields, head_of
from vllm_qualify.approval.index import announce, baseline_of, chain_of, index_problem, read_index, refresh, write_index
from vllm_qualify.approval.layout import BOARD_KEY, INDEX_KEY, JSON, cell_index_key, cell_page_key
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.approval.row import INDEX_VERSION, ReportLine
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.errors import AlreadyExistsError, StoreError
from vllm_qualify.evidence.measurement import Measurement, invalid
from vllm_qualify.publish.bundle import Score, Summary, read_manifest
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.layout import LAYOUT_KEY, manifest_key, prepare
from vllm_qualify.publish.order import Numbered
from vllm_qualify.publish.store import MOST_DOCUMENT_BYTES, MissingObjectError, Store, Stored
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.report.model import Report, make_report
from vllm_qualify.runs.baseline import newest_baseline
from vllm_qualify.runs.folder import start_run
from vllm_qualify.runs.prune import Policy, plan_pruning
from vllm_qualify.runs.publishing import publish_run
from vllm_qualify.runs.stored import published_run

OTHER_CELL = CELL.replace("fp8", "bf16")


establishing = of_plan(establishes=True)


def lines(store: Store) -> dict[str, ReportLine]:
    return {line.run_id: line for line in refresh(store, CELL).reports}


def standings(store: Store) -> dict[str, tuple[str, str | None]]:
    return {run_id: (line.standing, line.told) for run_id, line in lines(store).items()}


# --- what became of each report


def test_a_report_waits_until_it_is_decided(store: Store, run: PublishedRun, key: PrivateKey) -> None:
    assert standings(store) == {RUN: ("waiting for a decision", None)}
    approved(store, run, key)
    assert standings(store) == {RUN: ("approved", "approved by Ada on 2026-03-14")}
    revoke(store, CELL, None, TAKEN_BACK)
    assert standings(store) == {RUN: ("revoked", "revoked by Grace on 2026-03-14: it answers in Latin")}


def test_a_report_that_did_not_pass_is_not_approved_and_a_rejected_one_says_why(store: Store, tmp_path: Path) -> None:
    run = publish_report(store, tmp_path, change=with_gate("fail"))
    assert standings(store) == {RUN: ("not passed", None)}
    done = reject(store, run, BOB_REJECTS, NOW)
    assert (done.decision.summary, done.index_problem) == ("rejected by Bob on 2026-03-14", None)
    assert standings(store) == {RUN: ("rejected", "rejected by Bob on 2026-03-14: we do not need it")}


def test_a_newer_approval_supersedes_whatever_was_approved_or_waits(store: Store, tmp_path: Path, key: PrivateKey) -> None:
    runs = [publish_report(store, tmp_path, run_id) for run_id in (OLDER, RUN, NEWER)]
    approved(store, runs[0], key)
    approved(store, runs[2], key)
    assert standings(store) == {
        NEWER: ("approved", "approved by Ada on 2026-03-14"),
        RUN: ("superseded", None),
        OLDER: ("superseded", "approved by Ada on 2026-03-14"),
    }


def test_an_approval_that_expired_is_left_to_whoever_knows_the_day(store: Store, run: PublishedRun, key: PrivateKey) -> None:
    approved(store, run, key, NOW - timedelta(days=900))
    assert [standing for standing, _ in standings(store).values()] == ["approved"]


def test_the_approved_report_stays_beside_the_newest_ones(store: Store, tmp_path: Path, key: PrivateKey) -> None:
    approved(store, publish_report(store, tmp_path, OLDER), key)
    newer = [f"20260401T0000{at:02}Z-abcdef" for at in range(index.REPORTS_SHOWN + 1)]
    for run_id in newer:
        publish_report(store, tmp_path, run_id)
    shown = lines(store)
    assert list(shown) == [*reversed(newer[1:]), OLDER]
    assert shown[OLDER].standing == "approved"


# --- what a manifest tells


def summary(store: Store, folder: Path, change: Change = lambda report: report) -> Summary:
    publish_report(store, folder, change=change)
    summarized = read_manifest(store, manifest_key(CELL, RUN)).summary
    assert summarized is not None
    assert lines(store)[RUN].summary == summarized
    return summarized


def without(metric: str) -> Change:
    """What a stage measured of the metric cannot be trusted."""

    def spoilt(measurement: Measurement) -> Measurement:
        of = {"task": measurement.task, "filter": measurement.filter}
        return invalid(metric, "the server was gone", measurement.source, **of) if measurement.metric == metric else measurement

    def change(report: Report) -> Report:
        return changed(
            report, stages=[changed(stage, measurements=list(map(spoilt, stage.measurements))) for stage in report.stages]
        )

    return change


def measured(report: Report, metric: str) -> Measurement:
    return next(measurement for stage in report.stages for measurement in stage.measurements if measurement.metric == metric)


def test_a_manifest_tells_what_the_board_shows(store: Store, tmp_path: Path) -> None:
    first = measured(passed_report(), "exact_match")
    assert first.value is not None
    assert summary(store, tmp_path) == Summary(
        engine="vllm",
        engine_version="0.32.0",
        model=passed_report().plan.cell.release.model,
        revision=passed_report().plan.cell.release.revision,
        gpus=1,
        score=Score(metric="exact_match (gsm8k, strict-match)", value=first.value, interval=first.interval),
        output_tok_s_per_gpu=12608.4,
    )


@pytest.mark.parametrize(("secret", "host"), [("", "registry.example"), ("registry.example", "[redacted]")], ids=["", "secret"])
def test_an_engine_of_an_image_has_its_name_without_a_secret(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str, host: str
) -> None:
    monkeypatch.setenv("REGISTRY_TOKEN", secret)
    summarized = summary(store, tmp_path, of_plan("cell", release=image_report().plan.cell.release))
    assert summarized.image == f"{host}:5000/vllm/vllm-openai:v0.32.0"


def test_throughput_is_that_of_one_gpu(store: Store, tmp_path: Path) -> None:
    arguments = passed_report().plan.server.arguments | {"tensor-parallel-size": 4, "data-parallel-size": 2}
    summarized = summary(store, tmp_path, of_plan("server", arguments=arguments))
    assert (summarized.gpus, summarized.output_tok_s_per_gpu) == (8, 12608.4 / 8)


def test_what_cannot_be_trusted_is_missing(store: Store, tmp_path: Path) -> None:
    assert summary(store, tmp_path, without("output_throughput_tok_s")).output_tok_s_per_gpu is None


def test_a_score_that_cannot_be_trusted_is_missing(store: Store, tmp_path: Path) -> None:
    summarized = summary(store, tmp_path, without("exact_match"))
    assert (summarized.score, summarized.output_tok_s_per_gpu) == (None, 12608.4)


def test_without_a_gate_on_accuracy_there_is_no_score(store: Store, tmp_path: Path) -> None:
    gates = [gate for gate in passed_report().plan.gates if gate.metric != "exact_match"]
    assert summary(store, tmp_path, of_plan(gates=gates)).score is None


def test_a_gate_on_what_was_lost_has_the_score_itself(store: Store, tmp_path: Path) -> None:
    gate = gate_of(metric="exact_match", task="gsm8k", filter="flexible-extract", max_loss=0.02, unit="fraction")
    summarized = summary(store, tmp_path, of_plan(gates=[gate]))
    assert summarized.score is not None
    assert summarized.score.metric == "exact_match (gsm8k, flexible-extract)"
    assert 0.8 < summarized.score.value < 0.82


def test_the_manifest_of_a_captured_run(store: Store, tmp_path: Path) -> None:
    """Of real tools on a CPU, which has no GPUs: the output is the whole machine's."""
    run = start_run(captured_plan(tmp_path))
    stages = [captured_stage(run, stage) for stage in WITHOUT_BASELINE]
    report = make_report(run.plan, stages, passed_report().judgement)
    publish_run(report, run, store)
    summarized = read_manifest(store, f"{report.prefix}/manifest.json").summary
    score = next(row for row in stages[3].measurements if (row.metric, row.filter) == ("exact_match", "flexible-extract"))
    assert score.value is not None
    assert summarized == Summary(
        engine="vllm",
        engine_version=run.plan.cell.release.engine.version,
        model=run.plan.cell.release.model,
        revision=run.plan.cell.release.revision,
        score=Score(metric="exact_match (gsm8k, flexible-extract)", value=score.value, interval=score.interval),
        output_tok_s_per_gpu=measured(report, "output_throughput_tok_s").value,
    )


def test_a_manifest_from_before_models_were_shown_is_still_its_reports(store: Store, tmp_path: Path) -> None:
    """One that names another model is not."""
    report = publish_report(store, tmp_path / "runs").report
    head = head_of(report, [])
    bare = changed(head, "summary", model=None, revision=None)
    assert list(differing_fields(bare, report)) == list(differing_fields(head, report)) == []
    for wrong in ({"model": "evil/model"}, {"model": None}, {"revision": "0" * 40}):
        assert list(differing_fields(changed(head, "summary", **wrong), report)) == ["summary"]


# --- an index of another version


@pytest.fixture
def two_cells(store: Store, tmp_path: Path, key: PrivateKey) -> Store:
    approved(store, publish_report(store, tmp_path / "fp8"), key)
    publish_report(store, tmp_path / "bf16", OLDER, of_variant("bf16"))
    return store


@pytest.mark.parametrize("version", [0, INDEX_VERSION - 1, INDEX_VERSION + 1, True, "1", None])
def test_an_index_of_any_other_version_is_reported(two_cells: Store, version: object) -> None:
    for name in (INDEX_KEY, cell_index_key(CELL)):
        before = two_cells.read(name)
        body = json.dumps(json.loads(before.body) | {"index_version": version}).encode()
        two_cells.swap(name, body, JSON, before.tag)
        assert "not an index" in (index_problem(two_cells, CELL) or "")
        assert two_cells.get(name) == body


@pytest.mark.parametrize("body", [b'{"layout_version": 1}', b'{"layout_version": 3}', b"{", b""])
def test_a_store_of_an_unknown_layout_is_refused_and_left_alone(two_cells: Store, tmp_path: Path, body: bytes) -> None:
    rewrite(two_cells, LAYOUT_KEY, body)
    before = {key: two_cells.read(key) for key in two_cells.keys("")}
    uses: tuple[Callable[[Store], object], ...] = (
        partial(published_run, run_id=NEWER),
        partial(newest_baseline, cell=CELL),
        partial(plan_pruning, policy=Policy(keep=1, older_than_days=1), now=NOW),
        prepare,
        partial(publish_report, folder=tmp_path / "runs", run_id=NEWER),
    )
    for use in uses:
        with pytest.raises(StoreError, match="the layout of the store is not known"):
            use(two_cells)
    documents = [f"reports/{CELL}/{NEWER}/manifest.json", f"runs/{NEWER}.json"]
    assert not any(map(two_cells.exists, documents))
    assert {key: two_cells.read(key) for key in before} == before


@pytest.mark.parametrize("version", [1, 3])
def test_a_manifest_of_another_version_is_refused_and_named(two_cells: Store, version: int) -> None:
    key = manifest_key(CELL, RUN)
    document = json.loads(two_cells.get(key)) | {"manifest_version": version}
    rewrite(two_cells, key, json.dumps(document).encode())
    with pytest.raises(StoreError, match="not a manifest"):
        read_run(two_cells, CELL, RUN)
    Path(two_cells.locate(cell_index_key(CELL))).unlink()
    assert f"the manifest of run {RUN} of {CELL} cannot be read" in (index_problem(two_cells, CELL) or "")


# --- the race for the index of all cells


def change(store: Store, cell: str) -> int:
    """A run is announced, and never comes: the cell's index changes. Returns its revision."""
    announce(store, cell, "20260401T000000Z-abcdef")
    return refresh(store, cell).revision


@pytest.mark.parametrize(("other", "swaps"), [(OTHER_CELL, 2), (CELL, 1)], ids=["another row", "its own row"])
def test_who_loses_the_race_for_the_index_loses_no_row(two_cells: Store, other: str, swaps: int) -> None:
    revisions = {cell: change(two_cells, cell) for cell in (CELL, OTHER_CELL)}
    before = read_index(two_cells).revision
    losing = Interrupted(two_cells, lambda: index_problem(two_cells, other), INDEX_KEY)
    assert index_problem(losing, CELL) is None
    written = read_index(two_cells)
    assert written.revision_of(CELL) == revisions[CELL]
    assert written.revision_of(other) == revisions[other]
    assert (losing.swaps, written.revision - before) == (swaps, swaps)
    assert two_cells.get(BOARD_KEY).decode() == render_board(written)


class ReadMeanwhile(DirectoryStore):
    """A row is written after this process has read it, and before it writes the index."""

    def __init__(self, root: Path, row: str, other: Callable[[], object]) -> None:
        super().__init__(root)
        self._row, self._others = row, [other]

    def read(self, key: str) -> Stored:
        found = super().read(key)
        if key == self._row and self._others:
            self._others.pop()()
        return found


def test_an_index_that_is_made_again_brings_no_older_row_back(two_cells: Store, tmp_path: Path) -> None:
    def write_meanwhile() -> None:
        change(two_cells, CELL)
        assert index_problem(two_cells, CELL) is None

    write_index(ReadMeanwhile(tmp_path / "store", cell_index_key(CELL), write_meanwhile))
    assert read_index(two_cells).revision_of(CELL) == refresh(two_cells, CELL).revision
    assert two_cells.get(BOARD_KEY).decode() == render_board(read_index(two_cells))


# --- what a killed publisher leaves


def test_what_a_killed_publisher_left_out_the_next_one_completes(store: Store, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        publish_report(Mortal(store, "manifest.json", after=True), tmp_path / "killed", OLDER, establishing)
    assert baseline_of(store, CELL) == OLDER
    publish_report(store, tmp_path / "next", RUN)
    assert list(standings(store)) == [RUN, OLDER]
    assert (row_of(store).coming, row_of(store).baseline) == ([], Numbered(run_id=OLDER, sequence=1))
    (row,) = read_index(store).cells
    assert [report.run_id for report in row.reports] == [RUN, OLDER]


def test_a_run_that_was_never_published_whole_is_in_no_index(store: Store, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        publish_report(Mortal(store, cell_index_key(CELL), after=True), tmp_path / "killed", OLDER, establishing)
    assert baseline_of(store, CELL) is None
    publish_report(store, tmp_path / "next", RUN)
    assert list(standings(store)) == [RUN]
    assert row_of(store).coming == [OLDER]
    publish_report(store, tmp_path / "again", OLDER, establishing)
    # The store says the order: it was published last.
    assert list(standings(store)) == [OLDER, RUN]
    assert row_of(store).coming == []


@pytest.mark.parametrize("is_made_again", [False, True])
def test_one_manifest_that_cannot_be_read_hides_no_other_report(store: Store, tmp_path: Path, is_made_again: bool) -> None:
    publish_report(store, tmp_path / "first", OLDER, establishing)
    announce(store, CELL, RUN)
    store.put_new(manifest_key(CELL, RUN), b"{", "application/json")
    if is_made_again:
        Path(store.locate(cell_index_key(CELL))).unlink()
    publish_report(store, tmp_path / "next", NEWER)
    assert list(standings(store)) == [NEWER, OLDER]
    assert (row_of(store).unreadable, row_of(store).coming) == ([RUN], [])
    assert baseline_of(store, CELL) == OLDER
    assert f"the manifest of run {RUN} of {CELL} cannot be read" in (index_problem(store, CELL) or "")
    assert f"the manifest cannot be read: {RUN}." in store.get(cell_page_key(CELL)).decode()
    (row,) = read_index(store).cells
    assert [report.run_id for report in row.reports] == [NEWER, OLDER]


# --- a person's word about a baseline


@pytest.fixture
def baselines(store: Store, tmp_path: Path) -> list[PublishedRun]:
    """Three runs that were made to be baselines, in the order of their publication."""
    return [publish_report(store, tmp_path / "runs", f"2026032{number}T080000Z-abcdef", establishing) for number in range(3)]


def test_the_newest_approved_baseline_counts_and_no_later_one(
    store: Store, baselines: list[PublishedRun], key: PrivateKey, tmp_path: Path
) -> None:
    first, second, third = baselines
    assert baseline_of(store, CELL) == third.run_id
    for run in (first, second):
        approved(store, run, key)
        assert baseline_of(store, CELL) == run.run_id
    # Nor does an approved run that was compared.
    approved(store, publish_report(store, tmp_path / "compared", "20260329T080000Z-abcdef"), key)
    assert baseline_of(store, CELL) == second.run_id


def test_a_rejected_baseline_is_none_and_the_one_before_counts(store: Store, baselines: list[PublishedRun]) -> None:
    reject(store, baselines[2], BOB_REJECTS, NOW)
    assert baseline_of(store, CELL) == baselines[1].run_id
    # Nor does the index bring it back.
    Path(store.locate(cell_index_key(CELL))).unlink()
    assert baseline_of(store, CELL) == baselines[1].run_id
    for run in baselines[:2]:
        reject(store, run, BOB_REJECTS, NOW)
    assert baseline_of(store, CELL) is None


def test_a_revoked_baseline_is_none_and_the_approved_one_before_counts(
    store: Store, baselines: list[PublishedRun], key: PrivateKey
) -> None:
    for run in baselines[:2]:
        approved(store, run, key)
    revoke(store, CELL, None, TAKEN_BACK)
    assert baseline_of(store, CELL) == baselines[0].run_id
    revoke(store, CELL, baselines[0].run_id, TAKEN_BACK)
    # Nobody decided about it, so it counts as before the first approval.
    assert baseline_of(store, CELL) == baselines[2].run_id


def judging_again(report: Report) -> Report:
    return changed(establishing(report), rejudged_from=OLDER)


def stands(_: str) -> bool:
    """It was judged by the gates of now."""
    return True


def test_a_run_that_was_judged_again_counts_only_where_it_stands_and_none_is_approved(
    store: Store, baselines: list[PublishedRun], key: PrivateKey, tmp_path: Path
) -> None:
    again = publish_report(store, tmp_path / "again", "20260329T080000Z-abcdef", judging_again)
    assert baseline_of(store, CELL) == baselines[2].run_id
    assert baseline_of(store, CELL, stands) == again.run_id
    # Its approval makes it no link of the chain, and takes nothing from it.
    approved(store, again, key)
    assert chain_of(store, CELL) == []
    assert (baseline_of(store, CELL), baseline_of(store, CELL, stands)) == (baselines[2].run_id, again.run_id)
    revoke(store, CELL, None, TAKEN_BACK)
    assert baseline_of(store, CELL, stands) == baselines[2].run_id


def test_a_run_that_was_judged_again_takes_no_approved_baselines_place(
    store: Store, baselines: list[PublishedRun], key: PrivateKey, tmp_path: Path
) -> None:
    approved(store, baselines[0], key)
    again = publish_report(store, tmp_path / "again", "20260329T080000Z-abcdef", judging_again)
    assert baseline_of(store, CELL, stands) == baselines[0].run_id
    approved(store, again, key)
    assert baseline_of(store, CELL, stands) == baselines[0].run_id


def test_runs_that_never_come_do_not_add_up(store: Store, run: PublishedRun) -> None:
    for number in range(index.MOST_COMING + 5):
        announce(store, CELL, f"20260401T000000Z-{number:06}")
    assert refresh(store, CELL).coming == [f"20260401T000000Z-{number:06}" for number in range(5, index.MOST_COMING + 5)]
    assert list(standings(store)) == [run.run_id]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["directory", RADOSGW])
def test_sixteen_publishers_lose_no_report(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    url = (tmp_path / "store").as_uri() if kind == "directory" else str(request.getfixturevalue("radosgw_url"))
    store = open_store(url)
    names = {f"20260314T0926{second:02}Z-abcdef": ("fp8", "bf16")[second % 2] for second in range(16)}
    with ThreadPoolExecutor(16) as pool:
        published = pool.map(lambda run_id: publish_report(store, tmp_path / "runs", run_id, of_variant(names[run_id])), names)
        assert sorted(run.run_id for run in published) == sorted(names)
    revisions = {}
    for cell, variant in ((CELL, "fp8"), (OTHER_CELL, "bf16")):
        assert row_of(store, cell).coming == []
        reports, revisions[cell] = row_of(store, cell).reports, row_of(store, cell).revision
        assert {line.run_id for line in reports} == {name for name in names if names[name] == variant}
        numbers = [line.sequence for line in reports]
        assert numbers == sorted({*numbers}, reverse=True)
        assert published_run(store, reports[0].run_id).cell == cell
    assert {cell.cell: cell.revision for cell in read_index(store).cells} == revisions
    assert store.get(BOARD_KEY).decode() == render_board(read_index(store))


class Overtaken(DirectoryStore):
    """Once it sees that there is no layout, another publisher begins, and publishes a report."""

    def __init__(self, root: Path, theirs: Path) -> None:
        super().__init__(root)
        self._theirs = theirs

    def get(self, key: str, most_bytes: int = MOST_DOCUMENT_BYTES) -> bytes:
        try:
            return super().get(key, most_bytes)
        except MissingObjectError:
            if key == LAYOUT_KEY:
                publish_report(open_store(self.url), self._theirs, OLDER)
            raise


def test_a_publisher_that_another_overtakes_in_a_new_store_publishes_too(tmp_path: Path) -> None:
    store = Overtaken(tmp_path / "store", tmp_path / "theirs")
    publish_report(store, tmp_path / "mine", NEWER)
    assert {line.run_id for line in row_of(store, CELL).reports} == {OLDER, NEWER}


# --- the store is not listed


class Unlisted(DirectoryStore):
    """Refuses to list more than the approvals of one cell."""

    def keys(self, prefix: str) -> Iterator[str]:
        assert re.fullmatch("approvals(/[^/]+){4}/", prefix), f"'{prefix}' was listed"
        return super().keys(prefix)


def test_nothing_is_found_by_listing_the_store(two_cells: Store, tmp_path: Path, key: PrivateKey) -> None:
    assert two_cells.exists(INDEX_KEY)
    store = Unlisted(tmp_path / "store")
    run = publish_report(store, tmp_path / "runs", NEWER, establishing)
    assert published_run(store, NEWER) == run
    assert newest_baseline(store, CELL) == run.report
    approved(store, run, key)
    assert row_of(store).reports[0].standing == "approved"


def test_a_run_of_another_cell_with_the_same_id_is_not_published(two_cells: Store, tmp_path: Path) -> None:
    """Else nobody could say which of the two an id means."""
    publish_report(two_cells, tmp_path / "first", NEWER)
    with pytest.raises(AlreadyExistsError):
        publish_report(two_cells, tmp_path / "second", NEWER, of_variant("int4"))
    assert published_run(two_cells, NEWER).cell == CELL
