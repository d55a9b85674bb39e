"""The paths: how the server is brought onto each, and what proves from the files that its answers took it.

The prompts have a cache of their own for each salt, so that a prompt is cold at will: with a salt that was never sent.
"""

import itertools
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vllm_qualify.engine.kinds.base import Counted, EngineKind
from vllm_qualify.evidence.contract.exchange import Request
from vllm_qualify.evidence.load.problems import counters_of
from vllm_qualify.evidence.paths import constrained
from vllm_qualify.evidence.paths.asking import Asking, Filler, HangUp, Slept
from vllm_qualify.evidence.paths.replies import Prompt, Reply
from vllm_qualify.recipe.metrics import AWAKE, CONSTRAINED
from vllm_qualify.recipe.paths import Paths
from vllm_qualify.recipe.values import Frozen, NotNegative

# The share of the prompts' tokens that must come from the cache, or at most may.
LEAST_HITS, MOST_HITS = 0.5, 0.1
# How much more than the cache holds is sent to push prompts out of it.
MORE_THAN_CACHE = 1.2
# The tokens of the replies to other prompts beside which prompts are asked.
FILLER_REPLY_TOK = 48
# The share of the clients that must have left before the end of their replies, and that must have left replies that had begun.
LEAST_LEFT, LEAST_BEGUN = 0.5, 0.25
# How long a server may need until it is idle again after that, and how long this is waited for.
RECOVERS_WITHIN_S, MOST_WAITED_S = 10.0, 30.0
# What of the KV cache may still be in use after the clients have left, beside what was in use before.
CACHE_SHARE = 0.01
COLD, COLD_AGAIN, CACHED, EVICTED = "cold", "cold-again", "cached", "evicted"
PAGES = ("metrics-before.txt", "metrics-after.txt")
REPLIES = "replies.jsonl"
RECOVERED, BESIDE, FILLERS, HUNG_UP = "recovered.json", "beside.jsonl", "fillers.jsonl", "hung-up.jsonl"
SLEPT = "slept.json"


class Recovered(Frozen):
    """How long it took until the server was idle after clients had hung up, and what of its KV cache was in use before."""

    waited_s: NotNegative
    cache_share: NotNegative


@dataclass(frozen=True)
class Scene:
    """What the paths of one cell have in common: whom to ask, how, and the other prompts' tokens."""

    asking: Asking
    settings: Paths
    prompts: Sequence[Prompt]
    salt: str
    """the beginning of all salts, so that another run on the same server has others"""
    filler: Sequence[int]
    """the tokens of another prompt"""
    cache_tok: int | None
    """how many tokens the KV cache holds, if the server says so"""
    requests: Sequence[Request] = ()
    """those whose replies must have a form"""

    def other_salts(self, path: str) -> Iterator[str]:
        return (f"{self.salt}-{path}-other-{number}" for number in itertools.count())


def salts_of(salt: str, path: str, prompts: Sequence[Prompt]) -> list[str]:
    """The salts of a path's prompts: those of the first pass where the prompts are in the cache, or were there before."""
    of = COLD if path in (CACHED, EVICTED, AWAKE) else path
    return [f"{salt}-{of}-{prompt.number}" for prompt in prompts]


@dataclass(frozen=True)
class Seen:
    """What a path left: its folder, the replies, and the server's counters over it."""

    folder: Path
    kind: EngineKind
    settings: Paths
    replies: Sequence[Reply]
    at_once: int
    counted: Counted

    def hit_share(self) -> float | None:
        """Which share of the prompts' tokens came from the cache, or was brought back to it from elsewhere.

        By the replies if they say it, else by the counters. None if neither says it.
        """
        told = [reply.cached_tok for reply in self.replies]
        known = [tok for tok in told if tok is not None]
        if len(known) == len(told):
            return sum(known) / sum(reply.prompt_tok for reply in self.replies)
        local = self.local_hit_share()
        brought, queries = (self.counted.gained(self.kind.total(name)) for name in ("external_hits", "prefix_queries"))
        return None if local is None else local + brought / queries

    def local_hit_share(self) -> float | None:
        """The share that was still in the cache, by the counters; replies also count what is brought back from elsewhere."""
        hits, queries = (self.counted.gained(self.kind.total(name)) for name in ("prefix_hits", "prefix_queries"))
        return hits / queries if queries > 0 else None


