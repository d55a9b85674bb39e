#!/usr/bin/env bash
# SciPy's paired tests have no answer for two runs that agree in everything: nan, which is neither below a bound nor above it.
#
# Version: scipy 1.17.1 with numpy 2.4.6, Python 3.11.
# Guess, written first: a paired test of a run with itself says p = 1, for the t test, Wilcoxon's and a permutation test alike; and the interval of a mean of
#   equal values is that value.
# Seen: ttest_rel and wilcoxon say nan; permutation_test, mannwhitneyu and ks_2samp say 1. Of a constant gain ttest_rel says 0, by an infinite statistic. bootstrap,
#   by its default method, has nan for both ends of the interval of a constant.
# Why: the variance of the differences is 0, and wilcoxon leaves pairs without a difference out, so that none is left; BCa divides by the spread of a jackknife.
# Cost to us: none. `p < 0.05` and `p >= 0.05` are both false of nan, so a gate on it would decide by how it is written: intervals here are our own, and a constant has one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check scipy==1.17.1 numpy==2.4.6
cat > "$folder/itself.py" <<'PY'
import math
import warnings

import numpy as np
from scipy import stats

warnings.simplefilter("ignore")
run = np.array([1.0, 0.0, 1.0, 1.0, 0.0] * 4)
by_pairs = {"permutation_type": "samples", "rng": np.random.default_rng(0)}
found = {
    "ttest_rel": stats.ttest_rel(run, run).pvalue,
    "wilcoxon": stats.wilcoxon(run, run).pvalue,
    "permutation_test": stats.permutation_test((run, run), lambda one, other: np.mean(one - other), **by_pairs).pvalue,
    "mannwhitneyu": stats.mannwhitneyu(run, run).pvalue,
    "ks_2samp": stats.ks_2samp(run, run).pvalue,
    "ttest_rel of a constant gain": stats.ttest_rel(run + 1, run).pvalue,
    "bootstrap, low": stats.bootstrap((np.ones(20),), np.mean).confidence_interval.low,
}
for name, value in found.items():
    print(f"{name}: {value}")
assert [name for name, value in found.items() if math.isnan(value)] == ["ttest_rel", "wilcoxon", "bootstrap, low"]
assert [name for name, value in found.items() if value == 1] == ["permutation_test", "mannwhitneyu", "ks_2samp"]
assert found["ttest_rel of a constant gain"] == 0
PY
"$folder/venv/bin/python" "$folder/itself.py" 2>/dev/null
echo "as seen before"
