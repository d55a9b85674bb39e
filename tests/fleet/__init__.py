"""Real services of a Prefect fleet for tests: PostgreSQL, a Prefect server on it, workers.

Each can be killed with -9 and started again on the same data and the same port. On leaving, whatever happened, nothing of it
runs any more. Logs stay beside the tests' other files; a service that does not start says its log's last lines.
"""

from tests.fleet.postgres import Postgres
from tests.fleet.server import PrefectServer
from tests.fleet.service import Service, ServiceError
from tests.fleet.worker import Worker

__all__ = ["Postgres", "PrefectServer", "Service", "ServiceError", "Worker"]
