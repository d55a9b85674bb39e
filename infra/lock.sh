#!/usr/bin/env bash
# Write the lock files of both environments anew. They hold names and versions only, never an address.
set -euo pipefail
cd "$(dirname "$0")/.."
. infra/python.sh

header="# Locked by \`make lock\`; edit pyproject.toml or the .in file, not this one."
lock() {
  local out=infra/requirements/$1
  shift
  "$uv" pip compile --quiet --python-version 3.11 --no-header --no-emit-index-url --no-emit-find-links --no-annotate "$@" \
    | { echo "$header"; cat; } > "$out.new"
  mv "$out.new" "$out"
}

bootstrap_uv
torch_wheel
lock orchestrator.txt pyproject.toml --group dev
lock engine.txt infra/requirements/engine.in --override infra/requirements/engine-without.txt --find-links .wheels
