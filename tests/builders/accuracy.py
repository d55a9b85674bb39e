"""Tasks asked by the real lm-eval of a server whose answers are chosen beforehand, and files that lm-eval left."""

import base64
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from ruamel.yaml import YAML

from tests.evidence.commands import SERVER, STARTING
from tests.fakes.openai_server import Book, serving
from vllm_qualify.engine.process import Progress
from vllm_qualify.errors import RecipeError
from vllm_qualify.evidence.accuracy.answers import Answer, Answered
from vllm_qualify.evidence.accuracy.letters import TaskReply
from vllm_qualify.evidence.accuracy.lm_eval_process import Asking, LmEval, prepare_task, running_lm_eval
from vllm_qualify.evidence.accuracy.picture_limits import NO_LIMITS, PictureLimits
from vllm_qualify.evidence.accuracy.samples import read_answers
from vllm_qualify.evidence.accuracy.scored_again import can_be_scored_again, find_wrong_score
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy

CAPTURED = Path(__file__).parents[1] / "evidence" / "captured" / "accuracy" / "gsm8k"
CAPTURED_PLAN = TaskPlan(
    settings=Accuracy(num_questions=8, num_fewshot=1, max_gen_toks=48), num_concurrent=4, repetitions=2, sequential=True
)
CAPTURED_STEPS = ("r1-b1", "r1-b2", "r1-b3", "r1-b4", "r2-b1")
NOBODY = STARTING.model_copy(update={"url": "http://127.0.0.1:9"})

Row = dict[str, Any]
Saying = str | Callable[[str], str]


@cache
def install_packages(target: Path, *arguments: str) -> str | None:
    """Why no package index has these packages, or None. They go to `target`."""
    command = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--target", str(target), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stderr[-300:] if done.returncode else None


def with_settings(plan: TaskPlan, **changes: object) -> TaskPlan:
    return plan.model_copy(update={"settings": plan.settings.model_copy(update=changes)})


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def write_rows(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def change_samples(folder: Path, how: Callable[[list[Row]], object], step: str = "r1-b1") -> None:
    """Of a first block: questions 9 and 11 by strict-match, then by flexible-extract."""
    (path,) = (folder / step).glob("samples_*.jsonl")
    rows = read_rows(path)
    how(rows)
    write_rows(path, rows)


def change_document(path: Path, how: Callable[[Row], object]) -> None:
    document = json.loads(path.read_text())
    how(document)
    path.write_text(json.dumps(document))


@contextmanager
def asking(book: Book, plan: TaskPlan, folder: Path, progress: Progress = lambda *_: None, start: int = 1) -> Iterator[Asking]:
    """A task that lm-eval has loaded and asks a server with these answers. The task's files go to `folder`."""
    with serving(book) as url:
        starting, server = STARTING.model_copy(update={"url": url}), SERVER.model_copy(update={"url": url})
        with running_lm_eval(starting, "reference", plan, folder.parent / "lm-eval") as lm_eval:
            yield prepare_task(server, lm_eval, folder, progress, start)


def ask_task(plan: TaskPlan, folder: Path, book: Book, most_blocks: int | None = None) -> tuple[Answered, Path]:
    """A task's answers, and the folder of their evidence. With `most_blocks`, only so many of its first blocks are asked."""
    into = folder / "accuracy" / plan.name
    with asking(book, plan, into) as run:
        for step in run.steps[:most_blocks]:
            run.ask(step)
    # What lm-eval really wrote is never taken for a wrong score.
    assert not (can_be_scored_again(into, plan) and find_wrong_score(into, plan, 1))
    return read_answers(into, plan), into


def answer_in_order(plan: TaskPlan, folder: Path, book: Book, most_blocks: int | None = None) -> list[Answer]:
    """A task's answers in the order of its questions."""
    answered, _ = ask_task(plan, folder, book, most_blocks)
    return sorted(answered.answers, key=lambda answer: answer.question)


def await_task_reply(lm_eval: LmEval) -> TaskReply:
    deadline = time.monotonic() + 120
    while not lm_eval.has_task_reply():
        lm_eval.check()
        assert time.monotonic() < deadline
        time.sleep(0.05)  # another process writes it
    return lm_eval.task_reply()


def refuse_task(plan: TaskPlan, log: Path, pictures: PictureLimits = NO_LIMITS) -> RecipeError:
    """Why lm-eval refuses a task before any server answers."""
    with pytest.raises(RecipeError) as raised, running_lm_eval(NOBODY, "reference", plan, log, pictures) as lm_eval:
        await_task_reply(lm_eval)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            lm_eval.check()
            time.sleep(0.05)  # the worker takes its first reply back, by a file
    return raised.value


def pictures_plan(folder: Path, rows: list[Row], task: str = "chartqa", own: Path | None = None, **settings: Any) -> TaskPlan:
    file = folder / "test.jsonl"
    write_rows(file, rows)
    asked: dict[str, Any] = {"api": "chat", "stop": [], "num_fewshot": 0, "time_limit_s": 120.0}
    return TaskPlan(
        settings=Accuracy(task=task, num_questions=len(rows), **(asked | settings)),
        num_concurrent=4,
        repetitions=settings.get("samples_per_question", 1),
        questions=[file],
        folder=own,
    )


class Replies(Mapping[str, str]):
    """The reply to a prompt, by the phrase that is in it; by the last one, since examples come before the question."""

    def __init__(self, by_phrase: Mapping[str, Saying]) -> None:
        self._by_phrase = by_phrase

    def __getitem__(self, prompt: str) -> str:
        found = max(self._by_phrase, key=prompt.rfind)
        if found not in prompt:
            raise KeyError(prompt)
        saying = self._by_phrase[found]
        return saying if isinstance(saying, str) else saying(prompt)

    def __contains__(self, prompt: object) -> bool:
        return any(phrase in str(prompt) for phrase in self._by_phrase)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_phrase)

    def __len__(self) -> int:
        return len(self._by_phrase)


EXAMPLES = [{"question": "1 + 1?", "answer": "#### 2", "kind": "x"}, {"question": "2 + 2?", "answer": "#### 4", "kind": "x"}]


def write_task(folder: Path, name: str, data: list[Any], **changes: Any) -> None:
    """A task file with its questions and EXAMPLES beside it, which have the same fields."""
    folder.mkdir(exist_ok=True)
    examples = [{field: row[field] for field in data[0]} for row in EXAMPLES]
    files = {split: folder / f"{name}-{split}.jsonl" for split in ("test", "train")}
    write_rows(files["test"], data)
    write_rows(files["train"], examples)
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: str(file) for split, file in files.items()}},
        "output_type": "generate_until",
        "test_split": "test",
        "training_split": "train",
        "fewshot_split": "train",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    YAML(typ="safe").dump(task | changes, folder / f"{name}.yaml")


def draw_picture(colour: str, form: str = "PNG", size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, form)
    return file.getvalue()


def picture_url(body: bytes, form: str = "png") -> str:
    return f"data:image/{form};base64,{base64.b64encode(body).decode()}"


def exam_row(number: int, question: str, answer: str, *pictures: bytes, options: str = "['two', 'six']") -> Row:
    """A question of MMMU."""
    images = dict.fromkeys(f"image_{place}" for place in range(1, 8))
    images |= {f"image_{place}": picture_url(body) for place, body in enumerate(pictures, start=1)}
    kind = "multiple-choice" if options != "[]" else "open"
    return {"id": f"a_{number}", "question": question, "options": options, "answer": answer, "question_type": kind} | images
