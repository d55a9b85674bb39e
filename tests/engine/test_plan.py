"""Plans: what of a recipe is chosen, and what comes out of it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vllm import VERSION, make_engine
from tests.recipes import Document, reference
from vllm_qualify.engine.environment import EngineEnvironment, content_digest
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.launch import Engines
from vllm_qualify.engine.plan import SMOKE_GATES, CellPlan, Choice, judged_by, new_run_id, plan_cells, select
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.recipe.model import Gate, LoadedRecipe, Recipe

CPU = Fingerprint(gpu_type="cpu", name="Some CPU", count=2, memory_mib=8192)
H200 = Fingerprint(gpu_type="h200", name="NVIDIA H200", count=1, memory_mib=143_771, driver="580.159.04", devices=[0])
LOAD = {"input_len": 8, "output_len": 4, "max_concurrency": 1, "num_prompts": 5, "num_warmups": 0}
TTFT = {"metric": "ttft_p99_ms", "maximum": 500.0, "unit": "ms"}


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
    found = reference()
    for name, golden in (("bf16", " 12"), ("fp8", None)):
        weights = tmp_path / name
        weights.mkdir()
        (weights / "config.json").write_text(f'{{"name": "{name}"}}')
        found["variants"][name] = {"model": str(weights)} | ({"smoke_golden": golden} if golden else {})
    serving = {
        "default_variant": "bf16",
        "profiles": {"latency": {"load": LOAD, "gates": [TTFT]}, "throughput": {"load": LOAD}},
    }
    found["gpu_types"] = {"cpu": serving, "h200": {"default_variant": "fp8", "profiles": {"balanced": {"load": LOAD}}}}
    return found


def loaded(document: Document, folder: Path = Path("/recipes")) -> LoadedRecipe:
    return LoadedRecipe(recipe=Recipe.model_validate(document), folder=folder)


def only(plans: list[CellPlan]) -> CellPlan:
    (plan,) = plans
    return plan


def test_by_default_every_profile_of_the_machines_type_with_its_default_variant(
    document: Document, engine: EngineEnvironment
) -> None:
    plans = plan_cells(loaded(document), Choice(), Engines(engine=engine), CPU)
    assert [plan.cell.id for plan in plans] == ["reference/bf16/cpu/latency", "reference/bf16/cpu/throughput"]


def test_another_machine_has_its_own_profiles_and_default_variant(document: Document, gpu_engine: EngineEnvironment) -> None:
    found = only(plan_cells(loaded(document), Choice(), Engines(engine=gpu_engine), H200))
    assert found.cell.id == "reference/fp8/h200/balanced"
    assert found.cell.release.engine.version == "0.32.0"


def test_a_choice_takes_one_profile_and_another_variant(document: Document, engine: EngineEnvironment) -> None:
    choice = Choice(gpu_type="cpu", variant="fp8", profile="throughput")
    assert only(plan_cells(loaded(document), choice, Engines(engine=engine), CPU)).cell.id == "reference/fp8/cpu/throughput"


def test_a_plan_has_all_that_determines_the_qualification(
    document: Document, engine: EngineEnvironment, tmp_path: Path
) -> None:
    found = only(plan_cells(loaded(document), Choice(profile="latency"), Engines(engine=engine), CPU))
    weights = tmp_path / "bf16"
    assert found.fingerprint == CPU
    assert found.cell.release.model == str(weights)
    assert found.cell.release.revision == content_digest(weights)
    assert found.cell.release.engine.version == VERSION
    assert found.cell.release.engine.digest == "sha256:" + "0" * 64
    assert found.server.engine == engine
    assert found.server.model == str(weights)
    assert found.server.revision is None
    assert found.server.served_model_name == "reference"
    assert found.smoke.prompt == document["smoke"]["prompt"]
    assert found.smoke_golden == " 12"
    assert found.load.input_len == LOAD["input_len"]
    assert found.questions is not None
    assert [path.name for path in found.questions] == ["test.jsonl", "train.jsonl"]
    assert CellPlan.model_validate_json(found.model_dump_json()) == found


def test_a_models_path_starts_from_the_recipes_folder(document: Document, engine: EngineEnvironment, tmp_path: Path) -> None:
    document["variants"]["bf16"]["model"] = "./bf16"
    found = only(plan_cells(loaded(document, tmp_path), Choice(profile="latency"), Engines(engine=engine), CPU))
    assert found.server.model == str(tmp_path / "bf16")
    assert found.cell.release.model == "./bf16"


def test_a_recipe_without_local_questions_leaves_them_to_the_hub(document: Document, engine: EngineEnvironment) -> None:
    document["accuracy"].pop("questions")
    assert only(plan_cells(loaded(document), Choice(profile="latency"), Engines(engine=engine), CPU)).questions is None


def test_server_arguments_of_the_profile_win_over_the_variants_and_those_over_the_types(
    document: Document, engine: EngineEnvironment
) -> None:
    serving = document["gpu_types"]["cpu"]
    serving["server"] = {"dtype": "auto", "max-model-len": 1024, "max-num-seqs": 8, "seed": 1}
    document["variants"]["bf16"]["server"] = {"dtype": "bfloat16", "max-model-len": 2048, "quantization": "none"}
    serving["profiles"]["latency"]["server"] = {"max-model-len": 4096, "max-num-seqs": 4}
    latency, throughput = plan_cells(loaded(document), Choice(), Engines(engine=engine), CPU)
    assert latency.server.arguments == {
        "dtype": "bfloat16",
        "max-model-len": 4096,
        "max-num-seqs": 4,
        "quantization": "none",
        "seed": 1,
    }
    assert throughput.server.arguments["max-model-len"] == 2048
    assert throughput.server.arguments["max-num-seqs"] == 8


def test_the_variants_environment_wins_over_the_types(document: Document, engine: EngineEnvironment) -> None:
    document["gpu_types"]["cpu"]["environment"] = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "4"}
    document["variants"]["bf16"]["environment"] = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    for plan in plan_cells(loaded(document), Choice(), Engines(engine=engine), CPU):
        assert plan.server.environment == {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "4"}


def test_the_models_revision_is_pinned_for_the_tokenizer_too(
    document: Document, engine: EngineEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    class Hub:
        sha = "0123abc"

        def model_info(self, model: str, revision: str | None) -> "Hub":
            asked.append((model, revision))
            return self

    monkeypatch.setattr("vllm_qualify.engine.plan.HfApi", Hub)
    document["variants"]["bf16"] = {"model": "org/model", "revision": "main"}
    found = only(plan_cells(loaded(document), Choice(profile="latency"), Engines(engine=engine), CPU))
    assert asked == [("org/model", "main")]
    assert found.cell.release.revision == found.server.revision == "0123abc"
    config = found.server.config(port=1)
    assert (config["model"], config["revision"], config["tokenizer-revision"]) == ("org/model", "0123abc", "0123abc")


def test_a_hub_that_does_not_know_the_model_is_told(
    document: Document, engine: EngineEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hub:
        def model_info(self, *_: object, **__: object) -> None:
            raise OSError("unreachable")

    monkeypatch.setattr("vllm_qualify.engine.plan.HfApi", Hub)
    document["variants"]["bf16"] = {"model": "org/model"}
    with pytest.raises(HostError, match="did not resolve org/model at its default branch: unreachable"):
        plan_cells(loaded(document), Choice(), Engines(engine=engine), CPU)


@pytest.mark.parametrize(
    ("choice", "told", "place"),
    [
        (Choice(gpu_type="b200"), "no GPU type 'b200'\n  remedy: it has: cpu, h200", "--gpu-type"),
        (Choice(variant="int4"), "no variant 'int4'\n  remedy: it has: bf16, regressed, fp8", "--variant"),
        (Choice(profile="balanced"), "no profile 'balanced'\n  remedy: it has: latency, throughput", "--profile"),
    ],
)
def test_an_unknown_name_is_the_callers_mistake(document: Document, choice: Choice, told: str, place: str) -> None:
    with pytest.raises(CallerError) as raised:
        select(loaded(document), choice, CPU)
    assert raised.value.place == place
    assert told in str(raised.value)


def test_a_machine_that_the_recipe_does_not_know_is_told_with_what_it_has(document: Document) -> None:
    machine = Fingerprint(gpu_type="h100", name="NVIDIA H100", count=1, memory_mib=81_559)
    with pytest.raises(CallerError, match="no GPU type 'h100'"):
        select(loaded(document), Choice(), machine)


@pytest.mark.parametrize(("machine", "chosen"), [(CPU, "h200"), (H200, "cpu")])
def test_a_machine_of_another_type_is_refused(document: Document, machine: Fingerprint, chosen: str) -> None:
    with pytest.raises(HostError, match=f"qualified on {chosen}, and this machine is {machine.gpu_type} \\({machine.name}\\)"):
        select(loaded(document), Choice(gpu_type=chosen), machine)


def test_weights_that_are_not_there_are_told_before_anything_starts(document: Document, tmp_path: Path) -> None:
    (tmp_path / "bf16" / "config.json").unlink()
    with pytest.raises(HostError, match=r"no model at .*bf16: it has no config\.json"):
        select(loaded(document), Choice(), CPU)


@pytest.mark.parametrize("which", ["test", "shots"])
def test_questions_that_are_not_there_are_told_before_anything_starts(document: Document, tmp_path: Path, which: str) -> None:
    document["accuracy"]["questions"][which] = str(tmp_path / "none.jsonl")
    with pytest.raises(HostError, match=r"no questions at .*none\.jsonl"):
        select(loaded(document), Choice(), CPU)


def test_an_engine_without_vllm_is_told(document: Document, engine: EngineEnvironment) -> None:
    engine.python.write_text('#!/bin/sh\necho \'{"python": "3.11", "packages": {}, "record_sha256": null}\'\n')
    with pytest.raises(HostError, match="no vLLM"):
        plan_cells(loaded(document), Choice(), Engines(engine=engine), CPU)
    engine.python.unlink()
    with pytest.raises(HostError, match="does not run"):
        plan_cells(loaded(document), Choice(), Engines(engine=engine), CPU)


def test_a_cpu_build_does_not_qualify_a_gpu(document: Document, engine: EngineEnvironment) -> None:
    with pytest.raises(HostError, match=r"vLLM 0\.32\.0\+cpu is a CPU build, and h200 is to be qualified"):
        plan_cells(loaded(document), Choice(), Engines(engine=engine), H200)


def test_a_gpu_build_does_not_qualify_a_cpu(document: Document, gpu_engine: EngineEnvironment) -> None:
    with pytest.raises(HostError, match=r"vLLM 0\.32\.0 is a GPU build, and cpu is to be qualified"):
        plan_cells(loaded(document), Choice(), Engines(engine=gpu_engine), CPU)


def labels(gates: list[Gate]) -> list[str]:
    return [gate.label for gate in gates]


def test_smoke_gates_are_always_there_and_come_first(document: Document, engine: EngineEnvironment) -> None:
    latency, throughput = plan_cells(loaded(document), Choice(), Engines(engine=engine), CPU)
    smoke = [*SMOKE_GATES, "smoke_golden"]
    assert labels(latency.gates) == [*smoke, "exact_match (strict-match)", "ttft_p99_ms"]
    assert labels(throughput.gates) == [*smoke, "exact_match (strict-match)"]
    for gate in latency.gates[: len(smoke)]:
        assert (gate.minimum, gate.unit) == (1.0, "bool")


def test_without_a_golden_text_nothing_is_held_to_it(document: Document, engine: EngineEnvironment) -> None:
    found = only(plan_cells(loaded(document), Choice(variant="fp8", profile="throughput"), Engines(engine=engine), CPU))
    assert found.smoke_golden is None
    assert labels(found.gates) == [*SMOKE_GATES, "exact_match (strict-match)"]


def test_another_recipe_judges_by_its_own_gates_and_golden_text(document: Document, engine: EngineEnvironment) -> None:
    plans = plan_cells(loaded(document), Choice(), Engines(engine=engine), CPU)
    for plan in plans:
        assert judged_by(plan, loaded(document).recipe) == plan
    document["gates"][0]["minimum"] = 0.99
    document["variants"]["bf16"]["smoke_golden"] = " 13"
    document["accuracy"]["num_questions"] = 7
    found = judged_by(plans[0], loaded(document).recipe)
    bounds = {gate.metric: gate.bound for gate in found.gates}
    assert (bounds["exact_match"], bounds["ttft_p99_ms"], found.smoke_golden) == (0.99, 500.0, " 13")
    assert found.model_copy(update={"gates": plans[0].gates, "smoke_golden": " 12"}) == plans[0]


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ({"gpu_type": "h100"}, "no GPU type 'h100'"),
        ({"variant": "int4"}, "no variant 'int4'"),
        ({"profile": "balanced"}, "no profile 'balanced'"),
    ],
)
def test_a_recipe_that_does_not_have_the_cell_cannot_judge_it(
    document: Document, engine: EngineEnvironment, where: dict[str, str], told: str
) -> None:
    plan = plan_cells(loaded(document), Choice(), Engines(engine=engine), CPU)[0]
    elsewhere = plan.model_copy(update={"cell": plan.cell.model_copy(update=where)})
    with pytest.raises(CallerError, match=told):
        judged_by(elsewhere, loaded(document).recipe)


def test_run_ids_never_repeat_and_can_be_names_of_folders(document: Document, engine: EngineEnvironment) -> None:
    found = {new_run_id() for _ in range(100)}
    assert len(found) == 100
    assert all("/" not in run_id and not run_id.startswith(".") for run_id in found)
    plans = plan_cells(loaded(document), Choice(), Engines(engine=engine), CPU)
    assert len({plan.run_id for plan in plans}) == len(plans)


def rename(folder: Path) -> None:
    (folder / "sub" / "b.bin").rename(folder / "sub" / "c.bin")


def swap(folder: Path) -> None:
    """The same names and the same contents, each at the other's place."""
    first, second = folder / "a.json", folder / "sub" / "b.bin"
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])


