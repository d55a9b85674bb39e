"""The plan that a recipe has by default decides in a new store: loads as files, through `parse`, `compare` and `stopping`."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.builders.comparisons import LOAD, in_turns, parse_loads, worsening_gate
from tests.builders.loads import CAPTURED, change, copy_repeat, scale
from vllm_qualify.evidence import starts
from vllm_qualify.evidence.load import result
from vllm_qualify.judge.compare.gates import compare
from vllm_qualify.judge.stopping import another_start, load_undecided, start_undecided
from vllm_qualify.judge.verdict import is_decided, surely_misses
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import Gate, gate_of
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.recipe import Serving

UNCHANGED, SLOWER = 13, 12
# The standard deviation of the logarithm of a repeat's time, on either side of a pair.
NOISE, SLOWDOWN = 0.005, 0.05
DEFAULTS = {name: Load.model_fields[name].default for name in ("repeats", "most_repeats")}
# As a release of the catalog's: two gates in turns, and others with noise that share the chance of a wrong `fail`.
GATES = [
    worsening_gate("output_throughput_tok_s", 0.025),
    worsening_gate("tpot_mean_ms", 0.025),
    gate_of(metric="output_throughput_tok_s", minimum=1.0, unit="tok/s"),
    gate_of(metric="ttft_p50_ms", maximum=10_000.0, unit="ms"),
]
PLAN = in_turns(GATES, starts=Serving.model_fields["starts"].default, load=LOAD.model_copy(update=DEFAULTS))


class Machine:
    """Runs a load and the baseline's beside it, and leaves the files of each repeat as the tools do."""

    def __init__(self, evidence: Path, slower: float, seed: int) -> None:
        self.evidence, self._slower, self._rng = evidence, slower, np.random.default_rng(seed)

    def repeat(self, start: int, number: int) -> None:
        folder = starts.root(self.evidence, start) / "load"
        for place, slower in ((folder, 1 + self._slower), (folder / result.BESIDE, 1.0)):
            self._run(place, start, number, slower * math.exp(NOISE * self._rng.standard_normal()))

    def _run(self, folder: Path, start: int, number: int, times: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if number == 1:
            for path in CAPTURED.iterdir():
                if path.is_file() and "-2" not in path.name:
                    shutil.copy(path, folder)
        else:
            shutil.copytree(CAPTURED, folder / "captured")
            copy_repeat(folder / "captured", number, of=1)
            for path in (folder / "captured").glob(f"*-{number}*"):
                shutil.copy(path, folder)
            shutil.rmtree(folder / "captured")
        scale(folder, number, times)
        message = json.loads((folder / f"bench-{number}.json").read_text())
        ttfts = [time * (1 + 1e-9 * start) for time in message["ttfts"]]
        change(folder, number, ttfts=ttfts, start_times=[at + 1e6 * start for at in message["start_times"]])


def run_first_load(plan: CellPlan, machine: Machine) -> None:
    """As `tasks.measure` does."""
    for number in range(1, plan.load.looks[-1] + 1):
        machine.repeat(starts.FIRST, number)
        if number >= plan.load.looks[0] and not load_undecided(plan, machine.evidence):
            return


def run_start(plan: CellPlan, machine: Machine, number: int, gates: list[Gate]) -> None:
    """As `tasks.starts` does."""
    so_far = parse_loads(plan, machine.evidence)
    looks = starts.plan_of(plan, machine.evidence, number).load.looks
    for repeat in range(1, looks[-1] + 1):
        machine.repeat(number, repeat)
        if repeat >= looks[0] and not start_undecided(plan, machine.evidence, so_far, gates):
            return


def end_run(plan: CellPlan, machine: Machine) -> tuple[str, int]:
    """The verdict of a whole run on its load, and the number of its starts."""
    run_first_load(plan, machine)
    number = starts.FIRST
    while gates := another_start(plan, machine.evidence, parse_loads(plan, machine.evidence)):
        number += 1
        run_start(plan, machine, number, gates)
    rows = parse_loads(plan, machine.evidence)
    compared = compare(plan, machine.evidence, rows)
    assert [row.invalid_because for row in compared] == [None] * 2
    known = [*rows, *compared]
    if any(surely_misses(gate, known) for gate in plan.gates):
        return "fail", number
    return "pass" if all(is_decided(gate, known) for gate in plan.gates) else "inconclusive", number


def ended_all(folder: Path, slower: float, runs: int) -> list[tuple[str, int]]:
    return [end_run(PLAN, Machine(folder / str(seed) / "evidence", slower, seed)) for seed in range(runs)]


@pytest.mark.thorough
def test_unchanged_loads_pass_and_slower_ones_fail_in_a_new_store(tmp_path: Path) -> None:
    """With two starts of ten and three repeats, 12 of 13 such loads ended undecided."""
    unchanged = ended_all(tmp_path / "unchanged", 0.0, UNCHANGED)
    verdicts = [verdict for verdict, _ in unchanged]
    assert verdicts.count("fail") == 0
    assert verdicts.count("inconclusive") <= 1
    # By one start alone nothing passes, and no more starts are made than the plan allows.
    assert all(1 < number <= PLAN.starts for verdict, number in unchanged if verdict == "pass")
    slower = [verdict for verdict, _ in ended_all(tmp_path / "slower", SLOWDOWN, SLOWER)]
    assert slower.count("fail") == SLOWER


def test_a_load_that_passes_in_files_is_started_again_first(tmp_path: Path) -> None:
    verdict, number = end_run(PLAN, Machine(tmp_path / "evidence", 0.0, 0))
    assert verdict == "pass"
    assert 1 < number < PLAN.starts
    first = [path.name for path in (tmp_path / "evidence" / "load").glob("bench-*.json")]
    assert len(first) == DEFAULTS["repeats"]
