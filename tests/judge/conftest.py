"""The folder of a cell's evidence, which each test fills itself."""

from pathlib import Path

import pytest


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    return tmp_path / "evidence"
