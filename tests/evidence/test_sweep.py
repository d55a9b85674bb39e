"""Sweep: on servers of known capacity the searches agree with an exhaustive grid, and bad evidence gives no number."""

import json
import math
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tests.builders.loads import load_server, read_at_once
from tests.fakes.capacity import Capacity, Document, poisson
from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES, HostSample, Scrape
from vllm_qualify.evidence.load import sweep as sweeps
from vllm_qualify.evidence.load.search import Aim, LevelResult, SloLevel, SweepPlan, next_step, search_step
from vllm_qualify.evidence.load.steady import OverloadError, Requests, UnsteadyError, find_open_window
from vllm_qualify.evidence.load.sweep import ASKED, Swept, measure_sweep, pareto_front, parse_sweep, read_points
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.recipe.gates import Gates
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.metrics import METRICS, Metric
from vllm_qualify.recipe.searches import Sweep

LOAD = Load(input_len=16, output_len=4, max_concurrency=8, num_prompts=40, num_warmups=0, seed=7)
TOKENS = LOAD.output_len
SLO = {"e2el_p50_ms": 121.0}
MOST = 40

Truth = Callable[[float], bool]


def plan_of(slo: dict[str, float], gpus: int = 0, price_usd_gpu_hour: float | None = None, **sweep: Any) -> SweepPlan:
    of = Sweep.model_validate({"slo": slo, "min_duration_s": 4.0} | sweep)
    server = load_server({"max-num-seqs": MOST}, gpus=range(gpus))
    return SweepPlan(sweep=of, load=LOAD, server=server, price_usd_gpu_hour=price_usd_gpu_hour)


def swept(server: Capacity, plan: SweepPlan, folder: Path) -> Swept:
    folder.mkdir(exist_ok=True)
    measure_sweep(server.run, plan, folder)
    return parse_sweep(folder, plan)


def found(level: SloLevel | None) -> float:
    """What a search found; 0 if it has no answer."""
    assert level is not None
    return level.value or 0


# The search alone


def played(
    aim: Aim, meets: Callable[[float], bool | None], before: Sequence[LevelResult] = ()
) -> tuple[SloLevel, list[LevelResult]]:
    """The search's end, and all that it was told."""
    results = list(before)
    while not isinstance(level := search_step(aim, results), SloLevel):
        assert aim.least <= level <= aim.most
        assert len(results) - len(before) < aim.most_runs
        result = meets(level)
        results.append(LevelResult(level, result, invalid_because="a reason" if result is None else None))
    return level, results


def whole(most: int = 256, resolution: float = 0.05, most_runs: int = 40) -> Aim:
    return Aim(1, 1, most, resolution, most_runs, True, "clients")


def rates(first: float, resolution: float = 0.05, most_runs: int = 40) -> Aim:
    return Aim(first, 1e-3, math.inf, resolution, most_runs, False, "req/s")


def runs_needed(span: float, resolution: float) -> float:
    """To double or halve over a span, to bisect a bracket of 2, and to confirm."""
    return abs(math.log2(span)) + 2 + math.log2(max(1.0, math.log(2) / math.log1p(resolution))) + 2


@given(
    most=st.integers(1, 4096),
    threshold=st.integers(0, 5000),
    resolution=st.sampled_from([0.01, 0.05, 0.2, 0.5]),
    measured=st.sets(st.integers(1, 5000), max_size=6),
)
def test_the_most_clients_are_found_to_within_a_step(most: int, threshold: int, resolution: float, measured: set[int]) -> None:
    before = [LevelResult(clients, clients <= threshold, is_new=False) for clients in measured]
    level, results = played(whole(most, resolution), lambda clients: clients <= threshold, before)
    assert len(results) - len(before) <= runs_needed(most, resolution)
    if threshold == 0:
        assert level.invalid_because == "even 1 client missed the SLO"
    elif threshold >= most:
        met = f"{most} client{'s' * (most > 1)} met the SLO"
        assert level == SloLevel(value=most, note=f"{met}, the most that were tried: more may meet it too")
    else:
        assert threshold - max(1, resolution * found(level)) < found(level) <= threshold