class BusyPath(ABC):
    """One path: how the server is brought onto it, and what proves that its answers took it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def take(self, scene: Scene, folder: Path) -> None:
        """Ask the prompts on this path, and leave its files in its folder. Raises ReleaseError if the server has ended."""
        scene.asking.ask_prompts(scene.prompts, salts_of(scene.salt, self.name, scene.prompts), folder / REPLIES)

    @abstractmethod
    def doubts(self, seen: Seen) -> Iterator[str]:
        """Why the answers are not proven to have taken this path. Raises one of UNUSABLE."""

    def fault(self, seen: Seen) -> str:  # noqa: ARG002  (the paths' signature)
        """What else than its answers is wrong; empty if nothing is. Raises one of UNUSABLE."""
        return ""


class Cold(BusyPath):
    """The second pass has other batches than the first: else both have the same noise, and hide it."""

    def take(self, scene: Scene, folder: Path) -> None:
        salts = salts_of(scene.salt, self.name, scene.prompts)
        scene.asking.ask_prompts(scene.prompts, salts, folder / REPLIES, in_other_batches=self.name == COLD_AGAIN)

    def doubts(self, seen: Seen) -> Iterator[str]:  # noqa: ARG002  (the paths' signature)
        """None: a prompt with a new salt is cold, or the server does not keep salts apart, which is a fault."""
        return iter(())

    def fault(self, seen: Seen) -> str:
        problem = "".join(_too_many_hits(seen.hit_share()))
        return f"{problem}, since each has a salt of its own: who shares the server reads from others' cache" if problem else ""


class Cached(BusyPath):
    def doubts(self, seen: Seen) -> Iterator[str]:
        share = seen.hit_share()
        if share is None or share < LEAST_HITS:
            told = "does not say how much" if share is None else f"says that {share:.0%}"
            yield (
                f"the server {told} of the prompts came from its prefix cache, and {LEAST_HITS:.0%} must: ask fewer or longer"
                " prompts, or leave this path out where the cache is off"
            )


class Concurrent(BusyPath):
    def take(self, scene: Scene, folder: Path) -> None:
        others = scene.other_salts(self.name)
        with scene.asking.asking_beside(scene.filler, others, FILLER_REPLY_TOK, folder / BESIDE) as since:
            salts = salts_of(scene.salt, self.name, scene.prompts)
            scene.asking.ask_prompts(scene.prompts, salts, folder / REPLIES, since)

    def doubts(self, seen: Seen) -> Iterator[str]:
        yield from doubt_company(seen.folder, seen.replies, seen.at_once)


class Constrained(BusyPath):
    """Replies that must have a form, beside others that need not: one batch has both."""

    def take(self, scene: Scene, folder: Path) -> None:
        asking, others = scene.asking, scene.other_salts(self.name)
        with asking.asking_beside(scene.filler, others, FILLER_REPLY_TOK, folder / BESIDE) as since:
            path = folder / constrained.EXCHANGES
            constrained.ask_all(asking.server, scene.requests, asking.at_once, asking.limit_s, since, path)

    def doubts(self, seen: Seen) -> Iterator[str]:
        yield from doubt_company(seen.folder, constrained.read_timed(seen.folder / constrained.EXCHANGES), seen.at_once)


class Evicted(BusyPath):
    def take(self, scene: Scene, folder: Path) -> None:
        most_tok = scene.settings.most_filler_tok
        total_tok = most_tok if scene.cache_tok is None else min(int(MORE_THAN_CACHE * scene.cache_tok), most_tok)
        missing_tok = max(0, total_tok - _tok_beside(folder.parent))
        scene.asking.fill_cache(scene.filler, scene.other_salts(self.name), missing_tok, folder / FILLERS)
        # What pushed the prompts out is not counted.
        (folder / PAGES[0]).write_text(scene.asking.server.metrics_page())
        super().take(scene, folder)

    def doubts(self, seen: Seen) -> Iterator[str]:
        yield from _filler_problems(_read_fillers(seen.folder / FILLERS))
        # What is brought back from elsewhere was pushed out, too.
        share = seen.local_hit_share()
        share = seen.hit_share() if share is None else share
        if share is None:
            yield "the server does not say how much of the prompts was still in its cache"
        yield from _too_many_hits(share, "raise most_filler_tok, give the server a smaller cache, or leave this path out")


class Aborted(BusyPath):
    def take(self, scene: Scene, folder: Path) -> None:
        asking, times = scene.asking, scene.settings.num_aborts
        before = asking.cache_share() or 0.0
        asking.hang_up(scene.filler, scene.other_salts(self.name), times, 4 * FILLER_REPLY_TOK, folder / HUNG_UP, times)
        waited_s = asking.await_idle(before + CACHE_SHARE, MOST_WAITED_S)
        (folder / RECOVERED).write_text(Recovered(waited_s=waited_s, cache_share=before).model_dump_json())
        super().take(scene, folder)

    def doubts(self, seen: Seen) -> Iterator[str]:
        hung_up = [HangUp.model_validate_json(line) for line in _lines(seen.folder / HUNG_UP)]
        if problem := next((each.problem for each in hung_up if each.problem), ""):
            yield f"a client that was to hang up got no stream: {problem}"
        left = sum(not each.reply_ended for each in hung_up)
        if len(hung_up) != seen.settings.num_aborts or left < LEAST_LEFT * len(hung_up):
            asked = seen.settings.num_aborts
            yield f"{left} of {len(hung_up)} clients hung up before their replies ended, of {asked} that should"
        begun = sum(each.reply_began and not each.reply_ended for each in hung_up)
        if begun < LEAST_BEGUN * len(hung_up):
            yield f"{begun} of {len(hung_up)} clients left a reply that had begun, and {LEAST_BEGUN:.0%} must"

    def fault(self, seen: Seen) -> str:
        waited_s = read_recovered(seen.folder).waited_s
        if waited_s <= RECOVERS_WITHIN_S:
            return ""
        return f"{waited_s:.0f} s after clients hung up, requests still ran, or the KV cache was not free again"


class Awake(BusyPath):
    """The prompts that were asked last before the server slept, so that what was in its cache would be found, if it could."""

    def take(self, scene: Scene, folder: Path) -> None:
        (folder / SLEPT).write_text(scene.asking.sleep_and_wake().model_dump_json())
        super().take(scene, folder)

    def doubts(self, seen: Seen) -> Iterator[str]:
        if problem := Slept.model_validate_json((seen.folder / SLEPT).read_bytes()).problem:
            yield f"the server did not sleep: {problem}"

    def fault(self, seen: Seen) -> str:
        share = seen.local_hit_share()
        if next(self.doubts(seen), "") or share is None or share <= MOST_HITS:
            return ""
        return f"{share:.0%} of the prompts came from the prefix cache, whose memory was given back while the server slept"


_KINDS = (
    Cold(COLD),
    Cold(COLD_AGAIN),
    Cached(CACHED),
    Concurrent("concurrent"),
    Aborted("aborted"),
    Constrained(CONSTRAINED),
    Evicted(EVICTED),
    Awake(AWAKE),
)
BUSY_PATHS: dict[str, BusyPath] = {kind.name: kind for kind in _KINDS}


def read_recovered(folder: Path) -> Recovered:
    """Raises one of UNUSABLE."""
    return Recovered.model_validate_json((folder / RECOVERED).read_bytes())


def read_counted(before: Path, after: Path) -> Counted:
    """The counters over a path. Raises one of UNUSABLE."""
    return counters_of(before, after)[1]


class UnderWay(Protocol):
    """A request, and when it was under way, in s since the path's first request."""

    @property
    def began_s(self) -> float: ...

    @property
    def ended_s(self) -> float: ...


