"""No table with anything wrong in any column is ever approved: 10,000 of them, and each with one thing wrong only."""

import math
import random
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

from vllm_qualify.evidence.measurement import Interval, Measurement
from vllm_qualify.judge.expectations import NUMBERS, judge_table, measurement_table
from vllm_qualify.judge.verdict import is_decided, surely_misses, verdict_from, worst_verdict
from vllm_qualify.recipe.gates import gate_of

TABLES = 10_000
GATES = (
    gate_of(metric="exact_match", task="gsm8k", filter="strict-match", minimum=0.9, unit="fraction"),
    gate_of(metric="exact_match", task="gsm8k", filter="strict-match", max_loss=0.01, unit="fraction"),
    gate_of(metric="ttft_p50_ms", max_worsening=0.05, unit="fraction"),
    gate_of(metric="smoke_usage", minimum=1.0, unit="bool"),
)
ABOUT = {"exact_match": {"task": "gsm8k", "filter": "strict-match"}}
GOOD: tuple[dict[str, Any], ...] = (
    {"metric": "exact_match", "unit": "fraction", "value": 0.95, "lower": 0.93, "upper": 0.97} | ABOUT["exact_match"],
    {"metric": "exact_match", "unit": "fraction", "value": 0.001, "lower": -0.003, "upper": 0.005, "against": "run"}
    | ABOUT["exact_match"],
    {"metric": "ttft_p50_ms", "unit": "fraction", "value": -0.01, "lower": -0.03, "upper": 0.02, "against": "run"},
    {"metric": "smoke_usage", "unit": "bool", "value": 1.0, "lower": 1.0, "upper": 1.0},
)
# What a column must not hold. Whether a negative number is wrong depends on the row.
WRONG_NUMBERS: tuple[Any, ...] = (math.nan, math.inf, -math.inf, None, "0.95", "", b"1", [0.95], {}, True, 1e308, -1.5)
WRONG_TEXTS: tuple[Any, ...] = (math.nan, math.inf, None, 1, -1, True, "", "other", [], b"x")
WRONG_COUNTS: tuple[Any, ...] = (0, -1, math.nan, math.inf, None, "500", 1.5, [], True)


def build_unchecked(row: dict[str, Any]) -> Measurement:
    """Past its model, as from another hand."""
    fields: dict[str, Any] = {"filter": None, "task": None, "against": None, "sample_count": 500, "source": "x", "repeats": []}
    fields |= {"traced_to": [], "fingerprint": "", "invalid_because": None}
    fields |= {name: value for name, value in row.items() if name not in ("lower", "upper")}
    interval = Interval.model_construct(lower=row["lower"], upper=row["upper"])
    return Measurement.model_construct(**(fields | {"interval": None if row.get("metric") == "smoke_usage" else interval}))


def spoiled(rng: random.Random) -> list[dict[str, Any]]:
    """The good table with one thing wrong: a value, a row too few, a row too many."""
    rows = [dict(row) for row in GOOD]
    victim = rng.randrange(len(rows))
    row, kind = rows[victim], rng.choice(("number", "text", "count", "reason", "missing", "duplicated"))
    if kind == "number":
        # a yes-or-no check is read by its value alone
        column = "value" if row["unit"] == "bool" else rng.choice(NUMBERS)
        row[column] = rng.choice(WRONG_NUMBERS)
    elif kind == "text":
        row[rng.choice(("metric", "unit", *(name for name in ("task", "filter") if name in row)))] = rng.choice(WRONG_TEXTS)
    elif kind == "count":
        row["sample_count"] = rng.choice(WRONG_COUNTS)
    elif kind == "reason":
        row["invalid_because"] = rng.choice(("3 requests failed", 1, True))
    elif kind == "missing":
        rows.remove(row)
    else:
        rows.insert(rng.randrange(len(rows) + 1), dict(row))
    rng.shuffle(rows)
    return rows


def tables() -> Iterator[pd.DataFrame]:
    """Rows that came out alike, in whatever order, are made into a table once."""
    rng = random.Random(20261120)
    different = {tuple(sorted(map(repr, rows))): rows for rows in (spoiled(rng) for _ in range(TABLES))}
    for rows in different.values():
        yield measurement_table([build_unchecked(row) for row in rows])


def approved(table: pd.DataFrame) -> bool:
    return worst_verdict([verdict_from(checks) for checks in judge_table(GATES, table, "cell").checks]) == "pass"


def test_the_good_table_is_approved() -> None:
    """Else the next test would show nothing."""
    assert approved(measurement_table([build_unchecked(row) for row in GOOD]))


@pytest.mark.thorough
def test_no_table_with_anything_wrong_is_ever_approved() -> None:
    """Tables that came out alike are judged once: Great Expectations takes a second for each."""
    different = {tuple(sorted(map(str, table.to_dict("records")))): table for table in tables()}
    assert 20 <= len(different) <= 100
    wrongly = [content for content, table in different.items() if approved(table)]
    assert wrongly == []


@pytest.mark.parametrize("column", ["label", *NUMBERS, "sample_count", "valid", "unit"])
def test_great_expectations_alone_approves_no_such_table(column: str) -> None:
    """Also where nothing checked the rows before it."""
    good = measurement_table([build_unchecked(GOOD[0])])
    assert worst_verdict([verdict_from(checks) for checks in judge_table(GATES[:1], good, "cell").checks]) == "pass"
    for wrong in (math.nan, None, math.inf, -math.inf, -1, "0.95", "") + ((False, 1.5) if column == "valid" else ()):
        table = good.astype(object)
        table.loc[0, column] = wrong
        (checks,) = judge_table(GATES[:1], table, "cell").checks
        # an upper bound or a count of infinity is odd, and hurts no one
        harmless = wrong == math.inf and column == "sample_count"
        assert verdict_from(checks) != "pass" or harmless, (column, wrong)


def test_what_ends_a_stage_agrees_with_what_great_expectations_finds() -> None:
    """`is_decided` and `surely_misses` judge the same gate on the same measurement in another way."""
    rng = random.Random(5)
    gates, rows = [], []
    for number in range(60):
        lower, upper = sorted((rng.uniform(0.8, 1.0), rng.uniform(0.8, 1.0)))
        gates.append(gate_of(metric="exact_match", task=f"t{number}", filter="f", minimum=0.9, unit="fraction"))
        row = {"metric": "exact_match", "unit": "fraction", "task": f"t{number}", "filter": "f"}
        rows.append(build_unchecked(row | {"value": (lower + upper) / 2, "lower": lower, "upper": upper}))
    verdicts = [verdict_from(checks) for checks in judge_table(gates, measurement_table(rows), "cell").checks]
    assert {"pass", "fail", "inconclusive"} <= set(verdicts)
    assert [is_decided(gate, rows) for gate in gates] == [verdict != "inconclusive" for verdict in verdicts]
    assert [surely_misses(gate, rows) for gate in gates] == [verdict == "fail" for verdict in verdicts]
