"""An image by its reference, compared with the approved one: its digest in its registry, and its copy on this machine."""

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_qualify.approval.here.finding import DIFFERENT, SAME, Finding, compare, describe_engine, untold
from vllm_qualify.engine.containers.host import docker_host, engine_message
from vllm_qualify.engine.image import EngineImage, parse_reference
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import HostError
from vllm_qualify.lazy import Lazy
from vllm_qualify.plan.cell import Release

if TYPE_CHECKING:
    import docker
else:
    docker = Lazy("docker")

PLACE = "--here"
_REGISTRY, _HERE, _PLATFORM = "digest in the registry", "digest on this machine", "platform on this machine"


def compare_image(reference: str, release: Release, server: ServerPlan) -> list[Finding]:
    """Compare an image's digest with the approved one. Raises CallerError if the reference is not one."""
    shown = [
        untold("model", "an image does not show it", f"{release.model} at {release.revision}"),
        untold("configuration", "an image does not show it"),
    ]
    approved = server.engine
    named = parse_reference(reference, approved.platform if isinstance(approved, EngineImage) else "", PLACE)
    if not isinstance(approved, EngineImage):
        why = "what was approved ran as a process, from no image"
        return [untold("digest", why, describe_engine(release, server)), *shown]
    if named.digest and not named.tag:
        # A digest names one content, wherever it is.
        return [compare("digest", approved.digest, named.digest), *shown]
    return [*_compare_tag(named, approved, release), *shown]


def _compare_tag(named: EngineImage, approved: EngineImage, release: Release) -> Iterator[Finding]:
    """A tag in its registry, and on this machine: each may have moved without the other."""
    if named.digest and named.digest != approved.digest:
        yield compare("digest in the reference", approved.digest, named.digest)
    try:
        with docker_host(PLACE) as host:
            yield _compare_in_registry(host, named, approved)
            yield from _compare_on_machine(host, named, approved, release)
    except HostError as error:
        yield untold("digest", error.problem, approved.digest)


def _compare_in_registry(host: "docker.DockerClient", named: EngineImage, approved: EngineImage) -> Finding:
    try:
        about: dict[str, Any] = host.api.inspect_distribution(named.reference)
        digest = str(about["Descriptor"]["digest"])
    except docker.errors.APIError as error:
        return untold(_REGISTRY, engine_message(error), approved.digest)
    except (LookupError, TypeError):
        return untold(_REGISTRY, "the registry's answer has no digest", approved.digest)
    return compare(_REGISTRY, approved.digest, digest)


def _compare_on_machine(
    host: "docker.DockerClient", named: EngineImage, approved: EngineImage, release: Release
) -> Iterator[Finding]:
    """The copy that `docker run` would take: its digests, or else its id, and its platform."""
    about: dict[str, Any] | None = None
    with suppress(docker.errors.ImageNotFound):
        about = host.api.inspect_image(named.reference)
    if about is None:
        yield untold(_HERE, "the image is not here", approved.digest)
        return
    digests = [str(entry).rpartition("@")[2] for entry in about.get("RepoDigests") or []]
    is_same = approved.digest in digests or (release.engine.image and about.get("Id") == release.engine.image.image_id)
    here = str(approved.digest) if is_same else ", ".join(digests) or f"none; its id is {about.get('Id')}"
    yield Finding(what=_HERE, state=SAME if is_same else DIFFERENT, approved=str(approved.digest), here=here)
    yield compare(_PLATFORM, approved.platform, f"{about.get('Os')}/{about.get('Architecture')}")
