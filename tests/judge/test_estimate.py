"""The lines that say what a load takes."""

from pathlib import Path
from typing import Any

import pytest

from tests.builders.comparisons import cell_plan, keep_history, server_plan
from tests.builders.loads import CAPTURED
from vllm_qualify.evidence.load.client import Made
from vllm_qualify.judge.estimate import cost_in_words, line_after_repeat, line_before_accuracy, line_before_load
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.recipe.gates import Gate, gate_of
from vllm_qualify.recipe.load import Load

LOAD = Load(input_len=1024, output_len=1000, max_concurrency=100, num_prompts=1280, num_warmups=20)
THROUGHPUT = gate_of(metric="output_throughput_tok_s", minimum=10_000, unit="tok/s")
TPOT = gate_of(metric="tpot_p50_ms", maximum=20, unit="ms")
TTFT = gate_of(metric="ttft_p50_ms", maximum=500, unit="ms")


def plan(*gates: Gate, gpus: int = 4, beside: int = 0, price: float | None = 2.5, **load: Any) -> CellPlan:
    server = server_plan().model_copy(update={"gpus": list(range(gpus))})
    other = server.model_copy(update={"gpus": list(range(beside))}) if beside else None
    plan = cell_plan(gates, load=LOAD.model_copy(update=load), server=server, beside=other)
    return plan.model_copy(update={"price_usd_gpu_hour": price, "baseline": None})


@pytest.mark.parametrize(
    ("about", "seconds", "message"),
    [
        ({}, (650.0, 1300.0), "11 to 22 min, 43 to 87 GPU-min, $1.81 to $3.61"),
        ({}, (650.0,), "11 min, 43 GPU-min, $1.81"),
        ({}, (6.0, 6.1), "0.1 min, 0.4 GPU-min, $0.02"),
        ({}, (60000.0,), "1,000 min, 4,000 GPU-min, $166.67"),
        # In turns the GPUs of both servers count. Without GPUs or a price nothing is reported of them.
        ({"beside": 2}, (600.0,), "10 min, 60 GPU-min, $2.50"),
        ({"gpus": 0}, (600.0,), "10 min, $0.42"),
        ({"gpus": 0, "price": None}, (600.0,), "10 min"),
    ],
)
def test_time_is_in_minutes_of_machine_and_gpus(about: dict[str, Any], seconds: tuple[float, ...], message: str) -> None:
    assert cost_in_words(plan(**about), *seconds) == message


@pytest.mark.parametrize(
    ("gates", "seconds"),
    [
        pytest.param([THROUGHPUT, TTFT], 130, id="throughput"),
        pytest.param([TPOT], 260, id="each of 100 clients has a token in 20 ms"),
        pytest.param([THROUGHPUT, TPOT], 130, id="the one that asks for more"),
    ],
)
def test_before_the_first_repeat_the_gates_say_how_long_it_may_take(tmp_path: Path, gates: list[Gate], seconds: int) -> None:
    times = cost_in_words(plan(), 3 * seconds, 10 * seconds)
    expected = f"load: 3 to 10 repeats of about {seconds} s, if as fast as its gates demand: {times}"
    assert line_before_load(plan(*gates), tmp_path) == expected


def test_in_turns_a_repeat_takes_twice_as_long_and_a_single_one_is_said_to_be_one(tmp_path: Path) -> None:
    assert "of about 260 s" in line_before_load(plan(THROUGHPUT, beside=4), tmp_path)
    assert line_before_load(plan(THROUGHPUT, repeats=1, most_repeats=1), tmp_path).startswith("load: 1 repeat of about 130 s")


def test_without_anything_known_the_first_repeat_will_tell(tmp_path: Path) -> None:
    message = line_before_load(plan(TTFT, time_budget_s=900.0), tmp_path)
    bound = "600 min, 2,400 GPU-min, $100.00; within time_budget_s 900"
    assert message == f"load: 3 to 10 repeats; the first one will show how long they take, and by time_limit_s up to {bound}"
    assert "the first one will show" in line_before_load(cell_plan([TTFT]), tmp_path), "of a baseline that cannot be read"


