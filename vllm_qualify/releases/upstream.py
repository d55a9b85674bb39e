"""What a source has now, asked of its registry or of the hub."""

from vllm_qualify.engine.hub import commit_of
from vllm_qualify.releases.registry import releases_in
from vllm_qualify.releases.source import WATCH, Available, Source


def found_at(source: Source) -> list[Available]:
    """Newest first; of a model its one commit. Raises as `releases_in` and `commit_of`."""
    if source.kind == "image":
        return releases_in(source.name, source.rule)
    commit = commit_of(source.name, source.revision, WATCH)
    return [Available(identity=commit, tags=[source.revision] if source.revision else [])]
