"""Files of bench that do not agree with what was asked, with themselves or with the server's counters give no number."""

import copy
import json
import math
import shutil
from collections.abc import Callable, Iterator
from itertools import groupby, product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.loads import (
    ARGUMENTS,
    CAPTURED,
    LOAD_SERVER,
    MEASURED,
    SETTINGS,
    change,
    copy_repeat,
    count,
    load_server,
    measure,
    read_result,
    restated,
    trtllm_page,
    with_settings,
)
from tests.fakes.capacity import Capacity
from vllm_qualify.evidence.load import steady
from vllm_qualify.evidence.load.agreement import result_problems
from vllm_qualify.evidence.load.problems import request_problems
from vllm_qualify.evidence.load.result import BESIDE, steady_of
from vllm_qualify.evidence.measurement import UNUSABLE
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.serving import VLLM, EngineName, ServerArguments

Document = dict[str, Any]
Spoil = Callable[[Document], Document]
MODEL = "reference"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(CAPTURED, tmp_path / "load")


def problem(
    folder: Path, settings: Load = SETTINGS, kind: EngineName = VLLM, arguments: ServerArguments = ARGUMENTS, model: str = MODEL
) -> str:
    """Why a load is invalid; empty if it is valid. All its metrics are so for the same reason."""
    rows = measure(folder, settings, load_server(arguments, kind, model=model))
    (because,) = {rows[name].invalid_because or "" for name in MEASURED}
    return because


def spoil(folder: Path, how: Spoil) -> None:
    """Both repeats, in the same way."""
    for repeat in (1, 2):
        (folder / f"bench-{repeat}.json").write_text(json.dumps(how(read_result(folder, repeat))))


def with_keys(**keys: Any) -> Spoil:
    return lambda result: result | keys


def with_negative_ttfts(result: Document) -> Document:
    """A quarter of them; the requests' ends stay."""
    early = [1.0 * (number % 4 == 0) for number in range(40)]
    ttfts = [ttft - more for ttft, more in zip(result["ttfts"], early, strict=True)]
    itls = [[gaps[0] + more, *gaps[1:]] for gaps, more in zip(result["itls"], early, strict=True)]
    return restated(result | {"ttfts": ttfts, "itls": itls})


def at_once(result: Document) -> Document:
    """Twice as many requests under way as there are clients."""
    starts, first = result["start_times"], result["start_times"][0]
    halved = [first + (start - first) / 2 for start in starts]
    return restated(result | {"start_times": halved, "queue_times": [0.0] * 40, "duration": result["duration"] / 2 + 0.05})


def started_elsewhere(result: Document) -> Document:
    """One request began 0.5 ms later than bench's own record of its waiting tells."""
    starts = [start + 0.0005 * (number == 20) for number, start in enumerate(result["start_times"])]
    return restated(result | {"start_times": starts})


