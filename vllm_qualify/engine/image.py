"""An engine in a Docker image: resolve its tag to a digest once, pull it by that digest, verify, tag and identify it."""

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_qualify.engine import registry_failure, start_failure
from vllm_qualify.engine.container import COMMAND_FAILED, ContainerPlan, run_once
from vllm_qualify.engine.docker_host import docker_host, platform_of, said
from vllm_qualify.engine.environment import PROBE, EngineIdentity, ImageIdentity
from vllm_qualify.engine.kind import KINDS, kind_in
from vllm_qualify.engine.launchers import ImageLauncherName
from vllm_qualify.errors import CallerError, HostError, QualifyError, ReleaseError
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
        """What is in the pulled image, as its own Python reports it.

        Raises:
            HostError: Docker Engine does not answer.
            ReleaseError: it has no engine of a known kind.
        """
        with docker_host(CHECK) as host:
            about = _inspect(host, self)
        probed = _probe(self)
        kind = kind_in(probed["packages"])
        if kind is None:
            raise _no_engine(self, f"its Python has no {' and no '.join(kind.title for kind in KINDS.values())}")
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
        raise CallerError(
            f"'{text}' has neither a tag nor a digest", "name a version or a digest: what `latest` names changes", option
        )
    return EngineImage(repository=match["repository"], tag=match["tag"], digest=match["digest"], platform=platform)


def resolve(text: str, option: str = "--image") -> EngineImage:
    """The image that `text` means now, by digest, for this machine's platform.

    A tag is looked up in its registry, with the credentials of Docker's own configuration. A digest is looked up only if
    it is not here yet.

    Raises:
        CallerError: the reference is wrong, or the registry does not have it.
        HostError: Docker Engine or the registry does not answer, or the registry asks for a login.
        ReleaseError: the tag is not at the digest that is given with it, or the image is not made for this platform.
    """
    with docker_host(CHECK) as host:
        image = parse_reference(text, platform_of(host), option)
        if not image.tag and _is_here(host, image):
            return image
        return _resolved(host, image, option, CHECK)


def _resolved(host: "docker.DockerClient", image: EngineImage, option: str, stage: str) -> EngineImage:
    try:
        distribution: dict[str, Any] = host.api.inspect_distribution(image.reference)
    except docker.errors.APIError as error:
        raise registry_failure.classify_answer(said(error), image.reference, option, stage) from error
    digest = str(distribution["Descriptor"]["digest"])
    if image.digest not in (None, digest):
        raise _moved(image, digest, stage)
    _check_platforms(image, distribution.get("Platforms") or [], stage)
    return image.model_copy(update={"digest": digest})


def _moved(image: EngineImage, digest: str, stage: str) -> ReleaseError:
    return ReleaseError(
        f"the tag {image.reference} moved: it was at {image.digest} and is now at {digest}",
        "qualify the image that the tag has now, or name the old one by its digest alone",
        stage,
        kind="tag-moved",
    )


def _check_platforms(image: EngineImage, platforms: list[dict[str, Any]], stage: str) -> None:
    """If a registry lists no platforms, the pull decides. Attestations have the platform `unknown`."""
    names = {f"{entry.get('os')}/{entry.get('architecture')}" for entry in platforms} - {"unknown/unknown", "/", "None/None"}
    if names and image.platform not in names:
        raise _wrong_platform(image, ", ".join(sorted(names)), stage)


def _wrong_platform(image: EngineImage, platforms: str, stage: str) -> ReleaseError:
    return ReleaseError(
        f"{image.reference} is made for {platforms}, and this machine is {image.platform}",
        "name an image for this platform, or qualify on a machine of the image's",
        stage,
        kind="wrong-platform",
    )


