"""The processes of pytest-xdist as forks of one that has imported what takes long, and what each of them would import."""

import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.warm.forks import Forks, Warm, answering, write_stand_in

IMPORTS = (
    *("great_expectations.expectations", "scipy.stats", "pandas", "sqlalchemy", "docker", "boto3", "moto.server", "hypothesis"),
    *("prefect.flow_engine", "prefect.testing.utilities", "prefect.client.orchestration", "prefect.events.worker"),
)
# They start as soon as their parent has imported these.
IDLE_S = 120
ONE_EACH = "popen"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before pytest-xdist starts them."""
    if set(config.option.tx or ()) != {ONE_EACH}:
        return
    stack = ExitStack()
    config.add_cleanup(stack.close)
    # A short name: a path of a socket has at most 107 letters.
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="vq-warm-")))
    address, program = folder / "socket", folder / "python"
    write_stand_in(program, address)
    forks = Forks(Warm(sys.executable, IMPORTS, IDLE_S), lambda _: True)
    stack.enter_context(answering(forks, address, lambda *_: None))
    config.option.tx = [f"{ONE_EACH}//python={program}" for _ in config.option.tx]
