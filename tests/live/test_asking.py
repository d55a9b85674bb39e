"""The engine is asked while the server starts: what either of them says ends both. The engine is a stand-in."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.builders.processes import alive, children_that_run, until
from tests.fakes.vllm import leave_unclear, make_engine
from tests.qualified import COMMAND, processes_of, run
from tests.recipes import Document, small, write
from vllm_qualify.recipe.loading import catalog_folder

REFUSED = {"max-num-sequences": 4, "compilation-config": {"modes": 3}}
# As long as a cold import of vLLM, for a server that dies at once.
SLOW = "sleep 4; "
LIMIT_S = 90.0
pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def document(tmp_path: Path) -> Document:
    changed = small(tmp_path)
    changed["variants"]["bf16"]["smoke_golden"] = None
    return changed


def recipe(document: Document, folder: Path, behaviour: str, server: dict[str, object]) -> str:
    cpu = document["gpu_types"]["cpu"]
    cpu["server"] |= server
    cpu["environment"] = cpu.get("environment", {}) | {"TORCH_FAKE_VLLM": behaviour}
    return str(write(document, folder / "mine.yaml"))


def engine(folder: Path, before_an_answer: str = "") -> dict[str, str]:
    """A stand-in in the environment; what its Python does `before_an_answer` is of a shell."""
    made = make_engine(folder / "engine")
    python = made / "bin" / "python"
    python.write_text(python.read_text().replace("*script.py) ", f"*script.py) {before_an_answer}"))
    return {"VLLM_QUALIFY_ENGINE": str(made)}


def assert_refused(done: subprocess.CompletedProcess[str], home: Path) -> None:
    assert done.returncode == 3, done.stdout + done.stderr
    assert "error (the recipe's author must act): check: vLLM 0.32.0+cpu does not take what the recipe asks" in done.stderr
    assert "class: recipe-drift" in done.stderr
    for expected in ("no option --max-num-sequences", "no field modes"):
        assert expected in done.stderr
    assert not list(home.glob("runs/*/stages/*.json"))
    assert processes_of(home) == []


def test_a_refused_recipe_ends_the_start_and_then_starts_nothing(tmp_path: Path, home: Path, document: Document) -> None:
    """The answer is kept: it is known before the next start."""
    refused, environment = recipe(document, tmp_path, "hangs", REFUSED), engine(tmp_path, SLOW)
    assert_refused(run(home, COMMAND, "run", refused, **environment), home)
    (log,) = home.glob("runs/*/evidence/serve/server.log")
    assert "loading weights for ever" in log.read_text(), "the server was starting meanwhile"
    before = set(home.glob("runs/*"))
    assert_refused(run(home, COMMAND, "run", refused, **environment), home)
    assert set(home.glob("runs/*")) == before


def test_a_server_that_fails_of_the_recipe_first_is_explained(tmp_path: Path, home: Path, document: Document) -> None:
    done = run(home, COMMAND, "run", recipe(document, tmp_path, "dies", REFUSED), **engine(tmp_path, SLOW))
    assert_refused(done, home)


def test_a_server_that_fails_otherwise_says_so_itself(tmp_path: Path, home: Path, document: Document) -> None:
    done = run(home, COMMAND, "run", recipe(document, tmp_path, "dies", {}), **engine(tmp_path, SLOW))
    assert done.returncode == 3, done.stdout + done.stderr
    assert ": serve: " in done.stderr
    assert "the fake dies as ordered" in done.stderr
    assert processes_of(home) == []


def test_an_engine_that_cannot_be_asked_ends_the_start(tmp_path: Path, home: Path, document: Document) -> None:
    broken = engine(tmp_path, f"{SLOW} echo it is broken; exit 1; ")
    done = run(home, COMMAND, "run", recipe(document, tmp_path, "hangs", {}), **broken)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "error (the operator must act): " in done.stderr
    assert "it is broken" in done.stderr
    assert processes_of(home) == []


def test_what_the_engine_could_not_tell_is_in_the_plan_at_once(tmp_path: Path, home: Path, document: Document) -> None:
    model = shutil.copytree(catalog_folder() / "reference" / "model", tmp_path / "model")
    (model / "generation_config.json").write_text('{"max_new_tokens": 5}')
    document["variants"]["bf16"]["model"] = str(model)
    environment = engine(tmp_path, SLOW)
    leave_unclear(tmp_path / "engine", "no hub")
    done = run(home, COMMAND, "run", recipe(document, tmp_path, "healthy", {}), **environment)
    assert "not known: whether options refuse each other, for 1 of 1 cells: no hub" in done.stderr
    # the stand-in has no bench, so that the run ends there
    assert [path.stem for path in home.glob("runs/*/stages/*.json")] != [], done.stderr
    (plan,) = home.glob("runs/*/plan.json")
    planned = json.loads(plan.read_text())
    assert planned["unasked"] == ["whether options refuse each other, for 1 of 1 cells: no hub"]
    (warning,) = planned["warnings"]
    assert "max_new_tokens 5, where replies to chats and /v1/responses without max_tokens end" in warning
    assert warning in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_stopped_command_leaves_neither_server_nor_question(
    number: signal.Signals, code: int, tmp_path: Path, home: Path, document: Document
) -> None:
    hanging = engine(tmp_path, "exec sleep 600; ")
    command = [COMMAND, "run", recipe(document, tmp_path, "hangs", {})]
    with subprocess.Popen(command, env=os.environ | hanging | {"VLLM_QUALIFY_HOME": str(home)}) as process:
        assert until(lambda: asking_for(process.pid) and any(home.glob("runs/*/evidence/serve/server.state")), LIMIT_S)
        (asked,) = asking_for(process.pid)
        assert processes_of(home)
        process.send_signal(number)
        process.wait(timeout=60)
        assert process.returncode == code
    assert until(lambda: not alive(asked) and not processes_of(home), LIMIT_S)


def asking_for(command: int) -> list[int]:
    """The processes that ask the hanging engine. They write no file: their own rules allow none."""
    return children_that_run(["sleep", "600"], command)
