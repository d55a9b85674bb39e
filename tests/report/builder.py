"""Reports as a real run makes them: one approved; one not, with hostile text wherever text comes from outside."""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

from tests.builders.changed import changed
from vllm_qualify.drift.finding import Finding
from vllm_qualify.engine.environment import EngineEnvironment, EngineIdentity, ImageIdentity
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.server import MODEL, Part, ServerPlan
from vllm_qualify.evidence.idle import GpuIdle, Idle, Stretch
from vllm_qualify.evidence.load.fitting import Tried, Try
from vllm_qualify.evidence.load.greedy import SameText
from vllm_qualify.evidence.load.search import Point, Purpose, SloLevel, SweepLoad
from vllm_qualify.evidence.load.soak import SoakCourse
from vllm_qualify.evidence.load.speculation import Drafting, SpeculationDetails
from vllm_qualify.evidence.load.sweep import TPOT, CurvePoint, Swept
from vllm_qualify.evidence.measurement import EvidenceFile, Interval, Measurement, StageEvidence, invalid, share_interval, valid
from vllm_qualify.evidence.paths.details import DifferingReply, PathsDetails, PathTaken
from vllm_qualify.evidence.sequential import Sides, levels_of
from vllm_qualify.evidence.startup import Startup
from vllm_qualify.evidence.watched import Series
from vllm_qualify.judge.verdict import Checks, GateVerdict, Judgement, bounds_of, gate_verdict, with_waiver, worst_verdict
from vllm_qualify.plan.cell import Baseline, Cell, CellPlan, Release, TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy, Smoke
from vllm_qualify.recipe.gates import Gate, Waiver, gate_of
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.metrics import METRICS, OUTPUT_THROUGHPUT, StageName
from vllm_qualify.recipe.published import PublishedScore
from vllm_qualify.recipe.searches import Fit, Sweep
from vllm_qualify.report.before import Before, Drift
from vllm_qualify.report.details import Details
from vllm_qualify.report.flips import Excerpt, Flip
from vllm_qualify.report.model import Report
from vllm_qualify.report.questions import MOST_BYTES, MOST_CHARACTERS, MOST_FLIPS, ScoredQuestions

SCRIPT = "<script>alert(1)</script>"
IMAGE = '"><img src=x onerror=alert(1)>'
MARKUP = "[red]x[/red]"
CONTROL = "\x1b[2J\u202egnp.exe"
HOSTILE = (SCRIPT, IMAGE, MARKUP)

# Three of the server's course, four of the soak, the sweep's curve, and the repeats of two throughputs and two latencies.
CHARTS = 3 + 4 + 1 + 4
RUN_ID, THEIR_RUN = "20260314T092653Z-5f3d19", "20260201T101112Z-ba5e11"
BEGAN = datetime(2026, 3, 14, 9, 26, 53, tzinfo=UTC)
QUESTIONS = 1319
AT = Sides(0.05, 0.05)
WORDS = [
    f"{a}{b}" for a in ("con", "de", "pro", "in", "per", "sub") for b in ("tain", "fer", "ject", "sist", "form", "vert", "s")
]
SMOKE = [name for name in METRICS if name.startswith("smoke_") and name != "smoke_golden"]
THROUGHPUTS = {"request_throughput_req_s": 12.31, "output_throughput_tok_s": 12608.4, "total_throughput_tok_s": 25216.9}
LATENCIES = {"ttft": 182.4, "tpot": 18.93, "itl": 18.71, "e2el": 19562.0}
STATISTICS = {"mean": 1.0, "p50": 0.94, "p90": 1.21, "p99": 1.83}
INVALID_LOAD = (
    "repeat 2: 1021 of 1024 requests completed, 3 failed; "
    "repeat 3: 7 preemptions: the KV cache is too small for this load, its last log line being "
    f"{SCRIPT} {MARKUP} {IMAGE} {CONTROL}"
)


def page_link(file: EvidenceFile) -> str:
    """Where the page finds a file of the evidence."""
    return f"evidence/{quote(file.path)}"


