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

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.engine.metrics_page import samples_of
from vllm_qualify.engine.server import Server, ServerPlan
from vllm_qualify.evidence import measurement
from vllm_qualify.evidence.load import figures, result
from vllm_qualify.evidence.load.greedy import DRAFTED, GREEDY, SIDES, UNDRAFTED, Greedy, SameText, ask_prompt, compare_texts
from vllm_qualify.evidence.load.problems import request_problems
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words, invalid, valid
from vllm_qualify.evidence.sequential import Levels, sides_at_once
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.metrics import ACCEPTANCE_BATCH1, OUTPUT_THROUGHPUT, SAME_TEXT
from vllm_qualify.recipe.values import Frozen

STAGE = "speculation"
BATCH1, PROFILE = "batch1", "profile"
GREEDY_PAGES = ("greedy-before.txt", "greedy-after.txt")
# Fewer requests, one after another, hardly have a steady state. Fewer pairs do not show the noise.
LEAST_PROMPTS, LEAST_REPEATS = 20, 2
# More than the runs of a load and of its sweep, each of which has a seed of its own.
SEEDS_APART = 1_000

# What drafts are worth, by the server's own counters of them.
DRAFTS, DRAFT_TOKENS = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
COUNTERS = (DRAFTS, DRAFT_TOKENS, ACCEPTED, ACCEPTED_AT)

RunLoad = Callable[[Server, Load, Path, int], None]
"""Runs bench once on a server, as repeat N of the load, into a folder."""


class FailedError(ValueError):
    """The requests of a load do not count; the message says why."""

    def __repr__(self) -> str:
        return str(self)


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

    Before the first repeat it is asked the prompts.
    """

    side: str
    repeats: range


# The folder of the first server where the two were started in turn.
FIRST_IN_TURN = "start-1"


def starts_in_turn(settings: Load) -> list[Start]:
    """The starts of both servers, in their order. `settings` is the profile's load."""
    end = draft_loads(settings)[PROFILE].repeats + 1
    half = (end + 1) // 2
    return [Start(DRAFTED, range(1, half)), Start(UNDRAFTED, range(1, end)), Start(DRAFTED, range(half, end))]


def measure_start(start: Start, server: Server, greedy: Greedy, settings: Load, folder: Path, run: RunLoad) -> None:
    """Do one of `starts_in_turn`. Raises QualifyError."""
    asked = greedy if start.repeats.start == 1 else None
    _measure_sides({start.side: server}, start.repeats, asked, settings, folder, run)


def measure_speculation(drafted: Server, undrafted: Server, greedy: Greedy, settings: Load, folder: Path, run: RunLoad) -> None:
    """Ask both servers, then `run` both loads on both, all in turns. `settings` is the profile's load.

    Raises ReleaseError if a server has ended, and whatever `run` raises.
    """
    repeats = range(1, draft_loads(settings)[PROFILE].repeats + 1)
    _measure_sides({DRAFTED: drafted, UNDRAFTED: undrafted}, repeats, greedy, settings, folder, run)


def _measure_sides(
    servers: dict[str, Server], repeats: range, greedy: Greedy | None, settings: Load, folder: Path, run: RunLoad
) -> None:
    """Ask the prompts, if there are any, and run these repeats of both loads, with the counters of the drafting server."""
    # Their order alternates from turn to turn, so that a drift favours neither.
    in_turn = (list(servers.items()), list(servers.items())[::-1])
    if greedy:
        (folder / GREEDY).write_text(greedy.model_dump_json(indent=2))
        before, after = (folder / page for page in GREEDY_PAGES)
        if drafted := servers.get(DRAFTED):
            before.write_text(drafted.metrics_page())
        for turn, prompt in enumerate(greedy.prompts):
            for side, server in in_turn[turn % 2]:
                ask_prompt(side, server, prompt, greedy, folder)
        if drafted:
            after.write_text(drafted.metrics_page())
    for name, each in draft_loads(settings).items():
        for side in servers:
            (folder / name / side).mkdir(parents=True, exist_ok=True)
        for repeat in repeats:
            for side, server in in_turn[(repeat - 1) % 2]:
                run(server, each, folder / name / side, repeat)


