"""Launchers: which options fit, which engine is used, and the machine read through it, here a real H200."""

from pathlib import Path

import pytest

from tests.builders.gpus import CAPTURED, H200, SMI
from tests.builders.server_plans import DIGEST, IMAGE, PROCESS
from tests.fakes.vllm import make_engine
from vllm_qualify.engine.containers.plan import ContainerPlan
from vllm_qualify.engine.environment import EngineEnvironment, EngineIdentity
from vllm_qualify.engine.gpu_reading import NVIDIA_SMI_QUERY, parse_nvidia_smi
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.provision import Engines, Launch, check_launch, find_engines, provide, read_machine
from vllm_qualify.engine.server import Engine
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.recipe.serving import EngineName

IN_DOCKER = Launch(launcher="docker", image=IMAGE.reference)
NO_GPU = HostError("Docker Engine has no access to GPUs", "install the toolkit", "check", kind="no-gpu-in-docker")


@pytest.mark.parametrize(
    ("launch", "option", "message"),
    [
        (Launch(launcher="docker"), "--image", "needs an image"),
        (Launch(launcher="docker", image=""), "--image", "needs an image"),
        (Launch(launcher="docker", client_image="x:1"), "--image", "needs an image"),
        (Launch(image="x:1"), "--image", "only containers are made from an image"),
        (Launch(client_image="x:1"), "--client-image", "only containers are made from an image"),
        (Launch(launcher="docker", image="VLLM openai:1"), "--image", "is not an image reference"),
        (Launch(launcher="docker", image="x:1", client_image="x"), "--client-image", "neither a tag nor a digest"),
    ],
)
def test_options_that_do_not_fit_are_reported_before_docker_is_asked(
    launch: Launch, option: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent")
    for check in (check_launch, find_engines):
        with pytest.raises(CallerError, match=message) as raised:
            check(launch)
        assert raised.value.place == option


# --- which engine


def test_the_process_launcher_takes_this_machines_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = make_engine(tmp_path / "engine")
    monkeypatch.setenv("VLLM_QUALIFY_ENGINE", str(folder))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent")
    engines = find_engines(Launch())
    assert engines == Engines(engine=EngineEnvironment(python=folder / "bin" / "python"))
    provide(engines, lambda line: pytest.fail(line))


def test_a_machine_without_an_engine_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_QUALIFY_ENGINE", str(tmp_path))
    with pytest.raises(HostError, match=f"no vLLM found in {tmp_path}"):
        find_engines(Launch())


@pytest.mark.parametrize("address", ["tcp://10.1.2.3:2375", "ssh://user@host", "http://127.0.0.1:2375"])
def test_another_machines_docker_is_refused_with_the_reason(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", address)
    with pytest.raises(HostError) as raised:
        find_engines(IN_DOCKER)
    assert raised.value.problem == f"DOCKER_HOST is {address}, and files are mounted and ports published on this machine"
    assert "on the machine of that Docker Engine" in raised.value.remedy
    assert (raised.value.place, raised.value.retry) == ("check", False)


@pytest.mark.parametrize(("place", "client"), [("none", None), ("no socket", "vllm/vllm-openai:v0.31.0")])
def test_a_docker_engine_that_does_not_answer_is_named_with_its_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, client: str | None
) -> None:
    (tmp_path / "no socket").write_text("")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/{place}")
    with pytest.raises(HostError, match=f"no Docker Engine answers at unix://{tmp_path}/{place}") as raised:
        find_engines(IN_DOCKER.model_copy(update={"client_image": client}))
    assert (raised.value.kind, raised.value.place, raised.value.retry) == ("docker-gone", "check", True)


@pytest.mark.parametrize(("kind", "tagged"), [("vllm", True), ("tensorrt-llm", False)])
def test_only_a_vllm_becomes_the_image_to_deploy(monkeypatch: pytest.MonkeyPatch, kind: EngineName, tagged: bool) -> None:
    tags: list[EngineImage] = []
    identity = EngineIdentity(kind=kind, launcher="docker", version="1", digest=DIGEST, python="3.12", packages={})
    monkeypatch.setattr("vllm_qualify.engine.image.pull", lambda *_: None)

    def tag(image: EngineImage) -> str:
        tags.append(image)
        return "vllm/vllm-openai:deploy"

    monkeypatch.setattr("vllm_qualify.engine.image.tag_for_deployment", tag)
    monkeypatch.setattr(EngineImage, "identity", lambda _: identity)
    messages, _ = provide(Engines(engine=IMAGE), lambda _: None)
    assert tags == ([IMAGE] if tagged else [])
    assert len(messages) == len(tags)


# --- the machine


class Containers:
    """Short containers: what was to run in them; each prints `answer`, or is not started."""

    def __init__(self, answer: str | Exception) -> None:
        self.answer = answer
        self.started: list[ContainerPlan] = []

    def run_once(self, plan: ContainerPlan, place: str, accepted: tuple[int, ...]) -> str:
        assert place == "check"
        # nvidia-smi without a device ends with 6
        assert 6 in accepted
        self.started.append(plan)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


IN_CONTAINER = H200.model_copy(update={"confined": True, "isolated": True})


@pytest.fixture
def containers(monkeypatch: pytest.MonkeyPatch) -> Containers:
    """On a machine without NVML."""
    stand_in = Containers(SMI)
    monkeypatch.setattr("vllm_qualify.engine.launchers.docker.run_once", stand_in.run_once)
    monkeypatch.setattr("vllm_qualify.engine.gpu.read_nvml", lambda: None)
    return stand_in


@pytest.mark.parametrize("wanted", [None, "h200", "h100"])
def test_a_host_with_only_the_toolkit_is_read_in_a_container_of_the_image(containers: Containers, wanted: str | None) -> None:
    """Another type than the wanted one is reported as it is, as with NVML."""
    assert read_machine(IMAGE, wanted) == IN_CONTAINER
    (plan,) = containers.started
    assert (plan.image, plan.platform, plan.gpus) == (f"vllm/vllm-openai@{DIGEST}", "linux/amd64", "all")
    assert [plan.entrypoint, *plan.arguments] == ["nvidia-smi", *NVIDIA_SMI_QUERY]


@pytest.mark.parametrize(("engine", "wanted"), [(IMAGE, "cpu"), (PROCESS, None), (PROCESS, "h200")])
def test_a_cpu_that_is_wanted_a_process_and_a_host_with_nvml_start_no_container(
    containers: Containers, engine: Engine, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_machine(engine, wanted).gpu_type == "cpu"
    monkeypatch.setattr("vllm_qualify.engine.gpu.read_nvml", lambda: parse_nvidia_smi(SMI))
    assert read_machine(IMAGE, None) == IN_CONTAINER
    assert containers.started == []


@pytest.mark.parametrize("answer", [(CAPTURED / "no-devices.txt").read_text(), NO_GPU], ids=["no device", "no toolkit"])
@pytest.mark.parametrize("wanted", [None, "h200"])
def test_a_docker_engine_without_gpus_is_a_cpu_machine(
    containers: Containers, answer: str | Exception, wanted: str | None
) -> None:
    containers.answer = answer
    assert read_machine(IMAGE, wanted).gpu_type == "cpu"
    assert len(containers.started) == 1


@pytest.mark.parametrize("kind", ["docker-gone", "driver-too-old", ""])
def test_any_other_error_makes_no_cpu_machine(containers: Containers, kind: str) -> None:
    """Else a GPU host would measure its CPU, and say so to nobody."""
    containers.answer = HostError("it broke", "mend it", "check", kind=kind)
    with pytest.raises(HostError) as raised:
        read_machine(IMAGE, None)
    assert raised.value is containers.answer


def test_what_nvidia_smi_does_not_tell_in_a_container_is_not_guessed(containers: Containers) -> None:
    containers.answer = (CAPTURED / "unknown-field.txt").read_text()
    with pytest.raises(HostError, match="nvidia-smi did not report"):
        read_machine(IMAGE, None)
