#!/usr/bin/env bash
# lm-eval's filters read right answers as other ones, or as none, where they are written in LaTeX, in bold or before dots.
#
# Version: lm-eval 0.4.13, Python 3.11.
# Guess, by what names and documents suggest (the outcome was known in part when it was written down): gsm8k's flexible-extract takes the last number of a reply, whatever stands around it; and mmlu_pro's custom-extract
#   finds the letter of "The answer is **C**."
# Seen: flexible-extract takes the last run of two or more digits, `$`, dots or commas, or the last whole number: of `$\boxed{42}$.` the `$.`,
#   of a box between `$$` lines the `$$`, of "They are 42..." the `42...`. Exact match drops commas, `$` and one last dot, so that
#   only a plain number is right. custom-extract wants the letter at once behind "answer is", or in round brackets: bold, a box and "Answer: C" are
#   [invalid], and "the answer is Definitely (C)" is D.
# Why: the tasks' own regular expressions, in tasks/gsm8k/gsm8k.yaml and tasks/mmlu_pro/_default_template_yaml.
# Cost to us: a release that learned to write LaTeX "lost" points though it knew as much; a gate on the score held it up.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check lm_eval==0.4.13
cat > "$folder/read.py" <<'PY'
"""Each task's own filters, built by lm-eval from its own files, on replies that a reader would call right."""

from pathlib import Path

import lm_eval.tasks
import yaml
from lm_eval.api.metrics import exact_match_fn
from lm_eval.filters import build_filter_ensemble

TASKS = Path(lm_eval.tasks.__file__).parent


class Loader(yaml.SafeLoader):
    """The files name functions; no filter needs one."""


Loader.add_constructor("!function", lambda loader, node: None)


def filters_of(path):
    config = yaml.load((TASKS / path).read_text(), Loader)
    build = lambda each: [(part["function"], {key: value for key, value in part.items() if key != "function"}) for part in each["filter"]]
    return {each["name"]: build_filter_ensemble(each["name"], build(each)) for each in config["filter_list"]}, config


class Instance:
    def __init__(self, reply):
        self.resps, self.filtered_resps, self.doc = [reply], {}, {}


def read(ensembles, name, reply):
    instance = Instance(reply)
    ensembles[name].apply([instance])
    return instance.filtered_resps[name]


gsm8k, config = filters_of("gsm8k/gsm8k.yaml")
(metric,) = config["metric_list"]
options = {key: metric[key] for key in ("ignore_case", "ignore_punctuation", "regexes_to_ignore") if key in metric}
for reply, read_as, is_right in [
    ("They are 42.", "42.", True),
    (r"So the answer is $\boxed{42}$.", "$.", False),
    ("We get\n$$\n\\boxed{42}\n$$", "$$", False),
    ("They are 42...", "42...", False),
]:
    got = read(gsm8k, "flexible-extract", reply)
    score = exact_match_fn(predictions=[got], references=["#### 42"], **options)["exact_match"]
    print(f"gsm8k, flexible-extract: {reply!r} is read as {got!r}, score {score}")
    assert (got, bool(score)) == (read_as, is_right), (got, score)

mmlu_pro, _ = filters_of("mmlu_pro/_default_template_yaml")
for reply, read_as in [
    ("The answer is (C).", "C"),
    ("The answer is **C**.", "[invalid]"),
    (r"The answer is \boxed{C}.", "[invalid]"),
    ("Answer: C", "[invalid]"),
    ("The answer is Definitely (C).", "D"),
]:
    got = read(mmlu_pro, "custom-extract", reply)
    print(f"mmlu_pro, custom-extract: {reply!r} is read as {got!r}")
    assert got == read_as, got
PY
"$folder/venv/bin/python" "$folder/read.py"
echo "as seen before"
