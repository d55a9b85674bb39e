"""Numbers, times and outside text in people's form."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from tests.builders.changed import changed
from tests.builders.comparisons import against, cell_plan, server_plan
from tests.report.builder import passed_report
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.measurement import Interval, invalid, valid
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.judge.verdict import WORST_FIRST, Judgement
from vllm_qualify.plan.cell import EarlierTry
from vllm_qualify.recipe.gates import Gate, gate_of
from vllm_qualify.report import words
from vllm_qualify.report.head import facts
from vllm_qualify.report.model import Report
from vllm_qualify.report.page import render_page
from vllm_qualify.secrets import plain


def _spaced(text: str) -> str:
    return text.replace(words.NO_BREAK, " ")


@pytest.mark.parametrize(
    ("number", "unit", "beside", "shown"),
    [
        (0.8127, "fraction", [], "81.27 %"),
        (1.0, "fraction", [], "100.00 %"),
        (0.0, "fraction", [], "0.00 %"),
        (182.42, "ms", [], "182.4 ms"),
        (12608.4, "tok/s", [], "12,608 tok/s"),
        (0.01234, "s", [], "0.01234 s"),
        (1.0, "bool", [], "yes"),
        (0.0, "bool", [], "no"),
        (0.5, "bool", [], "0.5 (1 is yes)"),
        (None, "ms", [], "—"),
        (float("nan"), "ms", [], "nan ms"),
        # Rounding never makes different numbers look equal.
        (0.00001, "fraction", [], "0.001 %"),
        (0.999999, "fraction", [], "99.9999 %"),
        (0.79999, "fraction", [0.8], "79.999 %"),
        (1249.96, "ms", [1250.0], "1,249.96 ms"),
        (1250.0, "ms", [1250.0], "1,250 ms"),
        # Numbers too close to tell apart still come out.
        (0.8 + 1e-16, "fraction", [0.8], "80.000000000000 %"),
    ],
)
def test_a_value_has_its_unit(number: float | None, unit: str, beside: list[float], shown: str) -> None:
    assert _spaced(words.value(number, unit, beside)) == shown


@pytest.mark.parametrize(
    ("lower", "upper", "unit", "shown"),
    [
        (0.7812, 0.819, "fraction", "78.12 to 81.90 %"),
        (12523.2, 12693.4, "tok/s", "12,523 to 12,693 tok/s"),
        (-3.1, 1000.0, "ms", "-3 to 1,000 ms"),
        (5.0001, 5.0002, "ms", "5.0001 to 5.0002 ms"),
        (1.0, 1.0, "bool", "—"),
    ],
)
def test_an_interval_has_two_ends_and_one_unit(lower: float, upper: float, unit: str, shown: str) -> None:
    assert _spaced(words.interval(Interval(lower=lower, upper=upper), unit)) == shown
    assert words.interval(None, unit) == words.DASH


@pytest.mark.parametrize(
    ("gate", "shown"),
    [
        (gate_of(metric="exact_match", filter="strict-match", minimum=0.805, unit="fraction"), "≥ 80.5 %"),
        (gate_of(metric="exact_match", filter="strict-match", minimum=0.29, unit="fraction"), "≥ 29 %"),
        (gate_of(metric="exact_match", filter="strict-match", minimum=1e-7, unit="fraction"), "≥ 0.00001 %"),
        (gate_of(metric="ttft_p99_ms", maximum=1250.0, unit="ms"), "≤ 1,250 ms"),
        (gate_of(metric="startup_s", maximum=0.25, unit="s"), "≤ 0.25 s"),
        (gate_of(metric="smoke_usage", minimum=1.0, unit="bool"), "yes"),
    ],
)
def test_a_bound_is_reported_exactly(gate: Gate, shown: str) -> None:
    assert _spaced(words.words_of_bound(gate)) == shown


@pytest.mark.parametrize(
    ("number", "unit", "shown"),
    [(0.0231, "fraction", "2.31 pp"), (85.02, "tok/s", "85.0 tok/s"), (0.0, "bool", "—"), (None, "ms", "—")],
)
def test_a_change_of_a_share_is_in_percentage_points(number: float | None, unit: str, shown: str) -> None:
    assert _spaced(words.change(number, unit)) == shown


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (words.duration(0.0), "0.0 s"),
        (words.duration(0.01), "under 0.1 s"),
        (words.duration(34.24), "34.2 s"),
        (words.duration(59.97), "1 min 00 s"),
        (words.duration(725.0), "12 min 05 s"),
        (words.duration(3599.7), "1 h 00 min"),
        (words.duration(90061.0), "25 h 01 min"),
        (words.size(0), "0 B"),
        (words.size(1023), "1023 B"),
        (words.size(1536), "1.5 KiB"),
        (words.size(2**20 - 1), "1.0 MiB"),
        (words.size(5 * 2**40), "5.0 TiB"),
    ],
)
def test_durations_and_sizes(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=5, minutes=30)), None])
def test_times_are_in_utc(zone: timezone | None) -> None:
    local = datetime(2026, 3, 14, 9, 26, 53, tzinfo=UTC).astimezone(zone) if zone else datetime(2026, 3, 14, 9, 26, 53)
    assert words.time(local) == "2026-03-14 09:26:53 UTC"


def test_hardware_counts_gpus_and_cores() -> None:
    gpus = Fingerprint(gpu_type="h100", name="NVIDIA H100", count=8, memory_mib=81559, compute_capability="9.0", driver="570.1")
    assert words.hardware(gpus) == "NVIDIA H100 · 8 GPUs · 79.6 GiB each · compute capability 9.0 · driver 570.1"
    built_in = gpus.model_copy(update={"name": "NVIDIA H100 80GB HBM3", "form_factor": "SXM"})
    assert words.hardware(built_in).startswith("NVIDIA H100 80GB HBM3 · SXM · 8 GPUs · ")
    cpu = Fingerprint(gpu_type="cpu", name="Some CPU", count=1, memory_mib=2048, features=["avx2", "avx512f"])
    assert words.hardware(cpu) == "Some CPU · 1 core · 2.0 GiB · avx2, avx512f"


def test_outside_text_cannot_steer_a_terminal_or_turn_a_line_around() -> None:
    assert plain("a\x1b[2J\u202eb\x00\ud800\r\n\tc é 漢") == "a\\x1b[2J\\u202eb\\x00\\ud800\\r\n\tc é 漢"


def test_gates_come_worst_first_and_what_is_missing_is_a_dash(not_approved: Report) -> None:
    rows = words.gate_rows(not_approved.judgement)
    ranks = [WORST_FIRST.index(row.verdict) for row in rows]
    assert ranks == sorted(ranks)
    assert (rows[0].verdict, rows[0].gate) == ("fail", "exact_match (gsm8k, strict-match)")
    assert len(rows) == len(not_approved.judgement.gates)
    row = next(row for row in rows if row.verdict == "invalid")
    assert {row.value, row.interval, row.change, row.samples} == {words.DASH}
    assert "1021 of 1024" in row.because


def test_a_measurement_tells_why_it_lacks_something_and_its_repeats_share_one_unit() -> None:
    assert words.measurement_row(invalid("ttft_p99_ms", "bench failed", "load")).note == "bench failed"
    assert words.measurement_row(valid("startup_s", 3.0, "serve", sample_count=1)).note == "measured once: no interval"
    assert "yes-or-no" in words.measurement_row(valid("smoke_usage", 1.0, "smoke", sample_count=2)).note
    measurement = valid("ttft_p99_ms", 333.8, "load", sample_count=30, repeats=[332.46, 333.8, 1335.14])
    assert words.measurement_row(measurement).repeats == "332 · 334 · 1,335 ms"


def test_a_long_reason_is_reported_once() -> None:
    long = "a reason that is far too long to be read twice in a row"
    assert words.fold_repeats([long, long, "short", "short", long]) == [long, words.AS_ABOVE, "short", "short", long]
    assert words.fold_repeats([]) == []


def test_the_tally_uses_the_designs_words(approved: Report, not_approved: Report) -> None:
    assert words.tally(approved.judgement) == "9 gates: 9 pass"
    assert words.tally(not_approved.judgement) == "9 gates: 1 fail, 3 invalid, 1 inconclusive, 4 pass"
    nothing = Judgement(verdict="invalid", gates=[], levels=Levels(), suite={}, validation={})
    assert words.tally(nothing) == "no gate was judged"


def test_earlier_tries_are_reported_with_their_verdicts() -> None:
    tries = [EarlierTry(run_id="a-1", verdict="fail"), EarlierTry(run_id="a-2", verdict="inconclusive")]
    again = changed(passed_report(), "plan", tries=tries)
    said = "this is try 3 of this model and engine in this cell; before: fail (run a-1), inconclusive (run a-2)"
    assert (words.tries(passed_report().plan), words.tries(again.plan)) == ("", said)
    assert ("Tries", said) in facts(again)
    assert said in render_page(again, lambda file: file.path)


@pytest.mark.parametrize(
    ("score", "max_loss", "said"),
    [(0.0, 0.0075, "(≤ 0.75 pp), since it scores 0.00 %"), (0.5, 0.5, "(≤ 50 pp), since it scores 50.00 %"), (0.51, 0.5, "")],
)
def test_a_baseline_against_which_a_gate_cannot_fail_says_so(score: float, max_loss: float, said: str) -> None:
    gate = gate_of(metric="exact_match", task="gsm8k", filter="strict-match", max_loss=max_loss, unit="fraction")
    row = valid("exact_match", score, "accuracy/results.json", task="gsm8k", filter="strict-match", sample_count=40)
    plan = passed_report().plan.model_copy(update={"gates": [gate], "establishes": True})
    told = _spaced(words.unlosable_sentence(plan, [row]))
    begins = "no later run can fail against it: exact_match (gsm8k, strict-match) against the baseline "
    assert told == (begins + said if said else "")
    assert words.unlosable_sentence(plan.model_copy(update={"establishes": False}), [row]) == ""
    without = invalid("exact_match", "none", "accuracy", task="gsm8k", filter="strict-match")
    assert words.unlosable_sentence(plan, [without]) == ""


def test_the_report_of_such_a_baseline_says_so() -> None:
    report = passed_report()
    loss = gate_of(metric="exact_match", task="gsm8k", filter="strict-match", max_loss=0.95, unit="fraction")
    given = changed(report, "plan", gates=[*report.plan.gates, loss], establishes=True)
    assert "can fail against it" in dict(facts(given))["As baseline"]
    assert "As baseline" not in dict(facts(report))


@pytest.mark.parametrize(
    ("beside", "said"), [(server_plan(), ", loads in turns"), (None, ", loads unpaired: measured then and now")]
)
def test_it_is_said_whether_loads_were_measured_in_turns(beside: ServerPlan | None, said: str) -> None:
    gates = [gate_of(metric="ttft_p50_ms", max_worsening=0.05, unit="fraction")]
    assert words.baseline_sentence(against(cell_plan(gates, beside=beside))).endswith(said)
