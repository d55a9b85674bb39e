"""The sources of releases: a repository of images in a registry, or a model on the hub."""

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import Field

from vllm_qualify.approval.layout import canonical, sha256
from vllm_qualify.recipe.serving import VersionRange
from vllm_qualify.recipe.values import Frozen, Name, Text

# The place that the errors of this package name.
WATCH = "watch"
_NOT_IN_A_KEY = re.compile(r"[^A-Za-z0-9._-]+")
# At least three numbers: a tag such as 20260131 is a date. No suffix: -cu130 and -aarch64 are builds of a version.
# No number of more than nine digits: Python reads none of thousands.
_NUMBER = r"[0-9]{1,9}"
_VERSION = re.compile(
    rf"v?(?P<version>{_NUMBER}(?:\.{_NUMBER}){{2,}}(?:(?:a|b|rc){_NUMBER})?(?:\.post{_NUMBER})?(?:\.dev{_NUMBER})?)"
)


class VersionRule(Frozen):
    """Which tags of an image are versions to qualify: those in a range (PEP 440); if `stable`, without pre-releases."""

    versions: VersionRange = ">=0.12.0"
    stable: bool = True

    def newest_first(self, tags: Iterable[str]) -> list[str]:
        """The tags that are versions and follow the rule. Two tags of one version are neighbours."""
        allowed = SpecifierSet(self.versions)
        versions = {tag: version for tag in tags if (version := version_in(tag))}
        fitting = [tag for tag, version in versions.items() if allowed.contains(version, prereleases=not self.stable)]
        return sorted(fitting, key=lambda tag: (versions[tag], tag), reverse=True)


def version_in(tag: str) -> Version | None:
    """The version that a tag such as `v0.32.0` names; None for `latest`, `nightly-…` or `v0.32.0-cu130`."""
    match = _VERSION.fullmatch(tag)
    return Version(match["version"]) if match else None


class _Source(Frozen):
    """A source that is watched for one recipe. With another rule or branch it is another source."""

    kind: str
    name: Text
    recipe: Name

    @property
    def slug(self) -> str:
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
