"""Local questions in a form that the `datasets` library reads as they are written.

Its reader of JSON takes text like 2024-01-31 for a time, if all of a column is such, and a template then writes the hours, too.
A Parquet file says that the column is text. Files without such text stay as they are.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset

JSON, PARQUET = "json", "parquet"
_BEGINS_WITH_A_DATE = re.compile(rb'"\d{4}-\d\d-\d\d')

Row = dict[str, Any]


class Readable(NamedTuple):
    """Files of questions, and the `dataset_path` that reads them."""

    form: str
    files: list[Path]


def make_readable(files: Sequence[Path], folder: Path, name: str) -> Readable:
    """The files, or copies of all of them in `folder`. They have the same columns then.

    Files that are no JSON lines stay as they are: the library says what is wrong with them.
    """
    rows = [_read_rows(file) for file in files] if any(map(_has_dates, files)) else []
    if not rows or any(of_file is None for of_file in rows):
        return Readable(JSON, list(files))
    whole = [row for of_file in rows for row in of_file or ()]
    columns = dict.fromkeys(column for row in whole for column in row)
    try:
        table = Dataset.from_list([{column: row.get(column) for column in columns} for row in whole], on_mixed_types="use_json")
    except (ValueError, TypeError, OverflowError):
        return Readable(JSON, list(files))
    copies, begin = [], 0
    for number, of_file in enumerate(rows):
        end = begin + len(of_file or ())
        copies.append(folder / f"{name}-{number}.parquet")
        table.select(range(begin, end)).to_parquet(copies[-1])
        begin = end
    return Readable(PARQUET, copies)


def _has_dates(file: Path) -> bool:
    with file.open("rb") as lines:
        return any(map(_BEGINS_WITH_A_DATE.search, lines))


def _read_rows(file: Path) -> list[Row] | None:
    """Its rows; None if it is no file of JSON lines."""
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (ValueError, RecursionError):
        return None
    return rows if rows and all(isinstance(row, dict) and row for row in rows) else None
