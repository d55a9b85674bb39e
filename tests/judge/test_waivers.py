"""Waivers: one gate of one cell, until a day, and never for what nobody knows."""

from datetime import date

import pytest

from vllm_qualify.evidence.measurement import Measurement, invalid, share_interval, valid
from vllm_qualify.evidence.sequential import Sides
from vllm_qualify.judge.expectations import judge
from vllm_qualify.recipe.gates import Verdict, Waiver, gate_of
from vllm_qualify.report.words import gate_rows

ACCURACY = gate_of(metric="exact_match", task="gsm8k", filter="strict-match", minimum=0.9, unit="fraction")
SMOKE = gate_of(metric="smoke_usage", minimum=1.0, unit="bool")
ONE_MORE_DAY, TOO_LATE = date(2026, 12, 1), date(2026, 12, 2)
ABOUT = {"gate": ACCURACY.label, "owner": "ada@example.com", "reason": "known since the last version"}
WAIVER = Waiver(gpu_type="h200", variant="fp8", profile="balanced", expires=ONE_MORE_DAY, **ABOUT)


def scored(right: int) -> Measurement:
    about = {"task": "gsm8k", "filter": "strict-match", "sample_count": 500}
    return valid("exact_match", right / 500, "x", interval=share_interval(right, 500, Sides(0.05, 0.05)), **about)


NOTHING = invalid("exact_match", "no samples", "x", task="gsm8k", filter="strict-match")


@pytest.mark.parametrize(
    ("measured", "today", "own", "of_the_cell"),
    [
        (scored(400), ONE_MORE_DAY, "fail", "pass"),
        (scored(452), ONE_MORE_DAY, "inconclusive", "pass"),
        (scored(490), ONE_MORE_DAY, "pass", "pass"),
        (NOTHING, ONE_MORE_DAY, "invalid", "invalid"),
        (scored(400), TOO_LATE, "fail", "fail"),
        (scored(452), TOO_LATE, "inconclusive", "inconclusive"),
    ],
)
def test_a_waived_gate_does_not_decide_the_cell(measured: Measurement, today: date, own: Verdict, of_the_cell: Verdict) -> None:
    smoke = valid("smoke_usage", 1.0, "x", sample_count=2)
    judgement = judge([SMOKE, ACCURACY], [smoke, measured], "cell", waivers=[WAIVER], today=today)
    verdict = judgement.gates[1]
    assert (verdict.verdict, judgement.verdict) == (own, of_the_cell)
    assert (verdict.waiver is None, verdict.expired is None) == (today > WAIVER.expires, today <= WAIVER.expires)
    assert judgement.gates[0].waiver is None


def test_a_waiver_of_one_gate_leaves_the_others_as_they_are() -> None:
    bad = valid("smoke_usage", 0.0, "x", sample_count=2)
    judgement = judge([SMOKE, ACCURACY], [bad, scored(400)], "cell", waivers=[WAIVER], today=ONE_MORE_DAY)
    assert judgement.verdict == "fail"


@pytest.mark.parametrize(
    ("today", "measured", "message"),
    [
        (ONE_MORE_DAY, scored(400), "waived until 2026-12-01 by ada@example.com: known since the last version"),
        (TOO_LATE, scored(400), "no longer waived: expired after 2026-12-01 by ada@example.com: known since the last version"),
        (ONE_MORE_DAY, NOTHING, "which waives no invalid evidence"),
    ],
)
def test_the_report_tells_of_a_waiver_and_loudly_of_an_expired_one(today: date, measured: Measurement, message: str) -> None:
    judgement = judge([ACCURACY], [measured], "cell", waivers=[WAIVER], today=today)
    (row,) = gate_rows(judgement)
    assert message in row.waiver
