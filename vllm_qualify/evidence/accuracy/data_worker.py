"""lm-eval in a process of its own, which loads a task's data and writes it as local questions.

`data.fetch` puts the order as a file into a folder, the letter box. The answer is `data.json`, beside the files that it names.
"""

import json
import logging
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx

from vllm_qualify.engine.letter_box import write_plain
from vllm_qualify.evidence.accuracy import lm_eval_internals as internals
from vllm_qualify.evidence.accuracy.letters import RefusedError
from vllm_qualify.evidence.accuracy.pictures import UnusablePictureError, with_urls
from vllm_qualify.plan.questions import SUFFIX
from vllm_qualify.recipe.values import CountOrZero, Frozen, TaskName

ORDER, REPLY = "order.json", "data.json"
# The names of the files; without their suffix, of the folders where each task of a group has data of its own.
TEST, SHOTS = f"test{SUFFIX}", f"shots{SUFFIX}"
TEST_FOLDER, SHOTS_FOLDER = "test", "shots"


class Order(Frozen):
    """The task, and the folder with own tasks, if there is one."""

    task: TaskName
    task_folder: Path | None = None


class DataReply(Frozen):
    """How many questions and solved examples were written; or why none could be, and the remedy."""

    questions: CountOrZero = 0
    shots: CountOrZero | None = None
    """None if the task draws its examples from the questions, or has its own"""
    members: tuple[TaskName, ...] = ()
    """the tasks of a group whose tasks each have data of their own, in files of a folder"""
    problem: str = ""
    remedy: str = ""
    hub_failed: bool = False
    """whether the hub, or the network on the way, is the cause"""


def main(letter_box: Path) -> None:
    order = Order.model_validate_json((letter_box / ORDER).read_bytes())
    write_plain(letter_box / REPLY, _fetch_data(order, letter_box).model_dump_json().encode())


def _fetch_data(order: Order, letter_box: Path) -> DataReply:
    try:
        found = internals.find_task(order.task, order.task_folder)
        if found is None:
            where = f"lm-eval {metadata.version('lm-eval')}"
            raise RefusedError(f"there is no task '{order.task}' in {where}", "`lm-eval ls tasks` lists lm-eval's")
        tasks = internals.load_tasks(found, order.task)
        first, *others = tasks.values()
        if all(internals.source_of(other) == internals.source_of(first) for other in others):
            return _write_task(order.task, first, letter_box / TEST, letter_box / SHOTS)
        return _write_members(tasks, letter_box / TEST_FOLDER, letter_box / SHOTS_FOLDER)
    except RefusedError as error:
        return DataReply(problem=error.problem, remedy=error.remedy)
    except (OSError, httpx.HTTPError) as error:
        return DataReply(problem=f"{order.task}: {error}".strip()[:500], hub_failed=True)


def _write_task(name: str, task: Any, test: Path, shots: Path) -> DataReply:
    """Write the data of the questions and of the examples, as they were before the task prepared them."""
    asked, solved = internals.splits_of(task)
    questions = _write_rows(test, internals.keep_encoded(task.dataset[asked]), name)
    if solved in (None, asked):
        return DataReply(questions=questions)
    return DataReply(questions=questions, shots=_write_rows(shots, internals.keep_encoded(task.dataset[solved]), name))


def _write_members(tasks: dict[str, Any], test: Path, shots: Path) -> DataReply:
    """As `_write_task`, each task into files of its name in two folders."""
    test.mkdir()
    shots.mkdir()
    each = [_write_task(name, task, test / f"{name}{SUFFIX}", shots / f"{name}{SUFFIX}") for name, task in tasks.items()]
    solved = [reply.shots for reply in each if reply.shots is not None]
    return DataReply(
        questions=sum(reply.questions for reply in each), shots=sum(solved) if solved else None, members=tuple(tasks)
    )


def _write_rows(path: Path, rows: Iterable[Any], task: str) -> int:
    lines = []
    for row in rows:
        try:
            lines.append(json.dumps(with_urls(row), ensure_ascii=False, allow_nan=False))
        except UnusablePictureError as error:
            raise RefusedError(f"{task}, question {len(lines) + 1}: {error}", "name another task") from error
        except (TypeError, ValueError) as error:
            problem = f"{task} has data that JSON lines cannot hold, such as sounds: {error}"
            raise RefusedError(problem, "let lm-eval fetch it itself, on a host that has the hub") from error
    write_plain(path, "".join(f"{line}\n" for line in lines).encode())
    return len(lines)


if __name__ == "__main__":
    logging.captureWarnings(True)
    main(Path(sys.argv[1]))
