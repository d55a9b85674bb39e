"""The rule for the tags of an image: which of them are versions to qualify."""

import re
from collections.abc import Iterable

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_qualify.recipe.serving import VersionRange
from vllm_qualify.recipe.values import Frozen

# At least three numbers: a tag such as 20260131 is a date. No suffix: -cu130 and -aarch64 are builds of a version.
# No number of more than nine digits: Python reads none of thousands.
_NUMBER = r"[0-9]{1,9}"
_VERSION = re.compile(
    rf"v?(?P<version>{_NUMBER}(?:\.{_NUMBER}){{2,}}(?:(?:a|b|rc){_NUMBER})?(?:\.post{_NUMBER})?(?:\.dev{_NUMBER})?)"
)


class VersionRule(Frozen):
    """Versions in a range (PEP 440). If `stable`, without release candidates and other pre-releases."""

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
