"""Runs made of captured output of real tools."""

import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.fakes.vllm import make_engine
from tests.recipes import reference
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.provision import Engines
from vllm_qualify.evidence.measurement import StageEvidence, describe
from vllm_qualify.evidence.stages.stage import MACHINE
from vllm_qualify.evidence.stages.table import parse
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import plan_cells
from vllm_qualify.plan.choice import Choice
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.metrics import StageName
from vllm_qualify.recipe.recipe import LoadedRecipe, Recipe
from vllm_qualify.runs.folder import Run, start_run
from vllm_qualify.runs.judging import judge_run

CAPTURED = Path(__file__).parent.parent / "evidence" / "captured"
CPU = Fingerprint(gpu_type="cpu", name="Some CPU", count=2, memory_mib=8192)
WITHOUT_BASELINE: list[StageName] = ["serve", "smoke", "contract", "accuracy", "load"]
SERVED = {"server.yaml": "model: reference\n", "server.log": "INFO: ready\n", "startup_s": "12.500\n"}


def captured_plan(folder: Path) -> CellPlan:
    """The reference recipe with the settings that the captured evidence was made with, and gates that it passes."""
    document = reference()
    document["accuracy"][0] |= {"num_questions": 8, "num_fewshot": 1, "max_gen_toks": 48}
    document["gates"] = [document["gates"][0] | {"filter": "flexible-extract", "minimum": 0.1}]
    load = {"input_len": 16, "output_len": 8, "max_concurrency": 4, "num_prompts": 40, "num_warmups": 4}
    repeated = {"repeats": 2, "most_repeats": 2, "min_duration_s": 0.01}
    document["gpu_types"]["cpu"]["profiles"]["balanced"]["load"] = load | repeated
    loaded = LoadedRecipe(recipe=Recipe.model_validate(document), folder=folder)
    engine = EngineEnvironment(python=make_engine(folder / "engine") / "bin" / "python")
    (plan,) = plan_cells(loaded, Choice(), Engines(engine=engine), CPU)
    # the captured questions were asked more than once, in an order that was not drawn, and compared with nothing
    asked = [task.model_copy(update={"repetitions": 2, "order": ""}) for task in plan.accuracy]
    # … nothing was watched meanwhile, and no prompt was drawn
    return plan.model_copy(update={"accuracy": asked, "watched": False, "drawn": ""})


def captured_stage(run: Run, stage: StageName, written: Mapping[str, str] = SERVED) -> StageEvidence:
    """A stage that was captured, or one with the files that are written here."""
    if not (CAPTURED / stage).exists():
        (run.evidence / stage).mkdir(parents=True)
        for name, text in written.items():
            (run.evidence / stage / name).write_text(text)
    else:
        shutil.copytree(CAPTURED / stage, run.evidence / stage)
    (run.evidence / stage / MACHINE).write_text(CPU.model_dump_json())
    files = sorted(path for path in (run.evidence / stage).rglob("*") if path.is_file())
    evidence = StageEvidence(
        stage=stage,
        started_at=datetime(2026, 11, 20, 11, 13, tzinfo=UTC),
        duration_s=8.0,
        files=[describe(path, run.evidence) for path in files],
        measurements=parse(stage, run.plan, run.evidence),
        run_id=run.plan.run_id,
    )
    run.save_stage(evidence)
    return evidence


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run's folder with captured evidence and its report. Judged once, since Great Expectations takes its time."""
    folder = tmp_path_factory.mktemp("judged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_QUALIFY_HOME", str(folder / "home"))
        run = start_run(captured_plan(folder))
        judge_run(run, [captured_stage(run, stage) for stage in WITHOUT_BASELINE])
        yield run.folder


@pytest.fixture
def run(judged: Path, home: Path) -> Run:
    """A copy of the judged run in the test's own home."""
    return Run(folder=shutil.copytree(judged, home / "runs" / judged.name))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_in(tmp_path / "store")


def store_in(folder: Path) -> Store:
    store = open_store(folder.as_uri())
    store.check()
    return store
