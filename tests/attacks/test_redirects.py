"""A model's server that leads to an address which only this machine may reach, such as a cloud's metadata."""

from pathlib import Path

import httpx
import pytest

from tests.builders.accuracy import write_rows
from tests.builders.benches import silent
from tests.evidence.commands import SERVER, STARTING
from tests.fakes.redirecting import redirecting
from vllm_qualify.answers import ask_within
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.accuracy.lm_eval_process import prepare_task, running_lm_eval
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_answer_leads_to_another_server(status: int, method: str) -> None:
    with redirecting(status) as (url, asked):
        with pytest.raises(httpx.HTTPError, match="leads to another server"):
            ask_within(method, f"{url}/v1/completions", 10, json={"prompt": "one"})
        assert asked == []


def test_an_answer_may_lead_to_a_page_of_its_own_server() -> None:
    """As a path without its slash does."""
    with redirecting(307, within=True) as (url, asked):
        assert ask_within("GET", f"{url}/metrics", 10).json() == {"secret": "of another server"}
        assert asked == ["GET /metrics/"]


def test_who_asks_for_none_gets_the_answer_itself() -> None:
    with redirecting(307, within=True) as (url, asked):
        answer = ask_within("GET", f"{url}/metrics", 10, most_redirects=0)
        assert (answer.status_code, asked) == (307, [])


@pytest.mark.parametrize("num_concurrent", [1, 4])
def test_lm_eval_is_led_to_no_other_server(num_concurrent: int, tmp_path: Path) -> None:
    """One that asks one by one sends its requests in another way than one that asks several at a time."""
    data = tmp_path / "test.jsonl"
    write_rows(data, [{"question": f"What is {number}?", "answer": f"#### {number}"} for number in range(4)])
    settings = Accuracy(num_questions=4, num_fewshot=0, time_limit_s=60.0)
    plan = TaskPlan(settings=settings, num_concurrent=num_concurrent, questions=[data])
    with redirecting(307) as (url, asked):
        with running_lm_eval(STARTING.model_copy(update={"url": url}), "reference", plan, tmp_path / "lm-eval") as lm_eval:
            run = prepare_task(SERVER.model_copy(update={"url": url}), lm_eval, tmp_path / "gsm8k", silent)
            with pytest.raises(HostError, match="lm-eval ended"):
                run.ask(run.steps[0])
        # Before it ended, it asked.
        assert "Requesting API" in lm_eval.process.log.read_text()
        assert asked == []
