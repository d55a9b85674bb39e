"""Webhooks of registries and of the model hub: a request with the right secret makes the fleet look for new releases.

    uvicorn tasks.webhooks:app --port 8300

The body of a webhook is not read: the fleet itself asks the registry and the hub. A sender must send the secret of
VLLM_QUALIFY_WEBHOOK_SECRET. Hugging Face sends it in a header of its own, a registry and Harbor in `Authorization`. Docker Hub
sends no header: its secret can only be a part of the webhook's address, /webhooks/SECRET.
"""

import hmac
import os
from datetime import UTC, datetime

from fastapi import FastAPI, HTTPException, Request
from prefect import get_client
from prefect.states import Scheduled

SECRET, WATCHING = "VLLM_QUALIFY_WEBHOOK_SECRET", "watch-releases/watch"
# One push causes many webhooks, of layers, tags and pulls. All webhooks of half a minute share one look, at its end.
LOOK_EVERY_S = 30

app = FastAPI(title="vllm-qualify webhooks", docs_url=None, redoc_url=None, openapi_url=None)


@app.get("/health")
def health() -> dict[str, str]:
    return {"status": "ok"}


@app.post("/webhooks", status_code=202)
@app.post("/webhooks/{secret}", status_code=202)
def webhook(request: Request, secret: str = "") -> dict[str, str]:
    """Plan a look at the sources; when it will be, as an ISO time."""
    if not (expected := os.environ.get(SECRET, "")):
        raise HTTPException(503, f"no secret is set for webhooks: set {SECRET} here, and the same at the sender")
    sent = request.headers.get("x-webhook-secret") or request.headers.get("authorization", "").removeprefix("Bearer ")
    # In constant time, so that the duration tells nothing about the secret.
    if not hmac.compare_digest((secret or sent).encode(), expected.encode()):
        raise HTTPException(401, "the webhook's secret is not ours: set the same at the sender")
    look_at = _end_of_slot(datetime.now(UTC))
    _plan_look(look_at)
    return {"look_at": look_at.isoformat()}


def _end_of_slot(now: datetime) -> datetime:
    return datetime.fromtimestamp((now.timestamp() // LOOK_EVERY_S + 1) * LOOK_EVERY_S, UTC)


def _plan_look(at: datetime) -> None:
    """Plan one run for all webhooks of a slot: Prefect makes only one run for a key."""
    key = f"webhook {at.isoformat()}"
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(WATCHING)
        client.create_flow_run_from_deployment(
            deployment.id, name="after a webhook", state=Scheduled(scheduled_time=at), idempotency_key=key
        )