@given(threshold=st.floats(0.01, 1000), first=st.floats(0.01, 1000), resolution=st.sampled_from([0.01, 0.05, 0.2, 0.5]))
def test_the_highest_rate_is_found_to_within_a_step(threshold: float, first: float, resolution: float) -> None:
    level, results = played(rates(first, resolution), lambda rate: rate <= threshold)
    assert threshold / (1 + resolution) * (1 - 1e-3) <= found(level) <= threshold
    assert len(results) <= runs_needed(threshold / first, resolution)


@settings(max_examples=300)
@given(data=st.data(), most_runs=st.integers(1, 15), is_whole=st.booleans())
def test_no_answers_lead_to_a_level_that_was_not_confirmed(data: st.DataObject, most_runs: int, is_whole: bool) -> None:
    """Whatever the answers, also those that contradict each other."""
    aim = whole(64, most_runs=most_runs) if is_whole else rates(8.0, most_runs=most_runs)
    level, results = played(aim, lambda _: data.draw(st.sampled_from([True, True, False, False, None])))
    assert len(results) <= most_runs
    shuffled = search_step(aim, data.draw(st.permutations(results)))
    assert isinstance(shuffled, SloLevel)
    assert (shuffled.value, shuffled.note) == (level.value, level.note)
    if level.value is not None:
        at = [each.meets for each in results if each.level == level.value]
        assert at.count(True) >= 2
        assert False not in at
        missed = [each.level for each in results if each.meets is False and each.level > level.value]
        assert not missed or f"{min(missed):g} missed it" in level.note


def test_a_bracket_of_the_curve_saves_runs() -> None:
    before = [LevelResult(32, True, is_new=False), LevelResult(40, False, is_new=False)]
    level, results = played(whole(), lambda clients: clients <= 35, before)
    assert [each.level for each in results[2:]] == [36, 34, 35, 35]
    assert level == SloLevel(value=35, note="35 clients met the SLO, 36 missed it")


def test_what_misses_when_it_is_confirmed_is_no_answer() -> None:
    lucky, before = iter([False]), [LevelResult(16, True, False)]
    level, results = played(whole(32), lambda clients: clients <= 16 and (clients < 16 or next(lucky, False)), before)
    assert [each.level for each in results].count(16) == 2
    assert level == SloLevel(value=15, note="15 clients met the SLO, 16 missed it")


def test_out_of_runs_the_bracket_is_reported() -> None:
    level, results = played(whole(most_runs=9), lambda clients: clients <= 100)
    assert [each.level for each in results] == [1, 2, 4, 8, 16, 32, 64, 64, 128]
    assert level == SloLevel(value=64, note="64 clients met the SLO, 128 missed it; 9 runs were not enough to come nearer")


@pytest.mark.parametrize(
    ("most_runs", "answers", "message"),
    [
        (1, [True], "1 runs were not enough: 1 client met the SLO in one run, which nothing confirmed"),
        (2, [True, False], "even 1 client missed the SLO"),
        (9, [False], "even 1 client missed the SLO"),
        (9, [True, True, None, None], "2 runs at 4 clients were invalid: a reason; 2 clients met the SLO"),
        (2, [None, None], "2 runs at 1 client were invalid: a reason"),
        (1, [None], "1 runs were not enough: none was valid"),
    ],
)
def test_without_enough_there_is_no_answer(most_runs: int, answers: list[bool | None], message: str) -> None:
    results = iter(answers)
    level, _ = played(whole(most_runs=most_runs), lambda _: next(results))
    assert level == SloLevel(invalid_because=message)


def test_an_invalid_run_is_made_once_more() -> None:
    answers = iter([None, True])
    level, results = played(whole(1), lambda _: next(answers, True))
    assert [each.meets for each in results] == [None, True, True]
    assert level.value == 1


# The curve


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12))
def test_the_front_is_what_nothing_betters(points: list[tuple[float, float]]) -> None:
    front = [point for point, is_on in zip(points, pareto_front(points), strict=True) if is_on]
    assert bool(front) == bool(points)
    for point in points:
        betters = [each for each in points if each[0] >= point[0] and each[1] >= point[1] and each != point]
        assert (point in front) == (not betters)


