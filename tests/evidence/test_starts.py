"""Further starts of a server: what they measured is read by start, and one that was no start of its own does not count."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.comparisons import CANDIDATE, LOAD, ask, cell_plan, loss_gate
from tests.builders.loads import CAPTURED as CAPTURED_LOAD
from tests.builders.loads import change, scale
from tests.builders.starts import ask_once, record_repeat
from tests.lm_eval_files import page, right_but
from vllm_qualify.evidence import starts
from vllm_qualify.evidence.accuracy import answers, lm_eval_process
from vllm_qualify.evidence.accuracy.samples import find_only_file
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.stages.table import parse_unfinished
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import gate_of

SPEED = gate_of(metric="output_throughput_tok_s", max_worsening=0.05, unit="fraction")
SCORE = "exact_match (gsm8k, strict-match) of start 2"
RATE = "output_throughput_tok_s of start 2"
ONCE = ask_once(CANDIDATE)
Spoil = Callable[[Path], object]


@pytest.fixture
def plan() -> CellPlan:
    return cell_plan([loss_gate(), SPEED], starts=3)


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """Two starts: 4 of 40 questions were missed in the first and 6 in the second; its load was 1.25 times as slow."""
    folder = tmp_path / "evidence"
    ask(folder, right_but(missed(4)))
    shutil.copytree(CAPTURED_LOAD, folder / "load")
    add_start(folder, 2, 6, 1.25)
    return folder


def missed(number: int) -> list[int]:
    """So many of the questions that are asked."""
    return sorted(question for step in ONCE.steps for question in step.questions)[:number]


def add_start(evidence: Path, number: int, wrong: int, slower: float) -> None:
    inside = starts.root(evidence, number)
    ONCE.write(inside / "accuracy" / "gsm8k", right_but(missed(wrong)))
    path = find_only_file(inside / "accuracy" / "gsm8k" / "r1-b1", "results_*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"start_time": float(number)}))
    load = shutil.copytree(CAPTURED_LOAD, inside / "load")
    for repeat in (1, 2):
        scale(load, repeat, slower)
        later = [start + 1e6 * number for start in json.loads((load / f"bench-{repeat}.json").read_text())["start_times"]]
        change(load, repeat, start_times=later)


def rows(plan: CellPlan, evidence: Path) -> dict[str, Measurement]:
    return {row.label: row for row in parse_unfinished("starts", plan, evidence)}


def test_each_start_has_measurements_of_its_own(plan: CellPlan, evidence: Path) -> None:
    by_metric = rows(plan, evidence)
    assert by_metric[SCORE].value == pytest.approx(34 / 40)
    assert by_metric[SCORE].sample_count == 40
    (first,) = (row for row in parse_unfinished("load", plan, evidence) if row.metric == SPEED.metric)
    assert first.value is not None
    assert by_metric[RATE].value == pytest.approx(first.value / 1.25)
    assert {row.start for row in by_metric.values()} == {2}
    for row in (by_metric[SCORE], by_metric[RATE]):
        assert row.source.startswith("starts/2/")
        assert all((evidence / place.rpartition(":")[0]).is_file() for place in row.traced_to)


def test_what_a_start_did_not_measure_has_no_measurement(plan: CellPlan, evidence: Path) -> None:
    shutil.rmtree(evidence / "starts/2/load")
    assert SCORE in rows(plan, evidence)
    assert RATE not in rows(plan, evidence)
    shutil.rmtree(evidence / "starts")
    assert rows(plan, evidence) == {}


def copied_answers(evidence: Path) -> None:
    folder = evidence / "starts/2/accuracy/gsm8k/r1-b1"
    (folder.parent.parent.parent / "load").rename(evidence / "elsewhere")
    for path in folder.glob("results_*.json"):
        path.unlink()
    shutil.copy(find_only_file(evidence / "accuracy/gsm8k/r1-b1", "results_*.json"), folder)


def copied_load(evidence: Path) -> None:
    shutil.rmtree(evidence / "starts/2/load")
    shutil.copytree(evidence / "load", evidence / "starts/2/load")


def copied_repeat(evidence: Path) -> None:
    """The same times to the first token, and all others and the clock changed."""
    scale(evidence / "starts/2/load", 2, 1 / 1.25)


def same_server(evidence: Path) -> None:
    """The counters go on, where a server that starts begins at 0."""
    for path in (evidence / "starts/2").rglob("metrics-*before.txt"):
        path.write_text(page(stop=5000, length=5000))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (copied_answers, "the answers of start 2 are a copy of an earlier start's"),
        (copied_load, "the load of start 2 has the requests of an earlier start's"),
        (copied_repeat, "the load of start 2 has the requests of an earlier start's"),
        (same_server, "it was not started again"),
        (lambda evidence: (evidence / "starts/2").rename(evidence / "starts/3"), "not counted on from 2"),
        (lambda evidence: (evidence / "starts/two").mkdir(), "not counted on from 2"),
        (lambda evidence: (evidence / "starts/2").rename(evidence / "starts/02"), "not counted on from 2"),
        (lambda evidence: (evidence / "load/bench-1.json").write_text("{"), "JSON"),
    ],
)
def test_a_start_that_is_none_of_its_own_is_invalid(spoil: Spoil, message: str, plan: CellPlan, evidence: Path) -> None:
    spoil(evidence)
    by_metric = rows(plan, evidence)
    for label in (SCORE, RATE):
        assert message in (by_metric[label].invalid_because or "")


def test_more_starts_than_were_planned_are_invalid(plan: CellPlan, evidence: Path) -> None:
    add_start(evidence, 3, 5, 1.5)
    third = SCORE.replace("start 2", "start 3")
    assert rows(plan, evidence)[third].value == pytest.approx(35 / 40)
    too_many = rows(plan.model_copy(update={"starts": 2}), evidence)[third]
    assert "at most 2 were planned" in (too_many.invalid_because or "")


def test_the_answers_of_all_starts_are_apart_and_kept_as_they_were_read(plan: CellPlan, evidence: Path) -> None:
    (task,) = plan.accuracy
    answered = starts.answers_of(plan, evidence, task)
    wrong = Counter(each.start for each in answered.answers if not each.score("exact_match,strict-match"))
    assert wrong == {1: 4, 2: 6}
    assert sum(each.start == 2 for each in answered.answers) == 40
    for number in (1, 2):
        folder = starts.root(evidence, number) / "accuracy" / "gsm8k"
        of_start = [each for each in answered.answers if each.start == number]
        answers.write(answered.model_copy(update={"answers": of_start}), folder / lm_eval_process.ANSWERS)
    assert starts.kept_answers(evidence, "gsm8k") == answered
    second = evidence / "starts/2/accuracy/gsm8k" / lm_eval_process.ANSWERS
    shutil.copy(evidence / "accuracy/gsm8k" / lm_eval_process.ANSWERS, second)
    with pytest.raises(ValueError, match="answers of another start"):
        starts.kept_answers(evidence, "gsm8k")


def test_the_budget_of_a_load_is_that_of_all_starts(plan: CellPlan, evidence: Path) -> None:
    for repeat, seconds in ((1, 30.0), (2, 50.0)):
        record_repeat(evidence / "load", repeat, seconds)
        record_repeat(evidence / "starts/2/load", repeat, 20.0)
    within = plan.model_copy(update={"load": LOAD.model_copy(update={"time_budget_s": 160.0})})
    second, third = (starts.plan_of(within, evidence, number).load for number in (2, 3))
    assert second.time_budget_s == pytest.approx(160 - 30 - 50)
    assert third.time_budget_s == pytest.approx(160 - 30 - 50 - 20 - 20)
    assert starts.too_long(second, evidence, 2) is None
    assert "leaves 40 s for the load of start 3, and a repeat may take 50 s" in (starts.too_long(third, evidence, 3) or "")
    assert starts.too_long(starts.plan_of(plan, evidence, 3).load, evidence, 3) is None


@pytest.mark.parametrize(
    ("repeats", "most", "of_start"),
    [(1, 10, [1, 2, 3, 4, 5]), (2, 10, [2, 3, 4, 5]), (5, 10, [2, 3, 4, 5]), (3, 3, [2, 3]), (1, 1, [1])],
)
def test_a_further_start_has_few_repeats(repeats: int, most: int, of_start: list[int], plan: CellPlan, evidence: Path) -> None:
    settings = LOAD.model_copy(update={"repeats": repeats, "most_repeats": most})
    load = starts.plan_of(plan.model_copy(update={"load": settings}), evidence, 2).load
    assert list(load.looks) == of_start


def test_it_asks_only_tasks_that_are_compared(plan: CellPlan, evidence: Path) -> None:
    (task,) = plan.accuracy
    other = task.model_copy(update={"settings": task.settings.model_copy(update={"task": "other"})})
    tasks = starts.plan_of(plan.model_copy(update={"accuracy": [other, task]}), evidence, 2).accuracy
    assert [(each.name, each.repetitions, each.sequential) for each in tasks] == [("gsm8k", 1, False)]
