"""The stand-in for vLLM in this process, with a defect."""

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.evidence.commands import SERVER
from tests.fakes.vllm import FakeServer, Handler
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.server import Server
from vllm_qualify.evidence.contract import checks, measure
from vllm_qualify.evidence.contract.checks import parse_contract
from vllm_qualify.evidence.contract.exchange import EXCHANGES
from vllm_qualify.evidence.contract.measure import measure_contract
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.recipe.contract import Contract

MODEL, PROMPT = "reference", "How many?"
Rows = dict[str, Measurement]
Document = dict[str, Any]


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


def listing(model: Document) -> type[Healthy]:
    """It lists this model."""

    class Lists(Healthy):
        def do_GET(self) -> None:  # noqa: N802  # the name that the base class calls
            if self.path == "/v1/models":
                self._answer(200, {"object": "list", "data": [model]})
            else:
                super().do_GET()

    return Lists


def measured(url: str, folder: Path, contract: Contract, patch: pytest.MonkeyPatch) -> Rows:
    """The measurements of a server at this address, by metric."""
    patch.setattr(Server, "check_alive", lambda _: None)
    # As many as show what is wrong; the captured replies have all of them.
    patch.setattr(measure, "MANY", 4)
    patch.setattr(checks, "MANY", 4)
    folder.mkdir(exist_ok=True)
    measure_contract(SERVER.model_copy(update={"url": url}), contract, PROMPT, folder)
    return {row.metric: row for row in parse_contract(folder, contract, MODEL, KINDS["vllm"])}


def sent(folder: Path) -> dict[str, Document]:
    """The exchanges that were kept, by name."""
    return {each["name"]: each for each in map(json.loads, (folder / EXCHANGES).read_text().splitlines())}


def keep(folder: Path, exchanges: Iterable[Document]) -> Path:
    folder.mkdir()
    (folder / EXCHANGES).write_text("".join(f"{json.dumps(each)}\n" for each in exchanges))
    return folder


def holding(checks: Iterable[str]) -> dict[str, tuple[float, str, None]]:
    """What `said` gives if every one of these metrics holds."""
    return dict.fromkeys(checks, (1.0, "", None))


def said(rows: Rows) -> dict[str, tuple[float | None, str, str | None]]:
    return {name: (row.value, row.finding, row.invalid_because) for name, row in rows.items()}


def failing(rows: Rows) -> set[str]:
    return {name.removeprefix("contract_") for name, row in rows.items() if row.value == 0.0}


def unknown(rows: Rows) -> set[str]:
    return {name.removeprefix("contract_") for name, row in rows.items() if row.invalid_because}
