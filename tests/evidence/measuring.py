"""A task asked by the real lm-eval, of a server whose answers are chosen beforehand."""

from pathlib import Path

from tests.evidence.commands import SERVER, STARTING
from tests.fakes.openai_server import Book, serving
from vllm_qualify.evidence.accuracy import loading, prepare_task
from vllm_qualify.evidence.answers import Answered, read_answers
from vllm_qualify.plan.cell import TaskPlan


def measured(plan: TaskPlan, folder: Path, book: Book, most_blocks: int | None = None) -> tuple[Answered, Path]:
    """Its answers, and the folder of their evidence. With `most_blocks`, only so many of its first blocks are asked."""
    into = folder / "accuracy" / plan.name
    with serving(book) as url:
        starting, server = STARTING.model_copy(update={"url": url}), SERVER.model_copy(update={"url": url})
        with loading(starting, "reference", plan, folder / "lm-eval") as lm_eval:
            run = prepare_task(server, lm_eval, into, lambda *_: None)
            for step in run.steps[:most_blocks]:
                run.ask(step)
    return read_answers(into, plan), into
