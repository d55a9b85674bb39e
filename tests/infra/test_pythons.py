"""The supported versions of Python: one list, the same everywhere, and locks that hold for all of them."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.infra.files import IMAGE, ROOT

REQUIREMENTS = ROOT / "infra" / "requirements"
LOCKS = (
    "infra/requirements/orchestrator.txt",
    "infra/requirements/development.txt",
    "vllm_qualify/engine/locks/cpu.txt",
    "vllm_qualify/engine/locks/cuda.txt",
)
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


def interpreter(folder: Path, name: str, version: str) -> Path:
    made = folder / name
    made.write_text(f"#!/bin/sh\necho {version}\n")
    made.chmod(0o755)
    return made


def test_the_package_the_scripts_and_the_images_name_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">=3.{OLDEST},<3.{NEWEST + 1}"
    listed = [line.rpartition(" ")[2] for line in project["classifiers"] if line.startswith("Programming Language")]
    assert listed == SUPPORTED
    assert shell('echo "${pythons[@]}"').stdout.split() == SUPPORTED
    for file in IMAGE.glob("*Dockerfile"):
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r"^ARG (?:PYTHON=|BASE_IMAGE=python:)([\d.]+)", text, re.MULTILINE)) == {SUPPORTED[0]}


@pytest.mark.parametrize(
    ("versions", "own", "taken", "said"),
    [
        ({"python3.13": "3.13", "python3.12": "3.12", "python3": "3.12"}, None, "bin/python3.12", ""),
        ({"python3": "3.14"}, None, "bin/python3", ""),
        ({"python3.11": "3.11"}, ("my python", "3.13"), "my python", ""),
        ({"python3.11": "3.11"}, ("old", "3.10"), "", "PYTHON is {folder}/old, and that is no Python 3.11 to 3.14"),
        ({"python3": "3.10"}, None, "", "no Python 3.11 to 3.14 found; remedy: apt-get install python3"),
    ],
    ids=["the oldest", "the general name", "the caller's", "the caller's is too old", "none"],
)
def test_the_callers_python_or_the_oldest_supported_one_is_taken(
    tmp_path: Path, versions: dict[str, str], own: tuple[str, str] | None, taken: str, said: str
) -> None:
    """There is nothing else on the path than these, and no other is taken in place of a caller's that is not supported."""
    (tmp_path / "bin").mkdir()
    for name, version in versions.items():
        interpreter(tmp_path / "bin", name, version)
    named = {"PYTHON": str(interpreter(tmp_path, *own))} if own else {}
    done = shell("find_python", PATH=str(tmp_path / "bin"), **named)
    assert done.stdout.strip() == (str(tmp_path / taken) if taken else "")
    assert done.returncode == (0 if taken else 3)
    assert said.format(folder=tmp_path) in done.stderr


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_the_hash_of_every_file_and_no_address(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    packages = re.findall(r"^([\w.-]+)==[^\n]*((?:\n    --hash=sha256:[0-9a-f]{64}[ \\]*)*)", text, re.MULTILINE)
    assert len(packages) > 100
    assert [package for package, hashes in packages if not hashes] == []
    assert not re.search(r"://|--index|--find-links| @ ", text)


def versions_in(name: str) -> list[tuple[str, str]]:
    return re.findall(r"^([\w.-]+)==(\S+)", (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_orchestrators_locks_have_one_version_of_each_package_for_all_pythons() -> None:
    """Both are installed into one environment."""
    runtime, development = versions_in("orchestrator"), versions_in("development")
    for locked in (runtime, development):
        assert len(locked) == len({name for name, _ in locked})
    both = {*runtime, *development}
    assert len(both) == len({name for name, _ in both})


def test_every_install_from_a_lock_asks_for_hashes() -> None:
    for script in ("setup.sh", "test_pythons.sh"):
        syncs = [line for line in (ROOT / "infra" / script).read_text(encoding="utf-8").splitlines() if "pip sync" in line]
        assert syncs
        assert [line for line in syncs if "--require-hashes" not in line] == []


def test_torchs_lock_has_its_wheel_for_every_python() -> None:
    """PyTorch's CPU wheel is on no general index, so its hashes are kept by hand."""
    known = {line.split()[1]: line.split()[0] for line in (REQUIREMENTS / "torch.sha256").read_text().splitlines()}
    torch = shell("locked torch vllm_qualify/engine/locks/cpu.txt").stdout
    version = torch.split("==")[1].split()[0]
    pythons = [f"cp{python.replace('.', '')}" for python in shell("printf '%s ' ${pythons[@]}").stdout.split()]
    machines = ("aarch64", "x86_64")
    assert sorted(known) == [
        f"torch-{version}-{py}-{py}-manylinux_2_28_{machine}.whl" for py in pythons for machine in machines
    ]
    assert sorted(re.findall(r"sha256:(\w+)", torch)) == sorted(known.values())


@pytest.mark.parametrize("content", ["what was locked", "something else"])
def test_only_the_wheel_of_torch_that_was_locked_is_taken(tmp_path: Path, content: str) -> None:
    wheel = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    (tmp_path / "infra" / "requirements").mkdir(parents=True)
    (tmp_path / ".wheels").mkdir()
    shutil.copy(ROOT / "infra" / "python.sh", tmp_path / "infra")
    shutil.copy(REQUIREMENTS / "engine.in", tmp_path / "infra" / "requirements")
    locked = hashlib.sha256(b"what was locked").hexdigest()
    (tmp_path / "infra" / "requirements" / "torch.sha256").write_text(f"{locked}  {wheel}\n")
    (tmp_path / ".wheels" / wheel).write_text(content)
    (tmp_path / ".wheels" / "wanted").write_text("torch==2.13.0+cpu\n")
    done = subprocess.run(
        ["bash", "-c", ". infra/python.sh; torch_wheel"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    if content == "what was locked":
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 3
        assert "torch.sha256; remedy: rm -r .wheels" in done.stderr


@pytest.mark.thorough
def test_a_bill_of_materials_names_every_locked_package(tmp_path: Path) -> None:
    rule = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nsbom: orchestrator\n")[2]
    lines = rule.replace("\\\n", " ").splitlines()
    (command,) = [line.strip() for line in lines if "cyclonedx-py" in line]
    program, *arguments = shlex.split(command.replace("sbom.cdx.json", str(tmp_path / "sbom.json")))
    subprocess.run([Path(sys.executable).with_name(Path(program).name), *arguments], cwd=ROOT, check=True, capture_output=True)
    bill = json.loads((tmp_path / "sbom.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "vllm-qualify")
    assert sorted((each["name"], each["version"]) for each in bill["components"]) == sorted(versions_in("orchestrator"))
    assert all(each["purl"] == f"pkg:pypi/{each['name']}@{each['version']}" for each in bill["components"])
    hashes = [reference["hashes"] for each in bill["components"] for reference in each["externalReferences"]]
    assert sum(map(len, hashes)) > len(bill["components"])


def test_a_packages_lines_are_found_in_a_lock() -> None:
    first, *hashes = shell("locked uv infra/requirements/orchestrator.txt").stdout.splitlines()
    ((_, version),) = [locked for locked in versions_in("orchestrator") if locked[0] == "uv"]
    assert first == f"uv=={version} \\"
    assert hashes
    assert all(line.startswith("    --hash=sha256:") for line in hashes)
