"""The load: the requests of `vllm bench serve`, how many clients send them or at which rate, and how long they are measured."""

import hashlib
import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vllm_qualify.recipe.metrics import least_prompts, least_requests
from vllm_qualify.recipe.roles import EFFORT, PLACE, WORK, Settings
from vllm_qualify.recipe.values import Count, CountOrZero, Milliseconds, Name, Positive, Seconds, Text

# The first is for a steady state, the second for a whole run with its ramp-up and tail.
LEAST_PROMPTS_PER_CLIENT, LEAST_OF_WHOLE_RUN = 5, 1
# What stands in `max_concurrency` of a load without clients: no limit, only its warm-ups are sent one after another.
OPEN_LOAD_CLIENTS = 1
# A load at a rate is planned so many times as long as it must last.
OPEN_MARGIN = 1.25
CountedFrom = Literal["first chunk", "second chunk"]
# Bench takes seeds below 2**32. Those of measured prompts are below this, and those of warm-ups so much higher.
SEEDS = 2**31
# What a load has beside what a recipe says.
NOT_OF_RECIPE = ("prompts_sha256", "seeded_by", "counted_from")


class Slo(Settings):
    """The limits that a request must meet to count for goodput, in ms; at least one of them is given."""

    ttft_ms: Annotated[Milliseconds | None, WORK] = Field(None, description="most time to the first token")
    tpot_ms: Annotated[Milliseconds | None, WORK] = Field(None, description="most time per output token after the first")
    e2el_ms: Annotated[Milliseconds | None, WORK] = Field(None, description="most time to the last token")

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.limits_ms:
            raise ValueError("give at least one of ttft_ms, tpot_ms and e2el_ms")
        return self

    @property
    def limits_ms(self) -> dict[str, float]:
        """The times by their names in `vllm bench serve`, with their limits in ms."""
        given = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2el": self.e2el_ms}
        return {name: limit for name, limit in given.items() if limit is not None}


