"""An environment of the real engine with a plugin that plants faults in it."""

import shutil
from pathlib import Path

from tests.fakes import block_cache
from vllm_qualify.engine.environment import EngineEnvironment

PLUGIN = Path(block_cache.__file__).with_name("planted_fault.py")
ENTRY_POINTS = "[vllm.general_plugins]\nplanted_fault = planted_fault:register\n"
VLLM = "import sys\nfrom vllm.entrypoints.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


def plant(faults: list[str], engine: EngineEnvironment, folder: Path) -> EngineEnvironment:
    """A new environment in `folder` that has all packages of `engine`, and the plugin with these faults."""
    own = engine.python.parents[1]
    version = next(path.name for path in (own / "lib").iterdir() if path.name.startswith("python3"))
    site, programs = folder / "lib" / version / "site-packages", folder / "bin"
    metadata = site / "planted_fault-1.0.dist-info"
    metadata.mkdir(parents=True)
    programs.mkdir()
    shutil.copy(own / "pyvenv.cfg", folder / "pyvenv.cfg")
    (programs / "python").symlink_to(engine.python.resolve())
    (programs / "vllm").write_text(f"#!{programs / 'python'}\n{VLLM}")
    (programs / "vllm").chmod(0o755)
    (site / "engine.pth").write_text(f"{own / 'lib' / version / 'site-packages'}\n")
    shutil.copy(PLUGIN, site / PLUGIN.name)
    (site / "faults.txt").write_text("\n".join(faults))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-fault\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (metadata / "RECORD").write_text("")
    return EngineEnvironment(python=programs / "python")
