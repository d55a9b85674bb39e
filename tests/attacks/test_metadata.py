"""What is confined reaches the addresses where a cloud gives out credentials: the doctor names them."""

import socket

import pytest

from tests.releases.service import Answer, serving
from vllm_qualify import doctor


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
