"""An orchestrator with secrets, in a process of its own: it runs a hostile model's server or probe, or a hostile task.

python -m tests.attacks.hostile_driver server|probe|task FOLDER [IMAGE]
"""

import hashlib
import json
import re
import socketserver
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_qualify.drift import probe
from vllm_qualify.engine.environment import find_engine
from vllm_qualify.engine.image import resolve
from vllm_qualify.engine.launchers.base import Script
from vllm_qualify.engine.launchers.registry import launcher_of
from vllm_qualify.engine.process import RunningProcess
from vllm_qualify.engine.server import Client, ServerPlan, Starting, config_text
from vllm_qualify.engine.server_start import launch
from vllm_qualify.evidence.accuracy.lm_eval_process import running_lm_eval
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy

LIMIT_S = 240


def box_of(folder: Path) -> Path:
    """The socket by which the hostile code tells what it found: it leaves no file."""
    return Path("/tmp", f"looked-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}")


def looks_of(folder: Path) -> Path:
    """The folder in which this process writes down what it was told."""
    return folder / "looks"


@contextmanager
def listening(folder: Path) -> Iterator[None]:
    looks_of(folder).mkdir()

    class Written(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            part = looks_of(folder) / f"{uuid.uuid4().hex}.part"
            part.write_bytes(self.rfile.read())
            part.replace(part.with_suffix(".json"))

    with socketserver.ThreadingUnixStreamServer(str(box_of(folder)), Written) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            box_of(folder).unlink()


def plan_in(folder: Path, image: str | None = None) -> ServerPlan:
    return ServerPlan(
        engine=resolve(image) if image else find_engine(),
        model=str(folder / "model"),
        revision=None,
        served_model_name="hostile",
        arguments={"trust-remote-code": True, "max-model-len": 64, "enforce-eager": True},
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
        startup_timeout_s=LIMIT_S,
    )


def await_look(folder: Path, log: Path, *, in_log: bool = False) -> None:
    """Wait for a file of what it found. A container has no such socket, and only prints it, which comes before the file."""
    deadline = time.monotonic() + LIMIT_S
    while not (printed(log) if in_log else list(looks_of(folder).glob("*.json"))):
        if time.monotonic() > deadline:
            sys.exit(f"it never looked: {log.read_text()[-4000:]}")
        time.sleep(0.2)  # another process looks


def printed(log: Path) -> list[str]:
    return re.findall(r"looked: (\{.*\})", log.read_text(errors="replace"))


def serve(folder: Path, image: str | None = None) -> None:
    (folder / "run").mkdir()
    with launch(plan_in(folder, image), folder / "run") as starting:
        await_look(folder, starting.process.log, in_log=image is not None)
    if image:
        for number, message in enumerate(printed(folder / "run" / "server.log")):
            (looks_of(folder) / f"{number}.json").write_text(message)


def ask(folder: Path) -> None:
    plan = plan_in(folder)
    server = {"config": config_text(plan, 8000), "environment": plan.environment, "device": None}
    question = json.dumps({"servers": [server], "resolve": False})
    script = Script(Path(probe.__file__), question, [plan], "asking", "check", LIMIT_S)
    answer = json.loads(launcher_of(plan.engine).ask(plan.engine, script, lambda: None))
    print(answer["servers"])


def load_task(folder: Path) -> None:
    task = TaskPlan(
        settings=Accuracy(task="hostile", num_questions=2, num_fewshot=0), num_concurrent=1, folder=folder / "tasks"
    )
    nobody = RunningProcess(guard_pid=1, state_file=folder / "none.state", log=folder / "none.log")
    url = "http://127.0.0.1:9"
    client = Client(program="vllm", python="python3", url=url, model="hostile")
    starting = Starting(url=url, process=nobody, command=[], client=client, launched_at=0.0)
    with running_lm_eval(starting, "hostile", task, folder / "run") as lm_eval:
        await_look(folder, lm_eval.process.log)


if __name__ == "__main__":
    with listening(Path(sys.argv[2])):
        {"server": serve, "probe": ask, "task": load_task}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
