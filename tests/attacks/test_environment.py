"""Variables of a host that change what its server does: qualified with them, deployed without them, and named nowhere."""

import shlex
import time
from pathlib import Path

import pytest

from tests.fakes.vllm import make_engine
from tests.recipes import reference, write
from vllm_qualify.approval.formats import deployable
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.provision import Engines
from vllm_qualify.engine.server_start import launch
from vllm_qualify.errors import QualifyError
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import plan_cells
from vllm_qualify.plan.choice import Choice, select
from vllm_qualify.plan.server import server_plan
from vllm_qualify.recipe.loading import load_recipe

CPU = Fingerprint(gpu_type="cpu", name="Some CPU", count=2, memory_mib=8192)
TUNES = {"VLLM_ATTENTION_BACKEND": "EVIL", "TORCH_FAKE_VLLM": "tells", "OMP_NUM_THREADS": "3", "VLLM_OURS": "host"}
NOT_OF_THE_SERVER = {
    "VLLM_CACHE_ROOT": "/srv/cache",
    "CUDA_VISIBLE_DEVICES": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_API_KEY": "s3cret-word",
    "VLLM_QUALIFY_STORE": "s3://store",
    "PATH_OF_OURS": "/srv",
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in (TUNES | NOT_OF_THE_SERVER).items():
        monkeypatch.setenv(name, value)
    document = reference()
    document["variants"]["bf16"]["environment"] = {"VLLM_OURS": "recipe"}
    del document["gpu_types"]["cpu"]["environment"]["OMP_NUM_THREADS"]
    return write(document, tmp_path / "recipe.yaml")


@pytest.fixture
def plan(recipe: Path, tmp_path: Path) -> CellPlan:
    engine = EngineEnvironment(python=make_engine(tmp_path / "engine") / "bin" / "python")
    (plan,) = plan_cells(load_recipe(str(recipe)), Choice(variant="bf16"), Engines(engine=engine), CPU)
    return plan


def environment_seen(plan: CellPlan, folder: Path) -> str:
    with pytest.raises(QualifyError), launch(plan.server, folder) as starting:
        while starting.process.end() is None:
            time.sleep(0.05)  # until the fake has told its environment, and died
    return (folder / "server.log").read_text()


def test_a_plan_names_each_variable_of_the_host_that_its_server_gets(plan: CellPlan, tmp_path: Path) -> None:
    of_ours = {name: value for name, value in plan.server.inherited.items() if name in TUNES or name in NOT_OF_THE_SERVER}
    assert of_ours == {name: value for name, value in TUNES.items() if name != "VLLM_OURS"}
    seen = environment_seen(plan, tmp_path)
    assert "'VLLM_ATTENTION_BACKEND': 'EVIL'" in seen
    assert "'VLLM_OURS': 'recipe'" in seen


def test_who_deploys_gets_them(plan: CellPlan) -> None:
    first = deployable(plan.server, "config", "vllm-x", {}).splitlines()[0]
    words = shlex.split(first.removeprefix("# "))
    assert {"VLLM_ATTENTION_BACKEND=EVIL", "OMP_NUM_THREADS=3", "VLLM_OURS=recipe"} <= set(words)


def test_a_container_gets_none_of_them(recipe: Path) -> None:
    loaded = load_recipe(str(recipe))
    selection = select(loaded, Choice(variant="bf16"), CPU)
    image = EngineImage(repository="vllm/vllm-openai", tag="v0.32.0", digest=f"sha256:{64 * 'a'}", platform="linux/amd64")
    assert server_plan(loaded, selection, "balanced", image, "0.32.0", None).inherited == {}
