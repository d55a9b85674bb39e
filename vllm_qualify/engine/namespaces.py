"""Namespaces of its own for a confined process: it sees nothing of other processes, and changes no file of theirs.

It uses only the standard library, as the guard does. Root makes namespaces; another user makes a user namespace first, and has
the right to make the others in it. A kernel or a container may refuse either.

- Processes: the guard's next children are in a namespace of their own. The first of them only reaps. When it ends, the kernel
  ends all others, also those that have left the command's group.
- Mounts: all is read-only but what the rules let it write, /proc and /dev/shm. Landlock has no right for chmod, chown, utimes
  and setxattr, and a read-only mount refuses them. A new /proc shows its own processes alone, a new /dev/shm is empty.
- IPC: segments of System V and queues of POSIX are its own.
"""

import ctypes
import os
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PROCESSES = 0x20000, 0x08000000, 0x10000000, 0x20000000
NO_SUID, NO_DEVICES, NO_EXECUTION, BIND, RECURSIVE, PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
# The numbers are the same on every architecture. All three are older than Landlock's version 2.
OPEN_TREE, MOVE_MOUNT, SET_MOUNT_ATTRIBUTES = 428, 429, 442
HERE, EMPTY_PATH, WHOLE_TREE, CLONE_TREE, FROM_DESCRIPTOR = -100, 0x1000, 0x8000, 1, 4
READ_ONLY = struct.pack("QQQQ", 1, 0, 0, 0)
DIES_WITH_PARENT = 1
SHARED_MEMORY = "/dev/shm"  # noqa: S108  (the kernel's own place)
# What root may change there changes the whole machine: core_pattern names a program that the kernel runs.
OF_THE_MACHINE = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi", "/proc/scsi")


def start_first_process() -> int:
    """Begin a namespace of processes for this process's next children. Returns the id of the first one: with it all end.

    This process stays outside, and can start no thread any more. Raises OSError if it may not.
    """
    if LIBC.unshare(NEW_PROCESSES) < 0:
        user, group = os.geteuid(), os.getegid()
        check_result(LIBC.unshare(NEW_USER | NEW_PROCESSES), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
    first = os.fork()
    if first == 0:
        _reap_for_ever()
    return first


def _reap_for_ever() -> NoReturn:
    """Nobody else reaps the orphans of a namespace. The kernel keeps the other processes of it from ending this one."""
    try:
        LIBC.prctl(DIES_WITH_PARENT, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        while True:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            signal.sigwait({signal.SIGCHLD})
    finally:
        os._exit(1)


def enter_own_mounts(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Give this process mounts and IPC of its own. What is `readable` beneath /dev/shm stays there. Raises OSError."""
    _unshare_mounts(NEW_MOUNTS | NEW_IPC)
    shared = os.path.realpath(SHARED_MEMORY)
    size = os.statvfs(shared)
    trees = _clone_trees(shared, readable, writable)
    _set_read_only(HERE, "/", WHOLE_TREE)
    for path, tree in trees:
        if not _is_beneath(path, shared):
            _attach(tree, path)
    _mount("proc", "/proc", NO_SUID | NO_DEVICES | NO_EXECUTION)
    # As much as the machine's own may take: half of the memory, where nobody has set it otherwise.
    _mount("tmpfs", shared, NO_SUID | NO_DEVICES, f"mode=1777,size={size.f_blocks * size.f_frsize}")
    for path, tree in trees:
        if _is_beneath(path, shared):
            _make_place(path, tree)
            _attach(tree, path)
    # What is current is still the tree below.
    with suppress(OSError):
        os.chdir(os.getcwd())
    if os.geteuid() == 0:
        _close_machine_settings()


def close_the_machine() -> None:
    """Make what of /proc belongs to the machine read-only for this process. In a container it is so, and this is refused."""
    try:
        _unshare_mounts(NEW_MOUNTS)
    except OSError as error:
        if any(os.path.exists(path) and not os.statvfs(path).f_flag & os.ST_RDONLY for path in OF_THE_MACHINE):
            raise OSError(error.errno, "root may change the machine's settings in /proc") from error
        return
    _close_machine_settings()


def _unshare_mounts(namespaces: int) -> None:
    check_result(LIBC.unshare(namespaces), "unshare")
    check_result(LIBC.mount(None, b"/", None, RECURSIVE | PRIVATE, None), "mount /")


def _close_machine_settings() -> None:
    for path in filter(os.path.exists, OF_THE_MACHINE):
        check_result(LIBC.mount(path.encode(), path.encode(), None, BIND | RECURSIVE, None), f"mount {path}")
        _set_read_only(HERE, path, WHOLE_TREE)


def _clone_trees(shared: str, readable: Sequence[str], writable: Sequence[str]) -> list[tuple[str, int]]:
    """Copies of the trees at these paths, as they are mounted now: outer ones first. What is not there has none."""
    paths = {os.path.realpath(path): False for path in readable} | {os.path.realpath(path): True for path in writable}
    trees = []
    for path, is_writable in sorted(paths.items()):
        if path == shared or not (is_writable or _is_beneath(path, shared)) or not os.path.exists(path):
            continue
        flags = CLONE_TREE | WHOLE_TREE | os.O_CLOEXEC
        tree = check_result(LIBC.syscall(OPEN_TREE, HERE, path.encode(), flags), f"open_tree {path}")
        if not is_writable:
            _set_read_only(tree, "", WHOLE_TREE | EMPTY_PATH)
        trees.append((path, tree))
    return trees


def _is_beneath(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/")


def _make_place(path: str, tree: int) -> None:
    """A folder or a file where the tree is to be attached, if an outer tree has none."""
    if os.path.exists(path):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.isdir(f"/proc/self/fd/{tree}"):
        os.mkdir(path)
    else:
        Path(path).touch()


def _attach(tree: int, path: str) -> None:
    check_result(LIBC.syscall(MOVE_MOUNT, tree, b"", HERE, path.encode(), FROM_DESCRIPTOR), f"move_mount {path}")
    os.close(tree)


def _set_read_only(at: int, path: str, flags: int) -> None:
    size = ctypes.c_size_t(len(READ_ONLY))
    check_result(LIBC.syscall(SET_MOUNT_ATTRIBUTES, at, path.encode(), flags, READ_ONLY, size), f"mount_setattr {path}")


def _mount(kind: str, path: str, flags: int, options: str = "") -> None:
    check_result(LIBC.mount(kind.encode(), path.encode(), kind.encode(), flags, options.encode()), f"mount {path}")


def check_result(result: int, step: str) -> int:
    """The result of a system call. Raises OSError, which names the step."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")
    return result
