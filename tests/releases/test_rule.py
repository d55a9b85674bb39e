"""Which tags are versions, and which of them a rule lets through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from pydantic import ValidationError

from vllm_qualify.releases.source import VersionRule, version_in

# Of vllm/vllm-openai, and of registries that name theirs in another way.
TAGS = """
    latest nightly nightly-0b25498990f01ea2553c02731d6e2ce2d550156a v0.9.2 v0.11.2 v0.12.0 v0.12.0-aarch64 v0.12.0-x86_64
    v0.13.0-cu130 v0.13.0rc1 0.13.0 v0.9.10 v0.32.0 v0.32.0.post1 v0.32.1.dev3 v0.33.0rc2 cu130-nightly 20260131 2026.01
    0.14.0-1 sha256-0123.sig deploy
"""


@pytest.mark.parametrize(
    ("rule", "tags", "ordered"),
    [
        (VersionRule(), TAGS, "v0.32.0.post1 v0.32.0 0.13.0 v0.12.0"),
        (VersionRule(stable=False), TAGS, "v0.33.0rc2 v0.32.1.dev3 v0.32.0.post1 v0.32.0 0.13.0 v0.13.0rc1 v0.12.0"),
        (VersionRule(versions=">=0.9.5,<0.12"), TAGS, "v0.11.2 v0.9.10"),
        (VersionRule(), "0.13.0 v0.12.0 v0.13.0", "v0.13.0 0.13.0 v0.12.0"),
    ],
    ids=["stable from 0.12", "also before the final one", "a range", "two tags of a version are neighbours"],
)
def test_versions_come_newest_first(rule: VersionRule, tags: str, ordered: str) -> None:
    assert rule.newest_first(tags.split()) == ordered.split()


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="versions"):
        VersionRule(versions="newest")


@given(st.text(max_size=30))
def test_no_tag_breaks_it(tag: str) -> None:
    version = version_in(tag)
    assert version is None or version == Version(tag)


@given(st.lists(st.builds("v{}.{}.{}".format, *[st.integers(0, 40)] * 3), unique=True))
def test_the_order_is_that_of_the_versions(tags: list[str]) -> None:
    versions = [Version(tag) for tag in VersionRule(versions=">=0").newest_first(tags)]
    assert versions == sorted(map(Version, tags), reverse=True)
