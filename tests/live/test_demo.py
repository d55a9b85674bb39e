"""The demo for real: vLLM, lm-eval, bench, Great Expectations, Prefect, a directory and radosgw."""

import hashlib
import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.evidence.contract.shapes import shape
from tests.fakes import vllm as fake
from tests.publish.conftest import use
from tests.qualified import COMMAND, Qualified, processes_of, run
from tests.recipes import reference, write
from tests.s3 import Settings
from vllm_qualify.publish.bundle import Manifest, evidence_key
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.report.markdown import artifact_key

pytestmark = pytest.mark.engine


def manifest_of(qualified: Qualified, store: Store) -> Manifest:
    return Manifest.model_validate_json(store.get(f"{qualified.report.prefix}/manifest.json"))


def assert_published_whole(qualified: Qualified, store: Store) -> None:
    manifest = manifest_of(qualified, store)
    for stored in manifest.objects:
        body = store.get(stored.key)
        assert (len(body), hashlib.sha256(body).hexdigest()) == (stored.size, stored.sha256)
    keys = {stored.key for stored in manifest.objects}
    report = qualified.report
    for file in report.files:
        original = (qualified.folder / "evidence" / file.path).read_bytes()
        assert evidence_key(file) in keys
        assert store.get(evidence_key(file)) == original
    paths = [file.path for file in report.files]
    for name in ("results_", "samples_gsm8k_"):
        assert any(path.startswith(f"accuracy/gsm8k/r1-b1/{name}") for path in paths)
    assert {f"load/bench-{repeat}.json" for repeat in (1, 2, 3)} <= set(paths)


def test_the_reference_model_is_approved_and_published_whole_with_the_tools_own_files(approved: Qualified) -> None:
    assert approved.done.returncode == 0, approved.done.stdout + approved.done.stderr
    assert "PASSED  reference/bf16/cpu/balanced" in approved.done.stdout
    assert {gate.verdict for gate in approved.report.judgement.gates} == {"pass"}
    accuracy = next(gate for gate in approved.report.judgement.gates if gate.gate.metric == "exact_match")
    assert (accuracy.value or 0) >= 0.95
    assert accuracy.sample_count == 500
    assert approved.report.judgement.not_judged
    for expected in ("server starting: ", "serving at ", "accuracy: 500 of 500 questions", "load: 384 of 384 requests"):
        assert expected in approved.done.stderr
    assert_published_whole(approved, open_store(approved.store))


def test_no_process_is_left(approved: Qualified, refused: Qualified) -> None:
    assert processes_of(approved.home) == processes_of(refused.home) == []


def test_the_verdicts_and_the_page_are_artifacts_on_a_server_that_lasts(
    refused: Qualified, on_a_server: dict[str, str]
) -> None:
    """As docs/operations.md has it: by Prefect's own command."""
    prefect = str(Path(COMMAND).parent / "prefect")
    for what, expected in (("verdicts", "exact_match (gsm8k, strict-match)"), ("report", "NOT PASSED")):
        key = artifact_key(what, "reference/regressed/cpu/balanced")
        shown = run(refused.home, prefect, "artifact", "inspect", key, "--output", "json", **on_a_server)
        assert shown.returncode == 0, shown.stderr
        assert expected in str(json.loads(shown.stdout)[0]["data"])


def test_the_report_is_shown_again(approved: Qualified) -> None:
    shown = run(approved.home, COMMAND, "report", "show")
    assert shown.returncode == 0
    assert "PASSED" in shown.stdout
    as_json = run(approved.home, COMMAND, "report", "show", approved.folder.name, "--json")
    assert json.loads(as_json.stdout)["run_id"] == approved.folder.name


def test_stored_evidence_is_judged_again_without_a_server(approved: Qualified, tmp_path: Path) -> None:
    same = run(approved.home, COMMAND, "rejudge", approved.folder.name, "--store", f"file://{tmp_path}/store")
    assert same.returncode == 0, same.stderr
    document = reference()
    document["gates"][0]["minimum"] = 0.9999
    stricter = str(write(document, tmp_path / "stricter.yaml"))
    fresh_home = tmp_path / "elsewhere"
    strict = run(fresh_home, COMMAND, "rejudge", approved.folder.name, "--store", approved.store, "--recipe", stricter)
    assert strict.returncode == 1, strict.stderr
    assert "NOT PASSED" in strict.stdout
    told = f"judged by other gates than run {approved.folder.name}: exact_match (gsm8k, strict-match) changed: "
    assert (strict.stderr.count(told), same.stderr.count("other gates")) == (1, 0)
    # the only gate that was changed is the only one that does not pass
    assert "1 fail, 24 pass" in strict.stdout or "1 inconclusive, 24 pass" in strict.stdout


@pytest.mark.s3
def test_the_regressed_model_is_not_approved_and_is_published_whole_to_a_real_s3_service(
    refused: Qualified, radosgw_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accuracy gate is named."""
    assert refused.done.returncode == 1, refused.done.stdout + refused.done.stderr
    assert "NOT PASSED  reference/regressed/cpu/balanced" in refused.done.stdout
    assert "exact_match (gsm8k, strict-match)" in refused.done.stdout
    gates = {gate.gate.label: gate for gate in refused.report.judgement.gates}
    assert gates["smoke_golden"].verdict == "pass"
    absolute = gates["exact_match (gsm8k, strict-match)"]
    assert (absolute.value or 1) <= 0.85
    use(radosgw_settings, monkeypatch)
    store = open_store(refused.store)
    assert_published_whole(refused, store)
    assert manifest_of(refused, store).outcome == "not passed"


@pytest.mark.s3
def test_no_key_of_the_store_is_in_any_file_of_a_run(refused: Qualified, radosgw_settings: Settings) -> None:
    written = b"".join(path.read_bytes() for path in refused.home.rglob("*") if path.is_file())
    assert radosgw_settings["AWS_SECRET_ACCESS_KEY"].encode() not in written
    assert radosgw_settings["AWS_SECRET_ACCESS_KEY"] not in refused.done.stdout + refused.done.stderr


def test_the_stand_in_answers_as_the_real_server_does(approved: Qualified) -> None:
    """The contract that tests/fakes/vllm.py is held to: whatever it says, the real one says in the same place."""
    replies = json.loads((approved.folder / "evidence/smoke/replies.json").read_text())
    real = json.loads(replies["answers"][0]["body"])
    said = fake.completion("reference", " It is 7.", replies["request"]["max_tokens"])
    assert shape(said).items() <= shape(real).items()
    models = json.loads(json.loads((approved.folder / "evidence/smoke/models.json").read_text())["body"])
    assert shape(fake.models("reference")).items() <= shape(models).items()
    metrics = (approved.folder / "evidence/load/metrics-1-before.txt").read_text()
    names = {sample.name for family in text_string_to_metric_families(metrics) for sample in family.samples}
    fakes = {sample.name for family in text_string_to_metric_families(fake.metrics(0)) for sample in family.samples}
    # prefix caching is off in the reference recipe, and with it its counters
    assert {name for name in fakes if "prefix_cache" not in name} <= names
