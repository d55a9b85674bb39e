"""A release beside its baseline on the real engine: accuracy question by question, loads in turns, tasks of every kind."""

import json
import shutil
from pathlib import Path

import pytest

from tests.qualified import COMMAND, Qualified, furnished, of, processes_of, run
from tests.recipes import Document, small, write
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.judge.verdict import GateVerdict
from vllm_qualify.publish.stores import open_store
from vllm_qualify.report.model import Report
from vllm_qualify.runs.baseline import newest_baseline

pytestmark = pytest.mark.engine

PAIRED = "exact_match (gsm8k, strict-match) against the baseline"
LIKELIER = "answer_nll_nat_per_tok against the baseline"
THROUGHPUT = "output_throughput_tok_s against the baseline"

CHOICES = """\
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {test}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{[answer, 'zq zq zq zq zq zq', 'QQ QQ QQ QQ QQ QQ']}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
CHATTED = """\
task: chatted
dataset_path: json
dataset_kwargs: {{data_files: {{test: {test}}}}}
output_type: generate_until
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["Question:"], do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def gate_of(report: Report, label: str) -> GateVerdict:
    return next(gate for gate in report.judgement.gates if gate.gate.label == label)


def test_the_first_run_of_a_store_becomes_its_baseline(approved: Qualified) -> None:
    report = approved.report
    assert report.plan.establishes
    assert [gate.label for gate in report.judgement.not_judged] == [PAIRED, LIKELIER]
    baseline = newest_baseline(open_store(approved.store), report.plan.cell.id)
    assert baseline is not None
    assert baseline.run_id == report.run_id
    answers = (approved.folder / "evidence/accuracy/gsm8k/answers.jsonl").read_text().splitlines()
    assert json.loads(answers[0])["answers"] == len(answers) - 1 >= 2 * 500
    own = {row.metric: row for stage in report.stages for row in stage.measurements if stage.stage == "likelihood"}
    # It answered greedily, so each of its tokens is the likeliest, but for noise.
    assert (own["answer_top1_share"].value or 0) > 0.999
    assert (own["answer_nll_nat_per_tok"].value or 1) < 0.01
    assert {row.sample_count for row in own.values()} == {200}


def test_a_baseline_is_started_three_times(approved: Qualified) -> None:
    (stage,) = (stage for stage in approved.report.stages if stage.stage == "starts")
    assert {row.start for row in stage.measurements} == {2, 3}
    (measurement,) = (row for row in stage.measurements if row.label == "exact_match (gsm8k, strict-match) of start 2")
    assert measurement.sample_count == 500
    assert (measurement.value or 0) > 0.9
    inside = approved.folder / "evidence/starts/2"
    lines = (inside / "accuracy/gsm8k/answers.jsonl").read_text().splitlines()
    assert {json.loads(line)["start"] for line in lines[1:]} == {2}
    # Nothing is loaded in it, so that no bench was started, which takes as long as half a server.
    assert not (inside / "serve/bench.log").exists()
    first, second = (float((root / "serve/launched_at").read_text()) for root in (approved.folder / "evidence", inside))
    assert first < second
    assert f"Starts: 3 of at most 16; {measurement.label.removesuffix(' of start 2')}" in " ".join(approved.done.stdout.split())
    assert processes_of(approved.home) == []


def test_a_second_run_of_the_same_release_passes_and_asks_less(approved: Qualified, again: Qualified) -> None:
    """It finds the baseline's answers as likely."""
    assert again.done.returncode == 0, again.done.stdout + again.done.stderr
    result = gate_of(again.report, PAIRED)
    assert result.verdict == "pass"
    assert result.gate.bound == 0.01
    assert result.interval is not None
    assert result.interval.upper < 0.01
    # Each of its three starts is asked each question once at most; the baseline was asked four times.
    assert result.sample_count <= 3 * 500
    assert again.report.plan.baseline is not None
    assert again.report.plan.baseline.run_id == approved.report.run_id
    assert "is compared with run" in again.done.stderr
    likelier = gate_of(again.report, LIKELIER)
    assert (likelier.verdict, likelier.sample_count) == ("pass", 200)
    assert likelier.value == pytest.approx(0.0, abs=1e-5)


@pytest.mark.s3
def test_the_regressed_model_fails_against_the_baseline_before_all_is_asked(refused: Qualified) -> None:
    """It finds the baseline's answers less likely, too."""
    assert refused.done.returncode == 1, refused.done.stdout + refused.done.stderr
    result = gate_of(refused.report, PAIRED)
    assert result.verdict == "fail"
    assert 0.2 < (result.value or 0) < 0.6
    assert result.sample_count < 500
    assert f"{PAIRED}: fail" in " ".join(refused.done.stdout.split()) or PAIRED in refused.done.stdout.replace("\n", " ")
    likelier = gate_of(refused.report, LIKELIER)
    assert likelier.verdict == "fail"
    assert likelier.interval is not None
    assert likelier.interval.lower > 0.001


