"""Pin what shapes a server's replies: the model, and each repository or file that an option names."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import JsonValue

from vllm_qualify.engine.environment import digest_at
from vllm_qualify.engine.hub import Repository, cache_folder, check_files, find_repository, folder_name
from vllm_qualify.engine.server import MODEL, Part, ServerPlan
from vllm_qualify.errors import CallerError, HostError, writing
from vllm_qualify.recipe.values import expand_user

PLACE = "check"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Keys of a speculative decoding that name another model.
_DRAFTS = ("model", "speculative_model", "speculative_model_dir")


def with_parts(server: ServerPlan, model: Repository | None) -> ServerPlan:
    """The server with each of its parts at a commit or a digest. `model` is the hub's repository of its model, if it has one.

    Raises CallerError if an option names a repository that its engine would read at no fixed commit, or the hub has no such
    one; HostError if the hub does not answer, or a file cannot be read.
    """
    kind, parts = server.engine_kind, [_hub_part(MODEL, model)] if model else []
    for option, name in _texts_named(server, (*kind.repositories, *kind.unpinned, *kind.files)):
        parts += _part_named(server, option, name)
    return server.model_copy(update={"parts": [*parts, *_draft_parts(server)]})


def check_unchanged(server: ServerPlan, revision: str, place: str) -> None:
    """Hash again what a server has read, when it has ended: what was hashed before it began may have been changed since.

    `revision` is that of its release.

    Raises HostError if a folder or a file of this machine is not what the plan says; HubError if a file of a repository is not
    what the hub has.
    """
    for part in server.repositories:
        if part.files:
            snapshot = cache_folder() / folder_name(part.name) / "snapshots" / part.revision
            check_files(snapshot, Repository(name=part.name, commit=part.revision, files=part.files), place)
    own = [(server.model, revision)] if server.is_local else []
    files = [(part.name, part.revision) for part in server.parts if not part.is_of_the_hub]
    for name, digest in (*own, *files):
        with writing(place):
            is_same = digest_at(expand_user(name)) == digest
        if not is_same:
            problem = f"{name} was changed while it was served, so nothing shows what was measured"
            raise HostError(problem, "find out who writes there, and qualify again", place, kind="model-changed")


def repositories_named(server: ServerPlan) -> Iterator[tuple[str, str]]:
    """Each option that names a repository of the hub besides the model's own, with that repository."""
    kind = server.engine_kind
    for option, name in _texts_named(server, (*kind.repositories, *kind.unpinned)):
        if _REPOSITORY.fullmatch(name):
            yield option, name
    for _, name in _draft_names(server):
        yield kind.speculative, name


def texts_of(value: JsonValue) -> list[str]:
    """Each text in an option's value, however deep; of `NAME=PATH` the path, and of JSON text the texts in it."""
    if isinstance(value, str):
        parsed = _parse_json(value)
        return [value.partition("=")[2] or value] if parsed is None else texts_of(parsed)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in texts_of(each)]


def _parse_json(text: str) -> JsonValue:
    """The mapping or list that a JSON text is; None if it is another text."""
    try:
        value: JsonValue = json.loads(text) if text.lstrip()[:1] in ("{", "[") else None
    except (ValueError, RecursionError):
        return None
    return value


def _texts_named(server: ServerPlan, options: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each text of these options, and of single fields of them, that is not the model's name; each once."""
    given = [name for option in options for name in server.arguments if name.partition(".")[0] == option]
    texts = dict.fromkeys((option, text) for option in given for text in texts_of(server.arguments[option]))
    yield from (each for each in texts if each[1] != server.model)


def _part_named(server: ServerPlan, option: str, name: str) -> Iterator[Part]:
    """What an option names. In a container a path is one of the image, whose digest covers it."""
    path, kind = expand_user(name), server.engine_kind
    if not server.in_container and _is_there(path):
        yield Part(option=option, name=name, revision=digest_at(path))
    elif not _REPOSITORY.fullmatch(name):
        return
    elif option.partition(".")[0] in kind.repositories:
        yield _hub_part(option, find_repository(name, None, PLACE))
    elif option.partition(".")[0] in kind.unpinned:
        raise _cannot_be_pinned(server, option, name)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        # A template that is written out can be longer than a path may be.
        return False


def _draft_parts(server: ServerPlan) -> Iterator[Part]:
    option = server.engine_kind.speculative
    if server.draft is not None and server.draft_digest is not None:
        yield Part(option=option, name=str(server.draft), revision=server.draft_digest)
    for key, name in _draft_names(server):
        if not server.engine_kind.pins_draft:
            raise _cannot_be_pinned(server, f"{option}.{key}", name)
        speculative = server.arguments[option]
        revision = speculative.get("revision") if isinstance(speculative, dict) else None
        yield _hub_part(option, find_repository(name, revision if isinstance(revision, str) else None, PLACE))


def _draft_names(server: ServerPlan) -> Iterator[tuple[str, str]]:
    """Each key of the speculative decoding that names a repository of the hub, with that repository."""
    speculative = server.arguments.get(server.engine_kind.speculative)
    if not isinstance(speculative, dict) or server.draft is not None:
        return
    for key in _DRAFTS:
        name = speculative.get(key)
        if isinstance(name, str) and _REPOSITORY.fullmatch(name) and name != server.model:
            yield key, name


def _hub_part(option: str, repository: Repository) -> Part:
    return Part(option=option, name=repository.name, revision=repository.commit, files=repository.files)


def _cannot_be_pinned(server: ServerPlan, option: str, name: str) -> CallerError:
    problem = f"{server.engine_kind.title} reads {name} at no fixed commit, so what it serves could change unseen"
    return CallerError(problem, "name a folder with its files instead", f"server.{option}")
