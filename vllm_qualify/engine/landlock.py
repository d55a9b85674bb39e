"""Confine this process, and all that it starts, to the files that rules name. Linux's Landlock holds the rules.

The guard calls it in its child, before the child becomes the command. It uses only the standard library, as the guard does.
What Landlock has no right for is refused by `namespaces`, where this machine gives them, and by `seccomp`.

A confined process opens no other file, and it sees nothing of a process that is not confined by the same rules: not its
environment, memory or open files, and it sends it no signal. It keeps only the capabilities in KEPT: with CAP_PERFMON or
CAP_SYS_ADMIN root reads any environment in /proc, whatever Landlock says. It cannot get more of them, nor loosen the rules.
"""

import ctypes
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vllm_qualify.engine.namespaces import check_result, close_the_machine, enter_own_mounts, start_first_process
from vllm_qualify.engine.seccomp import can_filter, filter_calls

__all__ = ["can_confine", "confine_child", "landlock_version", "start_first_process"]

Rules = Mapping[str, Any]
"""Paths by what is allowed beneath them: `readable`, `listable`, `writable`, `devices`, `processes`; and `isolated`."""

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
# Root reads what only another user may, and pins memory for devices.
DAC_OVERRIDE, IPC_LOCK, LAST_CAPABILITY = 1, 14, 63
KEPT = 1 << DAC_OVERRIDE | 1 << IPC_LOCK


def landlock_version() -> int:
    """The version of this kernel's Landlock; 0 if it has none, or it is turned off."""
    return max(0, int(LIBC.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION)))


def can_confine() -> bool:
    return landlock_version() >= LEAST_VERSION


def confine_child(rules: Rules) -> None:
    """What a child calls before its exec. Without Landlock it only gives up capabilities. Raises OSError."""
    can = can_confine()
    if rules["isolated"]:
        enter_own_mounts([*rules["readable"], *rules["listable"]], rules["writable"])
    elif can and os.geteuid() == 0:
        close_the_machine()
    # Not before: a rule is for what is mounted at its path now.
    ruleset = _make_ruleset(rules) if can else None
    _give_up_capabilities()
    check_result(LIBC.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    if ruleset is not None:
        check_result(LIBC.syscall(RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
        if can_filter():
            filter_calls()


def _make_ruleset(rules: Rules) -> int:
    version = landlock_version()
    handled = (1 << RIGHTS.get(version, RIGHTS[5])) - 1
    scoped = SIGNALS_AND_ABSTRACT_SOCKETS if version >= SCOPED_FROM else 0
    # An older kernel takes the longer structure, as long as what it does not know is 0.
    asked = struct.pack("QQQ", handled, 0, scoped)
    ruleset = check_result(LIBC.syscall(CREATE_RULESET, asked, ctypes.c_size_t(len(asked)), 0), "landlock_create_ruleset")
    for kind, allowed in ALLOWED.items():
        for path in rules[kind]:
            # What is not there needs no rule.
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _add_rule(ruleset, path, allowed & handled)
    return ruleset


def _add_rule(ruleset: int, path: str, allowed: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            allowed &= OF_FILES
        rule = struct.pack("=Qi", allowed, place)
        check_result(LIBC.syscall(ADD_RULE, ruleset, BENEATH_PATH, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(place)


def _give_up_capabilities() -> None:
    LIBC.prctl(AMBIENT, CLEAR_ALL, 0, 0, 0)
    for number in range(LAST_CAPABILITY + 1):
        if not KEPT >> number & 1:
            # Without effect for a user that has none, and for a number that this kernel does not know.
            LIBC.prctl(DROP_FROM_BOUNDING_SET, number, 0, 0, 0)
    header, sets = struct.pack("Ii", CAPABILITIES_VERSION, 0), ctypes.create_string_buffer(24)
    check_result(LIBC.capget(header, sets), "capget")
    # Effective, permitted and inheritable; the lower 32 capabilities of each, then the higher ones.
    low = [each & KEPT for each in struct.unpack("6I", sets.raw)[:3]]
    check_result(LIBC.capset(header, struct.pack("6I", *low, 0, 0, 0)), "capset")
