# Shared by setup.sh, lock.sh and test_pythons.sh: Python, uv and the one wheel that may lie elsewhere than the rest.

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 3; }

# Install Debian packages where this user may; say what to do where not.
debian_packages() {
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing from apt: $*"
    local quiet=(-qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0)
    DEBIAN_FRONTEND=noninteractive apt-get "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null 2>&1 && return
    apt-get "${quiet[@]}" update && DEBIAN_FRONTEND=noninteractive apt-get "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null
  else
    fail "missing: $*; remedy: sudo apt-get install $*"
  fi
}

# As pyproject.toml's `requires-python` says. The oldest first: it is the one that every test runs with.
pythons=(3.11 3.12 3.13 3.14)

is_supported() {
  local version
  version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) && [[ " ${pythons[*]} " == *" $version "* ]]
}

find_python() {
  local candidate candidates=("${pythons[@]/#/python}" python3) range="${pythons[0]} to ${pythons[-1]}"
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    is_supported "$candidate" && { command -v "$candidate"; return; }
  done
  [ -z "${PYTHON:-}" ] || fail "PYTHON is $PYTHON, and that is no Python $range; remedy: unset it, or set it to one"
  fail "no Python $range found; remedy: apt-get install python3, or set PYTHON to one"
}

new_environment() {
  local python
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null || debian_packages python3-venv
  "$python" -m venv --clear "$1"
}

# The lines of a package in a lock file: its version and its hashes.
locked() { sed -n "/^$1==/,/[^\\\\]\$/p" "$2"; }

# uv installs both environments from their locks, in seconds; it comes into .venv by pip, at the locked version.
uv=.venv/bin/uv
bootstrap_uv() {
  [ -x .venv/bin/python ] || new_environment .venv
  [ -x "$uv" ] || .venv/bin/python -m pip install --quiet --no-deps --require-hashes --requirement <(locked uv infra/requirements/orchestrator.txt)
  # uv does not read pip's configuration; an index that is set there is meant for it too.
  local index
  index=$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)
  [ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
}

# PyTorch's CPU wheel is on no general index: first where pip's own configuration looks, else PyTorch's index. Only this wheel
# is ever asked of that index, so that no other install depends on it. Wherever it comes from, its SHA-256 must be known.
# `torch_wheel PYTHON` fetches it by that Python's pip, and `torch_wheel` by that of .venv.
torch_wheel() {
  local wanted python=${1:-.venv/bin/python}
  wanted=$(grep -h '^torch==' infra/requirements/engine.in)
  if ! ls .wheels/torch-*.whl >/dev/null 2>&1 || [ "$(cat .wheels/wanted 2>/dev/null)" != "$wanted" ]; then
    fetch_torch "$wanted" "$python"
  fi
  (cd .wheels && sha256sum --check --ignore-missing --quiet ../infra/requirements/torch.sha256) >&2 \
    || fail ".wheels has no wheel of infra/requirements/torch.sha256; remedy: rm -r .wheels, or for a new version write the SHA-256 of its wheels there"
}

fetch_torch() {
  local wanted=$1 python=$2
  rm -rf .wheels
  say "fetching $wanted"
  "$python" -m pip download --quiet --no-deps --dest .wheels "$wanted" 2>/dev/null \
    || "$python" -m pip download --no-deps --dest .wheels --index-url https://download.pytorch.org/whl/cpu "$wanted" \
    || fail "$wanted is neither where pip looks nor on PyTorch's CPU index; remedy: put its wheel into a folder and set PIP_FIND_LINKS"
  echo "$wanted" > .wheels/wanted
}