def parse_speculation(folder: Path, settings: Load, levels: Levels, server: ServerPlan) -> list[Measurement]:
    """The acceptance length at batch 1 and the share of equal texts. `settings` is the profile's load, `server` drafts.

    The speedup compares two servers: see `rates` and judge.compare.speedup.
    """
    return [_measure_acceptance(folder, settings, levels, server), _measure_same_text(folder, levels)]


def rates(folder: Path, name: str, settings: Load, levels: Levels, servers: Sequence[ServerPlan]) -> list[Measurement]:
    """Output tokens per second under BATCH1 or PROFILE of both servers, whose plans are `servers`, in the order of SIDES."""
    return [_measure_rate(folder, name, side, settings, levels, server) for side, server in zip(SIDES, servers, strict=True)]


def _measure_rate(folder: Path, name: str, side: str, settings: Load, levels: Levels, server: ServerPlan) -> Measurement:
    # In turn, the server with drafts ran half of its repeats before the other one, and was then started again for the rest.
    checks = figures.LoadChecks(is_one_start=not (folder / FIRST_IN_TURN).is_dir())
    rows = figures.parse_load(folder / name / side, draft_loads(settings)[name], levels, server, checks)
    rate = next(row for row in rows if row.metric == OUTPUT_THROUGHPUT)
    above = f"{folder.name}/{name}/"
    return rate.model_copy(update={"source": above + rate.source, "traced_to": [above + path for path in rate.traced_to]})


def _measure_acceptance(folder: Path, settings: Load, levels: Levels, server: ServerPlan) -> Measurement:
    inside, place = folder / BATCH1 / DRAFTED, f"{folder.name}/{BATCH1}/{DRAFTED}"
    source, repeats = f"{place}/metrics-*.txt", draft_loads(settings)[BATCH1].repeats
    rate = _measure_rate(folder, BATCH1, DRAFTED, settings, levels, server)
    if rate.invalid_because is not None:
        return invalid(ACCEPTANCE_BATCH1, rate.invalid_because, source)
    try:
        parts = _read_acceptances(inside, repeats)
        lengths = [part.length_tok for part in parts]
        interval = measurement.repeat_interval(lengths, sides_at_once(ACCEPTANCE_BATCH1, levels))
        pages = [page for number in range(1, repeats + 1) for page in result.metrics_pages(inside, number)]
        traced = [f"{place}/{page.name}:{_find_accepted(page)}" for page in pages]
    except UNUSABLE as error:
        return invalid(ACCEPTANCE_BATCH1, f"no usable counters: {in_words(error)}", source)
    count = sum(part.drafts for part in parts)
    others = {"sample_count": count, "repeats": lengths, "interval": interval, "traced_to": traced}
    return valid(ACCEPTANCE_BATCH1, measurement.geometric_mean(lengths), source, **others)


def _find_accepted(page: Path) -> int:
    return next(number for number, line in enumerate(page.read_text().splitlines(), 1) if line.startswith(ACCEPTED))


def _read_acceptances(folder: Path, repeats: int) -> list[Acceptance]:
    """The fate of the drafts of each repeat. Raises one of UNUSABLE."""
    both_pages = (result.metrics_pages(folder, repeat) for repeat in range(1, repeats + 1))
    return [read_acceptance(*(page.read_text() for page in pages)) for pages in both_pages]


def read_acceptance(before: str, after: str) -> Acceptance:
    """The fate of the drafts between two /metrics pages.

    Raises ValueError if the counters are missing, went down or contradict each other, or nothing was drafted.
    """
    then, now = _read_counters(before), _read_counters(after)
    if then.keys() != now.keys():
        raise ValueError("the server counts its drafts by other names afterwards")
    gained = {key: now[key] - then[key] for key in now}
    # `not … <=`: NaN is no count.
    if not all(0 <= count < math.inf for count in gained.values()):
        raise ValueError("the server's counters of its drafts went down: it was started anew")
    drafts, tokens, accepted = (int(gained[name, None]) for name in (DRAFTS, DRAFT_TOKENS, ACCEPTED))
    if drafts == 0:
        raise ValueError("the server drafted nothing")
    by_position = {position: int(count) for (_, position), count in gained.items() if position is not None}
    positions = sorted(by_position)
    if positions != list(range(len(positions))):
        raise ValueError(f"the server's counters have the positions {positions}")
    accepted_at = [by_position[position] for position in positions]
    counters = Acceptance(drafts=drafts, draft_tokens=tokens, accepted_at=accepted_at)
    if sum(accepted_at) != accepted or not accepted <= tokens or max(accepted_at) > drafts:
        raise ValueError(f"the server's counters of its drafts contradict each other: {accepted} accepted, and {counters}")
    return counters


