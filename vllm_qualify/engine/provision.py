"""A release's engine, as a process or from an image: find it, provide it, and read its machine."""

from collections.abc import Callable
from typing import NamedTuple

from vllm_qualify.engine import image
from vllm_qualify.engine.containers.host import platform_here
from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.launchers import LauncherName
from vllm_qualify.engine.launchers.registry import LAUNCHERS, launcher_of
from vllm_qualify.engine.server import Engine
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.serving import VLLM, EngineName
from vllm_qualify.recipe.values import Frozen


class Launch(Frozen):
    """What the caller wants: the launcher, and for Docker the server's image and, if it is another one, the load client's."""

    launcher: LauncherName = "process"
    image: str | None = None
    client_image: str | None = None


class Engines(Frozen):
    """The engine under test, and the image of the load client if it is another one."""

    engine: Engine
    client: EngineImage | None = None


def check_launch(launch: Launch) -> None:
    """Raises CallerError if launcher and images do not fit, or a name is not an image reference."""
    from_image = LAUNCHERS[launch.launcher].from_image
    if from_image and not launch.image:
        problem = f"--launcher {launch.launcher} needs an image"
        raise CallerError(problem, "give --image, like vllm/vllm-openai:v0.32.0", "--image")
    for option, given in (("--image", launch.image), ("--client-image", launch.client_image)):
        if given and not from_image:
            raise CallerError("only containers are made from an image", "add --launcher docker, or leave it out", option)
        if given:
            image.parse_reference(given, platform_here(), option)


def check_kind(name: EngineName, launcher: LauncherName, has_client_image: bool) -> None:
    """Raises CallerError if a variant for this kind of engine cannot be launched in this way."""
    kind = KINDS[name]
    if kind.needs_image and not LAUNCHERS[launcher].from_image:
        remedy = f"add --launcher docker --image, like {kind.example_image}"
        raise CallerError(f"{kind.title} is served from an image only", remedy, "--launcher")
    if not (kind.has_client or has_client_image):
        problem = f"the load is made by vLLM's `vllm bench serve`, which no image of {kind.title} has"
        raise CallerError(problem, f"add --client-image, like {KINDS[VLLM].example_image}", "--client-image")


def find_engines(launch: Launch) -> Engines:
    """The engine of this machine, or the images by digest. Nothing is pulled.

    Raises CallerError if the options do not fit, HostError if there is no engine environment, and as `image.resolve`.
    """
    check_launch(launch)
    launcher = LAUNCHERS[launch.launcher]
    engine = launcher.find(launch.image, "--image")
    client = launcher.find(launch.client_image, "--client-image") if launch.client_image else None
    assert client is None or isinstance(client, EngineImage)  # noqa: S101  (an image was named)
    return Engines(engine=engine, client=client)


class Provided(NamedTuple):
    """Messages about the engines, and how long the pull of the engine's image took; None without a pull."""

    messages: list[str]
    pulled_s: float | None


def provide(engines: Engines, progress: Callable[[str], None]) -> Provided:
    """Pull and verify what is not here yet; a vLLM image under test becomes `vllm/vllm-openai:deploy`.

    The returned messages are complete, whatever `progress` left out. Raises HostError if Docker Engine does not answer, and
    ReleaseError if the image is not what its name says, or contains no engine.
    """
    launcher, lines = launcher_of(engines.engine), []
    pulled_s = launcher.pull(engines.engine, progress)
    if isinstance(engines.engine, EngineImage) and (name := launcher.tag_for_deployment(engines.engine)):
        lines.append(f"{engines.engine.pinned} is now {name}")
    if engines.client is not None:
        launcher.pull(engines.client, progress)
        lines.append(f"{engines.client.pinned} is the load client's")
    return Provided(lines, pulled_s)


def identity_of(engine: Engine) -> EngineIdentity:
    """What is in the engine, which must be here already. Raises HostError, ReleaseError."""
    return launcher_of(engine).identity(engine)


def read_machine(engine: Engine, wanted: str | None) -> Fingerprint:
    """The machine that the engine runs on. Raises HostError, also if its GPUs do not make one fingerprint."""
    return launcher_of(engine).machine(engine, wanted)


def left_behind(launcher: LauncherName) -> list[str]:
    """Remove what killed runs left running. Returns a message for each. Raises HostError."""
    removed = LAUNCHERS[launcher].remove_leftovers()
    return [f"removed {each.name}, which run {each.run or 'unknown'} had left behind" for each in removed]
