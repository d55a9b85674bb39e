"""Requests that keep a server busy: prompts on a path, other prompts beside them, and clients that hang up."""

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import httpx
from pydantic import JsonValue

from vllm_qualify.answers import ask_within, open_client
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.server import Server
from vllm_qualify.errors import ReleaseError
from vllm_qualify.evidence.contract.measure import read_count
from vllm_qualify.evidence.paths.replies import COMPLETIONS, Asked, Prompt, cover_salt
from vllm_qualify.limits import call_within
from vllm_qualify.recipe.values import CountOrZero, Flag, Frozen, NotNegative

MOST_BYTES = 2**20
# How long a client waits before it hangs up, in s: for the first token, or from that on.
HANGS_UP_AFTER_S = (0.0, 0.02, 0.05, 0.1)
POLL_S = 0.05


class Filler(Frozen):
    """Another prompt that was asked: its tokens, and when, in s since the path's first request."""

    prompt_tok: CountOrZero
    began_s: NotNegative
    ended_s: NotNegative
    problem: str = ""


class HangUp(Frozen):
    """A client that hung up: after how long, whether the reply had begun by then, and whether it had ended before."""

    after_s: NotNegative
    """from the request on, or for one that waits for it from the first token on"""
    waits_for_token: Flag
    reply_began: Flag = False
    reply_ended: Flag = False
    problem: str = ""


class Slept(Frozen):
    """A server that was put to sleep and woken up, and how long the waking took. `problem` says why it did not sleep."""

    woke_s: NotNegative | None = None
    problem: str = ""


def _numbered(salt: str) -> Iterator[str]:
    return (f"{salt}-{number}" for number in itertools.count())


