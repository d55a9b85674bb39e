"""A model's server that drips, never ends or answers with gigabytes: each request ends in its time, and no more is read."""

import gzip
import json
import time
from pathlib import Path

import httpx
import pytest

from tests.builders.dripping import dripping
from tests.evidence.commands import SERVER
from tests.releases.service import Answer, serving
from vllm_qualify.answers import ask_within
from vllm_qualify.engine import watch
from vllm_qualify.engine.server import Server
from vllm_qualify.evidence.smoke import REPLIES, measure_smoke
from vllm_qualify.recipe.accuracy import Smoke

BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
HEADERS = b"HTTP/1.1 200 OK\r\nX: "
HANGS_S = 60


@pytest.mark.parametrize("start", [b"", BODY, HEADERS], ids=["silent", "body", "headers"])
def test_an_answer_that_drips_ends_in_time(start: bytes) -> None:
    began = time.monotonic()
    with dripping(start, b"x" if start else b"") as address, pytest.raises(httpx.ReadTimeout):
        ask_within("GET", f"http://{address}/", 1)
    assert time.monotonic() - began < HANGS_S


def test_no_more_is_read_than_allowed() -> None:
    with serving(lambda _: Answer(body=bytes(2**20 + 1))) as service:
        with pytest.raises(httpx.ReadError, match="longer than 1 MiB"):
            ask_within("GET", f"http://{service.address}/", HANGS_S, 2**20)
        assert len(ask_within("GET", f"http://{service.address}/", HANGS_S, 2**20 + 1).content) == 2**20 + 1


def test_nothing_is_unpacked() -> None:
    packed = Answer(body=gzip.compress(bytes(2**20)), headers={"Content-Encoding": "gzip"})
    with serving(lambda _: packed) as service, pytest.raises(httpx.ReadError, match="compressed"):
        ask_within("GET", f"http://{service.address}/", HANGS_S)


def test_the_smoke_test_ends_though_the_server_drips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "check_alive", lambda _: None)
    with dripping(BODY, b" ") as address:
        measure_smoke(SERVER.model_copy(update={"url": f"http://{address}"}), Smoke(prompt="1 2 3", time_limit_s=1.0), tmp_path)
    answers = json.loads((tmp_path / REPLIES).read_text())["answers"]
    assert [answer["status"] for answer in answers] == [None, None]
    assert "ReadTimeout" in answers[0]["error"]


def test_a_page_of_metrics_that_drips_costs_one_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SCRAPE_TIMEOUT_S", 1.0)
    with dripping(BODY, b"#") as address:
        assert "ReadTimeout" in (watch.scrape_metrics(f"http://{address}/metrics", {"any"}).error or "")
