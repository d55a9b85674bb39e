#!/usr/bin/env bash
# ifeval gives the same reply other scores: one of its checks draws at random, and lm-eval seeds everything but that.
#
# Version: lm-eval 0.4.13 with langdetect 1.0.9, Python 3.11.
# Guess, by what names and documents suggest (the outcome was known in part when it was written down): scoring a kept reply again gives the same score, since lm-eval seeds random, numpy and torch before a task.
# Seen: whether a reply is "in English capitals" changes from one scoring to the next: of 200 scorings of one short reply some dozens say yes.
#   With langdetect's own seed set, all 200 say the same.
# Why: the check asks langdetect for the language, which draws priors at random for each text; its seed is a class attribute of its own
#   (DetectorFactory.seed), which lm-eval does not set.
# Cost to us: two runs of one model differed by the scorer's noise, and a paired comparison took the noise for the model's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check 'lm_eval[ifeval]==0.4.13' langdetect==1.0.9
cat > "$folder/score.py" <<'PY'
import random

import langdetect
import numpy
from lm_eval.tasks.ifeval import instructions

REPLY = "PYTHON 3 IS A LANGUAGE."
check = instructions.CapitalLettersEnglishChecker("change_case:english_capital")
check.build_description()


def times_followed(seed):
    langdetect.DetectorFactory.seed = seed
    random.seed(0)
    numpy.random.seed(0)
    return sum(check.check_following(REPLY) for _ in range(200))


unseeded, seeded = times_followed(None), [times_followed(seed) for seed in range(5)]
print(f"{REPLY!r} follows the instruction in {unseeded} of 200 scorings; with langdetect's seeds 0 to 4 in {seeded}")
assert 0 < unseeded < 200
assert set(seeded) <= {0, 200}
PY
# Its other checks want a file of nltk's from the network, and do without.
"$folder/venv/bin/python" "$folder/score.py" 2>/dev/null | tail -1
echo "as seen before"
