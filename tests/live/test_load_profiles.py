"""Loads of every form on the real engine: shared servers, sweeps, chats, drafts, fits, and what makes a load invalid.

Each recipe is qualified once, with loads as small as they can be and still have a steady state; many tests look at it.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builders.load_profiles import LOAD, Qualify, counted, measured, runs_of
from tests.live import driver
from tests.qualified import DISTURBED, Qualified, processes_of, undisturbed
from tests.recipes import Document
from vllm_qualify.evidence.load.ended import ENDED, Ended
from vllm_qualify.evidence.load.fitting import Tried
from vllm_qualify.evidence.startup import kv_cache
from vllm_qualify.publish.bundle import Manifest
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.metrics import PATH_METRICS
from vllm_qualify.report.model import Report, load_report

pytestmark = pytest.mark.engine

# Tokens in a block of the CPU engine's KV cache.
BLOCK_TOK = 128
CHAT_TEMPLATE = "{% for message in messages %}Question: {{ message['content'] }}\nAnswer:{% endfor %}"
# Loads of seconds may rightly not count on a busy machine, which is looked at too seldom: they are gated only where it is asked
# why a load does not count.
GATES = [{"metric": "output_throughput_tok_s", "minimum": 1, "unit": "tok/s"}]


def only_profile(document: Document, load: Document, **others: Any) -> Document:
    """The recipe's only profile, with this load over LOAD."""
    profile: Document = {"server": {"max-num-seqs": 8}, "load": LOAD | load, "paths": False, **others}
    document["gpu_types"]["cpu"]["profiles"] = {"balanced": profile}
    return profile


def value_of(report: Report, stage: str, metric: str) -> float:
    """Of a measurement that is valid."""
    measurement = measured(report, stage)[metric]
    assert measurement.invalid_because is None, measurement.invalid_because
    assert measurement.value is not None
    return measurement.value


def evidence_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, without the states of processes, which are no evidence."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".state"
    }


# Profiles that share a server.


def three_profiles(document: Document, folder: Path) -> None:
    template, prompts = folder / "chat.jinja", folder / "prompts.jsonl"
    template.write_text(CHAT_TEMPLATE)
    questions = Path(document["accuracy"][0]["questions"]["shots"]).read_text().splitlines()
    asked = [f"{json.loads(line)['question']} ({number})" for number in range(4) for line in questions]
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in asked))
    slo = {"ttft_p50_ms": 60_000, "e2el_p50_ms": 60_000}
    sweep = {"concurrencies": [1, 2, 4], "slo": slo, "most_concurrency": 4}
    shared = {"max-num-seqs": 32, "chat-template": str(template)}
    of_file = {name: value for name, value in LOAD.items() if name != "input_len"}
    document["gpu_types"]["cpu"] |= {
        "warm_starts": 1,
        "price_usd_gpu_hour": 2.5,
        "profiles": {
            "ranged": {
                "server": shared,
                "load": LOAD | {"length_spread": 0.5},
                "sweep": sweep | {"resolution": 0.5, "most_runs": 6, "min_duration_s": 1},
            },
            "chat": {"server": shared, "load": of_file | {"prompts": str(prompts), "api": "chat"}, "paths": False},
            "hurried": {
                "server": shared,
                "paths": False,
                "load": LOAD | {"max_concurrency": 1, "num_prompts": 20, "window": "whole", "time_budget_s": 0.1},
            },
        },
    }


@pytest.fixture(scope="module")
def profiles(qualify: Qualify) -> Qualified:
    return qualify(three_profiles)


@pytest.fixture(scope="module")
def folders(profiles: Qualified) -> dict[str, Path]:
    """The folder of each cell's run, by its profile."""
    assert profiles.done.returncode == 0, profiles.done.stdout + profiles.done.stderr
    by_profile = {json.loads((folder / "plan.json").read_text())["cell"]["profile"]: folder for folder in runs_of(profiles)}
    assert sorted(by_profile) == ["chat", "hurried", "ranged"]
    return by_profile


