"""Gates as a Great Expectations suite over the measurement table.

Great Expectations takes seconds to import, so it is imported only when a table is judged. Its expectations on a column's values
hold if their condition matches no row, and for NaN. Those on a column's minimum do not hold then, and take half the time.
So the table is turned: it has one row, in which each gate has its own columns, null if nothing can be trusted. In one row the
minimum is the value. With a condition on rows, each expectation would take twice as long, 25 ms and more.
"""

import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from vllm_qualify.evidence.measurement import Measurement, invalid
from vllm_qualify.evidence.sequential import levels_of
from vllm_qualify.judge.verdict import Checks, Judgement, bounds_of, gate_verdict, measurements_of, with_waiver, worst_verdict
from vllm_qualify.lazy import Lazy
from vllm_qualify.recipe.gates import Gate, Waiver
from vllm_qualify.recipe.metrics import METRICS

if TYPE_CHECKING:
    import pandas as pd
    from great_expectations.expectations.expectation import Expectation
else:
    pd = Lazy("pandas")

BOUNDS = ("lower", "upper")
SAMPLES = "samples"
NUMBERS = ("value", *BOUNDS)
FIGURES = (SAMPLES, *NUMBERS)
COLUMNS = ("label", "metric", "task", "filter", *NUMBERS, "sample_count", "valid", "unit", "source", "traced_to")


def measurement_table(measurements: Sequence[Measurement]) -> "pd.DataFrame":
    """One row per measurement, with the columns COLUMNS."""
    rows = [_make_row(_check_measurement(measurement)) for measurement in measurements]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(NUMBERS, float))


def _make_row(measurement: Measurement) -> dict[str, Any]:
    own, interval = {name: getattr(measurement, name, None) for name in COLUMNS}, bounds_of(measurement)
    return own | {
        "lower": interval.lower if interval else None,
        "upper": interval.upper if interval else None,
        "valid": measurement.invalid_because is None and measurement.sample_count > 0,
        "traced_to": " ".join(measurement.traced_to),
    }


class GateReading(NamedTuple):
    """What a table has for one gate: the number of its rows, and the numbers of a single row, NaN if they are not numbers.

    `samples` is also NaN unless the row is valid, has the gate's unit, and has a value that its metric can have.
    """

    rows: int
    samples: float = math.nan
    value: float = math.nan
    lower: float = math.nan
    upper: float = math.nan


class SuiteResult(NamedTuple):
    """Great Expectations' results for a table: each gate's checks and expectations, the suite and its result."""

    checks: list[Checks]
    expectations: list[list[int]]
    suite: dict[str, object]
    validation: dict[str, object]


def judge(
    gates: Sequence[Gate],
    measurements: Sequence[Measurement],
    name: str,
    *,
    tries: int = 0,
    waivers: Sequence[Waiver] = (),
    today: date | None = None,
    docs: Path | None = None,
) -> Judgement:
    """The verdicts of `gates` on `measurements`, with the suite `name` that decided and its validation result.

    The release did not pass `tries` times before. With a folder `docs`, Data Docs are built there. A waiver counts if it has
    not expired on `today`, by default today in UTC.
    """
    measurements = [_check_measurement(measurement) for measurement in measurements]
    judged = judge_table(gates, measurement_table(measurements), name, docs)
    day = today or datetime.now(UTC).date()
    verdicts = [
        with_waiver(gate_verdict(gate, checks, measurements_of(gate, measurements), expectations), waivers, day)
        for gate, checks, expectations in zip(gates, judged.checks, judged.expectations, strict=True)
    ]
    return Judgement(
        verdict=worst_verdict([each.counts_as for each in verdicts]),
        gates=verdicts,
        comparisons=[row for row in measurements if row.against is not None],
        levels=levels_of(gates, tries),
        suite=judged.suite,
        validation=judged.validation,
    )


def judge_table(gates: Sequence[Gate], table: "pd.DataFrame", name: str, docs: Path | None = None) -> SuiteResult:
    """Run the suite of `gates` over a table that `measurement_table` made."""
    # Great Expectations reads this at import.
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx

    rows = table.to_dict("records")
    readings = [_read_gate(gate, rows) for gate in gates]
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    suite = context.suites.add(gx.ExpectationSuite(name=name, expectations=_list_expectations(gates)))
    batch = context.data_sources.add_pandas("measurements").add_dataframe_asset("table")
    definition = batch.add_batch_definition_whole_dataframe("all")
    validation = context.validation_definitions.add(gx.ValidationDefinition(name=name, data=definition, suite=suite))
    # One row, with a column for each number of each gate.
    pairs = list(zip(gates, readings, strict=True))
    row = {_column_name(gate, name): getattr(reading, name) for gate, reading in pairs for name in FIGURES}
    result = validation.run(batch_parameters={"dataframe": pd.DataFrame([row], dtype=float)})
    if docs:
        from vllm_qualify.judge.data_docs import build_docs

        build_docs(context, docs)
    held, expectations = _read_outcomes(result.results)
    return SuiteResult(
        checks=[_checks_of_gate(gate, reading, held) for gate, reading in pairs],
        expectations=[expectations.get(gate.label, []) for gate in gates],
        suite=suite.to_json_dict(),
        validation=_plain_json(result.to_json_dict()),
    )


