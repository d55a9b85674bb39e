"""A run on disk and in a store: judged, published, fetched and judged again, without a server."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.builders.captured_runs import (
    CAPTURED,
    CPU,
    SERVED,
    WITHOUT_BASELINE,
    captured_plan,
    captured_stage,
    judged,
    run,
    store,
    store_in,
)
from tests.builders.changed import changed
from tests.builders.wrapped_stores import Wrapped
from tests.directions import CONTRACT
from vllm_qualify.approval.errors import TamperedError
from vllm_qualify.errors import AlreadyExistsError, CallerError, HostError, StoreError
from vllm_qualify.evidence.load.ended import ENDED, Ended
from vllm_qualify.evidence.measurement import describe
from vllm_qualify.evidence.stages.stage import MACHINE
from vllm_qualify.evidence.stages.table import parse
from vllm_qualify.publish.bundle import evidence_key
from vllm_qualify.publish.order import sequence_key
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.recipe.metrics import METRICS, StageName
from vllm_qualify.report.model import Report, load_report
from vllm_qualify.runs.folder import Run, find_run, start_run
from vllm_qualify.runs.judging import check_judgement, rejudge
from vllm_qualify.runs.publishing import publish_run
from vllm_qualify.runs.stored import fetch_run, published_run, save_finished, trusted_report

__all__ = ["judged", "run", "store"]

CELL_INDEX, CELL_PAGE = (f"cells/reference/bf16/cpu/balanced/index.{end}" for end in ("json", "html"))
AFTERWARDS = [CELL_INDEX, "index.json", CELL_PAGE, "index.html"]
COUNTER = sequence_key("reference/bf16/cpu/balanced")


@pytest.fixture
def report(run: Run) -> Report:
    return load_report(run.folder)


class Observed(Wrapped):
    """A store that records what was written, and that fails at the n-th write."""

    def __init__(self, store: Store, fails_at: int | None = None) -> None:
        super().__init__(store)
        self.fails_at, self.tried = fails_at, 0
        self.written: list[str] = []

    def put_new(self, key: str, body: bytes, content_type: str) -> None:
        with self._writing(key):
            super().put_new(key, body, content_type)

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        with self._writing(key):
            super().swap(key, body, content_type, tag)

    @contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        self.tried += 1
        if self.tried == self.fails_at:
            raise StoreError("the disk is full", "free space on it", self.locate(key))
        yield
        self.written.append(key)


def manifest_of(report: Report, store: Store) -> dict[str, Any]:
    return dict(json.loads(store.get(f"{report.prefix}/manifest.json")))


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder; a store's own, which are hidden, aside."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith(".")}


def overwrite(path: Path, body: bytes) -> None:
    """As a person with the rights could do it; the store's own files are read-only."""
    path.chmod(0o644)
    path.write_bytes(body)


# --- judged


def test_judging_leaves_the_report_and_its_page(run: Run, report: Report) -> None:
    assert (report.passed, report.rejudged_from) == (True, None)
    assert report.run_id == report.plan.run_id == run.id
    assert [stage.stage for stage in report.stages] == WITHOUT_BASELINE
    assert (run.stages(), run.plan) == (report.stages, report.plan)
    assert {row.fingerprint for row in report.measurements} == {CPU.id}
    assert report.judgement.not_judged == []
    assert {gate.gate.label: (gate.verdict, gate.sample_count) for gate in report.judgement.gates} == {
        **{f"smoke_{name}": ("pass", 2) for name in ("model_identity", "finish_reason", "usage", "determinism", "golden")},
        **dict.fromkeys(CONTRACT, ("pass", 1)),
        "exact_match (gsm8k, flexible-extract)": ("pass", 8),
        **dict.fromkeys(("output_throughput_tok_s", "ttft_p50_ms", "tpot_p50_ms"), ("pass", 52)),
    }
    page = (run.folder / "report.html").read_text()
    assert report.plan.cell.id in page
    for file in report.files:
        assert f'href="evidence/{file.path}"' in page
        assert (run.folder / "evidence" / file.path).is_file()


