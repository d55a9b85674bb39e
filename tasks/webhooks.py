"""Webhooks of registries and of the model hub: whatever was pushed, the fleet looks at its sources now.

    uvicorn tasks.webhooks:app --port 8300

Nothing that a sender says is believed but that something happened. VLLM_QUALIFY_WEBHOOK_SECRET is what it must show, in its
header or, where it has none, in the address: /webhooks/SECRET.
"""

import os

from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from prefect import get_client

from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.releases.webhook import check_secret, hints_in, secret_in

SECRET, WATCHING = "VLLM_QUALIFY_WEBHOOK_SECRET", "watch-releases/watch"
# A push of many layers and tags tells much; one look finds all.
MOST_BYTES = 1_000_000

app = FastAPI(title="vllm-qualify webhooks", docs_url=None, redoc_url=None, openapi_url=None)


@app.get("/health")
def health() -> dict[str, str]:
    return {"status": "ok"}


@app.post("/webhooks", status_code=202)
@app.post("/webhooks/{secret}", status_code=202)
async def webhook(request: Request, secret: str = "") -> dict[str, int]:
    """How many things were pushed; if any, a run of `watch-releases` was started."""
    body = await _body(request)
    try:
        check_secret(secret or secret_in(request.headers), os.environ.get(SECRET, ""))
        hints = hints_in(body)
    except HostError as error:
        raise HTTPException(503, str(error)) from error
    except CallerError as error:
        raise HTTPException(401 if error.kind == "webhook-secret" else 400, str(error)) from error
    if hints:
        await run_in_threadpool(_look)
    return {"pushed": len(hints)}


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"more than {MOST_BYTES} bytes")
    return body


def _look() -> None:
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(WATCHING)
        client.create_flow_run_from_deployment(deployment.id, name="after a webhook")