def test_the_curve_is_that_of_the_server(tmp_path: Path) -> None:
    server, plan = Capacity(0.01, 0.001, slots=16), plan_of({}, gpus=2, concurrencies=[1, 4, 16, 32])
    sweep = swept(server, plan, tmp_path)
    assert [point.clients for point in sweep.curve] == [1, 4, 16, 32]
    for point in sweep.curve:
        step_s = 0.01 + 0.001 * min(point.clients, 16)
        assert point.tok_s_per_user == pytest.approx(1 / step_s, rel=0.01)
        assert point.output_tok_s_per_gpu == pytest.approx(min(point.clients, 16) / step_s / 2, rel=0.02)
    assert [point.is_on_front for point in sweep.curve[:2]] == [True, True]
    assert (sweep.curve_problems, sweep.concurrency, sweep.request_rate) == ([], None, None)
    assert sweeps.sweep_measurements(sweep, plan) == []


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_users_speed_does_not_follow_from_what_was_read_at_once(tmp_path: Path, first: int) -> None:
    """Of three gaps."""
    sweep = swept(Capacity(change=lambda result: read_at_once(result, first)), plan_of({}, concurrencies=[4]), tmp_path)
    assert [point.tok_s_per_user for point in sweep.curve] == [pytest.approx(1 / 0.014, rel=0.01)]
    assert ("itl_p50_ms" in sweep.points[-1].untold) == (first > 0)


def test_a_point_whose_replies_came_in_one_piece_has_no_speed_and_says_so(tmp_path: Path) -> None:
    server = Capacity(change=lambda result: read_at_once(result, 3))
    sweep = swept(server, plan_of(SLO, search=["concurrency"], concurrencies=[4], min_duration_s=1.0), tmp_path)
    assert sweep.curve == []
    (message,) = sweep.curve_problems
    assert re.match("4 clients: 0 of .*the others came in one read: give the client a core", message)
    # Its other figures are there, and what is searched by them is found.
    measured = next(point for point in sweep.points if point.asked.level == 4 and point.figures)
    assert measured.figures["request_throughput_req_s"] == pytest.approx(4 / 0.014 / TOKENS, rel=0.02)
    assert found(sweep.concurrency) == 20


@pytest.mark.parametrize("name", ["tpot_p50_ms", "itl_p50_ms"])
def test_an_slo_on_the_time_between_tokens_is_not_met_by_reading_them_at_once(tmp_path: Path, name: str) -> None:
    server = Capacity(change=lambda result: read_at_once(result | {"request_goodput": result["request_throughput"]}, 3))
    level = swept(server, plan_of({name: 1.0}, search=["concurrency"]), tmp_path).concurrency
    assert not found(level)
    assert re.search("invalid_because=.*(read at once|came in one read)", str(level))


def test_too_short_a_point_is_run_once_more_by_its_rate_and_a_missing_one_is_reported(tmp_path: Path) -> None:
    server, plan = Capacity(), plan_of({}, concurrencies=[2])
    sweep = swept(server, plan, tmp_path)
    first, second = sweep.points
    assert (first.folder, second.folder) == ("concurrency-2", "concurrency-2-again")
    assert first.invalid_because == "it lasted 0.2 s, under min_duration_s 4: use more num_prompts"
    assert second.figures
    assert [load.num_prompts for load in server.runs] == [10, math.ceil(1.25 * 4 * 2 / (4 * 0.012))]
    assert sweep.curve_problems == []
    more = plan_of({}, concurrencies=[2, 4])
    assert [point.clients for point in parse_sweep(tmp_path, more).curve] == [2]
    assert parse_sweep(tmp_path, more).curve_problems == ["4 clients: they were not measured"]
    assert next_step(more, read_points(tmp_path, more)) == ("curve", 4)


# Both searches, on servers whose capacity a grid shows


