#!/usr/bin/env bash
# Write the lock files of both environments: for every supported Python, with the hashes of all files, and never an address.
# A locked version stays if it still fits; --upgrade takes the newest of everything.
set -euo pipefail
cd "$(dirname "$0")/.."
. infra/python.sh

header="# Locked by \`make lock\`; edit pyproject.toml or the .in file, not this one."
lock() {
  local out=infra/requirements/$1
  shift
  cp "$out" "$out.new"
  # fewest: one version of a package for all Pythons, so that numbers do not depend on the Python
  "$uv" pip compile --quiet --universal --python-version "${pythons[0]}" --fork-strategy fewest --generate-hashes \
    --no-header --no-emit-index-url --no-emit-find-links --no-annotate --output-file "$out.new" "$@"
  sed -i "1i $header" "$out.new"
  mv "$out.new" "$out"
}

# Only torch's wheel for this Python is available (infra/python.sh): its hash would lock out the other Pythons.
without_hash_of_torch() { sed -i '/^torch==/,/[^\\]$/{s/ \\$//; /--hash/d}' infra/requirements/engine.txt; }

bootstrap_uv
torch_wheel
lock orchestrator.txt pyproject.toml --group dev "$@"
lock engine.txt infra/requirements/engine.in --override infra/requirements/engine-without.txt --find-links .wheels "$@"
without_hash_of_torch
