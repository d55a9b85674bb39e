"""Local questions as the `datasets` library reads them: text in quotation marks stays that text."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset

from vllm_qualify.evidence.accuracy.local_questions import JSON, PARQUET, Row, make_readable

DATED: list[Row] = [
    {"answer": "2024-01-31", "list": ["2024-01-31T10:00:00Z"], "about": {"since": "2024-01-31"}, "number": 1, "mixed": 1},
    {"answer": "2023-05-06", "list": [], "about": {"since": None}, "number": 2, "mixed": "two", "more": "2023-05-06 12:30:00"},
]


def write(file: Path, rows: list[Row]) -> Path:
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return file


def read_back(form: str, files: list[Path], cache: Path) -> list[list[dict[str, Any]]]:
    named = {f"split{number}": str(file) for number, file in enumerate(files)}
    data = load_dataset(form, data_files=named, cache_dir=str(cache))
    return [list(data[split]) for split in named]


def test_dates_are_read_as_they_are_written(tmp_path: Path) -> None:
    form, files = make_readable([write(tmp_path / "test.jsonl", DATED)], tmp_path, "dates")
    assert form == PARQUET
    (rows,) = read_back(form, files, tmp_path / "cache")
    assert rows == [DATED[0] | {"more": None}, DATED[1]]


def test_examples_have_the_columns_of_the_questions(tmp_path: Path) -> None:
    shots: list[Row] = [{"answer": "Ann", "number": 0.5}]
    given = [write(tmp_path / "test.jsonl", DATED), write(tmp_path / "shots.jsonl", shots)]
    form, files = make_readable(given, tmp_path, "dates")
    _, (row,) = read_back(form, files, tmp_path / "cache")
    assert {name: value for name, value in row.items() if value is not None} == shots[0]
    # Whichever of the two has dates.
    assert make_readable(given[::-1], tmp_path, "turned").form == PARQUET


def test_files_without_dates_stay_as_they_are(tmp_path: Path) -> None:
    file = write(tmp_path / "test.jsonl", [{"answer": "12:30", "n": 20240131, "when": "on 2024-01-31"}])
    assert make_readable([file], tmp_path, "plain") == (JSON, [file])


@pytest.mark.parametrize(
    "text", ['"2024-01-31"\n', '{"a": "2024-01-31"', '{"a": "2024-01-31"}\n' + "[" * 100_000, "{}\n"], ids=len
)
def test_what_is_no_file_of_rows_is_left_to_the_library(text: str, tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text(text)
    assert make_readable([file], tmp_path, "none") == (JSON, [file])
