"""The requests to a server: the smoke prompt, lm-eval's tasks, texts to be scored, the load, and the searches beside it."""

import hashlib
import math
import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from vllm_qualify.recipe.metrics import METRICS, TURN_TTFTS, least_prompts, least_requests
from vllm_qualify.recipe.published import PublishedScore
from vllm_qualify.recipe.sampling import Sampling, TemplateValue
from vllm_qualify.recipe.values import Count, CountOrNone, Flag, Frozen, Name, Positive, Seconds, Share, TaskName, Text

# The first is for a steady state, the second for a whole run with its ramp-up and tail.
LEAST_PROMPTS_PER_CLIENT, LEAST_OF_WHOLE_RUN = 5, 1
# The `max_concurrency` of a load without clients. A load at a rate is planned so many times as long as it must last.
UNLIMITED, OPEN_MARGIN = 1, 1.25
# Bench takes seeds below 2**32. Those of measured prompts are below this, and those of warm-ups so much higher.
SEEDS = 2**31
# A baseline answers each question at least this often. With fewer answers, its own noise dominates a comparison.
LEAST_REPETITIONS = 4
# The longest reply where neither the recipe nor the task says one: lm-eval's own default.
USUAL_TOKENS = 256
# The tasks that this project makes itself: contexts of so many tokens, prompt and reply. Their replies have at most as many as
# RULER's, if the recipe says no other length.
LONG = re.compile(r"long_([0-9]{1,40})")
LONG_REPLY_TOK = 128
LEAST_CONTEXT_TOK, MOST_CONTEXT_TOK = 512, 10_000_000
# The least that a prompt of theirs can be.
LEAST_LONG_PROMPT_TOK = 320


def _ascending(numbers: list[int]) -> list[int]:
    if numbers != sorted(set(numbers)):
        raise ValueError("write each number once, the smallest first")
    return numbers


class Smoke(Frozen):
    """The fixed prompt, asked twice at temperature 0."""

    prompt: Text = Field(description="asked twice, at temperature 0")
    max_tokens: Count = Field(default=20, description="longest reply")
    time_limit_s: Seconds = Field(default=120.0, description="for each request")


class Questions(Frozen):
    """Local files in place of the hub's data set: JSON lines with the fields that the task's own data has.

    A picture is a text, `data:image/png;base64,…`. Where each task of a group has data of its own, a path is that of a folder
    with one file for each, `TASK.jsonl`.
    """

    test: Text = Field(description="path of the questions, a file or a folder")
    shots: Text | None = Field(
        default=None,
        description="path of the solved examples, a file or a folder; none for a task that has its own, or with"
        " `num_fewshot: 0`",
    )