def _check_measurement(measurement: Measurement) -> Measurement:
    """The measurement, invalid if its model refuses it: it may come from a file, or from code that bypassed the model."""
    try:
        return Measurement.model_validate(measurement.model_dump(warnings=False))
    except (ValidationError, AttributeError, TypeError) as error:
        problem = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else repr(error)
        place = ".".join(map(str, error.errors()[0]["loc"])) if isinstance(error, ValidationError) else ""
        others = {name: getattr(measurement, name, None) for name in ("task", "filter", "against")}
        names = {name: value for name, value in others.items() if isinstance(value, str)}
        metric = getattr(measurement, "metric", None)
        known = metric if isinstance(metric, str) and metric in METRICS else next(iter(METRICS))
        return invalid(known, f"not a valid measurement: {place} {problem}", "", **names)


def _list_expectations(gates: Sequence[Gate]) -> "list[Expectation]":
    expectations: list[Expectation] = []
    for gate in gates:
        for check, expectation in _expectations_of_gate(gate):
            # These ids are the same each time the same gates are judged; Great Expectations' own ids are not.
            expectation.meta = {"id": len(expectations) + 1, "gate": gate.label, "check": check}
            expectations.append(expectation)
    return expectations


def _expectations_of_gate(gate: Gate) -> "Iterator[tuple[str, Expectation]]":
    """The expectations of a gate, each with its check. A gate with two bounds has the checks of both, and all must hold."""
    import great_expectations.expectations as gxe

    # Great Expectations' own description does not say what makes a row trusted.
    sentence = f"{gate.label} has one row, which is valid, in {gate.unit}, of at least one sample, and possible"
    yield "trusted", gxe.ExpectColumnMinToBeBetween(column=_column_name(gate, SAMPLES), min_value=1, description=sentence)
    (lower, upper), (least, largest), (at_least, at_most) = BOUNDS, _possible_range(gate), gate.limits
    # A value outside the metric's range is inside no bound. The pessimistic end of the interval is the first one.
    sides: list[tuple[Any, float | None, float | None, tuple[str, str]]] = []
    if at_least is not None:
        sides.append((gxe.ExpectColumnMinToBeBetween, at_least, largest, (lower, upper)))
    if at_most is not None:
        sides.append((gxe.ExpectColumnMaxToBeBetween, least, at_most, (upper, lower)))
    for inside, from_value, to_value, ends in sides:
        # A yes-or-no check has no noise: only its value is checked.
        columns = zip(("surely_inside", "maybe_inside"), ends, strict=True) if gate.has_noise else [("surely_inside", "value")]
        for check, column in columns:
            yield check, inside(column=_column_name(gate, column), min_value=from_value, max_value=to_value)


def _column_name(gate: Gate, name: str) -> str:
    return f"{gate.label}: {name}"


def _read_gate(gate: Gate, rows: Sequence[Mapping[Hashable, Any]]) -> GateReading:
    own = [row for row in rows if row["label"] == gate.label]
    if len(own) != 1:
        return GateReading(rows=len(own))
    (row,) = own
    numbers = {name: _to_number(row[name]) for name in NUMBERS}
    least, largest = _possible_range(gate)
    is_trusted = row["valid"] is True and row["unit"] == gate.unit and least <= numbers["value"] <= largest
    return GateReading(rows=1, samples=_to_number(row["sample_count"]) if is_trusted else math.nan, **numbers)


def _to_number(value: object) -> float:
    """The number, or NaN for everything else: text, bools, None, and numbers that are not finite."""
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        return math.nan
    return float(value)


def _checks_of_gate(gate: Gate, reading: GateReading, held: dict[tuple[str, str], bool]) -> Checks:
    """The checks of a gate. One without a result did not hold. Both bounds of a yes-or-no check are its value."""
    trusted, surely, maybe = (held.get((gate.label, name), False) for name in ("trusted", "surely_inside", "maybe_inside"))
    has_bounds = math.isfinite(reading.lower) and math.isfinite(reading.upper)
    return Checks(
        present=reading.rows == 1,
        trusted=trusted,
        noise_known=has_bounds or not gate.has_noise,
        surely_inside=surely,
        maybe_inside=maybe if gate.has_noise else surely,
    )


def _possible_range(gate: Gate) -> tuple[float, float]:
    metric = METRICS[gate.metric]
    is_share = metric.unit in ("fraction", "bool")
    least = -1.0 if metric.compared_unit == "fraction" else -1e300
    return (least if gate.is_compared else 0.0, 1.0 if is_share else 1e300)


def _read_outcomes(results: Sequence[Any]) -> tuple[dict[tuple[str, str], bool], dict[str, list[int]]]:
    """(gate, check) → whether its expectation held, and gate → the ids of its expectations.

    An expectation that could not be evaluated makes the gate's row untrusted.
    """
    outcomes: dict[tuple[str, str], bool] = {}
    ids: dict[str, list[int]] = {}
    for result in results:
        meta = result.expectation_config.meta
        gate, check = meta["gate"], meta["check"]
        outcomes[gate, check] = outcomes.get((gate, check), True) and bool(result.success)
        ids.setdefault(gate, []).append(meta["id"])
        entries = [result.exception_info, *result.exception_info.values()]
        if any(entry.get("raised_exception") for entry in entries if isinstance(entry, dict)):
            outcomes[gate, "trusted"] = False
    return outcomes, ids


def _plain_json(value: Any) -> Any:
    """JSON without NaN and infinities, which are not JSON: they become text."""
    if isinstance(value, dict):
        return {str(key): _plain_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_json(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
