"""Send a server the requests of each check of its contract. One follows another, but for those that are sent at once.

Replies are compared with each other, and a server's sums depend on what it computes beside them.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pydantic import JsonValue

from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.metrics_page import sums_of
from vllm_qualify.engine.server import Server
from vllm_qualify.evidence.contract.capabilities.probe import LONG_TOK, Body, Probe
from vllm_qualify.evidence.contract.capabilities.table import most_requests, probes_of
from vllm_qualify.evidence.contract.exchange import CHATS, COMPLETIONS, EXCHANGES, RESPONSES, Exchange, Request, send_request
from vllm_qualify.evidence.contract.own_schemas import own_bodies
from vllm_qualify.evidence.contract.replies import BrokenError, Completion, MissingError, Models
from vllm_qualify.evidence.contract.transcript import Transcript
from vllm_qualify.recipe.contract import Contract

MANY = 64
# The replies are short. A few tokens are enough to show what is wrong.
TOKENS, FEW = 16, 4
# The longest reply that the client that hangs up asks for, and the longest prompt that is made.
MOST_TOKENS, MOST_PROMPT = 4096, 2**22
# How long a server may take to notice that a client is gone. vLLM watches the connection, and notices at once.
FREED_WITHIN_S, POLL_S = 10.0, 0.1
# The requests of a server that is asked for everything; those at once count as one.
MOST_REQUESTS = 20
# After so many requests without a whole reply no more is sent.
MOST_SILENT = 3
START_FROM_PLAIN = {"completion", "stream", "stream_usage", "stream_end", "max_tokens", "stop", "alive"}


class Requester:
    """Asks a server, and keeps each exchange in the stage's folder, one after another."""

    def __init__(self, server: Server, contract: Contract, prompt: str, folder: Path) -> None:
        self.server, self.contract, self.prompt, self.model = server, contract, prompt, server.served_model_name
        self._file, self._lock = folder / EXCHANGES, threading.Lock()
        self._kept: dict[str, Exchange] = {}
        self.replies = Transcript(self._kept, self.model, KINDS[server.kind])
        self.wanted_checks = {check.name.removeprefix("contract_") for check in contract.checks}

    def keep(self, exchange: Exchange) -> None:
        with self._lock, self._file.open("a") as file:
            file.write(f"{exchange.model_dump_json(exclude_defaults=True)}\n")
            self._kept[exchange.name] = exchange

    def ask(self, request: Request, *, hang_up: bool = False) -> Exchange:
        return send_request(self.server.url, request, self.contract.time_limit_s, hang_up=hang_up)

    def send(self, name: str, body: Body, path: str = COMPLETIONS, *, hang_up: bool = False, times: int = 1) -> None:
        """Send a body with the served model and temperature 0, unless it has others."""
        whole: dict[str, JsonValue] = {"model": self.model, "temperature": 0, **body}
        self.keep(self.ask(Request(name=name, path=path, body=whole, times=times), hang_up=hang_up))

    def complete(self, name: str, **keys: JsonValue) -> None:
        """Ask for a completion of the prompt, with these keys beside."""
        self.send(name, {"prompt": self.prompt, "max_tokens": TOKENS, **keys})

    def get(self, name: str, path: str) -> None:
        self.keep(self.ask(Request(name=name, path=path, method="GET")))

    @property
    def is_silent(self) -> bool:
        """Whether so many requests have no whole reply that no more are sent."""
        return sum(exchange.problem is not None for exchange in self._kept.values()) >= MOST_SILENT

    @property
    def longest_tok(self) -> int | None:
        """How many tokens a prompt and its reply may have, as the server says."""
        try:
            cards = self.replies.read("models", Models).data
        except (BrokenError, MissingError):
            return None
        longest = cards[0].max_model_len if cards else None
        return longest if longest is not None and longest > 0 else None


def measure_contract(server: Server, contract: Contract, prompt: str, folder: Path) -> None:
    """Write the requests to the server, and its replies, to `exchanges.jsonl`. Raises ReleaseError if the server has ended."""
    requester = Requester(server, contract, prompt, folder)
    probes: list[Callable[[Requester], None]] = [partial(_try_probe, probe=probe) for probe in probes_of(contract.capabilities)]
    for part in (_send_plain, _send_sampled, _send_faulty, _send_hung_up, *probes, _send_own_schemas, _send_at_once):
        if not requester.is_silent:
            part(requester)
            server.check_alive()


def longest_s(contract: Contract) -> float:
    """The most that all requests may take, in s; those at once take as long as one."""
    own = len(contract.aliases) + len(contract.schemas)
    requests = MOST_REQUESTS + own + most_requests(contract.capabilities)
    return requests * contract.time_limit_s + FREED_WITHIN_S


def alias_request_name(alias: str) -> str:
    return f"as {alias}"


