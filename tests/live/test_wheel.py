"""The way of a user without a checkout: the wheel in an environment of its own, an engine, and a verdict."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import yaml

from vllm_qualify.engine.installing import locked_version

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"


class Elsewhere(NamedTuple):
    """A folder outside the checkout, with the wheel in an environment, and data and home of a user of its own."""

    folder: Path

    def call(self, *words: str, limit_s: float = 300) -> subprocess.CompletedProcess[str]:
        """A program of the environment, started in the folder."""
        own = {"XDG_DATA_HOME": f"{self.folder}/data", "VLLM_QUALIFY_HOME": f"{self.folder}/home"}
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VLLM_QUALIFY_ENGINE")}
        program, *arguments = words
        return subprocess.run(
            [f"{self.folder}/env/bin/{program}", *arguments],
            cwd=self.folder, env=kept | own, capture_output=True, text=True, timeout=limit_s, check=False,
        )  # fmt: skip

    def qualify(self, *words: str, limit_s: float = 600) -> str:
        """What the command says on both streams. It must not end with a mistake or an error."""
        done = self.call("vllm-qualify", *words, limit_s=limit_s)
        said = done.stdout + done.stderr
        assert done.returncode in (0, 1), said
        return said


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    # On the disk also in CI: 3 GB would be much of its memory, and on the disk uv links what it has fetched before.
    with TemporaryDirectory(dir="/var/tmp", prefix="vllm-qualify-") as name:
        yield install_wheel(Path(name))


def install_wheel(folder: Path) -> Elsewhere:
    build: list[str | Path] = [
        UV,
        "build",
        "--wheel",
        "--no-build-isolation",
        "--quiet",
        "--python",
        sys.executable,
        "--out-dir",
        folder,
    ]
    subprocess.run([*build, ROOT], check=True)
    (wheel,) = folder.glob("*.whl")
    python = folder / "env" / "bin" / "python"
    subprocess.run([UV, "venv", "--quiet", "--seed", "--python", sys.executable, folder / "env"], check=True)
    # The locked versions: what is tried here is the wheel, not the newest releases of others.
    lock = ROOT / "infra" / "requirements" / "orchestrator.txt"
    subprocess.run([UV, "pip", "install", "--quiet", "--python", python, "--no-deps", "--requirement", lock], check=True)
    subprocess.run([UV, "pip", "install", "--quiet", "--python", python, "--no-deps", wheel], check=True)
    return Elsewhere(folder)


def test_an_engine_is_installed_found_and_complete(elsewhere: Elsewhere) -> None:
    before = elsewhere.call("vllm-qualify", "run", "reference")
    assert (before.returncode, "run `vllm-qualify engine install`" in before.stderr) == (3, True)
    said = elsewhere.qualify("engine", "install", "--cpu")
    assert f"vLLM {locked_version('cpu')}+cpu is in {elsewhere.folder}/data" in said
    assert "\nruns use it\n" in said
    assert "runs use it" in elsewhere.qualify("engine", "list")
    doctor = elsewhere.call("vllm-qualify", "doctor")
    assert "MISSING" not in doctor.stdout, doctor.stdout


def test_each_deployment_loads_its_flow_from_the_installed_package(elsewhere: Elsewhere) -> None:
    deployments = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    points = sorted({each["entrypoint"] for each in deployments})
    assert len(points) >= 4
    load = "import sys, prefect.flows; print(*[prefect.flows.load_flow_from_entrypoint(each).name for each in sys.argv[1:]])"
    done = elsewhere.call("python", "-c", load, *points)
    assert (done.returncode, len(done.stdout.split())) == (0, len(points)), done.stderr
    found = elsewhere.call("python", "-c", "import flows, tasks; print(flows.__file__, tasks.__file__)")
    assert [path.startswith(f"{elsewhere.folder}/env/lib") for path in found.stdout.split()] == [True, True]
