"""What live tests share beside the runs of `tests/qualified.py`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.builders.load_profiles import Qualify
from tests.qualified import COMMAND, Qualified, furnished, of, run
from tests.recipes import Document, small, write
from vllm_qualify.engine.environment import EngineEnvironment


@pytest.fixture(autouse=True)
def home(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnished(home, tmp_path_factory)


@pytest.fixture(scope="module")
def qualify(engine: EngineEnvironment, on_a_server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Qualify:
    """Qualifies a small recipe, which a function changes first, in a home of its own."""

    def made(change: Callable[[Document, Path], None], *options: str, by: Sequence[str] = (COMMAND,)) -> Qualified:
        home = furnished(tmp_path_factory.mktemp("profiles"), tmp_path_factory)
        document = small(home)
        change(document, home)
        recipe = str(write(document, home / "recipe.yaml"))
        store = f"file://{home}/store"
        command = (*by, "run", recipe, "--store", store, *options)
        done = run(home, *command, **of(engine), **on_a_server)
        return Qualified(done, home, store)

    return made
