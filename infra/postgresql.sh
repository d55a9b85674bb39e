#!/usr/bin/env bash
# A real PostgreSQL server for development and tests, from Debian's package: the database of a fleet's Prefect server.
#
#   infra/postgresql.sh install      the package, where apt-get may run; otherwise says what to install
#   infra/postgresql.sh start DIR    install, start on a free port of 127.0.0.1, print the path of DIR/env
#   infra/postgresql.sh stop DIR     stop the server; data, port and password stay for the next start
#
# DIR/env sets PREFECT_API_DATABASE_CONNECTION_URL, and what libpq reads (PGHOST, PGPORT, PGUSER, PGPASSWORD, PGDATABASE): one
# user, owner of one database. The first start writes it, and it stays valid: a start after a stop or a crash has the same
# data, port and password. A start in a DIR that already serves prints the path again. No wait is longer than
# POSTGRESQL_LIMIT_S seconds (120).
#
# PostgreSQL does not run as root: root runs it as Debian's user postgres, who must be able to enter DIR.
set -euo pipefail

readonly PACKAGE=postgresql
readonly NAME=prefect
readonly LIMIT_S=${POSTGRESQL_LIMIT_S:-120}

main() {
  case "${1:-} $#" in
    "install 1") install_package ;;
    "start 2" | "stop 2")
      use_directory "$2"
      "$1"
      ;;
    *) die "usage: $0 install | start DIR | stop DIR" ;;
  esac
}

die() {
  echo "postgresql.sh: $*" >&2
  exit 1
}

# --- package

install_package() {
  [[ -z $(programs) ]] || return 0
  if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
    die "no PostgreSQL server found; install Debian's package: apt-get install --no-install-recommends $PACKAGE"
  fi
  # an old package list names versions that the mirror no longer has, so a failed download is tried again with a new list
  { package_is_known && apt_install; } || { apt_get update && apt_install; } || die "apt-get could not install $PACKAGE"
  [[ -n $(programs) ]] || die "$PACKAGE is installed, but there is no /usr/lib/postgresql/*/bin/postgres"
}

