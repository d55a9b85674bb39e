"""Whole qualifications in a container, and what goes wrong in one: each failure in its own class, with nothing left behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.docker_engine import Engine, push_image
from tests.live import driver
from tests.live.conftest import COMMAND, Qualified, run
from tests.recipes import Document, small, write
from vllm_qualify.engine import image
from vllm_qualify.engine.launch import Launch, find_engines, provide, read_machine
from vllm_qualify.engine.plan import Choice, plan_cells
from vllm_qualify.engine.server import serve
from vllm_qualify.evidence import stages
from vllm_qualify.recipe.loading import catalog_folder, load_recipe

pytestmark = [pytest.mark.docker, pytest.mark.engine, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture(scope="session")
def in_a_container(_docker_engine: Engine, cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Qualified:
    """The reference recipe by `--launcher docker`, pulled from the registry: what lay in the engine is removed before."""
    home = tmp_path_factory.mktemp("container")
    client = _docker_engine.client()
    for found in client.images.list(name=cpu_image.rpartition(":")[0]):
        client.images.remove(found.id, force=True)
    options = ("--launcher", "docker", "--image", cpu_image)
    return Qualified(run(home, COMMAND, "run", "reference", *options, **_docker_engine.settings), home, f"file://{home}/store")


def test_the_reference_model_is_approved_in_a_container(in_a_container: Qualified) -> None:
    done = in_a_container.done
    assert done.returncode == 0, done.stdout + done.stderr
    assert "APPROVED  reference/bf16/cpu/balanced" in done.stdout
    assert {gate.verdict for gate in in_a_container.report.judgement.gates} == {"pass"}
    for told in ("pulling: layer", "is now vllm/vllm-openai:deploy", "server starting: ", "accuracy: 500 of 500 questions"):
        assert told in done.stderr


def test_the_report_carries_the_digest_and_the_labels_of_the_image(
    in_a_container: Qualified, docker_engine: Engine, cpu_image: str
) -> None:
    found = in_a_container.report.plan.cell.release.engine
    assert found.launcher == "docker"
    assert found.digest == image.resolve(cpu_image).digest
    assert found.image is not None
    assert (found.image.reference, found.image.platform) == (cpu_image, "linux/amd64")
    assert found.image.labels == docker_engine.client().images.get("vllm/vllm-openai:deploy").labels
    page = (in_a_container.folder / "report.html").read_text()
    for told in (found.digest, cpu_image, "label org.opencontainers.image.version", "v0.32.0"):
        assert told in page


def test_the_tools_ran_where_the_report_says(in_a_container: Qualified) -> None:
    stages = {stage.stage: stage for stage in in_a_container.report.stages}
    (served,) = stages["serve"].commands
    assert served[:2] == ["docker", "run"]
    assert f"@{in_a_container.report.plan.cell.release.engine.digest}" in " ".join(served)
    assert all(command[:2] == ["docker", "exec"] for command in stages["load"].commands)
    image_under_test = in_a_container.report.plan.cell.release.engine.image
    assert image_under_test is not None
    assert stages["load"].tools["client"] == image_under_test.reference
    assert "server.log" in " ".join(file.path for file in stages["serve"].files)


def test_no_container_is_left(in_a_container: Qualified, docker_engine: Engine) -> None:
    assert in_a_container.done.returncode == 0
    assert docker_engine.containers() == []


def test_the_load_client_of_another_image_measures_the_same_server(
    docker_engine: Engine, cpu_image: str, tmp_path: Path, home: Path
) -> None:
    launched = Launch(launcher="docker", image=cpu_image, client_image=cpu_image)
    engines = find_engines(launched)
    provide(engines, print)
    loaded = load_recipe(str(write(small(tmp_path), tmp_path / "mine.yaml")))
    (plan,) = plan_cells(loaded, Choice(), engines, read_machine(engines.engine, "cpu"))
    evidence = home / "evidence"
    with serve(plan.server, stages.stage_folder(evidence, "serve"), print, labels=plan.labels) as server:
        stage = stages.load_stage(server, plan, evidence, lambda *_: None)
        assert len(docker_engine.containers()) == 1, "the client's container is gone with its stage"
    assert docker_engine.containers() == []
    assert {found.invalid_because for found in stage.measurements} == {None}
    assert stage.tools == {"vllm bench serve": "0.32.0+cpu", "client": cpu_image}
    assert plan.client is not None
    assert plan.client.digest == plan.cell.release.engine.digest


# --- what goes wrong


@dataclass(frozen=True)
class Attempt:
    """A run of `vllm-qualify run RECIPE --launcher docker --image IMAGE` that is to fail."""

    folder: Path
    home: Path
    image: str
    document: Document

    @property
    def command(self) -> list[str]:
        recipe = str(write(self.document, self.folder / "mine.yaml"))
        return ["run", recipe, "--launcher", "docker", "--image", self.image]

    def made(self, *options: str, by: tuple[str, ...] = (COMMAND,)) -> subprocess.CompletedProcess[str]:
        return run(self.home, *by, *self.command, *options, PREFECT_API_URL=os.environ["PREFECT_API_URL"])


@pytest.fixture
def attempt(docker_engine: Engine, cpu_image: str, tmp_path: Path, home: Path) -> Iterator[Attempt]:
    yield Attempt(tmp_path, home, cpu_image, small(tmp_path))
    assert docker_engine.containers() == [], "nothing is left running or stopped"
    assert not list((home / "store").glob("reports/**/manifest.json")), "nothing was published"


def assert_failed(done: subprocess.CompletedProcess[str], kind: str, who: str, exit_code: int = 3) -> None:
    told = done.stdout + done.stderr
    assert done.returncode == exit_code, told
    assert f"class: {kind};" in done.stderr, told
    assert f"error ({who} must act): " in done.stderr, told
    assert "Traceback" not in done.stderr, told


def test_an_image_that_is_missing(attempt: Attempt) -> None:
    done = attempt.made("--image", attempt.image + "-not")
    assert_failed(done, "image-missing", "the caller", exit_code=2)


def test_an_image_for_another_platform(attempt: Attempt, docker_engine: Engine) -> None:
    push_image(docker_engine.registry, "arm", "v1", architecture="arm64")
    assert_failed(attempt.made("--image", f"{docker_engine.registry}/arm:v1"), "wrong-platform", "the release's owner")


def test_a_tag_that_moves_between_its_resolution_and_the_pull(attempt: Attempt, docker_engine: Engine) -> None:
    moving = f"{docker_engine.registry}/moving:v1"
    push_image(docker_engine.registry, "moving", "v1", content=str(time.time_ns()))
    done = attempt.made("--image", moving, by=(sys.executable, driver.__file__, "before:provide"))
    assert_failed(done, "tag-moved", "the release's owner")


def test_an_image_that_does_not_take_what_the_recipe_says(attempt: Attempt) -> None:
    """Asked in a container of its own, before a server is started; each problem is named."""
    attempt.document["gpu_types"]["cpu"]["server"] |= {"no-such-option": 1, "max-num-seqs": 0}
    attempt.document["gpu_types"]["cpu"]["profiles"]["balanced"]["server"] = {}
    done = attempt.made()
    assert_failed(done, "recipe-drift", "the recipe's author")
    assert "vLLM 0.32.0+cpu has no option --no-such-option" in done.stderr
    assert "--max-num-seqs 0: 0 is less than the minimum of 1" in done.stderr
    assert not list(attempt.home.glob("runs/*"))


def test_a_recipe_is_checked_against_an_image(docker_engine: Engine, cpu_image: str, home: Path) -> None:
    """Two variants with weights of this machine: each is asked about where a server of it would see them."""
    done = run(home, COMMAND, "recipe", "check", "reference", "--image", cpu_image)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "vLLM 0.32.0+cpu, 2 cells: fits\n"
    assert docker_engine.containers() == []


def test_an_image_in_which_options_refuse_each_other(attempt: Attempt) -> None:
    attempt.document["gpu_types"]["cpu"]["profiles"]["balanced"]["server"] = {"max-num-batched-tokens": 10, "max-num-seqs": 64}
    done = attempt.made()
    assert_failed(done, "recipe-drift", "the recipe's author")
    assert "max_num_batched_tokens (10) must be greater than or equal to max_num_seqs (64)" in done.stderr


def test_a_container_that_exits(attempt: Attempt) -> None:
    model = attempt.folder / "model"
    shutil.copytree(catalog_folder() / "reference" / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    attempt.document["variants"]["bf16"]["model"] = str(model)
    assert_failed(attempt.made(), "incomplete-model", "the release's owner")


def test_a_container_that_never_gets_ready(attempt: Attempt) -> None:
    attempt.document["gpu_types"]["cpu"]["startup_timeout_s"] = 10
    assert_failed(attempt.made(), "hung", "the release's owner")


def test_a_container_that_needs_more_memory_than_its_limit(attempt: Attempt) -> None:
    attempt.document["gpu_types"]["cpu"]["memory_limit_gib"] = 0.25
    assert_failed(attempt.made(), "out-of-memory", "the operator")


def test_a_port_that_is_taken(attempt: Attempt) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = attempt.made("--port", str(taken.getsockname()[1]))
    assert_failed(done, "port-in-use", "the operator")


def test_an_engine_that_is_stopped_in_the_middle_of_the_load_stage(attempt: Attempt, docker_engine: Engine) -> None:
    with subprocess.Popen([COMMAND, *attempt.command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: bool(log_of(attempt.home, "load/bench-1.log")), process)
        docker_engine.stop()
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
            docker_engine.start()
    assert_failed(subprocess.CompletedProcess(process.args, process.returncode, out, err), "docker-gone", "the operator")
    assert "could not be removed" in err
    assert docker_engine.client().containers.list() == [], "an engine that stops ends its containers"
    cleaned = run(attempt.home, COMMAND, "doctor", "--clean")
    assert "removed  vllm-qualify-" in cleaned.stdout


def log_of(home: Path, name: str) -> str:
    return "".join(path.read_text() for path in home.glob(f"runs/*/evidence/{name}"))


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[Any], within_s: float = 240) -> None:
    deadline = time.monotonic() + within_s
    while not happened():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_stopped_removes_its_container(
    attempt: Attempt, docker_engine: Engine, number: signal.Signals, code: int
) -> None:
    with subprocess.Popen([COMMAND, *attempt.command], start_new_session=True, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: bool(docker_engine.containers()), process)
        process.send_signal(number)
        assert process.wait(timeout=90) == code


def test_what_a_killed_command_left_is_removed_by_the_next_run(attempt: Attempt, docker_engine: Engine) -> None:
    with subprocess.Popen([COMMAND, *attempt.command], start_new_session=True, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: "INFO" in log_of(attempt.home, "serve/server.log"), process)
        process.kill()
    (left,) = docker_engine.containers()
    attempt.document["gpu_types"]["cpu"]["startup_timeout_s"] = 1
    following = attempt.made()
    assert f"removed {left}, which run " in following.stderr
