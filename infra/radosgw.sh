#!/usr/bin/env bash
# A real S3 server for development and tests: Ceph's object gateway on one node, from Debian's packages, data in memory only.
#
#   infra/radosgw.sh install      the packages, where apt-get may run; otherwise says what to install
#   infra/radosgw.sh start DIR    install, start on free ports of 127.0.0.1, print the path of DIR/env
#   infra/radosgw.sh stop DIR     stop every daemon of DIR; what was stored is gone
#
# DIR/env sets AWS_ENDPOINT_URL and the credentials of a user who may do everything; DIR/env.denied and DIR/env.watching those of two who own
# nothing and may create no bucket. A start in a DIR that already serves prints the path again. No wait is longer than
# RADOSGW_LIMIT_S seconds (120). A list has RADOSGW_PAGE keys a page (100; of S3 itself it is 1,000).
set -euo pipefail

readonly PACKAGES=(radosgw ceph-mon ceph-osd)
readonly PROGRAMS=(radosgw radosgw-admin ceph ceph-mon ceph-osd monmaptool)
readonly DAEMONS=(rgw osd mon)
readonly LIMIT_S=${RADOSGW_LIMIT_S:-120}
readonly PAGE=${RADOSGW_PAGE:-100}

main() {
  case "${1:-} $#" in
    "install 1") install_packages ;;
    "start 2" | "stop 2")
      use_directory "$2"
      "$1"
      ;;
    *) die "usage: $0 install | start DIR | stop DIR" ;;
  esac
}

die() {
  echo "radosgw.sh: $*" >&2
  exit 1
}

# --- packages

install_packages() {
  [[ -n $(missing_programs) ]] || return 0
  if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
    die "not found: $(missing_programs); install Debian's packages: apt-get install --no-install-recommends ${PACKAGES[*]}"
  fi
  # an old package list names versions that the mirror no longer has, so a failed download is tried again with a new list
  { packages_are_known && apt_install; } || { apt_get update && apt_install; } || die "apt-get could not install ${PACKAGES[*]}"
  [[ -z $(missing_programs) ]] || die "${PACKAGES[*]} are installed, but these are not on PATH: $(missing_programs)"
}

missing_programs() {
  local program missing=()
  for program in "${PROGRAMS[@]}"; do
    command -v "$program" > /dev/null || missing+=("$program")
  done
  echo "${missing[*]}"
}

packages_are_known() {
  [[ $(apt-cache policy "${PACKAGES[0]}") == *"Candidate: "[0-9]* ]]
}

apt_get() {
  DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@" >&2
}

apt_install() (
  forbid_service_starts && apt_get install --yes --no-install-recommends "${PACKAGES[@]}"
)

# Debian asks this program before a package starts its service; one that is already there is the administrator's and stays.
forbid_service_starts() {
  local policy=/usr/sbin/policy-rc.d
  [[ ! -e $policy ]] || return 0
  trap "rm -f $policy" EXIT
  printf '#!/bin/sh\nexit 101\n' > "$policy" && chmod 755 "$policy"
}

# --- start

use_directory() {
  mkdir -p "$1"
  DIR=$(cd "$1" && pwd -P)
  CEPH=$DIR/ceph
  CONF=$CEPH/ceph.conf
}

start() {
  if [[ -f $DIR/env ]] && serves_s3 "$(endpoint_port)"; then
    echo "$DIR/env"
    return
  fi
  install_packages
  stop
  rm -rf "$CEPH"
  umask 077
  mkdir -p "$CEPH"/{mon,osd,log,crash}
  trap give_up EXIT
  local mon_port s3_port
  mon_port=$(free_port)
  s3_port=$(free_port "$mon_port")
  write_configuration "$mon_port" "$s3_port"
  start_monitor "$mon_port"
  start_osd
  start_gateway "$s3_port"
  create_user tester "$s3_port" > "$CEPH/env"
  create_user denied "$s3_port" --max-buckets=-1 > "$DIR/env.denied"
  create_user watching "$s3_port" --max-buckets=-1 > "$DIR/env.watching"
  mv "$CEPH/env" "$DIR/env"
  trap - EXIT
  echo "$DIR/env"
}

