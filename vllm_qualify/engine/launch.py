"""How a release's engine is launched: as a process or from an image; found, provided, and the machine read through it."""

from collections.abc import Callable
from typing import NamedTuple

from vllm_qualify.engine import image
from vllm_qualify.engine.container import ContainerPlan, run_once
from vllm_qualify.engine.docker_host import platform_here
from vllm_qualify.engine.environment import EngineIdentity, Launcher, find_engine
from vllm_qualify.engine.gpu import NVIDIA_SMI_QUERY, Fingerprint, detect, fingerprint_of, parse_nvidia_smi
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.engine.server import Engine
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.recipe.serving import VLLM, EngineName
from vllm_qualify.recipe.values import Frozen

# What nvidia-smi ends with when it has said something for its parser: a table, a wrong query, no device.
SMI_TELLS = (0, 2, 6)


class Launch(Frozen):
    """What the caller wants: the launcher, and for Docker the image of the server and, if another one, of the load client."""

    launcher: Launcher = "process"
    image: str | None = None
    client_image: str | None = None


class Engines(Frozen):
    """The engine under test, and the image of the load client where it is another one."""

    engine: Engine
    client: EngineImage | None = None


def check_launch(launch: Launch) -> None:
    """Raises CallerError if launcher and images do not fit, or a name is none."""
    if launch.launcher == "docker" and not launch.image:
        raise CallerError("--launcher docker needs an image", "give --image, like vllm/vllm-openai:v0.32.0", "--image")
    for option, given in (("--image", launch.image), ("--client-image", launch.client_image)):
        if given and launch.launcher != "docker":
            raise CallerError("only containers are made from an image", "add --launcher docker, or leave it out", option)
        if given:
            image.parse_reference(given, platform_here(), option)


def check_kind(name: EngineName, launcher: Launcher, has_client_image: bool) -> None:
    """Raises CallerError if a variant for this kind of engine cannot be launched so."""
    kind = KINDS[name]
    if launcher not in kind.launchers:
        remedy = f"add --launcher docker --image, like {kind.example_image}"
        raise CallerError(f"{kind.title} is served from an image only", remedy, "--launcher")
    if not (kind.has_client or has_client_image):
        problem = f"the load is made by vLLM's `vllm bench serve`, which no image of {kind.title} has"
        raise CallerError(problem, f"add --client-image, like {KINDS[VLLM].example_image}", "--client-image")


def find_engines(launch: Launch) -> Engines:
    """The engine of this machine, or the images by digest. Nothing is pulled.

    Raises:
        CallerError: the options do not fit, or a registry has no such image.
        HostError: no engine environment, no Docker Engine, no answer of a registry, or it asks for a login.
        ReleaseError: a tag that moved, or an image for another platform.
    """
    check_launch(launch)
    if not launch.image:
        return Engines(engine=find_engine())
    client = image.resolve(launch.client_image, "--client-image") if launch.client_image else None
    return Engines(engine=image.resolve(launch.image), client=client)


class Provided(NamedTuple):
    """What is to be told of the engines, and how long the pull of the engine's image took; None without one."""

    told: list[str]
    pulled_s: float | None


def provide(engines: Engines, progress: Callable[[str], None]) -> Provided:
    """Pull and verify what is not here yet; a vLLM image under test becomes `vllm/vllm-openai:deploy`.

    Raises as `image.pull` and `EngineImage.identity`. What is to be told is so whatever `progress` left out.
    """
    told, pulled_s = [], None
    if isinstance(engines.engine, EngineImage):
        pulled_s = image.pull(engines.engine, progress)
        if engines.engine.identity().kind == VLLM:
            told.append(f"{engines.engine.pinned} is now {image.tag_for_deployment(engines.engine)}")
    if engines.client is not None:
        image.pull(engines.client, progress)
        told.append(f"{engines.client.pinned} is the load client's")
    return Provided(told, pulled_s)


def client_identity(engines: Engines) -> EngineIdentity | None:
    return engines.client.identity() if engines.client else None


def read_machine(engine: Engine, wanted: str | None) -> Fingerprint:
    """The machine that the engine runs on: by NVML here, else by `nvidia-smi` in a container of the image, else its CPU.

    Raises:
        HostError: as `gpu.fingerprint_of`, or Docker Engine does not answer.
    """
    found = detect(wanted)
    if wanted == "cpu" or found.gpu_type != "cpu" or not isinstance(engine, EngineImage):
        return found
    told = _nvidia_smi(engine)
    return found if told is None else fingerprint_of(parse_nvidia_smi(told), wanted)


def _nvidia_smi(engine: EngineImage) -> str | None:
    """None where Docker Engine has no GPU to give."""
    plan = ContainerPlan(
        image=engine.pinned, platform=engine.platform, entrypoint="nvidia-smi", arguments=NVIDIA_SMI_QUERY, gpus="all"
    )
    try:
        return run_once(plan, "check", SMI_TELLS)
    except HostError as error:
        if error.kind == "no-gpu-in-docker":
            return None
        raise
