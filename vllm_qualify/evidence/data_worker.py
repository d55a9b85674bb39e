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
from vllm_qualify.recipe.values import CountOrNone, Frozen, TaskName

ORDER, REPLY = "order.json", "data.json"
TEST, SHOTS = "test.jsonl", "shots.jsonl"


class Order(Frozen):
    """The task, and the folder with own tasks, if there is one."""

    task: TaskName
    task_folder: Path | None = None


class DataReply(Frozen):
    """How many questions and solved examples were written; or why none could be, and the remedy.

    `shots` is None if the task draws its examples from the questions, or has its own. `hub_failed` is whether the hub, or what
    lies between, is the cause.
    """

    questions: CountOrNone = 0
    shots: CountOrNone | None = None
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
        asked, solved = _data_of(order.task, _loaded(order))
        questions = _write(letter_box / TEST, asked, order.task)
        shots = None if solved is None else _write(letter_box / SHOTS, solved, order.task)
    except _RefusedError as error:
        problem, remedy = error.args
        return DataReply(problem=problem, remedy=remedy)
    except internals.UnusableGroupError as error:
        return DataReply(problem=error.problem, remedy=error.remedy)
    except (OSError, httpx.HTTPError) as error:
        return DataReply(problem=f"{order.task}: {error}".strip()[:500], hub_failed=True)
    return DataReply(questions=questions, shots=shots)


def _loaded(order: Order) -> dict[str, Any]:
    found = internals.find(order.task, order.task_folder)
    if found is None:
        where = f"lm-eval {metadata.version('lm-eval')}"
        raise _RefusedError(f"there is no task '{order.task}' in {where}", "`lm-eval ls tasks` lists lm-eval's")
    return internals.load(found, order.task)


def _data_of(name: str, tasks: dict[str, Any]) -> tuple[Iterable[Any], Iterable[Any] | None]:
    """The data of the questions and of the examples, as they were before the task prepared them."""
    first, *others = tasks.values()
    if any(internals.source_of(other) != internals.source_of(first) for other in others):
        members = ", ".join(list(tasks)[:3])
        raise _RefusedError(f"the tasks of {name} have data of their own each", f"name one of them: {members}, …")
    asked, solved = internals.splits_of(first)
    examples = None if solved in (None, asked) else internals.undecoded(first.dataset[solved])
    return internals.undecoded(first.dataset[asked]), examples


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
