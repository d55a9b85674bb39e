"""Files that pass between this process and a confined one, in a folder where the confined one may write anything at any time.

A link in it could lead to a file that only this process may open, and a pipe would never end.
"""

import errno
import os
import stat
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path


def write_plain(path: Path, body: bytes) -> None:
    """Write a file so that a reader sees either all of it or no file. What is there is replaced, not written through."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)
    part.replace(path)


def read_plain(path: str | Path, folder: int | None = None) -> bytes | None:
    """The content of a plain file; None if it is none. `folder` is an open folder that `path` is in."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return None
        raise
    with os.fdopen(descriptor, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


def copy_plain(file: Path, into: Path) -> None:
    """Copy a plain file, if there is one."""
    if (body := read_plain(file)) is not None:
        into.write_bytes(body)


def copy_matching(folder: Path, into: Path, patterns: Iterable[str]) -> None:
    """Copy the plain files of a folder, no link itself, whose names match. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        names = os.listdir(descriptor)
        for name in (name for name in names if any(fnmatch(name, pattern) for pattern in patterns)):
            if (body := read_plain(name, descriptor)) is not None:
                (into / name).write_bytes(body)
    finally:
        os.close(descriptor)