give_up() {
  echo "radosgw.sh: did not start; the last lines of its logs:" >&2
  tail -n 15 "$CEPH"/log/* >&2 || true
  stop
  exit 1
}

# Below the range from which the kernel takes ports for outgoing connections.
free_port() {
  local port
  for _ in $(seq 200); do
    port=$((20000 + RANDOM % 10000))
    if [[ $port != "${1:-}" ]] && ! (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
      echo "$port"
      return
    fi
  done
  die "no free port between 20000 and 30000 on 127.0.0.1"
}

# One copy of everything, one monitor, one OSD. No authentication between the daemons: they listen on 127.0.0.1 and hold test data.
# The gateway's default is an encrypted session with the monitor, which needs authentication.
# Short pages by default: so few objects are enough to find a client that forgets to ask for the next page.
# No admin sockets: their paths would be too long below a test's temporary folder.
write_configuration() {
  cat > "$CONF" << END
[global]
fsid = $(< /proc/sys/kernel/random/uuid)
mon host = [v2:127.0.0.1:$1]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
paxos propose interval = 0.05
paxos min wait = 0.01
mon data avail crit = 1
mon data avail warn = 2
log file = $CEPH/log/\$name.log
crash dir = $CEPH/crash
admin socket =
[osd]
osd data = $CEPH/osd
osd objectstore = memstore
osd class load list = *
osd class default list = *
memstore device bytes = 536870912
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:$2 tcp_nodelay=1
rgw run sync thread = false
rgw max listing results = $PAGE
ms mon client mode = crc
END
}

start_monitor() {
  logged mkfs monmaptool --create --addv a "[v2:127.0.0.1:$1]" --fsid "$(sed -n 's/^fsid = //p' "$CONF")" "$CEPH/monmap"
  logged mkfs ceph-mon -c "$CONF" --mkfs -i a --monmap "$CEPH/monmap" --mon-data "$CEPH/mon"
  daemon mon ceph-mon -i a --mon-data "$CEPH/mon"
}

start_osd() {
  local uuid id
  uuid=$(< /proc/sys/kernel/random/uuid)
  id=$(ceph_cli osd new "$uuid")
  logged mkfs ceph-osd -c "$CONF" --mkfs -i "$id" --osd-uuid "$uuid"
  daemon osd ceph-osd -i "$id"
}

start_gateway() {
  daemon rgw radosgw -n client.rgw
  local until=$((SECONDS + LIMIT_S))
  until serves_s3 "$1"; do
    is_alive rgw || die "the gateway stopped while it started"
    ((SECONDS < until)) || die "the gateway did not answer within $LIMIT_S s"
    sleep 0.2
  done
}

create_user() {
  local name=$1 port=$2 user
  user=$(timeout "$LIMIT_S" radosgw-admin -c "$CONF" -n client.rgw user create --uid="$name" --display-name="$name" \
    --gen-access-key --gen-secret "${@:3}" 2>> "$CEPH/log/user.out")
  # in the environment, because everyone may read the arguments of a process
  USER_JSON=$user python3 - "$port" << 'END'
import json, os, shlex, sys

key = json.loads(os.environ["USER_JSON"])["keys"][0]
settings = {
    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{sys.argv[1]}",
    "AWS_ACCESS_KEY_ID": key["access_key"],
    "AWS_SECRET_ACCESS_KEY": key["secret_key"],
    "AWS_DEFAULT_REGION": "us-east-1",
}
for name, value in settings.items():
    print(f"export {name}={shlex.quote(value)}")
END
}

# --- daemons

logged() {
  timeout "$LIMIT_S" "${@:2}" >> "$CEPH/log/$1.out" 2>&1 || die "failed: ${*:2}"
}

ceph_cli() {
  timeout "$LIMIT_S" ceph -c "$CONF" --connect-timeout "$LIMIT_S" "$@" 2>> "$CEPH/log/cli.out" || die "failed: ceph $*"
}

daemon() {
  local name=$1
  shift
  setsid "$@" -c "$CONF" -f < /dev/null >> "$CEPH/log/$name.out" 2>&1 &
  echo $! > "$CEPH/$name.pid"
  disown
}

# A process number can be given to another program after a crash or a reboot: only one that runs with our configuration is ours.
is_alive() {
  local pid
  pid=$(cat "$CEPH/$1.pid" 2> /dev/null) && grep -qsF -- "$CONF" "/proc/$pid/cmdline"
}

endpoint_port() {
  sed -n "s/^export AWS_ENDPOINT_URL=.*:\([0-9]*\)'\?$/\1/p" "$DIR/env"
}

serves_s3() {
  timeout 5 bash -c 'exec 3<> "/dev/tcp/127.0.0.1/$0"; printf "GET / HTTP/1.0\r\n\r\n" >&3; grep -q ListAllMyBucketsResult <&3' "$1" \
    2> /dev/null
}

# Killed at once: on a request to stop, a daemon first writes its memory to disk, which is not needed.
stop() {
  local name until
  rm -f "$DIR/env" "$DIR/env.denied" "$DIR/env.watching"
  for name in "${DAEMONS[@]}"; do
    if is_alive "$name"; then kill -KILL "$(cat "$CEPH/$name.pid")" 2> /dev/null || true; fi
    until=$((SECONDS + 10))
    while is_alive "$name"; do
      ((SECONDS < until)) || die "process $(cat "$CEPH/$name.pid") ($name) does not end"
      sleep 0.1
    done
    rm -f "$CEPH/$name.pid"
  done
  rm -rf "$CEPH"/{mon,osd}
}

main "$@"