HOSTILE: dict[str, tuple[Spoil, str]] = {
    "prompts of one token": (
        lambda result: restated(result | {"input_lens": [1] * 40}),
        "40 prompts do not have about 16 tokens, the first of them 1",
    ),
    "other total of tokens": (with_keys(total_output_tokens=5), "total_output_tokens is 5, and its requests have 320"),
    "other total of prompts": (with_keys(total_input_tokens=5), "total_input_tokens is 5, and its requests have 65"),
    "error texts": (with_keys(errors=["Traceback\nOSError: no"] * 40), "40 requests have an error: OSError: no"),
    "empty texts": (with_keys(generated_texts=[""] * 40), "40 of 40 replies have no text"),
    "fewer texts": (with_keys(generated_texts=["text"] * 39), "39 texts of 40 replies"),
    "another model": (with_keys(model_id="small"), "bench had model_id small, not reference"),
    "another interface": (with_keys(backend="openai-chat"), "bench had backend openai-chat, not openai"),
    "another concurrency": (with_keys(max_concurrency=8), "bench had max_concurrency 8, not 4"),
    "no concurrency": (with_keys(max_concurrency=None), "bench had max_concurrency None, not 4"),
    "another number of prompts": (with_keys(num_prompts=400), "bench had num_prompts 400, not 40"),
    "a rate": (with_keys(request_rate=3.0), "bench had request_rate 3.0, not inf"),
    "negative times": (with_negative_ttfts, "10 of its times to a token are no times"),
    "20 times the duration": (
        lambda result: restated(result | {"duration": 20 * result["duration"]}),
        "s, and its requests took 0.6",
    ),
    "more at once": (at_once, "requests were under way at once, and max_concurrency is 4"),
    "another start": (started_elsewhere, "1 of its requests began at another time than"),
    "other latencies": (with_keys(latencies=[0.1] * 40), "40 latencies are not the sum of the request's times to its tokens"),
    "more chunks": (with_keys(itls=[[0.005] * 10] * 40), "40 replies came in more chunks than their usage has tokens"),
    "text as a time": (lambda result: result | {"ttfts": [str(ttft) for ttft in result["ttfts"]]}, "its times are not numbers"),
    "text as a length": (lambda result: result | {"input_lens": ["16"] * 40}, "its input_lens are not whole numbers"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_leaves_no_number(folder: Path, name: str) -> None:
    how, message = HOSTILE[name]
    spoil(folder, how)
    assert message in problem(folder)


def test_the_captured_files_agree(folder: Path) -> None:
    assert problem(folder) == ""
    assert "bench had model_id reference, not other" in problem(folder, model="other")
    spoil(folder, restated)
    assert problem(folder) == ""


# --- Copies


def test_five_copies_of_one_file_are_no_five_repeats(folder: Path) -> None:
    for repeat in range(2, 6):
        for name in ("bench-{}.json", "metrics-{}-before.txt", "metrics-{}-after.txt"):
            shutil.copy(folder / name.format(1), folder / name.format(repeat))
    because = problem(folder, with_settings(repeats=5, most_repeats=5))
    assert "repeat 2 has the same requests as repeat 1, or ran at the same time: it is no repeat of its own" in because


def test_repeats_that_ran_at_the_same_time_are_no_repeats(folder: Path) -> None:
    """A copy whose times are a little longer."""
    first = read_result(folder, 1)
    slower = {name: [time * 1.01 for time in first[name]] for name in ("ttfts", "latencies")}
    itls, starts = [[gap * 1.01 for gap in gaps] for gaps in first["itls"]], first["start_times"]
    slower |= {"itls": itls, "start_times": [starts[0] + (start - starts[0]) * 1.011 for start in starts]}
    copied = first | slower | {"queue_times": [0.0] * 40, "duration": first["duration"] * 1.02}
    (folder / "bench-2.json").write_text(json.dumps(restated(copied)))
    for when in ("before", "after"):
        shutil.copy(folder / f"metrics-1-{when}.txt", folder / f"metrics-2-{when}.txt")
    assert "repeat 2 has the same requests as repeat 1, or ran at the same time" in problem(folder)


@pytest.mark.parametrize("place", [".", BESIDE])
def test_five_repeats_beside_ten_are_not_measured_in_turns(folder: Path, place: str) -> None:
    for repeat in range(3, 6):
        copy_repeat(folder, repeat, of=2)
    beside = shutil.copytree(folder, folder / BESIDE)
    settings = with_settings(most_repeats=10)
    assert problem(folder / place, settings) == ""
    for repeat in range(6, 11):
        copy_repeat(beside, repeat, of=2)
    assert "which ran in turns" in problem(folder / place, settings)


# --- Tokens and the server's counters


def cut_short(result: Document) -> Document:
    """A server that sent the 8 tokens of each reply, and says 32."""
    return restated(result | {"output_lens": [32] * 40})


LONG = with_settings(output_len=32)


def test_tokens_that_the_server_did_not_generate_leave_no_number(folder: Path) -> None:
    spoil(folder, cut_short)
    assert "the server counts 352 generated tokens, and by its usage there were 1408" in problem(folder, LONG)


@pytest.mark.parametrize(
    ("arguments", "is_refused"),
    [({}, True), ({"stream_interval": 4}, False), ({"speculative_config": {"decoding_type": "MTP"}}, False)],
)
def test_a_server_that_does_not_count_its_tokens_shows_them_by_its_chunks(
    folder: Path, arguments: ServerArguments, is_refused: bool
) -> None:
    spoil(folder, cut_short)
    for repeat in (1, 2):
        for when, requests in (("before", 0.0), ("after", 44.0)):
            trtllm_page(folder, repeat, when, {"request_success": requests, "kv_cache_missed_blocks": requests})
    message = "its replies came in 320 chunks and have 1280 tokens by its usage, which the server does not count"
    assert (message in problem(folder, LONG, "tensorrt-llm", arguments)) == is_refused


def gained(folder: Path, **counters: float) -> None:
    """Set by how much the counters rise in the second repeat."""
    for when, times in (("before", 0), ("after", 1)):
        count(folder, when, 2, **{name: 1_000_000 + value * times for name, value in counters.items()})


@pytest.mark.parametrize(
    ("counters", "message"),
    [
        ({"request_success": 43}, "the server counts 43 requests, and bench sent 40"),
        ({"request_success": 46}, "the server counts 46 requests"),
        ({"request_success": math.nan}, "the server counts nan requests"),
        ({"request_success": -1}, "count of vllm:request_success_total went back: it was started anew meanwhile"),
        ({"generation_tokens": 351}, "the server counts 351 generated tokens, and by its usage there were 352"),
        ({"generation_tokens": 353}, "the server counts 353 generated tokens"),
        ({"generation_tokens": math.nan}, "the server counts nan generated tokens"),
        ({"generation_tokens": -1}, "count of vllm:generation_tokens_total went back"),
        ({"prompt_tokens": 400}, "the server counts 400 tokens of prompts, and bench 719"),
        ({"prompt_tokens": 1000}, "the server counts 1000 tokens of prompts"),
        ({"prompt_tokens": math.inf}, "the server counts nan tokens of prompts"),
        ({"prompt_tokens": -1}, "count of vllm:prompt_tokens_total went back"),
        ({"other": -1}, "count of vllm:other_total went back"),
    ],
    ids=str,
)
def test_counters_that_do_not_agree_leave_no_number(folder: Path, counters: dict[str, float], message: str) -> None:
    gained(folder, **counters)
    assert "repeat 2: the server" in problem(folder)
    assert message in problem(folder)


@pytest.mark.parametrize("name", ["request_success", "generation_tokens", "prompt_tokens"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_page_without_a_count_leaves_no_number(folder: Path, name: str, when: str) -> None:
    count(folder, when, 2, **{name: None})
    assert f"repeat 2: the server's /metrics {when} it has no vllm:{name}_total" in problem(folder)


def test_one_engine_that_was_started_anew_leaves_no_number(folder: Path) -> None:
    """Though the sum over both engines rises as it should."""
    name = "vllm:generation_tokens_total"
    for when, counts in (("before", (500, 0)), ("after", (0, 852))):
        path = folder / f"metrics-2-{when}.txt"
        kept = [line for line in path.read_text().splitlines() if name not in line]
        lines = [f'{name}{{engine="{engine}"}} {value}.0' for engine, value in enumerate(counts)]
        path.write_text("\n".join([*kept, f"# TYPE {name} counter", *lines, ""]))
    assert f"the server's count of {name} went back" in problem(folder)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("spec_decode_acceptance_length", "spec_decode_acceptance_length is 3, and 31 tokens of 122 drafts were accepted"),
        ("spec_decode_num_drafts", "spec_decode_acceptance_length is 1.2541, and 31 tokens of 3 drafts were accepted"),
    ],
)
def test_an_acceptance_length_that_its_drafts_do_not_give_leaves_no_number(tmp_path: Path, key: str, message: str) -> None:
    folder = shutil.copytree(CAPTURED.parent / "speculation" / "batch1" / "drafted", tmp_path / "load")
    alone = with_settings(max_concurrency=1, num_prompts=20, num_warmups=1, slo=None)

    def because() -> str:
        return measure(folder, alone, load_server({}))["acceptance_length_tok"].invalid_because or ""

    assert because() == ""
    change(folder, 1, **{key: 3})
    assert message in because()
    change(folder, 1, spec_decode_acceptance_length=2.0, spec_decode_num_drafts=31)
    assert "spec_decode_num_drafts is 31, and the server counts 1" in because()


# --- Honest files


def join_chunks(folder: Path) -> None:
    spoil(folder, lambda result: restated(result | {"itls": [[sum(gaps[:4]), sum(gaps[4:])] for gaps in result["itls"]]}))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda folder: gained(folder, request_success=45, generation_tokens=360, prompt_tokens=735),
            id="a request to see whether the server is ready, as older versions of bench send it",
        ),
        pytest.param(
            lambda folder: gained(folder, prompt_tokens=719 + 44), id="tokens at the beginning that only the server counts"
        ),
        pytest.param(
            lambda folder: change(folder, 2, generated_texts=[""] * 20 + ["�"] * 20),
            id="replies without a text: their tokens may all be special ones, or parts of a character",
        ),
        pytest.param(
            join_chunks, id="several tokens in a chunk, as of a draft model or a slow server: the count of tokens tells"
        ),
    ],
)
def test_what_an_honest_server_may_leave_agrees(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder)
    assert problem(folder) == ""