class Asking:
    """Whom to ask, how many requests at once, and how long to wait for one."""

    def __init__(self, server: Server, at_once: int, limit_s: float, reply_tok: int) -> None:
        self.server, self.at_once, self.limit_s, self.reply_tok = server, at_once, limit_s, reply_tok
        self._counters = KINDS[server.kind].counters

    def ask_prompts(
        self,
        prompts: Sequence[Prompt],
        salts: Sequence[str],
        path: Path,
        began: float | None = None,
        *,
        in_other_batches: bool = False,
    ) -> None:
        """Ask each prompt with its salt, and write a line for each. Raises ReleaseError if the server has ended.

        `in_other_batches`, the last prompts are asked first, and half as many at once.
        """
        since = time.monotonic() if began is None else began

        def ask(prompt: Prompt, salt: str) -> Asked:
            where, body = prompt.request(self.server.served_model_name, salt, self.reply_tok)
            started, reply, problem = time.monotonic(), None, ""
            try:
                reply = self._post(where, body)
            except (httpx.HTTPError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"[:500]
            times = {"began_s": started - since, "ended_s": time.monotonic() - since}
            return Asked(number=prompt.number, digest=prompt.digest, salt=salt, reply=reply, problem=problem, **times)

        step, at_once = (-1, (self.at_once + 1) // 2) if in_other_batches else (1, self.at_once)
        with ThreadPoolExecutor(at_once) as pool:
            replies = [*pool.map(ask, prompts[::step], salts[::step])]
        path.write_text("".join(f"{asked.model_dump_json()}\n" for asked in replies[::step]), encoding="utf-8")
        self.server.check_alive()

    def ask_filler(self, tokens: Sequence[int], salt: str, most_tok: int, since: float) -> Filler:
        started, problem = time.monotonic(), ""
        try:
            self._post(COMPLETIONS, self.filler_body(tokens, salt, most_tok))
        except (httpx.HTTPError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"[:500]
        times = {"began_s": started - since, "ended_s": time.monotonic() - since}
        return Filler(prompt_tok=len(tokens), problem=problem, **times)

    def filler_body(self, tokens: Sequence[int], salt: str, most_tok: int) -> dict[str, JsonValue]:
        own: dict[str, JsonValue] = {"prompt": list(tokens), "max_tokens": most_tok, "cache_salt": cover_salt(salt)}
        return own | {"model": self.server.served_model_name, "temperature": 0, "ignore_eos": True}

    def _post(self, where: str, body: dict[str, JsonValue]) -> JsonValue:
        document: JsonValue = json.loads(self._ask_for_text("POST", where, json=body))
        return document

    def _ask_for_text(self, method: str, where: str, **content: Any) -> str:
        """The reply's text. Raises httpx.HTTPError or ValueError."""
        reply = ask_within(method, f"{self.server.url}{where}", self.limit_s, MOST_BYTES, **content)
        if reply.status_code != httpx.codes.OK:
            raise ValueError(f"HTTP {reply.status_code}: {reply.text[:300]}")
        return reply.text

    def fill_cache(self, tokens: Sequence[int], salts: Iterator[str], total_tok: int, path: Path) -> None:
        """Ask other prompts, each of `tokens`, of at least so many tokens in all."""
        since, times = time.monotonic(), -(-total_tok // len(tokens))
        with ThreadPoolExecutor(self.at_once) as pool, path.open("w", encoding="utf-8") as file:
            for filler in pool.map(lambda salt: self.ask_filler(tokens, salt, 1, since), [next(salts) for _ in range(times)]):
                file.write(f"{filler.model_dump_json()}\n")
        self.server.check_alive()

    @contextmanager
    def asking_beside(self, tokens: Sequence[int], salts: Iterator[str], most_tok: int, path: Path) -> Iterator[float]:
        """Ask other prompts during the block, as many at once as all others; gives when the first one began."""
        since, ended = time.monotonic(), Event()

        def ask_on(own: Iterator[str]) -> list[Filler]:
            done = []
            while not ended.is_set():
                done.append(self.ask_filler(tokens, next(own), most_tok, since))
            return done

        with ThreadPoolExecutor(self.at_once) as pool, path.open("w", encoding="utf-8") as file:
            asking = [pool.submit(ask_on, _numbered(salt)) for salt in islice(salts, self.at_once)]
            try:
                yield since
            finally:
                ended.set()
            for future in as_completed(asking):
                file.writelines(f"{filler.model_dump_json()}\n" for filler in future.result())
        self.server.check_alive()

    def hang_up(self, tokens: Sequence[int], salts: Iterator[str], times: int, most_tok: int, path: Path, seed: int) -> None:
        """Ask for streams, and leave each before its end: by turns in the queue or the prefill, and in the decode."""
        drawn = random.Random(seed)
        planned = [HangUp(after_s=drawn.choice(HANGS_UP_AFTER_S), waits_for_token=number % 2 == 1) for number in range(times)]
        with ThreadPoolExecutor(self.at_once) as pool, path.open("w", encoding="utf-8") as file:
            bodies = [self.filler_body(tokens, next(salts), most_tok) | {"stream": True} for _ in range(times)]
            for hung_up in pool.map(self._hang_up_once, bodies, planned):
                file.write(f"{hung_up.model_dump_json()}\n")
        self.server.check_alive()

    def _hang_up_once(self, body: dict[str, JsonValue], planned: HangUp) -> HangUp:
        seen = planned
        # A read that takes longer than the wait ends it, too: then the stream is left without a byte.
        read_s = self.limit_s if planned.waits_for_token else max(0.001, planned.after_s)

        def stream() -> None:
            nonlocal seen
            with (
                open_client(self.limit_s, MOST_BYTES, timeout=httpx.Timeout(self.limit_s, read=read_s)) as client,
                client.stream("POST", f"{self.server.url}{COMPLETIONS}", json=body) as answer,
            ):
                answer.raise_for_status()
                until = time.monotonic() + planned.after_s
                for line in filter(None, answer.iter_lines()):
                    if not seen.reply_began:
                        seen, until = seen.model_copy(update={"reply_began": True}), time.monotonic() + planned.after_s
                    if line == "data: [DONE]":
                        seen = seen.model_copy(update={"reply_ended": True})
                    if seen.reply_ended or time.monotonic() > until or not planned.waits_for_token:
                        return

        try:
            call_within(self.limit_s, stream)
        except httpx.ReadTimeout as error:
            return seen.model_copy(update={"problem": f"no token came: {error}"}) if planned.waits_for_token else seen
        except (httpx.HTTPError, TimeoutError) as error:
            return seen.model_copy(update={"problem": f"{type(error).__name__}: {error}"[:500]})
        return seen

    def sleep_and_wake(self) -> Slept:
        """Put the server to sleep, its weights in the host's memory and its KV cache given back, and wake it up.

        Raises ReleaseError if it slept and does not wake, or has ended.
        """
        not_slept = self._order_sleep("/sleep?level=1", to_sleep=True)
        began = time.monotonic()
        # Also a server that does not say that it sleeps may do so.
        not_woken = self._order_sleep("/wake_up", to_sleep=False)
        if not_slept:
            return Slept(problem=not_slept)
        if not_woken:
            remedy = "see the server's log; or serve this release without enable-sleep-mode"
            raise ReleaseError(f"the server slept and did not wake up: {not_woken}", remedy, "paths")
        return Slept(woke_s=time.monotonic() - began)

    def _order_sleep(self, where: str, *, to_sleep: bool) -> str:
        """Put the server to sleep, or wake it up; why that failed. Raises ReleaseError if it has ended."""
        try:
            self._ask_for_text("POST", where)
            said = json.loads(self._ask_for_text("GET", "/is_sleeping"))
            problem = "" if said == {"is_sleeping": to_sleep} else f"after {where} its /is_sleeping says {json.dumps(said)}"
        except (httpx.HTTPError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        self.server.check_alive()
        return problem[:500]

    def cache_share(self) -> float | None:
        """Which share of the KV cache is in use; None if the server does not say it."""
        return read_count(self.server.metrics_page(), self._counters["kv_cache_usage"])

    def await_idle(self, cache_share: float, limit_s: float, clock: Callable[[], float] = time.monotonic) -> float:
        """How long until no request runs or waits, and no more of the KV cache is in use than `cache_share`, in s.

        At least `limit_s` if that does not happen.
        """
        began = clock()
        while True:
            page = self.server.metrics_page()
            waited_s = clock() - began
            busy = [read_count(page, self._counters[name]) for name in ("running", "waiting")]
            used = read_count(page, self._counters["kv_cache_usage"])
            if (busy == [0, 0] and used is not None and used <= cache_share) or waited_s >= limit_s:
                return waited_s
            time.sleep(POLL_S)
