"""Image references, the state of a pull, and what a plan keeps of an image; with a real engine: tests/live/test_docker.py."""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.builders.server_plans import PROCESS
from tests.builders.server_plans import plan as server_plan
from vllm_qualify.engine.image import EngineImage, Layers, parse_reference
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import CallerError

AMD64 = "linux/amd64"
DIGEST = "sha256:" + "0123456789abcdef" * 4
LONGEST_TAG = "t" * 128


@pytest.mark.parametrize(
    ("text", "repository", "tag", "digest"),
    [
        ("vllm/vllm-openai:v0.32.0", "vllm/vllm-openai", "v0.32.0", None),
        (f"vllm/vllm-openai@{DIGEST}", "vllm/vllm-openai", None, DIGEST),
        (f"vllm/vllm-openai:v0.32.0@{DIGEST}", "vllm/vllm-openai", "v0.32.0", DIGEST),
        ("127.0.0.1:5000/tiny:1", "127.0.0.1:5000/tiny", "1", None),
        (f"127.0.0.1:5000/tiny@{DIGEST}", "127.0.0.1:5000/tiny", None, DIGEST),
        ("localhost:5000/a/b/c:1", "localhost:5000/a/b/c", "1", None),
        ("ghcr.io/org/vllm_x.y--z:Latest-1.2_3", "ghcr.io/org/vllm_x.y--z", "Latest-1.2_3", None),
        ("Registry.Example/vllm:1", "Registry.Example/vllm", "1", None),
        ("vllm:5000", "vllm", "5000", None),
        (f"vllm:{LONGEST_TAG}", "vllm", LONGEST_TAG, None),
    ],
)
def test_a_reference_is_taken_apart(text: str, repository: str, tag: str | None, digest: str | None) -> None:
    assert parse_reference(text, AMD64) == EngineImage(repository=repository, tag=tag, digest=digest, platform=AMD64)


WRONG, OPEN = "is not an image reference", "neither a tag nor a digest"
NO_REFERENCES = (
    *("", " ", "vllm/vllm-openai :1", " vllm:1", "vllm:1\n", "vllm/VLLM-openai:1", "VLLM:1", "vllm//openai:1", "/vllm:1"),
    *("vllm/:1", "vllm:", "vllm:a/b", "vllm:a:b", "vllm:-a", f"vllm:{LONGEST_TAG}t", "vllm@sha256:0123", f"vllm@{DIGEST}0"),
    *(f"vllm@{DIGEST[:-1]}", f"vllm@{DIGEST.upper()}", f"vllm@{DIGEST.removeprefix('sha256:')}", f"vllm@{DIGEST}:1"),
    *(f"@{DIGEST}", "https://ghcr.io/org/vllm:1", "--privileged"),
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, WRONG) for text in NO_REFERENCES),
        *((name, OPEN) for name in ("vllm/vllm-openai", "127.0.0.1:5000/tiny", "vllm")),
    ],
)
@pytest.mark.parametrize("option", ["--image", "--client-image"])
def test_what_is_no_reference_or_a_name_alone_is_the_mistake_of_who_gave_the_option(
    text: str, message: str, option: str
) -> None:
    with pytest.raises(CallerError, match=message) as raised:
        parse_reference(text, AMD64, option)
    assert raised.value.place == option


@pytest.mark.parametrize(
    ("tag", "digest", "reference", "pinned"),
    [
        ("1", None, "r:5000/x:1", "r:5000/x:1"),
        (None, DIGEST, f"r:5000/x@{DIGEST}", f"r:5000/x@{DIGEST}"),
        ("1", DIGEST, "r:5000/x:1", f"r:5000/x@{DIGEST}"),
    ],
)
def test_people_read_the_tag_and_docker_gets_the_digest(
    tag: str | None, digest: str | None, reference: str, pinned: str
) -> None:
    image = EngineImage(repository="r:5000/x", tag=tag, digest=digest, platform=AMD64)
    assert (image.reference, image.pinned) == (reference, pinned)
    for name in (reference, pinned):
        assert parse_reference(name, AMD64).repository == "r:5000/x"


# --- the state of a pull: events as Docker Engine 20.10 sends them

FIRST, SECOND = "7ac8af3ab4f8", "c158987b0551"


def event(status: str, layer: str | None = None, current: int | None = None, total: int | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"status": status}
    if layer is not None:
        numbers = {"current": current, "total": total}
        message |= {"id": layer, "progressDetail": {name: number for name, number in numbers.items() if number is not None}}
    return message | ({"progress": "[=>  ]"} if current is not None else {})


PULL = [
    # its id is the tag or the digest: no layer
    ({"status": "Pulling from tiny", "id": DIGEST}, "Pulling from tiny"),
    (event("Pulling fs layer", FIRST), f"pulling: layer {FIRST} pulling fs layer; 0 of 1 layers done"),
    (event("Already exists", SECOND), f"pulling: layer {SECOND} already exists; 1 of 2 layers done"),
    (event("Downloading", FIRST, 2**20, 10 * 2**20), f"pulling: layer {FIRST} downloading 1.0 of 10.0 MiB; 1 of 2 layers done"),
    (event("Downloading", FIRST, 5_242_880), f"pulling: layer {FIRST} downloading; 1 of 2 layers done"),
    (event("Verifying Checksum", FIRST), f"pulling: layer {FIRST} verifying checksum; 1 of 2 layers done"),
    (event("Download complete", FIRST), f"pulling: layer {FIRST} download complete; 1 of 2 layers done"),
    (event("Extracting", FIRST, 3 * 2**20, 5 * 2**20), f"pulling: layer {FIRST} extracting 3.0 of 5.0 MiB; 1 of 2 layers done"),
    (event("Pull complete", FIRST), f"pulling: layer {FIRST} pull complete; 2 of 2 layers done"),
    # a layer that is tried again is not done
    (event("Retrying in 5 seconds", FIRST), f"pulling: layer {FIRST} retrying in 5 seconds; 1 of 2 layers done"),
    # what says nothing is no layer
    ({}, ""),
    ({"progressDetail": {}}, ""),
    ({"status": f"Digest: {DIGEST}"}, f"Digest: {DIGEST}"),
    ({"status": "Status: Downloaded newer image for tiny:1"}, "Status: Downloaded newer image for tiny:1"),
]


def test_a_pull_is_reported_layer_by_layer() -> None:
    layers = Layers()
    assert [layers.describe_after(message) for message, _ in PULL] == [line for _, line in PULL]


# --- what a plan keeps


def test_an_engine_of_no_known_launcher_is_no_plan() -> None:
    document = server_plan(engine=PROCESS).model_dump(mode="json")
    document["engine"]["launcher"] = "rocket"
    with pytest.raises(ValidationError, match="rocket"):
        ServerPlan.model_validate(document)
