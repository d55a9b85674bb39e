"""Smoke: a fixed prompt, sent twice. Checked are identity, finish reason, usage counts, determinism and the golden text."""

import json
from pathlib import Path
from typing import Any

import httpx

from vllm_qualify.answers import ask_within
from vllm_qualify.engine.server import Server
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words, invalid, valid
from vllm_qualify.recipe.accuracy import Smoke
from vllm_qualify.recipe.metrics import SMOKE_METRICS

ASKS = 2
MODELS, REPLIES = "models.json", "replies.json"


def smoke_request(settings: Smoke, model: str) -> dict[str, Any]:
    return {"model": model, "prompt": settings.prompt, "max_tokens": settings.max_tokens, "temperature": 0, "seed": 0}


def measure_smoke(server: Server, settings: Smoke, folder: Path) -> None:
    """Write what the server answered to `models.json` and `replies.json`. Raises ReleaseError if the server has ended."""
    request = smoke_request(settings, server.served_model_name)
    models = send_request("GET", f"{server.url}/v1/models", settings.time_limit_s)
    replies = [send_request("POST", f"{server.url}/v1/completions", settings.time_limit_s, json=request) for _ in range(ASKS)]
    server.check_alive()
    (folder / MODELS).write_text(json.dumps(models, indent=2))
    (folder / REPLIES).write_text(json.dumps({"request": request, "answers": replies}, indent=2))


def send_request(method: str, url: str, limit_s: float, **body: Any) -> dict[str, Any]:
    """The status and the text of what a server answered; or the error, without a status."""
    try:
        answer = ask_within(method, url, limit_s, **body)
    except httpx.HTTPError as error:
        return {"status": None, "error": f"{type(error).__name__}: {error}"}
    return {"status": answer.status_code, "body": answer.text}


def parse_smoke(folder: Path, settings: Smoke, names: list[str], golden: str | None) -> list[Measurement]:
    """The smoke measurements, 1.0 or 0.0 each, from what `measure_smoke` wrote; all invalid if a reply is missing or not JSON.

    `names` are the model's, the one that was asked for first.
    """
    source = f"{folder.name}/{REPLIES}"
    wanted = [name for name in SMOKE_METRICS if golden is not None or name != "smoke_golden"]
    try:
        models = _read_body(json.loads((folder / MODELS).read_text()))
        replies = [_read_body(answer) for answer in json.loads((folder / REPLIES).read_text())["answers"]]
        holds = _check_replies(models, replies, settings, names, golden)
    except UNUSABLE as error:
        return [invalid(name, f"no usable reply: {in_words(error)}", source) for name in wanted]
    return [valid(name, float(holds[name]), source, sample_count=len(replies)) for name in wanted]


def _read_body(answer: dict[str, Any]) -> dict[str, Any]:
    if answer["status"] != httpx.codes.OK:
        raise ValueError(answer.get("error") or f"HTTP {answer['status']}: {answer['body'][:200]}")
    body = json.loads(answer["body"])
    if not isinstance(body, dict):
        raise ValueError("the reply is not a JSON object")
    return body


def _check_replies(
    models: dict[str, Any], replies: list[dict[str, Any]], settings: Smoke, names: list[str], golden: str | None
) -> dict[str, bool]:
    texts = [reply["choices"][0]["text"] for reply in replies]
    if len(texts) != ASKS:
        raise ValueError(f"{len(texts)} replies where {ASKS} were asked for")
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("a reply is empty")
    return {
        "smoke_model_identity": [m["id"] for m in models["data"]] == names and all(r["model"] == names[0] for r in replies),
        "smoke_finish_reason": all(_finish_reason_fits(reply, settings) for reply in replies),
        "smoke_usage": all(_usage_fits(reply["usage"], settings) for reply in replies),
        "smoke_determinism": len(set(texts)) == 1,
        "smoke_golden": all(text == golden for text in texts),
    }


def _finish_reason_fits(reply: dict[str, Any], settings: Smoke) -> bool:
    reason, tokens = reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]
    most = settings.max_tokens
    return bool((reason == "length" and tokens == most) or (reason == "stop" and tokens <= most))


def _usage_fits(usage: dict[str, int], settings: Smoke) -> bool:
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    return prompt > 0 and 0 < completion <= settings.max_tokens and usage["total_tokens"] == prompt + completion
