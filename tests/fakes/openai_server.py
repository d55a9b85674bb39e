"""A server with OpenAI's completions and chat, vLLM's counters, and answers that are chosen beforehand.

It answers a prompt by the last question in it. It refuses a question without a given answer.
"""

import json
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from tests.fakes.vllm import ReplyHandler, ReplyServer

QUESTION, WRONG = "Question: ", "I do not know."
AROUND_TOK = 37
NO_PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'


@dataclass
class Book:
    """The replies by question, and what goes wrong: for ever, or `once` only, the first time that the question is asked.

    `empty` replies are without text, `absent` ones null. `failing` questions get an error 500, `dropped` ones no reply at all,
    and `delay_s` is waited before each. `cut` replies ended at the most tokens allowed. `sampled` ones are wrong if the
    request's seed is odd. `thinking` and `calls` of tools, by question, are apart from the content of a chat's reply, as vLLM
    has them. A server that `has_no_parser` of calls refuses requests with tools, in vLLM's words. A reply has as
    many tokens as it has words, with its thinking. `solve` finds the reply in the whole prompt, in place of `replies`.
    With `most_tok`, the longest context, it counts tokens by /tokenize: a word is one, and a chat has `AROUND_TOK` more.
    With `choose`, the likeliest end of a prompt's text, its tokens are bytes, and it gives their log-probabilities.
    """

    replies: Mapping[str, str]
    empty: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    failing: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    cut: frozenset[str] = frozenset()
    sampled: frozenset[str] = frozenset()
    thinking: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, Any] = field(default_factory=dict)
    has_no_parser: bool = False
    solve: Callable[[str], str] | None = None
    most_tok: int = 0
    choose: Callable[[str], str] | None = None
    once: bool = False
    delay_s: float = 0.0
    asked: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    prompts: list[Any] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def goes_wrong(self, question: str, how: frozenset[str]) -> bool:
        return question in how and not (self.once and self.asked[question] > 1)

    def text(self, question: str) -> str | None:
        if self.goes_wrong(question, self.absent):
            return None
        return "" if self.goes_wrong(question, self.empty) else self.replies[question]

    def metrics(self) -> str:
        lines = [
            f'vllm:request_success_total{{engine="0",finished_reason="{reason}"}} {self.ended[reason]:.1f}'
            for reason in ("stop", "length", "abort", "error")
        ]
        return "\n".join(["# TYPE vllm:request_success counter", *lines, ""])


class Handler(ReplyHandler):
    # A reply's head and body go out at once: the second would wait for the first's receipt, for 40 ms.
    disable_nagle_algorithm = True
    book: Book

    def do_GET(self) -> None:  # noqa: N802  (the base class calls it)
        self._note_headers()
        if self.path == "/metrics":
            self._send(200, self.book.metrics().encode(), "text/plain")
        elif self.path == "/tokenizer_info" and self.book.choose:
            self._answer(200, {"tokenizer_class": "Bytes", "eos_token": None, "bos_token": None})
        else:
            self._answer(404, {"error": {"message": "not here"}})

    def _note_headers(self) -> None:
        self.book.headers.append({name.lower(): value for name, value in self.headers.items()})

    def do_POST(self) -> None:  # noqa: N802  (the base class calls it)
        self._note_headers()
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self._tokenize(request)
            return
        if self.book.choose:
            self._weigh(request, self.book.choose)
            return
        is_chat = self.path == "/v1/chat/completions"
        prompt = _said(request["messages"][-1]["content"]) if is_chat else request["prompt"]
        question = prompt.rpartition(QUESTION)[2].removesuffix("\nAnswer:")
        book = self.book
        with book.lock:
            book.asked[question] += 1
            book.requests.append(request)
            book.prompts.append(request["messages"] if is_chat else prompt)
        # The fault itself: answers that come late.
        time.sleep(book.delay_s)
        if book.goes_wrong(question, book.dropped):
            self.close_connection = True
        elif book.has_no_parser and request.get("tools"):
            self._answer(400, {"error": {"message": NO_PARSER, "type": "BadRequestError", "param": None, "code": 400}})
        elif book.solve:
            self._complete(question, is_chat, request.get("seed", 0), book.solve(prompt))
        elif book.goes_wrong(question, book.failing) or question not in book.replies:
            self._answer(500, {"error": {"message": "EngineCore encountered an issue"}})
        else:
            self._complete(question, is_chat, request.get("seed", 0), book.text(question))

    def _weigh(self, request: dict[str, Any], choose: Callable[[str], str]) -> None:
        """The log-probabilities of a prompt's tokens and of one more. The last one's is high if the text ends likeliest."""
        tokens: list[int] = request["prompt"][0] if isinstance(request["prompt"][0], list) else request["prompt"]
        text = bytes(tokens).decode()
        with self.book.lock:
            self.book.prompts.append(text)
            self.book.ended["length"] += 1
        likelihoods = [-1.0] * (len(tokens) - 1) + [-0.5 if text.endswith(choose(text)) else -2.5] + [-1.0]
        shown = {"token_logprobs": likelihoods, "top_logprobs": [{"other": -0.5} for _ in likelihoods]}
        choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": shown}
        self._answer(200, {"model": "reference", "choices": [choice], "usage": {"completion_tokens": 1}})

    def _tokenize(self, request: dict[str, Any]) -> None:
        if self.book.choose:
            tokens = list(request["prompt"].encode())
            self._answer(200, {"count": len(tokens), "max_model_len": 4096, "tokens": tokens})
            return
        if not self.book.most_tok:
            self._answer(404, {"detail": "Not Found"})
            return
        self.book.tokenized.append(request)
        said = [each["content"] for each in request["messages"]] if "messages" in request else [request["prompt"]]
        count = sum(len(text.split()) for text in said) + ("messages" in request) * AROUND_TOK
        self._answer(200, {"count": count, "max_model_len": self.book.most_tok, "tokens": [1] * count})

    def _complete(self, question: str, is_chat: bool, seed: int, text: str | None) -> None:
        reason = "length" if question in self.book.cut else "stop"
        if question in self.book.sampled and seed % 2:
            text = WRONG
        with self.book.lock:
            self.book.ended[reason] += 1
        message: dict[str, Any] = {"role": "assistant", "content": text, "reasoning": self.book.thinking.get(question)}
        if question in self.book.calls:
            message["tool_calls"] = self.book.calls[question]
        said = {"message": message} if is_chat else {"text": text}
        tokens = len(f"{text or ''} {self.book.thinking.get(question, '')}".split())
        choice = {"index": 0, "finish_reason": reason, **said}
        self._answer(200, {"model": "reference", "choices": [choice], "usage": {"completion_tokens": tokens}})


def _said(content: str | list[dict[str, Any]]) -> str:
    """A message as text, with the SHA-256 of each picture's file in its place."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else _digest(part["image_url"]["url"]) for part in content)


def _digest(url: str) -> str:
    return sha256(b64decode(url.partition(";base64,")[2], validate=True)).hexdigest()


@contextmanager
def serving(book: Book) -> Iterator[str]:
    """Its address, for the length of the block."""
    handler = type("BookHandler", (Handler,), {"book": book})
    with ReplyServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
