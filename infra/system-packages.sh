#!/usr/bin/env bash
# Debian's packages for the tests: chromium-headless-shell, docker-compose, faketime, Ceph's gateway, Docker with a registry,
# and PostgreSQL. If this user may not install them, their tests skip and say so; in CI that is an error.
set -euo pipefail
cd "$(dirname "$0")/.."

for part in "debian-package.sh chromium-headless-shell" "debian-package.sh docker-compose" "debian-package.sh faketime" \
  "radosgw.sh install" "docker.sh install" "postgresql.sh install"; do
  bash infra/$part || { [ -z "${CI:-}" ] || exit 1; }
done
