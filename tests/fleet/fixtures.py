"""One PostgreSQL and one Prefect server on it for all tests of a file; whichever a test left dead is started again.

It ends with the file: an idle server still takes a fortieth of a core.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.ci import IN_CI
from tests.fleet.postgres import Postgres
from tests.fleet.server import PrefectServer
from tests.fleet.service import ServiceError


@pytest.fixture(scope="module")
def _postgres() -> Iterator[Postgres]:
    service = Postgres()
    try:
        start_or_give_up(service.start)
        yield service
    finally:
        service.end()


@pytest.fixture(scope="module")
def _fleet_server(_postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    service = PrefectServer(tmp_path_factory.mktemp("fleet"), _postgres.database_url)
    try:
        start_or_give_up(service.start)
        yield service
    finally:
        service.end()


def start_or_give_up(start: Callable[[], None]) -> None:
    try:
        start()
    except ServiceError as error:
        give_up = pytest.fail if IN_CI else pytest.skip
        give_up(str(error))


@pytest.fixture
def postgres(_postgres: Postgres) -> Postgres:
    """A PostgreSQL that serves."""
    _postgres.start()
    return _postgres


@pytest.fixture
def fleet_server(postgres: Postgres, _fleet_server: PrefectServer) -> PrefectServer:
    """A Prefect server on `postgres` that answers."""
    assert postgres.processes()
    _fleet_server.revive()
    return _fleet_server
