"""Pins the images that infra/image and infra/compose name: writes behind each tag the digest that its registry has for it now.

    python -m infra.lock_images [FILE …]

It asks the registries, and needs no Docker Engine. Nothing is written if one of them does not answer.
"""

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from vllm_qualify.errors import CallerError, QualifyError
from vllm_qualify.releases.registry import ImageRepository

INFRA = Path(__file__).parent
FILES = [*sorted((INFRA / "image").glob("*Dockerfile")), *sorted((INFRA / "compose").glob("*.yaml"))]
# `ARG BASE_IMAGE=NAME:TAG` and `image: NAME:TAG`, pinned already or not
NAMED = re.compile(r"^(?P<before>ARG \w+_IMAGE=| +image: )(?P<name>[^\s$@]+):(?P<tag>[\w.-]+)(?:@sha256:[0-9a-f]{64})?$", re.M)


def main() -> int:
    files = [Path(name) for name in sys.argv[1:]] or FILES
    try:
        texts = {file: with_digests(file.read_text(encoding="utf-8"), registry_digest) for file in files}
    except QualifyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    return 0


def with_digests(text: str, digest: Callable[[str, str], str]) -> str:
    """The text with the digest of each image behind its tag."""
    return NAMED.sub(
        lambda match: f"{match['before']}{match['name']}:{match['tag']}@{digest(match['name'], match['tag'])}", text
    )


@cache
def registry_digest(name: str, tag: str) -> str:
    """The digest in the registry. Raises CallerError if there is no such image, HostError if the registry does not answer."""
    with ImageRepository(name) as repository:
        digest = repository.digest(tag)
    if digest is None:
        raise CallerError(f"the registry has no {name}:{tag}", "name a tag that it has", f"{name}:{tag}")
    return digest


if __name__ == "__main__":
    sys.exit(main())