def passed_report() -> Report:
    """Every gate passes."""
    return _report(_plan("meta-llama/Llama-3.1-8B-Instruct"), _smoke(), _accuracy(1100), _load())


def not_passed_report() -> Report:
    """A failing accuracy gate, an inconclusive one, invalid load measurements, and hostile text."""
    plan = _plan(f"acme/{SCRIPT}{MARKUP}", variant_model=IMAGE)
    loads = [invalid(name, INVALID_LOAD, "load/bench-*.json") for name, metric in METRICS.items() if metric.stage == "load"]
    return _report(plan, _smoke(), _accuracy(940), loads, rejudged_from="20260313T201500Z-0a1b2c")


def image_report() -> Report:
    """Approved, of an image with hostile labels; the load client ran in another image."""
    under_test, client = _image("v0.32.0"), _image("v0.31.0")
    report = changed(passed_report(), "plan.cell.release", engine=_identity(under_test))
    report = changed(report, "plan.server", engine=under_test)
    return changed(report, "plan", client_image=client, client=_identity(client))


def detailed_report() -> Report:
    """Approved, with all the details that there are, and hostile text in the reasons and notes among them."""
    report = passed_report()
    drafting = {"speculative-config": {"method": "ngram", "num_speculative_tokens": 3}}
    plan = changed(report.plan, "server", arguments=report.plan.server.arguments | drafting, gpus=[0, 1])
    sweep = Sweep(concurrencies=[8, 32, 64], slo={"ttft_p99_ms": 2000.0})
    plan = changed(plan, sweep=sweep, fit=Fit(max_num_seqs=True), price_usd_gpu_hour=2.5)
    stages = [
        *report.stages,
        _stage("fit", 0, []),
        _stage("speculation", 52, []),
        _stage("paths", 40, _path_rows()),
        _stage("sweep", 61, _slo_rows()),
    ]
    details = Details(
        sweep=_swept(),
        speculation=_document(),
        speedups=[
            valid("speculative_speedup", 1.3145, "", sample_count=4, interval=Interval(lower=1.21, upper=1.43)),
            invalid("speculative_speedup_batch1", f"without it: 3 failed {IMAGE}", ""),
        ],
        startup=_startup(),
        idle=_idle(),
        fit=_make_tried(),
        course=course(60),
        course_notes=[f"the power limit lowered the clocks {SCRIPT}"],
        soak=_soaked(),
        paths=_paths(),
        notes=[f"baseline: {IMAGE}{CONTROL}"],
    )
    return changed(report, plan=plan, stages=stages, details=details)


def _path_rows() -> list[Measurement]:
    finding = f"1 of 64 answers changed, where 0.5 nat are noise: prompt 4 by 9.1 nat {SCRIPT}"
    return [
        valid("path_cold", 1.0, "paths/cold/replies.jsonl", sample_count=64),
        valid(
            "path_cold_changed_share",
            0.0,
            "paths/cold/replies.jsonl",
            interval=Interval(lower=0.0, upper=0.041),
            sample_count=64,
        ),
        valid("path_cached", 0.0, "paths/cached/replies.jsonl", sample_count=64, finding=finding),
        valid("path_cached_first_token_nll_change_nat", 0.02, "", interval=Interval(lower=-0.01, upper=0.05), sample_count=64),
        invalid("path_evicted", f"9% of the prompts came from the prefix cache {IMAGE}", "paths/evicted/replies.jsonl"),
        valid("path_constrained", 0.0, "paths/constrained/exchanges.jsonl", sample_count=512, finding="1 of 512 replies"),
    ]


def _paths() -> PathsDetails:
    changed_reply = DifferingReply(
        line=4, asked=f"How many {SCRIPT}", cold="He has 42 apples.", reply=f"He has 7 apples. {IMAGE}", distance_nat=9.1
    )
    broken = DifferingReply(
        line=9, asked="streamed call of a tool", reply=f"data: {MARKUP}{CONTROL}", problem=f"no tool {SCRIPT}"
    )
    taken = [
        PathTaken(path="cold", num_requests=64, took_s=3.2, cached_share=0.0),
        PathTaken(path="cached", num_requests=64, took_s=1.1, cached_share=0.93, differing=[changed_reply], num_differing=7),
        PathTaken(path="constrained", num_requests=512, took_s=21.0, beside=63.5, differing=[broken], num_differing=1),
    ]
    return PathsDetails(limit_nat=0.5, power=0.995, taken=taken, left_out={"aborted": f"a proxy keeps connections {IMAGE}"})


