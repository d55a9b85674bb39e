"""The releases that a source has now, read from its registry or from the hub."""

from vllm_qualify.engine.hub import resolve_commit
from vllm_qualify.releases.registry import releases_in
from vllm_qualify.releases.source import WATCH, Available, Source


def available_at(source: Source) -> list[Available]:
    """The releases, newest first; for a model its one commit. Raises the same as `releases_in` and `commit_of`."""
    if source.kind == "image":
        return releases_in(source.name, source.rule)
    commit = resolve_commit(source.name, source.revision, WATCH)
    return [Available(identity=commit, tags=[source.revision] if source.revision else [])]