def figure(times: list[list[float]], name: str) -> float:
    latency = {"ttft": lambda each: each[1] - each[0], "tpot": lambda each: (each[-1] - each[1]) / (TOKENS - 1)}
    of = [latency.get(name.split("_")[0], lambda each: each[-1] - each[0])(each) for each in times]
    quantile = METRICS[name].quantile
    return 1000 * float(np.mean(of) if quantile is None else np.percentile(of, 100 * quantile))


def at_clients(server: Capacity, clients: int, name: str) -> float:
    times = server.answer(LOAD.model_copy(update={"max_concurrency": clients}), [0.0] * clients, 12 * clients)
    return figure(times[3 * clients : 10 * clients], name)


def at_rate(server: Capacity, rate: float, name: str) -> float:
    """Infinite where latencies go on to rise."""
    count = 2000
    times = server.answer(LOAD, poisson(count, rate, 1), count)
    latencies = [each[-1] - each[0] for each in times]
    rises = np.mean(latencies[1000:1800]) > 1.5 * np.mean(latencies[200:1000])
    return math.inf if rises else figure(times[200:1800], name)


def a_server(seed: int) -> tuple[Capacity, dict[str, float], int]:
    """A server, an SLO that it meets up to some number of clients, and that number, from a grid of all of them."""
    chance = random.Random(seed)
    server = Capacity(chance.uniform(0.005, 0.03), chance.uniform(0.0005, 0.003), chance.choice([8, 24, 1000]))
    name = chance.choice(["ttft_p50_ms", "tpot_p90_ms", "e2el_mean_ms", "e2el_p90_ms"])
    at = [at_clients(server, clients, name) for clients in range(1, MOST + 2)]
    bound = chance.uniform(1.002, 1.3) * at[chance.randrange(MOST)]
    return server, {name: bound}, max(clients for clients in range(1, MOST + 1) if at[clients - 1] <= bound)


@pytest.mark.thorough
def test_the_most_clients_agree_with_a_grid(tmp_path: Path) -> None:
    for seed in range(12):
        server, slo, most = a_server(seed)
        curve_at = random.Random(seed).choice([[], [1, 4, 16], [8], [32]])
        plan = plan_of(slo, search=["concurrency"], concurrencies=curve_at, most_runs=20)
        level = swept(server, plan, tmp_path / str(seed)).concurrency
        assert abs(found(level) - most) <= max(1, 0.05 * most), (seed, slo, most, level)
        assert found(level), (seed, level)


@pytest.mark.thorough
def test_with_noise_the_most_clients_agree_with_a_grid_most_of_the_time(tmp_path: Path) -> None:
    """Noise of 5 % in the steps; the SLO halfway between two numbers of clients. Measured: 40 of 40 to within a step."""
    near = 0
    for seed in range(15):
        chance = random.Random(seed)
        server, most = Capacity(chance.uniform(0.005, 0.02), chance.uniform(0.001, 0.003)), chance.randint(2, 30)
        slo = {"tpot_p50_ms": (at_clients(server, most, "tpot_p50_ms") + at_clients(server, most + 1, "tpot_p50_ms")) / 2}
        server.noise = 0.05
        level = swept(server, plan_of(slo, search=["concurrency"], concurrencies=[4, 16]), tmp_path / str(seed)).concurrency
        near += found(level) > 0 and abs(found(level) - most) <= max(1, 0.05 * most)
    assert near >= 13


@pytest.mark.thorough
def test_the_highest_rate_agrees_with_a_grid_most_of_the_time(tmp_path: Path) -> None:
    """Requests come by chance, in each run otherwise. Measured: 9 of 12 to within a step and the grid's, and none above."""
    near = 0
    for seed in range(4):
        server, slo, _ = a_server(seed)
        ((name, bound),) = slo.items()
        highest = 1.0
        while at_rate(server, highest * 1.03, name) <= bound:
            highest *= 1.03
        plan = plan_of(slo, search=["request_rate"], concurrencies=[16], resolution=0.1, min_duration_s=10.0)
        rate = found(swept(server, plan, tmp_path / str(seed)).request_rate)
        near += highest / 1.13 <= rate
        assert rate <= highest * 1.13
    assert near >= 3


# Requests that are sent at a rate


