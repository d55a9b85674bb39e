"""A store, keys, and a run to decide about."""

from pathlib import Path

import pytest

from tests.approval.builder import made_key, publish_report
from tests.publish.conftest import moto_settings, moto_url, no_outer_settings, radosgw_url, s3_url
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store

__all__ = ["moto_settings", "moto_url", "no_outer_settings", "radosgw_url", "s3_url"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "store").mkdir()
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def run(store: Store, tmp_path: Path) -> PublishedRun:
    return publish_report(store, tmp_path / "runs")


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> PrivateKey:
    return made_key(tmp_path_factory.mktemp("key") / "approver.pem")


@pytest.fixture(scope="session")
def other_key(tmp_path_factory: pytest.TempPathFactory) -> PrivateKey:
    return made_key(tmp_path_factory.mktemp("key") / "other.pem")
