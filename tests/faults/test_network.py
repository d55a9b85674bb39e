"""A real S3 service and a real registry behind a network that fails: the next try finishes what one was cut short in."""

import random
from collections.abc import Iterator
from datetime import timedelta
from itertools import repeat
from pathlib import Path

import pytest

from tests.approval.builder import ADA, BOB_REJECTS, CELL, NEWER, NOW, RUN, VALID_DAYS, approved, publish_report
from tests.approval.conftest import key
from tests.builders.captured_runs import store_in
from tests.faults.proxy import NetworkFault, network
from tests.publish.conftest import no_outer_settings, use
from tests.releases.conftest import docker_config
from tests.releases.docker_registry import Registries, registries
from tests.s3 import Settings
from vllm_qualify.approval.actions import approve, reject, revoke
from vllm_qualify.approval.errors import DecidedError, RevokedError
from vllm_qualify.approval.pointer import revocation
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.approval.verify import verify
from vllm_qualify.errors import HostError, StoreError
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.releases import known
from vllm_qualify.releases.registry import available_at
from vllm_qualify.releases.source import ImageSource, VersionRule

__all__ = ["docker_config", "key", "no_outer_settings"]

KINDS: list[NetworkFault] = ["none", "503", "reset", "cut", "slow", "stale"]
WEIGHTS = [6, 1, 1, 1, 0.3, 2]


@pytest.mark.s3
@pytest.mark.parametrize("seed", range(6))
def test_what_is_published_over_a_bad_network_is_whole(
    seed: int, radosgw_settings: Settings, key: PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = random.Random(seed).choices(KINDS, weights=WEIGHTS, k=60)
    url = use(radosgw_settings, monkeypatch)
    with network(radosgw_settings["AWS_ENDPOINT_URL"], faults) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        behind = open_store(url)
        tries = (_published(behind, tmp_path / str(number), key) for number in range(10))
        assert any(tries), "after 60 requests nothing fails any more"
    monkeypatch.setenv("AWS_ENDPOINT_URL", radosgw_settings["AWS_ENDPOINT_URL"])
    assert verify(open_store(url), CELL, [key.public_key], NOW).run_id == RUN


def _published(store: Store, folder: Path, key: PrivateKey) -> bool:
    """Whether the run is published and approved. A try goes on where the one before was cut short."""
    try:
        approved(store, publish_report(store, folder), key)
    except StoreError:
        return False
    return True


@pytest.mark.s3
def test_what_was_decided_holds_though_every_list_is_stale(
    radosgw_settings: Settings, key: PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each list stays as it was when it was first asked for: before anything was decided."""
    url = use(radosgw_settings, monkeypatch)
    with network(radosgw_settings["AWS_ENDPOINT_URL"], list(repeat("stale", 10_000))) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        store = open_store(url)
        first, newer = (publish_report(store, tmp_path, run_id) for run_id in (RUN, NEWER))
        approved(store, first, key)
        reject(store, newer, BOB_REJECTS, NOW)
        with pytest.raises(DecidedError):
            approve(store, newer, ADA, VALID_DAYS, key, NOW)
        assert verify(store, CELL, [key.public_key], NOW).run_id == RUN
        revoke(store, CELL, RUN, revocation("Bob", "it answers in Latin", NOW))
        with pytest.raises(RevokedError):
            verify(store, CELL, [key.public_key], NOW)


# --- the registry


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registries]:
    with registries(tmp_path_factory.mktemp("registry")) as started:
        yield started


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_every_release_is_reported_once_over_a_bad_network(seed: int, registry: Registries, tmp_path: Path) -> None:
    """A watcher looks again and again, tags appear meanwhile, and the network fails: no release is lost or told twice."""
    faults = random.Random(seed).choices(KINDS, weights=WEIGHTS, k=40)
    store, name = store_in(tmp_path / "store"), f"a/network-{seed}"
    registry.push(name, "v0.30.0", "there before")
    pushed: list[str] = []
    messages: list[str] = []
    with network(f"http://{registry.open}", faults) as between:
        source = ImageSource(name=f"{between.address}/{name}", rule=VersionRule(), recipe="reference")
        while not _looked(store, source, messages):
            assert between.is_faulty
        for minor in range(31, 37):
            pushed.append(registry.push(name, f"v0.{minor}.0", f"{minor}"))
            _looked(store, source, messages)
        while between.is_faulty:
            _looked(store, source, messages)
        assert _looked(store, source, messages)
    assert sorted(messages) == sorted(pushed)


def _looked(store: Store, source: ImageSource, messages: list[str]) -> bool:
    """Whether the registry answered. What is new is told, as `watch-releases` does."""
    try:
        available = available_at(source)
    except HostError as error:
        if not (error.retry and error.remedy):
            raise
        return False
    for sighting in known.note_new(store, source, available, NOW, again_after_s=timedelta(days=1).total_seconds()):
        messages.append(sighting.identity)
        known.record_emission(store, source, sighting.key, NOW)
    return True
