"""Local questions as the `datasets` library reads them: text in quotation marks stays that text."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset

from vllm_qualify.evidence.accuracy.letters import RefusedError
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


LIKE_JSON = ["1.10", "007", "1e3", "null", "[1]", '{"a": 1}', '"quoted"', ""]


def test_text_that_looks_like_a_number_stays_text_beside_numbers_of_the_examples(tmp_path: Path) -> None:
    questions: list[Row] = [{"answer": text, "since": "2024-01-31", "count": 1, "list": []} for text in LIKE_JSON]
    shots: list[Row] = [{"answer": 2.5, "since": None, "count": 0.5, "list": ["007"]}]
    given = [write(tmp_path / "test.jsonl", questions), write(tmp_path / "shots.jsonl", shots)]
    for turned in (given, given[::-1]):
        form, files = make_readable(turned, tmp_path, "numbers")
        assert form == PARQUET
        read = read_back(form, files, tmp_path / "cache")
        assert (read if turned is given else read[::-1]) == [questions, shots]
        assert {type(row["count"]) for row in read[turned.index(given[0])]} == {int}


def test_text_stays_text_beside_other_values_of_its_file(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"since": "2024-01-31", "plain": text, "list": [text, 2.5], "about": {"it": text}, "deep": {"it": [{"is": text}]}}
        for text in LIKE_JSON
    ]
    rows.append({"since": "2024-01-31", "plain": ["x"], "list": [True], "about": {"it": 2}, "deep": {"it": [{"is": 3}]}})
    form, files = make_readable([write(tmp_path / "test.jsonl", rows)], tmp_path, "mixed")
    assert read_back(form, files, tmp_path / "cache") == [rows]


def test_files_with_dates_are_read_as_without_them(tmp_path: Path) -> None:
    """Where no text stands beside other values."""
    rows: list[Row] = [
        {"text": "1.10", "numbers": 1, "floats": 0.96904, "same": {"x": "1", "y": None}, "others": {"x": "1"}},
        {"text": "null", "numbers": 2.5, "floats": 1e300, "same": {"x": "2", "y": 3}, "others": {"y": "007"}, "more": "z"},
        {"text": None, "lists": [{"x": "1"}, {"y": "2"}], "flag": True, "whole": 2**63 - 1, "empty": [], "unicode": "\u2028é"},
    ]
    plain = write(tmp_path / "test.jsonl", rows)
    # With an empty line the library gives mappings of one column the same keys.
    plain.write_text(plain.read_text().rstrip())
    dated = write(tmp_path / "dated.jsonl", [*(row | {"since": "2024-01-31"} for row in rows), {}])
    form, files = make_readable([dated], tmp_path, "dates")
    assert form == PARQUET
    (read,) = read_back(form, files, tmp_path / "cache")
    assert [row.pop("since") for row in read] == ["2024-01-31"] * 3 + [None]
    (unchanged,) = read_back(JSON, [plain], tmp_path / "cache")
    # 1 is no 1.0 here.
    ours, theirs = ([{name: repr(row[name]) for name in row} for row in each] for each in (read[:-1], unchanged))
    assert ours == theirs


@pytest.mark.parametrize("values", [[2**70], [2**70, "1"], [{"x": 2**70}, {"y": 1}], [[-(2**70)]], ["\ud800"]], ids=str)
def test_what_no_copy_can_have_is_refused_where_a_date_would_be_changed(values: list[Any], tmp_path: Path) -> None:
    rows: list[Row] = [{"wide": value, "answer": "2024-01-31"} for value in values]
    with pytest.raises(RefusedError, match=r"^own cannot be asked: .*, in 'wide', and dates beside") as refused:
        make_readable([write(tmp_path / "test.jsonl", rows)], tmp_path, "own")
    assert refused.value.remedy == "write 'wide' as text, or leave it out"
    # No time begins so.
    file = write(tmp_path / "plain.jsonl", [row | {"answer": "2024-01-31 was a Wednesday"} for row in rows])
    assert make_readable([file], tmp_path, "plain") == (JSON, [file])


def test_a_mark_of_the_encoding_is_passed_over(tmp_path: Path) -> None:
    file = write(tmp_path / "test.jsonl", DATED)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    form, files = make_readable([file], tmp_path, "marked")
    assert (form, len(files)) == (PARQUET, 1)


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
