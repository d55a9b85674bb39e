"""Work in a flow of its own, and the request of a release that passes without a server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from infra.bench.passing import write_bench_recipe, write_engine
from vllm_qualify.runs.request import QualifyRelease


def in_flow(work: Callable[[], Any]) -> Any:
    @flow(name="one")
    def one() -> Any:
        return work()

    return one()


@pytest.fixture
def request_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QualifyRelease:
    monkeypatch.setenv("VLLM_QUALIFY_ENGINE", str(write_engine(tmp_path / "engine")))
    return QualifyRelease(recipe=str(write_bench_recipe(1, tmp_path / "recipe.yaml")), store=(tmp_path / "store").as_uri())
