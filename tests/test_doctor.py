"""What the doctor says of this machine, and of code that is confined."""

import psutil
import pytest

from vllm_qualify import doctor
from vllm_qualify.engine.confinement import NAMESPACES


def line_of(what: str) -> doctor.Diagnosis:
    return next(line for line in doctor.examine() if line.what == what)


def test_memory_is_what_the_kernel_can_give_not_what_lies_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that serves models has its page cache full: 1,167 MiB were free, 17,185 available."""
    memory = psutil.virtual_memory()._replace(free=1_167 * 2**20, available=17_185 * 2**20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    line = line_of("memory")
    assert (line.state, line.detail) == ("ok", "17,185 MiB available")


def test_it_says_when_code_gets_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMESPACES, "off")
    line = line_of("isolation")
    assert (line.state, NAMESPACES in line.detail, line.optional) == ("absent", True, True)
