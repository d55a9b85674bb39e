"""The stand-in for vLLM in this process, with a defect."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.directions import CONTRACT
from tests.evidence.commands import SERVER
from tests.fakes.vllm import Handler
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.server import Server
from vllm_qualify.evidence.contract import checks, measure
from vllm_qualify.evidence.contract.checks import parse_contract
from vllm_qualify.evidence.contract.exchange import EXCHANGES
from vllm_qualify.evidence.contract.measure import measure_contract
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.recipe.contract import Capability, Contract

MODEL, PROMPT = "reference", "How many?"
EVERY: list[Capability] = ["chat", "tools", "parallel_tools", "reasoning", "json_schema", "vision", "responses"]
# Only what the capabilities add.
ALONE = Contract(capabilities=EVERY, not_asked=dict.fromkeys(CONTRACT, "of another test"), time_limit_s=10.0)
Rows = dict[str, Measurement]
Document = dict[str, Any]


class Healthy(Handler):
    model = MODEL


def leaving_out(event: str) -> type[Healthy]:
    class LeavesOut(Healthy):
        def event(self, data: str) -> None:
            if event not in data:
                super().event(data)

    return LeavesOut


def listing(model: Document) -> type[Healthy]:
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


def short_names(metrics: Iterable[str]) -> set[str]:
    return {name.removeprefix("contract_") for name in metrics}


def failing(rows: Rows) -> set[str]:
    return short_names(name for name, row in rows.items() if row.value == 0.0)


def unknown(rows: Rows) -> set[str]:
    return short_names(name for name, row in rows.items() if row.invalid_because)
