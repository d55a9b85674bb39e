"""A hostile model in a container: its code runs in the real server, looks for this machine's keys, and finds none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.hostile_models import SENTINEL, looked, make_hostile_model, victim
from tests.docker_engine import Engine
from tests.releases.service import Answer, serving
from vllm_qualify.engine.environment import EngineEnvironment

pytestmark = [pytest.mark.docker, pytest.mark.engine]

__all__ = ["victim"]


@pytest.fixture
def on_loopback() -> Iterator[int]:
    """The port of a service as the orchestrator has some: it tells a secret to whoever is on this machine."""
    with serving(lambda _: Answer(body=SENTINEL.encode())) as service:
        yield int(service.address.rpartition(":")[2])


def test_code_of_a_model_in_a_container_finds_no_key_and_reaches_no_service_of_the_machine(
    docker_engine: Engine, cpu_image: str, engine: EngineEnvironment, on_loopback: int, tmp_path: Path, victim: Path
) -> None:
    make_hostile_model(tmp_path, victim, on_loopback)
    assert looked("server", tmp_path, victim, engine, cpu_image) == []
    assert docker_engine.containers() == []
