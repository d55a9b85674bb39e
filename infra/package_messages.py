"""Writes vllm_qualify/catalog/package-messages.json.gz: what the packages say that a start of vLLM runs through.

    .venv/bin/python -m infra.package_messages [--environment ENV] PACKAGE==VERSION …

A package is read from the environment ENV if that version is installed there, as torch's wheels are large, or else from its
wheel. Read are each Python `raise`, the checks in the C++ and CUDA sources that a wheel brings, and the texts in shared objects
that a family knows. The numbered errors of CUDA are asked of its own library. The table is kept for the packages that are not
named. What is in modules that no server runs, or too short to be known again, or not decided, is counted and not kept.
Printed are these numbers for each package, and those of Python that are new and that no family decides.
"""

import argparse
import ctypes
import gzip
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from packaging.requirements import Requirement

from infra.engine_messages import Said, read_statements
from vllm_qualify.engine.failure.messages import PACKAGES, VALUE, MessageTable, Statement, anchor_messages, read_table
from vllm_qualify.engine.failure.package_families import decide_package
from vllm_qualify.recipe.loading import catalog_folder

_NOWHERE = r"(?!)"


class Package(NamedTuple):
    """What a start runs through of a package: files of its wheel, each by its path there."""

    sources: str
    """Python and C++ files whose messages can end a start"""
    left_out: str = _NOWHERE
    """those among them that no server of a recipe runs"""
    objects: str = _NOWHERE
    """shared objects with texts of their own"""
    numbered: str = _NOWHERE
    """the library that numbers CUDA's errors"""


PACKAGES_READ = {
    "torch": Package(
        r"^torch/(?:__init__|cuda/|accelerator/|xpu/|_dynamo/(?!variables|polyfills|testing|symbolic_convert|bytecode"
        r"|output_graph|guards|side_effects|resume)|_inductor/(?!kernel|fx_passes|test)"
        r"|_subclasses/fake_tensor\.py"
        r"|_higher_order_ops/(?:triton|auto)"
        r"|distributed/(?:distributed_c10d|rendezvous|device_mesh|constants|_functional_coll|_symmetric_memory/"
        r"|elastic/(?:rendezvous|utils/dist))"
        r"|serialization|_weights_only|hub\.py|_ops|library|_library/|utils/(?:cpp_ext|_triton|_cpp)|multiprocessing"
        r"|storage|nn/modules/module"
        r"|nn/parameter|backends/cu)",
        r"/(?:nvtx|gds|jiterator|tunable|sanitizer|amp)",
        r"^torch/lib/lib(?:c10|torch_cpu|torch_python|shm)\.so",
    ),
    "triton": Package(
        r"^triton/", r"^triton/(?:experimental|tools|profiler|testing|_internal|_test|_compile_warm|_filecheck|runtime/interp)"
    ),
    "flashinfer-python": Package(
        r"^flashinfer/(?:data/csrc/(?!.*cake)|data/include/|[^/]+\.py|(?:jit|gemm|fused_moe|mla|comm|sampling|norm|rope"
        r"|quantization|topk)/)",
        r"cake|_dsl|kda_|gdn_|_attention_sm|/sparse\.py|mla/_batch|fused_moe/(?:backends|runners|prepare)"
        r"|comm/(?:ulysses|dcp|nvshmem)|norm/|rope/|/tests?/|testing|benchmark|trace|fi_trace|nv_internal/include|cutlass/(?:include|tools)|experimental|autotune|__main__|calibration|monomoe|alphamoe",
    ),
    "huggingface-hub": Package(
        r"^huggingface_hub/(?:file_download|_snapshot_download|errors|constants|dataclasses"
        r"|_local_folder|_login|lfs"
        r"|serialization/_torch|utils/_(?:http|validators|xet|auth|headers|fixes|hf_folder|safetensors|runtime))"
    ),
    "transformers": Package(
        r"^transformers/(?:configuration|modeling_(?:utils|rope|gguf)|tokenization|processing_utils|dynamic_module"
        r"|image_proc|feature_ext"
        r"|video_proc|core_model|conversion_map|convert_slow|masking|integrations/|quantizers/|utils/(?:hub|quant"
        r"|import|generic|versions)"
        r"|models/auto/|models/[^/]+/(?:configuration|tokenization|processing)_)",
        r"integrations/(?:integration_utils|deepspeed|fsdp|peft|tensor_parallel|executorch)",
    ),
    "safetensors": Package(r"^safetensors/", r"paddle|flax|mlx|tensorflow"),
    "ray": Package(
        r"^ray/(?:__init__|exceptions|_private/(?:worker|services|node|parameter|ray_|utils|accelerators|resource"
        r"|client_mode|state)|util/(?:placement|scheduling)"
        r"|experimental/(?:channel|compiled_dag)|dag/)",
        r"/tests?/|accelerators/(?!nvidia|amd|accelerator)",
    ),
    "nvidia-cuda-runtime": Package(_NOWHERE, numbered=r"/libcudart\.so"),
    "vllm": Package(r"^vllm/third_party/deep_gemm/[^/]+\.py", objects=r"^vllm/(?:third_party/deep_gemm/_C|_C)[^/]*\.so"),
}
_SOURCE = re.compile(r"\.(?:py|cu|cuh|h|hpp|cc|cpp|inc)$")
_CHECK = re.compile(
    r"\b(?P<check>TORCH_CHECK\w*|TVM_FFI_I?CHECK\w*|TVM_FFI_(?:LOG_AND_)?THROW|FLASHINFER_(?:CHECK|ERROR)"
    r"|TLLM_(?:CHECK_WITH_INFO|THROW)"
    r"|throw std::\w+)(?P<said>[^;]{0,900});"
)
_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_PRINTF = re.compile(r"%[-+ #\d.*]*(?:ll?|z|h)*[sdrfgxupciX]")
_PRINTABLE = re.compile(rb"[\x20-\x7e]{16,400}")
_MOST_NUMBERED = 1000


