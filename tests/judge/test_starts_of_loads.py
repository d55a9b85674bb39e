"""A load compared over several starts of the server: all repeats count, and so does what differs between starts."""

import json
import math
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.builders.comparisons import (
    LOAD,
    captured_load,
    cell_plan,
    in_turns,
    interval_of,
    keep_history,
    parse_loads,
    reason,
    worsening_gate,
)
from tests.builders.loads import change, scale
from tests.builders.starts import record_repeat
from vllm_qualify.evidence import starts
from vllm_qualify.evidence.load import result
from vllm_qualify.evidence.measurement import EvidenceFile, Measurement, StageEvidence
from vllm_qualify.evidence.stages.table import parse_unfinished
from vllm_qualify.judge.compare.enough import not_established
from vllm_qualify.judge.compare.gates import compare
from vllm_qualify.judge.compare.loads import LEANING
from vllm_qualify.judge.compare.noise import ASSUMED, DAYS
from vllm_qualify.judge.compare.places import STARTS_STAGE
from vllm_qualify.judge.stopping import another_start
from vllm_qualify.judge.verdict import Checks, gate_verdict, is_decided
from vllm_qualify.plan.cell import BetweenStarts, CellPlan, EarlierTry

GATE = worsening_gate()
IN_TURNS, HISTORY = in_turns([GATE], starts=3), cell_plan([GATE], starts=3)
KNOWN = [
    BetweenStarts(label="ttft_p50_ms", of=of, variance=1e-10, noise=0.0, freedom=30.0, runs=["one", "another"])
    for of in ("start", "pair")
]


def start(evidence: Path, number: int, slower: float, beside: float | None = None) -> None:
    """The captured repeats so many times as slow, long after those of the start before; and the baseline's beside them."""
    folder = starts.root(evidence, number) / "load"
    captured_load(folder, slower)
    if beside is not None:
        captured_load(folder / result.BESIDE, beside)
    for place in (folder, folder / result.BESIDE):
        for path in place.glob("bench-*.json"):
            repeat, message = int(path.stem.removeprefix("bench-")), json.loads(path.read_text())
            ttfts = [time * (1 + 1e-9 * number) for time in message["ttfts"]]
            change(place, repeat, ttfts=ttfts, start_times=[at + 1e6 * number for at in message["start_times"]])


def keep_further(evidence: Path, folder: Path, plan: CellPlan) -> None:
    """The further starts of a baseline, as a run leaves them."""
    stage = StageEvidence(
        stage="starts",
        started_at=datetime(2026, 3, 1, 8, tzinfo=UTC),
        duration_s=8.0,
        files=[EvidenceFile(path="starts/machine.json", sha256="0" * 64, size=1)],
        measurements=parse_unfinished("starts", plan, folder),
        run_id="20260301T080000Z-0a1b2c",
    )
    (evidence / "baseline" / STARTS_STAGE).write_text(stage.model_dump_json(indent=2))


def compare_loads(plan: CellPlan, evidence: Path) -> Measurement:
    (row,) = compare(plan, evidence, parse_loads(plan, evidence))
    return row


def test_in_turns_the_pairs_of_all_starts_count(evidence: Path) -> None:
    start(evidence, 1, 1.1, 1.0)
    start(evidence, 2, 1.2 * 1.5, 1.5)
    row = compare_loads(IN_TURNS, evidence)
    assert row.value == pytest.approx(math.sqrt(1.1 * 1.2) - 1, rel=1e-6)
    assert row.sample_count == 2 * 2 * (32 + 20)
    files = {path.split(":")[0] for path in row.traced_to}
    assert {f"{root}load/{side}bench-2.json" for root in ("", "starts/2/") for side in ("", "beside/")} <= files
    assert all((evidence / file).is_file() for file in files)
    assert ASSUMED not in row.not_in_interval