def sent(server: Capacity, rate: float, count: int = 600, seed: int = 3) -> Requests:
    times = server.answer(LOAD, poisson(count, rate, seed), count)
    gaps = [np.diff(each[1:]) for each in times]
    starts, ttfts = np.array([each[0] for each in times]), np.array([each[1] - each[0] for each in times])
    return Requests(starts, ttfts, gaps, np.full(count, 16.0), np.full(count, 4.0))


# It answers 8 requests in 4 steps of 20 ms: 100 a second.
SMALL = Capacity(0.012, 0.001, slots=8)


@pytest.mark.parametrize("share", [1.2, 1.5, 3.0])
def test_a_rate_above_capacity_is_recognized(share: float) -> None:
    for seed in range(10):
        with pytest.raises(OverloadError, match="took ever longer"):
            find_open_window(sent(SMALL, 100 * share, seed=seed))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.7])
def test_a_rate_below_capacity_has_a_window_with_half_of_its_requests(share: float) -> None:
    for seed in range(20):
        window = find_open_window(sent(SMALL, 100 * share, seed=seed))
        assert 300 <= window.count < 600
        assert window.count / window.length_s == pytest.approx(100 * share, rel=0.2)
        ended = window.requests.starts[: window.last] + window.requests.latencies[: window.last]
        assert max(ended) <= window.requests.starts[-1]


def test_long_requests_are_no_overload() -> None:
    """As many are sent before the first ends as a third of all: more and more are under way, at the same speed."""
    count = 600
    starts = np.cumsum(np.random.default_rng(0).exponential(0.1, count))
    noise = np.random.default_rng(1).normal(0, 0.3, count)
    gaps = [np.full(3, (20 + each) / 3) for each in noise]
    requests = Requests(starts, np.full(count, 0.1), gaps, np.full(count, 16.0), np.full(count, 4.0))
    assert find_open_window(requests).last == pytest.approx(400, abs=40)
    with pytest.raises(UnsteadyError, match="of 600 requests were sent before the first that outlived the sending"):
        find_open_window(replace(requests, gaps=[gap * 2 for gap in gaps]))


def test_a_rate_needs_the_starts() -> None:
    requests = sent(SMALL, 30.0)
    with pytest.raises(UnsteadyError, match="does not record when each request started"):
        find_open_window(replace(requests, rebuilt=True))
    for start in (math.nan, math.inf, 0.0):
        with pytest.raises(UnsteadyError, match="are no times"):
            find_open_window(replace(requests, starts=np.full(600, start)))


# What is read from files