class Reading(NamedTuple):
    """The messages of a package, and how many are in files that no server runs."""

    said: set[Said]
    unread: int


def read_files(package: Package, files: Iterable[tuple[str, bytes]]) -> Reading:
    """Read the messages of `files`, which are pairs of a path in the wheel and the file's content."""
    said: set[Said] = set()
    unread = 0
    for path, content in files:
        if re.search(package.objects, path):
            said |= set(_read_object(path.split("/")[0], content))
        elif _SOURCE.search(path):
            found = set(_read_source(path, content.decode(errors="replace")))
            is_read = re.search(package.sources, path) and not re.search(package.left_out, path)
            said, unread = (said | found, unread) if is_read else (said, unread + len(found))
    return Reading(said, unread)


def _read_source(path: str, code: str) -> Iterator[Said]:
    if path.endswith(".py"):
        try:
            found = list(read_statements(code))
        except SyntaxError:  # a template, or code for a later Python
            return
        yield from ((path, raised, text) for raised, text in found if raised)
    else:
        yield from ((path, match["check"], text) for match in _CHECK.finditer(code) if (text := _join_literals(match["said"])))


def _join_literals(said: str) -> str:
    """The literals of a C++ check, with `{}` for each value between them."""
    text, end = "", 0
    for literal in _LITERAL.finditer(said):
        text += (VALUE if text and said[end : literal.start()].strip() else "") + literal[1]
        end = literal.end()
    return _PRINTF.sub(VALUE, text.replace("\\n", "\n").replace('\\"', '"'))


def _read_object(name: str, content: bytes) -> Iterator[Said]:
    """The texts of a shared object that a family knows: nothing tells which others say what failed."""
    place = f"{name}/native"
    for found in set(_PRINTABLE.findall(content)):
        text = _PRINTF.sub(VALUE, found.decode())
        if re.match(r"[A-Z][\w'-]*[ :]", text) and decide_package(place, text):
            yield place, "", text


def read_numbered_errors(library: Path) -> Iterator[Said]:
    """CUDA's names and texts of its errors, as its own library gives them; no GPU is needed for that."""
    runtime = ctypes.CDLL(str(library))
    runtime.cudaGetErrorName.restype = runtime.cudaGetErrorString.restype = ctypes.c_char_p
    for number in range(1, _MOST_NUMBERED):
        name, text = runtime.cudaGetErrorName(number).decode(), runtime.cudaGetErrorString(number).decode()
        if name.startswith("cudaError"):
            yield f"cuda/{name}", "", text


