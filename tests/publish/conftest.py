"""Stores to test against: a directory, moto's server and a real gateway (Ceph's, from infra/radosgw.sh)."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from moto.server import ThreadedMotoServer

from tests.s3 import BUCKET, Settings, make_bucket, settings_in
from vllm_qualify.publish.store import PrunableStore
from vllm_qualify.publish.stores import open_store

RADOSGW = pytest.param("radosgw", marks=pytest.mark.s3)


@pytest.fixture(autouse=True)
def no_outer_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The settings of whoever runs the tests must not reach them."""
    for name in os.environ:
        if name.startswith(("AWS_", "VLLM_QUALIFY_S3_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))


@pytest.fixture(scope="session")
def moto_settings() -> Iterator[Settings]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "moto-key",
        "AWS_SECRET_ACCESS_KEY": "moto-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    make_bucket(settings)
    yield settings
    server.stop()


@pytest.fixture
def become_denied(radosgw_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """From its call on, the gateway is asked by a user who may do nothing."""
    return partial(use, settings_in(radosgw_directory / "env.denied"), monkeypatch)


@pytest.fixture
def moto_url(moto_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> str:
    return use(moto_settings, monkeypatch)


@pytest.fixture
def radosgw_url(radosgw_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> str:
    return use(radosgw_settings, monkeypatch)


@pytest.fixture
def directory_url(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@pytest.fixture(params=["moto", RADOSGW])
def s3_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store in S3."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture(params=["directory", "moto", RADOSGW])
def store(request: pytest.FixtureRequest) -> PrunableStore:
    """An empty store that has passed its check."""
    return checked_store(request)


@pytest.fixture(params=["directory", RADOSGW])
def real_store(request: pytest.FixtureRequest) -> PrunableStore:
    """Without moto, which looks and then writes, with nothing to keep two requests apart."""
    return checked_store(request)


def checked_store(request: pytest.FixtureRequest) -> PrunableStore:
    store = open_store(str(request.getfixturevalue(f"{request.param}_url")))
    store.check()
    return store


def use(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid4().hex}"
