"""Speculation: compares a server with speculative decoding and the same server without it, in turns.

Both get the same prompts at temperature 0, and then the profile's load and a load of one request at a time. The server's own
counters show what the drafts are worth. Where a machine has no room for both, they are started in turn: the drafting server
runs half of its loads before and half after the other one, so that a steady drift of the machine favours neither. Files in the
stage's folder:

    greedy.json                     the prompts
    drafted.jsonl, undrafted.jsonl  the replies, one per line
    greedy-before.txt, …-after.txt  the counters of the drafting server before and after these replies
    batch1/drafted/ …               bench's results, with the counters before and after, as `load` has them;
                                    also batch1/undrafted/, profile/drafted/ and profile/undrafted/
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from vllm_qualify.answers import asked
from vllm_qualify.engine.metrics_page import samples_of
from vllm_qualify.engine.server import Server, ServerPlan
from vllm_qualify.evidence.load import figures, result
from vllm_qualify.evidence.load.problems import request_problems
from vllm_qualify.evidence.measurement import (
    UNUSABLE,
    Measurement,
    geometric_mean,
    in_words,
    invalid,
    repeat_interval,
    share_interval,
    valid,
)
from vllm_qualify.evidence.sequential import Levels, Sides, sides_of
from vllm_qualify.recipe.metrics import ACCEPTANCE_BATCH1, METRICS, SAME_TEXT
from vllm_qualify.recipe.values import Count, Frozen, Seconds, Text
from vllm_qualify.recipe.workload import Load

STAGE = "speculation"
DRAFTED, UNDRAFTED = "drafted", "undrafted"
SIDES = (DRAFTED, UNDRAFTED)
BATCH1, PROFILE = "batch1", "profile"
GREEDY, GREEDY_PAGES = "greedy.json", ("greedy-before.txt", "greedy-after.txt")
RATE = "output_throughput_tok_s"
DRAFTS, DRAFT_TOKENS = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
# Fewer requests, one after another, hardly have a steady state. Fewer pairs do not show the noise.
LEAST_PROMPTS, LEAST_REPEATS = 20, 2
# More than the runs of a load and of its sweep, each of which has a seed of its own.
SEEDS_APART = 1_000
# For each reply at temperature 0.
ANSWER_LIMIT_S = 300.0

RunLoad = Callable[[Server, Load, Path, int], None]
"""Runs bench once on a server, as repeat N of the load, into a folder, as `client.run` does."""


class Greedy(Frozen):
    """The prompts that both servers get at temperature 0, one after another, and the most tokens of a reply."""

    prompts: list[Text]
    max_tokens: Count
    time_limit_s: Seconds = ANSWER_LIMIT_S


class Pair(NamedTuple):
    """A server with speculative decoding, and the same without it."""

    drafted: Server
    undrafted: Server

    def in_turn(self, turn: int) -> list[tuple[str, Server]]:
        """Both servers with their names. Their order alternates from turn to turn, so that a drift favours neither."""
        both = list(zip(SIDES, self, strict=True))
        return both if turn % 2 == 0 else both[::-1]


class Acceptance(Frozen):
    """The fate of drafts: the number of drafts, the number of their tokens, and the accepted tokens at each position."""

    drafts: int
    draft_tokens: int
    accepted_at: list[int]

    @property
    def length_tok(self) -> float:
        """Tokens per step: the accepted tokens of the draft, and the one that the model adds."""
        return 1 + sum(self.accepted_at) / self.drafts

    @property
    def rate(self) -> float:
        """Share of the drafted tokens that were accepted."""
        return sum(self.accepted_at) / self.draft_tokens

    @property
    def rates(self) -> list[float]:
        """For each position, the share of drafts whose token there was accepted."""
        return [accepted / self.drafts for accepted in self.accepted_at]


class SameText(Frozen):
    """For each prompt the character at which the two texts begin to differ, None where they are the same."""

    parts_at: list[int | None]

    @property
    def same(self) -> int:
        return self.parts_at.count(None)

    @property
    def share(self) -> float:
        return self.same / len(self.parts_at)


class FailedError(ValueError):
    """The requests of a load do not count; the message says why."""

    def __repr__(self) -> str:
        return str(self)


class Drafting(Frozen):
    """For the report: what drafts were worth with so many requests at once, or why that is not known."""

    max_concurrency: int
    length_tok: float | None = None
    rate: float | None = None
    rates: list[float] = []
    invalid_because: str | None = None


class SpeculationDetails(Frozen):
    """For the report. `texts` is None if the replies are unusable.

    `greedy` is measured over the prompts of `texts`. The loads have random prompts, whose replies are random too, so that their
    drafts are rarely accepted.
    """

    greedy: Drafting
    batch1: Drafting
    profile: Drafting
    texts: SameText | None


def draft_loads(settings: Load) -> dict[str, Load]:
    """The two loads by the name of their folder.

    Each has a fixed number of repeats, which no budget ends, because the noise needs all of them. They have no SLO. Their
    prompts are none of the profile's load, which the server was asked before.
    """
    repeats = max(LEAST_REPEATS, settings.repeats)
    fixed = {"repeats": repeats, "most_repeats": repeats, "time_budget_s": None, "slo": None}
    clients = settings.max_concurrency
    alone = {
        "max_concurrency": 1,
        "num_prompts": min(settings.num_prompts, max(LEAST_PROMPTS, math.ceil(settings.num_prompts / clients))),
        "num_warmups": math.ceil(settings.num_warmups / clients),
    }
    first, second = (settings.seed + times * SEEDS_APART for times in (1, 2))
    return {
        BATCH1: Load.model_validate(settings.model_dump() | fixed | alone | {"seed": first}),
        PROFILE: Load.model_validate(settings.model_dump() | fixed | {"seed": second}),
    }


class Start(NamedTuple):
    """What a server does in one start, where both are started in turn: it runs these repeats of both loads.

    In its first start it is asked the prompts before.
    """

    side: str
    repeats: range

    @property
    def is_first(self) -> bool:
        return self.repeats.start == 1


# The folder of the first server where the two were started in turn.
FIRST_IN_TURN = "start-1"


def starts_in_turn(settings: Load) -> list[Start]:
    """The starts of both servers, in their order. `settings` is the profile's load."""
    end = draft_loads(settings)[PROFILE].repeats + 1
    half = (end + 1) // 2
    return [Start(DRAFTED, range(1, half)), Start(UNDRAFTED, range(1, end)), Start(DRAFTED, range(half, end))]


