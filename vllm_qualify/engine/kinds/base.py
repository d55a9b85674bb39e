"""The properties of a kind of engine. All offer OpenAI's interface; everything that differs between them is here."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import yaml
from pydantic import JsonValue

from vllm_qualify.engine.failure import Sign
from vllm_qualify.recipe.serving import EngineName, ServerArguments

# The share of what prompts do not have in common that may hit a prefix cache all the same.
HITS_ALLOWED = 0.01

CounterName = Literal[
    "running",
    "waiting",
    "kv_cache_usage",
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "reused_blocks",
    "missed_blocks",
    "prompt_tokens",
    "generation_tokens",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "accepted_tokens_per_position",
    "succeeded",
]
"""What a server may report on its metrics page. The first three are gauges; the third of them is a share."""

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

    def share(self, hits: str, of: str) -> float | None:
        """Which share of one counter's growth is that of another; None if there was none."""
        return self.gained(hits) / self.gained(of) if self.gained(of) > 0 else None

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
    """How to find the parts of a start in a kind's log: patterns, each matched against the message of a line.

    - `line` matches a line, with the groups `process`, `h`, `min`, `s` and `message`.
    - Patterns with a group `s`, in seconds: `loaded` is all of loading the weights; `read` is only reading them, for logs
      without `loaded`. `compiled` is the compilation of one model, `compiled_so_far` of all models until then. `captured` is
      the capture of CUDA graphs.
    - `begins`: loading the weights begins. `warms_up` and `warmed_up` enclose the compilation, for logs without its seconds.
    - `from_cache`, `anew`: compiled code came from a cache, or was compiled anew. `eager`: `eager_option` forbids to compile.
    - `kv_tokens`, with a group `tokens`, and `kv_concurrency`, with a group `times`, give the size of the KV cache.
    """

    line: re.Pattern[str]
    begins: re.Pattern[str]
    loaded: re.Pattern[str]
    read: re.Pattern[str]
    compiled: re.Pattern[str]
    compiled_so_far: re.Pattern[str]
    warms_up: re.Pattern[str]
    warmed_up: re.Pattern[str]
    captured: re.Pattern[str]
    from_cache: re.Pattern[str]
    anew: re.Pattern[str]
    eager: re.Pattern[str]
    eager_option: str
    kv_tokens: re.Pattern[str]
    kv_concurrency: re.Pattern[str]


@dataclass(frozen=True)
class EngineKind:
    """One kind of engine.

    About the engine:

    - `title` is its name for people. `package` is the distribution that has its version, which is at least `least_version`.
    - With `needs_image` it is served only from an image. Without `has_client` its image cannot run `vllm bench serve`. With
      `has_tables` the catalog has a table of what each version knows.

    About its options:

    - The product of the `parallel` options is the number of GPUs. `concurrency` is the option for how many requests it runs at
      once. `trust_remote_code` and `speculative` are the options with that meaning.
    - `repositories` are the options that may name a repository of the hub, and that can be pinned to a commit; `unpinned` are
      those that can not. `files` are further options that may name a file which shapes replies. With `pins_draft` the mapping
      of `speculative` takes a draft model's commit as `revision`.
    - `config` makes the config file's content from the recipe's options, and `text` writes it as text. `arguments` gives what
      follows the image in `docker run`, for a config file at the given path.

    About what it reports while it runs:

    - `metrics_path` is the path of its counters for Prometheus. `counters` has the names that each counter has had, newest
      first and without `_total`. This kind does not report the other counters.
    - With `scores_prompts` it gives the log-likelihood of each token of a prompt, and the ids of a text's tokens, as vLLM does.
    - `load_problems` says, from the counters, why a load's repeat does not count. `hit_share` gives the share of a repeat's
      prompts that its prefix cache had, in tokens or in blocks, as it counts; None if it has no such cache.
    - `queue_remedy` is what to do if requests wait although the server has room for them.
    - `start_log` finds the parts of a start in its log; None if they are not read.
    - `identities` gives what it says in its log that it serves, once for each of its processes that says so; None if its log
      does not say it.
    - `failures` are signs in its log besides those that all kinds share; they come before those.
    - With `is_held_to_contract` its servers are asked for the API's contract, unless a recipe says otherwise. `not_offered` are
      the checks of it that it cannot meet, each with the reason.
    """

    name: EngineName
    title: str
    package: str
    example_image: str
    parallel: tuple[str, ...]
    concurrency: str
    trust_remote_code: str
    speculative: str
    repositories: tuple[str, ...]
    unpinned: tuple[str, ...]
    files: tuple[str, ...]
    metrics_path: str
    counters: Mapping[CounterName, tuple[str, ...]]
    load_problems: Callable[[Counted, Conditions], list[str]]
    hit_share: Callable[[Counted], float | None]
    config: Callable[[ServedModel, ServerArguments], ServerArguments]
    text: Callable[[ServerArguments], str]
    arguments: Callable[[ServedModel, str], list[str]]
    queue_remedy: str = "use more GPUs"
    least_version: str | None = None
    pins_draft: bool = False
    needs_image: bool = True
    has_client: bool = False
    scores_prompts: bool = False
    has_tables: bool = False
    start_log: StartLog | None = None
    identities: Callable[[str], list[Identity]] | None = None
    failures: tuple[Sign, ...] = ()
    is_held_to_contract: bool = False
    not_offered: Mapping[str, str] = field(default_factory=dict)

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


def setting(arguments: ServerArguments, section: str, name: str, default: JsonValue) -> JsonValue:
    """An option inside an option, such as `kv_cache_config.enable_block_reuse`."""
    settings = arguments.get(section)
    return settings.get(name, default) if isinstance(settings, dict) else default
