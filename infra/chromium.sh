#!/usr/bin/env bash
# Debian's chromium for the browser tests: installs it where apt-get may run, otherwise says what to install.
# Does nothing when it is already there.
set -euo pipefail

readonly PACKAGE=chromium
readonly PROGRAM=/usr/bin/chromium

die() {
  echo "chromium.sh: $*" >&2
  exit 1
}

apt_get() {
  DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@" >&2
}

main() {
  [[ $# == 0 ]] || die "usage: $0"
  [[ ! -x $PROGRAM ]] || return 0
  if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
    die "no $PROGRAM; install Debian's package: apt-get install --no-install-recommends $PACKAGE"
  fi
  # an old package list names versions that the mirror no longer has
  apt_get update || die "apt-get could not read the package lists"
  apt_get install --yes --no-install-recommends "$PACKAGE" || die "apt-get could not install $PACKAGE"
  [[ -x $PROGRAM ]] || die "$PACKAGE is installed, but there is no $PROGRAM"
}

main "$@"
