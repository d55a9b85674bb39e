"""A filter of system calls for a confined process: those for which neither Landlock nor namespaces have a right.

It uses only the standard library, as the guard does. Whoever calls one of them gets an error, and goes on.

- Keyrings of the kernel belong to the user, and no namespace hides them.
- perf_event_open: where an administrator opened it to all, it reads the stacks of every process of a core.
- New namespaces and mounts: in a user namespace anyone has all capabilities, and reaches code of the kernel that only root may.
- prlimit of another process. One's own limits are set with the id 0.

ptrace, process_vm_readv, kcmp and pidfd_getfd stay: Landlock refuses them at any process outside its rules, and between the
processes of one server PyTorch and UCX share memory by them. So do sched_setaffinity and its like: threads are named by the
same ids as processes there. The namespace of processes is their remedy.
"""

import ctypes
import errno
import os
import struct
from typing import NamedTuple

from vllm_qualify.engine.namespaces import check_result

LIBC = ctypes.CDLL(None, use_errno=True)
SET_FILTER, ASK_ACTION = 1, 2
# Else a kernel before 5.16 slows the process down, to guard against readers by speculation: it would be measured otherwise.
SPECULATION_ALLOWED = 1 << 2
ALLOW, ERROR = 0x7FFF0000, 0x00050000
LOAD, RETURN, IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT = 0x20, 0x06, 0x15, 0x35, 0x45
# Where the kernel shows a filter the call's number, its architecture and the lower half of the first argument.
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
NEW_NAMESPACES = 0x20000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
# Numbers from here on are those of x86_64 with 32-bit pointers. No other architecture has them.
OF_X32 = 0x40000000
# open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr, open_tree_attr: the same everywhere.
MOUNTS = (428, 429, 430, 431, 432, 433, 442, 467)
# Its flags are out of a filter's sight. The C library takes clone, if the kernel does not know it.
CLONE3 = 435


class Numbers(NamedTuple):
    """What an architecture calls the system calls, and itself."""

    architecture: int
    seccomp: int
    clone: int
    prlimit: int
    refused: tuple[int, ...]


ARCHITECTURES = {
    # add_key, request_key, keyctl; bpf, perf_event_open; unshare, setns; mount, umount2, pivot_root
    "x86_64": Numbers(0xC000003E, 317, 56, 302, (248, 249, 250, 321, 298, 272, 308, 165, 166, 155)),
    "aarch64": Numbers(0xC00000B7, 277, 220, 261, (217, 218, 219, 280, 241, 97, 268, 40, 39, 41)),
}


def can_filter() -> bool:
    numbers = ARCHITECTURES.get(os.uname().machine)
    return numbers is not None and LIBC.syscall(numbers.seccomp, ASK_ACTION, 0, struct.pack("I", ERROR)) == 0


def filter_calls() -> None:
    """Refuse the calls to this process and all that it starts. It has given up new privileges. Raises OSError."""
    numbers = ARCHITECTURES[os.uname().machine]
    program = ctypes.create_string_buffer(filter_program(numbers))
    described = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(program))
    check_result(LIBC.syscall(numbers.seccomp, SET_FILTER, SPECULATION_ALLOWED, described), "seccomp")


def filter_program(numbers: Numbers) -> bytes:
    """The program that the kernel runs at each call, in the classic language of its packet filters."""
    unknown, refused = ERROR | errno.ENOSYS, ERROR | errno.EPERM
    steps = [
        _step(LOAD, ARCHITECTURE),
        _step(IF_EQUAL, numbers.architecture, 1, 0),
        _step(RETURN, unknown),
        _step(LOAD, NUMBER),
        *_answer(IF_AT_LEAST, OF_X32, unknown),
        *_answer(IF_EQUAL, CLONE3, unknown),
        *(step for number in (*numbers.refused, *MOUNTS) for step in _answer(IF_EQUAL, number, refused)),
        # The last two look at their first argument.
        _step(IF_EQUAL, numbers.clone, 0, 4),
        _step(LOAD, FIRST_ARGUMENT),
        *_answer(IF_ANY_BIT, NEW_NAMESPACES, refused),
        _step(RETURN, ALLOW),
        _step(IF_EQUAL, numbers.prlimit, 0, 3),
        _step(LOAD, FIRST_ARGUMENT),
        _step(IF_EQUAL, 0, 1, 0),
        _step(RETURN, refused),
        _step(RETURN, ALLOW),
    ]
    return b"".join(steps)


def _answer(test: int, value: int, answer: int) -> tuple[bytes, bytes]:
    return _step(test, value, 0, 1), _step(RETURN, answer)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """A test goes on after as many further steps as it says."""
    return struct.pack("HBBI", code, if_true, if_false, value)
