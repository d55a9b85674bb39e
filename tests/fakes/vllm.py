"""A stand-in for the `vllm` command, for faults that the real one cannot be made to show and for tests that need no model.

`make_engine` writes it as an engine environment. The environment variable TORCH_FAKE_VLLM, a name that a recipe may set, picks
how it behaves: `healthy`, `dies` (at once), `tells` (its environment, and dies), `hangs` (never answers), `sick` (every
completion is an error), `forgetful` (another text each time), `leaks` (it keeps memory of each completion, and each makes the
next ones later). TORCH_FAKE_VLLM_SERVES is a model that it says it serves,
whatever its file says. The contract test in tests/live holds its answers to those of the real server.
"""

import base64
import gzip
import json
import os
import re
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import yaml  # of the engine's own dependencies; here of the orchestrator's

VERSION = "0.32.0+cpu"
# What it says after any prompt.
GOLDEN = " It is 7."
UNCLEAR = "unclear"
# Where its Python is, and the checkout that it runs from.
FOLDERS = [sys.prefix, sys.base_prefix, str(Path(__file__).parents[2])]
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="reference"} 0.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="reference"} GENERATED
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="reference"} 0.0
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="reference"} 0.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="reference"} 0.0
"""
ANSWERED = count()
# What a leaking server keeps of each completion, and by how much each delays the next ones.
LEAK_BYTES, LEAK_S = 480_000, 12e-4
LEAKED: list[bytes] = []
LONGEST_TOK = 2048
# How long a streamed token takes: a client that hangs up is noticed at one of the next.
TOKEN_S = 0.001


def models(*names: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": LONGEST_TOK} for name in names]}


def choice(text: str, tokens: int, reason: str = "length", index: int = 0, likely: bool = False) -> dict[str, Any]:
    """The whole text is its first token; all others are empty."""
    shown = [text, *[""] * (tokens - 1)]
    likelihoods = {"tokens": shown, "token_logprobs": [-0.5] * tokens, "top_logprobs": [{token: -0.5} for token in shown]}
    logprobs = likelihoods if likely else None
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": None}


def completion(model: str, text: str, tokens: int, choices: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """An answer that went on to the asked length."""
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices or [choice(text, tokens)],
        "usage": {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens},
    }


def metrics(generated_tok: int) -> str:
    return METRICS.replace("GENERATED", f"{generated_tok}.0")


# --- chats


class FormError(ValueError):
    """No backend keeps such a form."""


def messages_of(request: dict[str, Any]) -> list[dict[str, Any]]:
    return request.get("messages") or [{"role": "user", "content": request["input"]}]


def said_to(request: dict[str, Any]) -> dict[str, Any]:
    """A model that thinks, calls tools for cities, writes JSON that fits, and sees colours. Raises ValueError, zlib.error."""
    last = messages_of(request)[-1]
    tools, chosen = request.get("tools", []), request.get("tool_choice", "auto")
    form = request.get("response_format", {}).get("type")
    content, calls, reason = " It is 7.", [], "stop"
    if isinstance(last["content"], list):
        content = " and ".join(colour_of(part["image_url"]["url"]) for part in last["content"] if part["type"] == "image_url")
    elif chosen == "required" or isinstance(chosen, dict):
        name = tools[0]["function"]["name"] if chosen == "required" else chosen["function"]["name"]
        arguments = dict.fromkeys(tools[0]["function"]["parameters"]["properties"], "Paris")
        calls, reason = [(name, json.dumps(arguments))], "tool_calls" if chosen == "required" else "stop"
    elif tools and chosen == "auto" and last["role"] == "user":
        cities = re.findall(r"in ([A-Z]\w+)", last["content"])
        calls, reason = [(tools[0]["function"]["name"], json.dumps({"city": city})) for city in cities], "tool_calls"
    elif form == "json_object":
        content = '{"answer": 42}'
    elif form == "json_schema":
        schema = request["response_format"]["json_schema"]["schema"]
        if "allOf" in schema:
            raise FormError("The provided JSON schema contains features not supported by xgrammar: allOf")
        properties = schema["properties"]
        content = json.dumps({name: value["enum"][0] if "enum" in value else 42 for name, value in properties.items()})
    return {"reasoning": "I think.", "content": "" if calls else content, "calls": calls, "reason": reason}


def colour_of(url: str) -> str:
    """The colour of a PNG's first pixel, if it is pure red or blue, or another one. Raises ValueError, zlib.error."""
    png = base64.b64decode(url.partition(",")[2])
    _, found, data = png.partition(b"IDAT")
    if not found:
        raise ValueError("cannot identify image file")
    first = zlib.decompressobj().decompress(data)[1:]
    return {(255, 0, 0): "Red", (0, 0, 255): "Blue"}.get((first[0], first[1], first[2]), "Grey")


