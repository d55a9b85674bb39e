"""The engine environment: the Python that has vLLM, separate from the orchestrator's."""

import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from vllm_qualify.engine import installed
from vllm_qualify.engine.confinement import quiet_environment
from vllm_qualify.engine.installing import list_installed
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.launchers import LauncherName
from vllm_qualify.errors import HostError
from vllm_qualify.recipe.serving import VLLM, EngineName
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.secrets import redact

CHECKOUT_ENVIRONMENT = ".venv-engine"
OVERRIDE = "VLLM_QUALIFY_ENGINE"

# Whose versions say what computes.
PACKAGES = (*(kind.package for kind in KINDS.values()), "torch", "transformers", "flashinfer-python", "triton")
# As many changed files are listed.
MOST_CHANGED = 100


class ImageIdentity(Frozen):
    """An image as it was pulled. `reference` is the requested name, before it was resolved to a digest."""

    reference: str
    platform: str
    image_id: str
    created: str
    labels: dict[str, str]


class EngineIdentity(Frozen):
    """The engine of a measurement.

    `version` is that of `kind`. `digest` is the image's. Without an image it covers the content of every file that came with
    vLLM and with its plugins: SHA-256 over the lines of their wheels' RECORDs, as the files are now.
    """

    kind: EngineName = VLLM
    launcher: LauncherName = "process"
    version: str
    digest: str
    python: str
    packages: dict[str, str]
    changed_files: list[str] = []
    """files that are not as they were installed; some of them, if there are many"""
    image: ImageIdentity | None = None


class EngineEnvironment(Frozen):
    """A Python environment with vLLM in it."""

    launcher: Literal["process"] = "process"
    python: Path

    @property
    def vllm(self) -> Path:
        return self.python.parent / "vllm"

    def identity(self) -> EngineIdentity:
        """What is installed in it. Raises HostError if this Python cannot run or has no vLLM."""
        command = [str(self.python), "-I", "-c", inspect.getsource(installed), installed.FILES, *PACKAGES]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=quiet_environment(), check=False)
            probed: dict[str, Any] = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError) as error:
            raise HostError(f"the engine's Python {self.python} does not run", _REMEDY, "check") from error
        except ValueError as error:
            said = redact(done.stderr).splitlines()[-5:]
            raise HostError(f"{self.python} is not a Python that lists its packages", _REMEDY, "check", said) from error
        if "vllm" not in probed["packages"] or not probed["files_sha256"]:
            raise HostError(f"no vLLM in the environment of {self.python}", _REMEDY, "check")
        return EngineIdentity(
            version=probed["packages"]["vllm"],
            digest=f"sha256:{probed['files_sha256']}",
            python=probed["python"],
            packages=probed["packages"],
            changed_files=probed["changed_files"][:MOST_CHANGED],
        )


_REMEDY = f"run `vllm-qualify engine install` (`make setup` in a checkout), or set {OVERRIDE} to the environment's folder"


def find_engine() -> EngineEnvironment:
    """The engine environment: by VLLM_QUALIFY_ENGINE, else the newest installed one, the checkout's, the one this Python is in.

    Raises HostError if none of them has a `vllm` command.
    """
    override = os.environ.get(OVERRIDE)
    checkout = Path(__file__).resolve().parents[2] / CHECKOUT_ENVIRONMENT
    finished = [each.folder for each in list_installed() if each.is_finished]
    folders = [Path(override).expanduser()] if override else [*finished, checkout, Path(sys.prefix)]
    for folder in folders:
        if (folder / "bin" / "vllm").exists():
            return EngineEnvironment(python=folder / "bin" / "python")
    raise HostError(f"no vLLM found in {', '.join(map(str, folders))}", _REMEDY, "check")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, as `sha256:` and hexadecimal digits."""
    return f"sha256:{file_sha256(path)}"


def content_of(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder by its relative path, sorted; also of files in folders that are links."""
    paths = sorted(_files_below(folder, frozenset()))
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in paths}


def _files_below(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    here = folder.resolve()
    if here in above:
        # A link back to a folder that it is in adds nothing.
        return
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files_below(path, above | {here})
        elif path.is_file():
            yield path


def digest_of(content: Mapping[str, str]) -> str:
    """SHA-256 over the digests of `content_of`: the revision of local weights."""
    lines = [f"{path}\0{digest}\n" for path, digest in content.items()]
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def content_digest(folder: Path) -> str:
    return digest_of(content_of(folder))


def digest_at(path: Path) -> str:
    """The digest of a file, or of a folder's content. Raises OSError."""
    return content_digest(path) if path.is_dir() else file_digest(path)