class Workload(Settings):
    """The requests of `vllm bench serve`: random prompts, a file's, or a trace's. End-of-text is ignored in replies."""

    input_len: Annotated[Count | None, WORK] = Field(
        None, description="length of each random prompt; this, `prompts` or `trace`"
    )
    output_len: Annotated[CountOrZero, WORK] = Field(
        0, description="length of each reply; left out with a trace, which has its own"
    )
    length_spread: Annotated[float, Field(strict=True, ge=0, lt=1), WORK] = Field(
        0.0, description="random lengths lie evenly between 1 less and 1 plus this, times `input_len` and `output_len`"
    )
    shared_prefix_len: Annotated[CountOrZero, WORK] = Field(
        0, description="tokens with which every random prompt of a repeat begins, like a system prompt; `input_len` is the rest"
    )
    prompts: Annotated[Text | None, PLACE] = Field(
        None, description="path of a file with the prompts: JSON lines, each with a `prompt`"
    )
    trace: Annotated[Text | None, PLACE] = Field(
        None, description="path of a trace: when each request arrives, how long it and its reply are, which prompts begin alike"
    )
    trace_speed: Annotated[Positive, WORK] = Field(
        1.0, description="how many times as fast as in the file a trace's requests are sent"
    )
    api: Annotated[Literal["completions", "chat"], WORK] = Field(
        "completions", description="how the server is asked; a chat has the server's own template"
    )
    turns: Annotated[Count, WORK] = Field(
        1,
        description="of each chat: the next turn is sent when the reply to the one before has come, and has all that was said."
        " `input_len` is what each turn adds, and `shared_prefix_len` the system prompt of all chats",
    )
    request_rate: Annotated[Positive | None, WORK] = Field(
        None,
        description="requests per second, sent at random times whether or not others have ended; without it, each client sends"
        " its next request when the one before has ended",
    )
    burstiness: Annotated[Positive, WORK] = Field(
        1.0,
        description="of requests sent at a rate: 1 is a Poisson process; less sends them in bursts, more evenly. It is the"
        " shape of the gamma distribution of the times between requests",
    )
    num_warmups: Annotated[CountOrZero, WORK] = Field(
        description="requests before each repeat that are not measured; none has a prompt that is"
    )
    repeats: Annotated[Count, EFFORT] = Field(3, description="how often the workload is run. One repeat alone shows no noise")
    most_repeats: Annotated[Count, EFFORT] = Field(
        10,
        description="how often it is run at most: after `repeats` one more at a time, until every gate on the load is decided."
        " Gates against the baseline go on with 2 to 5 repeats on each further start of the server instead",
    )
    time_budget_s: Annotated[Seconds | None, EFFORT] = Field(
        None,
        description="no repeat begins that would not end within it, by the longest so far; what is undecided then is"
        " `inconclusive`. The first repeat is always run. It is for the loads of all starts of the server together;"
        " `--time-budget` replaces it",
    )
    window: Annotated[Literal["steady", "whole"], WORK] = Field(
        "steady",
        description="what the figures are over: the steady state, or the whole run as bench counts it, with ramp-up and tail,"
        " to repeat a published run like for like. The two are never compared",
    )
    min_duration_s: Annotated[Seconds, EFFORT] = Field(
        60.0, description="a repeat that is shorter makes the load measurements `invalid`"
    )
    seed: Annotated[CountOrZero, WORK] = Field(
        0,
        description="of the first repeat; each further one adds 1, so that no random prompt comes twice. The profile's name"
        " shifts them all, so that no profile asks the prompts of another one",
    )
    time_limit_s: Annotated[Seconds, EFFORT] = Field(3600.0, description="for each repeat")
    slo: Annotated[Slo | None, WORK] = Field(None, description="what a request must meet to count for `goodput_req_s`")

    @property
    def is_open(self) -> bool:
        """Whether requests are sent at times of their own, and not when others end."""
        return self.request_rate is not None or self.trace is not None

    @property
    def file(self) -> str | None:
        """The path of its file of prompts, or of its trace."""
        return self.prompts or self.trace

    @property
    def looks(self) -> range:
        """The numbers of repeats after which the gates are judged."""
        return range(self.repeats, max(self.repeats, self.most_repeats) + 1)

    @property
    def least_prompts_per_client(self) -> int:
        return LEAST_OF_WHOLE_RUN if self.window == "whole" else LEAST_PROMPTS_PER_CLIENT

    def least_prompts(self, metric: str) -> int:
        """How many prompts a gate on the metric needs. In a whole run no request is cut off."""
        return least_requests(metric) if self.window == "whole" else least_prompts(metric)

    @property
    def longest_tok(self) -> int | None:
        """The most tokens of one request, prompt and reply; None if the prompts come from a file."""
        if self.input_len is None:
            return None
        lengths = (math.ceil(length * (1 + self.length_spread)) for length in (self.input_len, self.output_len))
        return self.shared_prefix_len + self.turns * sum(lengths)

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts of a repeat begin alike on purpose: by a file, a trace, a shared prefix or a chat's template."""
        return self.file is not None or self.shared_prefix_len > 0 or self.api == "chat"

    @model_validator(mode="after")
    def _has_prompts(self) -> Self:
        if sum(each is not None for each in (self.input_len, self.prompts, self.trace)) != 1:
            raise ValueError("give 'input_len' for random prompts, 'prompts' for those of a file, or 'trace', one of the three")
        for name in ("length_spread", "shared_prefix_len"):
            if self.input_len is None and getattr(self, name):
                raise ValueError(f"'{name}' is of random prompts; leave it out with 'prompts' or 'trace'")
        if self.trace is None and not self.output_len:
            raise ValueError("give 'output_len', the length of each reply")
        return self

    @model_validator(mode="after")
    def _a_trace_says_it_all(self) -> Self:
        if self.trace is None:
            if self.trace_speed != 1:
                raise ValueError("'trace_speed' is of a trace: give 'trace' too")
            return self
        if self.output_len or self.request_rate is not None:
            raise ValueError("a trace has its own lengths and times: leave 'output_len' and 'request_rate' out")
        if self.api != "completions":
            raise ValueError("bench sends a trace's prompts as tokens, which a chat does not take: leave 'api' out")
        if self.window != "whole":
            raise ValueError("a trace's calm and its bursts are all of it: set 'window: whole'")
        return self

    @model_validator(mode="after")
    def _bursts_have_a_rate_and_turns_are_of_chats(self) -> Self:
        if self.burstiness != 1 and self.request_rate is None:
            raise ValueError("'burstiness' is of requests sent at a rate: give 'request_rate' too")
        if self.turns == 1:
            return self
        if self.api != "chat" or self.input_len is None or self.request_rate is not None:
            raise ValueError("'turns' are of chats with random prompts and clients: set 'api: chat', and give 'input_len'")
        if self.window != "whole":
            raise ValueError("prompts grow from turn to turn, so that there is no steady state: set 'window: whole'")
        return self


