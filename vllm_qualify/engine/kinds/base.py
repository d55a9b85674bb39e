"""What is to be known of a kind of engine. All offer OpenAI's interface; everything that differs between them is here."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import yaml
from pydantic import JsonValue

from vllm_qualify.engine.failure import Sign
from vllm_qualify.recipe.serving import EngineName, ServerArguments

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
"""What a server may tell of itself on its metrics page. The first three are gauges, of which the third is a share."""

Totals = Mapping[str, float]
"""A metrics page's counters by their names, which end in `_total`, each summed over its labels."""


class ServedModel(NamedTuple):
    """What a server is told, whatever its kind. A model of the hub has a revision; local weights have none."""

    model: str
    revision: str | None
    name: str
    host: str
    port: int


class Counted(NamedTuple):
    """A server's counters before and after a load's repeat."""

    before: Totals
    after: Totals

    def gained(self, name: str) -> float:
        """A counter that is not there counts 0."""
        return self.after.get(name, 0.0) - self.before.get(name, 0.0)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Why nothing can be said by these counters; empty where both pages have them."""
        for when, page in (("before", self.before), ("after", self.after)):
            if missing := sorted(set(names) - page.keys()):
                return [f"the server's /metrics {when} it has no {', '.join(missing)}"]
        return []


class Conditions(NamedTuple):
    """What a repeat was measured under. `arguments` are the server's.

    Without `random_prompts` they are of a file, and may have prefixes in common. `was_emptied`: the server emptied its prefix
    cache before the repeat.
    """

    arguments: ServerArguments
    num_prompts: int
    random_prompts: bool
    was_emptied: bool


@dataclass(frozen=True)
class StartLog:
    """How a kind's log tells the parts of a start: patterns, each matched against the message of a line.

    - `line` finds a line, with the groups `process`, `h`, `min`, `s` and `message`.
    - With a group `s`, in seconds: `loaded` is the whole of loading the weights, `read` their reading alone, for logs without
      `loaded`. `compiled` is of one model; `compiled_so_far` of all until then. `captured` is the capture of CUDA graphs.
    - `begins`: the weights begin. `warms_up` and `warmed_up` enclose the compilation, for logs that tell no seconds.
    - `from_cache`, `anew`: what is compiled came from a cache, or did not. `eager`: nothing is compiled, by `eager_option`.
    - `kv_tokens`, with a group `tokens`, and `kv_concurrency`, with a group `times`, tell the size of the KV cache.
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
    """One kind.

    About the engine:

    - `title` is its name for people, `package` the distribution that tells its version, of at least `least_version`.
    - With `needs_image` it is served from an image only. Without `has_client` its image cannot run `vllm bench serve`. With
      `has_tables` the catalog has a table of what each version knows.

    About its options:

    - `parallel` are those whose product is the number of GPUs. `concurrency` is how many requests it runs at once.
      `trust_remote_code` and `speculative` are the options of that meaning.
    - `config` makes the config file's content of the recipe's options, and `text` the file of it. `arguments` gives what
      follows the image in `docker run`, for a config file at that place.

    About what it tells while it runs:

    - At `metrics_path` it has its counters for Prometheus. `counters` are the names that each has had, the newest first and
      without `_total`; a name that is not there, this kind does not tell.
    - `load_problems` says why a load's repeat does not count, by the counters.
    - `queue_remedy` is what to do where requests wait although the server has room for them.
    - `start_log` is how its log tells the parts of a start; None where nothing is read of it.
    - `failures` are signs in its log beside those that all kinds share; they go first.
    """

    name: EngineName
    title: str
    package: str
    example_image: str
    parallel: tuple[str, ...]
    concurrency: str
    trust_remote_code: str
    speculative: str
    metrics_path: str
    counters: Mapping[CounterName, tuple[str, ...]]
    load_problems: Callable[[Counted, Conditions], list[str]]
    config: Callable[[ServedModel, ServerArguments], ServerArguments]
    text: Callable[[ServerArguments], str]
    arguments: Callable[[ServedModel, str], list[str]]
    queue_remedy: str = "use more GPUs"
    least_version: str | None = None
    needs_image: bool = True
    has_client: bool = False
    has_tables: bool = False
    start_log: StartLog | None = None
    failures: tuple[Sign, ...] = ()

    @property
    def tells_its_queue(self) -> bool:
        """Whether it can be watched during a load: how many requests run, and how many wait."""
        return {"running", "waiting"} <= self.counters.keys()

    def most_requests(self, arguments: ServerArguments) -> int | None:
        """How many requests a server runs at once, where its arguments say so."""
        found = arguments.get(self.concurrency)
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def total(self, count: CounterName) -> str:
        """The newest name of a counter, as a metrics page has it. Raises KeyError if this kind does not tell it."""
        return f"{self.counters[count][0]}_total"


def too_many(hits: float, of: float) -> bool:
    """Of a cache. Random prompts have nothing in common."""
    # `not … <=`: NaN is no count of hits.
    return not hits <= HITS_ALLOWED * of


def plain_text(config: ServerArguments) -> str:
    """By the library that engines read it with: in YAML 1.2 a bare `on` is text, and to them it is true."""
    return yaml.safe_dump(config, width=math.inf)


def setting(arguments: ServerArguments, section: str, name: str, default: JsonValue) -> JsonValue:
    """An option inside an option, such as `kv_cache_config.enable_block_reuse`."""
    found = arguments.get(section)
    return found.get(name, default) if isinstance(found, dict) else default