@pytest.mark.parametrize(("parser", "message"), [("deepseek_r1", ""), (None, "40 of 40 replies have no text")])
def test_a_chat_that_only_reasons_is_honest(folder: Path, parser: str | None, message: str) -> None:
    """Bench does not record the reasoning. The template's tokens are in the server's count and in `usage`."""
    spoil(folder, lambda result: restated(result | {"backend": "openai-chat", "generated_texts": [""] * 40}))
    gained(folder, prompt_tokens=719 + 44 * 30)
    arguments = ARGUMENTS | ({"reasoning-parser": parser} if parser else {})
    because = problem(folder, with_settings(api="chat"), arguments=arguments)
    assert message in because if message else because == ""


@pytest.mark.parametrize("rate", [None, 20.0])
def test_what_a_sound_server_leaves_agrees(tmp_path: Path, rate: float | None) -> None:
    load = with_settings(num_prompts=200, request_rate=rate)
    Capacity(noise=0.1).run(load, tmp_path)
    assert result_problems(read_result(tmp_path, 1), load, load_server({})) == []


# --- Random ones

REPEATS = [read_result(CAPTURED, repeat) for repeat in (1, 2)]
TRUE = [steady_of(result, SETTINGS).values for result in REPEATS]
# A measurement is the same if it changed by less than this share: what bench's own figures, which round, cannot show.
SAME = 1e-4
TIMES = ("ttfts", "latencies", "start_times", "queue_times", "input_lens", "output_lens")