def pull(image: EngineImage, progress: Callable[[str], None]) -> float | None:
    """Pull the image by its digest, unless it is here, and verify it. Returns the seconds of the pull; None without one.

    Raises:
        HostError, CallerError: as `resolve`, or the disk is full.
        ReleaseError: the tag moved since it was resolved, or the image that came has another digest or platform.
    """
    with docker_host(PULL) as host:
        if image.tag:
            _resolved(host, image, "--image", PULL)
        began, is_here = time.monotonic(), _is_here(host, image)
        if not is_here:
            _pull(host, image, progress)
        pulled_s = None if is_here else time.monotonic() - began
        _verify(host, image)
    return pulled_s


def tag_for_deployment(image: EngineImage) -> str:
    """Tag a pulled image `vllm/vllm-openai:deploy`, and return that name. Raises HostError."""
    with docker_host(PULL) as host:
        host.api.tag(image.pinned, DEPLOY_REPOSITORY, DEPLOY_TAG)
    return f"{DEPLOY_REPOSITORY}:{DEPLOY_TAG}"


def _pull(host: "docker.DockerClient", image: EngineImage, progress: Callable[[str], None]) -> None:
    layers = Layers()
    try:
        for event in host.api.pull(image.repository, tag=image.digest, platform=image.platform, stream=True, decode=True):
            if "error" in event:
                raise _pull_failure(str(event["error"]), image)
            progress(layers.after(event))
    except docker.errors.APIError as error:
        raise _pull_failure(said(error), image) from error


def _pull_failure(text: str, image: EngineImage) -> QualifyError:
    return registry_failure.classify_answer(text, image.pinned, "--image", PULL)


class Layers:
    """The state of a pull, layer by layer, as one line."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[str, int, int]] = {}

    def after(self, event: dict[str, Any]) -> str:
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


def _verify(host: "docker.DockerClient", image: EngineImage) -> None:
    about = _inspect(host, image)
    digests = about.get("RepoDigests") or []
    if not any(str(entry).endswith(f"@{image.digest}") for entry in digests):
        raise ReleaseError(
            f"{image.pinned} came with the digests {', '.join(digests) or 'none'}",
            "do not use this registry's copy; ask its owner",
            PULL,
            kind="digest-mismatch",
        )
    platform = f"{about['Os']}/{about['Architecture']}"
    if platform != image.platform:
        raise _wrong_platform(image, platform, PULL)


def _is_here(host: "docker.DockerClient", image: EngineImage) -> bool:
    try:
        about: dict[str, Any] = host.api.inspect_image(image.pinned)
    except docker.errors.ImageNotFound:
        return False
    return f"{about['Os']}/{about['Architecture']}" == image.platform


def _inspect(host: "docker.DockerClient", image: EngineImage) -> dict[str, Any]:
    try:
        about: dict[str, Any] = host.api.inspect_image(image.pinned)
    except docker.errors.ImageNotFound as error:
        problem = f"the image {image.pinned} is not on this machine"
        raise HostError(problem, "run the qualification again, which pulls it", CHECK, kind="image-missing") from error
    return about


def _probe(image: EngineImage) -> dict[str, Any]:
    plan = ContainerPlan(image=image.pinned, platform=image.platform, entrypoint="python3", arguments=["-I", "-c", PROBE])
    try:
        answer: dict[str, Any] = json.loads(run_once(plan, CHECK))
        dict(answer["packages"])
    except HostError as error:
        if error.kind != COMMAND_FAILED or error.retry:
            raise
        raise _no_engine(image, error.problem, error.log_tail) from error
    except (ValueError, LookupError, TypeError) as error:
        raise _no_engine(image, "its Python did not report what is installed") from error
    return answer


def _no_engine(image: EngineImage, why: str, log_tail: Sequence[str] = ()) -> ReleaseError:
    problem = f"{image.reference} does not say which vLLM it holds: {why}"
    remedy = "use an image with the interface of vllm/vllm-openai"
    return ReleaseError(problem, remedy, CHECK, log_tail, kind=start_failure.NO_VLLM)