def measure_start(start: Start, server: Server, greedy: Greedy, settings: Load, folder: Path, run: RunLoad) -> None:
    """Do one of `starts_in_turn`. Raises as `measure_speculation`."""
    if start.is_first:
        (folder / GREEDY).write_text(greedy.model_dump_json(indent=2))
        with _counting(server if start.side == DRAFTED else None, folder):
            for prompt in greedy.prompts:
                _ask(start.side, server, prompt, greedy, folder)
    for name, each in draft_loads(settings).items():
        inside = folder / name / start.side
        inside.mkdir(parents=True, exist_ok=True)
        for repeat in start.repeats:
            run(server, each, inside, repeat)


def measure_speculation(servers: Pair, greedy: Greedy, settings: Load, folder: Path, run: RunLoad) -> None:
    """Ask both servers, then `run` both loads on both, all in turns. `settings` is the profile's load.

    Raises:
        ReleaseError: a server has ended.
        whatever `run` raises.
    """
    (folder / GREEDY).write_text(greedy.model_dump_json(indent=2))
    with _counting(servers.drafted, folder):
        for turn, prompt in enumerate(greedy.prompts):
            for side, server in servers.in_turn(turn):
                _ask(side, server, prompt, greedy, folder)
    for name, each in draft_loads(settings).items():
        for side in SIDES:
            (folder / name / side).mkdir(parents=True)
        for repeat in range(1, each.repeats + 1):
            for side, server in servers.in_turn(repeat - 1):
                run(server, each, folder / name / side, repeat)


@contextmanager
def _counting(drafted: Server | None, folder: Path) -> Iterator[None]:
    """Save the drafting server's counters before and after the block."""
    before, after = (folder / page for page in GREEDY_PAGES)
    if drafted:
        before.write_text(drafted.metrics_page())
    yield
    if drafted:
        after.write_text(drafted.metrics_page())