def compared_report() -> Report:
    """Against a baseline: another release, other settings, three gates more, questions that flipped; hostile words in all."""
    gates = [
        gate_of(metric="exact_match", task="gsm8k", filter="strict-match", max_loss=0.02, unit="fraction"),
        gate_of(metric="output_throughput_tok_s", max_worsening=0.05, unit="fraction"),
        gate_of(metric="ttft_p99_ms", max_worsening=0.1, unit="fraction"),
    ]
    report = detailed_report()
    (task,) = report.plan.accuracy
    published = [
        PublishedScore(score=0.899, source="https://example.org/" + "a-long-address/" * 20, api="chat", num_fewshot=0),
        PublishedScore(score=0.3, source=f"card {SCRIPT}", of=IMAGE, note=f"{MARKUP}{CONTROL}", metric="acc"),
    ]
    reason = f"slower by the new sampler {MARKUP}"
    waiver = waiver_of("output_throughput_tok_s against the baseline", f"release@example.org {SCRIPT}", reason)
    plan = changed(
        report.plan,
        accuracy=[changed(task, "settings", published=published)],
        gates=[*report.plan.gates, *gates],
        baseline=_baseline(report.plan),
        waivers=[waiver],
    )
    stages, comparisons = [stage for stage in report.stages if stage.stage != "fit"], _comparisons()
    judgement = _judgement(plan.judged_gates, [*(row for stage in stages for row in stage.measurements), *comparisons])
    verdicts = [with_waiver(result, plan.waivers, BEGAN.date()) for result in judgement.gates]
    verdict = worst_verdict([result.counts_as for result in verdicts])
    judgement = changed(judgement, gates=verdicts, verdict=verdict, comparisons=comparisons)
    report = changed(report, "details", before=_make_before(plan), drift=_drift(), questions=[_questions()], fit=None)
    plan = changed(plan, fit=None)
    return changed(report, plan=plan, stages=stages, judged_on=f"gpu-7 {SCRIPT}", judgement=judgement)


def waiver_of(gate: str, owner: str, reason: str) -> Waiver:
    cell = {"gpu_type": "h200", "variant": "fp8", "profile": "throughput"}
    return Waiver(gate=gate, owner=owner, reason=reason, expires=date(2026, 6, 30), **cell)


def baseline_of(plan: CellPlan, run_id: str = "") -> Baseline:
    """The run of this plan, as a later plan has it for its baseline."""
    return Baseline(
        run_id=run_id or plan.run_id,
        cell=plan.cell,
        fingerprint=plan.fingerprint,
        client_version=plan.client_version,
        accuracy=[task.settings for task in plan.accuracy],
        load=plan.load,
    )


def _baseline(plan: CellPlan) -> Baseline:
    packages = plan.cell.release.engine.packages | {"vllm": "0.31.0", "torch": "2.12.1"}
    engine = {"version": "0.31.0", "digest": f"sha256:{_sha('before')}", "packages": packages}
    before = changed(baseline_of(plan, THEIR_RUN), "cell.release.engine", **engine)
    return changed(changed(before, "fingerprint", driver="565.57.01"), client_version="0.31.0")


