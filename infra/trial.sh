#!/usr/bin/env bash
# For infra/bump.py, in its copy: an environment of its own, from the copy's locks.
#
#   infra/trial.sh build CHECKOUT              env/, with the project in CHECKOUT
#   infra/trial.sh install PACKAGE==VERSION    puts that one in the other's place
set -euo pipefail
cd "$(dirname "$0")/.."
. infra/python.sh

bootstrap_uv
case "${1:-} $#" in
  "build 2")
    "$uv" venv --quiet --clear --python .venv/bin/python env
    "$uv" pip sync --quiet --require-hashes --python env infra/requirements/{orchestrator,development}.txt
    "$uv" pip install --quiet --python env --no-deps --no-build-isolation --editable "$2"
    ;;
  "install 2") "$uv" pip install --quiet --python env --no-deps "$2" ;;
  *) fail "usage: $0 build CHECKOUT | install PACKAGE==VERSION" ;;
esac
