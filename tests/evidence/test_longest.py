"""How long a stage may take: the sums are made by hand, from what each stage may wait for."""

from pathlib import Path
from typing import Any

import pytest

from tests.report.builder import passed_report
from vllm_qualify.evidence.stages import longest_s
from vllm_qualify.plan.cell import CellPlan, LikelihoodPlan, TaskPlan
from vllm_qualify.recipe.contract import Contract
from vllm_qualify.recipe.metrics import Stage
from vllm_qualify.recipe.workload import Accuracy, Fit, Likelihood, Load, Smoke, Soak, Sweep

# Two hours for what is no wait, and for a store that does not answer; the start of a server with ten minutes for the question
# to the engine and five for its end; an order with five answers of Docker Engine and three of the server.
MARGIN, START, AROUND = 7200.0, 600.0 + 900.0, 1000.0
REPEAT = 100.0 + AROUND
LOAD: dict[str, Any] = {
    "input_len": 8,
    "output_len": 4,
    "max_concurrency": 1,
    "num_prompts": 20,
    "num_warmups": 0,
    "repeats": 3,
    "most_repeats": 5,
    "time_limit_s": 100.0,
}


def planned(**changes: Any) -> CellPlan:
    plan = passed_report().plan
    server = plan.server.model_copy(update={"startup_timeout_s": 600.0})
    usual = {"server": server, "load": Load(**LOAD), "beside": None, "undrafted": None, "sweep": None, "fit": None}
    return plan.model_copy(update=usual | changes)


def another(plan: CellPlan) -> Any:
    return plan.server.model_copy(update={"startup_timeout_s": 300.0})


def asked(repetitions: int, **settings: Any) -> TaskPlan:
    task = Accuracy(num_questions=100, time_limit_s=50.0, **settings)
    return TaskPlan(settings=task, num_concurrent=4, repetitions=repetitions, sequential=task.sequential)


def waits(stage: Stage, plan: CellPlan) -> float:
    """Without the margin, which every stage has."""
    return longest_s(plan, stage) - MARGIN


def test_a_load_is_all_its_repeats_after_prompts_are_made_no_more() -> None:
    assert waits("load", planned()) == 6 * REPEAT
    budget = Load(**LOAD, time_budget_s=10.0)
    assert waits("load", planned(load=budget)) == 6 * REPEAT, "a budget ends no repeat that was begun"


def test_a_load_in_turns_is_both_servers_loads_and_the_other_ones_start() -> None:
    assert waits("load", planned(beside=another(planned()))) == 300 + 900 + REPEAT + 2 * 6 * REPEAT


@pytest.mark.parametrize(
    ("task", "orders"),
    [
        (asked(1, sequential=False), 1 + 1),
        (asked(3, sequential=False), 1 + 3),
        # A task in blocks has five of them.
        (asked(1), 1 + 5),
        (asked(4), 1 + 20),
    ],
)
def test_a_task_is_loaded_and_asked_in_all_its_blocks(task: TaskPlan, orders: int) -> None:
    assert waits("accuracy", planned(accuracy=[task])) == orders * (50 + AROUND)
    assert waits("accuracy", planned(accuracy=[task, asked(1)])) == (orders + 6) * (50 + AROUND)


def test_smoke_asks_for_the_models_and_twice_for_a_reply() -> None:
    assert waits("smoke", planned(smoke=Smoke(prompt="How many?", time_limit_s=40.0))) == 120


def test_the_contract_takes_one_limit_for_each_request_and_one_for_those_at_once() -> None:
    assert waits("contract", planned(contract=Contract(time_limit_s=40.0))) == 20 * 40 + 10


def test_each_alias_takes_one_limit_more() -> None:
    assert waits("contract", planned(contract=Contract(aliases=["a", "b"], time_limit_s=40.0))) == (20 + 2) * 40 + 10


def test_a_promise_takes_one_limit_for_each_request_of_its_attempts() -> None:
    # A chat has a reply, a stream, three requests for its turns, two for its system prompt and three attempts to end.
    assert waits("contract", planned(contract=Contract(capabilities=["chat"], time_limit_s=40.0))) == (20 + 10) * 40 + 10


def test_a_soak_is_its_minutes_and_runs_before_and_at_its_end() -> None:
    assert waits("soak", planned(soak=Soak(soak_min=90.0, soak_share=0.5))) == 5400 + 3 * REPEAT


def test_the_server_stage_is_its_warm_starts() -> None:
    assert waits("serve", planned(warm_starts=0)) == 0
    assert waits("serve", planned(warm_starts=3)) == 3 * START


def test_a_baseline_waits_for_the_store_alone() -> None:
    assert waits("baseline", planned()) == 0


def test_likelihoods_take_three_requests_for_each_answer_and_each_text(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    settings = Likelihood(num_answers=7, time_limit_s=30.0)
    tasks = [asked(1), asked(1)]
    alone = planned(accuracy=tasks, likelihood=LikelihoodPlan(settings=settings))
    assert waits("likelihood", alone) == 2 * 7 * 3 * 30
    texts = LikelihoodPlan(settings=settings, texts=tmp_path / "texts.jsonl", texts_sha256="0" * 64)
    assert waits("likelihood", planned(accuracy=tasks, likelihood=texts)) == (2 * 7 + 2) * 3 * 30


def test_a_further_start_asks_each_task_once_and_runs_a_load() -> None:
    thrice = planned(accuracy=[asked(3)])
    assert waits("starts", thrice) == 2 * (50 + AROUND) + 6 * REPEAT


def test_speculation_asks_two_servers_nine_prompts_and_runs_two_loads_on_both() -> None:
    assert waits("speculation", planned()) == 0, "the load is not compared"
    plan = planned(undrafted=another(planned()))
    asked_and_loaded = 2 * (9 * 300 + 2 * 3 * REPEAT)
    assert waits("speculation", plan) == 300 + 900 + asked_and_loaded
    in_turn = plan.model_copy(update={"undrafted_in_turn": True})
    assert waits("speculation", in_turn) == 2 * (600 + 900) + 300 + 900 + asked_and_loaded


@pytest.mark.parametrize(
    ("sweep", "runs"),
    [
        # A point of the curve is run twice, if its first run is invalid.
        (Sweep(concurrencies=[1, 2, 4]), 6),
        (Sweep(concurrencies=[1, 2], slo={"ttft_p99_ms": 500.0}), 4 + 2 * 12),
        (Sweep(slo={"ttft_p99_ms": 500.0}, search=["concurrency"], most_runs=7), 7),
        # A search for a rate begins with a point of the curve.
        (Sweep(slo={"ttft_p99_ms": 500.0}, search=["request_rate"], most_runs=7), 2 + 7),
    ],
)
def test_a_sweep_is_its_points_and_all_runs_of_its_searches(sweep: Sweep, runs: int) -> None:
    assert waits("sweep", planned(sweep=sweep)) == runs * REPEAT


@pytest.mark.parametrize(
    ("fit", "starts", "repeats"),
    [
        (Fit(tensor_parallel_sizes=[1, 2, 4]), 3, 0),
        # A start shows the first number, and five numbers are tried, each with one repeat after its prompts are made.
        (Fit(max_num_seqs=True), 6, 5 * 2),
        (Fit(tensor_parallel_sizes=[1, 2], max_num_seqs=True), 7, 5 * 2),
        (Fit(max_num_batched_tokens=[2048, 4096]), 2, 2 * 4),
    ],
)
def test_a_fit_is_all_its_starts_and_their_loads(fit: Fit, starts: int, repeats: int) -> None:
    assert waits("fit", planned(fit=fit)) == starts * START + repeats * REPEAT
