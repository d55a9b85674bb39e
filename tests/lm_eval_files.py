"""A task's folder as lm-eval and the worker leave it, made up from chosen answers. Its documents begin as captured ones."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vllm_qualify.evidence.accuracy.answers import Answered, write
from vllm_qualify.evidence.accuracy.blocks import QuestionBlock, plan_steps
from vllm_qualify.evidence.accuracy.letters import TASK, TaskReply
from vllm_qualify.evidence.accuracy.lm_eval_process import AFTER, BEFORE
from vllm_qualify.evidence.accuracy.samples import NOTHING, read_answers
from vllm_qualify.evidence.accuracy.thinking import REPLIES
from vllm_qualify.evidence.accuracy.thinking import Reply as Kept
from vllm_qualify.plan.cell import TaskPlan

CAPTURED = Path(__file__).parent / "evidence" / "captured" / "accuracy" / "gsm8k"
STRICT, FLEXIBLE = "strict-match", "flexible-extract"
# What the server has answered before the first step, and its counters on the captured page.
BEGAN = 1000
ENDED = re.compile(r'(vllm:request_success_total\{engine="0",finished_reason="(\w+)",model_name="reference"\}) \S+')

Document = dict[str, Any]


class Reply(NamedTuple):
    """What came back: its score by strict-match, its length in characters, and its score by the other filter if it differs.

    If it has a number of tokens, it is kept beside lm-eval's samples too. No filter finds an answer in one that `is_unread`.
    """

    score: float
    length: int = 100
    flexible: float | None = None
    tokens: int | None = None
    is_unread: bool = False


RIGHT, WRONG, EMPTY = Reply(1.0), Reply(0.0), Reply(0.0, length=0, is_unread=True)
# The reply to a question, by its place in the task's data, in a repetition counted from 1.
Answering = Callable[[int, int], Reply]


class Asked(NamedTuple):
    """A task with so many questions, and what of it differs from the captured one: its score, and what its prompts are of."""

    task: TaskPlan
    available: int
    metric: str = "exact_match"
    prompt: str = "Question"
    version: float = 3.0
    config: Document = {}

    @property
    def steps(self) -> list[QuestionBlock]:
        task = self.task
        return plan_steps(task.settings, self.available, task.repetitions, sequential=task.sequential)

    def begin(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / TASK).write_text(TaskReply(available=self.available).model_dump_json(indent=2))

    def write_step(self, folder: Path, step: QuestionBlock, answering: Answering, cut: int = 0) -> None:
        """The step's folder; `cut` of its answers ended at the most tokens allowed."""
        into = folder / step.folder
        into.mkdir()
        stamp = f"2026-11-20T21-19-{step.repetition:02}.{step.block:06}"
        questions = sorted(step.questions)
        replies = [answering(question, step.repetition) for question in questions]
        flexible = [reply.score if reply.flexible is None else reply.flexible for reply in replies]
        scores = {STRICT: [reply.score for reply in replies], FLEXIBLE: flexible}
        generation = (_captured_results()["configs"]["gsm8k"] | self.config)["generation_kwargs"]
        rows = [
            self._row(question, reply, score, name, generation)
            for name, given in scores.items()
            for question, reply, score in zip(questions, replies, given, strict=True)
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (into / f"samples_{self.task.name}_{stamp}.jsonl").write_text(text)
        (into / f"results_{stamp}.json").write_text(json.dumps(self._results(scores, len(questions)), indent=2))
        kept = [
            Kept(prompt_hash=row["prompt_hash"], finish_reason="stop", thinking=None, is_empty=False, output_tok=reply.tokens)
            for row, reply in zip(rows, replies, strict=False)
            if reply.tokens is not None
        ]
        if kept:
            (into / REPLIES).write_text("".join(f"{each.model_dump_json()}\n" for each in kept))
        (into / BEFORE).write_text(page(stop=BEGAN, length=BEGAN))
        (into / AFTER).write_text(page(stop=BEGAN + len(questions) - cut, length=BEGAN + cut))

    def _results(self, scores: dict[str, list[float]], asked: int) -> Document:
        name, results = self.task.name, _captured_results()
        about = results["results"].pop("gsm8k")
        about = {key: value for key, value in about.items() if "," not in key} | {"name": name, "alias": name}
        about["sample_len"] = asked
        for filter_name, given in scores.items():
            about[f"{self.metric},{filter_name}"] = sum(given) / len(given)
            about[f"{self.metric}_stderr,{filter_name}"] = "N/A"
        config = results["configs"].pop("gsm8k") | {"task": name} | self.config
        settings = self.task.settings
        arguments = results["config"]["model_args"] | {
            "base_url": f"http://127.0.0.1:8000/v1/{'chat/' if settings.api == 'chat' else ''}completions",
            "max_gen_toks": settings.max_gen_toks or 256,
        }
        return results | {
            "config": results["config"] | {"model_args": arguments, "gen_kwargs": self.task.gen_kwargs or None},
            "system_instruction": settings.system_prompt,
            "results": {name: about},
            "configs": {name: config},
            "versions": {name: self.version},
            "n-shot": {name: self.task.settings.num_fewshot},
            "higher_is_better": {name: {self.metric: True}},
            "n-samples": {name: {"original": self.available, "effective": asked}},
            "task_hashes": {name: _sha(name)},
        }

    def _row(self, question: int, reply: Reply, score: float, filter_name: str, generation: Document) -> Document:
        asked = _question(self.prompt, question)
        return {
            **{name: asked[name] for name in ("doc_id", "doc", "target")},
            "arguments": {"gen_args_0": asked["arguments"]["gen_args_0"] | {"arg_1": generation}},
            "resps": [[text_of(question, reply)]],
            "filtered_resps": [NOTHING if reply.is_unread else str(question if score else question + 1)],
            "filter": filter_name,
            "metrics": [self.metric],
            **{name: asked[name] for name in ("doc_hash", "prompt_hash", "target_hash")},
            self.metric: score,
        }

    def write(self, folder: Path, answering: Answering, done: Sequence[QuestionBlock] | None = None) -> None:
        """The whole folder, of the steps that were asked; all of them by default."""
        self.begin(folder)
        for step in self.steps if done is None else done:
            self.write_step(folder, step, answering)

    def keep_answers(self, folder: Path, path: Path) -> Answered:
        """The typed answers of a folder, as a run leaves them at `path`."""
        answers = read_answers(folder, self.task)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(answers, path)
        return answers


def text_of(question: int, reply: Reply) -> str:
    """A reply in which the filters find what its sample says, if it is long enough for that."""
    flexible = reply.score if reply.flexible is None else reply.flexible
    strict, last = (question if score else question + 1 for score in (reply.score, flexible))
    text = f"#### {strict} or {last}"
    return "x" * reply.length if reply.is_unread or len(text) > reply.length else text.rjust(reply.length, "x")


@cache
def _question(prompt: str, question: int) -> Document:
    """What samples say of a question whoever answered it."""
    return hashed(
        {
            "doc_id": question,
            "doc": {"question": f"the one at place {question}?", "answer": f"#### {question}"},
            "target": f"#### {question}",
            "arguments": {"gen_args_0": {"arg_0": f"{prompt}: the one at place {question}?\nAnswer:"}},
        }
    )


def hashed(row: Document) -> Document:
    """A sample with the hashes that lm-eval makes of its content."""
    prompt = row["arguments"]["gen_args_0"]["arg_0"]
    content = {
        "doc_hash": json.dumps(row["doc"], indent=2, ensure_ascii=False),
        "prompt_hash": prompt if isinstance(prompt, str) else prompt[0],
        "target_hash": row["target"],
    }
    return row | {name: _sha(str(text)) for name, text in content.items()}


def _captured_results() -> Document:
    (path,) = (CAPTURED / "r1-b1").glob("results_*.json")
    results: Document = json.loads(path.read_text())
    return results


def page(*, stop: int, length: int) -> str:
    """The server's /metrics, with its counts of answers by what ended them."""
    counted = {"stop": stop, "length": length}
    text = (CAPTURED / "r1-b1" / BEFORE).read_text()
    return ENDED.sub(lambda line: f"{line[1]} {counted.get(line[2], 0)}.0", text)


def right_but(wrong: Iterable[int]) -> Answering:
    """Always the same answers: all right but those to some questions."""
    missed = frozenset(wrong)
    return lambda question, _: WRONG if question in missed else RIGHT


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
