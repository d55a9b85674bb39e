"""Pins images to digests, so that all hosts run the same one. The registry gives the digest; no Docker Engine is needed."""

from vllm_qualify.engine.image import parse_reference
from vllm_qualify.engine.launch import Launch, check_launch
from vllm_qualify.errors import CallerError
from vllm_qualify.releases.registry import ImageRepository


def pinned(launch: Launch) -> Launch:
    """The launch with its images by tag and digest. A host then refuses a tag that has moved since.

    Raises:
        CallerError: the options do not fit, or a registry has no such image.
        HostError: a registry does not answer, or requires a login.
    """
    check_launch(launch)
    images = {"image": (launch.image, "--image"), "client_image": (launch.client_image, "--client-image")}
    return launch.model_copy(update={name: _pinned(text, option) for name, (text, option) in images.items() if text})


def _pinned(text: str, option: str) -> str:
    image = parse_reference(text, "", option)
    if image.digest or not image.tag:
        return text
    with ImageRepository(image.repository) as repository:
        digest = repository.digest(image.tag)
    if digest is None:
        raise CallerError(f"the registry has no {text}", "check the name and the tag", option)
    return f"{text}@{digest}"
