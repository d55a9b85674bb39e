"""Details: all that a run's files have of them, and a reason, never an exception, where they do not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders.changed import changed
from tests.builders.soaks import soak_in
from tests.builders.speculations import CAPTURED as SPECULATION
from tests.builders.speculations import SETTINGS
from tests.builders.startup_logs import CPU_LOG, CPU_STARTUP_S, LAUNCHED
from tests.builders.watched import CAPTURED as WATCHED
from tests.builders.watched import ENOUGH
from tests.fakes.capacity import Capacity
from tests.report.builder import course, passed_report
from vllm_qualify.engine.watch import SCRAPES
from vllm_qualify.evidence.load import speculation, sweep
from vllm_qualify.evidence.load.fitting import FIT_RESULT, Tried, Try
from vllm_qualify.evidence.measurement import valid
from vllm_qualify.evidence.stages.sweep import sweep_plan
from vllm_qualify.evidence.stages.table import parse
from vllm_qualify.evidence.watched import Series, read_watched, series
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.searches import Fit, Soak, Sweep
from vllm_qualify.report.before import Drift
from vllm_qualify.report.details import MOST_SAMPLES, Details, details_of, thin_course
from vllm_qualify.report.model import Report
from vllm_qualify.report.page import render_page
from vllm_qualify.report.sections import soak_figures
from vllm_qualify.runs import folder, judging

# The measured part of the load: what bench did before it is warm-up.
MEASURED = (ENOUGH[0] + 5, ENOUGH[1])
TRIED = Tried(found={"max-num-seqs": 8}, tries=[Try(arguments={"max-num-seqs": 8}, kv_cache_tok=800, holds=9)])
SHOWN = ("sweep", "speculation", "startup", "fit", "course")
WRONG_TEXT = ["", "{", "null", "\x00"]


def plan_of(**changes: Any) -> CellPlan:
    """Of a cell that has everything. Its sweep's load is one of the simulated server."""
    plan = passed_report().plan
    server = changed(plan.server, served_model_name="reference")
    drafting = server.arguments | {"speculative-config": {"method": "ngram", "num_speculative_tokens": 3}}
    given = {
        "server": changed(server, arguments=drafting),
        "undrafted": server,
        "load": SETTINGS,
        "sweep": Sweep(concurrencies=[1, 4], min_duration_s=0.5),
        "fit": Fit(max_num_seqs=True),
        "watched": True,
    }
    return plan.model_copy(update=given | changes)


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """What real servers left, and a simulated one's sweep."""
    folder = tmp_path / "evidence"
    shutil.copytree(SPECULATION, folder / "speculation")
    shutil.copytree(WATCHED / "enough", folder / "serve")
    (folder / "serve" / "startup_s").write_text(f"{CPU_STARTUP_S}\n")
    for name in ("launched_at", "launched_by_clock"):
        (folder / "serve" / name).write_text(f"{LAUNCHED}\n")
    (folder / "serve" / "server.log").write_text(CPU_LOG)
    began, ended = ENOUGH
    (folder / "load").mkdir()
    (folder / "load" / "bench-1.json").write_text(json.dumps({"duration": ended - MEASURED[0]}))
    (folder / "load" / "client-1.json").write_text(json.dumps({"cpu_s": [[began, 0.0], [ended, 1.0]], "max_rss_mib": 1}))
    (folder / "fit").mkdir()
    (folder / "fit" / FIT_RESULT).write_text(TRIED.model_dump_json())
    (folder / "sweep").mkdir()
    sweep.measure_sweep(as_if_watched, sweep_plan(plan_of()), folder / "sweep")
    return folder


def keep_one_sample(folder: Path) -> None:
    """Of the samples within the load, the first one stays."""
    path = folder / "serve" / SCRAPES
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(next(line for line in lines if json.loads(line)["time"] >= MEASURED[0]))


def as_if_watched(load: Load, into: Path) -> None:
    """A simulated run at a moment at which the real machine was looked at."""
    Capacity().run(load, into)
    ended = read_watched(WATCHED / "enough").host[5].time
    began = ended - json.loads((into / "bench-1.json").read_text())["duration"]
    (into / "client-1.json").write_text(json.dumps({"cpu_s": [[began, 0.0], [ended, 0.1]], "max_rss_mib": 1}))