def _read_counters(page: str) -> dict[tuple[str, int | None], float]:
    """The counters of drafts, by name and position, over all engines. Raises ValueError if one is missing."""
    totals: dict[tuple[str, int | None], float] = {}
    for sample in samples_of(page, lambda line: line.startswith(COUNTERS)):
        if sample.name in COUNTERS:
            key = sample.name, int(sample.labels["position"]) if sample.name == ACCEPTED_AT else None
            totals[key] = totals.get(key, 0.0) + sample.value
    if lacking := {*COUNTERS} - {name for name, _ in totals}:
        raise ValueError(f"the server's /metrics has no {', '.join(sorted(lacking))}")
    return totals


def _measure_same_text(folder: Path, levels: Levels) -> Measurement:
    source = f"{folder.name}/{DRAFTED}.jsonl beside {folder.name}/{UNDRAFTED}.jsonl"
    try:
        texts = compare_texts(folder)
    except UNUSABLE as error:
        return invalid(SAME_TEXT, f"no usable replies: {in_words(error)}", source)
    count = len(texts.parts_at)
    interval = measurement.share_interval(texts.same_count, count, sides_at_once(SAME_TEXT, levels))
    parted = [(number, at) for number, at in enumerate(texts.parts_at, 1) if at is not None]
    traced = [f"{folder.name}/{side}.jsonl:{number}" for number, _ in parted or [(1, 0)] for side in SIDES]
    if parted:
        number, at = parted[0]
        source += f": {len(parted)} of {count} texts part, the first that of prompt {number} at character {at}"
    return valid(SAME_TEXT, texts.share, source, sample_count=count, interval=interval, traced_to=traced)


def document(folder: Path, settings: Load) -> SpeculationDetails:
    """What the report shows besides the measurements, only from the stage's files."""
    try:
        texts = compare_texts(folder)
    except UNUSABLE:
        # The measurement says why.
        texts = None
    greedy = _describe_drafting(1, lambda: read_acceptance(*((folder / page).read_text() for page in GREEDY_PAGES)))
    batch1, profile = (
        _describe_drafting(each.max_concurrency, partial(_sum_repeats, folder / name / DRAFTED, each))
        for name, each in draft_loads(settings).items()
    )
    return SpeculationDetails(greedy=greedy, batch1=batch1, profile=profile, texts=texts)


def _sum_repeats(folder: Path, settings: Load) -> Acceptance:
    """The fate of the drafts of all repeats. Raises one of UNUSABLE, also if the drafts are not equally long.

    It is unknown if requests failed: their drafts are counted, but their replies are missing.
    """
    for number in range(1, settings.repeats + 1):
        if problems := request_problems(result.read_repeat(folder, folder.name, number).summary, settings):
            raise FailedError(f"repeat {number}: {'; '.join(problems)}")
    parts = _read_acceptances(folder, settings.repeats)
    return Acceptance(
        drafts=sum(part.drafts for part in parts),
        draft_tokens=sum(part.draft_tokens for part in parts),
        accepted_at=[sum(counts) for counts in zip(*(part.accepted_at for part in parts), strict=True)],
    )


def _describe_drafting(clients: int, read: Callable[[], Acceptance]) -> Drafting:
    try:
        drafts = read()
    except UNUSABLE as error:
        return Drafting(max_concurrency=clients, invalid_because=in_words(error))
    return Drafting(max_concurrency=clients, length_tok=drafts.length_tok, rate=drafts.rate, rates=drafts.rates)