def test_a_verdict_is_traced_to_its_expectations_and_to_the_line_that_it_was_read_from(run: Run, report: Report) -> None:
    expectations = report.judgement.suite["expectations"]
    results = report.judgement.validation["results"]
    assert isinstance(expectations, list)
    assert isinstance(results, list)
    by_id = {expectation["meta"]["id"]: expectation["meta"]["gate"] for expectation in expectations}
    assert by_id == {meta["id"]: meta["gate"] for meta in (result["expectation_config"]["meta"] for result in results)}
    for gate in report.judgement.gates:
        assert gate.expectations
        assert {by_id[number] for number in gate.expectations} == {gate.gate.label}
        for place in gate.traced_to:
            path, _, line = place.rpartition(":")
            text = (run.evidence / path).read_text().split("\n")[int(line) - 1]
            assert gate.gate.filter is None or gate.gate.filter in text
    assert all(gate.traced_to for gate in report.judgement.gates if gate.gate.has_noise)


def test_data_docs_are_kept_with_the_report(run: Run) -> None:
    (page,) = (run.data_docs / "validations").rglob("*.html")
    assert f'url={page.relative_to(run.data_docs)}"' in (run.data_docs / "index.html").read_text()
    assert "exact_match" in page.read_text()
    assert sum(path.stat().st_size for path in run.data_docs.rglob("*") if path.is_file()) < 400_000


@pytest.mark.parametrize(("text", "message"), [(None, "startup_s"), ("", "ValueError"), ("nan", "nan"), ("-1", "between 0")])
def test_a_server_without_a_start_up_time_is_invalid_and_no_error(run: Run, text: str | None, message: str) -> None:
    path = run.evidence / "serve" / "startup_s"
    path.unlink()
    if text is not None:
        path.write_text(text)
    (row,) = parse("serve", run.plan, run.evidence)
    assert row.value is None
    assert message in (row.invalid_because or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "it is not known which machine measured"),
        ("{}", "it is not known which machine measured"),
        (CPU.model_copy(update={"name": "Another CPU"}).model_dump_json(), "measured on Another CPU"),
    ],
)
@pytest.mark.parametrize("stage", WITHOUT_BASELINE)
def test_what_another_machine_measured_is_invalid(run: Run, stage: StageName, text: str | None, message: str) -> None:
    path = run.evidence / stage / MACHINE
    before = [row.invalid_because for row in parse(stage, run.plan, run.evidence)]
    path.unlink()
    if text is not None:
        path.write_text(text)
    reasons = [row.invalid_because or "" for row in parse(stage, run.plan, run.evidence)]
    # What was invalid already keeps its own reason, such as too few requests for a percentile.
    assert all(reason == first or (first is None and message in reason) for reason, first in zip(reasons, before, strict=True))
    assert any(message in reason for reason in reasons)


PAIRED = gate_of(metric="exact_match", task="gsm8k", filter="flexible-extract", max_loss=0.5, unit="fraction")


def test_a_baseline_that_nobody_could_be_held_to_is_none(run: Run) -> None:
    """The captured questions were asked once or twice."""
    plan = run.plan.model_copy(update={"gates": [*run.plan.gates, PAIRED], "establishes": True})
    report, _ = rejudge(run, plan)
    (verdict,) = [gate for gate in report.judgement.gates if gate.gate == PAIRED]
    assert (verdict.verdict, report.passed) == ("invalid", False)
    assert "its questions were asked 2 times, and 4 are needed" in verdict.because


def test_a_gate_against_a_baseline_that_the_run_never_had_is_invalid_when_it_is_judged_again(run: Run) -> None:
    report, _ = rejudge(run, run.plan.model_copy(update={"gates": [*run.plan.gates, PAIRED]}))
    assert [gate.verdict for gate in report.judgement.gates if gate.gate == PAIRED] == ["invalid"]
    assert not report.passed


# --- published


def test_a_run_is_published_whole_and_its_manifest_last(run: Run, report: Report, store: Store) -> None:
    observed = Observed(store)
    published = publish_run(report, run, observed)
    # index and board follow from the manifests, and can be made again
    manifest = f"{report.prefix}/manifest.json"
    # its place and the cell's index come before it: whoever completes it finds it by them
    messages = [key for key in observed.written if not key.startswith(("evidence/", "reports/")) or key == manifest]
    assert messages == ["layout.json", f"runs/{run.id}.json", CELL_INDEX, COUNTER, manifest, *AFTERWARDS]
    assert observed.written[-5:] == [manifest, *AFTERWARDS]
    assert observed.written.count(f"{report.prefix}/manifest.json") == 1
    assert sorted({*observed.written}) == list(store.keys(""))
    assert published.passed
    assert published.outcome == "passed"
    assert Path(published.manifest).read_bytes() == store.get(f"{report.prefix}/manifest.json")
    assert Path(published.page).read_bytes() == store.get(f"{report.prefix}/report.html")
    assert Report.model_validate_json(store.get(f"{report.prefix}/report.json")) == report


