"""The properties of a kind of engine. All offer OpenAI's interface; everything that differs between them is here."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import yaml
from pydantic import JsonValue

from vllm_qualify.recipe.serving import EngineName, ServerArguments

# The share of what prompts do not have in common that may hit a prefix cache all the same.
HITS_ALLOWED = 0.01

_Gauge = Literal["running", "waiting", "kv_cache_usage"]
_OfCache = Literal["preemptions", "prefix_queries", "prefix_hits", "external_hits", "reused_blocks", "missed_blocks"]
_OfTokens = Literal["prompt_tokens", "generation_tokens"]
_OfDrafts = Literal["drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_position"]
CounterName = Literal[_Gauge, _OfCache, _OfTokens, _OfDrafts, "succeeded"]
"""What a server may report on its metrics page. The third gauge is a share."""

Totals = Mapping[str, float]
"""A metrics page's counters by name (ending in `_total`), each summed over its labels."""


class ServedModel(NamedTuple):
    """The settings that a server of any kind gets. A model of the hub has a revision; local weights have none.

    `tokenizer_revision` is the commit of the repository that has the tokenizer; None if a folder has it. `aliases` are further
    names beside `name`.
    """

    model: str
    revision: str | None
    tokenizer_revision: str | None
    name: str
    host: str
    port: int
    aliases: tuple[str, ...] = ()


Identity = Mapping[str, str | None]
"""What a server serves, by the names of `IDENTITY`, each as text. A value that is not given is None."""
IDENTITY = ("model", "draft", "tokenizer", "revision", "tokenizer_revision", "trust_remote_code")


class Counted(NamedTuple):
    """A server's counters before and after a load's repeat."""

    before: Totals
    after: Totals

    def gained(self, name: str) -> float:
        """How much a counter grew; a missing counter is 0."""
        return self.after.get(name, 0.0) - self.before.get(name, 0.0)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Why nothing follows from these counters; empty if both pages have them."""
        for when, page in (("before", self.before), ("after", self.after)):
            if missing := sorted(set(names) - page.keys()):
                return [f"the server's /metrics {when} it has no {', '.join(missing)}"]
        return []


class Conditions(NamedTuple):
    """The conditions that a repeat was measured under. `arguments` are the server's.

    `shared` is the share of the prompts' tokens that other prompts of the workload are meant to begin with too; None if it is
    not known, as for a file's prompts. `are_fresh`: no prompt of the repeat was asked before on this server, or the server
    emptied its prefix cache before the repeat. `drawn_before` is the share of random prompts that came by chance before.
    """

    arguments: ServerArguments
    num_prompts: int
    shared: float | None
    are_fresh: bool
    drawn_before: float = 0.0


@dataclass(frozen=True)
class StartLog:
    """How to find the parts of a start in a kind's log: patterns, each matched against the message of a line."""

    line: re.Pattern[str]  # a line, with the groups `process`, `h`, `min`, `s` and `message`
    begins: re.Pattern[str]  # loading the weights begins
    loaded: re.Pattern[str]  # all of loading the weights took `s` seconds
    read: re.Pattern[str]  # reading the weights took `s` seconds, for logs without `loaded`
    compiled: re.Pattern[str]  # compiling one model took `s` seconds
    compiled_so_far: re.Pattern[str]  # compiling all models until then took `s` seconds
    warms_up: re.Pattern[str]  # the compilation begins, for logs without its seconds
    warmed_up: re.Pattern[str]  # the compilation has ended, for logs without its seconds
    captured: re.Pattern[str]  # capturing CUDA graphs took `s` seconds
    from_cache: re.Pattern[str]  # compiled code came from a cache
    anew: re.Pattern[str]  # code was compiled anew
    eager: re.Pattern[str]  # nothing is compiled, as `eager_option` says
    eager_option: str  # the server option that forbids to compile
    kv_tokens: re.Pattern[str]  # the KV cache has room for `tokens` tokens
    kv_concurrency: re.Pattern[str]  # the KV cache has room for `times` requests of the longest kind


