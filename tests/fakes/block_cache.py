"""A server whose prompts are cached in blocks, as vLLM's are, with one fault at will. Answers follow from the prompt alone."""

import hashlib
import itertools
import json
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal[
    "none",
    "swapped",
    "corrupt block",
    "stale block",
    "leaking aborts",
    "shared salts",
    "no cache",
    "offload",
    "one answer",
    "cut JSON",
    "lost call",
    "endless thoughts",
    "thoughts as content",
    "no template",
    "other backend",
    "one backend",
    "sleepless",
    "asleep",
    "stale memory",
    "other weights",
]
BLOCK_TOK, MODEL = 16, "m"
# By how much a place's second token is less likely than its first, and each further one less than that before, in nat.
GAP_NAT, STEP_NAT, NUM_TOKENS = 2.8, 0.5, 10


Noise = Callable[[random.Random], float]


def gaussian(spread_nat: float) -> Noise:
    return lambda drawn: drawn.gauss(0, spread_nat)


class BlockCache:
    """Of `blocks` blocks, the longest unused ones go first. `noise` draws what is added to each likelihood.

    A fault concerns one in `one_in`. `swapped`: with 8 or more requests under way, a reply is that to another prompt. `corrupt
    block`: a block is wrong when it comes from the cache. `stale block`: a block that was pushed out is taken for what is there
    now. `shared salts`: what was cached with one salt is taken for prompts with another one.
    `offload`: what was pushed out is brought back. `one answer`: all prompts have the same. `cut JSON`: a reply to
    a schema ends too early. `lost call`: a streamed call is not in its stream. `endless thoughts`: all thoughts are cut.
    `thoughts as content`: they are, by a parser that takes them for content. `no template`: requests that tell a template
    something are refused. `sleepless`: it takes no requests to sleep. `asleep`: it does not wake up. `stale memory`: what was
    cached before it slept is taken for what is there now. `other weights`: woken up, it answers as another model.
    `other backend`: where a schema with a multiple came first, a reply to a schema ends too early. `one
    backend`: such a schema is refused.
    """

    def __init__(
        self,
        fault: Fault = "none",
        *,
        blocks: int = 512,
        one_in: int = 40,
        noise: Noise = lambda _: 0.0,
        gaps_nat: Sequence[float] = (GAP_NAT,),
        seed: int = 1,
    ) -> None:
        self.fault, self.blocks, self.one_in, self.noise, self.gaps_nat = fault, blocks, one_in, noise, gaps_nat
        self.random, self.lock = random.Random(seed), threading.Lock()
        self.cached: OrderedDict[str, bool] = OrderedDict()
        self.pushed_out: set[str] = set()
        self.running = self.leaked = self.queries = self.hits = self.brought_back = 0
        self.before: list[int] = []
        self.forms = itertools.count(1)
        self.is_other: bool | None = None
        self.is_sleeping = self.has_slept = False

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"] if isinstance(body["prompt"], list) else tokens_of(body["prompt"])
        with self.lock:
            self.running += 1
            cached, is_wrong = self._read_cache(prompt, str(body.get("cache_salt")))
            seen, self.before = (self.before, prompt) if self._swaps() else (prompt, prompt)
        time.sleep(0.08)  # long enough that many requests are under way at once
        with self.lock:
            self.running -= 1
            spoiled = [] if self.fault == "one answer" else [*seen, -1] if is_wrong else seen
            likely = list(self._likely(spoiled, body["max_tokens"]))
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached}}
        names = [f"token_id:{token}" for token, _ in likely]
        logprobs = {"tokens": names, "token_logprobs": [at[name] for name, (_, at) in zip(names, likely, strict=True)]}
        return {
            "model": MODEL,
            "choices": [{"logprobs": logprobs | {"top_logprobs": [at for _, at in likely]}}],
            "usage": usage,
        }

    def speak(self, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        """The content of a chat's reply, and its calls, as the request must have them."""
        time.sleep(0.02)  # long enough that others are under way meanwhile
        if "response_format" in body:
            text = json.dumps(example_of(body["response_format"]["json_schema"]["schema"]))
            is_other = "multipleOf" in json.dumps(body["response_format"])
            with self.lock:
                self.is_other = is_other if self.is_other is None else self.is_other
                if self.fault == "other backend":
                    return text[:-2] if self.is_other and not is_other else text, []
                is_cut = self.fault == "cut JSON" and next(self.forms) % self.one_in == 0
            return text[:-2] if is_cut else text, []
        choice = body["tool_choice"]
        wanted = body["tools"][0]["function"]["name"] if choice == "required" else choice["function"]["name"]
        function = next(tool["function"] for tool in body["tools"] if tool["function"]["name"] == wanted)
        with self.lock:
            is_lost = self.fault == "lost call" and body.get("stream") and next(self.forms) % self.one_in == 0
        arguments = json.dumps(example_of(function["parameters"]))
        call = {"id": "c1", "type": "function", "function": {"name": wanted, "arguments": arguments}}
        return "", [] if is_lost else [call]

    def sleep(self) -> None:
        self.is_sleeping = True
        if self.fault == "stale memory":
            self.cached = OrderedDict.fromkeys(self.cached, True)
        else:
            self.cached.clear()

    def wake_up(self) -> None:
        self.is_sleeping, self.has_slept = self.fault == "asleep", True

    def _swaps(self) -> bool:
        return self.fault == "swapped" and self.running >= 8 and self._is_hit() and bool(self.before)

    def _read_cache(self, prompt: list[int], salt: str) -> tuple[int, bool]:
        """How many tokens come from the cache, and whether one of these is wrong. All blocks are in the cache then."""
        self.queries += len(prompt)
        if self.fault == "no cache":
            return 0, False
        named = "" if self.fault == "shared salts" else salt
        hits, brought_back, is_wrong, still = 0, 0, False, True
        for end in range(BLOCK_TOK, len(prompt), BLOCK_TOK):
            block = hashlib.sha256(json.dumps([named, prompt[:end]]).encode()).hexdigest()
            is_back = self.fault == "offload" and block in self.pushed_out
            still = still and (block in self.cached or is_back)
            if still and block not in self.cached:
                brought_back += BLOCK_TOK
            elif still:
                hits += BLOCK_TOK
                is_wrong |= self.cached[block]
            elif self.fault == "stale block" and block in self.pushed_out:
                is_wrong |= self._is_hit()
            self.cached.setdefault(block, self.fault == "corrupt block" and self._is_hit())
            self.cached.move_to_end(block)
            if len(self.cached) > self.blocks:
                self.pushed_out.add(self.cached.popitem(last=False)[0])
        self.hits += hits
        self.brought_back += brought_back
        return hits + brought_back, is_wrong

    def _is_hit(self) -> bool:
        return self.random.random() * self.one_in < 1

    def _likely(self, prompt: list[int], count: int) -> Iterator[tuple[int, dict[str, float]]]:
        is_other = self.fault == "other weights" and self.has_slept
        seed = hashlib.sha256(json.dumps([*prompt, -2] if is_other else prompt).encode()).hexdigest()
        for at in range(count):
            draw = random.Random(f"{seed}-{at}")
            tokens = draw.sample(range(1000), NUM_TOKENS)
            second = -0.1 - draw.choice(self.gaps_nat)
            true = [-0.1, *(second - STEP_NAT * place for place in range(NUM_TOKENS - 1))]
            noisy = [min(0.0, value + self.noise(self.random)) for value in true]
            best = max(range(NUM_TOKENS), key=noisy.__getitem__)
            yield tokens[best], {f"token_id:{token}": value for token, value in zip(tokens, noisy, strict=True)}
            if best:
                seed += "-another"

    def page(self) -> str:
        used = self.leaked / self.blocks
        return (
            f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc {used}\n"
            f"vllm:prefix_cache_queries_total {self.queries}\nvllm:prefix_cache_hits_total {self.hits}\n"
            f"vllm:external_prefix_cache_hits_total {self.brought_back}\n"
            f'vllm:cache_config_info{{block_size="{BLOCK_TOK}",num_gpu_blocks="{self.blocks}"}} 1\n'
        )


def example_of(schema: dict[str, Any]) -> Any:
    """A document of this schema, of the keywords that are used here."""
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return example_of(schema["anyOf"][0])
    match schema["type"]:
        case "object":
            return {name: example_of(inner) for name, inner in schema["properties"].items()}
        case "array":
            return [example_of(schema["items"])]
        case "boolean":
            return True
        case "null":
            return None
    raise ValueError(schema)


def tokens_of(text: str) -> list[int]:
    return [sum(map(ord, text[at : at + 4])) for at in range(0, len(text), 4)]


@contextmanager
def serving(cache: BlockCache) -> Iterator[str]:
    """The server's address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/is_sleeping":
                return self.reply(json.dumps({"is_sleeping": cache.is_sleeping}).encode())
            return self.reply(cache.page().encode(), "text/plain")

        def do_POST(self) -> None:
            orders = {} if cache.fault == "sleepless" else {"/sleep?level=1": cache.sleep, "/wake_up": cache.wake_up}
            if self.path in orders:
                orders[self.path]()
                return self.reply(b"{}")
            if self.path in ("/sleep?level=1", "/wake_up"):
                return self.reply(b'{"detail": "Not Found"}', status=404)
            return self.answer_prompt()

        def answer_prompt(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                self.reply(json.dumps({"tokens": tokens_of(body["prompt"]), "max_model_len": 4096}).encode())
            elif self.path == "/v1/chat/completions":
                self.chat(body)
            elif body.get("stream"):
                self.stream(body["max_tokens"])
            else:
                self.reply(json.dumps(cache.answer(body)).encode())

        def chat(self, body: dict[str, Any]) -> None:
            if cache.fault == "no template" and "chat_template_kwargs" in body:
                return self.reply(b'{"error": {"message": "chat_template is not supported"}}', status=400)
            if cache.fault == "one backend" and "multipleOf" in json.dumps(body):
                return self.reply(b'{"error": {"message": "multipleOf is not supported"}}', status=400)
            content, calls = cache.speak(body)
            message: dict[str, Any] = {"role": "assistant", "content": content}
            reason, tokens = ("tool_calls" if calls else "stop"), 8
            if cache.fault == "thoughts as content":
                message, calls, reason, tokens = {"role": "assistant", "content": "So, "}, [], "length", body["max_tokens"]
            if cache.fault == "endless thoughts":
                message, calls, reason, tokens = {"role": "assistant", "reasoning": "So, "}, [], "length", body["max_tokens"]
            usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
            if not body.get("stream"):
                choice = {"index": 0, "message": message | {"tool_calls": calls}, "finish_reason": reason}
                reply = {"object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage}
                return self.reply(json.dumps(reply).encode())
            pieces = [{"index": at} | call for at, call in enumerate(calls)]
            choice = {"index": 0, "delta": message | {"tool_calls": pieces}, "finish_reason": reason}
            chunk = {"object": "chat.completion.chunk", "choices": [choice], "usage": usage}
            return self.reply(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")

        def reply(self, content: bytes, kind: str = "application/json", status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def stream(self, count: int) -> None:
            self.close_connection = True
            cache.running += 1
            try:
                self.send_response(200)
                self.send_header("Connection", "close")
                self.end_headers()
                for _ in range(count):
                    self.wfile.write(b"data: {}\n\n")
                    time.sleep(0.005)
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                cache.leaked += 4 if cache.fault == "leaking aborts" else 0
            finally:
                cache.running -= 1

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 256

        def handle_error(self, *_: object) -> None:
            """Clients hang up."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