def test_the_manifest_names_every_object_with_its_hash_and_size(run: Run, report: Report, store: Store) -> None:
    publish_run(report, run, store)
    manifest = manifest_of(report, store)
    assert (manifest["run_id"], manifest["cell"], manifest["outcome"]) == (run.id, "reference/bf16/cpu/balanced", "passed")
    named = [stored["key"] for stored in manifest["objects"]]
    others = [COUNTER, f"{report.prefix}/manifest.json", f"runs/{run.id}.json", "layout.json", *AFTERWARDS]
    assert sorted([*named, *others]) == list(store.keys(""))
    for stored in manifest["objects"]:
        body = store.get(stored["key"])
        assert (stored["sha256"], stored["size"]) == (hashlib.sha256(body).hexdigest(), len(body))
    # Evidence is stored as the tools wrote it.
    evidence = {file.path: store.get(f"evidence/{file.sha256}/{Path(file.path).name}") for file in report.files}
    served = {f"serve/{name}": text.encode() for name, text in SERVED.items()}
    served |= {f"{stage}/{MACHINE}": CPU.model_dump_json().encode() for stage in WITHOUT_BASELINE}
    captured = {path: body for path, body in contents(CAPTURED).items() if path.split("/")[0] in WITHOUT_BASELINE}
    assert evidence == served | captured


def test_links_of_the_stored_page_lead_to_the_evidence(run: Run, report: Report, store: Store) -> None:
    page = Path(publish_run(report, run, store).page)
    addresses = [part.partition('"')[0] for part in page.read_text().split('href="')[1:]]
    linked = [(page.parent / address).resolve() for address in addresses if "evidence/" in address]
    assert sorted(path.read_bytes() for path in linked) == sorted(
        (run.evidence / file.path).read_bytes() for file in report.files
    )
    assert all(not Path(address).is_absolute() for address in addresses)


def test_publishing_the_same_again_changes_nothing_and_another_report_under_the_same_run_is_refused(
    run: Run, report: Report, store: Store, tmp_path: Path
) -> None:
    first = publish_run(report, run, store)
    before = contents(tmp_path / "store")
    again = Observed(store)
    assert publish_run(report, run, again) == first
    assert again.written == []
    with pytest.raises(AlreadyExistsError):
        publish_run(report.model_copy(update={"made_by": "someone else"}), run, store)
    assert contents(tmp_path / "store") == before


@pytest.mark.thorough
def test_a_failing_store_leaves_no_manifest_and_a_rerun_mends(run: Run, report: Report, store: Store, tmp_path: Path) -> None:
    whole = Observed(store)
    publish_run(report, run, whole)
    expected = contents(tmp_path / "store")
    # every stage left the same machine.json, which is stored once; report, page, counter and manifest are beside the Data Docs
    docs = [path for path in run.data_docs.rglob("*") if path.is_file()]
    before, after = ["layout.json", f"runs/{run.id}.json", CELL_INDEX, COUNTER], len(AFTERWARDS)
    evidence = {evidence_key(file) for file in report.files}
    assert len(whole.written) == len(evidence) + len(docs) + 3 + len(before) + after
    for number in range(1, len(whole.written) - after + 1):
        folder = tmp_path / f"fails at {number}"
        with pytest.raises(StoreError, match="the disk is full"):
            publish_run(report, run, Observed(store_in(folder), fails_at=number))
        assert len(contents(folder)) == number - 1
        assert not list(folder.rglob("manifest.json"))
        with pytest.raises(StoreError, match="no whole run"):
            fetch_run(folder.as_uri(), run.id)
        publish_run(report, run, store_in(folder))
        # Only if the manifest itself was refused, its number is the next one.
        is_manifest = number == len(whole.written) - after
        changed = {f"{report.prefix}/manifest.json", COUNTER, CELL_INDEX} if is_manifest else set()
        assert {key for key, body in contents(folder).items() if expected[key] != body} == changed
        assert contents(folder).keys() == expected.keys()


