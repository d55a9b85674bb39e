"""The p-value of a refused gate, and which refusals of a release stand out: against published examples and by simulation."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from tests.approval.builder import NEWER, OLDER, RUN, made_key, of_variant, publish_report, with_gate
from tests.chained import ANCHOR, BASELINE, FEW, OWN, WIDE, Cell, document
from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.sequential import critical_values
from vllm_qualify.judge.chance import LEAST, NEAR, CellChance, p_of_cell, p_value, refusals
from vllm_qualify.judge.verdict import Checks, GateVerdict
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.layout import prepare
from vllm_qualify.recipe.gates import Verdict, gate_of
from vllm_qualify.report.model import Report
from vllm_qualify.report.refusals import refusal_lines
from vllm_qualify.runs.publishing import chances, note_attempt

# Benjamini & Hochberg 1995, section 4.1: fifteen hypotheses, of which their procedure rejects four at 5 %.
PUBLISHED = (
    *(0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344),
    *(0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0),
)
CHECKS = Checks(present=True, trusted=True, noise_known=True, surely_inside=False, maybe_inside=False)


def cells(*p_values: float | None, verdict: Verdict = "fail") -> list[CellChance]:
    return [CellChance(cell=f"cell-{number}", verdict=verdict, p_value=p) for number, p in enumerate(p_values)]


# --- of a gate


@pytest.mark.parametrize("p", [0.3, 0.049, 0.0123, 1e-4, 3e-8])
def test_it_is_the_smallest_chance_with_which_the_gate_still_fails(p: float) -> None:
    value = p_value(lambda chance: chance >= p)
    assert p <= value <= NEAR * p


def test_what_never_fails_has_one_and_what_always_does_the_least() -> None:
    assert p_value(lambda _: False) == 1.0
    assert p_value(lambda _: True) == LEAST


def test_after_several_looks_it_is_that_of_the_bound_there() -> None:
    """A repeated p-value: with it as the chance of a wrong verdict, the critical value of this look is what was measured."""
    information, look, measured = [1.0, 2.0, 3.0], 1, 2.6
    value = p_value(lambda chance: critical_values(information, chance)[look] <= measured)
    assert critical_values(information, value)[look] <= measured < critical_values(information, value / NEAR)[look]
    # Later looks have less left to spend for the same z than a single look would.
    assert value > special.ndtr(-measured)


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    store = DirectoryStore(tmp_path / "store")
    prepare(store)
    return Cell(store, made_key(tmp_path / "key.pem"), tmp_path, document(tmp_path / "weights", *WIDE, **FEW))


def with_least(plan: CellPlan, least: float) -> CellPlan:
    gates = [gate.model_copy(update={"minimum": least}) if gate.label == OWN else gate for gate in plan.gates]
    return plan.model_copy(update={"gates": gates})


def p_values(report: Report) -> dict[str, float | None]:
    return {verdict.gate.label: verdict.p_value for verdict in report.judgement.gates}


def test_that_of_a_score_is_the_one_of_the_score_test(cell: Cell) -> None:
    """10 of 40 wrong, and 95 % wanted: Wilson's bounds turn the test of a share around."""
    report, _ = cell.judged(with_least(cell.plan(1, establish="always"), 0.95), 10)
    z = (0.75 - 0.95) / math.sqrt(0.95 * 0.05 / 40)
    value = p_values(report)[OWN]
    assert value is not None
    assert special.ndtr(z) <= value <= NEAR * special.ndtr(z)


@pytest.mark.thorough
def test_those_of_a_comparison_say_how_sure_the_loss_is(cell: Cell) -> None:
    """The verdict is by 5 % over all gates: the p-value of what fails is below its share, of what is undecided above."""
    cell.baseline(1, 0)
    by_loss: dict[int, tuple[str, float | None]] = {}
    for lost in (2, 9, 11, 16, 24):
        report, _ = cell.judged(cell.plan(10 + lost), lost, steps=5)
        message = next(each for each in report.judgement.gates if each.gate.label == BASELINE)
        by_loss[lost] = (message.verdict, message.p_value)
        share = report.judgement.levels.false_fail
        if message.verdict == "fail":
            assert message.p_value is not None
            assert message.p_value <= NEAR * share
        if message.verdict == "inconclusive" and message.p_value is not None:
            assert message.p_value > share
    assert by_loss[2] == ("pass", None)
    assert by_loss[24][0] == "fail"
    known = [p for _, p in by_loss.values() if p is not None]
    assert known == sorted(known, reverse=True)
    assert ANCHOR in {gate.label for gate in cell.plan(40).judged_gates}


# --- of a cell


def gate(verdict: Verdict, p: float | None = None, *, noisy: bool = True) -> GateVerdict:
    latency, check = gate_of(metric="ttft_p50_ms", maximum=20, unit="ms"), gate_of(metric="smoke_usage", minimum=1, unit="bool")
    about = {"because": "", "checks": CHECKS, "interval": Interval(lower=21, upper=22), "p_value": p}
    return GateVerdict(gate=latency if noisy else check, verdict=verdict, **about)


