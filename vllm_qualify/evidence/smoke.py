"""Smoke: a fixed prompt, sent twice. Checked are identity, finish reason, usage counts, determinism and the golden text.

A second prompt, which is drawn for the run, is held to the same but the golden text and determinism: nobody can know its reply
beforehand, nor whether two words are about as likely at one of its places, where a healthy server may say either.
"""

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
OF_FIXED_PROMPT = ("smoke_golden", "smoke_determinism")
MODELS, REPLIES, DRAWN_REPLIES = "models.json", "replies.json", "drawn-replies.json"


def drawn_prompt(drawn: str) -> str:
    """A prompt that was drawn for the run: a sum."""
    numbers = [int(drawn[at : at + 4], 16) for at in (0, 4, 8)]
    return f"Question: What is {' + '.join(map(str, numbers))}?\nAnswer:"


def smoke_request(settings: Smoke, model: str, prompt: str = "") -> dict[str, Any]:
    return {"model": model, "prompt": prompt or settings.prompt, "max_tokens": settings.max_tokens, "temperature": 0, "seed": 0}


def measure_smoke(server: Server, settings: Smoke, folder: Path, drawn: str = "") -> None:
    """Write what the server answered to files. Without what is `drawn` for the run there is no second prompt.

    Raises ReleaseError if the server has ended.
    """
    models = send_request("GET", f"{server.url}/v1/models", settings.time_limit_s)
    (folder / MODELS).write_text(json.dumps(models, indent=2))
    prompts = {REPLIES: settings.prompt} | ({DRAWN_REPLIES: drawn_prompt(drawn)} if drawn else {})
    for name, prompt in prompts.items():
        request = smoke_request(settings, server.served_model_name, prompt)
        where, limit_s = f"{server.url}/v1/completions", settings.time_limit_s
        replies = [send_request("POST", where, limit_s, json=request) for _ in range(ASKS)]
        (folder / name).write_text(json.dumps({"request": request, "answers": replies}, indent=2))
    server.check_alive()


def send_request(method: str, url: str, limit_s: float, **body: Any) -> dict[str, Any]:
    """The status and the text of what a server answered; or the error, without a status."""
    try:
        answer = ask_within(method, url, limit_s, **body)
    except httpx.HTTPError as error:
        return {"status": None, "error": f"{type(error).__name__}: {error}"}
    return {"status": answer.status_code, "body": answer.text}


def parse_smoke(
    folder: Path, settings: Smoke, names: list[str], golden: str | None, *, has_drawn: bool = False
) -> list[Measurement]:
    """The smoke measurements, 1.0 or 0.0 each, from what `measure_smoke` wrote; all invalid if a reply is missing or not JSON.

    `names` are the model's, the one that was asked for first. With `has_drawn` there are the replies to a second prompt.
    """
    source = f"{folder.name}/{REPLIES}"
    wanted = [name for name in SMOKE_METRICS if golden is not None or name != "smoke_golden"]
    try:
        models = _read_body(json.loads((folder / MODELS).read_text()))
        replies = _read_replies(folder / REPLIES)
        if not all(_read_text(reply).strip() for reply in replies):
            raise ValueError("a reply is empty")
        drawn = _read_replies(folder / DRAWN_REPLIES) if has_drawn else []
        holds = _check_replies(models, replies, drawn, settings, names, golden)
    except UNUSABLE as error:
        return [invalid(name, f"no usable reply: {in_words(error)}", source) for name in wanted]
    counts = {name: len(replies) + (0 if name in OF_FIXED_PROMPT else len(drawn)) for name in wanted}
    return [valid(name, float(holds[name]), source, sample_count=counts[name]) for name in wanted]


def _read_replies(path: Path) -> list[dict[str, Any]]:
    replies = [_read_body(answer) for answer in json.loads(path.read_text())["answers"]]
    if len(replies) != ASKS:
        raise ValueError(f"{len(replies)} replies where {ASKS} were asked for")
    return replies


def _read_text(reply: dict[str, Any]) -> str:
    """The text of a reply, or none if it is null."""
    text = reply["choices"][0]["text"]
    return text if isinstance(text, str) else ""


def _read_body(answer: dict[str, Any]) -> dict[str, Any]:
    if answer["status"] != httpx.codes.OK:
        raise ValueError(answer.get("error") or f"HTTP {answer['status']}: {answer['body'][:200]}")
    body = json.loads(answer["body"])
    if not isinstance(body, dict):
        raise ValueError("the reply is not a JSON object")
    return body


def _check_replies(
    models: dict[str, Any],
    replies: list[dict[str, Any]],
    drawn: list[dict[str, Any]],
    settings: Smoke,
    names: list[str],
    golden: str | None,
) -> dict[str, bool]:
    texts, both = [_read_text(reply) for reply in replies], replies + drawn
    return {
        "smoke_model_identity": [m["id"] for m in models["data"]] == names and all(r["model"] == names[0] for r in both),
        "smoke_finish_reason": all(_finish_reason_fits(reply, settings) for reply in both),
        "smoke_usage": all(_usage_fits(reply["usage"], settings) for reply in both),
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