@pytest.mark.parametrize(
    ("starts", "repeats", "message"),
    [
        (1, 5, ""),
        (2, 5, "; then 2 to 5 repeats on each of up to 1 more start of the server"),
        (4, 1, "; then 1 to 5 repeats on each of up to 3 more starts of the server"),
    ],
)
def test_it_says_how_often_the_server_may_be_started_again(tmp_path: Path, starts: int, repeats: int, message: str) -> None:
    compared = gate_of(metric="output_throughput_tok_s", max_worsening=0.05, unit="fraction")
    for gates, expected in (((THROUGHPUT, compared), message), ((THROUGHPUT,), "")):
        planned = plan(*gates, repeats=repeats, most_repeats=10).model_copy(update={"starts": starts})
        assert line_before_load(planned, tmp_path).partition("; then")[2] == expected.partition("; then")[2]


# 84 replies of 8 tokens at 513 tokens a second.
@pytest.mark.parametrize(("clients", "message"), [(4, "of about 1 s, as fast as the baseline"), (8, "the first one will show")])
def test_a_baseline_with_as_many_clients_tells_how_long_it_takes(tmp_path: Path, clients: int, message: str) -> None:
    keep_history(tmp_path, CAPTURED)
    plan = cell_plan([TTFT])
    load = plan.load.model_copy(update={"max_concurrency": clients, "num_prompts": 80})
    assert message in line_before_load(plan.model_copy(update={"load": load}), tmp_path)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Made(1, 130.0, None), "load: 2 to 9 more of about 130 s: 4.3 to 20 min, 17 to 78 GPU-min, $0.72 to $3.25"),
        (Made(2, 130.0, None), None),
        (
            Made(5, 132.0, ["ttft_p50_ms", "tpot_p50_ms"]),
            "load: after 5 repeats undecided: ttft_p50_ms, tpot_p50_ms; up to 5 more: 11 min, 44 GPU-min, $1.83",
        ),
        (
            Made(9, 132.0, ["ttft_p50_ms"]),
            "load: after 9 repeats undecided: ttft_p50_ms; up to 1 more: 2.2 min, 8.8 GPU-min, $0.37",
        ),
        (Made(10, 132.0, ["ttft_p50_ms"]), None),
        (Made(5, 132.0, []), None),
    ],
)
def test_after_the_first_repeat_and_at_each_look_it_is_reported_again(made: Made, message: str | None) -> None:
    assert line_after_repeat(plan(), made) == message


def test_a_first_repeat_that_is_a_look_tells_what_is_undecided() -> None:
    more = "102 min, 408 GPU-min, $17.00; within time_budget_s 900"
    message = line_after_repeat(plan(repeats=1, time_budget_s=900.0), Made(1, 680.0, ["ttft_p50_ms"]))
    assert message == f"load: after 1 repeat undecided: ttft_p50_ms; up to 9 more: {more}"


def plan_task(task: str, repetitions: int, **settings: Any) -> TaskPlan:
    accuracy = Accuracy(task=task, num_questions=1000, max_gen_toks=200, **settings)
    return TaskPlan(settings=accuracy, num_concurrent=8, repetitions=repetitions, sequential=True)


def test_before_the_first_question_it_says_how_many_answers_there_may_be(tmp_path: Path) -> None:
    tasks = [plan_task("gsm8k", 1), plan_task("aime25", 8, sampling="model", samples_per_question=4)]
    line = line_before_accuracy(plan(THROUGHPUT).model_copy(update={"accuracy": tasks}), tmp_path)
    second = "aime25 4,000 to 8,000 answers of up to 200 tokens"
    assert line == f"accuracy: gsm8k 1,000 answers of up to 200 tokens, {second}; at most 1,800,000 tokens"
    own = tasks[0].model_copy(update={"settings": Accuracy(task="gsm8k", num_questions=1000)})
    line = line_before_accuracy(plan(THROUGHPUT).model_copy(update={"accuracy": [own, tasks[1]]}), tmp_path)
    most = "1,856,000 tokens, or more if gsm8k has a longer reply of its own"
    assert line == f"accuracy: gsm8k 1,000 answers of up to 256 tokens, {second}; at most {most}"
    keep_history(tmp_path, CAPTURED)
    compared = cell_plan([TTFT])
    alike = {"accuracy": tasks[:1], "load": compared.load.model_copy(update={"max_concurrency": 4, "num_prompts": 80})}
    # 200,000 tokens at the 513 tokens a second of the captured load
    line = line_before_accuracy(compared.model_copy(update=alike), tmp_path)
    assert line.startswith("accuracy: gsm8k 1,000 answers of up to 200 tokens; at most 200,000 tokens, at the rate of the")
    assert "load 6.5 min" in line
