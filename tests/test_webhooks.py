"""Webhooks: who shows the secret makes the fleet look; nobody else does, and nothing that is sent is read."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from fastapi.testclient import TestClient
from prefect import flow, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks import webhooks

SECRET = "correct horse"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[datetime]:
    """When the fleet was asked to look."""
    times: list[datetime] = []
    monkeypatch.setattr(webhooks, "_plan_look", times.append)
    monkeypatch.setenv(webhooks.SECRET, SECRET)
    return times


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(webhooks.app) as opened:
        yield opened


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/webhooks", {"X-Webhook-Secret": SECRET}),
        ("/webhooks", {"Authorization": f"Bearer {SECRET}"}),
        ("/webhooks", {"Authorization": SECRET}),
        (f"/webhooks/{SECRET}", {}),
    ],
)
@pytest.mark.parametrize("body", [b"", b'{"push_data": {"tag": "v0.33.0"}}', b"[" * 100_000, b"\x00\xff"])
def test_whoever_shows_the_secret_makes_the_fleet_look_whatever_is_sent(
    path: str, headers: dict[str, str], body: bytes, client: TestClient, looks: list[datetime]
) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    before = datetime.now(UTC)
    answer = client.post(path, headers=headers, content=body)
    assert answer.status_code == 202
    assert [look.isoformat() for look in looks] == [answer.json()["look_at"]]
    assert 0 < (looks[0] - before).total_seconds() <= webhooks.LOOK_EVERY_S + 1


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/webhooks", {}),
        ("/webhooks", {"X-Webhook-Secret": "battery staple"}),
        ("/webhooks", {"Authorization": "Bearer "}),
        ("/webhooks", {"Authorization": "Bearer \xe9".encode("latin-1")}),
        ("/webhooks/battery", {"X-Webhook-Secret": SECRET}),
    ],
)
def test_without_the_secret_or_one_of_our_own_nothing_happens(
    path: str, headers: dict[str, str], client: TestClient, looks: list[datetime], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.post(path, headers=headers).status_code == 401
    monkeypatch.delenv(webhooks.SECRET)
    assert client.post(path, headers=headers).status_code == 503
    assert client.post("/webhooks", headers={"X-Webhook-Secret": ""}).status_code == 503
    assert looks == []


@flow(name="watch-releases")
def watching() -> None:
    """Never run here."""


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_webhooks_of_half_a_minute_share_one_look_at_its_end() -> None:
    # Prefect has read its settings long before this test names a server.
    server = temporary_settings({PREFECT_API_URL: os.environ["PREFECT_API_URL"]})
    with server, get_client(sync_client=True) as prefect:
        deployment = prefect.create_deployment(prefect.create_flow(watching), "watch")
        first, second = (webhooks._end_of_slot(datetime.fromtimestamp(second, UTC)) for second in (1e9, 1e9 + 40))
        for at in (first, first, second):
            webhooks._plan_look(at)
        runs = prefect.read_flow_runs(deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment])))
    assert sorted(run.expected_start_time for run in runs if run.expected_start_time) == [first, second]
    assert all(run.state is not None and run.state.is_scheduled() for run in runs)
