"""A model whose code attacks the machine that serves it."""

import json
import os
import pty
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.hostile_driver import box_of, looks_of
from vllm_qualify.engine.confinement import confining_process, isolation_problem
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.process import running_guarded, wait_for
from vllm_qualify.recipe.loading import catalog_folder

HOSTILE = Path(__file__).parents[1] / "attacks" / "hostile.txt"
SENTINEL = "s3nt1nel-of-the-orchestrator"
PLANTED = {
    "AWS_SECRET_ACCESS_KEY": SENTINEL,
    "PREFECT_API_AUTH_STRING": f"admin:{SENTINEL}",
    "VLLM_QUALIFY_PRIVATE_KEY": SENTINEL,
    "VLLM_QUALIFY_WEBHOOK_SECRET": SENTINEL,
    "VLLM_API_KEY": SENTINEL,
    "HF_TOKEN": SENTINEL,
    "HTTPS_PROXY": f"http://me:{SENTINEL}@127.0.0.1:9",
    "SOME_SETTING": SENTINEL,
}
KEY_FILES = (
    *(".aws/credentials", ".docker/config.json", ".prefect/profiles.toml", ".ssh/id_ed25519", ".cache/huggingface/token"),
    # Another model, and a data set, in the cache of the hub.
    *(".cache/huggingface/hub/models--org--other/snapshots/1/config.json", ".cache/huggingface/datasets/other/data.json"),
)


def code(home: Path, folder: Path, port: int = 0, others: Mapping[str, object] | None = None) -> str:
    """The hostile code, which knows where to look, and of whom to take hold."""
    text = HOSTILE.read_text().replace("{marker}", SENTINEL[::-1]).replace("{places}", json.dumps([str(home)]))
    text = text.replace("{others}", json.dumps(others or {}))
    return text.replace("{box}", str(box_of(folder))).replace("{port}", str(port))


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """The home of an orchestrator, with keys in its files."""
    home = tmp_path / "home"
    for name in (*KEY_FILES, "keys/signing.pem", ".vllm-qualify/store/reports/report.json"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(SENTINEL)
    return home


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What belongs to somebody else: a confined process as the baseline's server is, a file, memory, a terminal."""
    folder = tmp_path_factory.mktemp("others")
    memory, file = Path("/dev/shm", f"{SENTINEL}-{os.getpid()}"), folder / "file"
    for path in (memory, file):
        path.write_text(SENTINEL)
        path.chmod(0o600)
    first, second = pty.openpty()
    try:
        with (
            confining_process({}) as confinement,
            running_guarded(["sleep", "600"], confinement.environment, folder / "it.log", rules=confinement.rules) as process,
        ):
            (pid,) = process.commands()
            yield {"pid": pid, "file": str(file), "memory": str(memory), "terminal": os.ttyname(second)}
    finally:
        memory.unlink()
        os.close(first)
        os.close(second)


def check_unchanged(others: Mapping[str, Any]) -> None:
    """Nothing of others has a mark."""
    pid, about = others["pid"], Path(others["file"]).stat()
    assert (about.st_mode & 0o777, os.listxattr(others["file"]), about.st_mtime > 1) == (0o600, [], True)
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert os.sched_getscheduler(pid) == os.SCHED_OTHER
    assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)
    assert resource.prlimit(pid, resource.RLIMIT_CORE) == resource.getrlimit(resource.RLIMIT_CORE)


def looked(kind: str, folder: Path, home: Path, engine: EngineEnvironment, *image: str) -> list[str]:
    """What the hostile code found, wherever it ran."""
    environment = os.environ | PLANTED | {"HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_HOME": str(home / ".cache/huggingface")}
    environment |= {
        "VLLM_QUALIFY_HOME": str(home / ".vllm-qualify"),
        "VLLM_QUALIFY_PRIVATE_KEY_FILE": str(home / "keys" / "signing.pem"),
        "VLLM_QUALIFY_ENGINE": str(engine.python.parents[1]),
    }
    command = [sys.executable, "-m", "tests.attacks.hostile_driver", kind, str(folder), *image]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    looks = [json.loads(path.read_text()) for path in looks_of(folder).glob("*.json")]
    assert looks, "it ran, and told what it found"
    # A container has no other processes to look at.
    least = 0 if image else 1 if not isolation_problem() else 3
    assert all(each["processes"] >= least and str(home) in each["places"] for each in looks), looks
    return [place for each in looks for place in each["found"]]


def make_hostile_model(folder: Path, victim: Path, port: int = 0, others: Mapping[str, object] | None = None) -> None:
    """The reference model with code that looks around as soon as its configuration is read."""
    model = folder / "model"
    shutil.copytree(catalog_folder() / "reference" / "model", model)
    config = json.loads((model / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "hostile.HostileConfig"}}
    (model / "config.json").write_text(json.dumps(config))
    configuration = "from transformers import LlamaConfig\n\ntell()\n\n\nclass HostileConfig(LlamaConfig):\n    pass\n"
    (model / "hostile.py").write_text(f"{code(victim, folder, port, others)}\n\n{configuration}")


def run_confined(tmp_path: Path, script: str, *named: Path) -> str:
    """What a script of Python prints that is confined as a model's code is."""
    own, log = [Path(sys.prefix), Path(sys.base_prefix)], tmp_path / "it.log"
    command = [sys.executable, "-I", "-c", script]
    with (
        confining_process({}, named=named, readable=own) as confinement,
        running_guarded(command, confinement.environment, log, rules=confinement.rules) as process,
    ):
        wait_for(process, 60, lambda: None, "it")
    return log.read_text()
