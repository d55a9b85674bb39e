"""An engine whose files were changed where they lie, or that runs a plugin, is another engine than was installed."""

import base64
import hashlib
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_qualify.engine.environment import EngineEnvironment, EngineIdentity
from vllm_qualify.report import words

VERSION = "0.32.0"
SAMPLER, TABLE = "vllm/sampler.py", "vllm/configs/E=8,N=14336.json"
FILES = {SAMPLER: "TEMPERATURE = 1.0\n", TABLE: "{}\n"}
PLUGIN = "vllm-nice"


def install(site: Path, name: str, files: dict[str, str], entry_points: str = "") -> None:
    """As an installer does: the files, and a RECORD with the hash of each."""
    notes = site / f"{name.replace('-', '_')}-{VERSION}.dist-info"
    notes.mkdir(parents=True)
    (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSION}\n")
    (notes / "entry_points.txt").write_text(entry_points)
    lines = []
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
        quoted = f'"{path}"' if "," in path else path
        lines.append(f"{quoted},sha256={digest},{len(content)}")
    (notes / "RECORD").write_text("\n".join(lines) + "\n")


class Installed:
    """An environment with a vLLM of two files."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        (self.site,) = folder.glob("lib/python*/site-packages")
        self.engine = EngineEnvironment(python=folder / "bin" / "python")
        install(self.site, "vllm", FILES)

    @property
    def identity(self) -> EngineIdentity:
        return self.engine.identity()


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return Installed(tmp_path / "engine")


def patch(site: Path) -> None:
    (site / SAMPLER).write_text("TEMPERATURE = 0.0\n")


def replace_by_folder(site: Path) -> None:
    (site / SAMPLER).unlink()
    (site / SAMPLER).mkdir()


@pytest.mark.parametrize("change", [patch, lambda site: (site / SAMPLER).unlink(), replace_by_folder])
def test_a_changed_file_is_another_engine_and_is_named(installed: Installed, change: Callable[[Path], None]) -> None:
    before = installed.identity
    change(installed.site)
    assert installed.identity.digest != before.digest
    assert (before.changed_files, installed.identity.changed_files) == ([], [SAMPLER])


def test_a_record_that_was_made_to_fit_is_another_engine(installed: Installed) -> None:
    before = installed.identity
    patch(installed.site)
    (record,) = installed.site.glob("vllm-*/RECORD")
    digest = base64.urlsafe_b64encode(hashlib.sha256((installed.site / SAMPLER).read_bytes()).digest()).rstrip(b"=").decode()
    lines = record.read_text().splitlines()
    record.write_text("\n".join(f"{SAMPLER},sha256={digest},18" if line.startswith(SAMPLER) else line for line in lines))
    assert installed.identity.digest != before.digest


def test_a_report_names_some_of_many_changed_files(installed: Installed) -> None:
    assert "changed" not in words.engine(installed.identity)
    many = {f"vllm/kernel_{number}.py": "" for number in range(6)}
    install(installed.site, "vllm-nice", many, "[vllm.general_plugins]\nnice = nice:register\n")
    for path in many:
        (installed.site / path).unlink()
    assert words.engine(installed.identity).endswith(
        ", with files changed since: vllm/kernel_0.py, vllm/kernel_1.py, vllm/kernel_2.py and 3 more"
    )


def test_a_file_that_came_back_is_the_engine_that_was_installed(installed: Installed) -> None:
    before = installed.identity
    patch(installed.site)
    (installed.site / SAMPLER).write_text(FILES[SAMPLER])
    assert installed.identity == before


def test_what_python_compiles_is_no_other_engine(installed: Installed) -> None:
    before = installed.identity
    (installed.site / "vllm" / "__pycache__").mkdir()
    (installed.site / "vllm" / "__pycache__" / "sampler.cpython-311.pyc").write_bytes(b"compiled")
    assert installed.identity == before


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.platform_plugins"])
def test_a_plugin_is_part_of_the_engine(installed: Installed, group: str) -> None:
    before = installed.identity
    install(installed.site, PLUGIN, {"nice.py": "GREEDY = 1\n"}, f"[{group}]\nnice = nice:register\n")
    with_plugin = installed.identity
    assert with_plugin.packages == before.packages | {PLUGIN: VERSION}
    (installed.site / "nice.py").write_text("GREEDY = 2\n")
    digests = {before.digest, with_plugin.digest, installed.identity.digest}
    assert len(digests) == 3
    assert installed.identity.changed_files == ["nice.py"]


def test_a_package_that_is_no_plugin_of_the_engine_changes_nothing(installed: Installed) -> None:
    before = installed.identity
    install(installed.site, "colours", {"colours.py": ""}, "[console_scripts]\ncolours = colours:main\n")
    assert installed.identity == before
