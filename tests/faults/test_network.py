"""A real S3 service behind a network that fails: a run is published whole, or the next try finishes it."""

import random
from pathlib import Path

import pytest

from tests.approval.builder import CELL, NOW, RUN, approved, publish_report
from tests.faults.proxy import NetworkFault, network
from tests.publish.conftest import no_outer_settings, use
from tests.s3 import Settings
from vllm_qualify.approval.signing import PrivateKey, new_key, private_key
from vllm_qualify.approval.verify import verify
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store

__all__ = ["no_outer_settings"]

KINDS: list[NetworkFault] = ["none", "503", "reset", "cut", "slow"]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> PrivateKey:
    path = tmp_path_factory.mktemp("key") / "approver.pem"
    new_key(path)
    return private_key(path.read_text())


@pytest.mark.s3
@pytest.mark.parametrize("seed", range(6))
def test_what_is_published_over_a_bad_network_is_whole(
    seed: int, radosgw_settings: Settings, key: PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = random.Random(seed)
    faults = chosen.choices(KINDS, weights=[6, 1, 1, 1, 0.3], k=60)
    url = use(radosgw_settings, monkeypatch)
    with network(radosgw_settings["AWS_ENDPOINT_URL"], faults) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        behind = open_store(url)
        tried = 0
        while not _published(behind, tmp_path / str(tried), key):
            tried += 1
            assert tried < 10, "after 60 requests nothing fails any more"
    monkeypatch.setenv("AWS_ENDPOINT_URL", radosgw_settings["AWS_ENDPOINT_URL"])
    found = verify(open_store(url), CELL, [key.public_key], NOW)
    assert found.run_id == RUN


def _published(store: Store, folder: Path, key: PrivateKey) -> bool:
    """Whether the run is published and approved. A try goes on where the one before was cut short."""
    try:
        approved(store, publish_report(store, folder), key)
    except StoreError:
        return False
    return True
