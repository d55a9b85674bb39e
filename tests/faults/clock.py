"""Commands under another clock: that of libfaketime, which leaves the monotonic clock and the file system's as they are."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.ci import IN_CI

FAKED = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
REMEDY = "there is no libfaketime: infra/debian-package.sh faketime"


def clock(said: str) -> Mapping[str, str]:
    """The environment of a process whose clock says so: `+2h` is ahead, `-2h` behind."""
    if FAKED is None:
        (pytest.fail if IN_CI else pytest.skip)(REMEDY)
    return {"LD_PRELOAD": str(FAKED), "FAKETIME": said, "FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}


def jumping(file: Path) -> Mapping[str, str]:
    """The same for a clock that says what `file` says at that moment."""
    return {name: value for name, value in clock("").items() if name != "FAKETIME"} | {
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
    }


def environment(*others: Mapping[str, str]) -> dict[str, str]:
    variables = dict(os.environ)
    for other in others:
        variables |= other
    return variables