@pytest.mark.parametrize(
    ("gates", "verdict", "p"),
    [
        ([gate("fail", 0.001), gate("fail", 0.01), gate("pass")], "fail", 0.003),
        ([gate("fail", 0.4), gate("fail", 0.4), gate("pass")], "fail", 1.0),
        ([gate("pass"), gate("pass")], "pass", 1.0),
        # Undecided is no refusal, whatever it looks like.
        ([gate("inconclusive", 0.03), gate("pass")], "inconclusive", 1.0),
        # What has no noise is missed by no chance.
        ([gate("fail", noisy=False), gate("fail", 0.01)], "fail", 0.0),
        ([gate("fail", 0.01), gate("invalid")], "invalid", None),
    ],
)
def test_a_cells_is_the_least_of_its_gates_times_their_number(gates: list[GateVerdict], verdict: Verdict, p: float) -> None:
    assert p_of_cell(gates, verdict) == (p if p is None else pytest.approx(p))


# --- of a release


def test_what_stands_out_is_what_benjamini_and_hochberg_published() -> None:
    refused_cells = refusals(cells(*PUBLISHED))
    assert [cell.p_value for cell in refused_cells.standing_out] == list(PUBLISHED[:4])
    assert [cell.p_value for cell in refused_cells.perhaps_chance] == list(PUBLISHED[4:])
    assert (refused_cells.judged, refused_cells.by_chance) == pytest.approx((15, 0.75))


def test_only_refused_cells_stand_out_and_invalid_ones_do_not_count() -> None:
    refused_cells = refusals([*cells(0.001), *cells(1.0, 1.0, verdict="pass"), *cells(None, verdict="invalid")])
    assert [cell.cell for cell in refused_cells.standing_out] == ["cell-0"]
    assert (refused_cells.judged, refused_cells.perhaps_chance) == (3, [])
    assert refusals([]).judged == 0


def test_of_releases_without_a_loss_hardly_any_has_a_refusal_that_stands_out() -> None:
    """200 cells each, at their bounds: ten refusals of a release on average, and in 5 % of the releases one that stands out."""
    rng, releases, refused, outstanding = np.random.default_rng(22), 1000, 0, 0
    for _ in range(releases):
        p = rng.uniform(size=200)
        refused_cells = refusals([CellChance(cell="c", verdict="fail" if each <= 0.05 else "pass", p_value=each) for each in p])
        refused += len(refused_cells.standing_out) + len(refused_cells.perhaps_chance)
        outstanding += bool(refused_cells.standing_out)
    assert refused / releases == pytest.approx(10, abs=0.4)
    # Four standard errors of a share of 5 % in 1,000.
    assert outstanding / releases <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / releases)


def test_real_losses_stand_out_among_what_chance_refuses() -> None:
    rng, chance, wrong, right = np.random.default_rng(23), 0, 0, 0
    for _ in range(300):
        p = [*rng.uniform(size=190), *special.ndtr(-rng.normal(5.0, 1.0, size=10))]
        verdicts: list[Verdict] = ["fail" if each <= 0.05 else "pass" for each in p]
        judged = zip(range(len(p)), verdicts, p, strict=True)
        refused_cells = refusals([CellChance(cell=str(at), verdict=verdict, p_value=each) for at, verdict, each in judged])
        wrong += sum(int(cell.cell) < 190 for cell in refused_cells.standing_out)
        right += sum(int(cell.cell) >= 190 for cell in refused_cells.standing_out)
        chance += sum(int(cell.cell) < 190 for cell in refused_cells.perhaps_chance)
    assert right / 3000 > 0.9
    assert wrong / (wrong + right) < 0.06
    assert chance / 300 > 8


# --- in words, and from the store


def test_a_release_manager_is_reported_what_to_try_again_where_several_cells_have_a_refusal() -> None:
    refused_cells = refusals([*cells(1e-6, 0.04), *cells(*[1.0] * 198, verdict="pass")])
    assert refusal_lines(refused_cells) == [
        "2 of 200 judged cells are refused; of as many that lost nothing and meet all their bounds, "
        "chance alone refuses at most 10 on average",
        "  stands out: cell-0 (p 1e-06)",
        "  may be chance, and is worth another try: cell-1 (p 0.04)",
        "  of those that stand out, at most 5\N{NO-BREAK SPACE}% are chance, on average",
    ]
    assert refusal_lines(refusals(cells(1.0, 1.0, verdict="pass"))) == []
    assert refusal_lines(refusals(cells(1e-9))) == []


def test_the_newest_run_of_each_cell_counts_of_those_that_hosts_made(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    for run_id, change in ((OLDER, with_gate("fail")), (RUN, with_gate("pass"))):
        note_attempt(store, "first", publish_report(store, tmp_path / "runs", run_id, change).report.plan)
    other = publish_report(store, tmp_path / "runs", NEWER, lambda report: of_variant("bf16")(with_gate("fail")(report)))
    note_attempt(store, "second", other.report.plan)
    unpublished = other.report.plan.model_copy(update={"run_id": "20260315T000000Z-abcdef"})
    note_attempt(store, "second", unpublished)
    of_cells = chances(store, ["first", "second", "third"])
    assert [(each.cell.split("/")[1], each.verdict) for each in of_cells] == [("bf16", "fail"), ("fp8", "pass")]
    assert [each.verdict for each in chances(store, ["first"])] == ["pass"]
