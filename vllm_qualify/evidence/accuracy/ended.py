"""Why lm-eval ended, from its log. Pure."""

import re
from collections.abc import Sequence

from vllm_qualify.errors import HostError, HubError, QualifyError, RecipeError
from vllm_qualify.plan.cell import TaskPlan

STAGE = "accuracy"
_CLOSED = re.compile(r"PermissionError: \[Errno 13\] Permission denied: (\S.{,500})")
# vLLM's words, where a request has tools and it was started without a parser of calls.
_NO_PARSER = "tool choice requires --enable-auto-tool-choice"
# vLLM's words, where a prompt has more tokens than fit; other versions and engines say it in other orders.
_TOO_LONG = re.compile(
    r"maximum context length (?:is|of) (?P<most>\d+) tokens[^\n]{0,200}?(?:contains|requested|has"
    r"|resulted in)(?: at least)? (?P<tokens>\d+)"
)
_NOT_REACHED = re.compile(
    r"^(?:\w{1,40}\.){0,6}(?:ConnectionError: Couldn't reach '[^'\n]{1,200}' on the Hub|HfHubHTTPError: "
    r"|ConnectTimeout: |ReadTimeout: |MaxRetryError: )"
    r"[^\n]{0,300}",
    re.M,
)
_REFUSED = re.compile(r"API request failed! Status code: (?P<status>\d{3}), Response text: (?P<why>[^\n]{1,300})")


def explain_end(text: str, exit_code: int, task: TaskPlan, log_tail: Sequence[str]) -> QualifyError:
    """The error for an lm-eval that ended with this exit code and log.

    The cause can stand far above the end: the first refused request ends lm-eval, and all that were under way are logged after.
    """
    place = f"{STAGE}.{task.name}"
    if task.folder and (denied := _CLOSED.findall("\n".join(log_tail))):
        problem = f"a file of its task_folder opens {denied[-1]}, which is closed to it"
        return RecipeError(problem, f"move that file into {task.folder}, which lm-eval may read", place, log_tail)
    if _NO_PARSER in text:
        problem, remedy = "the server has no parser of tool calls", "give it tool-call-parser and enable-auto-tool-choice"
        return RecipeError(problem, remedy, place, log_tail)
    if too_long := _TOO_LONG.search(text):
        prompts = f"the task's prompts, which have {too_long['tokens']} tokens or more"
        problem = f"max-model-len {too_long['most']} is shorter than {prompts}"
        remedy = "set a longer max-model-len, or a lower num_fewshot or max_gen_toks"
        return RecipeError(problem, remedy, place, _lines_around(text, too_long))
    if lost := _NOT_REACHED.search("\n".join(log_tail)):
        problem = f"lm-eval could not bring the task's data from the hub: {lost[0]}"
        remedy = "check the network, the proxy and HF_ENDPOINT, and try again"
        return HubError(problem, remedy, place, log_tail, "hub-unreachable", retry=True)
    if refused := _REFUSED.search(text):
        problem = f"the server refused a request of lm-eval with HTTP {refused['status']}: {refused['why']}"
        return HostError(problem, "see the server's log, and what the request asks", place, _lines_around(text, refused))
    return HostError(f"lm-eval ended with exit code {exit_code}", "see the last lines of its log", STAGE, log_tail)


def _lines_around(text: str, match: re.Match[str]) -> list[str]:
    """The line of the cause."""
    begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
    return [text[begin : end if end >= 0 else None]]
