"""What live tests share beside the runs of `tests/qualified.py`."""

from pathlib import Path

import pytest

from tests.qualified import furnished


@pytest.fixture(autouse=True)
def home(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnished(home, tmp_path_factory)
