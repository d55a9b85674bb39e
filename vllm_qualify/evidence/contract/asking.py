"""Ask a server for each check of its contract. One request follows another, but for those that are asked at once.

Replies are compared with each other, and a server's sums depend on what it computes beside them.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from vllm_qualify.engine.kind import KINDS
from vllm_qualify.engine.metrics_page import sums_of
from vllm_qualify.engine.server import Server
from vllm_qualify.evidence.contract.asked import Asked, of_alias
from vllm_qualify.evidence.contract.capabilities.probe import LONG_TOK, Body, Probe, request_name
from vllm_qualify.evidence.contract.capabilities.table import most_requests, probes_of
from vllm_qualify.evidence.contract.exchange import COMPLETIONS, RESPONSES, Book, Exchange, Request, exchanged, hung_up
from vllm_qualify.evidence.contract.replies import BrokenError, Completion, MissingError, Models, Said
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
# After so many requests without a whole reply no more is asked.
MOST_SILENT = 3


class Asker(NamedTuple):
    """A server, and where its replies are kept."""

    server: Server
    contract: Contract
    prompt: str
    book: Book

    def ask(self, name: str, path: str = COMPLETIONS, **keys: JsonValue) -> Exchange:
        """Ask for a completion of the prompt at temperature 0, with these keys beside."""
        body = {"model": self.server.served_model_name, "prompt": self.prompt, "max_tokens": TOKENS, "temperature": 0} | keys
        return self.send(Request(name=name, path=path, body=body))

    def send(self, request: Request) -> Exchange:
        return self.book.keep(exchanged(self.server.url, request, self.contract.time_limit_s))

    def get(self, name: str, path: str) -> Exchange:
        return self.send(Request(name=name, path=path, method="GET"))

    @property
    def said(self) -> Said:
        return Said(self.book.exchanges)

    @property
    def is_asked(self) -> set[str]:
        return {check.name.removeprefix("contract_") for check in self.contract.checks}


def measure_contract(server: Server, contract: Contract, prompt: str, folder: Path) -> None:
    """Write what the server was asked and what it answered to `exchanges.jsonl`.

    Raises:
        ReleaseError: the server has ended.
    """
    asker = Asker(server, contract, prompt, Book(folder))
    probes: list[Callable[[Asker], None]] = [partial(_attempts, probe=probe) for probe in probes_of(contract.capabilities)]
    for part in (_plain, _sampled, _refused, _hang_up, *probes, _at_once):
        if asker.book.silent < MOST_SILENT:
            part(asker)
            server.check_alive()


def longest_s(contract: Contract) -> float:
    """The most that all requests may take, in s; those at once take as long as one."""
    requests = MOST_REQUESTS + len(contract.aliases) + most_requests(contract.capabilities)
    return requests * contract.time_limit_s + FREED_WITHIN_S


def _attempts(asker: Asker, probe: Probe) -> None:
    """Ask one attempt of a probe after another until one holds."""
    if probe.check not in asker.is_asked:
        return
    asked = Asked(asker.said, asker.server.served_model_name, KINDS[asker.server.kind])
    for name, attempt in probe.names():
        plain = probe.plain_name(name)
        if plain is not None and plain not in asker.said:
            continue
        for word, body in attempt.items():
            if asker.book.silent >= MOST_SILENT:
                return
            asker.send(Request(name=request_name(name, word), path=probe.path, body=_completed(asker, probe, body)))
        try:
            probe.holds(asked, name)
        except (BrokenError, MissingError):
            continue
        return


def _completed(asker: Asker, probe: Probe, body: Body) -> dict[str, JsonValue]:
    """A probe's body with the model, temperature 0, and no longer a reply than half of what fits."""
    most_key = "max_output_tokens" if probe.path == RESPONSES else "max_tokens"
    most_tok = max(1, min(probe.tokens, (_longest_tok(asker) or 2 * LONG_TOK) // 2))
    return {"model": asker.server.served_model_name, most_key: most_tok, "temperature": 0, **body}


def _plain(asker: Asker) -> None:
    """What most checks start from: the models, and a plain reply."""
    asker.get("models", "/v1/models")
    for alias in asker.contract.aliases if "models" in asker.is_asked else ():
        asker.ask(of_alias(alias), model=alias)
    if not asker.is_asked & {"completion", "stream", "stream_usage", "stream_end", "max_tokens", "stop", "alive"}:
        return
    asker.ask("plain")
    asker.ask("stream", stream=True, stream_options={"include_usage": True})
    asker.ask("one", max_tokens=1)
    try:
        text = asker.said.read("plain", Completion).choices[0].text
    except (BrokenError, MissingError):
        return
    at = min(3, len(text) - 1)
    if at >= 0:
        asker.ask("stop", stop=[text[at : at + 3]])


def _sampled(asker: Asker) -> None:
    """Engines refuse several choices at temperature 0, where all are the same."""
    if asker.is_asked & {"n", "seed"}:
        for name in ("sampled", "sampled again"):
            asker.ask(name, max_tokens=FEW, temperature=1, seed=7, n=2)
    if "logprobs" in asker.is_asked:
        asker.ask("logprobs", max_tokens=FEW, logprobs=1)


def _refused(asker: Asker) -> None:
    if "prompt_too_long" in asker.is_asked and (longest := _longest_tok(asker)) is not None and longest < MOST_PROMPT:
        body: dict[str, JsonValue] = {"model": asker.server.served_model_name, "prompt": [1], "max_tokens": 1, "temperature": 0}
        asker.send(Request(name="too long", path=COMPLETIONS, body=body, times=longest + 1))
    if "bad_body" in asker.is_asked:
        asker.send(Request(name="no JSON", path=COMPLETIONS, raw='{"model": '))
        asker.ask("wrong type", max_tokens="many")
    if "unknown_model" in asker.is_asked:
        asker.ask("unknown model", model=f"not-{asker.server.served_model_name}")
    if "alive" in asker.is_asked:
        asker.ask("after errors")


def _longest_tok(asker: Asker) -> int | None:
    """How many tokens a prompt and its reply may have, as the server says."""
    try:
        cards = asker.said.read("models", Models).data
    except (BrokenError, MissingError):
        return None
    longest = cards[0].max_model_len if cards else None
    return longest if longest is not None and longest > 0 else None


def _hang_up(asker: Asker) -> None:
    if "hang_up" not in asker.is_asked:
        return
    page, longest = asker.server.metrics_path, _longest_tok(asker) or 2 * TOKENS
    asker.get("metrics before", page)
    body: dict[str, JsonValue] = {
        "model": asker.server.served_model_name,
        "prompt": asker.prompt,
        "max_tokens": max(1, min(MOST_TOKENS, longest // 2)),
        "temperature": 0,
        "stream": True,
        # Or it could end by itself before the client hangs up.
        "ignore_eos": True,
    }
    request = Request(name="hung up", path=COMPLETIONS, body=body)
    asker.book.keep(hung_up(asker.server.url, request, asker.contract.time_limit_s))
    # The counts of an engine that has nothing to do can be old: it counts when it computes.
    asker.ask("after hang-up", max_tokens=1)
    _await_idle(asker, page)


def _await_idle(asker: Asker, page: str) -> None:
    """Keep the first page of metrics on which no request runs, or the last one."""
    request, until = Request(name="metrics after", path=page, method="GET"), time.monotonic() + FREED_WITHIN_S
    while True:
        exchange = exchanged(asker.server.url, request, asker.contract.time_limit_s)
        # A page without the count will not get it.
        if not counted(exchange.reply, KINDS[asker.server.kind].counters["running"]) or time.monotonic() > until:
            break
        # A server's counts are polled: it tells no one when they change.
        time.sleep(POLL_S)
    asker.book.keep(exchange)


def counted(page: str, names: tuple[str, ...]) -> float | None:
    """The first of these counts that a page of metrics has, over all its labels; None if it has none or is no such page."""
    try:
        sums = sums_of(page, (*names, *(f"{name}_total" for name in names)))
    except ValueError:
        return None
    found = (sums[each] for name in names for each in (name, f"{name}_total") if each in sums)
    return next(found, None)


def _at_once(asker: Asker) -> None:
    if "many" not in asker.is_asked:
        return
    with ThreadPoolExecutor(MANY) as pool:
        list(pool.map(lambda number: asker.ask(f"at once {number}", max_tokens=FEW), range(1, MANY + 1)))
