#!/usr/bin/env bash
# A private, real Docker Engine and OCI registry for development and tests, from Debian's packages.
#
#   infra/docker.sh install             the packages, where apt-get may run; otherwise says what to install
#   infra/docker.sh start DIR           install, start engine and registry, print the path of DIR/env
#   infra/docker.sh engine-stop DIR     stop the engine alone, as an administrator would: its containers end, the registry stays
#   infra/docker.sh engine-start DIR    start it again, with the images that it had
#   infra/docker.sh stop DIR            stop all and remove the containers; images and what was pushed stay for the next start
#
# DIR/env sets DOCKER_HOST and DOCKER_CONFIG, the registry's address (VLLM_QUALIFY_REGISTRY), and the address at which the same
# registry asks for a login (VLLM_QUALIFY_LOGIN_REGISTRY) with the user and password that it accepts. A start in a DIR that
# already serves prints the path again. No wait is longer than DOCKER_LIMIT_S seconds (120).
#
# Another Docker on the machine is left alone: socket, containerd, bridge and folders are DIR's own, and the firewall is not
# touched. So ports that a container publishes work, but a container has no way out of the machine.
set -euo pipefail

readonly LIMIT_S=${DOCKER_LIMIT_S:-120}
readonly LOGIN_USER=tester
# the longest path of a socket that the engine makes below DIR, and the kernel's limit
readonly LONGEST_SOCKET=engine/exec/libnetwork/0123456789ab.sock SOCKET_LIMIT=107

# the daemons' folder; root's PATH may lack it
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

main() {
  case "${1:-} $#" in
    "install 1") install_packages ;;
    "start 2" | "stop 2" | "engine-start 2" | "engine-stop 2")
      [[ $(id -u) == 0 ]] || die "only root may run a Docker Engine; try: sudo $0 $*"
      use_directory "$2"
      "${1/-/_}"
      ;;
    *) die "usage: $0 install | start DIR | engine-stop DIR | engine-start DIR | stop DIR" ;;
  esac
}

die() {
  echo "docker.sh: $*" >&2
  exit 1
}

# --- packages

install_packages() {
  local packages
  packages=$(missing_packages)
  [[ -n $packages ]] || return 0
  if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
    die "not found: $(missing_programs); install Debian's packages: apt-get install --no-install-recommends $packages"
  fi
  # an old package list names versions that the mirror no longer has, so a failed download is tried again with a new list
  { packages_are_known && apt_install; } || { apt_get update && apt_install; } || die "apt-get could not install $packages"
  [[ -z $(missing_programs) ]] || die "$packages are installed, but these are not on PATH: $(missing_programs)"
}

# A kernel with AppArmor needs a profile for every container.
missing_programs() {
  local program wanted=(dockerd docker containerd docker-registry ip) missing=()
  [[ $(cat /sys/module/apparmor/parameters/enabled 2> /dev/null) != Y ]] || wanted+=(apparmor_parser)
  for program in "${wanted[@]}"; do
    command -v "$program" > /dev/null || missing+=("$program")
  done
  echo "${missing[*]}"
}

# Only what is missing: an engine that is already installed may come from elsewhere, and Debian's would conflict with it.
missing_packages() {
  local program packages=()
  for program in $(missing_programs); do
    case $program in
      dockerd | containerd) packages+=(docker.io) ;;
      docker) is_known docker-cli && packages+=(docker-cli) || packages+=(docker.io) ;;
      ip) packages+=(iproute2) ;;
      apparmor_parser) packages+=(apparmor) ;;
      *) packages+=("$program") ;;
    esac
  done
  printf '%s\n' "${packages[@]}" | sort -u | xargs
}

is_known() {
  [[ $(apt-cache policy "$1" 2> /dev/null) == *"Candidate: "[0-9]* ]]
}

packages_are_known() {
  local package
  for package in $(missing_packages); do
    is_known "$package" || return 1
  done
}

apt_get() {
  DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@" >&2
}

apt_install() (
  # shellcheck disable=SC2046 # names of packages, without spaces
  forbid_service_starts && apt_get install --yes --no-install-recommends $(missing_packages)
)

# Debian asks this program before a package starts its service; one that is already there is the administrator's and stays.
forbid_service_starts() {
  policy=/usr/sbin/policy-rc.d
  [[ ! -e $policy ]] || return 0
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' > "$policy" && chmod 755 "$policy"
}

# --- start and stop