def test_everything_is_read(evidence: Path) -> None:
    gained = valid("speculative_speedup", 1.25, "speculation/", sample_count=4)
    details = details_of(plan_of(), evidence, [gained])
    assert (details.notes, details.course_notes, details.speedups) == ([], [], [gained])
    assert details.sweep is not None
    assert details.sweep == sweep.parse_sweep(evidence / "sweep", sweep_plan(plan_of()))
    assert [point.clients for point in details.sweep.curve] == [1, 4]
    assert details.speculation == speculation.document(evidence / "speculation", SETTINGS)
    assert details.startup is not None
    assert (details.startup.compile_s, details.startup.warm) == (51.0, False)
    assert details.fit == TRIED
    assert details.course is not None
    assert details.course == series(evidence / "serve", *MEASURED)
    assert 0 < len(details.course.time_s) < len(series(evidence / "serve").time_s)


def test_a_cell_that_asks_for_nothing_of_it_has_no_details_and_no_notes(tmp_path: Path) -> None:
    assert details_of(passed_report().plan, tmp_path) == Details(drift=Drift(version="0.32.0"))


def test_what_left_nothing_is_absent_with_its_reason(tmp_path: Path) -> None:
    details = details_of(plan_of(), tmp_path)
    assert [getattr(details, name) for name in SHOWN] == [None] * len(SHOWN)
    assert details.notes == [
        "sweep: the stage left nothing",
        "speculative decoding: the stage left nothing",
        "start-up: no usable evidence: No such file or directory: startup_s",
        "fit: no usable evidence: No such file or directory: found.json",
        "the server during the load: the stage left nothing",
    ]


def test_how_long_gpus_idled_is_read_of_a_server_that_had_some(evidence: Path) -> None:
    plan = changed(plan_of(), "server", gpus=[0])
    assert details_of(plan, evidence).idle is None
    (evidence / "serve" / "ended_at").write_text(f"{LAUNCHED + 600}\n")
    details = details_of(plan, evidence)
    assert details.idle is not None
    # The real machine had no GPU.
    assert "GPU 0's use is known for only 0 of 600 s" in (details.idle.because or "")
    (evidence / "serve" / "host.jsonl").unlink()
    assert "idle GPUs: no usable evidence: No such file or directory: host.jsonl" in details_of(plan, evidence).notes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"turns": 2}, "requests come at a rate or in turns, which both servers would keep"),
        # Plans of versions that did not start the servers in turn.
        ({}, "the machine had no room for the same server without speculative decoding beside it"),
    ],
)
def test_a_run_that_cannot_show_what_drafts_gain_says_why(evidence: Path, changes: dict[str, object], why: str) -> None:
    plan = changed(plan_of(undrafted=None), "load", **changes)
    details = details_of(plan, evidence)
    assert details.speculation is None
    (note,) = (note for note in details.notes if note.startswith("speculative decoding: "))
    assert why in note
    assert {row.invalid_because for row in parse("speculation", plan, evidence)} == {note.partition(": ")[2]}


@pytest.mark.parametrize("text", WRONG_TEXT)
@pytest.mark.parametrize(
    ("path", "absent"),
    [
        ("serve/startup_s", "startup"),
        ("serve/launched_by_clock", "startup"),
        ("fit/found.json", "fit"),
        ("load/client-1.json", "course"),
        ("load/bench-1.json", "course"),
    ],
)
def test_an_unusable_file_takes_only_its_own_away(path: str, absent: str, text: str, evidence: Path) -> None:
    (evidence / path).write_text(text)
    details = details_of(plan_of(), evidence)
    assert [name for name in SHOWN if getattr(details, name) is None] == [absent]
    assert len(details.notes) == 1


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "load/client-1.json").unlink(), "no client recorded when it asked"),
        (lambda folder: (folder / "load/bench-1.json").write_text('{"duration": 0}'), "repeat 1 lasted 0.0 s"),
        (lambda folder: (folder / "load/bench-1.json").write_text('{"duration": NaN}'), "repeat 1 lasted nan s"),
        (lambda folder: (folder / "serve" / SCRAPES).write_text(""), "no sample of it has a value"),
        (keep_one_sample, "one sample of it alone draws no line"),
    ],
)
def test_a_course_without_samples_or_times_is_absent(spoil: Callable[[Path], None], reason: str, evidence: Path) -> None:
    spoil(evidence)
    details = details_of(plan_of(), evidence)
    assert details.course is None
    assert details.notes == [f"the server during the load: {reason}"]