def test_every_profile_is_approved_and_published_whole(profiles: Qualified, folders: dict[str, Path]) -> None:
    store = open_store(profiles.store)
    for folder in folders.values():
        report = load_report(folder)
        assert report.passed
        manifest = Manifest.model_validate_json(store.get(f"{report.prefix}/manifest.json"))
        assert manifest.outcome == "passed"
        assert {stored.key for stored in manifest.objects} <= set(store.keys(""))
    assert processes_of(profiles.home) == []


def test_paths_that_nobody_asked_for_are_judged_where_they_can_be_proven(folders: dict[str, Path]) -> None:
    """This server has no prefix cache, which no gate on a path makes it lose the approval for."""
    report = load_report(folders["ranged"])
    judged = {gate.gate.metric: gate.verdict for gate in report.judgement.gates if gate.gate.metric in PATH_METRICS}
    assert judged == dict.fromkeys(("path_cold", "path_concurrent", "path_aborted"), "pass")
    assert [gate.metric for gate in report.judgement.not_judged] == ["path_cached", "path_evicted"]
    page = (folders["ranged"] / "report.html").read_text()
    assert "leave this path out where the cache is off" in page
    assert "paths" not in {stage.stage for stage in load_report(folders["chat"]).stages}


def test_profiles_with_the_same_server_share_its_one_start(folders: dict[str, Path]) -> None:
    logs = {profile: (folder / "evidence/serve/server.log").read_bytes() for profile, folder in folders.items()}
    assert logs["ranged"] == logs["chat"] == logs["hurried"]
    first, *others = (evidence_of(folder / "evidence/serve") for folder in folders.values())
    for other in others:
        assert first.keys() == other.keys()
        assert all(first[name] == other[name] for name in first if name != "machine.json")


def test_the_accuracy_of_a_shared_server_is_asked_once(folders: dict[str, Path]) -> None:
    first, *others = (evidence_of(folder / "evidence/accuracy") for folder in folders.values())
    assert any(name.startswith("gsm8k/r1-b1/samples_") for name in first)
    assert all(other == first for other in others)


def test_the_workloads_are_those_of_the_recipe(folders: dict[str, Path]) -> None:
    ranged, chat = (json.loads((folders[name] / "evidence/load/bench-1.json").read_text()) for name in ("ranged", "chat"))
    assert len(set(ranged["input_lens"])) > 1
    assert set(ranged["output_lens"]) <= set(range(12, 37))
    assert min(ranged["output_lens"]) < 24 < max(ranged["output_lens"])
    assert set(chat["output_lens"]) == {24}
    # around a prompt of the file the template puts what this model was trained on, so that it answers the question
    assert sum("<<" in text for text in chat["generated_texts"]) > 20
    report = load_report(folders["chat"])
    (commands,) = (stage.commands for stage in report.stages if stage.stage == "load")
    assert all("/v1/chat/completions" in command for command in commands)
    assert "POST /v1/chat/completions" in (folders["chat"] / "evidence/serve/server.log").read_text()


def test_a_sweep_finds_the_most_that_meets_its_slo(folders: dict[str, Path]) -> None:
    report = load_report(folders["ranged"])
    swept, measurements = report.details.sweep, measured(report, "sweep")
    assert swept is not None
    lacking = {int(problem.split()[0]) for problem in swept.curve_problems}
    assert {point.clients for point in swept.curve} | lacking == {1, 2, 4}
    unexpected = [problem for problem in swept.curve_problems if not any(words in problem for words in DISTURBED)]
    assert unexpected == []
    assert any(point.is_on_front for point in swept.curve) == bool(swept.curve)
    rate = measurements["slo_request_rate_req_s"]
    met = [point.asked.level for point in swept.points if point.asked.is_open and point.meets_slo]
    if rate.value is not None:
        assert met.count(rate.value) >= 2
    elif "6 runs were not enough" in (rate.invalid_because or ""):
        # a machine that slows down on the way may make a rate miss that was met before
        assert [point.asked.is_open for point in swept.points].count(True) == 6
    else:
        assert not undisturbed(rate)
    if undisturbed(measurements["slo_concurrency_req"]):
        assert measurements["slo_concurrency_req"].value == 4
        # at four clients all requests were in time
        goodput = value_of(report, "sweep", "slo_goodput_req_s")
        at_four = [point for point in swept.points if not point.asked.is_open and point.asked.level == 4 and point.figures]
        rates = [point.figures["request_throughput_req_s"] for point in at_four]
        assert min(rates) <= goodput <= max(rates)