@pytest.mark.parametrize(("what", "from_the_end"), [("index", 3), ("index", 2), ("board", 1), ("board", 0)])
def test_a_run_counts_though_index_or_board_fails(run: Run, report: Report, store: Store, what: str, from_the_end: int) -> None:
    writes = Observed(store)
    publish_run(report, run, writes)
    folder = run.folder / f"fails at the {what}"
    published = publish_run(report, run, Observed(store_in(folder), fails_at=len(writes.written) - from_the_end))
    assert (published.index_problem or "").startswith(f"the {what} is not up to date: ")
    assert "the disk is full" in (published.index_problem or "")
    assert trusted_report(store_in(folder), run.id) == report
    publish_run(report, run, store_in(folder))
    for key in AFTERWARDS:
        assert store_in(folder).get(key) == store.get(key)


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_evidence_that_is_not_what_was_measured_is_not_published(run: Run, report: Report, store: Store, how: str) -> None:
    path = run.evidence / report.files[0].path
    if how == "changed":
        path.write_bytes(path.read_bytes() + b" ")
    else:
        path.unlink()
    with pytest.raises(HostError, match="changed after it was measured" if how == "changed" else "cannot be read"):
        publish_run(report, run, store)
    assert f"{report.prefix}/manifest.json" not in store.keys("")


# --- judged again


def test_judging_again_gives_the_same_verdicts_under_a_new_run(run: Run, report: Report) -> None:
    before = contents(run.folder)
    again, fresh = rejudge(run, run.plan)
    assert again.judgement.gates == report.judgement.gates
    assert again.judgement.verdict == "pass"
    assert again.rejudged_from == run.id
    assert again.run_id == again.plan.run_id == fresh.id != run.id
    assert again.plan.model_copy(update={"run_id": run.id}) == report.plan
    assert again.stages == [stage.model_copy(update={"run_id": fresh.id}) for stage in report.stages]
    assert contents(fresh.evidence) == contents(run.evidence)
    assert load_report(fresh.folder) == again
    assert fresh.stages() == again.stages
    assert (fresh.folder / "report.html").is_file()
    assert contents(run.folder) == before


def end(run: Run, ended: Ended) -> None:
    """Put an end among the files of the run's load."""
    path, load = run.evidence / "load" / ENDED, run.stage("load")
    assert load is not None
    path.write_text(ended.model_dump_json())
    run.save_stage(load.model_copy(update={"files": [*load.files, describe(path, run.evidence)]}))


def test_a_load_that_its_budget_ended_before_a_look_is_inconclusive_with_its_values(run: Run, report: Report) -> None:
    ended = Ended(time_budget_s=100.0, repeats=2, spent_s=80.0, longest_s=45.0)
    end(run, ended)
    settings = {"repeats": 3, "most_repeats": 5, "time_budget_s": 100.0}
    again, _ = rejudge(run, changed(run.plan, "load", **settings))
    before = {gate.gate.label: gate for gate in report.judgement.gates}
    of_load = [gate for gate in again.judgement.gates if METRICS[gate.gate.metric].stage == "load"]
    assert [gate.verdict for gate in of_load] == ["inconclusive"] * 3
    for gate in of_load:
        assert gate.value == before[gate.gate.label].value
        assert gate.because.endswith(ended.because)
    assert not again.passed


def test_an_end_that_the_plan_does_not_know_makes_the_load_invalid(run: Run) -> None:
    """Somebody put it there."""
    end(run, Ended(time_budget_s=100.0, repeats=2, spent_s=80.0, longest_s=45.0))
    again, _ = rejudge(run, run.plan)
    verdicts = {gate.verdict for gate in again.judgement.gates if METRICS[gate.gate.metric].stage == "load"}
    assert verdicts == {"invalid"}


def test_judging_again_by_stricter_gates_fails(run: Run, report: Report, store: Store) -> None:
    publish_run(report, run, store)
    strict = gate_of(metric="output_throughput_tok_s", minimum=1000.0, unit="tok/s")
    again, fresh = rejudge(run, run.plan.model_copy(update={"gates": [strict]}))
    assert [(gate.gate, gate.verdict) for gate in again.judgement.gates] == [(strict, "fail")]
    assert not again.passed
    assert fresh.plan.gates == [strict]
    # The same evidence, beside the first report and not in its place.
    observed = Observed(store)
    published = publish_run(again, fresh, observed)
    assert published.outcome == "not passed"
    written = [key for key in observed.written if "/data-docs/" not in key]
    names = ("report.json", "report.html", "manifest.json")
    *pages, manifest = (f"{again.prefix}/{name}" for name in names)
    assert written == [*pages, f"runs/{fresh.id}.json", CELL_INDEX, COUNTER, manifest, *AFTERWARDS]
    assert manifest_of(again, store)["outcome"] == "not passed"
    assert manifest_of(report, store)["outcome"] == "passed"


