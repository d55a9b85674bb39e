"""Gates as a Great Expectations suite over the measurement table.

Great Expectations takes seconds to import, so only `judge` does. A condition that matches no row, and a NaN, satisfy its column
expectations; that is why every gate also expects its row to be there and its numbers not to be null.
"""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import ValidationError

from vllm_qualify.evidence.measurement import Measurement, invalid
from vllm_qualify.judge.verdict import Checks, Judgement, bounds_of, gate_verdict, worst
from vllm_qualify.recipe.model import Gate

if TYPE_CHECKING:
    from great_expectations import ExpectationSuite

CHECKS = tuple(Checks.model_fields)


def measurement_table(measurements: Sequence[Measurement]) -> pd.DataFrame:
    """One row per measurement: label, metric, filter, value, lower, upper, sample_count, valid, unit, source."""
    rows = [_row(measurement) for measurement in measurements]
    columns = ["label", "metric", "filter", "value", "lower", "upper", "sample_count", "valid", "unit", "source"]
    return pd.DataFrame(rows, columns=columns).astype({"value": float, "lower": float, "upper": float})


def label_of(metric: str, filter_name: str | None) -> str:
    return f"{metric} ({filter_name})" if filter_name else metric


def _row(measurement: Measurement) -> dict[str, Any]:
    interval = bounds_of(measurement)
    return {
        "label": label_of(measurement.metric, measurement.filter),
        "metric": measurement.metric,
        "filter": measurement.filter,
        "value": measurement.value,
        "lower": interval.lower if interval else None,
        "upper": interval.upper if interval else None,
        "sample_count": measurement.sample_count,
        "valid": measurement.invalid_because is None and measurement.sample_count > 0,
        "unit": measurement.unit,
        "source": measurement.source,
    }


def judge(gates: Sequence[Gate], measurements: Sequence[Measurement], name: str) -> Judgement:
    """The verdicts of `gates` over `measurements`, with the suite `name` that decided and its validation result."""
    measurements = [_checked(measurement) for measurement in measurements]
    # Read by Great Expectations at import.
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    suite = context.suites.add(gx.ExpectationSuite(name=name))
    _add_expectations(suite, gates)
    batch = context.data_sources.add_pandas("measurements").add_dataframe_asset("table")
    definition = batch.add_batch_definition_whole_dataframe("all")
    validation = context.validation_definitions.add(gx.ValidationDefinition(name=name, data=definition, suite=suite))
    result = validation.run(batch_parameters={"dataframe": measurement_table(measurements)})
    found = _found(result.results)
    verdicts = [gate_verdict(gate, _checks(found, gate), _of(gate, measurements)) for gate in gates]
    return Judgement(
        verdict=worst([gate.verdict for gate in verdicts]),
        gates=verdicts,
        suite=suite.to_json_dict(),
        validation=_plain(result.to_json_dict()),
    )


def _checked(measurement: Measurement) -> Measurement:
    """Measurements may come from a file, or from code that built them past their model: what the model refuses is invalid."""
    try:
        return Measurement.model_validate(measurement.model_dump(warnings=False))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        return invalid(measurement.metric, f"not a valid measurement: {place} {problem['msg']}", "", filter=measurement.filter)


def _of(gate: Gate, measurements: Sequence[Measurement]) -> list[Measurement]:
    """The gate's measurement. One that failed before its filter was known stands for those of all filters."""
    own = [found for found in measurements if label_of(found.metric, found.filter) == gate.label]
    return own or [found for found in measurements if found.metric == gate.metric and found.filter is None]


def _add_expectations(suite: "ExpectationSuite", gates: Sequence[Gate]) -> None:
    import great_expectations.expectations as gxe
    from great_expectations.expectations.row_conditions import Column

    for gate in gates:
        row = Column("label") == gate.label
        at_bound = {"min_value": gate.bound} if gate.minimum is not None else {"max_value": gate.bound}
        pessimistic, optimistic = ("lower", "upper") if gate.minimum is not None else ("upper", "lower")
        expected = {
            "present": [gxe.ExpectTableRowCountToEqual(value=1, row_condition=row)],
            "trusted": [
                gxe.ExpectColumnValuesToBeInSet(column="valid", value_set=[True], row_condition=row),
                gxe.ExpectColumnValuesToNotBeNull(column="value", row_condition=row),
                gxe.ExpectColumnValuesToBeInSet(column="unit", value_set=[gate.unit], row_condition=row),
                *(
                    gxe.ExpectColumnValuesToBeBetween(column=column, min_value=0, max_value=_largest(gate), row_condition=row)
                    for column in ("value", "lower", "upper")
                ),
            ],
            "noise_known": [gxe.ExpectColumnValuesToNotBeNull(column=bound, row_condition=row) for bound in ("lower", "upper")],
            "surely_inside": [gxe.ExpectColumnValuesToBeBetween(column=pessimistic, row_condition=row, **at_bound)],
            "maybe_inside": [gxe.ExpectColumnValuesToBeBetween(column=optimistic, row_condition=row, **at_bound)],
        }
        for check, expectations in expected.items():
            for expectation in expectations:
                expectation.meta = {"gate": gate.label, "check": check}
                suite.add_expectation(expectation)


def _largest(gate: Gate) -> float:
    return 1.0 if gate.unit in ("fraction", "bool") else 1e300


def _found(results: Sequence[Any]) -> dict[tuple[str, str], bool]:
    """(gate, check) → whether all its expectations held. One that could not be evaluated makes the gate's row untrusted."""
    found: dict[tuple[str, str], bool] = {}
    for result in results:
        meta = result.expectation_config.meta
        gate, check = meta["gate"], meta["check"]
        found[gate, check] = found.get((gate, check), True) and bool(result.success)
        if _raised(result.exception_info):
            found[gate, "trusted"] = False
    return found


def _raised(exception_info: dict[str, Any]) -> bool:
    entries = [exception_info, *(entry for entry in exception_info.values() if isinstance(entry, dict))]
    return any(entry.get("raised_exception") for entry in entries)


def _checks(found: dict[tuple[str, str], bool], gate: Gate) -> Checks:
    return Checks.model_validate({check: found.get((gate.label, check), False) for check in CHECKS})


def _plain(value: Any) -> Any:
    """JSON without NaN and infinities, which are not JSON: they become their names."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