# The newest version's folder; Debian puts only the clients on PATH.
programs() {
  local newest
  newest=$(printf '%s\n' /usr/lib/postgresql/*/bin/postgres | sort -V | tail -n 1)
  [[ ! -x $newest ]] || dirname "$newest"
}

package_is_known() {
  [[ $(apt-cache policy "$PACKAGE") == *"Candidate: "[0-9]* ]]
}

apt_get() {
  DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@" >&2
}

apt_install() (
  forbid_service_starts && apt_get install --yes --no-install-recommends "$PACKAGE"
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
  SERVER=$DIR/postgresql
  DATA=$SERVER/data
  LOG=$SERVER/log
  # the user postgres need not be able to enter the folder that this was called in
  cd /
}

start() {
  install_package
  if ! serves; then
    trap give_up EXIT
    [[ -f $DIR/env ]] || create
    await_end
    forget_crash
    as_postgres "$(programs)/pg_ctl" start -D "$DATA" -l "$LOG" -w -t "$LIMIT_S" > /dev/null
    trap - EXIT
  fi
  echo "$DIR/env"
}

give_up() {
  echo "postgresql.sh: did not start; the last lines of its log:" >&2
  [[ ! -f $LOG ]] || tail -n 15 "$LOG" >&2
  stop
  exit 1
}

as_postgres() {
  if [[ $(id -u) == 0 ]]; then runuser -u postgres -- "$@"; else "$@"; fi
}

serves() {
  [[ -f $DIR/env && -n $(processes) ]] || return 1
  (source "$DIR/env" && "$(programs)/pg_isready" --quiet --timeout=5)
}

# Every process of the server works in its data folder. A process number in a file could by now belong to another program.
processes() {
  local cwd
  for cwd in /proc/[0-9]*/cwd; do
    if [[ $(readlink "$cwd" 2> /dev/null) == "$DATA" ]]; then basename "$(dirname "$cwd")"; fi
  done
}

# --- the first start

create() {
  local port password
  port=$(free_port)
  password=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
  rm -rf "$SERVER"
  mkdir -m 700 "$SERVER"
  [[ $(id -u) != 0 ]] || chown postgres: "$SERVER"
  as_postgres test -w "$SERVER" || die "the user postgres cannot enter $DIR; take a folder that every user can enter"
  as_postgres "$(programs)/initdb" -D "$DATA" --username=postgres --encoding=UTF8 --locale=C.UTF-8 > "$SERVER/initdb.log" 2>&1 ||
    die "initdb failed: $(tail -n 5 "$SERVER/initdb.log")"
  configure "$port"
  create_database "$password"
  write_env "$port" "$password"
}

# Below the range from which the kernel takes ports for outgoing connections.
free_port() {
  local port
  for _ in $(seq 200); do
    port=$((20000 + RANDOM % 10000))
    if ! (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
      echo "$port"
      return
    fi
  done
  die "no free port between 20000 and 30000 on 127.0.0.1"
}

# No Unix socket: its path would be too long below a test's temporary folder. Dynamic shared memory as files in the data folder:
# what a killed server leaves is deleted with it. Only the one user can log in over the network, and no superuser.
configure() {
  cat >> "$DATA/postgresql.conf" << END
listen_addresses = '127.0.0.1'
port = $1
unix_socket_directories = ''
dynamic_shared_memory_type = mmap
END
  echo "host $NAME $NAME 127.0.0.1/32 scram-sha-256" > "$DATA/pg_hba.conf"
}

# By the server's single-user mode, which reads one command per line: so the password is not in an argument, which all can read.
create_database() {
  as_postgres "$(programs)/postgres" --single -D "$DATA" postgres > "$SERVER/create.log" 2>&1 << END
CREATE ROLE $NAME LOGIN PASSWORD '$1'
CREATE DATABASE $NAME OWNER $NAME
END
  ! grep -E 'ERROR|FATAL|PANIC' "$SERVER/create.log" >&2 || die "the database could not be made"
}

write_env() {
  (umask 077 && cat > "$DIR/env.new") << END
export PREFECT_API_DATABASE_CONNECTION_URL=postgresql+asyncpg://$NAME:$2@127.0.0.1:$1/$NAME
export PGHOST=127.0.0.1
export PGPORT=$1
export PGUSER=$NAME
export PGPASSWORD=$2
export PGDATABASE=$NAME
END
  mv "$DIR/env.new" "$DIR/env"
}

# --- after a stop or a crash

# When a server is killed, its other processes end a moment later.
await_end() {
  local until=$((SECONDS + LIMIT_S))
  while [[ -n $(processes) ]]; do
    ((SECONDS < until)) || die "processes of an earlier server do not end: $(processes | tr '\n' ' ')"
    sleep 0.1
  done
}

# What a killed server leaves besides its data: a segment of shared memory, and the file that holds the segment's number.
# Without that file, a process number that may by now be another server's does not prevent a start.
forget_crash() {
  local segment
  [[ -f $DATA/postmaster.pid ]] || return 0
  segment=$(awk 'NR == 7 { print $2 }' "$DATA/postmaster.pid")
  [[ -z $segment ]] || ipcrm --shmem-id "$segment" 2> /dev/null || true
  rm -f "$DATA/postmaster.pid"
}

# --- stop

stop() {
  local pid
  if [[ -n $(programs) && -n $(processes) ]]; then
    as_postgres "$(programs)/pg_ctl" stop -D "$DATA" -m fast -w -t 30 > /dev/null 2>&1 || true
  fi
  for pid in $(processes); do
    kill -KILL "$pid" 2> /dev/null || true
  done
  await_end
  forget_crash
}

main "$@"