class Accuracy(Frozen):
    """One lm-eval task. The model writes text, in completions or in chats, or its likelihoods choose among given answers.

    If a gate compares with a baseline, the questions are asked again until the comparison is decided. A reply that is empty
    or never came is a wrong answer.
    """

    task: TaskName = Field(
        default="gsm8k",
        description="a task or a group of tasks of lm-eval, or of a YAML file in `task_folder`. A group has one score, over all"
        " its questions. `long_8192` asks about long texts: prompt and reply have so many tokens",
    )
    api: Literal["completions", "chat"] = Field(
        default="completions",
        description="how the server is asked; a chat has the server's own template, and the examples as turns",
    )
    num_fewshot: CountOrNone = Field(
        default=5, description="solved examples in each prompt; a task that says 0 itself keeps it"
    )
    num_questions: Count = Field(
        description="how many questions are asked, the same ones in each run; of a task that has more, `seed` draws them"
    )
    num_concurrent: Count | None = Field(
        default=None,
        description="requests under way at one time; none follows the server's `max-num-seqs`, up to 256, or is 64",
    )
    max_gen_toks: Count | None = Field(
        default=None, description="longest reply, with its thinking; by default a length of the task's own, or else 256"
    )
    stop: list[Text] | None = Field(
        default=None,
        max_length=4,
        description="texts that end a reply, in place of the task's own, which are for completions: in a chat they also end it"
        " while the model thinks. With [] it ends where the model ends it",
    )
    sampling: Sampling | Literal["model"] | None = Field(
        default=None,
        description="how tokens are chosen; `model` takes the numbers of the model's generation_config.json and of"
        " `override-generation-config`. Without it the task itself says so, and most say the likeliest token",
    )
    system_prompt: Text | None = Field(default=None, description="of a chat: the system's turn, before the task's own words")
    chat_template_kwargs: dict[Text, TemplateValue] = Field(
        default={}, description="what a chat's template is given, like `enable_thinking: true`"
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="how long a model thinks in a chat, where its template has that"
    )
    think_end: Text | None = Field(
        default=None,
        description="the text that ends a model's thinking, like `</think>`, where the server does not split it off",
    )
    seed: CountOrNone = Field(
        default=1234, description="of lm-eval, and of the order of the questions; where answers are sampled, of these too"
    )
    samples_per_question: Count = Field(
        default=1,
        description="how often each question is asked at least, where answers are sampled; the score is the mean of the"
        " questions' means (pass@1). Above 1, nothing is decided before all were asked so often",
    )
    most_repetitions: Count = Field(
        default=10,
        description="how often all questions are asked at most, where a gate compares with a baseline; then 4 or more",
    )
    sequential: Flag = Field(
        default=True,
        description="end as soon as every gate on the task is decided; a run that becomes a baseline asks everything",
    )
    max_unanswered: Share = Field(
        default=0.002,
        description="a larger share of empty replies makes the task `invalid`; fewer count as wrong answers",
    )
    time_limit_s: Seconds = Field(
        default=3600.0, description="for each block of questions: a fifth of them, or without `sequential` all"
    )
    published: list[PublishedScore] = Field(
        default=[],
        max_length=20,
        description="scores that others published, shown beside ours with what differs in the asking; they gate nothing",
    )
    questions: Questions | None = Field(default=None, description="local files in place of the task's own data")
    task_folder: Text | None = Field(
        default=None,
        description="a folder with lm-eval's YAML files of own tasks, and all files that they open: no others are readable",
    )

    @property
    def context_tok(self) -> int | None:
        """How many tokens prompt and reply have, if the task is one that this project makes in that length."""
        named = None if self.task_folder else LONG.fullmatch(self.task)
        return int(named[1]) if named else None

    @property
    def long_reply_tok(self) -> int:
        """The most tokens of a reply to a question of such a task."""
        return self.max_gen_toks or LONG_REPLY_TOK

    @model_validator(mode="after")
    def _has_room_for_questions(self) -> Self:
        tokens = self.context_tok
        if tokens is None:
            return self
        if not LEAST_CONTEXT_TOK <= tokens <= MOST_CONTEXT_TOK or self.task != f"long_{tokens}":
            raise ValueError(f"name it long_{LEAST_CONTEXT_TOK} to long_{MOST_CONTEXT_TOK}, by the tokens of prompt and reply")
        if self.questions:
            raise ValueError(f"{self.task} makes its own questions: leave 'questions' out")
        if tokens - self.long_reply_tok < LEAST_LONG_PROMPT_TOK:
            raise ValueError(
                f"{self.task} and a reply of {self.long_reply_tok:,} tokens leave less than {LEAST_LONG_PROMPT_TOK} for the"
                " prompt: name a longer context, or lower 'max_gen_toks'"
            )
        return self

    @model_validator(mode="after")
    def _only_samples_differ(self) -> Self:
        if self.samples_per_question == 1:
            return self
        if self.sampling is None or (isinstance(self.sampling, Sampling) and self.sampling.is_greedy):
            raise ValueError("'samples_per_question' is of sampled answers: give 'sampling' with a temperature above 0")
        if self.samples_per_question > self.most_repetitions:
            raise ValueError("'samples_per_question' is more than 'most_repetitions': raise that too")
        return self

    @model_validator(mode="after")
    def _chats_alone_have_a_template(self) -> Self:
        of_chats = {name: getattr(self, name) for name in ("system_prompt", "chat_template_kwargs", "reasoning_effort")}
        if self.api != "chat" and (given := next((name for name, value in of_chats.items() if value), None)):
            raise ValueError(f"'{given}' is of chats: set 'api: chat', or leave it out")
        if taken := sorted({"chat_template", "tokenize"} & self.chat_template_kwargs.keys()):
            raise ValueError(f"chat_template_kwargs.{taken[0]} is the server's own: servers refuse it in requests")
        return self


