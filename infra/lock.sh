#!/usr/bin/env bash
# Write the lock files of both environments: for every supported Python, with the hashes of all files, and never an address.
# A locked version stays if it still fits; --upgrade takes the newest of everything. --without-engine, first, leaves that lock as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
. infra/python.sh

header="# Locked by \`make lock\`; edit pyproject.toml or the .in file, not this one."
lock() {
  local out=$1
  shift
  [ ! -f "$out" ] || cp "$out" "$out.new"
  # fewest: one version of a package for all Pythons, so that numbers do not depend on the Python
  "$uv" pip compile --quiet --universal --python-version "${pythons[0]}" --fork-strategy fewest --generate-hashes \
    --no-header --no-emit-index-url --no-emit-find-links --no-annotate --output-file "$out.new" "$@"
  sed -i "1i $header" "$out.new"
  mv "$out.new" "$out"
}

# They come with the package: `vllm-qualify engine install` builds from them.
locks=vllm_qualify/engine/locks

# Only the wheel for this Python is at hand (infra/python.sh), and the lock is for all of them.
with_every_hash_of_torch() {
  hashes=$(sed 's/^\([0-9a-f]*\) .*/    --hash=sha256:\1/; $!s/$/ \\/' infra/requirements/torch.sha256) \
    awk '/^torch==/ { print $1 " \\"; print ENVIRON["hashes"]; left_out = 1 } !left_out { print } /[^\\]$/ { left_out = 0 }' \
    "$locks/cpu.txt" > "$locks/cpu.txt.new"
  mv "$locks/cpu.txt.new" "$locks/cpu.txt"
}

engine=true
[ "${1:-}" != --without-engine ] || { engine=false; shift; }
bootstrap_uv
# What runs in production, and what installs the project there.
lock infra/requirements/orchestrator.txt pyproject.toml --group build --constraint infra/requirements/constraints.in "$@"
lock infra/requirements/development.txt --group pyproject.toml:dev --constraint infra/requirements/orchestrator.txt \
  --override infra/requirements/development-without.txt "$@"
$engine || exit 0
torch_wheel
lock "$locks/cpu.txt" infra/requirements/engine.in --override infra/requirements/engine-without.txt --find-links .wheels "$@"
with_every_hash_of_torch
lock "$locks/cuda.txt" infra/requirements/engine-cuda.in "$@"
