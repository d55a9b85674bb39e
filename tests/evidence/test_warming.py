"""Both servers of a load in turns are warmed up alike before its first repeat, and a load whose servers were not is invalid."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.loads import CAPTURED, LEVELS, LOAD_SERVER, SETTINGS, change, count, read_result, with_settings
from tests.evidence.commands import SERVER, driven, options
from vllm_qualify.engine import bench as benches
from vllm_qualify.engine.bench import Bench
from vllm_qualify.engine.process import Progress
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.load.client import UNFOLLOWED, measure_load, warm_up_command
from vllm_qualify.evidence.load.figures import LoadChecks, parse_load
from vllm_qualify.evidence.load.result import BESIDE
from vllm_qualify.evidence.load.warm_up import warm_up_of_both
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.traces.trace import Request, Trace

# A fifth of 40 requests.
ASKED = 8
# By the captured page from before repeat 1.
SUCCEEDED, GENERATED, PROMPTS = 853, 31_088, 63_089
LISTS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts", "errors")
CANDIDATE, BASELINE = "http://127.0.0.1:8123", "http://127.0.0.1:8124"


def warm_up(folder: Path) -> None:
    """What a warm-up leaves, made of the first requests of the captured repeat 1, long before it."""
    asked = read_result(folder, 1)
    asked |= {name: asked[name][:ASKED] for name in LISTS}
    starts = [start - 1000 for start in asked["start_times"]]
    ends = [start + latency for start, latency in zip(starts, asked["latencies"], strict=True)]
    totals = {f"total_{side}_tokens": sum(asked[f"{side}_lens"]) for side in ("input", "output")}
    asked |= {"start_times": starts, "duration": max(ends) - min(starts), "num_prompts": ASKED, "completed": ASKED, **totals}
    (folder / "bench-0.json").write_text(json.dumps(asked))
    for when in ("before", "after"):
        shutil.copy(folder / "metrics-1-before.txt", folder / f"metrics-0-{when}.txt")
    before = {"request_success": SUCCEEDED - ASKED, "generation_tokens": GENERATED - totals["total_output_tokens"]}
    count(folder, "before", 0, **before, prompt_tokens=PROMPTS - totals["total_input_tokens"])
    count(folder, "after", 0, request_success=SUCCEEDED, generation_tokens=GENERATED, prompt_tokens=PROMPTS)
    # One line in place of those by reason: their labels are others, and no count may go back.
    count(folder, "before", 1, request_success=SUCCEEDED)
    count(folder, "after", 1, request_success=SUCCEEDED + 40 + 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = shutil.copytree(CAPTURED, tmp_path / "load")
    warm_up(folder)
    return folder


def rows(folder: Path, *, warmed: bool = True, settings: Load = SETTINGS) -> list[Measurement]:
    return parse_load(folder, settings, LEVELS, LOAD_SERVER, LoadChecks(is_warmed=warmed))


def test_a_load_counts_if_its_server_was_warmed_up_as_planned(folder: Path) -> None:
    assert all("requests in" in str(row.invalid_because) for row in rows(folder) if row.value is None)
    whole = rows(folder)
    assert all("bench-0" not in path for row in whole for path in row.traced_to), "a warm-up is no repeat"
    for path in folder.glob("*-0*"):
        path.unlink()
    assert rows(folder, warmed=False) == whole, "where the plan asks for none"


TWELVE_TOKENS = {"output_lens": [12] * ASKED, "total_output_tokens": 12 * ASKED}
SPOILED: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "bench-0.json").unlink(), "No such file or directory: bench-0.json"),
    (lambda folder: (folder / "metrics-0-after.txt").unlink(), "No such file or directory: metrics-0-after.txt"),
    (lambda folder: (folder / "bench-0.json").write_text("{}"), "completed"),
    (lambda folder: change(folder, 0, completed=7, failed=1), "7 of 8 requests completed, 1 failed"),
    (lambda folder: shutil.copy(folder / "bench-1.json", folder / "bench-0.json"), "40 of 8 requests completed"),
    (lambda folder: change(folder, 0, **TWELVE_TOKENS), "8 replies do not have 8 tokens"),
    (lambda folder: change(folder, 0, max_concurrency=1), "bench had max_concurrency 1, not 4"),
    (lambda folder: change(folder, 0, model_id="another"), "bench had model_id another, not reference"),
    (lambda folder: count(folder, "before", 0, request_success=SUCCEEDED), "the server counts 0 requests, and bench sent 8"),
    (lambda folder: count(folder, "before", 1, request_success=0), "request_success_total went back: it was started anew"),
    (
        lambda folder: change(folder, 0, start_times=read_result(folder, 1)["start_times"][:ASKED]),
        "it has the requests of repeat 1, or ran at the same time",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_a_load_whose_server_was_not_warmed_up_as_planned_is_invalid(
    folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(folder)
    (reason,) = {row.invalid_because or "" for row in rows(folder)}
    for words in ("the server was not warmed up like the one that it ran in turns with: ", message, ": measure the load again"):
        assert words in reason


def test_a_warm_up_fills_the_load_once_and_asks_no_prompt_that_is_measured_or_asked_before_a_repeat() -> None:
    asked = warm_up_of_both(SETTINGS)
    assert (asked.num_prompts, asked.max_concurrency, asked.request_rate, asked.num_warmups) == (8, 4, None, 0)
    assert (asked.input_len, asked.output_len) == (SETTINGS.input_len, SETTINGS.output_len)
    assert warm_up_of_both(with_settings(num_prompts=5, window="whole")).num_prompts == 4
    assert warm_up_of_both(with_settings(request_rate=9.0, max_concurrency=1)).request_rate == 9.0
    for settings in (SETTINGS, with_settings(seeded_by="balanced")):
        measured = range(1, settings.looks[-1] + 1)
        seeds = [settings.bench_seed(repeat) for repeat in measured]
        before_repeats = [options(warm_up_command(driven().bench.client, "m", settings, each))["--seed"] for each in measured]
        ours = warm_up_of_both(settings).bench_seed(0)
        assert 2**31 <= ours < 2**32
        assert ours not in {*seeds, *map(int, before_repeats)}


def test_a_warm_up_of_a_trace_comes_at_its_mean_rate_with_its_median_lengths() -> None:
    trace = Trace.from_requests(16, [Request(at, length, 2 * length, (at,)) for at, length in enumerate((10, 20, 90, 20, 50))])
    settings = with_settings(input_len=None, trace="t.jsonl", num_prompts=5, max_concurrency=1)
    asked = warm_up_of_both(settings, trace)
    assert (asked.input_len, asked.output_len, asked.num_prompts, asked.request_rate) == (20, 40, 1, 5 / 4)
    assert asked.trace is None
    at_once = warm_up_of_both(settings, Trace.from_requests(16, [Request(0.0, 10, 20, (at,)) for at in range(3)]))
    assert (at_once.request_rate, at_once.max_concurrency) == (None, 3)


# --- Measuring, with bench's captured files in place of bench


Asked = list[tuple[str, list[str], str | None]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Each run of bench: its server's address, its command and its result."""
    asked: Asked = []

    def run(_: Bench, command: list[str], result: str | None, log: Path, _s: float, check: object, _p: Progress) -> None:
        assert callable(check)
        check()
        asked.append((options(command)["--base-url"], command, result))
        if result:
            shutil.copy(CAPTURED / "bench-1.json", log.parent / result)

    monkeypatch.setattr(benches, "run_command", run)
    monkeypatch.setattr(benches, "stop_preparing", lambda *_: None)
    monkeypatch.setattr(type(SERVER), "post", lambda *_: "404")
    monkeypatch.setattr(type(SERVER), "metrics_page", lambda server: f"# page of {server.url}\n")
    monkeypatch.setattr(type(SERVER), "check_alive", lambda _: None)
    return asked


