#!/usr/bin/env bash
# Build both environments from their lock files: .venv (orchestrator) and .venv-engine (vLLM for the CPU). Does nothing when
# they are already built from these locks. `setup.sh uv`, `setup.sh orchestrator` and `setup.sh engine` do a part of it; when uv
# is there, the two environments may be built side by side.
set -euo pipefail
cd "$(dirname "$0")/.."
. infra/python.sh

built_from() { cat "$@" infra/setup.sh infra/python.sh | sha256sum | cut -d' ' -f1; }
is_built() { [ "$(cat "$1/built-from" 2>/dev/null)" = "$2" ]; }

orchestrator() {
  local stamp
  stamp=$(built_from infra/requirements/orchestrator.txt infra/requirements/development.txt pyproject.toml)
  is_built .venv "$stamp" && return
  say "building .venv, the orchestrator environment"
  bootstrap_uv
  "$uv" pip sync --compile-bytecode --require-hashes --python .venv infra/requirements/{orchestrator,development}.txt
  "$uv" pip install --quiet --python .venv --no-deps --no-build-isolation --editable .
  garbage_seldom .venv
  echo "$stamp" > .venv/built-from
}

engine() {
  bootstrap_uv
  .venv/bin/python -m vllm_qualify.engine.installing .venv-engine
}

# As in the engine environment: vllm_qualify/engine/installing.py says why.
garbage_seldom() {
  local site
  site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo 'import gc; gc.set_threshold(1_000_000, 20, 100)' > "$site/garbage_seldom.pth"
}

libnuma() { ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1' || debian_packages libnuma1; }

case "${1:-all}" in
  uv) bootstrap_uv ;;
  orchestrator) orchestrator ;;
  engine) engine; libnuma ;;
  all) orchestrator; engine; libnuma ;;
  *) fail "usage: infra/setup.sh [uv | orchestrator | engine]" ;;
esac
