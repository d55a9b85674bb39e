"""An engine in a Docker image: resolve its tag to a digest once, pull it by that digest, verify, tag and identify it."""

import inspect
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_qualify.engine import installed
from vllm_qualify.engine.containers.host import docker_host, engine_message, platform_of
from vllm_qualify.engine.containers.plan import ContainerPlan
from vllm_qualify.engine.containers.run import COMMAND_FAILED, run_once
from vllm_qualify.engine.environment import PACKAGES, EngineIdentity, ImageIdentity
from vllm_qualify.engine.failure.docker import NO_VLLM, classify_answer
from vllm_qualify.engine.kinds.registry import KINDS, kind_in
from vllm_qualify.engine.launchers import ImageLauncherName
from vllm_qualify.errors import CallerError, HostError, ReleaseError
from vllm_qualify.lazy import Lazy
from vllm_qualify.recipe.values import Frozen

if TYPE_CHECKING:
    import docker
else:
    docker = Lazy("docker")

DEPLOY_REPOSITORY, DEPLOY_TAG = "vllm/vllm-openai", "deploy"
CHECK, PULL = "check", "pull"
DIGEST = r"sha256:[0-9a-f]{64}"
_PART = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?P<repository>(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?{_PART}(?:/{_PART})*)"
    rf"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}}))?(?:@(?P<digest>{DIGEST}))?"
)


class EngineImage(Frozen):
    """An image by name. With a digest it is one fixed image; only then may it be run.

    `platform` selects the part of a multi-platform image, such as `linux/amd64`.
    """

    launcher: ImageLauncherName = "docker"
    repository: str
    tag: str | None
    digest: str | None
    platform: str

    @property
    def reference(self) -> str:
        """The name for people: with the tag if there is one."""
        return f"{self.repository}:{self.tag}" if self.tag else f"{self.repository}@{self.digest}"

    @property
    def pinned(self) -> str:
        """The name for Docker: with the digest as soon as it is known."""
        return f"{self.repository}@{self.digest}" if self.digest else self.reference

    def identity(self) -> EngineIdentity:
        """What is in the pulled image, as its own Python reports it. Raises ReleaseError if that is no engine, HostError."""
        with docker_host(CHECK) as host:
            about = _inspect_image(host, self)
        probed = _run_probe(self)
        kind = kind_in(probed["packages"])
        if kind is None:
            raise _no_engine_error(self, f"its Python has no {' and no '.join(kind.title for kind in KINDS.values())}")
        return EngineIdentity(
            kind=kind.name,
            launcher=self.launcher,
            version=probed["packages"][kind.package],
            digest=str(self.digest),
            python=probed["python"],
            packages=probed["packages"],
            image=ImageIdentity(
                reference=self.reference,
                platform=self.platform,
                image_id=about["Id"],
                created=about.get("Created") or "",
                labels=about["Config"].get("Labels") or {},
            ),
        )