use_directory() {
  mkdir -p "$1"
  DIR=$(cd "$1" && pwd -P)
  ENGINE=$DIR/engine
  REGISTRY=$DIR/registry
  SOCKET=$DIR/docker.sock
  local length=$((${#DIR} + 1 + ${#LONGEST_SOCKET}))
  ((length <= SOCKET_LIMIT)) || die "the path $DIR is $((length - SOCKET_LIMIT)) characters too long for the engine's sockets"
  BRIDGE=vq$(sha256sum <<< "$DIR" | head -c 10)
}

start() {
  if [[ -f $DIR/env ]] && engine_answers && registries_answer; then
    echo "$DIR/env"
    return
  fi
  install_packages
  stop
  umask 077
  mkdir -p "$ENGINE/log" "$REGISTRY/log" "$DIR/client"
  trap give_up EXIT
  start_registries
  start_engine
  # left by an engine that crashed
  remove_containers
  write_env
  trap - EXIT
  echo "$DIR/env"
}

engine_start() {
  [[ -f $DIR/env ]] || die "nothing was started in $DIR; try: $0 start $DIR"
  ! engine_answers || return 0
  engine_stop
  umask 077
  trap give_up EXIT
  start_engine
  trap - EXIT
}

give_up() {
  echo "docker.sh: did not start; the last lines of its logs:" >&2
  tail -n 15 "$ENGINE"/log/* "$REGISTRY"/log/* >&2 || true
  stop
  exit 1
}

stop() {
  rm -f "$DIR/env"
  remove_containers
  engine_stop
  end "$REGISTRY" open
  end "$REGISTRY" login
}

# The engine ends its containers itself. But an engine that crashed leaves its containers and their mounts.
engine_stop() {
  end "$ENGINE" dockerd
  end_orphans
  end "$ENGINE" containerd
  unmount_all
  ip link delete "$BRIDGE" 2> /dev/null || true
  rm -f "$SOCKET" "$ENGINE/docker.pid" "$ENGINE"/containerd.sock*
}

write_env() {
  cat > "$DIR/env.new" << END
export DOCKER_HOST=$(printf %q "unix://$SOCKET")
export DOCKER_CONFIG=$(printf %q "$DIR/client")
export VLLM_QUALIFY_REGISTRY=127.0.0.1:$(< "$REGISTRY/open.port")
export VLLM_QUALIFY_LOGIN_REGISTRY=127.0.0.1:$(< "$REGISTRY/login.port")
export VLLM_QUALIFY_LOGIN_USER=$LOGIN_USER
export VLLM_QUALIFY_LOGIN_PASSWORD=$(< "$REGISTRY/password")
END
  mv "$DIR/env.new" "$DIR/env"
}

# --- engine

# A containerd of its own: dockerd would use the machine's, if there is one, and so share it with another Docker.
start_engine() {
  mount_cgroups
  make_bridge
  cat > "$ENGINE/containerd.toml" << END
version = 2
root = "$ENGINE/containerd"
state = "$ENGINE/containerd.state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "$ENGINE/containerd.sock"
END
  daemon "$ENGINE" containerd containerd --config "$ENGINE/containerd.toml"
  wait_for "$ENGINE" containerd test -S "$ENGINE/containerd.sock"
  echo '{}' > "$ENGINE/dockerd.json"
  daemon "$ENGINE" dockerd dockerd --config-file "$ENGINE/dockerd.json" --host "unix://$SOCKET" \
    --data-root "$ENGINE/data" --exec-root "$ENGINE/exec" --pidfile "$ENGINE/docker.pid" \
    --containerd "$ENGINE/containerd.sock" --bridge "$BRIDGE" --iptables=false --ip-masq=false
  wait_for "$ENGINE" dockerd engine_answers
}

client() {
  DOCKER_CONFIG=$DIR/client timeout "$LIMIT_S" docker --host "unix://$SOCKET" "$@"
}

engine_answers() {
  [[ -S $SOCKET ]] && client version > /dev/null 2>&1
}

remove_containers() {
  engine_answers || return 0
  local containers
  mapfile -t containers < <(client ps --all --quiet)
  ((${#containers[@]} == 0)) || client rm --force --volumes "${containers[@]}" > /dev/null || true
}

# Real containers have limits, which need control groups. If nothing has mounted them yet, version 2 is used.
mount_cgroups() {
  ! grep -q ' /sys/fs/cgroup' /proc/mounts || return 0
  mount -t cgroup2 cgroup2 /sys/fs/cgroup || die "could not mount the control groups at /sys/fs/cgroup"
}

# Docker's default bridge would have the same name and network as that of another Docker.
make_bridge() {
  local number
  ip link delete "$BRIDGE" 2> /dev/null || true
  ip link add "$BRIDGE" type bridge
  for number in $(seq 30 250 | shuf); do
    if [[ -z $(ip -4 route show root "10.213.$number.0/24") && -z $(ip -4 addr show to "10.213.$number.0/24") ]]; then
      ip addr add "10.213.$number.1/24" dev "$BRIDGE" && ip link set "$BRIDGE" up
      return
    fi
  done
  die "no free network between 10.213.30.0/24 and 10.213.250.0/24"
}

end_orphans() {
  local cmdline pid children
  while read -r cmdline; do
    grep -qs containerd-shim "$cmdline" || continue
    pid=$(cut -d/ -f3 <<< "$cmdline")
    children=$(cat "/proc/$pid/task/"*/children 2> /dev/null || true)
    # shellcheck disable=SC2086 # a list of numbers
    kill -KILL $children "$pid" 2> /dev/null || true
  done < <(grep -lsF -- "$ENGINE/containerd.sock" /proc/[0-9]*/cmdline)
}

unmount_all() {
  local mount
  while read -r mount; do
    umount --lazy "$mount" || true
  done < <(cut -d' ' -f2 /proc/mounts | grep -F "$ENGINE/" | sort -r)
}

# --- registry: one store, served at two addresses

start_registries() {
  choose_port open 5000
  choose_port login
  random_word > "$REGISTRY/password"
  # the registry accepts only bcrypt; libcrypt has it, and Perl, which every Debian has, can call it
  { random_word && cat "$REGISTRY/password"; } \
    | perl -e 'chomp(($salt, $word) = <STDIN>); print "$ARGV[0]:", crypt($word, "\$2b\$05\$$salt") // die, "\n"' "$LOGIN_USER" \
      > "$REGISTRY/htpasswd"
  start_registry open
  start_registry login "auth: {htpasswd: {realm: tests, path: $REGISTRY/htpasswd}}"
}

start_registry() {
  local name=$1 port
  port=$(< "$REGISTRY/$name.port")
  cat > "$REGISTRY/$name.yml" << END
version: 0.1
log: {accesslog: {disabled: true}}
storage:
  filesystem: {rootdirectory: $REGISTRY/data}
  delete: {enabled: true}
http: {addr: 127.0.0.1:$port, secret: $(random_word)}
${2:-}
END
  daemon "$REGISTRY" "$name" docker-registry serve "$REGISTRY/$name.yml"
  wait_for "$REGISTRY" "$name" registry_answers "$name"
}

registries_answer() {
  registry_answers open && registry_answers login
}

registry_answers() {
  # shellcheck disable=SC2016 # for the inner shell
  timeout 5 bash -c 'exec 3<>"/dev/tcp/127.0.0.1/$0"; printf "GET /v2/ HTTP/1.0\r\n\r\n" >&3; grep -qi ^docker-dist <&3' \
    "$(cat "$REGISTRY/$1.port" 2> /dev/null || echo 0)" 2> /dev/null
}

# The port of the last start, so that names of images stay valid; else the preferred one; else any port below the range from
# which the kernel takes ports for outgoing connections.
choose_port() {
  local file=$REGISTRY/$1.port port
  for port in $(cat "$file" 2> /dev/null) ${2:-} $(shuf -i 20000-29999 -n 200); do
    if ! (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
      echo "$port" > "$file"
      return
    fi
  done
  die "no free port between 20000 and 30000 on 127.0.0.1"
}

# 22 characters, the length of bcrypt's salt
random_word() {
  tr -d - < /proc/sys/kernel/random/uuid | head -c 22
  echo
}

# --- daemons

# Without our environment, which may have a proxy or a setting for another Docker. With as many open files as a service of the
# system may have, because containers inherit that.
daemon() {
  local folder=$1 name=$2
  shift 2
  ulimit -n 1048576 2> /dev/null || true
  setsid env -i PATH="$PATH" HOME="$folder" "$@" < /dev/null >> "$folder/log/$name" 2>&1 &
  echo $! > "$folder/$name.pid"
  disown
}

# By its number alone: until a new process runs its own program, it still has our arguments.
wait_for() {
  local folder=$1 name=$2 until=$((SECONDS + LIMIT_S))
  shift 2
  until "$@"; do
    kill -0 "$(< "$folder/$name.pid")" 2> /dev/null || die "$name stopped while it started"
    ((SECONDS < until)) || die "$name did not answer within $LIMIT_S s"
    sleep 0.2
  done
}

# A process number can be given to another program after a crash or a reboot: only one that runs in our folder is ours.
is_alive() {
  local pid
  pid=$(cat "$1/$2.pid" 2> /dev/null) && grep -qsF -- "$1/" "/proc/$pid/cmdline"
}

end() {
  local folder=$1 name=$2 pid until=$((SECONDS + LIMIT_S))
  pid=$(cat "$folder/$name.pid" 2> /dev/null) || return 0
  ! is_alive "$folder" "$name" || kill -TERM "$pid" 2> /dev/null || true
  while is_alive "$folder" "$name"; do
    ((SECONDS < until)) || die "process $pid ($name) does not end"
    sleep 0.1
  done
  rm -f "$folder/$name.pid"
}

main "$@"
