"""A server of a kind, measured."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.fake_servers import serving
from tests.evidence.contract.server import Healthy, Rows, measured
from vllm_qualify.recipe.contract import Contract

Measure = Callable[[type[Healthy], Contract], Rows]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The stage's folder."""
    return tmp_path / "contract"


@pytest.fixture
def measure_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Measures a server of this kind into the stage's folder."""

    def measure(handler: type[Healthy], contract: Contract) -> Rows:
        with serving(handler) as url:
            return measured(url, folder, contract, monkeypatch)

    return measure
