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
from vllm_qualify.plan.conformity import difference
from vllm_qualify.recipe.recipe import LoadedRecipe, Recipe

CPU = Fingerprint(gpu_type="cpu", name="Some CPU", count=2, memory_mib=8192)
H200 = Fingerprint(gpu_type="h200", name="NVIDIA H200", count=1, memory_mib=143_771, driver="580.159.04", devices=[0])
LOAD = {"input_len": 8, "output_len": 4, "max_concurrency": 1, "num_prompts": 14, "num_warmups": 0}
EVERYTHING = Choice()
TTFT = {"metric": "ttft_p50_ms", "maximum": 500.0, "unit": "ms"}


def engine_in(folder: Path) -> EngineEnvironment:
    return EngineEnvironment(python=make_engine(folder / "engine") / "bin" / "python")


@pytest.fixture
def engine(tmp_path: Path) -> EngineEnvironment:
    return engine_in(tmp_path)


@pytest.fixture
def gpu_engine(engine: EngineEnvironment) -> EngineEnvironment:
    """The same, as a build for GPUs."""
    engine.python.write_text(engine.python.read_text().replace("+cpu", ""))
    return engine


@pytest.fixture
def document(tmp_path: Path) -> Document:
    return document_in(tmp_path)


def document_in(folder: Path) -> Document:
    """Two GPU types, two variants of local weights and two profiles on the CPU."""
    document = reference()
    for name, golden in (("bf16", " 12"), ("fp8", None)):
        weights = folder / name
        weights.mkdir()
        (weights / "config.json").write_text(f'{{"name": "{name}"}}')
        document["variants"][name] = {"model": str(weights)} | ({"smoke_golden": golden} if golden else {})
    serving = {
        "default_variant": "bf16",
        "profiles": {"latency": {"load": LOAD, "paths": False, "gates": [TTFT]}, "throughput": {"load": LOAD, "paths": False}},
    }
    document["gpu_types"] = {
        "cpu": serving,
        "h200": {"default_variant": "fp8", "profiles": {"balanced": {"load": LOAD, "paths": False}}},
    }
    return document


def loaded(document: Document, folder: Path = Path("/recipes")) -> LoadedRecipe:
    return LoadedRecipe(recipe=Recipe.model_validate(document), folder=folder)


def difference_from(plan: CellPlan, recipe: Recipe) -> str:
    """What of a plan is not the recipe's. The paths in the recipe are absolute."""
    return difference(plan, LoadedRecipe(recipe=recipe, folder=Path("/recipes")))


def only(plans: list[CellPlan]) -> CellPlan:
    (plan,) = plans
    return plan


def plans_of(
    document: Document, engine: EngineEnvironment | EngineImage, machine: Fingerprint = CPU, choice: Choice = EVERYTHING
) -> list[CellPlan]:
    return plan_cells(loaded(document), choice, Engines(engine=engine), machine)
