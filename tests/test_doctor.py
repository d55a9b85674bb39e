"""What the doctor says of code that is confined, and of addresses where a cloud gives out credentials."""

import socket

import psutil
import pytest

from tests.releases.service import Answer, serving
from vllm_qualify import doctor
from vllm_qualify.engine.confinement import NAMESPACES


def line_of(what: str) -> doctor.Diagnosis:
    return next(line for line in doctor.examine() if line.what == what)


def test_a_metadata_address_that_answers_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _: Answer(status=401)) as service, socket.create_server(("127.0.0.1", 0)) as deaf:
        # One that takes a connection and never answers is none.
        addresses = (service.address.removeprefix("http://"), f"127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setattr(doctor, "METADATA", addresses)
        line = line_of("cloud metadata")
    assert (line.state, line.detail.split()[0]) == ("found", addresses[0])
    assert "operations.md" in line.remedy
    assert addresses[1] not in line.detail


def test_no_metadata_address_answers_where_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "METADATA", ("127.0.0.1:9", "[::1]:9", "no-such-name.invalid"))
    assert line_of("cloud metadata").state == "ok"


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