class Likelihood(Frozen):
    """How likely the server finds the baseline's answers, and texts of the recipe's own. Nothing is generated for it.

    A run that is made to be a baseline scores its own answers.
    """

    num_answers: Count = Field(
        default=500, description="of each task that generates text, how many of the baseline's answers are scored at most"
    )
    texts: Text | None = Field(default=None, description="path of texts to be scored too: JSON lines, each with a `text`")
    time_limit_s: Seconds = Field(default=300.0, description="for each request; an engine compiles a kernel at the first one")


class Slo(Frozen):
    """The limits that a request must meet to count for goodput, in ms; at least one of them is given."""

    ttft_ms: Seconds | None = Field(default=None, description="most time to the first token")
    tpot_ms: Seconds | None = Field(default=None, description="most time per output token after the first")
    e2el_ms: Seconds | None = Field(default=None, description="most time to the last token")

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.wanted:
            raise ValueError("give at least one of ttft_ms, tpot_ms and e2el_ms")
        return self

    @property
    def wanted(self) -> dict[str, float]:
        """The times by their names in `vllm bench serve`, with their limits in ms."""
        given = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2el": self.e2el_ms}
        return {name: limit for name, limit in given.items() if limit is not None}


class Workload(Frozen):
    """The requests of `vllm bench serve`: random prompts, a file's, or a trace's. End-of-text is ignored in replies."""

    input_len: Count | None = Field(default=None, description="length of each random prompt; this, `prompts` or `trace`")
    output_len: CountOrNone = Field(default=0, description="length of each reply; left out with a trace, which has its own")
    length_spread: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.0, description="random lengths lie evenly between 1 less and 1 plus this, times `input_len` and `output_len`"
    )
    shared_prefix_len: CountOrNone = Field(
        default=0,
        description="tokens with which every random prompt of a repeat begins, like a system prompt; `input_len` is the rest",
    )
    prompts: Text | None = Field(default=None, description="path of a file with the prompts: JSON lines, each with a `prompt`")
    trace: Text | None = Field(
        default=None,
        description="path of a trace: when each request arrives, how long it and its reply are, which prompts begin alike",
    )
    trace_speed: Positive = Field(default=1.0, description="how many times as fast as in the file a trace's requests are sent")
    api: Literal["completions", "chat"] = Field(
        default="completions", description="how the server is asked; a chat has the server's own template"
    )
    turns: Count = Field(
        default=1,
        description="of each chat: the next turn is sent when the reply to the one before has come, and has all that was said."
        " `input_len` is what each turn adds, and `shared_prefix_len` the system prompt of all chats",
    )
    request_rate: Positive | None = Field(
        default=None,
        description="requests per second, sent at random times whether or not others have ended; without it, each client sends"
        " its next request when the one before has ended",
    )
    burstiness: Positive = Field(
        default=1.0,
        description="of requests sent at a rate: 1 is a Poisson process; less sends them in bursts, more evenly. It is"
        " the shape of the gamma distribution of the times between requests",
    )
    num_warmups: CountOrNone = Field(description="requests before each repeat that are not measured; none has a prompt that is")
    repeats: Count = Field(default=3, description="how often the workload is run. One repeat alone shows no noise")
    most_repeats: Count = Field(
        default=10,
        description="how often it is run at most: after `repeats` one more at a time, until every gate on the load is decided."
        " Gates against the baseline go on with 2 to 5 repeats on each further start of the server instead",
    )
    time_budget_s: Seconds | None = Field(
        default=None,
        description="no repeat begins that would not end within it, by the longest so far; what is undecided then is"
        " `inconclusive`. The first repeat is always run. It is for the loads of all starts of the server together;"
        " `--time-budget` replaces it",
    )
    window: Literal["steady", "whole"] = Field(
        default="steady",
        description="what the figures are over: the steady state, or the whole run as bench counts it, with ramp-up and tail,"
        " to repeat a published run like for like. The two are never compared",
    )
    min_duration_s: Seconds = Field(default=60.0, description="a repeat that is shorter makes the load measurements `invalid`")
    seed: CountOrNone = Field(
        default=0,
        description="of the first repeat; each further one adds 1, so that no random prompt comes twice. The profile's name"
        " shifts them all, so that no profile asks the prompts of another one",
    )
    time_limit_s: Seconds = Field(default=3600.0, description="for each repeat")
    slo: Slo | None = Field(default=None, description="what a request must meet to count for `goodput_req_s`")

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
    def _turns_are_of_chats(self) -> Self:
        if self.turns == 1:
            return self
        if self.api != "chat" or self.input_len is None or self.request_rate is not None:
            raise ValueError("'turns' are of chats with random prompts and clients: set 'api: chat', and give 'input_len'")
        if self.window != "whole":
            raise ValueError("prompts grow from turn to turn, so that there is no steady state: set 'window: whole'")
        return self

    @model_validator(mode="after")
    def _bursts_have_a_rate(self) -> Self:
        if self.burstiness != 1 and self.request_rate is None:
            raise ValueError("'burstiness' is of requests sent at a rate: give 'request_rate' too")
        return self