def _try_probe(requester: Requester, probe: Probe) -> None:
    """Ask one attempt of a probe after another until one holds."""
    if probe.check not in requester.wanted_checks:
        return
    most_key = "max_output_tokens" if probe.path == RESPONSES else "max_tokens"
    most_tok = _most_reply_tok(requester, probe.tokens)
    for attempt, requests in probe.requests.items():
        if probe.plain and attempt.replace(probe.check, probe.plain) not in requester.replies:
            continue
        for name, body in requests.items():
            if requester.is_silent:
                return
            requester.send(name, {most_key: most_tok, **body}, probe.path)
        try:
            probe.holds(requester.replies, attempt)
        except (BrokenError, MissingError):
            continue
        return


def _most_reply_tok(requester: Requester, tokens: int) -> int:
    """No reply is longer than half of what fits."""
    return max(1, min(tokens, (requester.longest_tok or 2 * LONG_TOK) // 2))


def _send_own_schemas(requester: Requester) -> None:
    most_tok = _most_reply_tok(requester, LONG_TOK)
    for name, body in own_bodies(requester.contract.schemas).items():
        if requester.is_silent:
            return
        requester.send(name, {"max_tokens": most_tok, **body}, CHATS)


def _send_plain(requester: Requester) -> None:
    """What most checks start from: the models, and a plain reply."""
    requester.get("models", "/v1/models")
    for alias in requester.contract.aliases if "models" in requester.wanted_checks else ():
        requester.complete(alias_request_name(alias), model=alias)
    if not requester.wanted_checks & START_FROM_PLAIN:
        return
    requester.complete("plain")
    requester.complete("stream", stream=True, stream_options={"include_usage": True})
    requester.complete("one", max_tokens=1)
    try:
        text = requester.replies.read("plain", Completion).choices[0].text
    except (BrokenError, MissingError):
        return
    at = min(3, len(text) - 1)
    if at >= 0:
        requester.complete("stop", stop=[text[at : at + 3]])


def _send_sampled(requester: Requester) -> None:
    """Engines refuse several choices at temperature 0, where all are the same."""
    if requester.wanted_checks & {"n", "seed"}:
        for name in ("sampled", "sampled again"):
            requester.complete(name, max_tokens=FEW, temperature=1, seed=7, n=2)
    if "logprobs" in requester.wanted_checks:
        requester.complete("logprobs", max_tokens=FEW, logprobs=1)


def _send_faulty(requester: Requester) -> None:
    wanted, longest = requester.wanted_checks, requester.longest_tok
    if "prompt_too_long" in wanted and longest is not None and longest < MOST_PROMPT:
        requester.send("too long", {"prompt": [1], "max_tokens": 1}, times=longest + 1)
    if "bad_body" in wanted:
        requester.keep(requester.ask(Request(name="no JSON", path=COMPLETIONS, raw='{"model": ')))
        requester.complete("wrong type", max_tokens="many")
    if "unknown_model" in wanted:
        requester.complete("unknown model", model=f"not-{requester.model}")
    if "alive" in wanted:
        requester.complete("after errors")


def _send_hung_up(requester: Requester) -> None:
    if "hang_up" not in requester.wanted_checks:
        return
    page, longest = requester.server.metrics_path, requester.longest_tok or 2 * TOKENS
    requester.get("metrics before", page)
    most_tok = max(1, min(MOST_TOKENS, longest // 2))
    # Without `ignore_eos` it could end by itself before the client hangs up.
    body: Body = {"prompt": requester.prompt, "max_tokens": most_tok, "stream": True, "ignore_eos": True}
    requester.send("hung up", body, hang_up=True)
    # The counts of an engine that has nothing to do can be old: it counts when it computes.
    requester.complete("after hang-up", max_tokens=1)
    # The first page on which no request runs is kept, or the last one. A page without the count will not get it.
    request, until = Request(name="metrics after", path=page, method="GET"), time.monotonic() + FREED_WITHIN_S
    exchange = requester.ask(request)
    while read_count(exchange.reply, requester.replies.kind.counters["running"]) and time.monotonic() <= until:
        # A server's counts are polled: it tells no one when they change.
        time.sleep(POLL_S)
        exchange = requester.ask(request)
    requester.keep(exchange)


def read_count(page: str, names: tuple[str, ...]) -> float | None:
    """The first of these counts that a page of metrics has, over all its labels; None if it has none or is no such page."""
    forms = tuple(form for name in names for form in (name, f"{name}_total"))
    try:
        sums = sums_of(page, forms)
    except ValueError:
        return None
    return next((sums[form] for form in forms if form in sums), None)


def _send_at_once(requester: Requester) -> None:
    if "many" not in requester.wanted_checks:
        return
    with ThreadPoolExecutor(MANY) as pool:
        list(pool.map(lambda number: requester.complete(f"at once {number}", max_tokens=FEW), range(1, MANY + 1)))
