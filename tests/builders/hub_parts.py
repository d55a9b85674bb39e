"""A hub with repositories, and a server that reads them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.engine.hub import COMMIT, hub_of
from tests.releases.service import Service
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.hub import Repository, cache_folder, find_repository
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.server import ServerPlan

MODEL, TOKENIZER, DRAFT = "org/tiny", "org/words", "org/draft"
# A whole file of safetensors, without a tensor.
WEIGHTS = (2).to_bytes(8, "little") + b"{}"
FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"the same weights",
    "original/m.pth": b"again",
}
REPOSITORIES = {MODEL: FILES, TOKENIZER: {"tokenizer.json": b"{}"}, DRAFT: {"config.json": b"{}", "model.safetensors": WEIGHTS}}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return cache_folder()


@pytest.fixture
def service(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with hub_of(REPOSITORIES) as hub:
        assert not cache.exists()
        monkeypatch.setenv("HF_ENDPOINT", f"http://{hub.address}")
        yield hub


def repository(name: str = MODEL) -> Repository:
    return find_repository(name, None, "check")


def server(arguments: Mapping[str, object], image: EngineImage | None = None, model: str = MODEL) -> ServerPlan:
    return ServerPlan.model_validate(
        {
            "engine": (image or EngineEnvironment(python=Path("/env/bin/python"))).model_dump(),
            "model": model,
            "revision": COMMIT,
            "served_model_name": "tiny",
            "arguments": arguments,
            "environment": {},
            "startup_timeout_s": 60,
        }
    )