class LoadSettings(Workload):
    """A recipe's workload.

    Without `max_concurrency`, there are as many clients as the server's `max-num-seqs`. Without `num_prompts`, there are as
    many prompts as these clients and the gates need; at a rate, as the gates need and `min_duration_s` lets expect.
    """

    max_concurrency: Count | None = Field(
        default=None, description="clients: requests under way at one time; none is as many as the server's `max-num-seqs`"
    )
    num_prompts: Count | None = Field(
        default=None,
        description="requests of each repeat, at least 5 for each client, or 1 with `window: whole`; none is 5 for each, or as"
        " many as the gates' percentiles need. At a rate, none is as many as are sent in 1.25 times `min_duration_s`, or as the"
        " gates need. With `fit.max_num_seqs` it needs `max_concurrency`",
    )

    def of(self, max_num_seqs: int | None, least_prompts: int) -> "Load":
        """The load for a server. Raises ValueError if the number of clients is not known, or there are too few prompts."""
        clients = self.clients(max_num_seqs)
        if clients is None:
            raise ValueError("give max_concurrency, or the server its max-num-seqs")
        if self.request_rate is None:
            # Of a trace, all of it, which only its file knows.
            lasting = LEAST_PROMPTS_PER_CLIENT * clients
        else:
            lasting = math.ceil(OPEN_MARGIN * self.request_rate * self.min_duration_s)
        prompts = self.num_prompts or self.turns * math.ceil(max(lasting, least_prompts, self.turns * clients) / self.turns)
        return Load.model_validate(self.model_dump() | {"max_concurrency": clients, "num_prompts": prompts})

    def clients(self, max_num_seqs: int | None) -> int | None:
        """The load's `max_concurrency` on a server that runs so many requests at once; None if it is not known."""
        return UNLIMITED if self.is_open else self.max_concurrency or max_num_seqs

    @model_validator(mode="after")
    def _rate_has_no_clients(self) -> Self:
        if self.is_open and self.max_concurrency:
            given = "trace" if self.trace else "request_rate"
            raise ValueError(f"'{given}' sends requests whether or not others have ended: leave 'max_concurrency' out")
        return self

    @model_validator(mode="after")
    def _enough_prompts(self) -> Self:
        if self.max_concurrency and self.num_prompts:
            self.of(None, 1)
        return self


class Load(Workload):
    """One `vllm bench serve` workload with all its settings known. `prompts_sha256` is the hash of the file's content.

    An open load has no limit of requests at once: its `max_concurrency` is UNLIMITED, and means nothing. Of a trace,
    `prompts_sha256` is its digest, which does not depend on the form of its file. `seeded_by` is the profile's name; None in a
    plan of an older version, which asked the prompts of `seed` alone.
    """

    max_concurrency: Count
    num_prompts: Count
    prompts_sha256: str | None = None
    seeded_by: Name | None = None

    def bench_seed(self, repeat: int) -> int:
        """Bench's seed of a repeat, below SEEDS. Profiles that share a server share no prompt, whatever their seeds are."""
        at = self.seed + repeat - 1
        if self.seeded_by is None:
            return at
        return (int.from_bytes(hashlib.sha256(self.seeded_by.encode()).digest()[:8]) + at) % SEEDS

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
            raise ValueError(f"num_prompts must be at least {times}, so {least} or more{self._hint_of_whole}")
        return self

    @property
    def _hint_of_whole(self) -> str:
        is_enough = self.num_prompts >= LEAST_OF_WHOLE_RUN * self.max_concurrency
        return "; or set `window: whole`, for figures over the whole run with its ramp-up and tail" if is_enough else ""