class LoadSettings(Workload):
    """A recipe's workload."""

    max_concurrency: Annotated[Count | None, WORK] = Field(
        None, description="clients: requests under way at one time; none is as many as the server's `max-num-seqs`"
    )
    num_prompts: Annotated[Count | None, WORK] = Field(
        None,
        description="requests of each repeat, at least 5 for each client, or 1 with `window: whole`; none is 5 for each, or as"
        " many as the gates' percentiles need. At a rate, none is as many as are sent in 1.25 times `min_duration_s`, or as the"
        " gates need. With `fit.max_num_seqs` it needs `max_concurrency`",
    )

    def make_load(self, max_num_seqs: int | None, least_prompts: int) -> "Load":
        """The load for a server. Raises ValueError if the number of clients is not known, or there are too few prompts."""
        clients = self.count_clients(max_num_seqs)
        if clients is None:
            raise ValueError("give max_concurrency, or the server its max-num-seqs")
        if self.request_rate is None:
            # Of a trace, all of it, which only its file knows.
            lasting = LEAST_PROMPTS_PER_CLIENT * clients
        else:
            lasting = math.ceil(OPEN_MARGIN * self.request_rate * self.min_duration_s)
        prompts = self.num_prompts or self.turns * math.ceil(max(lasting, least_prompts, self.turns * clients) / self.turns)
        return Load.model_validate(self.model_dump() | {"max_concurrency": clients, "num_prompts": prompts})

    def count_clients(self, max_num_seqs: int | None) -> int | None:
        """The load's `max_concurrency` on a server that runs so many requests at once; None if it is not known."""
        return OPEN_LOAD_CLIENTS if self.is_open else self.max_concurrency or max_num_seqs

    @model_validator(mode="after")
    def _clients_go_with_the_load(self) -> Self:
        if self.is_open and self.max_concurrency:
            given = "trace" if self.trace else "request_rate"
            raise ValueError(f"'{given}' sends requests whether or not others have ended: leave 'max_concurrency' out")
        if self.max_concurrency and self.num_prompts:
            self.make_load(None, 1)
        return self


class Load(Workload):
    """One `vllm bench serve` workload with all its settings known."""

    max_concurrency: Annotated[Count, WORK]
    """clients. An open load has no limit of requests at once: it has OPEN_LOAD_CLIENTS, which only its warm-ups follow"""
    num_prompts: Annotated[Count, WORK]
    """requests of each repeat"""
    prompts_sha256: Annotated[str | None, WORK] = None
    """hash of the file's content; of a trace its digest, which does not depend on the form of its file"""
    seeded_by: Annotated[Name | None, EFFORT] = None
    """the profile's name, which shifts the seeds; without it they are those of `seed`"""
    counted_from: Annotated[CountedFrom | None, WORK] = None
    """which chunk of a chat has its first token. None, as in plans without it: the first one in a whole run, else the second"""

    @property
    def skips_role(self) -> bool:
        """Whether a chat's first chunk is not counted, because it has a role and no token."""
        if self.api != "chat":
            return False
        return self.counted_from == "second chunk" if self.counted_from else self.window == "steady"

    def bench_seed(self, repeat: int) -> int:
        """Bench's seed of a repeat, below SEEDS. Profiles that share a server share no prompt, whatever their seeds are."""
        seed = self.seed + repeat - 1
        if self.seeded_by is None:
            return seed
        return (int.from_bytes(hashlib.sha256(self.seeded_by.encode()).digest()[:8]) + seed) % SEEDS

    @model_validator(mode="after")
    def _enough_prompts(self) -> Self:
        if self.is_open:
            return self
        if self.turns > 1 and (self.num_prompts % self.turns or self.num_prompts < self.turns * self.max_concurrency):
            least = self.turns * self.max_concurrency
            raise ValueError(f"num_prompts must be a multiple of turns, and {least} or more: each client has a chat or more")
        each = self.least_prompts_per_client
        least = each * self.max_concurrency
        if self.num_prompts < least:
            times = f"{each} times max_concurrency" if each > 1 else "max_concurrency"
            whole = "; or set `window: whole`, for figures over the whole run with its ramp-up and tail"
            hint = whole if self.num_prompts >= LEAST_OF_WHOLE_RUN * self.max_concurrency else ""
            raise ValueError(f"num_prompts must be at least {times}, so {least} or more{hint}")
        return self