def test_what_differs_between_starts_is_in_the_interval_and_the_source_says_by_which_runs_it_is_known(evidence: Path) -> None:
    """The pairs of a start agree, so that one start alone would be sure of its own value."""
    start(evidence, 1, 1.1, 1.0)
    alone = compare_loads(IN_TURNS, evidence)
    assert interval_of(alone).lower < 0.095 < 0.105 < interval_of(alone).upper
    assert alone.not_in_interval == [ASSUMED]
    assert "approved" not in alone.source
    known = compare_loads(IN_TURNS.model_copy(update={"between": KNOWN}), evidence)
    assert known.source.endswith("; how much starts differ, by 2 approved runs too")
    start(evidence, 2, 1.2, 1.0)
    interval = interval_of(compare_loads(IN_TURNS, evidence))
    assert interval.lower < 0.1 < 0.2 < interval.upper


def test_starts_that_differ_by_far_more_than_is_assumed_are_told_of(evidence: Path) -> None:
    for number, slower in ((1, 1.0), (2, 1.1), (3, 1.2)):
        start(evidence, number, slower, 1.0)
    (words,) = compare_loads(IN_TURNS, evidence).not_in_interval
    assert words.startswith("all of what starts of this server differ by: that is about ")
    assert words.endswith("%, far more than is assumed, and so few show it badly")


def test_a_server_that_comes_nearer_after_each_start_does_not_fail_and_is_told_of(evidence: Path) -> None:
    """Each first repeat is 1.3 times as slow as the baseline's, each second one 1.15 times: a third may be as fast."""
    plan = in_turns([GATE], starts=16)
    for number in (1, 2, 3):
        start(evidence, number, 1.3, 1.0)
        scale(starts.root(evidence, number) / "load", 2, 1.15 / 1.3)
    row = compare_loads(plan, evidence)
    assert row.finding == LEANING
    assert not is_decided(GATE, [row])
    checks = Checks(present=True, trusted=True, noise_known=True, surely_inside=False, maybe_inside=True)
    assert LEANING in gate_verdict(GATE, checks, [row]).because
    assert another_start(plan, evidence, parse_loads(plan, evidence)) == [GATE]


@pytest.mark.parametrize("plan", [IN_TURNS, HISTORY], ids=["in turns", "history"])
def test_a_sure_gain_by_one_start_needs_another(plan: CellPlan, evidence: Path, tmp_path: Path) -> None:
    """Also where nothing else is open, and whatever approved runs show of starts. A sure loss needs none."""
    keep_history(evidence, captured_load(tmp_path / "before" / "load"))
    start(evidence, 1, 0.2, 1.0)
    row = compare_loads(plan, evidence)
    assert ASSUMED in row.not_in_interval
    if is_decided(GATE, [row]):
        assert another_start(plan, evidence, parse_loads(plan, evidence)) == [GATE]
    known = plan.model_copy(update={"between": KNOWN})
    assert ASSUMED not in compare_loads(known, evidence).not_in_interval


def test_two_starts_that_agree_need_a_third(evidence: Path) -> None:
    plan = in_turns([GATE], starts=16)
    for number in (1, 2):
        start(evidence, number, 0.2, 1.0)
    assert is_decided(GATE, [compare_loads(plan, evidence)])
    assert another_start(plan, evidence, parse_loads(plan, evidence)) == [GATE]
    start(evidence, 3, 0.2, 1.0)
    assert another_start(plan, evidence, parse_loads(plan, evidence)) == []


def test_a_sure_loss_needs_no_other_start(evidence: Path) -> None:
    start(evidence, 1, 2.0, 1.0)
    assert another_start(IN_TURNS, evidence, parse_loads(IN_TURNS, evidence)) == []


def test_beside_history_the_starts_of_either_count(evidence: Path, tmp_path: Path) -> None:
    before = tmp_path / "before"
    start(before, 1, 1.0)
    start(before, 2, 1.3)
    start(evidence, 1, 1.2)
    keep_history(evidence, before / "load")
    alone = compare_loads(HISTORY, evidence)
    assert alone.not_in_interval == [ASSUMED, DAYS]
    keep_further(evidence, before, HISTORY)
    row = compare_loads(HISTORY, evidence)
    assert row.value == pytest.approx(1.2 / math.sqrt(1.3) - 1, rel=1e-6)
    assert row.not_in_interval[:1] == [ASSUMED]
    assert interval_of(row).lower < -0.2
    start(evidence, 2, 1.25)
    both = compare_loads(HISTORY, evidence)
    assert both.value == pytest.approx(math.sqrt(1.2 * 1.25 / 1.3) - 1, rel=1e-6)
    assert both.not_in_interval[0] == DAYS