PLAN = plan_of(SLO | {"tpot_p90_ms": 40.0}, gpus=2, price_usd_gpu_hour=3.6, concurrencies=[4, 16], min_duration_s=1.0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    measure_sweep(Capacity(0.01, 0.001).run, PLAN, folder)
    return folder


@pytest.fixture
def folder(measured: Path, tmp_path: Path) -> Path:
    return shutil.copytree(measured, tmp_path / "sweep")


def by_metric(folder: Path, plan: SweepPlan = PLAN) -> dict[str, Measurement]:
    return {each.metric: each for each in sweeps.sweep_measurements(parse_sweep(folder, plan), plan)}


def test_the_measurements_are_those_at_the_concurrency_found(measured: Path) -> None:
    rows, clients = by_metric(measured), 20
    # Of 20 clients four steps take 120 ms, of 21 they take 124.
    assert rows["slo_concurrency_req"].value == clients
    assert rows["slo_concurrency_req"].source == "sweep/: 20 clients met the SLO, 21 missed it"
    assert rows["slo_goodput_req_s"].value == pytest.approx(clients / 0.12, rel=0.01)
    assert rows["slo_cost_usd_mtok"].value == pytest.approx(2 * 3.6 / 3600 / (clients / 0.03) * 1e6, rel=0.01)
    assert rows["slo_cost_usd_mtok"].unit == "usd/Mtok"
    assert all(each.traced_to and each.sample_count for each in rows.values())
    folders = ("concurrency-20", "concurrency-20-again")
    assert rows["slo_concurrency_req"].traced_to == [f"sweep/{name}/bench-1.json:1" for name in folders]
    assert "slo_cost_usd_mtok" not in by_metric(measured, PLAN.model_copy(update={"price_usd_gpu_hour": None}))


def test_every_run_has_another_seed_and_enough_prompts(measured: Path) -> None:
    points = read_points(measured, PLAN)
    assert len({point.asked.load.seed for point in points} | set(range(7, 17))) == len(points) + 10
    assert all(point.asked.load.num_prompts >= max(88, 5 * point.asked.load.max_concurrency) for point in points)


def test_a_sweep_goes_on_where_it_was_interrupted(folder: Path) -> None:
    server = Capacity(0.01, 0.001)
    measure_sweep(server.run, PLAN, folder)
    assert server.runs == []
    shutil.rmtree(folder / "concurrency-20-again")
    assert "not finished: 20 clients would be next" in (by_metric(folder)["slo_concurrency_req"].invalid_because or "")
    measure_sweep(server.run, PLAN, folder)
    assert [(load.max_concurrency, load.request_rate) for load in server.runs] == [(20, None)]


@pytest.mark.parametrize("name", ["bench-1.json", "metrics-1-before.txt", "metrics-1-after.txt"])
@pytest.mark.parametrize("share", [None, 0.0, 0.5])
def test_a_missing_or_cut_file_leaves_no_number(folder: Path, name: str, share: float | None) -> None:
    path = folder / "concurrency-20-again" / name
    text = path.read_text()
    path.unlink()
    if share is not None:
        path.write_text(text[: int(len(text) * share)])
    rows = by_metric(folder)
    assert [rows[f"slo_{metric}"].value for metric in ("concurrency_req", "goodput_req_s", "cost_usd_mtok")] == [None] * 3


@pytest.mark.parametrize("text", [None, "", "{}", "null"])
def test_points_that_cannot_be_distinguished_leave_no_number(folder: Path, text: str | None) -> None:
    path = folder / "concurrency-4" / ASKED
    path.unlink()
    if text is not None:
        path.write_text(text)
    for each in by_metric(folder).values():
        assert (each.invalid_because or "").startswith("the points cannot be distinguished")
    shutil.rmtree(folder)
    assert [each.value for each in by_metric(folder).values()] == [None] * 4, "without a folder"
    folder.mkdir()
    assert [each.value for each in by_metric(folder).values()] == [None] * 4, "without a point"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"failed": 1}, "1 failed"),
        ({"duration": math.nan}, "it lasted nan s"),
        ({"output_lens": []}, "0 lengths of"),
        ({"p90_tpot_ms": math.nan}, "bench's own figure contradicts its requests"),
        ({"max_concurrency": 3}, "bench had max_concurrency 3"),
        ({"request_rate": 7.0}, "bench had request_rate 7.0"),
        ({}, "2 preemptions"),
    ],
)
def test_bad_runs_leave_no_number(tmp_path: Path, fields: Document, message: str) -> None:
    server = Capacity(change=lambda result: result | fields, preemptions=0 if fields else 2)
    sweep = swept(server, PLAN, tmp_path)
    assert all(message in (point.invalid_because or "") for point in sweep.points)
    assert sweep.curve == []
    assert [each.value for each in sweeps.sweep_measurements(sweep, PLAN)] == [None] * 4
    # Two at each of the curve's points, and two of the search over concurrency; that over the rate has nothing to begin with.
    assert len(server.runs) == 6


# What was watched


WATCHED = plan_of(SLO, search=["concurrency"], most_runs=20).model_copy(update={"watched": True})
Blind = Callable[[Load], bool]


