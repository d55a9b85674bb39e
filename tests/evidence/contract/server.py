"""The stand-in for vLLM in this process, with a defect."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.evidence.commands import SERVER
from tests.fakes.vllm import FakeServer, Handler
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.engine.server import Server
from vllm_qualify.evidence.contract import asking, checks
from vllm_qualify.evidence.contract.asking import measure_contract
from vllm_qualify.evidence.contract.checks import parse_contract
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.recipe.contract import Contract

MODEL, PROMPT = "reference", "How many?"


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Its address, for the length of the block."""
    with FakeServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Healthy(Handler):
    model = MODEL


def measured(url: str, folder: Path, contract: Contract, patch: pytest.MonkeyPatch) -> dict[str, Measurement]:
    """The measurements of a server at this address, by metric."""
    patch.setattr(Server, "check_alive", lambda _: None)
    # As many as show what is wrong; the captured replies have all of them.
    patch.setattr(asking, "MANY", 4)
    patch.setattr(checks, "MANY", 4)
    folder.mkdir(exist_ok=True)
    measure_contract(SERVER.model_copy(update={"url": url}), contract, PROMPT, folder)
    return {row.metric: row for row in parse_contract(folder, contract, MODEL, KINDS["vllm"])}


def failing(rows: dict[str, Measurement]) -> set[str]:
    return {name.removeprefix("contract_") for name, row in rows.items() if row.value == 0.0}


def unknown(rows: dict[str, Measurement]) -> set[str]:
    return {name.removeprefix("contract_") for name, row in rows.items() if row.invalid_because}