def _ask(side: str, server: Server, prompt: str, greedy: Greedy, folder: Path) -> None:
    answer = _answer(server, greedy_request(prompt, greedy, server.served_model_name), greedy.time_limit_s)
    with (folder / f"{side}.jsonl").open("a") as file:
        file.write(json.dumps(answer) + "\n")


def greedy_request(prompt: str, greedy: Greedy, model: str) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": greedy.max_tokens, "temperature": 0, "seed": 0}


def _answer(server: Server, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
    try:
        answer = asked("POST", f"{server.url}/v1/completions", limit_s, json=request)
    except httpx.HTTPError as error:
        server.check_alive()
        return {"request": request, "status": None, "error": f"{type(error).__name__}: {error}"}
    return {"request": request, "status": answer.status_code, "body": answer.text}


def acceptance(before: str, after: str) -> Acceptance:
    """The fate of the drafts between two /metrics pages.

    Raises:
        ValueError: the counters are missing, went down or contradict each other, or nothing was drafted.
    """
    then, now = _counted(before), _counted(after)
    if then.keys() != now.keys():
        raise ValueError("the server counts its drafts by other names afterwards")
    gained = {key: now[key] - then[key] for key in now}
    # `not … <=`: NaN is no count.
    if not all(0 <= count < math.inf for count in gained.values()):
        raise ValueError("the server's counters of its drafts went down: it was started anew")
    drafts, tokens, accepted = (int(gained[name, None]) for name in (DRAFTS, DRAFT_TOKENS, ACCEPTED))
    if drafts == 0:
        raise ValueError("the server drafted nothing")
    counters = Acceptance(drafts=drafts, draft_tokens=tokens, accepted_at=_by_position(gained))
    if sum(counters.accepted_at) != accepted or not accepted <= tokens or max(counters.accepted_at) > drafts:
        raise ValueError(f"the server's counters of its drafts contradict each other: {accepted} accepted, and {counters}")
    return counters


CounterKey = tuple[str, int | None]


def _counted(page: str) -> dict[CounterKey, float]:
    """The counters of drafts, by name and position, over all engines. Raises ValueError if one is missing."""
    totals: dict[CounterKey, float] = {}
    for name, position, value in _samples(page):
        totals[name, position] = totals.get((name, position), 0.0) + value
    lacking = {DRAFTS, DRAFT_TOKENS, ACCEPTED, ACCEPTED_AT} - {name for name, _ in totals}
    if lacking:
        raise ValueError(f"the server's /metrics has no {', '.join(sorted(lacking))}")
    return totals


def _samples(page: str) -> Iterator[tuple[str, int | None, float]]:
    for sample in samples_of(page, lambda line: line.startswith((DRAFTS, DRAFT_TOKENS, ACCEPTED, ACCEPTED_AT))):
        if sample.name in (DRAFTS, DRAFT_TOKENS, ACCEPTED):
            yield sample.name, None, sample.value
        elif sample.name == ACCEPTED_AT:
            yield sample.name, int(sample.labels["position"]), sample.value


def _by_position(gained: dict[CounterKey, float]) -> list[int]:
    """The accepted tokens by position. Raises ValueError if a position is missing."""
    by_position = {position: count for (_, position), count in gained.items() if position is not None}
    if sorted(by_position) != list(range(len(by_position))):
        raise ValueError(f"the server's counters have the positions {sorted(by_position)}")
    return [int(by_position[position]) for position in sorted(by_position)]


def add_up(parts: Sequence[Acceptance]) -> Acceptance:
    """Add up several stretches. Raises ValueError if their drafts are not equally long."""
    return Acceptance(
        drafts=sum(part.drafts for part in parts),
        draft_tokens=sum(part.draft_tokens for part in parts),
        accepted_at=[sum(counts) for counts in zip(*(part.accepted_at for part in parts), strict=True)],
    )


def same_text(ours: Sequence[str], theirs: Sequence[str]) -> SameText:
    """Where the texts of two servers begin to differ, prompt by prompt.

    Raises:
        ValueError: there are no texts, or one server has more than the other.
    """
    if not ours:
        raise ValueError("no prompt was asked")
    return SameText(parts_at=[_parts_at(*pair) for pair in zip(ours, theirs, strict=True)])


def _parts_at(one: str, other: str) -> int | None:
    if one == other:
        return None
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


def parse_speculation(folder: Path, settings: Load, levels: Levels, server: ServerPlan) -> list[Measurement]:
    """The acceptance length at batch 1 and the share of equal texts. `settings` is the profile's load, `server` drafts.

    The speedup compares two servers: see `rates` and judge.compare.speedup.
    """
    return [_acceptance_length(folder, settings, levels, server), _same_text(folder, levels)]


def rates(folder: Path, name: str, settings: Load, levels: Levels, servers: Sequence[ServerPlan]) -> list[Measurement]:
    """Output tokens per second under BATCH1 or PROFILE of both servers, whose plans are `servers`, in the order of SIDES."""
    return [_rate(folder, name, side, settings, levels, server) for side, server in zip(SIDES, servers, strict=True)]


def _rate(folder: Path, name: str, side: str, settings: Load, levels: Levels, server: ServerPlan) -> Measurement:
    about = (server.kind, server.arguments, None, server.served_model_name)
    # In turn, the server with drafts ran half of its repeats before the other one, and was then started again for the rest.
    one_start = not (folder / FIRST_IN_TURN).is_dir()
    measurements = figures.parse_load(folder / name / side, draft_loads(settings)[name], levels, *about, one_start=one_start)
    (rate,) = (measurement for measurement in measurements if measurement.metric == RATE)
    above = f"{folder.name}/{name}/"
    return rate.model_copy(update={"source": above + rate.source, "traced_to": [above + path for path in rate.traced_to]})


def sides_at_once(metric: str, levels: Levels) -> Sides:
    """The sides of an interval over repeats that are judged only once, after the last repeat."""
    return sides_of(METRICS[metric].direction, levels.false_pass, levels.false_fail)


def _acceptance_length(folder: Path, settings: Load, levels: Levels, server: ServerPlan) -> Measurement:
    place = f"{folder.name}/{BATCH1}/{DRAFTED}"
    source = f"{place}/metrics-*.txt"
    rate = _rate(folder, BATCH1, DRAFTED, settings, levels, server)
    if rate.invalid_because is not None:
        return invalid(ACCEPTANCE_BATCH1, rate.invalid_because, source)
    try:
        parts = _acceptances(folder / BATCH1 / DRAFTED, draft_loads(settings)[BATCH1].repeats)
        lengths = [part.length_tok for part in parts]
        interval = repeat_interval(lengths, sides_at_once(ACCEPTANCE_BATCH1, levels))
        traced = [path for repeat in range(1, len(parts) + 1) for path in _lines_of(folder / BATCH1 / DRAFTED, place, repeat)]
    except UNUSABLE as error:
        return invalid(ACCEPTANCE_BATCH1, f"no usable counters: {in_words(error)}", source)
    count = sum(part.drafts for part in parts)
    others = {"sample_count": count, "repeats": lengths, "interval": interval, "traced_to": traced}
    return valid(ACCEPTANCE_BATCH1, geometric_mean(lengths), source, **others)


def _acceptances(folder: Path, repeats: int) -> list[Acceptance]:
    """The fate of the drafts of each repeat. Raises one of UNUSABLE."""
    return [_between(folder, _pages(repeat)) for repeat in range(1, repeats + 1)]


def _between(folder: Path, pages: tuple[str, str]) -> Acceptance:
    """The fate of the drafts between two files. Raises one of UNUSABLE."""
    return acceptance(*((folder / page).read_text() for page in pages))


def _pages(repeat: int) -> tuple[str, str]:
    return f"metrics-{repeat}-before.txt", f"metrics-{repeat}-after.txt"


def _lines_of(folder: Path, place: str, repeat: int) -> Iterator[str]:
    """The lines with the count of accepted tokens before and after a repeat, as `path:line`."""
    for page in _pages(repeat):
        lines = (folder / page).read_text().splitlines()
        yield f"{place}/{page}:{next(number for number, line in enumerate(lines, 1) if line.startswith(ACCEPTED))}"


def _same_text(folder: Path, levels: Levels) -> Measurement:
    source = f"{folder.name}/{DRAFTED}.jsonl beside {folder.name}/{UNDRAFTED}.jsonl"
    try:
        texts = _texts(folder)
    except UNUSABLE as error:
        return invalid(SAME_TEXT, f"no usable replies: {in_words(error)}", source)
    count = len(texts.parts_at)
    interval = share_interval(texts.same, count, sides_at_once(SAME_TEXT, levels))
    parted = [number for number, at in enumerate(texts.parts_at, 1) if at is not None]
    traced = [f"{folder.name}/{side}.jsonl:{number}" for number in parted or [1] for side in SIDES]
    if parted:
        first = parted[0]
        source += f": {len(parted)} of {count} texts part, the first that of prompt {first} at character"
        source += f" {texts.parts_at[first - 1]}"
    return valid(SAME_TEXT, texts.share, source, sample_count=count, interval=interval, traced_to=traced)


def _texts(folder: Path) -> SameText:
    """Compare the texts of both servers. Raises one of UNUSABLE."""
    greedy = Greedy.model_validate_json((folder / GREEDY).read_bytes())
    ours, theirs = (_replies(folder / f"{side}.jsonl", greedy) for side in SIDES)
    return same_text(ours, theirs)


def _replies(path: Path, greedy: Greedy) -> list[str]:
    """All texts of one server. Raises one of UNUSABLE."""
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    if [answer["request"]["prompt"] for answer in answers] != greedy.prompts:
        raise ValueError(f"{path.name} has {len(answers)} replies, and not one to each of {len(greedy.prompts)} prompts")
    return [_text(answer, greedy) for answer in answers]


def _text(answer: dict[str, Any], greedy: Greedy) -> str:
    if answer["status"] != httpx.codes.OK:
        raise ValueError(answer.get("error") or f"HTTP {answer['status']}: {answer['body'][:200]}")
    body = json.loads(answer["body"])
    text, reason = body["choices"][0]["text"], body["choices"][0]["finish_reason"]
    if not (isinstance(text, str) and text):
        raise ValueError("a reply is empty")
    if reason not in ("stop", "length"):
        raise ValueError(f"a reply ended by {reason!r}")
    if reason == "length" and (tokens := body["usage"]["completion_tokens"]) != greedy.max_tokens:
        raise ValueError(f"a reply was cut after {tokens} of {greedy.max_tokens} tokens")
    return text


def document(folder: Path, settings: Load) -> SpeculationDetails:
    """What the report shows besides the measurements, only from the stage's files."""
    try:
        texts = _texts(folder)
    except UNUSABLE:
        # The measurement says why.
        texts = None
    greedy = _drafting(1, lambda: _between(folder, GREEDY_PAGES))
    batch1, profile = (_under_load(folder / name / DRAFTED, each) for name, each in draft_loads(settings).items())
    return SpeculationDetails(greedy=greedy, batch1=batch1, profile=profile, texts=texts)


def _under_load(folder: Path, settings: Load) -> Drafting:
    """The drafting under a load. It is unknown if requests failed: their drafts are counted, but their replies are missing."""
    return _drafting(settings.max_concurrency, lambda: _of_whole_repeats(folder, settings))


def _of_whole_repeats(folder: Path, settings: Load) -> Acceptance:
    """The fate of the drafts of all repeats, none of which may have failed requests. Raises one of UNUSABLE."""
    for number in range(1, settings.repeats + 1):
        if problems := request_problems(result.read_repeat(folder, folder.name, number).about, settings):
            raise FailedError(f"repeat {number}: {'; '.join(problems)}")
    return add_up(_acceptances(folder, settings.repeats))


def _drafting(clients: int, read: Callable[[], Acceptance]) -> Drafting:
    try:
        drafts = read()
    except UNUSABLE as error:
        return Drafting(max_concurrency=clients, invalid_because=in_words(error))
    return Drafting(max_concurrency=clients, length_tok=drafts.length_tok, rate=drafts.rate, rates=drafts.rates)