def _make_before(plan: CellPlan) -> Before:
    left = {name: value for name, value in plan.server.arguments.items() if name != "speculative-config"}
    compilation = {"pass_config": {"fuse_allreduce_rms": False}, "cudagraph_mode": "FULL_AND_PIECEWISE"}
    arguments = left | {"compilation-config": compilation, "swap-space": f"4 {SCRIPT}"}
    server = changed(plan.server, arguments=arguments, environment={"VLLM_USE_V1": f"1 {IMAGE}{CONTROL}"})
    curve = [_curve_point(8, 1150.0, 108.0), _curve_point(32, 3500.0, 78.0)]
    slower = [
        changed(row, value=row.value and row.value * 0.98, repeats=[number * 0.98 for number in row.repeats], interval=None)
        for row in _load()
    ]
    return Before(
        run_id=THEIR_RUN,
        judged_at=BEGAN - timedelta(days=40),
        server=server,
        measurements=[*slower, *_accuracy(1120)],
        curve=curve,
    )


def _curve_point(clients: int, per_gpu: float, per_user: float, is_on_front: bool = True) -> CurvePoint:
    about = {"clients": clients, "folder": f"concurrency-{clients}", "is_on_front": is_on_front}
    return CurvePoint.model_validate({**about, "output_tok_s_per_gpu": per_gpu, "tok_s_per_user": per_user})


def _comparisons() -> list[Measurement]:
    about = {"against": THEIR_RUN, "sample_count": 2638}
    asked, interval = {"task": "gsm8k", "filter": "strict-match"}, Interval(lower=0.0041, upper=0.0263)
    return [
        valid("exact_match", 0.0152, "answers", interval=interval, **asked, **about),
        valid("output_throughput_tok_s", 0.061, "load", interval=Interval(lower=0.052, upper=0.07), **about),
        invalid("ttft_p99_ms", f"the baseline's: repeat 2 {SCRIPT}{IMAGE}", "load", against=about["against"]),
    ]


def _drift() -> Drift:
    findings = [
        Finding(kind="changed-default", name="moe-backend", told=f"--moe-backend is auto by default {SCRIPT}"),
        Finding(kind="unknown-environment", name="VLLM_X", told=f"VLLM_X is not known {IMAGE}{CONTROL}"),
    ]
    return Drift(version="0.32.0", since="0.31.0", findings=findings)


def _questions(flips: int = 6) -> ScoredQuestions:
    """All of gsm8k's; every one of the flips with hostile words, one without the baseline's."""
    lost, gained = range(0, flips, 2), range(1, flips, 2)
    words = Excerpt(text=f"{SCRIPT} {IMAGE} {MARKUP}\n<<3*4=12>> {CONTROL}", cut=12345)
    return ScoredQuestions(
        task="gsm8k",
        metric="exact_match",
        filter="strict-match",
        against=THEIR_RUN,
        numbers=list(range(QUESTIONS)),
        ours=[0.0 if number in lost else None if number == 100 else 1.0 for number in range(QUESTIONS)],
        theirs=[1 / 3 if number in gained else 1.0 for number in range(QUESTIONS)],
        asked=QUESTIONS,
        lost=len(lost),
        gained=len(gained),
        topics=["law", f"{SCRIPT}{IMAGE}{CONTROL}"],
        about=[None if number == 2 else number % 3 % 2 for number in range(QUESTIONS)],
        cut=[0, 300],
        flips=[
            Flip(
                question=number,
                asked=words,
                target=words,
                theirs=None if number == 1 else words,
                ours=words.model_copy(update={"text": f"{words.text} and more"}),
                our_thinking=words if number == 0 else None,
            )
            for number in [*lost, *gained]
        ],
        notes=[f"of the baseline {SCRIPT}"],
    )


