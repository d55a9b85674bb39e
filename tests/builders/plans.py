"""Plans of a recipe with two GPU types, for a machine and an engine that are not real."""

from pathlib import Path

import pytest

from tests.fakes.vllm import make_engine
from tests.recipes import Document, reference
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.provision import Engines
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import plan_cells
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.recipe import LoadedRecipe, Recipe

CPU = Fingerprint(gpu_type="cpu", name="Some CPU", count=2, memory_mib=8192)
H200 = Fingerprint(gpu_type="h200", name="NVIDIA H200", count=1, memory_mib=143_771, driver="580.159.04", devices=[0])
LOAD = {"input_len": 8, "output_len": 4, "max_concurrency": 1, "num_prompts": 14, "num_warmups": 0}
EVERYTHING = Choice()
TTFT = {"metric": "ttft_p50_ms", "maximum": 500.0, "unit": "ms"}


@pytest.fixture
def engine(tmp_path: Path) -> EngineEnvironment:
    return EngineEnvironment(python=make_engine(tmp_path / "engine") / "bin" / "python")


@pytest.fixture
def gpu_engine(engine: EngineEnvironment) -> EngineEnvironment:
    """The same, as a build for GPUs."""
    engine.python.write_text(engine.python.read_text().replace("+cpu", ""))
    return engine


@pytest.fixture
def document(tmp_path: Path) -> Document:
    """Two GPU types, two variants of local weights and two profiles on the CPU."""
    document = reference()
    for name, golden in (("bf16", " 12"), ("fp8", None)):
        weights = tmp_path / name
        weights.mkdir()
        (weights / "config.json").write_text(f'{{"name": "{name}"}}')
        document["variants"][name] = {"model": str(weights)} | ({"smoke_golden": golden} if golden else {})
    serving = {
        "default_variant": "bf16",
        "profiles": {"latency": {"load": LOAD, "gates": [TTFT]}, "throughput": {"load": LOAD}},
    }
    document["gpu_types"] = {"cpu": serving, "h200": {"default_variant": "fp8", "profiles": {"balanced": {"load": LOAD}}}}
    return document


def loaded(document: Document, folder: Path = Path("/recipes")) -> LoadedRecipe:
    return LoadedRecipe(recipe=Recipe.model_validate(document), folder=folder)


def only(plans: list[CellPlan]) -> CellPlan:
    (plan,) = plans
    return plan


def plans_of(
    document: Document, engine: EngineEnvironment | EngineImage, machine: Fingerprint = CPU, choice: Choice = EVERYTHING
) -> list[CellPlan]:
    return plan_cells(loaded(document), choice, Engines(engine=engine), machine)
