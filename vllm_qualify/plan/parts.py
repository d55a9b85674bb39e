"""Pin what shapes a server's replies: the model, and each repository or file that an option names."""

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import JsonValue

from vllm_qualify.engine.environment import content_digest, file_digest
from vllm_qualify.engine.hub import Repository, find_repository
from vllm_qualify.engine.parts import MODEL, Part
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import CallerError

PLACE = "check"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Keys of a speculative decoding that name another model.
_DRAFTS = ("model", "speculative_model", "speculative_model_dir")


def with_parts(server: ServerPlan, model: Repository | None) -> ServerPlan:
    """The server with each of its parts at a commit or a digest. `model` is the hub's repository of its model, if it has one.

    Raises:
        CallerError: an option names a repository that its engine would read at no fixed commit, or the hub has no such one.
        HostError: the hub does not answer, or a file cannot be read.
    """
    return server.model_copy(update={"parts": list(_parts(server, model))})


def _parts(server: ServerPlan, model: Repository | None) -> Iterator[Part]:
    if model is not None:
        yield _of_the_hub(MODEL, model)
    kind = server.engine_kind
    for option in dict.fromkeys((*kind.repositories, *kind.unpinned, *kind.files)):
        value = server.arguments.get(option)
        if isinstance(value, str) and value != server.model:
            yield from _named_by(server, option, value)
    yield from _draft(server)


def _named_by(server: ServerPlan, option: str, value: str) -> Iterator[Part]:
    """What an option's value names. In a container a path is one of the image, whose digest covers it."""
    path, kind = Path(value).expanduser(), server.engine_kind
    if path.exists() and not server.in_container:
        yield Part(option=option, name=value, revision=content_digest(path) if path.is_dir() else file_digest(path))
    elif not _REPOSITORY.fullmatch(value):
        return
    elif option in kind.repositories:
        yield _of_the_hub(option, find_repository(value, None, PLACE))
    elif option in kind.unpinned:
        raise _cannot_be_pinned(server, option, value)


def _draft(server: ServerPlan) -> Iterator[Part]:
    option = server.engine_kind.speculative
    speculative = server.arguments.get(option)
    if server.draft is not None and server.draft_digest is not None:
        yield Part(option=option, name=str(server.draft), revision=server.draft_digest)
    if not isinstance(speculative, dict) or server.draft is not None:
        return
    for key in _DRAFTS:
        name = speculative.get(key)
        if not isinstance(name, str) or not _REPOSITORY.fullmatch(name) or name == server.model:
            continue
        if not server.engine_kind.pins_draft:
            raise _cannot_be_pinned(server, f"{option}.{key}", name)
        yield _of_the_hub(option, find_repository(name, _text(speculative.get("revision")), PLACE))


def _of_the_hub(option: str, found: Repository) -> Part:
    return Part(option=option, name=found.name, revision=found.commit, files=found.files)


def _text(value: JsonValue) -> str | None:
    return value if isinstance(value, str) else None


def _cannot_be_pinned(server: ServerPlan, option: str, name: str) -> CallerError:
    problem = f"{server.engine_kind.title} reads {name} at no fixed commit, so what it serves could change unseen"
    return CallerError(problem, "name a folder with its files instead", f"server.{option}")
