"""The supported versions of Python: one list, told alike everywhere, and locks that hold for all of them."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.infra.files import IMAGE, ROOT

REQUIREMENTS = ROOT / "infra" / "requirements"
OLDEST, NEWEST = 11, 14
SUPPORTED = [f"3.{minor}" for minor in range(OLDEST, NEWEST + 1)]


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command with the functions of infra/python.sh."""
    return subprocess.run(
        ["/bin/bash", "-c", f". infra/python.sh; {command}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": os.defpath} | environment,
        check=False,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder for the interpreters of a machine; nothing else is on its path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def interpreter(folder: Path, name: str, version: str) -> Path:
    made = folder / name
    made.write_text(f"#!/bin/sh\necho {version}\n")
    made.chmod(0o755)
    return made


def test_the_package_the_scripts_and_the_images_name_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">=3.{OLDEST},<3.{NEWEST + 1}"
    told = [line.rpartition(" ")[2] for line in project["classifiers"] if line.startswith("Programming Language")]
    assert told == SUPPORTED
    assert shell('echo "${pythons[@]}"').stdout.split() == SUPPORTED
    for file in IMAGE.glob("*Dockerfile"):
        assert re.findall(r"^ARG PYTHON=(.+)$", file.read_text(encoding="utf-8"), re.MULTILINE) == [SUPPORTED[0]]


def test_the_oldest_supported_python_is_taken(path: Path) -> None:
    for name, version in (("python3.13", "3.13"), ("python3.12", "3.12"), ("python3", "3.12")):
        interpreter(path, name, version)
    assert shell("find_python", PATH=str(path)).stdout.strip() == str(path / "python3.12")


def test_a_python_that_only_has_the_general_name_is_taken(path: Path) -> None:
    interpreter(path, "python3", "3.14")
    assert shell("find_python", PATH=str(path)).stdout.strip() == str(path / "python3")


def test_the_callers_python_goes_before_all_others(path: Path, tmp_path: Path) -> None:
    interpreter(path, "python3.11", "3.11")
    own = interpreter(tmp_path, "my python", "3.13")
    assert shell("find_python", PATH=str(path), PYTHON=str(own)).stdout.strip() == str(own)


def test_no_other_is_taken_in_place_of_a_callers_python_that_is_not_supported(path: Path) -> None:
    interpreter(path, "python3.11", "3.11")
    done = shell("find_python", PATH=str(path), PYTHON=str(interpreter(path, "old", "3.10")))
    assert done.returncode == 3
    assert f"PYTHON is {path / 'old'}, and that is no Python 3.11 to 3.14" in done.stderr


def test_a_machine_without_a_supported_python_is_told_the_remedy(path: Path) -> None:
    interpreter(path, "python3", "3.10")
    done = shell("find_python", PATH=str(path))
    assert done.returncode == 3
    assert "no Python 3.11 to 3.14 found; remedy: apt-get install python3" in done.stderr


@pytest.mark.parametrize(("name", "without_hash"), [("orchestrator", []), ("engine", ["torch"])])
def test_a_lock_has_the_hash_of_every_file_and_no_address(name: str, without_hash: list[str]) -> None:
    text = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")
    packages = re.findall(r"^([\w.-]+)==[^\n]*((?:\n    --hash=sha256:[0-9a-f]{64}[ \\]*)*)", text, re.MULTILINE)
    assert len(packages) > 100
    assert [package for package, hashes in packages if not hashes] == without_hash
    assert not re.search(r"://|--index|--find-links| @ ", text)


def test_the_orchestrators_lock_has_one_version_of_each_package_for_all_pythons() -> None:
    names = re.findall(r"^([\w.-]+)==", (REQUIREMENTS / "orchestrator.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) == len(set(names))


def test_a_packages_lines_are_found_in_a_lock() -> None:
    first, *hashes = shell("locked uv orchestrator").stdout.splitlines()
    version = shell("locked_version uv orchestrator").stdout.strip()
    assert first == f"uv=={version} \\"
    assert hashes
    assert all(line.startswith("    --hash=sha256:") for line in hashes)