@dataclass(frozen=True)
class EngineKind:
    """One kind of engine: the engine, its options, and what it reports while it runs."""

    name: EngineName
    title: str  # its name for people
    package: str  # the Python distribution that has its version
    example_image: str
    parallel: tuple[str, ...]  # the options whose product is the number of GPUs
    concurrency: str  # the option for how many requests it runs at once
    trust_remote_code: str
    speculative: str  # the option for speculative decoding
    repositories: tuple[str, ...]  # the options that may name a repository of the hub, and that can be pinned to a commit
    unpinned: tuple[str, ...]  # the options that may name a repository of the hub, and that can not be pinned
    files: tuple[str, ...]  # further options that may name a file which shapes replies
    metrics_path: str  # the path of its counters for Prometheus
    counters: Mapping[CounterName, tuple[str, ...]]
    """The names that each counter has had, newest first and without `_total`. This kind does not report the other counters."""
    load_problems: Callable[[Counted, Conditions], list[str]]  # says, from the counters, why a load's repeat does not count
    hit_share: Callable[[Counted], float | None]
    """The share of a repeat's prompts that its prefix cache had, in tokens or in blocks; None if it has no such cache."""
    config: Callable[[ServedModel, ServerArguments], ServerArguments]  # makes the config file's content of the recipe's options
    text: Callable[[ServerArguments], str]  # writes the config file's content as text
    arguments: Callable[[ServedModel, str], list[str]]  # what follows the image in `docker run`, for a config file at this path
    queue_remedy: str = "use more GPUs"  # what to do if requests wait although the server has room for them
    least_version: str | None = None
    pins_draft: bool = False  # whether the mapping of `speculative` takes a draft model's commit as `revision`
    needs_image: bool = True  # whether it is served only from an image
    has_client: bool = False  # whether its image can run `vllm bench serve`
    scores_prompts: bool = False  # whether it gives each prompt token's log-likelihood, and a text's token ids, as vLLM does
    has_tables: bool = False  # whether the catalog has a table of what each version knows
    start_log: StartLog | None = None  # finds the parts of a start in its log; None if they are not read
    identities: Callable[[str], list[Identity]] | None = None
    """Finds in its log what each of its processes says that it serves; None if its log does not say it."""
    opens_with_role: bool = False  # whether a chat's stream is known to begin with a chunk that has a role and no token
    is_held_to_contract: bool = False  # whether its servers are asked for the API's contract, unless a recipe says otherwise
    not_offered: Mapping[str, str] = field(default_factory=dict)  # contract checks that it cannot meet, each with the reason

    @property
    def tells_its_queue(self) -> bool:
        """Whether it reports during a load how many requests run, and how many wait."""
        return {"running", "waiting"} <= self.counters.keys()

    def most_requests(self, arguments: ServerArguments) -> int | None:
        """How many requests a server runs at once, if its arguments say so."""
        limit = arguments.get(self.concurrency)
        return limit if isinstance(limit, int) and not isinstance(limit, bool) else None

    def total(self, count: CounterName) -> str:
        """The newest name of a counter, as it is on a metrics page. Raises KeyError if this kind does not report it."""
        return f"{self.counters[count][0]}_total"


def hit_problem(counted: str, hits: float, of: float, under: Conditions, off: str) -> str | None:
    """Why the hits of a prefix cache make a repeat invalid; None if they are meant by the workload.

    `counted` says the hits in words. `off` says how the server does without such a cache.
    """
    if under.shared is not None and _too_many(hits, of, under.shared + under.drawn_before * (1 - under.shared)):
        meant = f", and its prompts share {under.shared:.1%}" if under.shared else " on random prompts"
        return f"{counted}{meant}: give the load a `seed` that no other load on this server has, or {off}"
    if not under.are_fresh and _too_many(hits, of, 0.0):
        return f"{counted}, and earlier repeats asked the same prompts: {off}"
    return None


def _too_many(hits: float, of: float, shared: float) -> bool:
    # `not … <=`, so that NaN counts as too many.
    return not hits <= (shared + HITS_ALLOWED * (1 - shared)) * of


def plain_text(config: ServerArguments) -> str:
    """The config as YAML, by the library that engines read it with: to them a bare `on` is true, in YAML 1.2 it is text."""
    return yaml.safe_dump(config, width=math.inf)


def inner_setting(arguments: ServerArguments, section: str, name: str, default: JsonValue) -> JsonValue:
    """An option inside an option, such as `kv_cache_config.enable_block_reuse`."""
    settings = arguments.get(section)
    return settings.get(name, default) if isinstance(settings, dict) else default