def crowded_report() -> Report:
    """As large as reports become: every question, as many flips as are kept, all of them as long as they may be."""
    report = compared_report()
    scored = _questions(MOST_FLIPS)
    each = MOST_BYTES // MOST_FLIPS // 4
    words = Excerpt(text="é漢 <b>" * (each // 15), cut=999)
    flips = [
        flip.model_copy(update=dict.fromkeys(("asked", "target", "theirs", "ours"), words) | {"our_thinking": None})
        for flip in scored.flips
    ]
    return changed(report, "details", questions=[changed(scored, flips=flips)], course=course(300))


def largest_report(most_flips: int = MOST_FLIPS, characters: int = MOST_CHARACTERS) -> Report:
    """As many questions as MMLU-Pro has, in its 14 topics, one of 20 flipped; answers as long as a reasoning model's.

    The words are drawn: 60 of a question, 1,200 of thinking and 120 of the answer. In two answers one word of 15 differs.
    """
    rng = random.Random(24)
    count, every, topics = 12_032, 20, [f"topic {place}" for place in range(14)]
    flipped = range(0, count, every)
    flips = [_long_flip(rng, number, characters) for number in [*flipped[::2], *flipped[1::2]][:most_flips]]
    lost = set(flipped[::2])
    scored = ScoredQuestions(
        task="mmlu_pro",
        metric="exact_match",
        filter="custom-extract",
        against=THEIR_RUN,
        numbers=list(range(count)),
        ours=[0.0 if number in lost else 1.0 for number in range(count)],
        theirs=[0.0 if number % every == 0 and number not in lost else 1.0 for number in range(count)],
        asked=count,
        lost=len(flipped[::2]),
        gained=len(flipped[1::2]),
        topics=topics,
        about=[number % len(topics) for number in range(count)],
        flips=flips,
    )
    return changed(compared_report(), "details", questions=[scored])


def _long_flip(rng: random.Random, number: int, characters: int) -> Flip:
    theirs = _draw_words(rng, 120)
    ours = [rng.choice(WORDS) if rng.random() < 1 / 15 else word for word in theirs]
    asked, target, *answers = (
        Excerpt(text=" ".join(each)) for each in (_draw_words(rng, 60), _draw_words(rng, 20), theirs, ours)
    )
    thoughts = [" ".join(_draw_words(rng, 1200)) for _ in range(2)]
    thinking = [Excerpt(text=text[:characters], cut=max(0, len(text) - characters)) for text in thoughts]
    sides = {"theirs": answers[0], "ours": answers[1], "their_thinking": thinking[0], "our_thinking": thinking[1]}
    return Flip(question=number, asked=asked, target=target, **sides)


def _draw_words(rng: random.Random, words: int) -> list[str]:
    return [rng.choice(WORDS) for _ in range(words)]


def _slo_rows() -> list[Measurement]:
    return [
        valid("slo_concurrency_req", 32.0, "sweep/", sample_count=3000),
        invalid("slo_request_rate_req_s", f"2 runs were invalid: {SCRIPT}{MARKUP}", "sweep/"),
        valid("slo_cost_usd_mtok", 0.4213, "sweep/", sample_count=3000),
    ]


def _swept() -> Swept:
    measured = {8: (2400.0, 9.0, 310.0), 32: (7200.0, 12.5, 1620.0), 64: (6800.0, 19.0, 4100.0)}
    points = [_make_point("curve", clients, *figures) for clients, figures in measured.items()]
    broken = SweepLoad(purpose="request_rate", load=_sweep_load(1), request_rate_req_s=7.25)
    points.append(Point(folder="rate-7.25", asked=broken, invalid_because=f"12 preemptions {SCRIPT} {IMAGE} {CONTROL}"))
    curve = [_curve_point(clients, output / 2, 1000 / tpot, clients != 64) for clients, (output, tpot, _) in measured.items()]
    return Swept(
        points=points,
        curve=curve,
        curve_problems=[f"96 clients: {MARKUP}{SCRIPT}"],
        concurrency=SloLevel(value=32.0, note="32 clients met the SLO, 34 missed it"),
        request_rate=SloLevel(invalid_because=f"2 runs were invalid: {SCRIPT}{MARKUP}"),
    )


def _make_point(purpose: Purpose, clients: int, output: float, tpot: float, ttft_p99: float) -> Point:
    return Point(
        folder=f"concurrency-{clients}",
        asked=SweepLoad(purpose=purpose, load=_sweep_load(clients)),
        figures={OUTPUT_THROUGHPUT: output, TPOT: tpot, "ttft_p99_ms": ttft_p99},
        sample_count=1000,
        meets_slo=ttft_p99 <= 2000,
    )


def _sweep_load(clients: int) -> Load:
    return Load(input_len=1024, output_len=1024, max_concurrency=clients, num_prompts=2000, num_warmups=0)


def _document() -> SpeculationDetails:
    return SpeculationDetails(
        greedy=Drafting(max_concurrency=1, length_tok=3.214, rate=0.738, rates=[0.91, 0.74, 0.564]),
        batch1=Drafting(max_concurrency=1, length_tok=1.62, rate=0.2067, rates=[0.4, 0.15, 0.07]),
        profile=Drafting(max_concurrency=64, invalid_because=f"the server drafted nothing {IMAGE}"),
        texts=SameText(parts_at=[None, 41, None]),
    )


def _startup() -> Startup:
    parts = {"process_s": 21.0, "weights_s": 48.5, "compile_s": 33.75, "graphs_s": 12.0, "ready_s": 27.968}
    return Startup(startup_s=143.218, image_s=None, **parts, warm=False, because={"image_s": f"no image was pulled {SCRIPT}"})


def _idle() -> Idle:
    first, second = ((143.0, 120.5), (602.0, 31.25)), ((143.0, 143.0), (602.0, 602.0))
    gpus = [
        GpuIdle(index=index, samples=1490, **{part: Stretch(told_s=known, idle_s=idle) for part, (known, idle) in parts})
        for index, parts in enumerate(zip(("start", "serving"), of, strict=True) for of in (first, second))
    ]
    return Idle(held_s=748.0, gpus=gpus)


def _make_tried() -> Tried:
    tries = [
        Try(arguments={}, kv_cache_tok=655360, holds=320),
        Try(arguments={"max-num-seqs": 320}, failed_because=f"out of memory {SCRIPT}"),
        Try(arguments={"max-num-seqs": 310}, kv_cache_tok=640000, holds=312),
    ]
    return Tried(found={"max-num-seqs": 310}, tries=tries)


def _soaked() -> SoakCourse:
    latencies: dict[str, list[float | None]] = {"ttft": [30.0, 31.5, 33.0], f"itl {SCRIPT}": [9.0, None, 9.5]}
    gpus: list[float | None] = [140_000.0, 140_002.0, 140_004.0]
    return SoakCourse(time_s=[0.0, 60.0, 120.0], host_mib=[900.0, None, 902.5], gpu_mib=gpus, latency_ms=latencies)


def course(samples: int) -> Series:
    """With one peak of what waits and one sample that tells nothing."""
    none_at, peak_at = samples // 3, 2 * samples // 3

    def line(values: Callable[[int], float]) -> list[float | None]:
        return [None if at == none_at else values(at) for at in range(samples)]

    return Series(
        time_s=[0.5 * at for at in range(samples)],
        running=line(lambda at: 64.0 if at else 63.0),
        waiting=line(lambda at: 37.0 if at == peak_at else 0.0),
        kv_cache_usage=line(lambda at: 0.5 + 0.001 * (at % 100)),
        output_tok_s=line(lambda at: 12000.0 + at % 7),
    )


def _image(tag: str) -> EngineImage:
    return EngineImage(
        repository="registry.example:5000/vllm/vllm-openai", tag=tag, digest=f"sha256:{_sha(tag)}", platform="linux/arm64"
    )


def _identity(image: EngineImage) -> EngineIdentity:
    version = str(image.tag).removeprefix("v")
    about = ImageIdentity(
        reference=image.reference,
        platform=image.platform,
        image_id=f"sha256:{_sha(image.pinned)}",
        created="2026-03-01T08:15:27.123456789Z",
        labels={
            "org.opencontainers.image.version": str(image.tag),
            "org.opencontainers.image.description": f"{SCRIPT} {MARKUP} {CONTROL}",
            f"maintainer{IMAGE}": "NVIDIA CORPORATION <cudatools@nvidia.com>",
        },
    )
    engine = {"version": version, "digest": str(image.digest), "packages": {"vllm": version, "torch": "2.13.0"}}
    return EngineIdentity(launcher="docker", python="3.12.11", image=about, **engine)


Rows = list[Measurement]


def _report(plan: CellPlan, smoke: Rows, accuracy: Rows, load: Rows, rejudged_from: str | None = None) -> Report:
    serve = [valid("startup_s", 143.218, "serve/startup_s", sample_count=1)]
    stages = [_stage("smoke", 2, smoke), _stage("accuracy", 14, accuracy), _stage("load", 31, load), _stage("serve", 0, serve)]
    return Report(
        made_by="vllm-qualify 0.1.0",
        created_at=BEGAN + timedelta(minutes=74),
        run_id=plan.run_id,
        rejudged_from=rejudged_from,
        plan=plan,
        stages=stages,
        judgement=_judgement(plan.judged_gates, [row for stage in stages for row in stage.measurements]),
    )


def _plan(model: str, variant_model: str = "") -> CellPlan:
    engine = EngineIdentity(
        version="0.32.0",
        digest=f"sha256:{_sha('engine')}",
        python="3.12.11",
        packages={"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.2.1", "triton": "3.6.0"},
    )
    release = Release(model=model, revision=_sha("model")[:40], engine=engine)
    return CellPlan(
        run_id=RUN_ID,
        cell=Cell(recipe="llama-3.1-8b", release=release, variant="fp8", gpu_type="h200", profile="throughput"),
        fingerprint=Fingerprint(
            gpu_type="h200", name="NVIDIA H200", count=1, memory_mib=143771, compute_capability="9.0", driver="570.86.15"
        ),
        server=ServerPlan(
            engine=EngineEnvironment(python=Path("engine/bin/python")),
            model=model,
            revision=release.revision,
            parts=[Part(option=MODEL, name=model, revision=release.revision)],
            served_model_name=f"llama-3.1-8b{variant_model}",
            arguments={
                "max-model-len": 8192,
                "gpu-memory-utilization": 0.9,
                "enable-prefix-caching": False,
                "kv-cache-dtype": "fp8",
                "compilation-config": {"pass_config": {"fuse_allreduce_rms": True}, "cudagraph_mode": "FULL_AND_PIECEWISE"},
                "max-num-seqs": 256,
            },
            environment={"VLLM_LOGGING_LEVEL": "INFO", "NCCL_DEBUG": variant_model or "WARN"},
            startup_timeout_s=1800.0,
        ),
        smoke=Smoke(prompt="The capital of France is"),
        smoke_golden=None,
        accuracy=[TaskPlan(settings=Accuracy(num_questions=QUESTIONS), num_concurrent=256)],
        baseline_variant="fp8",
        load=Load(input_len=1024, output_len=1024, max_concurrency=64, num_prompts=1024, num_warmups=64),
        gates=_gates(),
    )


def _gates() -> list[Gate]:
    return [
        *(gate_of(metric=name, minimum=1.0, unit="bool") for name in SMOKE),
        gate_of(metric="exact_match", task="gsm8k", filter="strict-match", minimum=0.775, unit="fraction"),
        gate_of(metric="exact_match", task="gsm8k", filter="flexible-extract", minimum=0.7, unit="fraction"),
        gate_of(metric="output_throughput_tok_s", minimum=12000.0, unit="tok/s"),
        gate_of(metric="ttft_p99_ms", maximum=400.0, unit="ms"),
        gate_of(metric="tpot_p99_ms", maximum=50.0, unit="ms"),
    ]


def _smoke() -> list[Measurement]:
    return [valid(name, 1.0, "smoke/replies.json", sample_count=2) for name in SMOKE]


def _accuracy(right: int) -> list[Measurement]:
    """Flexible extraction finds three per cent fewer."""
    counts = {"strict-match": right, "flexible-extract": round(right * 0.97)}
    return [
        valid(
            "exact_match",
            count / QUESTIONS,
            "accuracy/results.json",
            task="gsm8k",
            filter=name,
            sample_count=QUESTIONS,
            interval=share_interval(count, QUESTIONS, AT),
            traced_to=["accuracy/gsm8k/r1-b1/results.json:412"],
        )
        for name, count in counts.items()
    ]


def _load() -> list[Measurement]:
    latencies = {
        f"{name}_{which}_ms": base * factor for name, base in LATENCIES.items() for which, factor in STATISTICS.items()
    }
    return [_over_repeats(name, base) for name, base in (THROUGHPUTS | latencies).items()]


def _over_repeats(name: str, base: float) -> Measurement:
    repeats, interval = [base * factor for factor in (0.996, 1.0, 1.004)], Interval(lower=base * 0.9933, upper=base * 1.0067)
    return valid(name, base, "load/bench-*.json", sample_count=3072, repeats=repeats, interval=interval)


def _stage(stage: StageName, minutes: int, measurements: list[Measurement]) -> StageEvidence:
    names: dict[str, list[str]] = {
        "serve": ["server.yaml", "server.log", "startup_s"],
        "smoke": ["models.json", "replies.json"],
        "accuracy": [
            "lm-eval.log",
            "results.json",
            "samples_gsm8k_2026-03-14T09-40-53.123456.jsonl",
            f"{SCRIPT}{IMAGE}/answers.log",
        ],
        "load": [name.format(number) for number in (1, 2, 3) for name in ("bench-{}.json", "bench-{}.log", "metrics-{}.txt")],
    }
    tools = {"serve": {"vllm": "0.32.0"}, "accuracy": {"lm-eval": "0.4.13"}, "load": {"vllm bench serve": f"0.32.0{IMAGE}"}}
    return StageEvidence(
        stage=stage,
        started_at=BEGAN + timedelta(minutes=minutes),
        duration_s={"serve": 4380.2, "smoke": 1.94, "accuracy": 983.4, "load": 2511.0}.get(stage, 540.0),
        commands=_commands(stage),
        tools=tools.get(stage, {}),
        files=[_file(f"{stage}/{name}") for name in names.get(stage, ["found.json"])],
        measurements=measurements,
        run_id=RUN_ID,
    )


def _commands(stage: StageName) -> list[list[str]]:
    asked = ["python", "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", "gsm8k", "--note"]
    bench = [*["vllm", "bench", "serve", "--backend", "openai", "--model"], IMAGE]
    bench += ["--dataset-name", "random", "--num-prompts", "1024", "--max-concurrency", "64", "--seed"]
    return {
        "serve": [["vllm", "serve", "--config", "server.yaml"]],
        "accuracy": [[*asked, SCRIPT, MARKUP]],
        "load": [[*bench, str(seed), "--ignore-eos"] for seed in range(3)],
    }.get(stage, [])


def _file(path: str) -> EvidenceFile:
    return EvidenceFile(path=path, sha256=_sha(path), size=int(_sha(path)[:6], 16))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _judgement(gates: Sequence[Gate], measurements: Sequence[Measurement]) -> Judgement:
    by_label = {row.label: row for row in measurements}
    verdicts = [_verdict(gate, by_label.get(gate.label)) for gate in gates]
    held = sum(getattr(result.checks, name) for result in verdicts for name in Checks.model_fields)
    asked = len(verdicts) * len(Checks.model_fields)
    statistics = {
        "evaluated_expectations": asked,
        "successful_expectations": held,
        "unsuccessful_expectations": asked - held,
        "success_percent": 100 * held / asked if asked else None,
    }
    return Judgement(
        verdict=worst_verdict([result.verdict for result in verdicts]),
        gates=verdicts,
        levels=levels_of(gates),
        suite={"name": "cell", "meta": {"great_expectations_version": "1.24.1"}},
        validation={"success": held == asked, "statistics": statistics},
    )


def _verdict(gate: Gate, row: Measurement | None) -> GateVerdict:
    """As Great Expectations finds it, without its seconds to import."""
    interval = bounds_of(row) if row else None
    at_least, at_most = gate.limits
    least, most = -math.inf if at_least is None else at_least, math.inf if at_most is None else at_most
    ends = [least <= end <= most for end in (interval.lower, interval.upper)] if interval else [False]
    checks = Checks(
        present=row is not None,
        trusted=row is not None and row.value is not None,
        noise_known=interval is not None,
        surely_inside=all(ends),
        maybe_inside=any(ends),
    )
    return gate_verdict(gate, checks, [row] if row else [], [1])
