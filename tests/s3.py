"""A real S3 service for tests: Debian's radosgw, started by the project's own script."""

import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
from mypy_boto3_s3 import S3Client
from xdist.workermanage import WorkerController

from tests.ci import IN_CI
from tests.sharing import share, shared_or_own

# Processes of a test run that share a service share no bucket.
BUCKET = f"evidence-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
SHARED = "radosgw"
# The file that tells why it did not start.
FAILED = "failed"
ATTEMPTS = 3
SCRIPT = Path(__file__).parents[1] / "infra" / "radosgw.sh"

Settings = Mapping[str, str]


@pytest.fixture(scope="session")
def radosgw_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of the radosgw that all processes of a test run share. Each has buckets of its own."""
    with shared_or_own(request.config, SHARED, _running, tmp_path_factory) as place:
        failed = Path(place) / FAILED
        if failed.exists():
            give_up = pytest.fail if IN_CI else pytest.skip  # CI may not pass without it
            give_up(f"radosgw did not start: {failed.read_text()[-600:]}")
        yield Path(place)


def pytest_configure_node(node: WorkerController) -> None:
    share(node, SHARED, _running)


@contextmanager
def _running(directory: Path) -> Iterator[str]:
    try:
        started = start(directory)
        if started.returncode:
            (directory / FAILED).write_text(started.stderr)
        yield str(directory)
    finally:
        subprocess.run([SCRIPT, "stop", directory], capture_output=True, check=True)


def start(directory: Path) -> subprocess.CompletedProcess[str]:
    """Once, on a busy machine, its monitor fell silent two seconds after its start: another try is another monitor."""
    for _ in range(ATTEMPTS):
        started = subprocess.run(
            [SCRIPT, "start", directory],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"RADOSGW_LIMIT_S": "60"},
        )
        if started.returncode == 0:
            break
    return started


@pytest.fixture(scope="session")
def radosgw_settings(radosgw_directory: Path) -> Settings:
    settings = settings_in(radosgw_directory / "env")
    make_bucket(settings)
    return settings


def settings_in(file: Path) -> Settings:
    words = (shlex.split(line) for line in file.read_text().splitlines())
    return dict(assignment.split("=", 1) for _, assignment in words)


def client_of_environment() -> S3Client:
    """Not `boto3.client`: its session remembers the credentials of the server that was asked first."""
    return boto3.Session().client("s3")


def client_of(settings: Settings) -> S3Client:
    return boto3.client(
        "s3",
        endpoint_url=settings["AWS_ENDPOINT_URL"],
        aws_access_key_id=settings["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=settings["AWS_SECRET_ACCESS_KEY"],
        region_name=settings["AWS_DEFAULT_REGION"],
    )


def make_bucket(settings: Settings, name: str = BUCKET) -> None:
    client_of(settings).create_bucket(Bucket=name)
