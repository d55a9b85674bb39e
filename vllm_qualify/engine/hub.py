"""Models of the hub: their commits, their files' hashes, and the files themselves in this machine's cache."""

import errno
import glob
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from vllm_qualify.engine.confinement import hub_cache
from vllm_qualify.errors import CallerError, HostError, HubError, QualifyError, writing
from vllm_qualify.lazy import Lazy
from vllm_qualify.limits import call_within
from vllm_qualify.recipe.values import Frozen

if TYPE_CHECKING:
    import huggingface_hub
    from huggingface_hub import errors as hub_errors
    from huggingface_hub import hf_api
else:
    huggingface_hub, hub_errors = Lazy("huggingface_hub"), Lazy("huggingface_hub.errors")

# For one read, and for a whole answer.
READ_S, ANSWER_S = 30.0, 120.0
HASHED_AT_ONCE = 4
SHA256, GIT_BLOB = "sha256:", "gitBlob:"
# Formats of weights, the one that engines prefer first.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5", ".ot")
OF_THE_DISK = (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT)


class Repository(Frozen):
    """A repository of the hub at a commit.

    `files` has the hash of each file as the hub has it: `sha256:` of those that Git LFS keeps, `gitBlob:` of the others. It is
    empty if the hub does not give them.
    """

    name: str
    commit: str
    files: dict[str, str] = {}


def resolve_commit(model: str, revision: str | None, place: str) -> str:
    """The commit of a branch, a tag or, for None, the default branch. HF_TOKEN and HF_ENDPOINT are used if they are set.

    Raises CallerError if the name is not valid, or the hub has no such model or revision; HostError if the hub asks for a
    login, or does not answer as it should, with `retry` if that may pass.
    """
    return _ask_hub(model, revision, place, files_metadata=False)[0]


def find_repository(model: str, revision: str | None, place: str) -> Repository:
    """A repository at the commit of `revision`, with the hashes that the hub has of its files. Raises as `resolve_commit`."""
    commit, siblings = _ask_hub(model, revision, place, files_metadata=True)
    files = dict(_path_and_hash(each, model, place) for each in siblings)
    return Repository(name=model, commit=commit, files={path: files[path] for path in sorted(files) if files[path]})


def fetch(repository: Repository, place: str) -> Path:
    """Bring a repository's files into this machine's cache, and check each by the hub's hash. Returns their folder.

    Weights in a second format are left out. Raises as `resolve_commit` and `check_files`; HostError also if the cache cannot be
    written.
    """
    wanted = [glob.escape(path) for path in needed_files(repository.files)] or None
    folder = _download(repository.name, repository.commit, place, allow_patterns=wanted)
    check_files(folder, repository, place)
    return folder


def fetch_configuration(model: str, revision: str | None, place: str) -> None:
    """Bring a model's files without its weights into the cache, by the name of a branch too. Raises as `resolve_commit`."""
    _download(model, revision, place, ignore_patterns=[f"*{end}" for end in WEIGHTS])


def fetch_small(
    model: str, revision: str | None, place: str, wanted: Collection[str], most_bytes: int
) -> tuple[Path, dict[str, int]]:
    """Bring the wanted files of a repository into the cache, if it has them. Returns their folder, and the bytes of all files.

    Raises as `resolve_commit` and `check_files`; HubError if a wanted file has more than `most_bytes`.
    """
    commit, siblings = _ask_hub(model, revision, place, files_metadata=True)
    hashes = dict(_path_and_hash(each, model, place) for each in siblings)
    sizes = {each.rfilename: each.size or 0 for each in siblings}
    if large := next((name for name in wanted if sizes.get(name, 0) > most_bytes), None):
        raise HubError(f"{large} of {model} has {sizes[large]:,} bytes", "take the file as its publisher has it", place)
    names = [glob.escape(name) for name in wanted if name in sizes]
    folder = _download(model, commit, place, allow_patterns=names)
    check_files(
        folder, Repository(name=model, commit=commit, files={path: each for path, each in hashes.items() if each}), place
    )
    return folder, sizes


def _download(model: str, revision: str | None, place: str, **patterns: Any) -> Path:
    with _hub_errors_as_ours(_in_words(model, revision), place):
        folder = huggingface_hub.snapshot_download(
            model, revision=revision, cache_dir=cache_folder(), endpoint=_hub_endpoint(), **patterns
        )
    return Path(folder)


def _in_words(model: str, revision: str | None) -> str:
    return f"{model} at {revision or 'its default branch'}"


def needed_files(files: Iterable[str]) -> list[str]:
    """Those of a repository's files that a server may read: weights in one format, the first that there is of `WEIGHTS`."""
    paths = sorted(path for path in files if not path.startswith("original/"))
    taken = next((end for end in WEIGHTS if any(path.endswith(end) for path in paths)), None)
    return [path for path in paths if taken is None or path.endswith(taken) or not path.endswith(WEIGHTS)]


def check_files(folder: Path, repository: Repository, place: str) -> None:
    """Compare every file that is in a snapshot's folder with the hub's hash of it.

    Raises HubError if a file is another one, or the hub does not have it at this commit; HostError if one cannot be read.
    """
    if not repository.files:
        return
    # A link to a folder is none of the hub's: what is in it would be served, and is not walked here.
    paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    with writing(place), ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        digests = list(pool.map(partial(_has_hub_hash, folder, repository), paths))
    if changed := [path.relative_to(folder).as_posix() for path, is_same in zip(paths, digests, strict=True) if not is_same]:
        problem = f"{', '.join(changed)} in the cache is not what the hub has of {repository.name} at {repository.commit}"
        remedy = f"delete {folder.parents[1]}, and find out who may write there"
        raise HubError(problem, remedy, place, kind="model-changed")