@pytest.fixture
def everything(tmp_path: Path) -> Document:
    """Tasks of each kind, one with examples, and a gate on speed against the baseline."""
    document = small(tmp_path)
    own = tmp_path / "tasks"
    own.mkdir()
    shutil.copy(tmp_path / "test.jsonl", own)
    for name, text in (("choices", CHOICES), ("chatted", CHATTED)):
        (own / f"{name}.yaml").write_text(text.format(test=own / "test.jsonl"))
    few = {"num_questions": 10, "num_fewshot": 0, "task_folder": str(own), "max_gen_toks": 32, "sequential": False}
    document["accuracy"][0]["num_fewshot"] = 2
    document["accuracy"] += [{"task": "choices", **few}, {"task": "chatted", "api": "chat", **few}]
    document["gates"] = [
        {"metric": "exact_match", "task": "gsm8k", "filter": "strict-match", "minimum": 0.3, "unit": "fraction"},
        {"metric": "acc", "task": "choices", "filter": "none", "minimum": 0.01, "unit": "fraction"},
        {"metric": "other_script_answers", "task": "chatted", "maximum": 0.9, "unit": "fraction"},
        # 2 repeats on a shared machine tell little
        {"metric": "output_throughput_tok_s", "max_worsening": 1.0, "unit": "fraction"},
    ]
    server = {"enable-tokenizer-info-endpoint": True, "chat-template": "{{ messages[-1]['content'] }}"}
    document["gpu_types"]["cpu"]["server"] |= server
    document["gpu_types"]["cpu"]["starts"] = 2
    # So short a load has no steady state.
    load = {"repeats": 3, "most_repeats": 3, "num_prompts": 60, "window": "whole"}
    document["gpu_types"]["cpu"]["profiles"]["balanced"]["load"] |= load
    return document


@pytest.mark.usefixtures("prefect_server")
def test_loads_in_turns_and_tasks_of_every_kind(
    everything: Document, engine: EngineEnvironment, tmp_path: Path, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    recipe = str(write(everything, tmp_path / "mine.yaml"))
    before = furnished(tmp_path_factory.mktemp("before"), tmp_path_factory)
    established = run(before, COMMAND, "run", recipe, "--allow-code", "--establish-baseline", **of(engine))
    assert established.returncode == 0, established.stdout + established.stderr
    (baseline,) = (before / "runs").iterdir()
    command = (COMMAND, "run", recipe, "--allow-code", "--variant", "regressed", "--baseline", str(baseline))
    done = run(home, *command, **of(engine))
    qualified = Qualified(done, home, f"file://{home}/store")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "its load in turns" in done.stderr
    report = qualified.report
    assert report.plan.beside is not None
    assert report.plan.beside.model.endswith("reference/model")
    compared = gate_of(report, THROUGHPUT)
    assert compared.verdict in ("pass", "inconclusive"), compared
    places = {place.rpartition(":")[0] for place in compared.traced_to}
    # on a busy machine the first repeat of one can be far off its others: then the first pair is left out as warm-up
    kept = [
        {f"load/{folder}bench-{repeat}.json" for folder in ("", "beside/") for repeat in pairs}
        for pairs in ((1, 2, 3), (2, 3), (1, 2))
    ]
    first = {place for place in places if not place.startswith("starts/")}
    again = {place.removeprefix("starts/2/") for place in places - first}
    assert first in kept[:2]
    # of a further start there are two, or more where they are noisy
    assert again in kept
    for label in ("acc (choices, none)", "other_script_answers (chatted)"):
        gate = gate_of(report, label)
        assert (gate.verdict, gate.sample_count) == ("pass", 10), gate
    inside = {file.path for file in report.files}
    assert {"load/beside/server.yaml", "load/beside/server.log"} <= inside
    # the regressed copy has answered questions before its load, and its baseline has not: both were warmed up alike
    assert report.plan.warms_alike
    assert {f"{start}load/{side}bench-0.json" for start in ("", "starts/2/") for side in ("", "beside/")} <= inside
    # both servers were started again, and no task: none is compared
    assert {"starts/2/load/beside/server.log", "starts/2/load/bench-2.json", "starts/2/serve/server.log"} <= inside
    assert not any(path.startswith("starts/2/accuracy") for path in inside)
    assert processes_of(home) == []