class Observed:
    """A server of known capacity, each run of which is sampled as a real one is, but for those that `is_blind` names."""

    def __init__(self, folder: Path, is_blind: Blind, waiting: float = 0.0) -> None:
        self.server, self.is_blind, self.waiting, self.now = Capacity(0.01, 0.001), is_blind, waiting, 1e9
        self.stage, self.serve = folder / "sweep", folder / "serve"
        self.stage.mkdir()
        self.serve.mkdir()
        for name in (SCRAPES, HOST_SAMPLES):
            (self.serve / name).touch()

    def run(self, load: Load, folder: Path) -> None:
        self.server.run(load, folder)
        began, lasted = self.now, json.loads((folder / "bench-1.json").read_text())["duration"]
        self.now += lasted + 1
        (folder / "client-1.json").write_text(json.dumps({"cpu_s": [[began, 0.0], [began + lasted, 0.1]], "max_rss_mib": 100}))
        for second in range(0 if self.is_blind(load) else math.ceil(lasted)):
            self.sample(began + second)

    def sample(self, time: float) -> None:
        values = {"vllm:num_requests_running": 4.0, "vllm:num_requests_waiting": self.waiting}
        samples = {
            SCRAPES: Scrape(time=time, values=values),
            HOST_SAMPLES: HostSample(time=time, cpu_share=0.5, load_1min=1.0, memory_available_mib=1e4),
        }
        for name, sample in samples.items():
            with (self.serve / name).open("a") as file:
                file.write(f"{sample.model_dump_json()}\n")

    def level(self) -> SloLevel | None:
        measure_sweep(self.run, WATCHED, self.stage)
        return parse_sweep(self.stage, WATCHED).concurrency


@pytest.mark.parametrize("waiting", [0.0, 12.0])
def test_a_sweep_that_was_watched_finds_the_same_also_if_requests_wait(waiting: float, tmp_path: Path) -> None:
    observed = Observed(tmp_path, lambda _: False, waiting)
    assert found(observed.level()) == 20
    # Samples that were lost afterwards leave no number, nor does a client of which nothing is known.
    (observed.serve / SCRAPES).unlink()
    assert "what was watched during the load cannot be read" in str(parse_sweep(observed.stage, WATCHED).concurrency)
    for client in observed.stage.glob("*/client-1.json"):
        client.unlink()
    assert "it is not known when its client was busy" in str(parse_sweep(observed.stage, WATCHED).concurrency)


def test_a_run_that_nobody_watched_is_no_answer(tmp_path: Path) -> None:
    observed = Observed(tmp_path, lambda load: load.max_concurrency == 20)
    level = observed.level()
    assert not found(level)
    assert "2 runs at 20 clients were invalid" in str(level)
    assert "the server's metrics were read only 0 of" in str(level)
    assert [each.meets_slo for each in read_points(observed.stage, WATCHED) if each.asked.level == 20] == [None, None]


def test_a_limit_beside_the_rate_leaves_no_rate(tmp_path: Path) -> None:
    server = Capacity(change=lambda result: result | ({} if result["request_rate"] == "inf" else {"max_concurrency": 1}))
    measure_sweep(server.run, PLAN, tmp_path)
    rows = by_metric(tmp_path)
    assert rows["slo_concurrency_req"].value is not None
    assert "bench had max_concurrency 1, not None" in (rows["slo_request_rate_req_s"].invalid_because or "")


def test_replies_of_one_token_do_not_meet_a_bound_on_their_speed(tmp_path: Path) -> None:
    plan = plan_of({"tpot_p50_ms": 1.0}, search=["concurrency"], min_duration_s=0.5)
    plan = plan.model_copy(update={"load": LOAD.model_copy(update={"output_len": 1})})
    level = swept(Capacity(), plan, tmp_path)
    assert "its replies show no tpot_p50_ms" in str(level.concurrency)


def test_a_load_that_was_changed_afterwards_leaves_no_number(folder: Path) -> None:
    path = folder / "concurrency-20-again" / ASKED
    asked = json.loads(path.read_text())
    asked["load"]["input_len"] = 8
    path.write_text(json.dumps(asked))
    assert by_metric(folder)["slo_concurrency_req"].value is None


@pytest.mark.parametrize(
    "metric", [metric for metric in METRICS.values() if metric.stage == "sweep"], ids=lambda each: each.name
)
def test_what_a_search_finds_is_no_gate(metric: Metric) -> None:
    bound = "minimum" if metric.direction == "higher" else "maximum"
    with pytest.raises(ValidationError, match=r"set load\.max_concurrency to the number wanted, and gate the latencies there"):
        TypeAdapter(Gates).validate_python([{"metric": metric.name, bound: 1.0, "unit": metric.unit}])
