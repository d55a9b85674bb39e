#!/usr/bin/env bash
# The tests that need nothing but Python, on each supported Python of this machine, from the lock.
# PYTHONS names interpreters instead, separated by spaces, for those that are not on the path.
set -euo pipefail
cd "$(dirname "$0")/.."
. infra/python.sh

rooms=(tests/recipe tests/judge tests/report tests/releases tests/approval tests/test_start_up.py)
needs="engine or docker or s3 or browser or fleet"

test_on() {
  local environment
  environment=.venv-pythons/$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$uv" venv --quiet --clear --python "$1" "$environment"
  "$uv" pip sync --quiet --require-hashes --python "$environment" infra/requirements/{orchestrator,development}.txt
  "$uv" pip install --quiet --python "$environment" --no-deps --no-build-isolation --editable .
  "$environment/bin/python" -m pytest --quiet --numprocesses 2 -m "not ($needs)" "${rooms[@]}"
}

bootstrap_uv
for python in ${PYTHONS:-"${pythons[@]/#/python}"}; do
  if is_supported "$python"; then
    say "$("$python" --version)"
    test_on "$python"
  else
    say "$python: not here, or not supported"
  fi
done