class Sweep(Frozen):
    """More loads on the same server: a curve of throughput against speed, and the highest load that meets an SLO.

    `concurrencies` request the curve. `slo` requests the most clients and the highest rate of requests that meet it. At least
    one of the two is given.
    """

    concurrencies: Annotated[list[Count], AfterValidator(_ascending)] = Field(
        default=[], description="the numbers of clients of the curve"
    )
    slo: dict[Text, Seconds] = Field(
        default={},
        description="what must be met: names of the load's latencies, like `ttft_p99_ms`, and the bound of each, in ms",
    )
    search: list[Literal["concurrency", "request_rate"]] = Field(
        default=["concurrency", "request_rate"], description="what is searched for where there is an `slo`"
    )
    most_concurrency: Count | None = Field(
        default=None, description="the most clients that are tried; none is the server's `max-num-seqs`"
    )
    resolution: Annotated[float, Field(strict=True, ge=0.01, le=0.5)] = Field(
        default=0.05,
        description="a search ends when the next level that misses is nearer than this share of the one that meets",
    )
    most_runs: Count = Field(default=12, description="the most runs of each search")
    min_duration_s: Seconds = Field(default=30.0, description="a run that is shorter is invalid")

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.concurrencies and not self.slo:
            raise ValueError("give 'concurrencies', or an 'slo' to be met, or both")
        for name in self.slo:
            metric = METRICS.get(name)
            if metric is None or metric.stage != "load" or metric.unit != "ms" or name in TURN_TTFTS:
                of_loads = (known for known, each in METRICS.items() if each.stage == "load" and each.unit == "ms")
                known = ", ".join(known for known in of_loads if known not in TURN_TTFTS)
                raise ValueError(f"slo.{name} is not a latency of a load; known: {known}")
        return self


class Soak(Frozen):
    """A part of the load for a long time. The part is a share of its clients or of its rate."""

    soak_min: Positive
    soak_share: Positive

    @property
    def duration_s(self) -> float:
        return 60 * self.soak_min

    def of(self, load: Load) -> tuple[int, float | None]:
        """The clients, at least one, and the rate in req/s, if the load has one."""
        rate = None if load.request_rate is None else self.soak_share * load.request_rate
        return max(1, math.floor(self.soak_share * load.max_concurrency)), rate


class Fit(Frozen):
    """Server options of a profile that are searched for on the machine before the cell is qualified. At least one is set."""

    tensor_parallel_sizes: Annotated[list[Count], AfterValidator(_ascending)] = Field(
        default=[], description="the smallest is taken with which the server starts"
    )
    max_num_seqs: Flag = Field(
        default=False,
        description="as many requests of the workload's full length as the KV cache holds; for random prompts only",
    )
    max_num_batched_tokens: Annotated[list[Count], AfterValidator(_ascending)] = Field(
        default=[], description="the one with the highest output throughput is taken; two or more are compared"
    )

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not (self.tensor_parallel_sizes or self.max_num_seqs or self.max_num_batched_tokens):
            raise ValueError("give 'tensor_parallel_sizes', 'max_num_seqs' or 'max_num_batched_tokens'")
        if len(self.max_num_batched_tokens) == 1:
            raise ValueError("max_num_batched_tokens compares: give two or more, or write the one under 'server'")
        return self

    @property
    def options(self) -> list[str]:
        """The server options that it finds."""
        kinds = {
            "tensor-parallel-size": self.tensor_parallel_sizes,
            "max-num-seqs": self.max_num_seqs,
            "max-num-batched-tokens": self.max_num_batched_tokens,
        }
        return [name for name, asked in kinds.items() if asked]
