"""The sources of releases: a repository of images in a registry, or a model on the hub."""

import re
from typing import Annotated, Literal

from pydantic import Field

from vllm_qualify.approval.layout import canonical, sha256
from vllm_qualify.recipe.values import Frozen, Name, Text
from vllm_qualify.releases.rule import VersionRule

# The place that the errors of this package name.
WATCH = "watch"
_NOT_IN_A_KEY = re.compile(r"[^A-Za-z0-9._-]+")


class _Source(Frozen):
    """A source that is watched for one recipe. With another rule or branch it is another source."""

    kind: str
    name: Text
    recipe: Name

    @property
    def slug(self) -> str:
        """Its name in the store."""
        # Without defaults, so that a new field in a later version of this code does not change the name.
        settings = self.model_dump(exclude_defaults=True) | {"kind": self.kind}
        return f"{self.recipe}-{self.kind}-{_NOT_IN_A_KEY.sub('-', self.name)[:80]}-{sha256(canonical(settings))[:12]}"


class ImageSource(_Source):
    """Images. `name` is the repository as Docker names it: `vllm/vllm-openai`, `registry.example:5000/vllm`."""

    kind: Literal["image"] = "image"
    rule: VersionRule = VersionRule()


class ModelSource(_Source):
    """A model. `name` is its name on the hub. `revision` is the branch or tag to follow; None for the default branch."""

    kind: Literal["model"] = "model"
    revision: Text | None = None


Source = Annotated[ImageSource | ModelSource, Field(discriminator="kind")]


class Available(Frozen):
    """A release that a source has now: an image's digest with its tags, or a model's commit with its branch or tag."""

    identity: Text
    tags: list[str]
