"""Webhooks: who shows the secret makes the fleet look; nobody else does, and nothing else happens."""

import json
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from tasks import webhooks

PUSHED = {"push_data": {"tag": "v0.33.0"}, "repository": {"repo_name": "vllm/vllm-openai"}}
SECRET = "correct horse"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the fleet was made to look."""
    found: list[int] = []
    monkeypatch.setattr(webhooks, "_look", lambda: found.append(1))
    monkeypatch.setenv(webhooks.SECRET, SECRET)
    return found


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(webhooks.app) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/webhooks", {"X-Webhook-Secret": SECRET}),
        ("/webhooks", {"Authorization": f"Bearer {SECRET}"}),
        (f"/webhooks/{SECRET}", {}),
    ],
)
def test_a_push_with_the_secret_makes_the_fleet_look(
    path: str, headers: dict[str, str], client: TestClient, looks: list[int]
) -> None:
    answer = client.post(path, headers=headers, content=json.dumps(PUSHED))
    assert (answer.status_code, answer.json(), looks) == (202, {"pushed": 1}, [1])


@pytest.mark.parametrize("headers", [{}, {"X-Webhook-Secret": "battery staple"}])
def test_without_the_secret_nothing_happens(headers: dict[str, str], client: TestClient, looks: list[int]) -> None:
    assert client.post("/webhooks", headers=headers, content=json.dumps(PUSHED)).status_code == 401
    assert looks == []


def test_without_a_secret_of_our_own_nobody_is_believed(
    client: TestClient, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(webhooks.SECRET)
    assert client.post("/webhooks", headers={"X-Webhook-Secret": ""}, content=json.dumps(PUSHED)).status_code == 503
    assert looks == []


def test_what_is_no_webhook_is_refused_and_a_big_one_is_not_read(client: TestClient, looks: list[int]) -> None:
    shown = {"X-Webhook-Secret": SECRET}
    assert client.post("/webhooks", headers=shown, content="[]").status_code == 400
    assert client.post("/webhooks", headers=shown, content="x" * (webhooks.MOST_BYTES + 1)).status_code == 413
    assert looks == []


def test_that_nothing_was_pushed_makes_nobody_look(client: TestClient, looks: list[int]) -> None:
    answer = client.post("/webhooks", headers={"X-Webhook-Secret": SECRET}, content=json.dumps({"events": []}))
    assert (answer.status_code, answer.json(), looks) == (202, {"pushed": 0}, [])


def test_it_tells_that_it_lives(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ok"}
