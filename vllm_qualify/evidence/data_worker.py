"""lm-eval in a process of its own, which loads a task's data and writes it as local questions.

`data.fetch` puts the order as a file into a folder, the letter box. The answer is `data.json`, beside the files that it names.
"""

import json
import logging
import os
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx

from vllm_qualify.engine.letter_box import write_plain
from vllm_qualify.evidence import lm_eval_internals as internals
from vllm_qualify.evidence.pictures import UnusablePictureError, with_urls
from vllm_qualify.plan.questions import SUFFIX
from vllm_qualify.recipe.values import CountOrNone, Frozen, TaskName

ORDER, REPLY = "order.json", "data.json"
# The names of the files; without their suffix, of the folders where each task of a group has data of its own.
TEST, SHOTS = f"test{SUFFIX}", f"shots{SUFFIX}"
TEST_FOLDER, SHOTS_FOLDER = "test", "shots"


class Order(Frozen):
    """The task, and the folder with own tasks, if there is one."""

    task: TaskName
    task_folder: Path | None = None


class DataReply(Frozen):
    """How many questions and solved examples were written; or why none could be, and the remedy.

    `shots` is None if the task draws its examples from the questions, or has its own. With `members`, each task of the group
    has data of its own, and a file in a folder. `hub_failed` is whether the hub, or what lies between, is the cause.
    """

    questions: CountOrNone = 0
    shots: CountOrNone | None = None
    members: tuple[TaskName, ...] = ()
    problem: str = ""
    remedy: str = ""
    hub_failed: bool = False


class _RefusedError(Exception):
    """The task's data cannot be local questions: why, and the remedy."""


def main(letter_box: Path) -> None:
    order = Order.model_validate_json((letter_box / ORDER).read_bytes())
    write_plain(letter_box / REPLY, _reply(order, letter_box).model_dump_json().encode())


def _reply(order: Order, letter_box: Path) -> DataReply:
    try:
        tasks = _loaded(order)
        if _share_data(tasks):
            one = next(iter(tasks.values()))
            return _written(order.task, one, letter_box / TEST, letter_box / SHOTS)
        return _written_apart(tasks, letter_box / TEST_FOLDER, letter_box / SHOTS_FOLDER)
    except _RefusedError as error:
        problem, remedy = error.args
        return DataReply(problem=problem, remedy=remedy)
    except internals.UnusableGroupError as error:
        return DataReply(problem=error.problem, remedy=error.remedy)
    except (OSError, httpx.HTTPError) as error:
        return DataReply(problem=f"{order.task}: {error}".strip()[:500], hub_failed=True)


def _loaded(order: Order) -> dict[str, Any]:
    found = internals.find(order.task, order.task_folder)
    if found is None:
        where = f"lm-eval {metadata.version('lm-eval')}"
        raise _RefusedError(f"there is no task '{order.task}' in {where}", "`lm-eval ls tasks` lists lm-eval's")
    return internals.load(found, order.task)


def _share_data(tasks: dict[str, Any]) -> bool:
    first, *others = map(internals.source_of, tasks.values())
    return all(other == first for other in others)


def _written(name: str, task: Any, test: Path, shots: Path) -> DataReply:
    """Write the data of the questions and of the examples, as they were before the task prepared them."""
    asked, solved = internals.splits_of(task)
    questions = _write(test, internals.undecoded(task.dataset[asked]), name)
    if solved in (None, asked):
        return DataReply(questions=questions)
    return DataReply(questions=questions, shots=_write(shots, internals.undecoded(task.dataset[solved]), name))


def _written_apart(tasks: dict[str, Any], test: Path, shots: Path) -> DataReply:
    """As `_written`, each task into files of its name in two folders."""
    test.mkdir()
    shots.mkdir()
    each = [_written(name, task, test / f"{name}{SUFFIX}", shots / f"{name}{SUFFIX}") for name, task in tasks.items()]
    solved = [reply.shots for reply in each if reply.shots is not None]
    return DataReply(
        questions=sum(reply.questions for reply in each), shots=sum(solved) if solved else None, members=tuple(tasks)
    )


def _write(path: Path, rows: Iterable[Any], task: str) -> int:
    lines = []
    for row in rows:
        try:
            lines.append(json.dumps(with_urls(row), ensure_ascii=False, allow_nan=False))
        except UnusablePictureError as error:
            raise _RefusedError(f"{task}, question {len(lines) + 1}: {error}", "name another task") from error
        except (TypeError, ValueError) as error:
            problem = f"{task} has data that JSON lines cannot hold, such as sounds: {error}"
            raise _RefusedError(problem, "let lm-eval fetch it itself, on a host that has the hub") from error
    write_plain(path, "".join(f"{line}\n" for line in lines).encode())
    return len(lines)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.captureWarnings(True)
    main(Path(sys.argv[1]))