def test_a_thinned_course_keeps_peaks_dips_gaps_and_ends() -> None:
    long = course(7200)
    short = thin_course(long)
    assert len(short.time_s) <= MOST_SAMPLES
    assert (short.time_s[0], short.time_s[-1]) == (long.time_s[0], long.time_s[-1])
    assert short.waiting.count(37.0) == 1
    assert short.time_s[short.waiting.index(37.0)] == long.time_s[long.waiting.index(37.0)]
    assert short.running.count(None) == 1
    for name in ("running", "waiting", "kv_cache_usage", "output_tok_s"):
        known = [[value for value in getattr(of, name) if value is not None] for of in (short, long)]
        assert (min(known[0]), max(known[0])) == (min(known[1]), max(known[1]))


def test_the_samples_of_a_thinned_course_are_those_that_were() -> None:
    long, short = course(1000), thin_course(course(1000), 50)
    assert len(short.time_s) <= 50
    whole = [set(zip(*of.model_dump().values(), strict=True)) for of in (short, long)]
    assert whole[0] < whole[1]
    assert thin_course(course(MOST_SAMPLES)) == course(MOST_SAMPLES)
    with pytest.raises(ValueError, match="fewer than 14 samples"):
        thin_course(course(100), 13)


def test_every_line_may_jump_in_every_sample() -> None:
    count = 5000
    lines = [[None if at % prime == 0 else float(at * prime % 101) for at in range(count)] for prime in (3, 5, 7, 11)]
    names = ("running", "waiting", "kv_cache_usage", "output_tok_s")
    jumping = Series.model_validate({"time_s": [float(at) for at in range(count)]} | dict(zip(names, lines, strict=True)))
    assert 100 < len(thin_course(jumping).time_s) <= MOST_SAMPLES


def test_a_run_that_is_judged_has_its_details_in_report_and_page(
    evidence: Path, approved: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judging itself, which takes seconds to import, is not what is asked here."""
    monkeypatch.setenv("VLLM_QUALIFY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(judging, "judge", lambda *_, **__: approved.judgement)
    run = folder.start_run(plan_of())
    evidence.rename(run.evidence)
    report = judging.judge_run(run, [])
    assert report.details == details_of(run.plan, run.evidence)
    assert [name for name in SHOWN if getattr(report.details, name) is None] == []
    assert '<h2 id="course">' in (run.folder / "report.html").read_text()


def test_a_soak_is_drawn_and_one_that_left_nothing_is_told(evidence: Path) -> None:
    soaked = plan_of(soak=Soak(soak_min=40.0, soak_share=0.5))
    assert details_of(soaked, evidence).notes == ["soak: the stage left nothing"]
    soak_in(evidence / "soak", ttft=lambda hour: 5 + 3 * hour)
    details = details_of(soaked, evidence)
    assert details.notes == []
    assert details.soak is not None
    figures = soak_figures(details.soak)
    gpus = ["GPUs"] if soaked.server.gpus else []
    assert [figure.text.split(" ")[0] for figure in figures] == ["host", *gpus, "TTFT", "TPOT", "ITL"]
    # 5 ms and 3 ms more after an hour, at the begin of the first round and of the last one.
    assert next(figure.text for figure in figures if "TTFT" in figure.text).startswith("TTFT 5.000 ms to 6.950 ms")
    report = passed_report()
    drawn = changed(report, "details", soak=details.soak)
    pages = [render_page(each, lambda file: file.path) for each in (drawn, report)]
    assert ['<h2 id="soak">' in page for page in pages] == [True, False]
    assert pages[0].count("<svg") == pages[1].count("<svg") + len(figures)
    assert details_of(plan_of(), evidence).soak is None
