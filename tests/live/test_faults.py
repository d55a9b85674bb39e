"""What goes wrong on the real engine ends in its own exit code, never in an approval, and leaves nothing behind."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.builders.processes import until
from tests.builders.safetensors_files import drop_tensor
from tests.fakes.vllm import make_engine
from tests.live import driver
from tests.qualified import COMMAND, of, processes_of, run
from tests.recipes import Document, small, write
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.recipe.loading import catalog_folder

# In the order in which a run measures them.
MEASURED = ["smoke", "contract", "accuracy", "load"]

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engine")]


@pytest.fixture
def document(tmp_path: Path) -> Document:
    return small(tmp_path)


def recipe(document: Document, folder: Path) -> str:
    return str(write(document, folder / "mine.yaml"))


def approvals(home: Path) -> list[str]:
    manifests = (home / "store").glob("reports/**/manifest.json")
    return [path.name for path in manifests if json.loads(path.read_text())["outcome"] == "passed"]


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("moment", ["before:smoke", "before:accuracy", "after:load"])
def test_a_server_killed_between_two_stages_is_never_approved(
    moment: str, engine: EngineEnvironment, tmp_path: Path, home: Path, document: Document
) -> None:
    environment = of(engine) if moment == "after:load" else stand_in_for(document, tmp_path)
    done = run(home, sys.executable, driver.__file__, moment, "run", recipe(document, tmp_path), **environment)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "error (the operator must act): serve: the server was ended by signal 9" in done.stderr
    assert "class: killed; the same thing tried again may well succeed" in done.stderr
    assert approvals(home) == []
    assert processes_of(home) == []
    # the evidence gathered before is kept
    when, _, stage = moment.partition(":")
    begun = MEASURED.index(stage)
    finished = MEASURED[: begun + 1] if when == "after" else MEASURED[:begun]
    assert {path.stem for path in home.glob("runs/*/stages/*.json")} == set(finished)


def stand_in_for(document: Document, folder: Path) -> dict[str, str]:
    """A stand-in is killed before a stage as well as a real server, and is up half a minute sooner."""
    document["variants"]["bf16"]["smoke_golden"] = " It is 7."
    return {"VLLM_QUALIFY_ENGINE": str(make_engine(folder / "engine"))}


@pytest.mark.parametrize(
    ("number", "moment", "code"),
    [
        (signal.SIGINT, "serve/server.state", 130),
        (signal.SIGTERM, "accuracy/gsm8k/task.json", 143),
        (signal.SIGKILL, "serve/server.state", -9),
    ],
)
def test_a_command_that_is_stopped_leaves_no_process(
    number: signal.Signals, moment: str, code: int, tmp_path: Path, home: Path, document: Document
) -> None:
    """Nor one of Prefect's own server, which the command had to start."""
    command = [COMMAND, "run", recipe(document, tmp_path)]
    with subprocess.Popen(command, start_new_session=True) as process:
        await_file(home, f"runs/*/evidence/{moment}", process)
        assert processes_of(home)
        process.send_signal(number)
        process.wait(timeout=60)
        assert process.returncode == code
    assert until(lambda: not processes_of(home), 30)
    assert approvals(home) == []


def await_file(folder: Path, pattern: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 600
    while not list(folder.glob(pattern)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.usefixtures("prefect_server")
def test_corrupt_weights_are_refused_before_a_server_starts(
    engine: EngineEnvironment, tmp_path: Path, home: Path, document: Document
) -> None:
    model = copy_of_the_model(tmp_path, document)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    done = run(home, COMMAND, "run", recipe(document, tmp_path), **of(engine))
    assert done.returncode == 3, done.stdout + done.stderr
    assert (
        f"error (the release's owner must act): check: the weights of {model} are not whole: model.safetensors" in done.stderr
    )
    assert not list(home.glob("runs/*/evidence/serve/server.log"))
    assert approvals(home) == []


@pytest.mark.usefixtures("prefect_server")
def test_a_lacking_tensor_is_refused_before_a_server_starts(
    engine: EngineEnvironment, tmp_path: Path, home: Path, document: Document
) -> None:
    """vLLM 0.32 serves such a model as if it were whole. The file itself is in order."""
    model, lacking = copy_of_the_model(tmp_path, document), "model.layers.1.mlp.up_proj.weight"
    drop_tensor(model / "model.safetensors", lacking)
    done = run(home, COMMAND, "run", recipe(document, tmp_path), **of(engine))
    assert done.returncode == 3, done.stdout + done.stderr
    told = f"error (the release's owner must act): check: the weights of {model} are not whole: no tensor gives {lacking}"
    assert told in done.stderr
    assert not list(home.glob("runs/*/evidence/serve/server.log"))
    assert approvals(home) == []


@pytest.mark.usefixtures("prefect_server")
def test_a_server_that_is_healthy_and_cannot_complete_is_not_served(
    engine: EngineEnvironment, tmp_path: Path, home: Path, document: Document
) -> None:
    """With heads of 16 the CPU engine starts, answers /health, and dies on its first completion."""
    model = copy_of_the_model(tmp_path, document)
    config = json.loads((model / "config.json").read_text())
    heads = {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 8}
    (model / "config.json").write_text(json.dumps(config | heads))
    document["variants"]["bf16"]["smoke_golden"] = None
    assert_not_served(run(home, COMMAND, "run", recipe(document, tmp_path), **of(engine)), home)


def copy_of_the_model(folder: Path, document: Document) -> Path:
    model = folder / "model"
    shutil.copytree(catalog_folder() / "reference" / "model", model)
    document["variants"]["bf16"]["model"] = str(model)
    return model


def assert_not_served(done: subprocess.CompletedProcess[str], home: Path) -> None:
    assert done.returncode == 3, done.stdout + done.stderr
    assert "error (the recipe's author must act): serve: " in done.stderr
    assert "  | " in done.stderr, "the last lines of the server's log are shown"
    assert approvals(home) == []
    assert processes_of(home) == []


def test_the_engine_that_ran_is_the_one_the_report_names(engine: EngineEnvironment) -> None:
    identity = engine.identity()
    assert identity.version == "0.32.0+cpu"
    assert identity.digest.startswith("sha256:")
    assert identity.packages["torch"] == "2.13.0+cpu"
