"""Local questions in a form that the `datasets` library reads as they are written.

Its reader of JSON takes text like 2024-01-31 for a time, if all of a column is such, and a template then writes the hours, too.
A Parquet file says that the column is text. Files without such text stay as they are.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, Features, Json, List

from vllm_qualify.evidence.accuracy.letters import RefusedError

JSON, PARQUET = "json", "parquet"
# What may be taken for a time: there is nothing else between the quotation marks.
_DATE = re.compile(rb'"\d{4}-\d\d-\d\d(?:[ T][\d:.+-]*Z?)?"')

Row = dict[str, Any]


class Readable(NamedTuple):
    """Files of questions, and the `dataset_path` that reads them."""

    form: str
    files: list[Path]


class _UnwritableError(Exception):
    """The values of a column cannot be written so that they are read back."""


class _Column(NamedTuple):
    """A column's values in each of the files, and the type that the library gives it in all of them."""

    values: list[list[Any]]
    feature: Any


def make_readable(files: Sequence[Path], folder: Path, name: str) -> Readable:
    """The files, or copies of all of them in `folder`. They have the same columns then.

    Files that are no JSON lines stay as they are: the library says what is wrong with them. Raises RefusedError if a copy
    cannot have what is in a file: without a copy a date would be changed.
    """
    rows = [_read_rows(file) for file in files] if any(map(_has_dates, files)) else []
    of_files = [of_file for of_file in rows if of_file is not None]
    if not of_files or len(of_files) < len(files):
        return Readable(JSON, list(files))
    names = dict.fromkeys(column for of_file in of_files for row in of_file for column in row)
    columns = {column: _make_column(of_files, column, name) for column in names}
    features = Features({column: made.feature for column, made in columns.items()})
    copies = [folder / f"{name}-{number}.parquet" for number in range(len(files))]
    for number, copy in enumerate(copies):
        Dataset.from_dict({column: made.values[number] for column, made in columns.items()}, features).to_parquet(copy)
    return Readable(PARQUET, copies)


def _has_dates(file: Path) -> bool:
    with file.open("rb") as lines:
        return any(map(_DATE.search, lines))


def _read_rows(file: Path) -> list[Row] | None:
    """Its rows; None if it is no file of JSON lines."""
    try:
        # The library passes over a mark of the encoding, too.
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (ValueError, RecursionError):
        return None
    return rows if any(rows) and all(isinstance(row, dict) for row in rows) else None


def _make_column(of_files: list[list[Row]], column: str, task: str) -> _Column:
    values = [[row.get(column) for row in of_file] for of_file in of_files]
    try:
        return _with_one_type(values)
    except _UnwritableError as error:
        what = f"{error}, in {column!r}, and dates beside it would become times"
        raise RefusedError(f"{task} cannot be asked: {what}", f"write {column!r} as text, or leave it out") from error


def _with_one_type(values: list[list[Any]]) -> _Column:
    """A type of its own if that is the same in all files that have the column. Else each value is written as JSON.

    The library would change values by itself: it takes text beside numbers for JSON, and casts one file's to another's type.
    Raises _UnwritableError.
    """
    found = [_infer_feature(of_file) for of_file in values if any(value is not None for value in of_file)]
    # Without any value it does not matter.
    first = found[0] if found else _infer_feature(values[0])
    if all(feature == first for feature in found) and not _has_json(first):
        return _Column(values, first)
    return _Column([[_write_json(value) for value in of_file] for of_file in values], Json())


def _infer_feature(values: list[Any]) -> Any:
    try:
        return Dataset.from_dict({"": values}, on_mixed_types="use_json").features[""]
    except (ValueError, TypeError, OverflowError) as error:
        raise _UnwritableError(error) from error


def _has_json(feature: Any) -> bool:
    """Whether the library writes the values, or some in them, as JSON: their types differ."""
    inner = feature.values() if isinstance(feature, dict) else [feature.feature] if isinstance(feature, List) else []
    return isinstance(feature, Json) or any(map(_has_json, inner))


def _write_json(value: Any) -> str | None:
    if value is None:
        return None
    written = json.dumps(value)
    try:
        # What it cannot read it would give as text.
        Json().decode_example(written)
    except (ValueError, OverflowError) as error:
        raise _UnwritableError(error) from error
    return written
