#!/usr/bin/env bash
# Offline, snapshot_download gives the folder of a model of which a single file was ever fetched, as it gives a whole one.
#
# Version: huggingface_hub 2.4.0, Python 3.11.
# Guess, written first: without a network it raises for a repository that is in the cache in part, as nothing says that it is whole; at least where the pattern
#   that is asked for matches no file at all.
# Seen: it returns the folder, by branch and by commit, and for `*.safetensors` too, of which the cache has none. It raises for a commit that no folder is there for.
# Why: the list of a repository's files is the hub's alone, and the cache keeps no copy of it; a folder of the commit is all that is looked for.
# Cost to us: "the model is in the cache" was no proof that its weights are. A model's files are now held against the hub's list while there is a network, and weights
#   against their index and the model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check huggingface_hub==2.4.0
cat > "$folder/part.py" <<'PY'
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

COMMIT = "a" * 40
# As the library leaves it after one `hf_hub_download` of config.json.
cache = Path(sys.argv[1])
model = cache / "models--org--model"
(model / "snapshots" / COMMIT).mkdir(parents=True)
(model / "refs").mkdir()
(model / "refs" / "main").write_text(COMMIT)
(model / "snapshots" / COMMIT / "config.json").write_text("{}")
for options in ({}, {"revision": COMMIT}, {"revision": COMMIT, "allow_patterns": ["*.safetensors"]}):
    found = snapshot_download("org/model", cache_dir=cache, local_files_only=True, **options)
    files = sorted(path.name for path in Path(found).iterdir())
    print(f"{options}: {files}")
    assert files == ["config.json"]
try:
    snapshot_download("org/model", cache_dir=cache, local_files_only=True, revision="b" * 40)
except LocalEntryNotFoundError:
    print("another commit: LocalEntryNotFoundError")
else:
    raise SystemExit(1)
PY
"$folder/venv/bin/python" "$folder/part.py" "$folder/cache" 2>/dev/null
echo "as seen before"