def halves(text: str) -> list[str]:
    """A text in two pieces; none of nothing."""
    return [piece for piece in (text[: len(text) // 2], text[len(text) // 2 :]) if piece]


def chat(model: str, spoken: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": f"chatcmpl-tool-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(spoken["calls"])
    ]
    message = {"role": "assistant", "content": spoken["content"], "reasoning": spoken["reasoning"], "tool_calls": calls}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": spoken["reason"]}],
        "usage": spoken["usage"],
    }


def response(model: str, spoken: dict[str, Any]) -> dict[str, Any]:
    texts = (("reasoning", "reasoning_text", spoken["reasoning"]), ("message", "output_text", spoken["content"]))
    counts = spoken["usage"]
    return {
        "id": "resp_1",
        "object": "response",
        "model": model,
        "status": "incomplete" if spoken["reason"] == "length" else "completed",
        "output": [{"type": item, "content": [{"type": part, "text": text}]} for item, part, text in texts],
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "output_tokens": counts["completion_tokens"],
            "total_tokens": counts["total_tokens"],
        },
    }


class ReplyHandler(BaseHTTPRequestHandler):
    """Sends whole replies, and logs nothing: the log belongs to the behaviour."""

    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, body: Any) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silent."""


class ReplyServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


class Handler(ReplyHandler):
    """vLLM's completions, chats, responses, models and metrics endpoints."""

    model = ""
    aliases: tuple[str, ...] = ()
    behaviour = "healthy"
    server: "FakeServer"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, models(self.model, *self.aliases))
        else:
            self._send(200, metrics(self.server.generated).encode(), "text/plain")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.behaviour == "sick":
            self._answer(500, {"error": {"message": "EngineCore encountered an issue"}})
            return
        try:
            request = json.loads(body)
        except ValueError as error:
            self._refuse(400, str(error))
            return
        if self.path != "/v1/completions":
            self._talk(request)
        elif request["model"] not in (self.model, *self.aliases):
            self._refuse(404, f"The model `{request['model']}` does not exist.")
        elif not isinstance(request["max_tokens"], int) or len(request["prompt"]) > LONGEST_TOK:
            self._refuse(400, "a wrong type, or a prompt that is too long")
        else:
            self.complete(request)

    def _talk(self, request: dict[str, Any]) -> None:
        """Answer in a chat, or as /v1/responses."""
        if request["model"] != self.model:
            self._refuse(404, f"The model `{request['model']}` does not exist.")
            return
        try:
            spoken = self.speak(request)
        except FormError as error:
            self._refuse(400, str(error))
            return
        except (ValueError, zlib.error) as error:
            self._refuse(400, f"Failed to load image: {error}")
            return
        if self.path == "/v1/responses":
            self.respond(request, spoken)
        elif request.get("stream"):
            self.start_stream()
            for document in self.pieces(request, spoken):
                self.event(json.dumps(document))
            self.event("[DONE]")
        else:
            self._answer(200, chat(self.model, spoken))

    def speak(self, request: dict[str, Any]) -> dict[str, Any]:
        """What it says: thoughts, content and calls, why it ends, and its counts."""
        spoken = said_to(request)
        most: int = request.get("max_tokens") or request["max_output_tokens"]
        tokens = len(f"{spoken['reasoning']} {spoken['content']}".split()) + 8 * len(spoken["calls"])
        if tokens > most:
            spoken |= {"reasoning": "I", "content": "", "calls": [], "reason": "length"}
            tokens = most
        prompt_tokens = self.prompt_tok(request)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        return spoken | {"usage": usage}

    def prompt_tok(self, request: dict[str, Any]) -> int:
        """A token for each word."""
        return 3 + sum(len(str(message["content"]).split()) for message in messages_of(request))

    def pieces(self, request: dict[str, Any], spoken: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a chat's stream."""
        whole = chat(self.model, spoken) | {"object": "chat.completion.chunk"}
        usage = whole.pop("usage")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning": piece} for piece in halves(spoken["reasoning"])]
        deltas += [{"content": piece} for piece in halves(spoken["content"])]
        for index, call in enumerate(whole["choices"][0]["message"]["tool_calls"]):
            name = {"id": call["id"], "type": "function", "index": index, "function": {"name": call["function"]["name"]}}
            deltas.append({"content": None, "tool_calls": [name]})
            for piece in halves(call["function"]["arguments"]):
                deltas.append({"content": None, "tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        for delta in deltas:
            yield whole | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
        yield whole | {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": spoken["reason"]}]}
        if request.get("stream_options"):
            yield whole | {"choices": [], "usage": usage}

    def respond(self, request: dict[str, Any], spoken: dict[str, Any]) -> None:
        whole = response(self.model, spoken)
        if not request.get("stream"):
            self._answer(200, whole)
            return
        self.start_stream()
        self.event(
            json.dumps({"type": "response.created", "response": whole | {"status": "in_progress", "output": [], "usage": None}})
        )
        for kind, text in (("reasoning_text", spoken["reasoning"]), ("output_text", spoken["content"])):
            for piece in halves(text):
                self.event(json.dumps({"type": f"response.{kind}.delta", "delta": piece}))
        self.event(json.dumps({"type": f"response.{whole['status']}", "response": whole}))

    def complete(self, request: dict[str, Any]) -> None:
        """Answer a request that is right."""
        text = f" It is {next(ANSWERED)}." if self.behaviour == "forgetful" else GOLDEN
        if self.behaviour == "leaks":
            LEAKED.append(b"x" * LEAK_BYTES)
            time.sleep(LEAK_S * len(LEAKED))  # it takes ever longer
        stops = [stop for stop in request.get("stop", []) if stop in text]
        text, reason = (text.partition(stops[0])[0], "stop") if stops else (text, "length")
        tokens = request["max_tokens"]
        if request.get("stream"):
            self.stream(request, text, tokens)
            return
        self.server.count(tokens * request.get("n", 1))
        likely = bool(request.get("logprobs"))
        choices = [choice(text, tokens, reason, index, likely) for index in range(request.get("n", 1))]
        self._answer(200, completion(self.model, text, tokens, choices))

    def stream(self, request: dict[str, Any], text: str, tokens: int) -> None:
        """Send the text with the first token, and end at the asked length or when the client has gone."""
        self.start_stream()
        whole = completion(self.model, text, tokens)
        try:
            for token in range(tokens):
                self.server.count(1)
                part = choice(text if token == 0 else "", 1, "length") | (
                    {} if token == tokens - 1 else {"finish_reason": None}
                )
                self.event(json.dumps(whole | {"choices": [part], "usage": None}))
                time.sleep(TOKEN_S)  # a token takes this long
            if request.get("stream_options"):
                self.event(json.dumps(whole | {"choices": []}))
            self.event("[DONE]")
        except ConnectionError:
            return

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True

    def event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}})


class FakeServer(ReplyServer):
    generated = 0
    counting = threading.Lock()

    def count(self, tokens: int) -> None:
        with self.counting:
            self.generated += tokens

    def handle_error(self, *_: object) -> None:
        """A client may go at any time."""


def serve(config_file: str) -> None:
    behaviour = os.environ.get("TORCH_FAKE_VLLM", "healthy")
    if behaviour == "tells":
        print(f"HF_TOKEN={os.environ.get('HF_TOKEN')} {dict(os.environ)}", file=sys.stderr)
        sys.exit(1)
    if behaviour == "dies":
        print("ValueError: the fake dies as ordered", file=sys.stderr)
        sys.exit(1)
    config = yaml.safe_load(Path(config_file).read_text())
    Handler.model, Handler.behaviour = config["served-model-name"][0], behaviour
    if behaviour == "hangs":
        print("loading weights for ever", flush=True)
        time.sleep(3600)
    print(says_what_it_serves(config), flush=True)
    FakeServer((config["host"], config["port"]), Handler).serve_forever()


def says_what_it_serves(config: dict[str, Any]) -> str:
    """As vLLM logs it once it has read its options."""
    revision, trusts = config.get("revision"), config.get("trust-remote-code", False)
    speculative = json.loads(config["speculative-config"]) if "speculative-config" in config else None
    draft = speculative and f"SpeculativeConfig(method='draft_model', model={speculative.get('model')!r}, num_spec_tokens=3)"
    model, tokenizer = os.environ.get("TORCH_FAKE_VLLM_SERVES", config["model"]), config.get("tokenizer", config["model"])
    return (
        "(EngineCore pid=1) INFO 11-23 05:00:00 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
        f"model={model!r}, speculative_config={draft}, tokenizer={tokenizer!r}, skip_tokenizer_init=False, "
        f"tokenizer_mode=auto, revision={revision}, tokenizer_revision={revision}, trust_remote_code={trusts}, "
        "dtype=torch.bfloat16, seed=0"
    )


def leave_unclear(engine: Path, why: str) -> None:
    """From now on this engine can judge no server, for this reason."""
    (engine / UNCLEAR).write_text(why)


def make_engine(folder: Path) -> Path:
    """An engine environment with this command in it: bin/vllm, and a bin/python that says which version it is."""
    (folder / "bin").mkdir(parents=True)
    vllm, python = folder / "bin" / "vllm", folder / "bin" / "python"
    vllm.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    identity = {"python": "3.11", "packages": {"vllm": VERSION}, "files_sha256": "0" * 64, "changed_files": []}
    # Its answer goes to its output: the file for it is left out.
    redirect = f'case "$2" in *script.py) exec {sys.executable} {__file__} knows "$3" {folder};; esac'
    # Whether weights are whole, only a real one says.
    of_weights = """case "$3" in '{"model":'*) exit;; esac"""
    where = f"case \"$3\" in *sys.base_prefix*) echo '{json.dumps(FOLDERS)}'; exit;; esac"
    python.write_text(f"#!/bin/sh\n{of_weights}\n{redirect}\n{where}\necho '{json.dumps(identity)}'\n")
    for command in (vllm, python):
        command.chmod(0o755)
    return folder


def knows(question: str, engine: Path) -> None:
    """As drift/probe.py answers, from the catalog's table, with nothing against any server."""
    why = (engine / UNCLEAR).read_text() if (engine / UNCLEAR).exists() else None
    servers = json.loads(question)["servers"]
    judged = {"build": "cpu", "servers": [{"parsed": False, "refused": None, "unclear": why}] * len(servers)}
    print(json.dumps(table() | judged))


def table() -> dict[str, Any]:
    """The catalog's, as it lies there: to import what reads it takes longer than all else that this process does."""
    path = Path(__file__).parents[2] / "vllm_qualify" / "catalog" / "engines" / f"{VERSION.partition('+')[0]}.json.gz"
    known: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return known


if __name__ == "__main__":
    if sys.argv[1] == "knows":
        knows(sys.argv[2], Path(sys.argv[3]))
    else:
        assert sys.argv[1:3] == ["serve", "--config"], sys.argv
        serve(sys.argv[3])
