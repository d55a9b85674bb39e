"""Local questions of a task: one file, or a folder with one file for each task of a group."""

import os
from itertools import islice
from pathlib import Path

from vllm_qualify.errors import CallerError, HostError

SUFFIX = ".jsonl"
# More than any group of lm-eval has in tasks, and several times as much as mmmu_val's pictures.
MOST_FILES, MOST_BYTES = 5_000, 2 * 2**30
_REMEDY = f"keep one plain file in it for each task of the group, TASK{SUFFIX}, and nothing else"


def file_of(given: Path | None, task: str) -> Path | None:
    """The file of a task: what is given, or of a folder the file with the task's name, if there is one."""
    if given is None or not given.is_dir():
        return given
    file = given / f"{task}{SUFFIX}"
    return file if file.is_file() else None


def check_questions(given: Path) -> None:
    """Check a file or folder before anything starts. Which tasks a group has is known only to lm-eval.

    Raises HostError if there is nothing; CallerError if it is too large, or the folder has something else than plain files of
    tasks.
    """
    if given.is_dir():
        size = sum(_size_in(given, entry) for entry in _list_entries(given))
    elif given.is_file():
        size = given.stat().st_size
    else:
        raise HostError(f"no questions at {given}", "restore them, or mend accuracy.questions in the recipe", "check")
    if size > MOST_BYTES:
        problem = f"{size / 2**30:,.1f} GiB of questions, where {MOST_BYTES / 2**30:g} are allowed"
        raise CallerError(problem, "leave questions out: num_questions says how many are asked", str(given))


def _list_entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        found = list(islice(entries, MOST_FILES + 1))
    if not found:
        raise CallerError("the folder of questions is empty", _REMEDY, str(folder))
    if len(found) > MOST_FILES:
        raise CallerError(f"the folder of questions has more than {MOST_FILES:,} files", _REMEDY, str(folder))
    return found


def _size_in(folder: Path, entry: os.DirEntry[str]) -> int:
    if entry.is_symlink():
        raise CallerError(f"{entry.name!r} is a link, which lm-eval may not follow", _REMEDY, str(folder))
    if not entry.is_file(follow_symlinks=False) or not entry.name.endswith(SUFFIX):
        raise CallerError(f"{entry.name!r} is no plain file TASK{SUFFIX}", _REMEDY, str(folder))
    return entry.stat(follow_symlinks=False).st_size
