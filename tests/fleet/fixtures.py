"""One PostgreSQL and one Prefect server on it for all tests of a file; whichever a test left dead is started again.

It ends with the file: an idle server still takes a fortieth of a core.
"""

from collections.abc import Iterator
from typing import TypeVar

import pytest

from tests.ci import IN_CI
from tests.fleet.postgres import Postgres
from tests.fleet.server import PrefectServer
from tests.fleet.service import Ended, ServiceError

AnyService = TypeVar("AnyService", bound=Ended)


@pytest.fixture(scope="module")
def _postgres() -> Iterator[Postgres]:
    yield from _serving(Postgres())


@pytest.fixture(scope="module")
def _fleet_server(_postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    yield from _serving(PrefectServer(tmp_path_factory.mktemp("fleet"), _postgres.database_url))


def _serving(service: AnyService) -> Iterator[AnyService]:
    try:
        service.start()
        yield service
    except ServiceError as error:
        (pytest.fail if IN_CI else pytest.skip)(str(error))
    finally:
        service.end()


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