def test_a_start_of_the_baseline_that_does_not_count_is_left_out(evidence: Path, tmp_path: Path) -> None:
    before = tmp_path / "before"
    start(before, 1, 1.0)
    shutil.copytree(before / "load", before / "starts/2/load")
    start(evidence, 1, 1.2)
    keep_history(evidence, before / "load")
    keep_further(evidence, before, HISTORY)
    assert compare_loads(HISTORY, evidence).value == pytest.approx(0.2, rel=1e-6)


def test_a_start_without_the_baseline_beside_it_and_a_copied_one_are_invalid(evidence: Path) -> None:
    start(evidence, 1, 1.1, 1.0)
    start(evidence, 2, 1.1)
    assert "the baseline's: " in reason(compare_loads(IN_TURNS, evidence))
    shutil.rmtree(evidence / "starts/2")
    shutil.copytree(evidence / "load", evidence / "starts/2/load")
    assert "start 2: the load of start 2 has the requests of an earlier start's" in reason(compare_loads(IN_TURNS, evidence))


def test_a_budget_that_leaves_no_time_for_another_start_is_reported(evidence: Path) -> None:
    start(evidence, 1, 1.02, 1.0)
    for side in (evidence / "load", evidence / "load" / result.BESIDE):
        for repeat in (1, 2):
            record_repeat(side, repeat, 30.0)
    plan = IN_TURNS.model_copy(update={"load": LOAD.model_copy(update={"time_budget_s": 150.0})})
    row = compare_loads(plan, evidence)
    assert row.ended_because == "time_budget_s leaves 30 s for the load of start 2, and a repeat may take 60 s"
    assert another_start(plan, evidence, parse_loads(plan, evidence)) == []
    longer = plan.model_copy(update={"load": LOAD.model_copy(update={"time_budget_s": 500.0})})
    assert compare_loads(longer, evidence).ended_because is None
    assert another_start(longer, evidence, parse_loads(longer, evidence)) == [GATE]


def lacking(plan: CellPlan, evidence: Path) -> list[str]:
    return [row.invalid_because or "" for _, row in not_established(plan, evidence, parse_loads(plan, evidence))]


def test_a_baseline_needs_each_of_its_starts(evidence: Path) -> None:
    plan = cell_plan([GATE], baseline=None, starts=2)
    start(evidence, 1, 1.0)
    assert lacking(plan, evidence) == ["it cannot be a baseline for this: start 2 did not measure it"]
    assert lacking(plan.model_copy(update={"starts": 1}), evidence) == []
    start(evidence, 2, 1.1)
    assert lacking(plan, evidence) == []
    change(evidence / "starts/2/load", 1, failed=1)
    (message,) = lacking(plan, evidence)
    assert message.startswith("it cannot be a baseline for this: start 2: repeat 1: ")


def test_a_baseline_needs_no_load_that_its_budget_left_out(evidence: Path) -> None:
    start(evidence, 1, 1.0)
    for repeat in (1, 2):
        record_repeat(evidence / "load", repeat, 30.0)
    settings = LOAD.model_copy(update={"time_budget_s": 70.0})
    assert lacking(cell_plan([GATE], baseline=None, starts=2, load=settings), evidence) == []


def test_two_starts_that_have_nothing_in_common_are_no_reason_to_fail(evidence: Path) -> None:
    """The interval is then as wide as can be shown, and the gate undecided."""
    start(evidence, 1, 1.0, 1.0)
    start(evidence, 2, 4.0, 1.0)
    row = compare_loads(IN_TURNS.model_copy(update={"tries": [EarlierTry(run_id="r", verdict="fail")] * 9}), evidence)
    assert interval_of(row).lower < 0.05
    assert 1e1 < interval_of(row).upper < 1e8
    assert not is_decided(GATE, [row])
