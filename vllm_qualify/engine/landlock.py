"""Confine this process, and all that it starts, to the files that rules name. Linux's Landlock holds the rules.

The guard calls it in its child, before the child becomes the command. It uses only the standard library, as the guard does.

A confined process opens no other file, and it sees nothing of a process that is not confined by the same rules: not its
environment, memory or open files, and it sends it no signal. It keeps only the capabilities in KEPT: with CAP_PERFMON or
CAP_SYS_ADMIN root reads any environment in /proc, whatever Landlock says. It cannot get more of them, nor loosen the rules.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

Rules = Mapping[str, Sequence[str]]
"""Paths by what is allowed beneath them: `readable`, `listable`, `writable`, `devices`, `processes`."""

# Version 1 (Linux 5.13) never lets a file move to another folder, as compilers do in their caches. Version 2 is Linux 5.19's.
LEAST_VERSION = 2

LIBC = ctypes.CDLL(None, use_errno=True)
# The numbers are the same on every architecture.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ASK_VERSION, BENEATH_PATH = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
# How many rights on files, from the first, each version knows: later ones know all of these, and more.
RIGHTS = {2: 14, 3: 15, 4: 15, 5: 16}
SCOPED_FROM, SIGNALS_AND_ABSTRACT_SOCKETS = 6, 3

ALLOWED = {
    "readable": EXECUTE | READ_FILE | READ_DIR,
    "listable": READ_DIR,
    "writable": (1 << 16) - 1,
    "devices": READ_FILE | WRITE_FILE | READ_DIR | IOCTL_DEV,
    "processes": READ_FILE | WRITE_FILE | READ_DIR | TRUNCATE,
}

SET_NO_NEW_PRIVILEGES, DROP_FROM_BOUNDING_SET, AMBIENT, CLEAR_ALL = 38, 24, 47, 4
CAPABILITIES_VERSION = 0x20080522
NEW_MOUNTS, READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 0x20000, 1, 32, 4096, 16384, 1 << 18
# What root may change there changes the whole machine: core_pattern names a program that the kernel runs.
OF_THE_MACHINE = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi", "/proc/scsi")
# Root reads what only another user may, and pins memory for devices.
DAC_OVERRIDE, IPC_LOCK, LAST_CAPABILITY = 1, 14, 63
KEPT = 1 << DAC_OVERRIDE | 1 << IPC_LOCK


def landlock_version() -> int:
    """The version of this kernel's Landlock; 0 if it has none, or it is turned off."""
    return max(0, int(LIBC.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION)))


def can_confine() -> bool:
    return landlock_version() >= LEAST_VERSION


def confining_child(rules: Rules) -> Callable[[], None]:
    """What a child calls before its exec. Without Landlock it only gives up capabilities. Raises OSError."""
    ruleset = _make_ruleset(rules) if can_confine() else None

    def confine() -> None:
        if ruleset is not None and os.geteuid() == 0:
            _close_the_machine()
        _give_up_capabilities()
        _check_result(LIBC.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        if ruleset is not None:
            _check_result(LIBC.syscall(RESTRICT_SELF, ruleset, 0))

    return confine


def _make_ruleset(rules: Rules) -> int:
    version = landlock_version()
    handled = (1 << RIGHTS.get(version, RIGHTS[5])) - 1
    scoped = SIGNALS_AND_ABSTRACT_SOCKETS if version >= SCOPED_FROM else 0
    # An older kernel takes the longer structure, as long as what it does not know is 0.
    asked = struct.pack("QQQ", handled, 0, scoped)
    ruleset = _check_result(LIBC.syscall(CREATE_RULESET, asked, ctypes.c_size_t(len(asked)), 0))
    for kind, paths in rules.items():
        for path in paths:
            # What is not there needs no rule.
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _add_rule(ruleset, path, ALLOWED[kind] & handled)
    return ruleset


def _add_rule(ruleset: int, path: str, allowed: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            allowed &= OF_FILES
        _check_result(LIBC.syscall(ADD_RULE, ruleset, BENEATH_PATH, struct.pack("=Qi", allowed, place), 0))
    finally:
        os.close(place)


def _close_the_machine() -> None:
    """Make what of /proc belongs to the machine read-only for this process. In a container it is so, and this is refused."""
    if LIBC.unshare(NEW_MOUNTS) < 0:
        if any(os.path.exists(path) and not os.statvfs(path).f_flag & os.ST_RDONLY for path in OF_THE_MACHINE):
            raise OSError(errno.EPERM, "this process could not be confined: root may change the machine's settings in /proc")
        return
    _check_result(LIBC.mount(None, b"/", None, RECURSIVE | PRIVATE, None))
    for path in filter(os.path.exists, OF_THE_MACHINE):
        place = path.encode()
        _check_result(LIBC.mount(place, place, None, BIND | RECURSIVE, None))
        _check_result(LIBC.mount(None, place, None, BIND | REMOUNT | READ_ONLY, None))


def _give_up_capabilities() -> None:
    LIBC.prctl(AMBIENT, CLEAR_ALL, 0, 0, 0)
    for number in range(LAST_CAPABILITY + 1):
        if not KEPT >> number & 1:
            # Without effect for a user that has none, and for a number that this kernel does not know.
            LIBC.prctl(DROP_FROM_BOUNDING_SET, number, 0, 0, 0)
    header, sets = struct.pack("Ii", CAPABILITIES_VERSION, 0), ctypes.create_string_buffer(24)
    _check_result(LIBC.capget(header, sets))
    # Effective, permitted and inheritable; the lower 32 capabilities of each, then the higher ones.
    low = [each & KEPT for each in struct.unpack("6I", sets.raw)[:3]]
    _check_result(LIBC.capset(header, struct.pack("6I", *low, 0, 0, 0)))


def _check_result(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"this process could not be confined: {os.strerror(number)}")
    return result
