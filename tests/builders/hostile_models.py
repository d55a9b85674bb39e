"""A model whose code attacks the machine that serves it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attacks.hostile_driver import box_of
from vllm_qualify.engine.environment import EngineEnvironment
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


def code(home: Path, folder: Path, port: int = 0) -> str:
    """The hostile code, which knows where to look."""
    text = HOSTILE.read_text().replace("{marker}", SENTINEL[::-1]).replace("{places}", json.dumps([str(home)]))
    return text.replace("{box}", str(box_of(folder))).replace("{port}", str(port))


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """The home of an orchestrator, with keys in its files."""
    home = tmp_path / "home"
    for name in (*KEY_FILES, "keys/signing.pem", ".vllm-qualify/store/reports/report.json"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(SENTINEL)
    return home


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
    looks = [json.loads(path.read_text()) for path in box_of(folder).glob("looked-*.json")]
    shutil.rmtree(box_of(folder), ignore_errors=True)
    assert looks, "it ran, and told what it found"
    # A container has no other processes to look at.
    assert all((image or each["processes"] > 2) and str(home) in each["places"] for each in looks), looks
    return [place for each in looks for place in each["found"]]


def make_hostile_model(folder: Path, victim: Path, port: int = 0) -> None:
    """The reference model with code that looks around as soon as its configuration is read."""
    model = folder / "model"
    shutil.copytree(catalog_folder() / "reference" / "model", model)
    config = json.loads((model / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "hostile.HostileConfig"}}
    (model / "config.json").write_text(json.dumps(config))
    configuration = "from transformers import LlamaConfig\n\ntell()\n\n\nclass HostileConfig(LlamaConfig):\n    pass\n"
    (model / "hostile.py").write_text(f"{code(victim, folder, port)}\n\n{configuration}")
