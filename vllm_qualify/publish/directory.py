"""A store below a directory."""

import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from vllm_qualify.errors import AlreadyExistsError, StoreBusyError, StoreError
from vllm_qualify.publish import store
from vllm_qualify.publish.store import PLACE, Stored, checked_key

LOCK_WAIT_S = 30.0
# The first pause is as long as a small write, and each is twice the one before, up to the longest.
LOCK_POLL_S, LONGEST_LOCK_POLL_S = 0.001, 0.01


def read_file(path: Path, most_bytes: int = store.MOST_DOCUMENT_BYTES) -> bytes:
    """The content of a file. Raises TooLongError, or OSError, also for a pipe or a device, whose content might never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(file.fileno())
        kind = about.st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        if about.st_size > most_bytes:
            raise store.too_long_error(str(path), most_bytes)
        return file.read()


class DirectoryStore:
    """Files below a directory, which `check`, `put_new` and `swap` create if it is missing. See `Store` for the methods.

    A new object is a hard link to a finished temporary file in the same directory, so the file system must support hard links.
    A changeable object is replaced by renaming such a file. Each has its own lock (`flock`) in `.locks`; its tag is the SHA-256
    of its content. A killed process frees its lock, and may leave a temporary file (`.new-…`), which is never listed and may
    be deleted. The files in `.locks` must stay while the store is in use. Objects are files without write permission; the
    content type is not kept.

    On NFS this relies on three properties of every mount with default options: a link and a rename happen once on the server,
    an `flock` holds for all clients (not with `nolock` or `local_lock`), and a file that is opened after a lock was taken is
    read again from the server.
    """

    def __init__(self, directory: Path) -> None:
        self._root = directory
        # What was read last: to compare it with what a swap finds is faster than to hash that again.
        self._last = Stored(b"", _content_tag(b""))

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def locate(self, key: str) -> str:
        return str(self._path_of_key(key))

    def put_new(self, key: str, body: bytes, content_type: str) -> None:  # noqa: ARG002  # files have no content type
        path = self._path_of_key(key)
        with _as_store_errors(path):
            # Saves the write: most objects that are put again exist already. The link still decides.
            if os.path.lexists(path):
                raise store.already_exists(str(path))
        _write_file(path, body, _link_file)

    def get(self, key: str, most_bytes: int = store.MOST_DOCUMENT_BYTES) -> bytes:
        return self._read_body(self._path_of_key(key), most_bytes)

    def read(self, key: str) -> Stored:
        return self._read_stored(self._path_of_key(key))

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:  # noqa: ARG002  # as above
        self._swap_file(self._path_of_key(key), body, tag)

    def delete(self, key: str) -> None:
        path = self._path_of_key(key)
        with _as_store_errors(path):
            self._require_root()
            path.unlink(missing_ok=True)

    def exists(self, key: str) -> bool:
        path = self._path_of_key(key)
        with _as_store_errors(path):
            self._require_root()
            return path.is_file()

    def keys(self, prefix: str) -> Iterator[str]:
        folder = self._root / store.checked_prefix(prefix).rpartition("/")[0]
        with _as_store_errors(folder):
            self._require_root()
            return store.sorted_keys(self._files_below(folder), prefix)

    def now(self) -> datetime:
        with _as_store_errors(self._root):
            self._require_root()
        path = self._root / f".new-{uuid4().hex}"
        with _as_store_errors(path):
            # A network file system's server dates what is written there.
            try:
                _write_through(path, b"now")
                return datetime.fromtimestamp(path.stat().st_mtime, UTC)
            finally:
                path.unlink(missing_ok=True)

    def check(self) -> None:
        probe, swapped = self._root / store.PROBE_KEY, self._root / store.SWAP_PROBE_KEY
        store.require_create_only(lambda: _write_file(probe, store.PROBE_BODY, _link_file), self.url)
        store.require_swap(lambda: self._read_stored(swapped), lambda body, tag: self._swap_file(swapped, body, tag), self.url)
        with _as_store_errors(self._root):
            os.listdir(self._root)
        store.checked_now(self)

    def _path_of_key(self, key: str) -> Path:
        return self._root / checked_key(key)

    def _require_root(self) -> None:
        # Raises if the directory is mistyped or not mounted: it must not look like an empty store.
        os.listdir(self._root)

    def _files_below(self, folder: Path) -> Iterator[str]:
        if not folder.is_dir():
            return
        for parent, _, names in os.walk(folder, onerror=_raise_error):
            for name in names:
                yield Path(parent, name).relative_to(self._root).as_posix()

    def _read_stored(self, path: Path) -> Stored:
        body = self._read_body(path)
        self._last = stored = Stored(body, _content_tag(body))
        return stored

    def _read_body(self, path: Path, most_bytes: int = store.MOST_DOCUMENT_BYTES) -> bytes:
        with _as_store_errors(path):
            try:
                return read_file(path, most_bytes)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                self._require_root()
                raise store.missing_error(str(path)) from None

    def _swap_file(self, path: Path, body: bytes, tag: str | None) -> None:
        with _as_store_errors(path), self._hold_lock(path, lambda: self._require_tag(path, tag)):
            self._require_tag(path, tag)
            try:
                _write_file(path, body, _link_file if tag is None else _replace_file)
            except AlreadyExistsError:
                # `put_new` takes no lock, so it can come first.
                raise store.changed_error(str(path)) from None

    def _require_tag(self, path: Path, tag: str | None) -> None:
        found = None
        with suppress(FileNotFoundError):
            there, last = read_file(path), self._last
            found = last.tag if there == last.body else _content_tag(there)
        if found != tag:
            raise store.changed_error(str(path))

    @contextmanager
    def _hold_lock(self, path: Path, look: Callable[[], None]) -> Iterator[None]:
        """While others hold the lock, `look` is called, which may raise: who is too late need not wait for it."""
        lock = self._root / ".locks" / _content_tag(str(path.relative_to(self._root)).encode())
        lock.parent.mkdir(parents=True, exist_ok=True)
        with open(lock, "ab") as file:
            _wait_for(file, path, look)
            yield


def _content_tag(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _wait_for(file: BinaryIO, path: Path, look: Callable[[], None]) -> None:
    until, pause_s = time.monotonic() + LOCK_WAIT_S, LOCK_POLL_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                problem = f"{path} has been locked by another writer for {LOCK_WAIT_S:.0f} s"
                raise StoreBusyError(problem, "try again later, or find the process that hangs", PLACE) from None
        look()
        time.sleep(pause_s)  # another writer holds the lock only while it writes a small file
        pause_s = min(2 * pause_s, LONGEST_LOCK_POLL_S)


def _write_file(path: Path, body: bytes, place: Callable[[Path, Path], None]) -> None:
    temporary = path.parent / f".new-{uuid4().hex}"
    with _as_store_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_through(temporary, body)
            place(temporary, path)
            _sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _write_through(path: Path, body: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444), "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _link_file(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A network file system repeats a request whose answer was lost. It then finds the link that it has just made.
        if not os.path.samefile(temporary, path):
            raise store.already_exists(str(path)) from None


def _replace_file(temporary: Path, path: Path) -> None:
    written = temporary.stat().st_ino
    try:
        os.replace(temporary, path)
    except FileNotFoundError:
        # As above: the repeated request no longer finds what the first one renamed.
        if path.stat().st_ino != written:
            raise


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_error(error: OSError) -> None:
    raise error


@contextmanager
def _as_store_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = StoreBusyError if error.errno in _PASSING else StoreError
        remedy = _REMEDIES.get(error.errno or 0, "look after that disk, or choose another store")
        raise kind(f"{path} cannot be used: {error.strerror or type(error).__name__}", remedy, PLACE) from error


_A_FILE = "one of the names on this path is a file: choose another directory or key"
_REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: "free space on that disk, or choose another store",
    errno.EDQUOT: "raise the quota of this user, or choose another store",
    errno.EACCES: "give this user the right to read and write there, or choose another store",
    errno.EPERM: "give this user the right to write there; the file system must also support hard links",
    errno.ENOTSUP: "the file system must support hard links and locks: choose another store",
    errno.ENOLCK: "mount the file system with locks, or choose another store",
    errno.EROFS: "mount the file system for writing, or choose another store",
    errno.ENOTDIR: _A_FILE,
    errno.EEXIST: _A_FILE,
    errno.ENOENT: "check the store's URL and that its file system is mounted",
}
_PASSING = frozenset({errno.ETIMEDOUT, errno.ESTALE, errno.EAGAIN})
