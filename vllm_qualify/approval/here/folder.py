"""A folder of weights, compared with the approved model file by file.

The folder is hostile: whoever may write to it may put pipes, devices, links and endless files there. Only plain files are read,
only those with an approved name, and each no further than its size was when it was opened.
"""

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_qualify.approval.here.finding import DIFFERENT, SAME, Finding, describe_engine, untold
from vllm_qualify.engine.environment import digest_of
from vllm_qualify.engine.hub import HASHED_AT_ONCE, SHA256, needed_files
from vllm_qualify.engine.server import MODEL, ServerPlan
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.plan.cell import Release

PLACE = "--here"
MOST_ENTRIES = 100_000
MOST_FILE_BYTES = 2 * 2**40
MOST_LISTED = 20
_CHUNK_BYTES = 2**20
# What a download of the hub's repository leaves beside its files. No engine reads it.
_BESIDE_THE_HUBS = (".git", ".gitattributes", ".github", ".gitignore", ".cache")


def compare_folder(folder: Path, release: Release, server: ServerPlan) -> list[Finding]:
    """Compare each file with the approved one by its content. Raises HostError if the folder cannot be read."""
    shown = [
        untold("engine", "a folder does not show it", describe_engine(release, server)),
        untold("configuration", "a folder does not show it"),
        *(untold(part.option, "another folder or file", part.name) for part in server.parts if part.option != MODEL),
    ]
    model = f"{release.model} at {release.revision}"
    part = server.part(MODEL)
    approved = {path: f"{SHA256}{digest}" for path, digest in release.files.items()} or (part.files if part else {})
    if not approved:
        return [untold("model", "the approval has no digests of its files", model), *shown]
    needed, ignored = (set(approved), ()) if release.files else (set(needed_files(approved)), _BESIDE_THE_HUBS)
    try:
        files, others = _list_entries(folder, ignored)
        here = _hash_files(folder, [path for path in files if path in approved], approved)
    except OSError as error:
        where = error.filename or folder
        raise HostError(f"{where}: {error.strerror or error}", "let this user read the folder", PLACE) from error
    wrong = list(_find_differences(approved, needed, files, others, here))
    if wrong:
        return [*_limit_list(wrong), *shown]
    whole = digest_of({path: digest.removeprefix(SHA256) for path, digest in here.items()}) if release.files else model
    return [Finding(what="model", state=SAME, approved=model, here=f"{whole}, {len(here)} files by their content"), *shown]


def _list_entries(folder: Path, ignored: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """The paths of plain files, sorted, and what every other entry is by its path. Raises OSError, CallerError."""
    files, others = list[str](), dict[str, str]()
    for path, mode in _walk(folder, frozenset()):
        name = path.relative_to(folder).as_posix()
        if name.split("/")[0] in ignored:
            continue
        if len(files) + len(others) >= MOST_ENTRIES:
            raise CallerError(f"the folder has more than {MOST_ENTRIES:,} entries", "name a model's own folder", PLACE)
        if stat.S_ISREG(mode):
            files.append(name)
        else:
            others[name] = _name_kind(mode)
    return sorted(files), others


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[tuple[Path, int]]:
    """Each entry below a folder with its mode, 0 for a link to nothing. Links to folders are followed, as a server does."""
    here = folder.resolve()
    if here in above:
        return
    for path in folder.iterdir():
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, RuntimeError):
            mode = 0
        except OSError:
            # A link that leads back to itself.
            if not path.is_symlink():
                raise
            mode = 0
        if stat.S_ISDIR(mode):
            yield from _walk(path, above | {here})
        else:
            yield path, mode


def _name_kind(mode: int) -> str:
    kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISBLK, "a device"), (stat.S_ISCHR, "a device"))
    return next((kind for is_kind, kind in kinds if is_kind(mode)), "a link to nothing")


def _hash_files(folder: Path, paths: list[str], approved: Mapping[str, str]) -> dict[str, str]:
    """The digest of each file, of the kind that its approved digest has. Raises OSError."""
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        digests = pool.map(lambda path: _hash_file(folder / path, approved[path].partition(":")[0]), paths)
        return dict(zip(paths, digests, strict=True))


def _hash_file(path: Path, kind: str) -> str:
    """The digest of a plain file, or in words why it has none. Raises OSError."""
    # O_NONBLOCK: what was a file when it was listed may be a pipe by now.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            return "no plain file"
        if about.st_size > MOST_FILE_BYTES:
            return f"{about.st_size:,} bytes, which were not read"
        # Git's own hash of a file begins with its kind and length.
        is_git = f"{kind}:" != SHA256
        digest = hashlib.sha1(f"blob {about.st_size}\0".encode(), usedforsecurity=False) if is_git else hashlib.sha256()
        left = about.st_size
        while left > 0 and (chunk := file.read(min(_CHUNK_BYTES, left))):
            digest.update(chunk)
            left -= len(chunk)
        return f"{kind}:{digest.hexdigest()}"


def _find_differences(
    approved: Mapping[str, str], needed: set[str], files: list[str], others: Mapping[str, str], here: Mapping[str, str]
) -> Iterator[Finding]:
    """Files with another content, files that are missing, and entries that were not approved."""

    def differ(path: str, says: str, is_here: str) -> Finding:
        return Finding(what=path, state=DIFFERENT, approved=says, here=is_here)

    for path in sorted(approved.keys() & here.keys()):
        if here[path] != approved[path]:
            yield differ(path, approved[path], here[path])
    for path in sorted(needed - here.keys() - others.keys()):
        yield differ(path, approved[path], "missing")
    for path in files:
        if path not in approved:
            yield differ(path, "no such file", "an additional file")
    for path, kind in sorted(others.items()):
        yield differ(path, approved.get(path, "no such file"), f"{kind}, no plain file")


def _limit_list(wrong: list[Finding]) -> list[Finding]:
    more = len(wrong) - MOST_LISTED
    if more <= 0:
        return wrong
    return [*wrong[:MOST_LISTED], Finding(what="more files", state=DIFFERENT, here=f"{more:,} more files differ")]
