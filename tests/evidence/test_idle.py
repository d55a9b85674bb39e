"""How long GPUs idled: from real samples of two H200s, and of what is missing of them."""

import json
from pathlib import Path

import pytest

from tests.builders.comparisons import CPU, cell_plan, server_plan
from vllm_qualify.engine.watch import HOST_SAMPLES, GpuSample, HostSample
from vllm_qualify.evidence.idle import Idle, Stretch, idle, measurement
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.stages.serve import idle_gpus
from vllm_qualify.evidence.stages.stage import MACHINE
from vllm_qualify.evidence.stages.table import parse
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import GPU_IDLE, METRICS

CAPTURED = Path(__file__).parent / "captured" / "idle" / "gpus.jsonl"
# When the program began to do nothing, then all it could, then both in turns.
NOTHING, BUSY, TURNS = 1795364925.80, 1795364935.80, 1795364945.82


def look(time: float, *gpus: GpuSample) -> HostSample:
    return HostSample(time=time, cpu_share=None, load_1min=0.0, memory_available_mib=1e4, gpus=list(gpus))


def real() -> list[HostSample]:
    lines = [json.loads(line) for line in CAPTURED.read_text().splitlines()]
    return [look(each["time"], *map(GpuSample.model_validate, each["gpus"])) for each in lines]


def made(*idle_shares: float | None) -> list[HostSample]:
    """Of GPU 0, from time 0 on, one each second."""
    samples = [GpuSample(index=0, utilization=None if share is None else 1 - share) for share in idle_shares]
    return [look(float(second), sample) for second, sample in enumerate(samples)]


def shares(idleness: Idle) -> list[list[float | None]]:
    return [[gpu.start.share, gpu.serving.share, gpu.whole.share] for gpu in idleness.gpus]


def test_a_gpu_that_worked_and_one_that_did_not() -> None:
    idleness = idle(real(), [0, 1], NOTHING, BUSY, TURNS)
    assert idleness.because is None
    assert idleness.held_s == pytest.approx(20.02)
    worked, idled = shares(idleness)
    assert worked == pytest.approx([1.0, 0.02, 0.51], abs=0.03)
    assert idled == [1.0, 1.0, 1.0]
    assert [gpu.samples for gpu in idleness.gpus] == [41, 41]
    assert idleness.gpus[0].start.told_s == pytest.approx(10, abs=0.1)
    assert idleness.gpus[0].serving.told_s == pytest.approx(10, abs=0.6)


def test_the_measurement_is_of_all_the_servers_gpus_together() -> None:
    row = measurement(idle(real(), [0, 1], NOTHING, BUSY, TURNS), "serve/host.jsonl")
    assert row.value == pytest.approx((0.51 + 1) / 2, abs=0.02)
    assert (row.metric, row.unit, row.sample_count, row.source) == (GPU_IDLE, "fraction", 41, "serve/host.jsonl")
    assert (METRICS[GPU_IDLE].stage, METRICS[GPU_IDLE].direction) == ("serve", "lower")
    assert measurement(idle(real(), [1], NOTHING, BUSY, TURNS), "").value == 1.0


def test_time_that_lies_on_both_sides_of_the_first_completion_is_parted() -> None:
    (gpu,) = idle(made(1.0, 0.0), [0], 0.0, 0.25, 1.0).gpus
    assert gpu.start == Stretch(told_s=0.25, idle_s=0.125)
    assert gpu.serving == Stretch(told_s=0.75, idle_s=0.375)


def test_samples_count_by_the_time_that_they_tell_of() -> None:
    host = [*made(1.0, 1.0), *(look(2 + number / 10, GpuSample(index=0, utilization=1.0)) for number in range(11))]
    (gpu,) = idle(host, [0], 0.0, 0.0, 3.0).gpus
    assert gpu.whole.told_s == pytest.approx(3.0)
    assert gpu.whole.idle_s == pytest.approx(1.5)


def test_what_is_outside_of_the_servers_time_is_left_out() -> None:
    (gpu,) = idle(made(1.0, 1.0, 0.0, 0.0, 1.0, 1.0), [0], 2.0, 2.0, 3.0).gpus
    assert (gpu.whole, gpu.samples) == (Stretch(told_s=1.0, idle_s=0.0), 2)