@pytest.mark.parametrize("how", ["changed", "gone"])
@pytest.mark.parametrize("path", ["load/bench-2.json", "smoke/replies.json", "serve/server.log"])
def test_changed_evidence_is_not_judged_again(run: Run, path: str, how: str) -> None:
    if how == "changed":
        body = (run.evidence / path).read_bytes()
        (run.evidence / path).write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    else:
        (run.evidence / path).unlink()
    with pytest.raises(HostError, match="evidence is gone or was changed") as raised:
        rejudge(run, run.plan)
    assert raised.value.place == str(run.evidence / path)
    assert find_run(None) == run


def test_a_file_that_no_stage_measured_is_not_judged(run: Run) -> None:
    """Such as a repeat of another load, put beside those of the run."""
    shutil.copy(run.evidence / "load" / "bench-2.json", run.evidence / "load" / "bench-3.json")
    with pytest.raises(HostError, match="the stage did not measure this file") as raised:
        rejudge(run, run.plan)
    assert raised.value.place == str(run.evidence / "load" / "bench-3.json")


@pytest.fixture
def other(run: Run, tmp_path: Path) -> Run:
    """A run of another cell, with a load of its own."""
    plan = captured_plan(tmp_path / "other")
    cell = changed(run.plan.cell, profile="latency")
    other = start_run(plan.model_copy(update={"cell": cell, "run_id": "20261121T000000Z-abcdef"}))
    save_finished(other, captured_stage(other, "load"))
    return other


def copy_load(one: Run, into: Run) -> None:
    """The stage with its evidence, as by hand."""
    shutil.rmtree(into.evidence / "load")
    shutil.copytree(one.evidence / "load", into.evidence / "load")
    shutil.copy(one.folder / "stages" / "load.json", into.folder / "stages")


def test_another_runs_load_is_not_judged_as_this_runs(run: Run, other: Run) -> None:
    copy_load(other, run)
    with pytest.raises(HostError, match=f"the stage load is of run {other.id}, and this is run {run.id}"):
        rejudge(run, run.plan)


@pytest.mark.parametrize("with_its_note", [False, True])
def test_nor_is_it_if_it_says_that_it_is_this_runs(with_its_note: bool, run: Run, other: Run) -> None:
    for each in (run, other):
        (load,) = (stage for stage in each.stages() if stage.stage == "load")
        save_finished(each, load)
    rejudge(run, run.plan)
    copy_load(other, run)
    stage = other.stage("load")
    assert stage is not None
    run.save_stage(stage.model_copy(update={"run_id": run.id, "duration_s": 7.0}))
    if with_its_note:
        shutil.rmtree(run.folder / "kept")
        shutil.copytree(other.folder / "kept", run.folder / "kept")
    with pytest.raises(HostError, match="the stage load is not the one that this run finished"):
        rejudge(run, run.plan)


def test_a_published_report_with_another_runs_stage_is_tampered_with(run: Run, report: Report, store: Store) -> None:
    others = {"load": {"run_id": "20261121T000000Z-abcdef"}}
    stages = [stage.model_copy(update=others.get(stage.stage, {})) for stage in report.stages]
    mixed = report.model_copy(update={"stages": stages})
    run.save_report(mixed)
    publish_run(mixed, run, store)
    with pytest.raises(TamperedError, match="its stage load is of run 20261121T000000Z-abcdef"):
        check_judgement(store, published_run(store, run.id))


# --- fetched