CHANGES: list[Callable[[Path], Any]] = [
    lambda folder: (folder / "a.json").write_text("{ }"),
    lambda folder: (folder / "sub" / "b.bin").write_bytes(b"\0\0\1"),
    lambda folder: (folder / "sub" / "b.bin").write_bytes(b""),
    rename,
    lambda folder: (folder / "sub" / "b.bin").rename(folder / "b.bin"),
    lambda folder: (folder / "a.json").unlink(),
    lambda folder: (folder / "empty").write_bytes(b""),
    swap,
]


@pytest.mark.parametrize(
    "how", CHANGES, ids=["text", "last byte", "emptied", "renamed", "moved", "removed", "added", "swapped"]
)
def test_the_digest_changes_with_any_files_content_or_name(tmp_path: Path, how: Callable[[Path], Any]) -> None:
    for folder in (tmp_path / "first", tmp_path / "second"):
        (folder / "sub").mkdir(parents=True)
        (folder / "a.json").write_text("{}")
        (folder / "sub" / "b.bin").write_bytes(b"\0\0\0")
    before = content_digest(tmp_path / "first")
    assert before == content_digest(tmp_path / "second")
    os.utime(tmp_path / "second" / "a.json", (0, 0))
    assert before == content_digest(tmp_path / "second")
    how(tmp_path / "second")
    assert before != content_digest(tmp_path / "second")
    assert before.startswith("sha256:")
