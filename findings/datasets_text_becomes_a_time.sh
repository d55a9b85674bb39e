#!/usr/bin/env bash
# A file of questions whose answers are all dates is read as times: "2024-01-31" becomes "2024-01-31 00:00:00", and one other word in the column brings it back.
#
# Version: datasets 5.2.0 with pyarrow 26.0.1, Python 3.11.
# Guess, written first: text in quotation marks in a file of JSON lines stays that text, whether it looks like a date, a time of day or a number.
# Seen: a column of dates is a timestamp, and a row has a datetime; as a template writes it, it has a time of day that the file does not have. With one text in
#   the column that is no date all stay text. "12:30" and "007" stay text. Naming the column's type as a text does not bring the text back: it has the time of day then.
# Why: pyarrow's reader of JSON takes texts in the form of ISO 8601 for times, by the whole column, before datasets applies a type (packaged_modules/json).
# Cost to us: none that was met. Right answers of a task with dates in a local file would be wrong, and right again with a single "unknown" among them.
#   Local files with such text are given as Parquet since.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1
cat > "$folder/times.py" <<'PY'
import json
import sys
from pathlib import Path

from datasets import Features, Value, disable_progress_bars, load_dataset

disable_progress_bars()
FOLDER = Path(sys.argv[1])


def read(name, *answers, features=None):
    file = FOLDER / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"answer": answer}) + "\n" for answer in answers))
    data = load_dataset("json", data_files={"test": str(file)}, split="test", cache_dir=str(FOLDER / "cache"), features=features)
    texts = [str(answer) for answer in data["answer"]]
    print(f"{answers} of {data.features['answer'].dtype}: {texts}")
    return texts


assert read("dates", "2024-01-31", "2023-05-06") == ["2024-01-31 00:00:00", "2023-05-06 00:00:00"]
assert read("mixed", "2024-01-31", "unknown") == ["2024-01-31", "unknown"]
assert read("others", "12:30", "007") == ["12:30", "007"]
assert read("typed", "2024-01-31", features=Features({"answer": Value("string")})) == ["2024-01-31 00:00:00"]
PY
HF_HOME="$folder/home" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/times.py" "$folder" 2>/dev/null
echo "as seen before"