def cache_folder() -> Path:
    """Where the hub's library keeps repositories on this machine: HF_HUB_CACHE, else `hub` in HF_HOME."""
    return Path(os.environ.get("HF_HUB_CACHE") or hub_cache() / "hub").expanduser().absolute()


def folder_name(model: str) -> str:
    """The name of a repository's folder in a cache."""
    return f"models--{model.replace('/', '--')}"


def _has_hub_hash(folder: Path, repository: Repository, path: Path) -> bool:
    expected = repository.files.get(path.relative_to(folder).as_posix())
    if expected is None:
        return False
    with path.open("rb") as file:
        if expected.startswith(SHA256):
            return f"{SHA256}{hashlib.file_digest(file, 'sha256').hexdigest()}" == expected
        # Git's own hash of a file begins with its kind and length.
        own = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
        return f"{GIT_BLOB}{hashlib.file_digest(file, lambda: own).hexdigest()}" == expected


def _path_and_hash(sibling: "hf_api.RepoSibling", model: str, place: str) -> tuple[str, str]:
    """A file's path and its hash: SHA-256 of what Git LFS keeps, else Git's own; empty if the hub gives none."""
    path = PurePosixPath(sibling.rfilename)
    if path.is_absolute() or ".." in path.parts:
        raise HostError(f"the hub gives {model} a file outside of it: {path}", "check HF_ENDPOINT", place, kind="hub-unknown")
    if sibling.lfs:
        return str(path), f"{SHA256}{sibling.lfs.sha256}"
    return str(path), f"{GIT_BLOB}{sibling.blob_id}" if sibling.blob_id else ""


def _ask_hub(model: str, revision: str | None, place: str, *, files_metadata: bool) -> "tuple[str, list[hf_api.RepoSibling]]":
    """A revision's commit, and its files."""
    what = _in_words(model, revision)
    with _hub_errors_as_ours(what, place):
        hub = huggingface_hub.HfApi(endpoint=_hub_endpoint())
        # TimeoutError is an OSError, as one of the hub's own library.
        about = call_within(
            ANSWER_S, lambda: hub.model_info(model, revision=revision, timeout=READ_S, files_metadata=files_metadata)
        )
    if not about.sha:
        raise _no_commit_error(what, place)
    return about.sha, about.siblings or []


@contextmanager
def _hub_errors_as_ours(what: str, place: str) -> Iterator[None]:
    """Within the block, an error of the hub's library is one of ours."""
    try:
        yield
    except hub_errors.HFValidationError as error:
        raise CallerError(f"{what} is not a model of the hub", "write it like Qwen/Qwen3-0.6B", place) from error
    except hub_errors.HfHubHTTPError as error:
        raise _refusal_error(error, what, place) from error
    except hub_errors.OfflineModeIsEnabled as error:
        raise HostError(f"the hub was not asked for {what}", "unset HF_HUB_OFFLINE", place, kind="hub-offline") from error
    # HTTPError comes from its HTTP client, which depends on its version.
    except (hub_errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        if isinstance(error, OSError) and error.errno in OF_THE_DISK:
            remedy = "free space on its disk and check its permissions, or set HF_HOME"
            raise HostError(f"the hub's cache cannot be written: {error}", remedy, place) from error
        raise _unreachable_error(what, str(error), place) from error
    # The hub's newer storage (hf_xet) raises a bare RuntimeError where it does not answer.
    except RuntimeError as error:
        raise _unreachable_error(what, str(error), place) from error
    except (ValueError, LookupError, TypeError) as error:
        raise _no_commit_error(what, place) from error


def _hub_endpoint() -> str | None:
    """The current HF_ENDPOINT: the library itself reads it only once, when it is imported."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _refusal_error(error: "hub_errors.HfHubHTTPError", what: str, place: str) -> QualifyError:
    status = error.response.status_code
    if status in (401, 403):
        problem = f"the hub asks for a login, or has no {what}: it answered {status}"
        return HostError(problem, "set HF_TOKEN to a token that may read it, and check the name", place, kind="login-required")
    if status == 404:
        remedy = "check the name and the revision, and HF_TOKEN for a private model"
        return CallerError(f"the hub has no {what}", remedy, place, kind="model-missing")
    if status == 429:
        problem, remedy = f"the hub's rate limit stopped {what}", "wait, or set HF_TOKEN"
        wait_s = wait_asked_s(error.response.headers)
        return HostError(problem, remedy, place, kind="hub-rate-limit", retry=True, retry_after_s=wait_s)
    return _unreachable_error(what, f"it answered {status}", place, retry=status >= 500)


def wait_asked_s(headers: Mapping[str, str]) -> float:
    """How long an answer asks to wait (Retry-After), in seconds; 0 if it names none, or a time in the past."""
    asked = headers.get("Retry-After", "")
    if asked.isdecimal():
        return float(asked)
    try:
        # A date in HTTP is in UTC, whatever it says.
        return max(0.0, (parsedate_to_datetime(asked).replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds())
    except ValueError:
        return 0.0


def _unreachable_error(what: str, said: str, place: str, retry: bool = True) -> HostError:
    problem, remedy = f"the hub did not resolve {what}: {said}", "check the hub, the network, the proxy and HF_ENDPOINT"
    return HostError(problem, remedy, place, kind="hub-unreachable", retry=retry)


def _no_commit_error(what: str, place: str) -> HostError:
    return HostError(f"the hub gave no commit for {what}", "check HF_ENDPOINT", place, kind="hub-unknown")
