#!/usr/bin/env bash
# What the live tests take from Debian: chromium, Ceph's gateway, and Docker with a registry. Where this user may not install them, their tests skip and
# say so; in CI that is an error.
set -euo pipefail
cd "$(dirname "$0")/.."

for part in "infra/chromium.sh" "infra/radosgw.sh install" "infra/docker.sh install"; do
  bash $part || { [ -z "${CI:-}" ] || exit 1; }
done