def read_package(requirement: Requirement, environment: Path | None, folder: Path) -> Reading:
    package = PACKAGES_READ[requirement.name]
    installed = environment and _find_installed(requirement, environment)
    if installed:
        return read_files(package, installed)
    wheel = bring_wheel(requirement, folder)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        numbered: set[Said] = set()
        for name in names:
            if re.search(package.numbered, name):
                numbered |= set(read_numbered_errors(Path(archive.extract(name, folder))))
        said, unread = read_files(package, ((name, archive.read(name)) for name in names if _is_wanted(package, name)))
    return Reading(said | numbered, unread)


def _is_wanted(package: Package, path: str) -> bool:
    return bool(_SOURCE.search(path) or re.search(package.objects, path))


def _find_installed(requirement: Requirement, environment: Path) -> Iterator[tuple[str, bytes]] | None:
    """The files of an installed package of the required version; None if it is not there."""
    name = requirement.name.replace("-", "_")
    root = next(environment.glob("lib/python3*/site-packages"))
    record = next((root / f"{each.name}/RECORD" for each in root.glob(f"{name}-*.dist-info")), None)
    if record is None or not requirement.specifier.contains(record.parent.name.split("-")[1], prereleases=True):
        return None
    paths = [line.rsplit(",", 2)[0] for line in record.read_text().splitlines()]
    package = PACKAGES_READ[requirement.name]
    return ((path, (root / path).read_bytes()) for path in paths if _is_wanted(package, path))


def bring_wheel(requirement: Requirement, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    if subprocess.run([*command, str(requirement)], check=False).returncode != 0:
        sys.exit(f"no wheel of {requirement}: is it the version's name?")
    return next(folder.glob("*.whl"))


def merge_packages(by_package: dict[str, set[Said]]) -> MessageTable:
    """The table of what is decided. A text that several places of one package say stands once, if they have one decision."""
    names = sorted(by_package)
    kept: dict[tuple[str, str], Said] = {}
    for name in names:
        for said in sorted(by_package[name]):
            if family := decide_package(said[0], said[2]):
                kept.setdefault((said[2], family.fate), said)
    anchors = anchor_messages({said[2] for said in kept.values()})
    place_of = {said: names.index(name) for name in names for said in by_package[name]}
    statements = [
        Statement(*said, anchors.get(said[2], 0), [place_of[said]])
        for said in sorted(kept.values())
        if said[2] in anchors or said[0].startswith("cuda/")
    ]
    return MessageTable(names, statements)


def split_packages(table: MessageTable) -> dict[str, set[Said]]:
    return {
        name: {each[:3] for each in table.statements if each.versions == [place]} for place, name in enumerate(table.versions)
    }


def describe_package(name: str, reading: Reading, before: set[Said]) -> Iterator[str]:
    fates = {said: family.fate if (family := decide_package(said[0], said[2])) else None for said in reading.said}
    long_enough = anchor_messages({text for _, _, text in reading.said})
    known = [said for said in reading.said if said[2] in long_enough or said[0].startswith("cuda/")]
    decided = [said for said in known if fates[said]]
    left_out = f"{len(reading.said) - len(known)} too short, {reading.unread} in modules that no server runs"
    yield f"{name}: {len(known)} messages read, {len(decided)} of them decided; left out: {left_out}"
    new = sorted(said for said in known if not fates[said] and said not in before and said[0].endswith(".py"))
    yield from (f"  new, not decided: {place}: {raised}: {text[:120]}" for place, raised, text in new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, help="an environment whose packages are read where they are")
    parser.add_argument("packages", nargs="*", type=Requirement, metavar="PACKAGE==VERSION")
    args = parser.parse_args()
    path = catalog_folder() / PACKAGES
    by_package = split_packages(read_table(PACKAGES)) if path.exists() else {}
    for requirement in args.packages:
        before = set().union(*(said for name, said in by_package.items() if Requirement(name).name == requirement.name))
        with TemporaryDirectory(prefix="vllm-qualify-wheel-") as folder:
            reading = read_package(requirement, args.environment, Path(folder))
        by_package = {name: said for name, said in by_package.items() if Requirement(name).name != requirement.name}
        by_package[str(requirement)] = reading.said
        for line in describe_package(str(requirement), reading, before):
            print(line)
    table = merge_packages(by_package)
    content = json.dumps(
        {"versions": table.versions, "statements": table.statements}, ensure_ascii=False, separators=(",", ":")
    )
    path.write_bytes(gzip.compress(content.encode(), mtime=0))
    print(f"{len(table.statements)} messages kept, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