def test_a_price_gives_what_a_million_tokens_cost(folders: dict[str, Path]) -> None:
    report = load_report(folders["ranged"])
    cost = measured(report, "sweep")["slo_cost_usd_mtok"]
    assert report.details.sweep is not None
    rates = [point.figures["output_throughput_tok_s"] for point in report.details.sweep.points if point.figures]
    if undisturbed(cost):
        assert 2.5 / 3600 * 1e6 / max(rates) <= (cost.value or 0) <= 2.5 / 3600 * 1e6 / min(rates)


def test_a_start_is_reported_in_parts_and_made_again(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        report = load_report(folder)
        whole_s = value_of(report, "serve", "startup_s")
        parts = [value_of(report, "serve", f"startup_{part}_s") for part in ("process", "weights", "ready")]
        # the log's clock is in whole seconds
        assert sum(parts) == pytest.approx(whole_s, abs=2)
        assert "enforce-eager" in (measured(report, "serve")["startup_compile_s"].invalid_because or "")
        warm = measured(report, "serve")["startup_warm_s"]
        assert len(warm.repeats) == 1
        assert value_of(report, "serve", "startup_warm_s") > 0
        assert report.details.startup is not None
        assert report.details.startup.startup_s == whole_s


def test_what_was_watched_is_evidence_of_each_cell(folders: dict[str, Path]) -> None:
    reports = [load_report(folder) for folder in folders.values()]
    for report in reports:
        paths = {file.path for file in report.files}
        assert {"serve/server-metrics.jsonl", "serve/host.jsonl", "serve/warm-1/server.log"} <= paths
        if report.details.course is None:
            # on a busy machine no sample, or one alone, may come in a load of a second
            assert any("sample of it" in note for note in report.details.notes), report.details.notes
            continue
        # the samples may all lie between two of so short requests, but what was generated between two of them is told
        assert max(rate or 0 for rate in report.details.course.output_tok_s) > 0
        assert report.details.notes == []
    assert any(report.details.course for report in reports)


def test_the_page_has_a_section_for_what_a_profile_has(folders: dict[str, Path]) -> None:
    pages = {name: (folder / "report.html").read_text() for name, folder in folders.items()}
    sections = {name: set(re.findall(r'<h2 id="([a-z]+)"', page)) for name, page in pages.items()}
    assert {"course", "sweep", "startup"} <= sections["ranged"]
    assert {"course", "startup"} <= sections["chat"]
    assert not {"sweep", "speculation", "fit"} & sections["chat"]


def test_a_load_ends_at_its_budget_and_says_what_it_takes(profiles: Qualified, folders: dict[str, Path]) -> None:
    evidence = folders["hurried"] / "evidence/load"
    assert sorted(path.name for path in evidence.glob("bench-*.json")) == ["bench-1.json"]
    ended = Ended.model_validate_json((evidence / ENDED).read_bytes())
    assert ended.repeats == 1
    expected = profiles.done.stdout + profiles.done.stderr
    assert "load: 2 repeats; the first one will show how long they take, and by time_limit_s up to" in expected
    assert f"load: {ended.because}" in expected
    report = load_report(folders["hurried"])
    throughput = measured(report, "load")["output_throughput_tok_s"]
    assert throughput.source.endswith("over whole runs with their ramp-up and tail")
    assert throughput.interval is None
    if undisturbed(throughput):
        assert throughput.ended_because == ended.because
    assert "It took 1 repeat, " in (folders["hurried"] / "report.html").read_text()


# Speculative decoding.


# As on a machine that has no room for the server without it beside it.
BY = (sys.executable, driver.__file__, "in-turn:plan")


@pytest.fixture(scope="module")
def drafting(qualify: Qualify) -> Report:
    load = {"input_len": 32, "output_len": 16, "num_prompts": 20}
    qualified = qualify(lambda document, _: only_profile(document, load), "--variant", "draft", by=BY)
    assert qualified.done.returncode == 0, qualified.done.stdout + qualified.done.stderr
    assert processes_of(qualified.home) == []
    return qualified.report


def test_a_draft_is_compared_with_the_server_without_it(drafting: Report) -> None:
    logs = [Path(file.path) for file in drafting.files if file.path.endswith("/server.log")]
    assert {log.parts[1] for log in logs if log.parts[0] == "speculation"} == {"start-1", "start-2", "start-3"}
    assert {gate.verdict for gate in drafting.judgement.gates} == {"pass"}
    accepted = measured(drafting, "speculation")["acceptance_length_batch1_tok"]
    if undisturbed(accepted):
        assert 1 < (accepted.value or 0) <= 4
    gained = {measurement.metric: measurement for measurement in drafting.details.speedups}
    for metric in ("speculative_speedup", "speculative_speedup_batch1"):
        if undisturbed(gained[metric]):
            assert gained[metric].interval is not None
            assert (gained[metric].value or 0) > 0
    for load in ("batch1", "profile"):
        sides = {Path(file.path).parts[2] for file in drafting.files if file.path.startswith(f"speculation/{load}/")}
        assert len(sides) == 2


def test_a_draft_changes_no_text(drafting: Report) -> None:
    assert value_of(drafting, "speculation", "speculative_same_text") == 1.0
    speculation = drafting.details.speculation
    assert speculation is not None
    assert speculation.texts is not None
    assert speculation.texts.same_count == len(speculation.texts.parts_at) == 9


def test_the_acceptance_is_reported_by_position(drafting: Report) -> None:
    speculation = drafting.details.speculation
    assert speculation is not None
    for each in (speculation.greedy, speculation.batch1, speculation.profile):
        assert each.invalid_because is None
        assert len(each.rates) == 3
        assert 1 >= each.rates[0] >= each.rates[1] >= each.rates[2] >= 0
        assert each.length_tok == pytest.approx(1 + sum(each.rates))
    assert [speculation.batch1.max_concurrency, speculation.profile.max_concurrency] == [1, 4]


# What the machine itself decides.


def few_blocks(document: Document, blocks: int) -> None:
    """A KV cache of so many blocks; VLLM_CPU_KVCACHE_SPACE takes no less than 1 GiB, which is over a thousand of them."""
    document["gpu_types"]["cpu"]["server"]["num-gpu-blocks-override"] = blocks


def to_be_fitted(document: Document, _folder: Path) -> None:
    few_blocks(document, 32)
    # Sizes of a batch are compared in tests/evidence/test_fitting.py: each would be one more start here.
    fit = {"max_num_seqs": True}
    # 250 tokens: two blocks of the CPU engine, for long enough to be looked at also where it is busy
    profile = only_profile(document, {"input_len": 180, "output_len": 70, "repeats": 1, "most_repeats": 1}, server={}, fit=fit)
    del profile["load"]["max_concurrency"], profile["load"]["num_prompts"]


@pytest.fixture(scope="module")
def fitted(qualify: Qualify) -> Qualified:
    return qualify(to_be_fitted)


def test_a_fit_finds_what_the_kv_cache_holds(fitted: Qualified) -> None:
    assert fitted.done.returncode == 0, fitted.done.stdout + fitted.done.stderr
    tried = Tried.model_validate_json((fitted.folder / "evidence/fit/found.json").read_bytes())
    # two blocks each, of 32 without vLLM's own
    assert tried.found == {"max-num-seqs": 15}
    assert len(tried.tries) == 2
    for number, each in enumerate(tried.tries, start=1):
        cache = kv_cache((fitted.folder / f"evidence/fit/try-{number}/server.log").read_text())
        assert cache is not None
        assert cache.tokens == each.kv_cache_tok == 32 * BLOCK_TOK
        assert each.failed_because is None


def test_the_plan_follows_what_was_found(fitted: Qualified) -> None:
    plan = fitted.report.plan
    tried = fitted.report.details.fit
    assert tried is not None
    assert tried.found.items() <= plan.server.arguments.items()
    assert plan.load.max_concurrency == tried.found["max-num-seqs"]
    assert plan.load.num_prompts == 5 * plan.load.max_concurrency
    served = (fitted.folder / "evidence/serve/server.yaml").read_text()
    assert f"max-num-seqs: {plan.load.max_concurrency}" in served
    assert '<h2 id="fit"' in (fitted.folder / "report.html").read_text()


# What makes a load invalid.


def to_be_invalid(document: Document, folder: Path) -> None:
    """One server that remembers prompts: it has room for 7 of a load's 10 requests, and for prompts that begin alike."""
    same = folder / "same.jsonl"
    same.write_text(f"{json.dumps({'prompt': 'How many pens does Ada have? ' * 40})}\n" * 40)
    options = document["gpu_types"]["cpu"]["server"]
    del options["no-enable-prefix-caching"]
    few_blocks(document, 32)
    once = {"repeats": 1, "most_repeats": 1}
    document["gpu_types"]["cpu"]["profiles"] = {
        "crowded": {
            "server": {"max-num-seqs": 16},
            "paths": False,
            "load": LOAD | {"input_len": 300, "output_len": 100, "max_concurrency": 10, "num_prompts": 50} | once,
            "gates": GATES,
        },
        "remembering": {
            "server": {"max-num-seqs": 16},
            "paths": False,
            "load": {name: value for name, value in LOAD.items() if name != "input_len"}
            | {"prompts": str(same), "output_len": 8, "num_prompts": 40}
            | once,
            "gates": GATES,
        },
        "sharing": {
            "server": {"max-num-seqs": 16},
            "paths": False,
            "load": LOAD | {"input_len": 120, "shared_prefix_len": 256, "num_warmups": 16} | once,
            "gates": GATES,
        },
    }


@pytest.fixture(scope="module")
def not_measured_runs(qualify: Qualify) -> dict[str, Path]:
    """The runs' folders by profile, of loads that do not count."""
    qualified = qualify(to_be_invalid)
    assert qualified.done.returncode == 1, qualified.done.stdout + qualified.done.stderr
    return {load_report(folder).plan.cell.profile: folder for folder in runs_of(qualified)}


@pytest.fixture(scope="module")
def not_measured(not_measured_runs: dict[str, Path]) -> dict[str, Report]:
    return {profile: load_report(folder) for profile, folder in not_measured_runs.items()}


@pytest.mark.parametrize(
    ("profile", "what", "remedy"),
    [("crowded", r"\d+ preemptions", "gpu-memory-utilization"), ("remembering", "prefix", "no-enable-prefix-caching")],
)
def test_a_load_that_does_not_count_has_a_remedy(not_measured: dict[str, Report], profile: str, what: str, remedy: str) -> None:
    report = not_measured[profile]
    assert report.outcome == "not passed"
    assert report.judgement.verdict == "invalid"
    gate = next(gate for gate in report.judgement.gates if gate.gate.metric == "output_throughput_tok_s")
    assert gate.verdict == "invalid"
    assert re.search(what, gate.because)
    assert remedy in gate.because
    loads = measured(report, "load").values()
    assert all(measurement.invalid_because for measurement in loads)


def test_what_prompts_share_by_intent_hits_where_caching_is_on(
    not_measured_runs: dict[str, Path], not_measured: dict[str, Report]
) -> None:
    """By the server's own counts: of 376 tokens 256 are shared, which only the first of 4 clients compute.

    16 warm-ups before hit nothing: they have other prompts.
    """
    pages = [not_measured_runs["sharing"] / f"evidence/load/metrics-1-{when}.txt" for when in ("before", "after")]
    hits, asked = (counted(pages, f"vllm:prefix_cache_{what}_total") for what in ("hits", "queries"))
    assert 0.9 * 256 / 376 < hits / asked < 1.03 * 256 / 376
    shared = measured(not_measured["sharing"], "load")["prefix_hit_share"]
    if undisturbed(shared):
        assert shared.value == pytest.approx(hits / asked)
