"""Passages: the texts whose likelihood is measured, the baseline's answers after their prompts, and texts of the recipe's own.

Each has an identity that covers its content, so that two builds are compared on the same passages only.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_qualify.plan.cell import CellPlan

ACCURACY, BASELINE = "accuracy", "baseline"
# The copy of the recipe's file among the evidence.
TEXTS = "given-texts.jsonl"
OF_TEXTS = "texts"

Messages = list[dict[str, Any]]


class PassageId(NamedTuple):
    """The task or `texts`, lm-eval's number of the question or the text's line, and the SHA-256 of prompt and text."""

    of: str
    number: int
    digest: str


class Passage(NamedTuple):
    """A text after its prompt: only the text's tokens are scored. The prompt of a chat is its messages."""

    of: str
    number: int
    prompt: str | Messages
    text: str

    @property
    def identity(self) -> PassageId:
        content = json.dumps([self.prompt, self.text], ensure_ascii=False)
        return PassageId(self.of, self.number, hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest())


def answered_passages(plan: CellPlan, evidence: Path) -> list[Passage]:
    """The answers that the cell scores: the first ones of its baseline, or its own if it becomes one. Empty ones are left out.

    Of a baseline that scored fewer, these are as many as it scored. Raises one of UNUSABLE if there are none, or a file is not
    as lm-eval writes it.
    """
    of = None if plan.establishes else plan.baseline
    folder = evidence / BASELINE / ACCURACY if of else evidence / ACCURACY
    most = plan.likelihood.settings.num_answers if plan.likelihood else 0
    if of and of.likelihood:
        most = min(most, of.likelihood.settings.num_answers)
    passages = [passage for task in plan.accuracy for passage in _read_task(folder / task.name, task.name)[:most]]
    if not passages:
        raise ValueError("no task has answers with a text, so nothing can be scored: give one that generates text")
    return passages


def _read_task(folder: Path, task: str) -> list[Passage]:
    """One answer to each question, in the order of their digests: any first ones of them are a random draw.

    Empty replies are left out, and tasks that compare likelihoods themselves.
    """
    # A group's members each have a file of samples, with numbers of their own.
    by_question: dict[tuple[str, int], Passage] = {}
    for path in sorted(folder.glob("r1-b*/samples_*.jsonl")):
        # `splitlines` would also split at characters that replies may contain.
        for row in map(json.loads, filter(None, path.read_text(encoding="utf-8").split("\n"))):
            arguments, reply = row["arguments"]["gen_args_0"], row["resps"][0][0]
            if not isinstance(reply, str) or not reply.strip() or not isinstance(arguments.get("arg_1"), dict):
                continue
            prompt = _read_prompt(arguments["arg_0"])
            by_question.setdefault((path.name.rpartition("_")[0], row["doc_id"]), Passage(task, row["doc_id"], prompt, reply))
    return sorted(by_question.values(), key=lambda passage: passage.identity.digest)


def asked_prompts(plan: CellPlan, evidence: Path, most: int) -> list[str | Messages]:
    """The first ones of the accuracy questions, as the tasks asked them, in the order of their digests: a random draw.

    Raises one of UNUSABLE if there are none, or a file is not as lm-eval writes it.
    """
    prompts: dict[str, str | Messages] = {}
    for task in plan.accuracy:
        for path in sorted((evidence / ACCURACY / task.name).glob("r1-b*/samples_*.jsonl")):
            for row in map(json.loads, filter(None, path.read_text(encoding="utf-8").split("\n"))):
                prompt = _read_prompt(row["arguments"]["gen_args_0"]["arg_0"])
                prompts.setdefault(hashlib.sha256(json.dumps(prompt).encode()).hexdigest(), prompt)
    if not prompts:
        raise ValueError("the tasks asked no questions")
    return [prompts[digest] for digest in sorted(prompts)[:most]]


def _read_prompt(asked: Any) -> str | Messages:
    """A prompt as lm-eval keeps it: a text, or a chat's messages as text in a list."""
    if isinstance(asked, str):
        return asked
    messages = json.loads(asked[0])
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("the messages of a chat are no list of objects")
    return messages


def read_texts(content: bytes) -> Iterator[Passage]:
    """The texts of a recipe's file, numbered by its lines from 1."""
    for number, line in enumerate(content.splitlines(), start=1):
        yield Passage(OF_TEXTS, number, "", json.loads(line)["text"])
