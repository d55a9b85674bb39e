"""Why lm-eval ended: its own log tells whose turn it is."""

from pathlib import Path

import pytest

from tests.builders.comparisons import task_plan
from vllm_qualify.errors import HostError, HubError, RecipeError
from vllm_qualify.evidence.accuracy.ended import explain_end

CAPTURED = Path(__file__).parent / "captured" / "lm_eval_ended"
TASK = task_plan()


def test_prompts_longer_than_the_context_are_the_recipes_fault() -> None:
    text = (CAPTURED / "context-too-long.txt").read_text()
    # As it came: the reason is the first of all requests that were under way, and the end is a traceback far below.
    text = text.replace("aiohttp.client_exceptions", "a line\n" * 2000 + "aiohttp.client_exceptions")
    error = explain_end(text, 1, TASK, text.splitlines()[-10:])
    assert isinstance(error, RecipeError)
    assert "max-model-len 256 is shorter than the task's prompts, which have 257 tokens or more" in error.problem
    assert ("max-model-len" in error.remedy, "num_fewshot" in error.remedy, error.retry) == (True, True, False)
    assert [line for line in error.log_tail if "maximum context length" in line] == list(error.log_tail)


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 256 tokens. However, you requested 300 tokens (236 in the messages)",
        "maximum context length of 256 tokens, but the request has at least 300 input tokens",
    ],
)
def test_other_versions_words_for_it_are_read_too(words: str) -> None:
    error = explain_end(f'API request failed! Status code: 400, Response text: {{"message":"{words}"}}\n', 1, TASK, ["end"])
    assert isinstance(error, RecipeError)
    assert "256" in error.problem
    assert "300" in error.problem


def test_data_that_the_hub_did_not_give_are_the_hubs_turn_and_may_come_later() -> None:
    text = (CAPTURED / "hub-unreachable.txt").read_text()
    error = explain_end(text, 1, TASK, text.splitlines())
    assert isinstance(error, HubError)
    assert (error.kind, error.retry) == ("hub-unreachable", True)
    assert "openai/gsm8k" in error.problem


def test_what_the_server_refused_is_told_with_its_reason() -> None:
    text = 'API request failed! Status code: 422, Response text: {"error":{"message":"made is no field"}}. Retrying...\n'
    error = explain_end(text, 1, TASK, ["ServerDisconnectedError"])
    assert isinstance(error, HostError)
    assert "HTTP 422" in error.problem
    assert "made is no field" in error.problem


def test_an_end_that_nobody_explains_shows_the_log() -> None:
    error = explain_end("nothing of it is known", 3, TASK, ["the last line"])
    assert isinstance(error, HostError)
    assert ("exit code 3" in error.problem, list(error.log_tail)) == (True, ["the last line"])
