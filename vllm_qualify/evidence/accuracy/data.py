"""Data of accuracy tasks as local questions: fetched where there is a hub, for hosts that have none."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_qualify.engine.letter_box import copy_matching, copy_plain, read_plain, write_plain
from vllm_qualify.engine.process import await_result, running_guarded, tail
from vllm_qualify.errors import CallerError, HostError, RecipeError, writing
from vllm_qualify.evidence.accuracy.data_worker import ORDER, REPLY, SHOTS, SHOTS_FOLDER, TEST, TEST_FOLDER, DataReply, Order
from vllm_qualify.evidence.accuracy.ended import STAGE
from vllm_qualify.evidence.accuracy.lm_eval_process import confining_lm_eval
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.plan.questions import SUFFIX

WORKER = "vllm_qualify.evidence.accuracy.data_worker"
LIMIT_S = 3600.0


def fetch(task: TaskPlan, into: Path) -> DataReply:
    """Write the task's questions as JSON lines into a new folder `into`, and the solved examples that it draws from its data.

    Where each task of a group has data of its own, there is a folder for each of the two, with a file for each task.

    Raises CallerError if there is something at `into`, or where its files are put together; RecipeError if lm-eval has no such
    task, or its data cannot be local questions; HostError if the hub gave no data, or the folder cannot be written.
    """
    part = into.with_name(f"{into.name}.part")
    for path in (into, part):
        if path.exists():
            raise CallerError(f"{path} is there already", "remove it, or name another folder", "--to")
    with TemporaryDirectory() as name, TemporaryDirectory() as logs:
        letter_box, log = Path(name), Path(logs) / "lm-eval.log"
        write_plain(letter_box / ORDER, Order(task=task.name, task_folder=task.folder).model_dump_json().encode())
        reply = _run_worker(task, letter_box, log)
        if reply.hub_failed:
            remedy = "try again where the hub answers; data that asks for consent needs HF_TOKEN"
            raise HostError(f"no data came for {reply.problem}", remedy, STAGE, tail(log))
        if reply.problem:
            raise RecipeError(reply.problem, reply.remedy, f"{STAGE}.{task.name}")
        with writing(str(into)):
            _copy_files(letter_box, reply, part)
            # The folder is there only if all files are.
            part.replace(into)
    return reply


def _run_worker(task: TaskPlan, letter_box: Path, log: Path) -> DataReply:
    command = [sys.executable, "-m", WORKER, str(letter_box)]
    with (
        confining_lm_eval(task, letter_box) as confinement,
        running_guarded(command, confinement.environment, log, rules=confinement.rules) as process,
    ):

        def arrived() -> DataReply | None:
            ended = process.exit_code()
            if body := read_plain(letter_box / REPLY):
                return DataReply.model_validate_json(body)
            if ended is not None:
                raise HostError(f"lm-eval ended with exit code {ended}", "see the last lines of its log", STAGE, tail(log))
            return None

        return await_result(arrived, LIMIT_S, f"fetching {task.name}", STAGE, log)


def _copy_files(letter_box: Path, reply: DataReply, part: Path) -> None:
    part.mkdir(parents=True)
    if reply.members:
        for name in (TEST_FOLDER,) if reply.shots is None else (TEST_FOLDER, SHOTS_FOLDER):
            (part / name).mkdir()
            copy_matching(letter_box / name, part / name, [f"{member}{SUFFIX}" for member in reply.members])
    else:
        for name in (TEST, SHOTS):
            copy_plain(letter_box / name, part / name)
