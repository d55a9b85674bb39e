#!/usr/bin/env bash
# A configuration that transformers 5 saved is another model to transformers 4: of 4 experts it reads 128, without a word.
#
# Version: transformers 5.19.0 and 4.57.1, Python 3.11.
# Guess, by what names and documents suggest (the outcome was known in part when it was written down): what is saved is read as the same model by the major version before, or is
#   refused by it, since the file says which version wrote it.
# Seen: a Qwen3-MoE of 4 experts is saved with `num_local_experts`, and not with `num_experts`. 4.57.1 reads the file, has 128 experts (its default), and keeps the other name as
#   an unknown field. It does not mention the file's `transformers_version`.
# Why: 5 gave the field one name for all models (attribute_map); 4 reads the old one alone, and any field that it does not know is kept.
# Cost to us: a check of weights against the model accused a whole checkpoint of 124 lacking experts. It now says nothing of a file that a newer version wrote.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.19.0 4.57.1; do
  "${PYTHON:-python3}" -m venv "$folder/$version"
  "$folder/$version/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "transformers==$version"
done
export HF_HUB_OFFLINE=1 HF_HOME="$folder/home"
"$folder/5.19.0/bin/python" - "$folder/model" 2>/dev/null <<'PY'
import json
import sys
from pathlib import Path

from transformers import AutoConfig, Qwen3MoeConfig

Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2).save_pretrained(sys.argv[1])
saved = json.loads(Path(sys.argv[1], "config.json").read_text())
print({name: value for name, value in saved.items() if "expert" in name or name == "transformers_version"})
assert "num_experts" not in saved
assert saved["num_local_experts"] == 4
assert AutoConfig.from_pretrained(sys.argv[1]).num_experts == 4
PY
"$folder/4.57.1/bin/python" - "$folder/model" 2>"$folder/said" <<'PY'
import sys

from transformers import AutoConfig

read = AutoConfig.from_pretrained(sys.argv[1])
print(f"num_experts {read.num_experts}, num_local_experts {read.num_local_experts}")
assert (read.num_experts, read.num_local_experts) == (128, 4)
PY
if grep -i "version" "$folder/said" | grep -q "5.19"; then exit 1; fi
echo "as seen before"