def doubt_company(folder: Path, requests: Sequence[UnderWay], at_once: int) -> Iterator[str]:
    """Why these requests are not proven to have been asked beside as many others. Raises one of UNUSABLE."""
    others = _read_fillers(folder / BESIDE)
    if not others:
        yield "no other prompts were asked"
    yield from _filler_problems(others)
    beside, least = count_company(folder, requests) or 0.0, (at_once + 1) // 2
    if beside < least:
        yield f"beside half of the requests at most {beside:g} others were under way, and {least} should be"


def count_company(folder: Path, requests: Sequence[UnderWay]) -> float | None:
    """Beside how many others half of the requests were under way, or more. None if there were none. Raises one of UNUSABLE."""
    if not (folder / BESIDE).exists():
        return None
    others = _read_fillers(folder / BESIDE)
    return statistics.median(
        sum(other.began_s < request.ended_s and request.began_s < other.ended_s for other in others) for request in requests
    )


def _too_many_hits(share: float | None, remedy: str = "") -> Iterator[str]:
    if share is not None and share > MOST_HITS:
        said = f"{share:.0%} of the prompts came from the prefix cache, and at most {MOST_HITS:.0%} may"
        yield f"{said}: {remedy}" if remedy else said


def _read_fillers(path: Path) -> list[Filler]:
    return [Filler.model_validate_json(line) for line in _lines(path)]


def _tok_beside(folder: Path) -> int:
    """How many tokens of other prompts were asked on the paths so far."""
    return sum(other.prompt_tok for path in folder.glob(f"*/{BESIDE}") for other in _read_fillers(path) if not other.problem)


def _filler_problems(others: Sequence[Filler]) -> Iterator[str]:
    if problem := next((other.problem for other in others if other.problem), ""):
        yield f"another prompt has no reply: {problem}"


def _lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().split(b"\n") if line]