def places(result: Document) -> Iterator[tuple[Any, ...]]:
    """Where a number stands in a result."""
    for name, value in result.items():
        if isinstance(value, float | int):
            yield (name,)
    for name in TIMES:
        yield from ((name, number) for number in range(len(result[name])))
    yield from (("itls", one, other) for one, gaps in enumerate(result["itls"]) for other in range(len(gaps)))


PLACES = {name: list(those) for name, those in groupby(places(REPEATS[0]), key=lambda place: place[0])}
SPECIAL = [math.nan, math.inf, -math.inf, 0, -1.0, 1e308, None, "1.0", True]
Change = Callable[[Any], Any]


def change_of(drawn: Random) -> Change:
    """A random way to change a number."""
    factor, term, other = drawn.uniform(0.5, 2), drawn.uniform(-10, 10), drawn.choice(SPECIAL)
    kinds: list[Change] = [
        lambda value: value * factor,
        lambda value: value + term,
        lambda value: value + term / 1000,
        lambda value: value + round(term**3 / 10),
        lambda _: other,
    ]
    return drawn.choice(kinds)


def changes_of(drawn: Random) -> list[tuple[tuple[Any, ...], Change]]:
    """Of half of the results all numbers change alike, since a sum and what it sums up may then still agree."""
    same = change_of(drawn) if drawn.random() < 0.5 else None
    return [(drawn.choice(PLACES[drawn.choice(list(PLACES))]), same or change_of(drawn)) for _ in range(drawn.randint(1, 4))]


def mutated(result: Document, changes: list[tuple[tuple[Any, ...], Change]]) -> Document:
    changed = result | {name: copy.deepcopy(result[name]) for name in {place[0] for place, _ in changes}}
    for place, how in changes:
        within: Any = changed
        for step in place[:-1]:
            within = within[step]
        if isinstance(within[place[-1]], float | int):
            within[place[-1]] = how(within[place[-1]])
    return changed


def measured(result: Document) -> dict[str, float] | None:
    """What a result measures, None if it is invalid."""
    try:
        problems = request_problems(result, SETTINGS) or result_problems(result, SETTINGS, LOAD_SERVER)
        return None if problems else steady_of(result, SETTINGS).values
    except (steady.UnsteadyError, *UNUSABLE):
        return None


@pytest.mark.thorough
@settings(max_examples=50, database=None)
@given(seed=st.integers(0, 2**64))
def test_no_random_change_of_a_number_changes_a_measurement(seed: int) -> None:
    """100 changes each: Hypothesis takes far longer to draw one than it takes to find what is wrong."""
    assert_unchanged(seed)


@pytest.mark.parametrize("moved_ms", [-100, -20, -5, -1, -0.1, 0.1, 1, 5, 20, 100])
@pytest.mark.parametrize("waited", [False, True], ids=["as it was", "with its wait"])
def test_a_start_moves_a_measurement_by_no_more_than_it_moved_itself(moved_ms: float, waited: bool) -> None:
    """A client's own jitter is some ms, so that a start which moved by as much is no sign of anything.

    The steady window may begin or end with that request: it is longer or shorter by as much, and may have a token
    more or less at either end.
    """
    for number, (result, true) in product(range(SETTINGS.num_prompts), zip(REPEATS, TRUE, strict=True)):
        moved = copy.deepcopy(result)
        for name in ("start_times", "queue_times") if waited else ("start_times",):
            moved[name][number] += moved_ms / 1000
        figures = measured(moved)
        most = abs(moved_ms) / 1000 / result["duration"] + 2 / result["total_output_tokens"]
        assert figures is None or figures == pytest.approx(true, rel=most), number


def assert_unchanged(seed: int) -> None:
    drawn = Random(seed)
    for _ in range(100):
        repeat = drawn.choice([0, 1])
        figures = measured(mutated(REPEATS[repeat], changes_of(drawn)))
        assert figures is None or figures == pytest.approx(TRUE[repeat], rel=SAME)
