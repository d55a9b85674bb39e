"""Whole qualifications in a container, and what goes wrong in one: each failure in its own class, with nothing left behind."""

import ast
import hashlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.builders.worlds import world_of
from tests.docker_engine import Engine, push_extended, push_image
from tests.fakes import vllm as stand_in
from tests.live import driver
from tests.qualified import COMMAND, Qualified, furnished, run, undisturbed
from tests.recipes import Document, small, write
from vllm_qualify.approval.signing import PRIVATE_KEY, new_key, public_keys
from vllm_qualify.approval.verify import verify
from vllm_qualify.engine import image
from vllm_qualify.engine.provision import Launch, find_engines, provide, read_machine
from vllm_qualify.evidence.serving import serving
from vllm_qualify.evidence.stages.load import LOAD
from vllm_qualify.evidence.stages.stage import stage_folder
from vllm_qualify.plan.cells import plan_cells
from vllm_qualify.plan.choice import Choice
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.loading import catalog_folder, load_recipe

CELL = "reference/bf16/cpu/balanced"
QUESTIONS = 150

pytestmark = [pytest.mark.docker, pytest.mark.engine, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture(scope="session")
def approver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a key to sign approvals with; the public one is beside it."""
    path = tmp_path_factory.mktemp("key") / "approver.pem"
    new_key(path)
    return path


@pytest.fixture(scope="session")
def new_image(_docker_engine: Engine, cpu_image: str) -> Iterator[str]:
    """The real image with a layer more than the engine has, so that it has to be pulled. Its name with the tag."""
    name, _, tag = cpu_image.rpartition(":")
    registry, _, repository = name.partition("/")
    new_tag = f"{tag}-{time.time_ns()}"
    pinned = f"{name}@{push_extended(registry, repository, tag, new_tag)}"
    assert not is_in_engine(_docker_engine, pinned)
    yield f"{name}:{new_tag}"
    if is_in_engine(_docker_engine, pinned):
        _docker_engine.client().images.remove(pinned, force=True)


def is_in_engine(engine: Engine, pinned: str) -> bool:
    return any(pinned in kept.attrs["RepoDigests"] for kept in engine.client().images.list())


@pytest.fixture(scope="session")
def in_a_container(
    _docker_engine: Engine, new_image: str, approver: Path, tmp_path_factory: pytest.TempPathFactory
) -> Qualified:
    """The reference recipe by `--launcher docker`, pulled from the registry.

    The run becomes a baseline, so that a person has to approve it.
    """
    home = furnished(tmp_path_factory.mktemp("container"), tmp_path_factory)
    options = ("--launcher", "docker", "--image", new_image, "--establish-baseline")
    environment = {**_docker_engine.settings, f"{PRIVATE_KEY}_FILE": str(approver)}
    recipe = str(with_fewer_questions(home))
    qualified = Qualified(run(home, COMMAND, "run", recipe, *options, **environment), home, f"file://{home}/store")
    decision = ("approve", str(qualified.folder), "--by", "Ada", "--reason", "it passed every gate")
    approved = run(home, COMMAND, *decision, **environment)
    assert approved.returncode == 0, qualified.done.stderr + approved.stderr
    return qualified


def with_fewer_questions(folder: Path) -> Path:
    """The reference recipe as it is, but for how many questions it asks, and that its server is started once."""
    text = (catalog_folder() / "reference.yaml").read_text()
    assert text.count("num_questions: 500") == 1
    (folder / "reference").symlink_to(catalog_folder() / "reference")
    assert text.count("    startup_timeout_s: 300\n") == 1
    fewer = text.replace("num_questions: 500", f"num_questions: {QUESTIONS}")
    once = fewer.replace("    startup_timeout_s: 300\n", "    startup_timeout_s: 300\n    starts: 1\n")
    (folder / "reference.yaml").write_text(once)
    return folder / "reference.yaml"


def test_the_reference_model_is_approved_in_a_container(in_a_container: Qualified) -> None:
    done = in_a_container.done
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED  reference/bf16/cpu/balanced" in done.stdout
    assert {gate.verdict for gate in in_a_container.report.judgement.gates} == {"pass"}
    for expected in ("is now vllm/vllm-openai:deploy", "server starting: ", f"accuracy: {QUESTIONS} of {QUESTIONS} questions"):
        assert expected in done.stderr


def test_the_image_was_pulled_and_the_report_carries_its_digest_and_labels(
    in_a_container: Qualified, docker_engine: Engine, new_image: str
) -> None:
    assert in_a_container.report.plan.pulled_s is not None
    assert is_in_engine(docker_engine, image.resolve(new_image).pinned)
    engine = in_a_container.report.plan.cell.release.engine
    assert (engine.launcher, engine.digest) == ("docker", image.resolve(new_image).digest)
    assert engine.image is not None
    assert (engine.image.reference, engine.image.platform) == (new_image, "linux/amd64")
    assert engine.image.labels == docker_engine.client().images.get("vllm/vllm-openai:deploy").labels
    page = (in_a_container.folder / "report.html").read_text()
    for expected in (engine.digest, new_image, "label org.opencontainers.image.version", "v0.32.0"):
        assert expected in page


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


def test_the_approval_is_bound_to_the_digests_of_image_and_weights(in_a_container: Qualified, approver: Path) -> None:
    assert "becomes what later releases are compared with: a person decides" in in_a_container.done.stderr
    verified = verify(open_store(in_a_container.store), CELL, public_keys([Path(f"{approver}.pub")]), datetime.now(UTC))
    assert verified.run_id == in_a_container.report.run_id
    digests = {subject["name"]: subject["digest"] for subject in verified.statement["subject"]}
    engine = in_a_container.report.plan.cell.release.engine
    assert {"sha256": engine.digest.removeprefix("sha256:")} in digests.values()
    weights = catalog_folder() / "reference/model/model.safetensors"
    assert digests["./reference/model/model.safetensors"] == {"sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}


def test_the_docker_line_of_an_approval_serves_what_was_qualified(
    in_a_container: Qualified, approver: Path, docker_engine: Engine, home: Path
) -> None:
    get = ("approved", "get", CELL, "--format", "docker", "--store", in_a_container.store, "--public-key", f"{approver}.pub")
    line = run(home, COMMAND, *get).stdout
    engine = docker_engine.client()
    started = run(home, "sh", "-c", line, **docker_engine.settings)
    assert started.returncode == 0, started.stderr
    container = engine.containers.get(started.stdout.strip())
    try:
        # The smoke prompt gives the golden text, by the name and at the port that the line has.
        assert completion("http://127.0.0.1:8000", container) == in_a_container.report.plan.smoke_golden
        served = container.logs().decode()
    finally:
        container.remove(force=True)
    qualified = (in_a_container.folder / "evidence/serve/server.log").read_text()
    assert non_default(served) == non_default(qualified)


def completion(url: str, container: Any) -> str:
    """The text after the smoke prompt, as soon as the server gives one."""
    asked = load_recipe("reference").recipe.smoke
    body = {"model": "reference", "prompt": asked.prompt, "max_tokens": asked.max_tokens, "temperature": 0}
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        container.reload()
        assert container.status == "running", container.logs(tail=30).decode()
        try:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        except httpx.TransportError:
            time.sleep(0.5)  # it is still loading
            continue
        return str(answer.raise_for_status().json()["choices"][0]["text"])
    raise AssertionError(container.logs(tail=30).decode())


def non_default(log: str) -> dict[str, Any]:
    """What vLLM says of its own configuration, read from flags or from a file."""
    match = re.search(r"non-default args: (\{.*\})", log)
    assert match is not None, log[-2000:]
    options: dict[str, Any] = ast.literal_eval(match[1])
    return {name: value for name, value in options.items() if name not in ("config", "model_tag")}


def test_the_load_client_of_another_image_measures_the_same_server(
    docker_engine: Engine, cpu_image: str, tmp_path: Path, home: Path
) -> None:
    launched = Launch(launcher="docker", image=cpu_image, client_image=cpu_image)
    engines = find_engines(launched)
    provide(engines, print)
    loaded = load_recipe(str(write(small(tmp_path), tmp_path / "mine.yaml")))
    (plan,) = plan_cells(loaded, Choice(), engines, read_machine(engines.engine, "cpu"))
    evidence = home / "evidence"
    with serving(plan, stage_folder(evidence, "serve"), print) as served:
        stage = LOAD.run(world_of(served, plan, evidence))
        assert len(docker_engine.containers()) == 2, "the server's and the client's"
    assert docker_engine.containers() == []
    # 20 prompts are too few for the higher percentiles
    measured = [measurement for measurement in stage.measurements if not measurement.metric.endswith(("_p90_ms", "_p99_ms"))]
    assert [measurement for measurement in measured if undisturbed(measurement)] != []
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
        return run(self.home, *by, *self.command, *options)


@pytest.fixture
def attempt(docker_engine: Engine, cpu_image: str, tmp_path: Path, home: Path) -> Iterator[Attempt]:
    yield Attempt(tmp_path, home, cpu_image, small(tmp_path))
    assert_nothing_is_left(docker_engine, home)


@pytest.fixture(scope="session")
def stand_in_image(_docker_engine: Engine, cpu_image: str) -> str:
    """The real image, but for the command `vllm`: its Python and what that imports are the real ones."""
    name, _, tag = cpu_image.rpartition(":")
    registry, _, repository = name.partition("/")
    program = b"#!/opt/vllm/bin/python3\n" + Path(stand_in.__file__).read_bytes()
    push_extended(registry, repository, tag, f"{tag}-stand-in", {"opt/vllm/bin/vllm": program})
    return f"{name}:{tag}-stand-in"


@pytest.fixture
def stood_in(attempt: Attempt, stand_in_image: str) -> Attempt:
    """As `attempt`, of what does not depend on the server in the container."""
    attempt.document["variants"]["bf16"]["smoke_golden"] = stand_in.GOLDEN
    return replace(attempt, image=stand_in_image)


def assert_nothing_is_left(docker_engine: Engine, home: Path) -> None:
    assert docker_engine.containers() == [], "nothing is left running or stopped"
    assert not list((home / "store").glob("reports/**/manifest.json")), "nothing was published"


def assert_failed(done: subprocess.CompletedProcess[str], kind: str, who: str, exit_code: int = 3) -> None:
    output = done.stdout + done.stderr
    assert done.returncode == exit_code, output
    assert f"class: {kind};" in done.stderr, output
    assert f"error ({who} must act): " in done.stderr, output
    assert "Traceback" not in done.stderr, output


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
    """Asked in a container of its own while the server starts; each problem is named, of options alone and together."""
    unknown = {"no-such-option": 1, "max-num-seqs": 0}
    refusing = {"max-num-batched-tokens": 10, "max-num-seqs": 64}
    profiles = attempt.document["gpu_types"]["cpu"]["profiles"]
    profiles["balanced"]["server"] = unknown
    profiles["crowded"] = profiles["balanced"] | {"server": refusing}
    done = attempt.made()
    assert_failed(done, "recipe-drift", "the recipe's author")
    assert "vLLM 0.32.0+cpu has no option --no-such-option" in done.stderr
    assert "--max-num-seqs 0: 0 is less than the minimum of 1" in done.stderr
    assert "max_num_batched_tokens (10) must be greater than or equal to max_num_seqs (64)" in done.stderr
    assert not list(attempt.home.glob("runs/*/stages/*")), "nothing was measured"


def test_a_recipe_is_checked_against_an_image(docker_engine: Engine, cpu_image: str, home: Path) -> None:
    """Variants with weights of this machine, one with a draft model: each is asked about where a server would see them."""
    done = run(home, COMMAND, "recipe", "check", "reference", "--image", cpu_image)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "vLLM 0.32.0+cpu, 4 cells: fits\n"
    assert docker_engine.containers() == []


def test_a_container_that_exits(attempt: Attempt) -> None:
    model = attempt.folder / "model"
    shutil.copytree(catalog_folder() / "reference" / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    attempt.document["variants"]["bf16"]["model"] = str(model)
    assert_failed(attempt.made(), "incomplete-model", "the release's owner")


def test_a_container_that_never_gets_ready(stood_in: Attempt) -> None:
    stood_in.document["gpu_types"]["cpu"]["startup_timeout_s"] = 5
    stood_in.document["gpu_types"]["cpu"]["environment"]["TORCH_FAKE_VLLM"] = "hangs"
    assert_failed(stood_in.made(), "hung", "the release's owner")


def test_a_container_that_needs_more_memory_than_its_limit(attempt: Attempt) -> None:
    attempt.document["gpu_types"]["cpu"]["memory_limit_gib"] = 0.25
    assert_failed(attempt.made(), "out-of-memory", "the operator")


def test_a_port_that_is_taken(stood_in: Attempt) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = stood_in.made("--port", str(taken.getsockname()[1]))
    assert_failed(done, "port-in-use", "the operator")


def test_an_engine_that_is_stopped_in_the_middle_of_the_load_stage(stood_in: Attempt, docker_engine: Engine) -> None:
    with subprocess.Popen([COMMAND, *stood_in.command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: bool(log_of(stood_in.home, "load/metrics-1-before.txt")), process)
        docker_engine.stop()
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
            docker_engine.start()
    assert_failed(subprocess.CompletedProcess(process.args, process.returncode, out, err), "docker-gone", "the operator")
    assert "could not be removed" in err
    assert docker_engine.client().containers.list() == [], "an engine that stops ends its containers"
    cleaned = run(stood_in.home, COMMAND, "doctor", "--clean")
    assert "removed  vllm-qualify-" in cleaned.stdout


def log_of(home: Path, name: str) -> str:
    return "".join(path.read_text() for path in home.glob(f"runs/*/evidence/{name}"))


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[Any], within_s: float = 600) -> None:
    deadline = time.monotonic() + within_s
    while not happened():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_command_that_is_stopped_removes_its_container(attempt: Attempt, docker_engine: Engine) -> None:
    """By one signal; tests/live/test_faults.py has each."""
    with subprocess.Popen([COMMAND, *attempt.command], start_new_session=True, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: bool(docker_engine.containers()), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=90) == 143


def test_what_a_killed_command_left_is_removed_by_the_next_run(stood_in: Attempt, docker_engine: Engine) -> None:
    with subprocess.Popen([COMMAND, *stood_in.command], start_new_session=True, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: "INFO" in log_of(stood_in.home, "serve/server.log"), process)
        process.kill()
    # The server's, and that in which the engine was asked about the recipe, if that was not over yet.
    left = docker_engine.containers()
    (killed,) = stood_in.home.glob("runs/*")
    assert f"vllm-qualify-{killed.name}-server" in left
    stood_in.document["gpu_types"]["cpu"]["environment"]["TORCH_FAKE_VLLM"] = "dies"
    # The killed run holds this host's slot on the Prefect server for a minute more; here nobody is to wait for that.
    following = run(stood_in.home, COMMAND, *stood_in.command, VLLM_QUALIFY_HOST="another")
    for container in left:
        assert f"removed {container}, which run " in following.stderr
