"""Where releases appear: a repository of images in a registry, a model of the hub."""

import re
from typing import Annotated, Literal

from pydantic import Field

from vllm_qualify.approval.layout import canonical, sha256
from vllm_qualify.recipe.values import Frozen, Name, Text
from vllm_qualify.releases.rule import VersionRule

# The part of a qualification where what is wrong here is found.
WATCH = "watch"
_NOT_IN_A_KEY = re.compile(r"[^A-Za-z0-9._-]+")


class _Source(Frozen):
    """Watched for one recipe. Whoever looks at it in another way (another rule or branch) looks at another source."""

    kind: str
    name: Text
    recipe: Name

    @property
    def slug(self) -> str:
        """Its name in the store."""
        # Without defaults, so that a field of a later version of this code does not make another source of it.
        told = self.model_dump(exclude_defaults=True) | {"kind": self.kind}
        return f"{self.recipe}-{self.kind}-{_NOT_IN_A_KEY.sub('-', self.name)[:80]}-{sha256(canonical(told))[:12]}"


class ImageSource(_Source):
    """`name` is the repository as Docker has it: `vllm/vllm-openai`, `registry.example:5000/vllm`."""

    kind: Literal["image"] = "image"
    rule: VersionRule = VersionRule()


class ModelSource(_Source):
    """`name` is the model as the hub has it. `revision` is the branch or tag that is followed, or the default branch."""

    kind: Literal["model"] = "model"
    revision: Text | None = None


Source = Annotated[ImageSource | ModelSource, Field(discriminator="kind")]


class Available(Frozen):
    """What a source has now: an image's digest with the tags that are on it, or a model's commit with its branch or tag."""

    identity: Text
    tags: list[str]