def parse_reference(text: str, platform: str, option: str = "--image") -> EngineImage:
    """Parse `repository:tag`, `repository@sha256:…` or both. Raises CallerError."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise CallerError(f"'{text}' is not an image reference", "write it like vllm/vllm-openai:v0.32.0", option)
    if not (match["tag"] or match["digest"]):
        remedy = "name a version or a digest: what `latest` names changes"
        raise CallerError(f"'{text}' has neither a tag nor a digest", remedy, option)
    return EngineImage(**match.groupdict(), platform=platform)


def resolve(text: str, option: str = "--image") -> EngineImage:
    """The image that `text` means now, by digest, for this machine's platform.

    A tag is looked up in its registry, with the credentials of Docker's own configuration. A digest is looked up only if it is
    not here yet. Raises CallerError if the reference is wrong or the registry does not have it, ReleaseError if the tag is not
    at the digest that is given with it or the image is not made for this platform, and HostError if none answers, or the
    registry asks for a login.
    """
    with docker_host(CHECK) as host:
        image = parse_reference(text, platform_of(host), option)
        if not image.tag and _is_here(host, image):
            return image
        return _resolve_digest(host, image, option, CHECK)


def _resolve_digest(host: "docker.DockerClient", image: EngineImage, option: str, stage: str) -> EngineImage:
    try:
        distribution: dict[str, Any] = host.api.inspect_distribution(image.reference)
    except docker.errors.APIError as error:
        raise classify_answer(engine_message(error), image.reference, option, stage) from error
    digest = str(distribution["Descriptor"]["digest"])
    if image.digest not in (None, digest):
        problem = f"the tag {image.reference} moved: it was at {image.digest} and is now at {digest}"
        remedy = "qualify the image that the tag has now, or name the old one by its digest alone"
        raise ReleaseError(problem, remedy, stage, kind="tag-moved")
    listed = {f"{entry.get('os')}/{entry.get('architecture')}" for entry in distribution.get("Platforms") or []}
    # Attestations have the platform `unknown`. If a registry lists no platforms, the pull decides.
    _check_platforms(image, listed - {"unknown/unknown", "/", "None/None"} or {image.platform}, stage)
    return image.model_copy(update={"digest": digest})


def _check_platforms(image: EngineImage, platforms: set[str], stage: str) -> None:
    if image.platform not in platforms:
        problem = f"{image.reference} is made for {', '.join(sorted(platforms))}, and this machine is {image.platform}"
        remedy = "name an image for this platform, or qualify on a machine of the image's"
        raise ReleaseError(problem, remedy, stage, kind="wrong-platform")


def pull(image: EngineImage, progress: Callable[[str], None]) -> float | None:
    """Pull the image by its digest, unless it is here, and verify it. Returns the seconds of the pull; None without one.

    Raises as `resolve`; also HostError if the disk is full, and ReleaseError if another image came, or the tag moved meanwhile.
    """
    with docker_host(PULL) as host:
        if image.tag:
            _resolve_digest(host, image, "--image", PULL)
        began, pulled_s = time.monotonic(), None
        if not _is_here(host, image):
            _pull_layers(host, image, progress)
            pulled_s = time.monotonic() - began
        _verify_image(host, image)
    return pulled_s


def tag_for_deployment(image: EngineImage) -> str:
    """Tag a pulled image `vllm/vllm-openai:deploy`, and return that name. Raises HostError."""
    with docker_host(PULL) as host:
        host.api.tag(image.pinned, DEPLOY_REPOSITORY, DEPLOY_TAG)
    return f"{DEPLOY_REPOSITORY}:{DEPLOY_TAG}"


def _pull_layers(host: "docker.DockerClient", image: EngineImage, progress: Callable[[str], None]) -> None:
    layers = Layers()
    try:
        for event in host.api.pull(image.repository, tag=image.digest, platform=image.platform, stream=True, decode=True):
            if "error" in event:
                raise classify_answer(str(event["error"]), image.pinned, "--image", PULL)
            progress(layers.describe_after(event))
    except docker.errors.APIError as error:
        raise classify_answer(engine_message(error), image.pinned, "--image", PULL) from error


class Layers:
    """The state of a pull, layer by layer, as one line."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[str, int, int]] = {}

    def describe_after(self, event: dict[str, Any]) -> str:
        """The line after one event of Docker's pull stream."""
        detail, layer = event.get("progressDetail"), event.get("id")
        status = str(event.get("status", "")).strip()
        if layer is None or detail is None:
            return status
        current, total = int(detail.get("current") or 0), int(detail.get("total") or 0)
        self._layers[layer] = (status, current, total)
        done = sum(state in ("Pull complete", "Already exists") for state, _, _ in self._layers.values())
        of = f" {current / 2**20:.1f} of {total / 2**20:.1f} MiB" if total else ""
        return f"pulling: layer {layer} {status.lower()}{of}; {done} of {len(self._layers)} layers done"


def _verify_image(host: "docker.DockerClient", image: EngineImage) -> None:
    about = _inspect_image(host, image)
    digests = about.get("RepoDigests") or []
    if not any(str(entry).endswith(f"@{image.digest}") for entry in digests):
        problem = f"{image.pinned} came with the digests {', '.join(digests) or 'none'}"
        raise ReleaseError(problem, "do not use this registry's copy; ask its owner", PULL, kind="digest-mismatch")
    _check_platforms(image, {f"{about['Os']}/{about['Architecture']}"}, PULL)


def _is_here(host: "docker.DockerClient", image: EngineImage) -> bool:
    with suppress(docker.errors.ImageNotFound):
        about: dict[str, Any] = host.api.inspect_image(image.pinned)
        return f"{about['Os']}/{about['Architecture']}" == image.platform
    return False


def _inspect_image(host: "docker.DockerClient", image: EngineImage) -> dict[str, Any]:
    try:
        about: dict[str, Any] = host.api.inspect_image(image.pinned)
    except docker.errors.ImageNotFound as error:
        problem = f"the image {image.pinned} is not on this machine"
        raise HostError(problem, "run the qualification again, which pulls it", CHECK, kind="image-missing") from error
    return about


def _run_probe(image: EngineImage) -> dict[str, Any]:
    # Its files need no hash: the image's digest covers them.
    arguments = ["-I", "-c", inspect.getsource(installed), *PACKAGES]
    plan = ContainerPlan(image=image.pinned, platform=image.platform, entrypoint="python3", arguments=arguments)
    try:
        answer: dict[str, Any] = json.loads(run_once(plan, CHECK))
        dict(answer["packages"])
    except HostError as error:
        if error.kind != COMMAND_FAILED or error.retry:
            raise
        raise _no_engine_error(image, error.problem, error.log_tail) from error
    except (ValueError, LookupError, TypeError) as error:
        raise _no_engine_error(image, "its Python did not report what is installed") from error
    return answer


def _no_engine_error(image: EngineImage, why: str, log_tail: Sequence[str] = ()) -> ReleaseError:
    problem = f"{image.reference} does not say which vLLM it holds: {why}"
    remedy = "use an image with the interface of vllm/vllm-openai"
    return ReleaseError(problem, remedy, CHECK, log_tail, kind=NO_VLLM)
