#!/usr/bin/env bash
# What the tests take from Debian: chromium, docker-compose, Ceph's gateway, Docker with a registry, and PostgreSQL. Where this user
# may not install them, their tests skip and say so; in CI that is an error.
set -euo pipefail
cd "$(dirname "$0")/.."

for part in "debian-package.sh chromium" "debian-package.sh docker-compose" \
  "radosgw.sh install" "docker.sh install" "postgresql.sh install"; do
  bash infra/$part || { [ -z "${CI:-}" ] || exit 1; }
done