def test_a_long_gap_and_a_clock_that_goes_back_tell_of_no_time() -> None:
    gap, back = (
        [look(time, GpuSample(index=0, utilization=0.0)) for time in times]
        for times in ((0.0, 1.0, 2.0, 9.0, 10.0), (0.0, 1.0, 0.5, 1.5))
    )
    idleness = idle(gap, [0], 0.0, 0.0, 10.0)
    assert idleness.gpus[0].whole.told_s == 3.0
    assert idleness.because == "GPU 0's use is known for only 3 of 10 s: see what slows this machine down, and measure again"
    assert idle(back, [0], 0.0, 0.0, 2.0).gpus[0].whole.told_s == 2.0


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ([], ""),
        (made(1.0), ""),
        (made(None, None, None), " (it reports no utilization)"),
        ([look(each, GpuSample(index=0, error="GPU is lost")) for each in (0.0, 1.0, 2.0)], " (GPU is lost)"),
        ([look(each, GpuSample(index=1, utilization=0.0)) for each in (0.0, 1.0, 2.0)], ""),
        ([look(each) for each in (0.0, 1.0, 2.0)], ""),
    ],
    ids=["no sample", "one sample", "not told", "lost", "another GPU", "no GPU"],
)
def test_too_few_samples_are_invalid(host: list[HostSample], why: str) -> None:
    row = measurement(idle(host, [0], 0.0, 1.0, 2.0), "serve/host.jsonl")
    assert row.value is None
    assert (row.invalid_because or "").startswith(f"GPU 0's use is known for only 0 of 2 s{why}: ")


def test_a_server_that_ended_before_its_launch_is_invalid() -> None:
    assert measurement(idle(real(), [0], TURNS, TURNS, NOTHING), "").invalid_because is not None


# --- from a stage's files


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    serve = tmp_path / "serve"
    serve.mkdir()
    (serve / MACHINE).write_text(CPU.model_dump_json())
    (serve / HOST_SAMPLES).write_text("".join(f"{each.model_dump_json(exclude_defaults=True)}\n" for each in real()))
    times = {"launched_at": NOTHING, "launched_by_clock": NOTHING, "startup_s": BUSY - NOTHING, "ended_at": TURNS}
    for name, seconds in times.items():
        (serve / name).write_text(f"{seconds:.3f}\n")
    return tmp_path


def plan_on(gpus: list[int]) -> CellPlan:
    return cell_plan([], server=server_plan().model_copy(update={"gpus": gpus}))


def idle_shares(evidence: Path, gpus: list[int]) -> list[Measurement]:
    return [row for row in parse("serve", plan_on(gpus), evidence) if row.metric == GPU_IDLE]


def test_a_stage_tells_its_servers_share_without_a_torn_last_line(evidence: Path) -> None:
    with (evidence / "serve" / HOST_SAMPLES).open("a") as file:
        file.write('{"time": 17953649')
    (row,) = idle_shares(evidence, [0])
    assert row.value == pytest.approx(0.51, abs=0.02)
    kept = idle_gpus(evidence / "serve", plan_on([0]))
    assert kept is not None
    assert kept.gpus[0].start.share == pytest.approx(1.0, abs=0.03)


def test_a_server_on_the_cpu_has_no_such_share(evidence: Path) -> None:
    assert idle_shares(evidence, []) == []
    assert idle_gpus(evidence / "serve", plan_on([])) is None


@pytest.mark.parametrize("name", ["launched_at", "startup_s", "ended_at", HOST_SAMPLES])
@pytest.mark.parametrize("text", [None, "nan\n", "inf\n", "{}\n", "\0\n"])
def test_an_unusable_file_is_invalid_and_no_error(name: str, text: str | None, evidence: Path) -> None:
    (evidence / "serve" / name).unlink()
    if text is not None:
        (evidence / "serve" / name).write_text(text)
    (row,) = idle_shares(evidence, [0])
    assert row.value is None
    assert "it is not known how long GPUs idled" in (row.invalid_because or "")
    assert text is not None or f"No such file or directory: {name}" in (row.invalid_because or "")
