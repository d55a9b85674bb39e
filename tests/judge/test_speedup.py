"""What speculative decoding gains, from the captured files of a server with it beside the same server without it."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.builders.comparisons import CPU, DRAFTED, cell_plan, interval_of, reason, server_plan
from tests.builders.loads import change, scale
from tests.builders.speculations import CAPTURED, SETTINGS
from vllm_qualify.evidence.load.speculation import parse_speculation
from vllm_qualify.evidence.measurement import Measurement, geometric_mean
from vllm_qualify.evidence.sequential import levels_of
from vllm_qualify.judge.compare.speedup import speedup
from vllm_qualify.judge.verdict import surely_misses
from vllm_qualify.recipe.gates import Gate, gate_of
from vllm_qualify.recipe.load import Load

SLACK = Load.model_validate(SETTINGS.model_dump() | {"min_duration_s": 0.001})
NAMES = {"speculative_speedup": "profile", "speculative_speedup_batch1": "batch1"}
TRUE_GAIN = 1.5


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """The server with a draft is made so many times faster than the one without, whose repeats differ by 1 %."""
    for name in NAMES.values():
        for side in ("undrafted", "drafted"):
            shutil.copytree(CAPTURED / name / "undrafted", tmp_path / "speculation" / name / side)
        scale(tmp_path / "speculation" / name / "drafted", 1, 1 / TRUE_GAIN)
        scale(tmp_path / "speculation" / name / "drafted", 2, 1.01 / TRUE_GAIN)
    return tmp_path


def gained(evidence: Path, machine: str = CPU.id, gates: tuple[Gate, ...] = (), **changes: Any) -> dict[str, Measurement]:
    about: dict[str, Any] = {"server": server_plan(**DRAFTED), "undrafted": server_plan(), "load": SLACK} | changes
    plan = cell_plan(gates, **about)
    stage = parse_speculation(evidence / "speculation", plan.load, levels_of(plan.judged_gates), plan.server)
    measured = [row.model_copy(update={"fingerprint": machine}) for row in stage]
    return {measurement.metric: measurement for measurement in speedup(plan, evidence, measured)}


def gate(metric: str, minimum: float) -> Gate:
    return gate_of(metric=metric, minimum=minimum, unit="ratio")


@pytest.mark.parametrize("metric", NAMES)
def test_the_speedup_is_the_ratio_of_the_rates(evidence: Path, metric: str) -> None:
    row = gained(evidence)[metric]
    assert (row.unit, row.against, row.fingerprint) == ("ratio", None, CPU.id)
    assert row.repeats == pytest.approx([TRUE_GAIN, TRUE_GAIN / 1.01])
    assert row.value == pytest.approx(geometric_mean(row.repeats))
    assert interval_of(row).lower < TRUE_GAIN / math.sqrt(1.01) < interval_of(row).upper
    assert all(path.startswith(f"speculation/{NAMES[metric]}/") for path in row.traced_to)
    assert surely_misses(gate(metric, 2.0), [row])
    assert not surely_misses(gate(metric, 1.2), [row])


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_speedups_interval_does_not_have_how_much_starts_differ_and_says_so(evidence: Path, in_turn: bool) -> None:
    for row in gained(evidence, undrafted_in_turn=in_turn).values():
        assert row.not_in_interval == ["what differs from start to start of a server, since one of the two was started once"]


@pytest.mark.parametrize("metric", NAMES)
def test_a_speedup_that_is_20_percent_worse_is_called_worse(evidence: Path, metric: str) -> None:
    for repeat in (1, 2):
        scale(evidence / "speculation" / NAMES[metric] / "drafted", repeat, 1.2)
    row = gained(evidence)[metric]
    assert row.value == pytest.approx(TRUE_GAIN / 1.2, rel=0.01)
    assert surely_misses(gate(metric, TRUE_GAIN / 1.05), [row])


def test_without_the_same_server_or_without_the_stage_there_is_none(evidence: Path) -> None:
    assert gained(evidence, undrafted=None) == {}
    plan = cell_plan([], server=server_plan(**DRAFTED), undrafted=server_plan(), load=SLACK)
    assert speedup(plan, evidence, []) == []


@pytest.mark.parametrize(("side", "message"), [("drafted", "repeat 1"), ("undrafted", "without it: repeat 1")])
def test_a_speedup_without_a_trustworthy_load_is_invalid(evidence: Path, side: str, message: str) -> None:
    change(evidence / "speculation" / "profile" / side, 1, failed=1)
    rows = gained(evidence)
    assert reason(rows["speculative_speedup"]).startswith(message)
    assert rows["speculative_speedup_batch1"].invalid_because is None


def test_another_machine_or_a_repeat_that_only_one_server_has_makes_it_invalid(evidence: Path) -> None:
    for row in gained(evidence, machine="another").values():
        assert "not measured on the planned machine" in reason(row)
        assert row.fingerprint == "another"
    (evidence / "speculation" / "batch1" / "undrafted" / "bench-2.json").unlink()
    assert "1 of at least 2 repeats" in reason(gained(evidence)["speculative_speedup_batch1"])


def test_the_interval_has_its_failing_side_the_surer(evidence: Path) -> None:
    """Its floor is met by what lies above the lower bound, so that this is the side of a false pass."""
    gates = tuple(gate(metric, 1.0) for metric in NAMES)
    row = gained(evidence, gates=gates)["speculative_speedup"]
    assert row.value is not None
    below, above = (abs(math.log(bound / row.value)) for bound in (interval_of(row).lower, interval_of(row).upper))
    assert below < above
