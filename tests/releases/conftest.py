"""The settings of whoever runs the tests must not reach them."""

import os
from pathlib import Path

import pytest

SETTINGS = ("DOCKER_CONFIG", "SSL_CERT_FILE", "SSL_CERT_DIR")


@pytest.fixture(autouse=True)
def docker_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Docker's configuration, which has no login yet."""
    for name in os.environ:
        if name in SETTINGS or name.startswith("HF_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    folder = tmp_path / "docker"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    path = folder / "config.json"
    path.write_text("{}")
    return path
