#!/usr/bin/env bash
# A program from Debian's package of the same name: installs it where apt-get may run, otherwise says what to install.
# Does nothing when it is already there.
#
#   infra/debian-package.sh chromium-headless-shell | docker-compose | faketime
set -euo pipefail

die() {
  echo "debian-package.sh: $*" >&2
  exit 1
}

apt_get() {
  DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@" >&2
}

main() {
  [[ $# == 1 ]] || die "usage: $0 PACKAGE"
  local package=$1
  [[ ! -x /usr/bin/$package ]] || return 0
  if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
    die "no /usr/bin/$package; install Debian's package: apt-get install --no-install-recommends $package"
  fi
  # an old package list names versions that the mirror no longer has
  apt_get update || die "apt-get could not read the package lists"
  apt_get install --yes --no-install-recommends "$package" || die "apt-get could not install $package"
  [[ -x /usr/bin/$package ]] || die "$package is installed, but there is no /usr/bin/$package"
}

main "$@"