@pytest.fixture
def elsewhere(run: Run, report: Report, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store with the run in it, seen from a machine that does not have the run."""
    publish_run(report, run, store)
    monkeypatch.setenv("VLLM_QUALIFY_HOME", str(tmp_path / "elsewhere"))
    return store


def test_a_fetched_run_is_the_published_one(elsewhere: Store, run: Run, tmp_path: Path) -> None:
    fetched = fetch_run(elsewhere.url, run.id)
    assert fetched.folder == tmp_path / "elsewhere" / "runs" / run.id
    assert fetched.plan == run.plan
    assert fetched.stages() == run.stages()
    assert contents(fetched.folder) == contents(run.folder)
    assert find_run(run.id) == fetched


def test_a_run_without_its_manifest_is_not_fetched(elsewhere: Store, run: Run, report: Report, tmp_path: Path) -> None:
    Path(elsewhere.locate(f"{report.prefix}/manifest.json")).unlink()
    with pytest.raises(StoreError, match=f"no whole run '{run.id}'"):
        fetch_run(elsewhere.url, run.id)
    assert not (tmp_path / "elsewhere").exists()


# Not the name of a cell either.
@pytest.mark.parametrize("run_id", ["20200101T000000Z-000000", "balanced-", "report.json", "balanced", "cpu", "reference"])
def test_a_run_that_the_store_does_not_have_is_reported(elsewhere: Store, run_id: str) -> None:
    with pytest.raises(StoreError, match=f"no whole run '{run_id}'"):
        fetch_run(elsewhere.url, run_id)


def test_a_changed_object_is_not_trusted_and_a_missing_one_is_reported(elsewhere: Store, run: Run, report: Report) -> None:
    file = next(file for file in report.files if file.path == "load/bench-1.json")
    path = Path(elsewhere.locate(f"evidence/{file.sha256}/bench-1.json"))
    overwrite(path, path.read_bytes().replace(b'"failed": 0', b'"failed": 1'))
    with pytest.raises(StoreError, match="not what its report says"):
        fetch_run(elsewhere.url, run.id)
    path.unlink()
    with pytest.raises(StoreError, match="no object"):
        fetch_run(elsewhere.url, run.id)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_changed_report_is_not_trusted(elsewhere: Store, run: Run, report: Report, is_whole: bool) -> None:
    path = Path(elsewhere.locate(f"{report.prefix}/report.json"))
    body = path.read_bytes().replace(b'"minimum": 0.1', b'"minimum": 0.01') if is_whole else b"{}"
    assert body != path.read_bytes()
    overwrite(path, body)
    with pytest.raises(StoreError, match="not what its manifest says"):
        fetch_run(elsewhere.url, run.id)


def test_a_report_of_another_run_is_not_put_in_its_place(elsewhere: Store, run: Run, report: Report, tmp_path: Path) -> None:
    """Also where whoever changed it made the manifest fit."""
    body = changed(report, "plan", run_id="../../outside").model_dump_json().encode()
    overwrite(Path(elsewhere.locate(f"{report.prefix}/report.json")), body)
    manifest = manifest_of(report, elsewhere)
    for stored in manifest["objects"]:
        if stored["key"].endswith("/report.json"):
            stored |= {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body)}
    overwrite(Path(elsewhere.locate(f"{report.prefix}/manifest.json")), json.dumps(manifest).encode())
    with pytest.raises(StoreError, match="of another run than its manifest"):
        fetch_run(elsewhere.url, run.id)
    assert not (tmp_path / "outside").exists()


def test_no_secret_reaches_the_store(run: Run, report: Report, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a recipe's server arguments repeat what the environment holds."""
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    publish_run(changed(report, "plan.server", arguments={"hf-token": "hf_0123456789"}), run, store)
    for key in store.keys(""):
        assert b"hf_0123456789" not in store.get(key), key


# --- found


def test_the_latest_run_with_a_report_is_found_and_any_by_its_id_and_by_its_folder(run: Run, home: Path) -> None:
    later, unfinished = home / "runs" / "99990101T000000Z-000000", home / "runs" / "99990101T000001Z-000000"
    shutil.copytree(run.folder, later)
    shutil.copytree(run.folder, unfinished)
    (unfinished / "report.json").unlink()
    assert find_run(None).folder == later
    assert find_run(unfinished.name).folder == unfinished.resolve()
    assert find_run(run.id) == find_run(str(run.folder)) == Run(folder=run.folder.resolve())


@pytest.mark.parametrize(
    ("name", "message"), [("20200101T000000Z-000000", "no run '20200101T000000Z-000000'"), (None, "no run with a report")]
)
def test_an_unknown_run_is_the_callers_mistake(name: str | None, message: str) -> None:
    with pytest.raises(CallerError, match=message) as raised:
        find_run(name)
    assert raised.value.place == "RUN"