def test_both_are_asked_the_same_before_the_first_repeat(tmp_path: Path, asked: Asked) -> None:
    commands = measure_load(driven(), SETTINGS, tmp_path, lambda *_: None, UNFOLLOWED, driven(BASELINE))
    first, second, *others = asked
    assert {first[0], second[0]} == {CANDIDATE, BASELINE}
    assert [each[2] == "bench-0.json" for each in asked] == [True, True, *[False] * len(others)]
    assert [word for word in first[1] if word != first[0]] == [word for word in second[1] if word != second[0]]
    assert (options(first[1])["--num-prompts"], options(first[1])["--max-concurrency"]) == ("8", "4")
    for inside, url in ((tmp_path, CANDIDATE), (tmp_path / BESIDE, BASELINE)):
        assert (inside / "bench-0.json").is_file()
        pages = [(inside / f"metrics-0-{when}.txt").read_text() for when in ("before", "after")]
        assert pages == [f"# page of {url}\n"] * 2
    assert len(commands) == 4, "of repeats, which the report counts"


def test_a_load_alone_has_no_warm_up_of_both(tmp_path: Path, asked: Asked) -> None:
    """What num_warmups asks for is before each repeat, as ever."""
    measure_load(driven(), SETTINGS, tmp_path, lambda *_: None, UNFOLLOWED)
    assert [result for _, _, result in asked] == [None, "bench-1.json", None, "bench-2.json"]


def test_a_server_that_ends_in_a_warm_up_ends_the_other_ones(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def run(bench: Bench, _c: object, _r: object, _log: Path, _s: float, check: Callable[[], None], _p: object) -> None:
        if bench.client.url == BASELINE:
            raise HostError("it broke", "mend it", "load")
        with pytest.raises(HostError, match="broken off"):
            while True:
                check()
        ended.append(bench.client.url)

    monkeypatch.setattr(benches, "run_command", run)
    with pytest.raises(HostError, match="it broke"):
        measure_load(driven(), SETTINGS, tmp_path, lambda *_: None, UNFOLLOWED, driven(BASELINE))
    assert ended == [CANDIDATE]
    assert not asked
