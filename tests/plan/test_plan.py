"""Plans: what of a recipe is chosen, and what comes out of it."""

import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.builders.changed import changed
from tests.builders.plans import CPU, H200, LOAD, difference_from, document, engine, gpu_engine, loaded, only, plans_of
from tests.directions import CAPABILITIES, CONTRACT
from tests.fakes.vllm import VERSION
from tests.recipes import Document, reference
from vllm_qualify.engine.environment import EngineEnvironment, EngineIdentity, ImageIdentity, content_digest
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.gpu_reading import Gpu, Reading
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.launchers.process import process_environment
from vllm_qualify.engine.provision import Engines, Launch
from vllm_qualify.engine.server import OFFLINE
from vllm_qualify.errors import CallerError, HostError, RecipeError
from vllm_qualify.evidence.stages.table import wanted_stages
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import check_choice, new_run_id, plan_cells
from vllm_qualify.plan.choice import Choice, select
from vllm_qualify.plan.gates import SMOKE_GATES, contract_of, judged_by
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.recipe.serving import EngineName, ServerArguments

__all__ = ["document", "engine", "gpu_engine"]

SCORES = [
    "exact_match (gsm8k, strict-match)",
    "exact_match (gsm8k, strict-match) against the baseline",
    "answer_nll_nat_per_tok against the baseline",
]


def test_by_default_all_profiles_of_the_machine_with_its_default_variant(document: Document, engine: EngineEnvironment) -> None:
    plans = plans_of(document, engine)
    assert [plan.cell.id for plan in plans] == ["reference/bf16/cpu/latency", "reference/bf16/cpu/throughput"]


def test_profiles_with_one_seed_ask_other_prompts(document: Document, engine: EngineEnvironment) -> None:
    """A server that they share would have the prompts in its cache."""
    latency, throughput = plans_of(document, engine)
    assert latency.load.seed == throughput.load.seed == 0
    # The first 8 bytes of `printf latency | sha256sum`, without what is over 2^31; the same on each machine.
    assert [latency.load.bench_seed(repeat) for repeat in (1, 2)] == [1035020356, 1035020357]
    assert abs(latency.load.bench_seed(1) - throughput.load.bench_seed(1)) > 5_000_000
    other = latency.load.model_copy(update={"seed": 7})
    assert other.bench_seed(1) == 1035020363
    assert 0 <= latency.load.model_copy(update={"seed": 2**40}).bench_seed(1) < 2**31


def test_another_machine_has_its_own_profiles_and_default_variant(document: Document, gpu_engine: EngineEnvironment) -> None:
    plan = only(plans_of(document, gpu_engine, H200))
    assert plan.cell.id == "reference/fp8/h200/balanced"
    assert plan.cell.release.engine.version == "0.32.0"


def test_only_a_cell_that_is_compared_is_started_again(document: Document, engine: EngineEnvironment) -> None:
    compared = [gate for gate in document["gates"] if "max_loss" in gate]
    document["gates"] = [gate for gate in document["gates"] if gate not in compared]
    document["gpu_types"]["cpu"]["starts"] = 3
    document["gpu_types"]["cpu"]["profiles"]["latency"]["gates"] = compared
    plans = plans_of(document, engine)
    assert {plan.cell.profile: plan.starts for plan in plans} == {"latency": 3, "throughput": 1}


def test_a_choice_takes_one_profile_and_another_variant(document: Document, engine: EngineEnvironment) -> None:
    choice = Choice(gpu_type="cpu", variant="fp8", profile="throughput")
    assert only(plan_cells(loaded(document), choice, Engines(engine=engine), CPU)).cell.id == "reference/fp8/cpu/throughput"


def test_a_plan_has_all_that_determines_a_qualification(document: Document, engine: EngineEnvironment, tmp_path: Path) -> None:
    plan = only(plans_of(document, engine, choice=Choice(profile="latency")))
    weights, release, server = tmp_path / "bf16", plan.cell.release, plan.server
    assert (release.model, release.revision) == (str(weights), content_digest(weights))
    assert (release.engine.version, release.engine.digest) == (VERSION, "sha256:" + "0" * 64)
    assert (server.engine, server.model, server.revision) == (engine, str(weights), None)
    assert (server.served_model_name, plan.fingerprint, plan.smoke_golden) == ("reference", CPU, " 12")
    assert (plan.smoke.prompt, plan.load.input_len) == (document["smoke"]["prompt"], LOAD["input_len"])
    (task,) = plan.accuracy
    assert [path.name for path in task.questions or ()] == ["test.jsonl", "train.jsonl"]
    assert CellPlan.model_validate_json(plan.model_dump_json()) == plan
    # Without local questions they are left to the hub.
    document["accuracy"][0].pop("questions")
    (task,) = only(plans_of(document, engine, choice=Choice(profile="latency"))).accuracy
    assert task.questions is None


def test_a_models_path_starts_from_the_recipes_folder(document: Document, engine: EngineEnvironment, tmp_path: Path) -> None:
    document["variants"]["bf16"]["model"] = "./bf16"
    plan = only(plan_cells(loaded(document, tmp_path), Choice(profile="latency"), Engines(engine=engine), CPU))
    assert plan.server.model == str(tmp_path / "bf16")
    assert plan.cell.release.model == "./bf16"


@pytest.mark.parametrize(("served", "concurrent"), [(None, 64), (32, 32), (1024, 256)])
def test_questions_follow_the_server(
    document: Document, engine: EngineEnvironment, served: int | None, concurrent: int
) -> None:
    document["accuracy"][0].pop("num_concurrent", None)
    document["gpu_types"]["cpu"]["profiles"]["latency"]["server"] = {"max-num-seqs": served} if served else {}
    (task,) = only(plans_of(document, engine, choice=Choice(profile="latency"))).accuracy
    assert task.num_concurrent == concurrent


def test_the_profile_wins_over_the_variant_and_this_over_the_type(document: Document, engine: EngineEnvironment) -> None:
    serving = document["gpu_types"]["cpu"]
    serving["server"] = {"dtype": "auto", "max-model-len": 1024, "max-num-seqs": 8, "seed": 1}
    document["variants"]["bf16"]["server"] = {"dtype": "bfloat16", "max-model-len": 2048, "quantization": "none"}
    serving["profiles"]["latency"]["server"] = {"max-model-len": 4096, "max-num-seqs": 4}
    serving["environment"] = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "4"}
    document["variants"]["bf16"]["environment"] = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    latency, throughput = (plan.server for plan in plans_of(document, engine))
    both = {"dtype": "bfloat16", "quantization": "none", "seed": 1}
    assert latency.arguments == both | {"max-model-len": 4096, "max-num-seqs": 4}
    assert throughput.arguments == both | {"max-model-len": 2048, "max-num-seqs": 8}
    assert latency.environment == throughput.environment == {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "4"}


def test_the_tokenizer_is_pinned_too(document: Document, engine: EngineEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Mock()
    hub.model_info.return_value = SimpleNamespace(sha="0123abc", siblings=None)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: hub)
    document["variants"]["bf16"] = {"model": "org/model", "revision": "main"}
    plan = only(plans_of(document, engine, choice=Choice(profile="latency")))
    (asked,) = hub.model_info.call_args_list
    assert (asked.args, asked.kwargs["revision"]) == (("org/model",), "main")
    assert plan.cell.release.revision == plan.server.revision == "0123abc"
    config = plan.server.config(port=1)
    assert (config["model"], config["revision"], config["tokenizer-revision"]) == ("org/model", "0123abc", "0123abc")


def test_an_unreachable_hub_is_reported(document: Document, engine: EngineEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Mock()
    hub.model_info.side_effect = OSError("unreachable")
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: hub)
    document["variants"]["bf16"] = {"model": "org/model"}
    with pytest.raises(HostError, match="did not resolve org/model at its default branch: unreachable"):
        plans_of(document, engine)


@pytest.mark.parametrize(
    ("limits", "choice", "message", "place"),
    [
        ({}, Choice(gpu_type="b200"), "no GPU type 'b200'\n  remedy: it has: cpu, h200", "--gpu-type"),
        ({}, Choice(variant="int4"), "no variant 'int4'\n  remedy: it has: bf16, regressed, ngram, draft, fp8", "--variant"),
        ({}, Choice(profile="balanced"), "no profile 'balanced'\n  remedy: it has: latency, throughput", "--profile"),
        (
            {"gpu_types": ["h200"]},
            Choice(variant="fp8"),
            "the variant 'fp8' is for h200, and not for cpu\n  remedy: choose one for cpu: bf16, regressed",
            "--variant",
        ),
        (
            {"profiles": ["balanced", "latency"]},
            Choice(variant="fp8", profile="throughput"),
            "the variant 'fp8' is for the profiles balanced, latency",
            "--profile",
        ),
        ({"profiles": ["balanced"]}, Choice(variant="fp8"), "the variant 'fp8' is for the profiles balanced", "--profile"),
    ],
)
def test_an_unknown_name_or_a_variant_elsewhere_is_the_callers_mistake(
    document: Document, limits: Document, choice: Choice, message: str, place: str
) -> None:
    document["variants"]["fp8"] |= limits
    with pytest.raises(CallerError) as raised:
        select(loaded(document), choice, CPU)
    assert raised.value.place == place
    assert message in str(raised.value)


def test_without_a_profile_the_variant_gets_those_that_it_is_for(document: Document) -> None:
    document["variants"]["fp8"]["profiles"] = ["balanced", "latency"]
    assert list(select(loaded(document), Choice(variant="fp8"), CPU).profiles) == ["latency"]


@pytest.mark.parametrize(("versions", "fits"), [("<0.32", False), (">=0.32", True), (">=0.12,<0.33", True)])
def test_a_variant_is_for_its_versions(document: Document, engine: EngineEnvironment, versions: str, fits: bool) -> None:
    document["variants"]["bf16"]["vllm"] = versions
    message = f"--variant: the variant 'bf16' is for vLLM {versions}, and this is {VERSION}"
    with nullcontext() if fits else pytest.raises(CallerError, match=re.escape(message)):
        assert len(plans_of(document, engine)) == 2


@pytest.mark.parametrize(("machine", "chosen"), [(CPU, "h200"), (H200, "cpu")])
def test_a_machine_of_another_type_is_refused(document: Document, machine: Fingerprint, chosen: str) -> None:
    with pytest.raises(HostError, match=f"qualified on {chosen}, and this machine is {machine.gpu_type} \\({machine.name}\\)"):
        select(loaded(document), Choice(gpu_type=chosen), machine)


def test_weights_that_are_not_there_are_named_before_anything_starts(document: Document, tmp_path: Path) -> None:
    (tmp_path / "bf16" / "config.json").unlink()
    with pytest.raises(HostError, match=r"no model at .*bf16: it has no config\.json"):
        select(loaded(document), Choice(), CPU)


@pytest.mark.parametrize("which", ["test", "shots"])
def test_questions_that_are_not_there_are_named_before_anything_starts(document: Document, tmp_path: Path, which: str) -> None:
    document["accuracy"][0]["questions"][which] = str(tmp_path / "none.jsonl")
    with pytest.raises(HostError, match=r"no questions at .*none\.jsonl"):
        select(loaded(document), Choice(), CPU)


@pytest.mark.parametrize("name", ["texts", "prompts", "trace"])
def test_texts_and_files_of_loads_that_are_not_there_are_named_before_anything_starts(
    document: Document, tmp_path: Path, name: str
) -> None:
    file, profile = str(tmp_path / "none.jsonl"), document["gpu_types"]["cpu"]["profiles"]["latency"]
    if name == "texts":
        document["likelihood"] = {"texts": file}
    elif name == "prompts":
        profile["load"] = {**profile["load"], name: file}
        del profile["load"]["input_len"]
    else:
        profile["load"] = {"trace": file, "window": "whole", "num_warmups": 0, "repeats": 3, "time_limit_s": 60}
    with pytest.raises(HostError, match=rf"no {name} at .*none\.jsonl"):
        select(loaded(document), Choice(), CPU)


def test_a_folder_of_questions_is_planned_and_one_with_a_link_refused(document: Document, tmp_path: Path) -> None:
    folder = tmp_path / "questions"
    folder.mkdir()
    (folder / "gsm8k.jsonl").write_text("{}\n")
    document["accuracy"][0]["questions"]["test"] = str(folder)
    select(loaded(document), Choice(), CPU)
    (folder / "link.jsonl").symlink_to("/etc/passwd")
    with pytest.raises(CallerError, match=r"'link\.jsonl' is a link"):
        select(loaded(document), Choice(), CPU)


def test_an_engine_without_vllm_is_reported(document: Document, engine: EngineEnvironment) -> None:
    engine.python.write_text(
        '#!/bin/sh\necho \'{"python": "3.11", "packages": {}, "files_sha256": null, "changed_files": []}\'\n'
    )
    with pytest.raises(HostError, match="no vLLM"):
        plans_of(document, engine)
    engine.python.unlink()
    with pytest.raises(HostError, match="does not run"):
        plans_of(document, engine)


def test_a_cpu_build_does_not_qualify_a_gpu(document: Document, engine: EngineEnvironment) -> None:
    with pytest.raises(HostError, match=r"vLLM 0\.32\.0\+cpu is a CPU build, and h200 is to be qualified"):
        plans_of(document, engine, H200)


@pytest.mark.usefixtures("pulled")
@pytest.mark.parametrize("is_image", [False, True])
def test_a_gpu_build_does_not_qualify_a_cpu(document: Document, gpu_engine: EngineEnvironment, *, is_image: bool) -> None:
    with pytest.raises(HostError, match=r"vLLM 0\.32\.0 is a GPU build, and cpu is to be qualified"):
        plans_of(document, IMAGE if is_image else gpu_engine)


# --- GPUs

THREE_H200 = H200.model_copy(update={"count": 3, "devices": [2, 3, 5]})


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        ({}, [2]),
        ({"tensor-parallel-size": 2}, [2, 3]),
        ({"data-parallel-size": 3}, [2, 3, 5]),
        ({"tensor-parallel-size": 1, "pipeline-parallel-size": 2}, [2, 3]),
    ],
)
def test_a_cell_gets_the_machines_first_gpus_of_its_type(
    document: Document, gpu_engine: EngineEnvironment, arguments: ServerArguments, gpus: list[int]
) -> None:
    document["gpu_types"]["h200"]["server"] = arguments
    plan = only(plans_of(document, gpu_engine, THREE_H200))
    assert plan.server.gpus == gpus
    assert plan.fingerprint == THREE_H200


def test_each_profile_gets_as_many_as_it_takes(document: Document, gpu_engine: EngineEnvironment) -> None:
    document["gpu_types"]["h200"]["server"] = {"tensor-parallel-size": 2}
    document["gpu_types"]["h200"]["profiles"]["latency"] = {"load": LOAD, "server": {"tensor-parallel-size": 3}}
    balanced, latency = plans_of(document, gpu_engine, THREE_H200)
    assert (balanced.server.gpus, latency.server.gpus) == ([2, 3], [2, 3, 5])


def test_too_few_gpus_are_reported_with_the_numbers(document: Document, gpu_engine: EngineEnvironment) -> None:
    sizes = {"tensor-parallel-size": 2, "pipeline-parallel-size": 3, "data-parallel-size": 4}
    document["gpu_types"]["h200"]["server"] = sizes
    message = r"check: profile 'balanced' takes 24 GPUs, and this machine has 3 h200\n.*--profile"
    with pytest.raises(HostError, match=message):
        plans_of(document, gpu_engine, THREE_H200)


def test_a_driver_that_is_too_old_is_reported_before_the_engine_is_asked(document: Document, tmp_path: Path) -> None:
    nowhere = Engines(engine=EngineEnvironment(python=tmp_path / "no-python"))
    with pytest.raises(HostError, match=r"^check: the NVIDIA driver is 570\.124\.06"):
        plan_cells(loaded(document), Choice(), nowhere, H200.model_copy(update={"driver": "570.124.06"}))


def test_a_process_sees_the_cells_gpus_as_nvml_counts_them(document: Document, gpu_engine: EngineEnvironment) -> None:
    document["gpu_types"]["h200"] |= {"server": {"tensor-parallel-size": 2}, "environment": {"NCCL_DEBUG": "WARN"}}
    plan = only(plans_of(document, gpu_engine, THREE_H200))
    assert process_environment(plan.server) == OFFLINE | {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "NCCL_DEBUG": "WARN",
    }


def test_a_process_on_a_cpu_gets_no_gpu_and_the_environment_alone(document: Document, engine: EngineEnvironment) -> None:
    document["gpu_types"]["cpu"] |= {"server": {"tensor-parallel-size": 2}, "environment": {"OMP_NUM_THREADS": "4"}}
    for plan in plans_of(document, engine):
        assert plan.server.gpus == []
        assert process_environment(plan.server) == OFFLINE | {"OMP_NUM_THREADS": "4"}


# --- images

IMAGE = EngineImage(repository="vllm/vllm-openai", tag="v0.32.0", digest="sha256:" + "1" * 64, platform="linux/amd64")
OLDER = IMAGE.model_copy(update={"tag": "v0.31.0", "digest": "sha256:" + "2" * 64})


TENSORRT_LLM = IMAGE.model_copy(update={"repository": "nvidia/tensorrt-llm", "tag": "1.3.0rc29"})


def identity_of(image: EngineImage) -> EngineIdentity:
    version, image_id = str(image.tag).removeprefix("v"), "sha256:" + "3" * 64
    about = ImageIdentity(reference=image.reference, platform=image.platform, image_id=image_id, created="", labels={"a": "b"})
    kind: EngineName = "tensorrt-llm" if image.repository == TENSORRT_LLM.repository else "vllm"
    of_kind = {"kind": kind, "version": version, "packages": {KINDS[kind].package: version}, "digest": str(image.digest)}
    return EngineIdentity.model_validate(of_kind | {"launcher": "docker", "image": about, "python": "3.12"})


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are here, and say the version of their tag."""
    monkeypatch.setattr(EngineImage, "identity", identity_of)


@pytest.mark.usefixtures("pulled")
def test_a_plan_carries_the_image_under_test_and_the_load_clients(document: Document) -> None:
    document["gpu_types"]["h200"]["memory_limit_gib"] = 64
    plan = only(plan_cells(loaded(document), Choice(), Engines(engine=IMAGE, client=OLDER), H200))
    assert plan.server.engine == IMAGE
    assert plan.server.memory_limit_gib == 64
    assert plan.cell.release.engine == identity_of(IMAGE)
    assert (plan.client_image, plan.client) == (OLDER, identity_of(OLDER))
    assert CellPlan.model_validate_json(plan.model_dump_json()) == plan
    assert plan.labels == {"run": plan.run_id, "cell": "reference/fp8/h200/balanced"}
    # Without a client's image the client runs beside the server.
    without = only(plans_of(document, IMAGE, H200))
    assert (without.client_image, without.client) == (None, None)


@pytest.fixture
def on_tensorrt_llm(document: Document) -> Document:
    """FP8 on H200 is served by TensorRT-LLM, on two GPUs; GPU type and profile have arguments for vLLM."""
    document["variants"]["fp8"] |= {
        "engine": "tensorrt-llm",
        "server": {"tensor_parallel_size": 2},
        "environment": {"TLLM_A": "1"},
    }
    document["gpu_types"]["h200"] |= {"server": {"tensor-parallel-size": 3}, "environment": {"VLLM_B": "2"}}
    document["gates"] = [gate for gate in document["gates"] if "max_nll_increase" not in gate]
    return document


@pytest.mark.usefixtures("pulled")
def test_a_variant_for_tensorrt_llm_gets_its_own_arguments_alone(on_tensorrt_llm: Document) -> None:
    plan = only(plan_cells(loaded(on_tensorrt_llm), Choice(), Engines(engine=TENSORRT_LLM, client=IMAGE), THREE_H200))
    assert (plan.server.kind, plan.cell.release.engine.kind) == ("tensorrt-llm", "tensorrt-llm")
    assert (plan.server.arguments, plan.server.environment) == ({"tensor_parallel_size": 2}, {"TLLM_A": "1"})
    assert plan.server.gpus == [2, 3]
    assert plan.client_image == IMAGE
    assert CellPlan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.usefixtures("pulled")
def test_a_gate_on_likelihoods_is_refused_for_tensorrt_llm(document: Document, on_tensorrt_llm: Document) -> None:
    engines = Engines(engine=TENSORRT_LLM, client=IMAGE)
    assert only(plan_cells(loaded(on_tensorrt_llm), Choice(), engines, THREE_H200)).likelihood is None
    document["gates"].append({"metric": "answer_nll_nat_per_tok", "max_nll_increase": 0.01, "unit": "nat/tok"})
    with pytest.raises(RecipeError, match="TensorRT-LLM does not give the likelihood"):
        plan_cells(loaded(document), Choice(), engines, THREE_H200)


OLD_TENSORRT_LLM = TENSORRT_LLM.model_copy(update={"tag": "1.2.1"})


@pytest.mark.usefixtures("pulled")
@pytest.mark.parametrize(
    ("variant", "engines", "place", "message"),
    [
        ("fp8", Engines(engine=TENSORRT_LLM), "--client-image", "which no image of TensorRT-LLM has"),
        ("fp8", Engines(engine=IMAGE, client=IMAGE), "--image", r"TensorRT-LLM is needed, and this is vLLM 0\.32\.0"),
        (
            "fp8",
            Engines(engine=TENSORRT_LLM, client=TENSORRT_LLM),
            "--client-image",
            "vLLM is needed, and this is TensorRT-LLM",
        ),
        ("fp8", Engines(engine=OLD_TENSORRT_LLM, client=IMAGE), "--image", r"TensorRT-LLM 1\.3 or newer is needed"),
        ("bf16", Engines(engine=TENSORRT_LLM), "--image", r"vLLM is needed, and this is TensorRT-LLM 1\.3\.0rc29"),
    ],
)
def test_an_image_holds_what_the_variant_and_the_client_need(
    on_tensorrt_llm: Document, variant: str, engines: Engines, place: str, message: str
) -> None:
    with pytest.raises(CallerError, match=f"^{place}: .*{message}"):
        plan_cells(loaded(on_tensorrt_llm), Choice(variant=variant), engines, THREE_H200)


def test_tensorrt_llm_is_no_process(on_tensorrt_llm: Document, gpu_engine: EngineEnvironment) -> None:
    with pytest.raises(CallerError, match=r"^--launcher: TensorRT-LLM is served from an image only"):
        plan_cells(loaded(on_tensorrt_llm), Choice(), Engines(engine=gpu_engine), THREE_H200)


def test_a_memory_limit_is_not_for_a_process(document: Document, engine: EngineEnvironment) -> None:
    document["gpu_types"]["cpu"]["memory_limit_gib"] = 4
    with pytest.raises(CallerError, match=r"memory_limit_gib limits a container.*\n.*--launcher docker"):
        plans_of(document, engine)


# --- what is told before an image is here

DOCKER = Launch(launcher="docker", image=IMAGE.reference)
HELD_TO = "the recipe is to be qualified on h200, and this machine is"


def on_a_machine_with(patch: pytest.MonkeyPatch, *names: str) -> None:
    """NVML tells of GPUs with these names; without any there is no NVML."""
    gpus = [
        Gpu(index=index, name=name, uuid=f"GPU-{index}", compute_capability="9.0", memory_mib=143_771, mig=False)
        for index, name in enumerate(names)
    ]
    message = Reading(driver="580.159.04", gpus=gpus, source="nvml") if gpus else None
    patch.setattr("vllm_qualify.engine.gpu.read_nvml", lambda: message)


@pytest.mark.parametrize("launch", [DOCKER, Launch()], ids=["docker", "process"])
@pytest.mark.parametrize(
    ("choice", "of_process", "of_docker", "beside_an_h100"),
    [
        # GPUs that only a container sees are left to it, and a process is held to the machine.
        (Choice(), None, None, "no GPU type 'h100'"),
        (Choice(gpu_type="h200"), f"{HELD_TO} cpu", None, f"{HELD_TO} h100"),
        (Choice(gpu_type="h200", variant="bf16"), f"{HELD_TO} cpu", None, f"{HELD_TO} h100"),
        (Choice(gpu_type="cpu"), None, None, None),
        # What the recipe does not have is reported in any case.
        (Choice(gpu_type="b200"), *["no GPU type 'b200'"] * 3),
        (Choice(gpu_type="h200", variant="int4"), *["no variant 'int4'"] * 3),
        (Choice(gpu_type="h200", profile="turbo"), *["no profile 'turbo'"] * 3),
        (Choice(gpu_type="cpu", profile="turbo"), *["no profile 'turbo'"] * 3),
        (Choice(profile="balanced"), "no profile 'balanced'", None, "no GPU type 'h100'"),
    ],
)
def test_a_choice_is_checked_before_an_image_is_here(
    document: Document,
    monkeypatch: pytest.MonkeyPatch,
    launch: Launch,
    choice: Choice,
    of_process: str | None,
    of_docker: str | None,
    beside_an_h100: str | None,
) -> None:
    alone = of_docker if launch == DOCKER else of_process
    for names, message in (([], alone), (["NVIDIA H100 80GB HBM3"], beside_an_h100)):
        on_a_machine_with(monkeypatch, *names)
        error = HostError if message and message.startswith(HELD_TO) else CallerError
        with pytest.raises(error, match=message) if message else nullcontext():
            check_choice(loaded(document), choice, launch)


def test_what_another_engine_needs_is_told_before_its_image(on_tensorrt_llm: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_with(monkeypatch)
    with pytest.raises(CallerError, match="which no image of TensorRT-LLM has"):
        check_choice(loaded(on_tensorrt_llm), Choice(gpu_type="h200"), DOCKER)
    with_client = DOCKER.model_copy(update={"client_image": IMAGE.reference})
    check_choice(loaded(on_tensorrt_llm), Choice(gpu_type="h200"), with_client)


def test_without_nvml_and_a_gpu_type_nothing_is_held_to_the_cpu(document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_with(monkeypatch)
    document["gpu_types"].pop("cpu")
    check_choice(loaded(document), Choice(), DOCKER)
    with pytest.raises(CallerError, match="no GPU type 'cpu'"):
        check_choice(loaded(document), Choice(), Launch())


# --- gates


def labels(gates: list[Gate]) -> list[str]:
    return [gate.label for gate in gates]


def test_smoke_gates_are_always_there_and_come_first(document: Document, engine: EngineEnvironment) -> None:
    latency, throughput = plans_of(document, engine)
    smoke = [*SMOKE_GATES, "smoke_golden"]
    assert labels(latency.gates) == [*smoke, *CONTRACT, *SCORES, "ttft_p50_ms"]
    assert labels(throughput.gates) == [*smoke, *CONTRACT, *SCORES]
    for gate in latency.gates[: len(smoke)]:
        assert (gate.bound, gate.unit) == (1.0, "bool")


@pytest.mark.parametrize(("written", "checks"), [({}, CONTRACT), ({"contract": True}, CONTRACT), ({"contract": False}, [])])
def test_each_check_of_the_contract_is_a_gate_unless_the_recipe_leaves_it_out(
    written: dict[str, bool], checks: list[str], document: Document, engine: EngineEnvironment
) -> None:
    document |= written
    plan = only(plans_of(document, engine, choice=Choice(profile="throughput")))
    assert labels(plan.gates) == [*SMOKE_GATES, "smoke_golden", *checks, *SCORES]
    assert ("contract" in wanted_stages(plan)) == bool(checks)
    assert judged_by(plan, loaded(document).recipe) == plan


@pytest.mark.parametrize("place", ["variant", "profile", "another version"])
def test_a_seed_is_not_asked_for_where_a_draft_is(place: str, document: Document, engine: EngineEnvironment) -> None:
    """vLLM 0.32 gave other texts by the same seed: a good release would be refused by chance."""
    drafting = {"server": {"speculative-config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}}}
    if place == "another version":
        document["variants"]["bf16"]["by_version"] = [{"vllm": ">=0.32", **drafting}]
    else:
        of = document["variants"]["bf16"] if place == "variant" else document["gpu_types"]["cpu"]["profiles"]["throughput"]
        of |= drafting
    plan = only(plans_of(document, engine, choice=Choice(profile="throughput")))
    assert plan.contract is not None
    assert list(plan.contract.not_asked) == ["contract_seed"]
    assert "contract_seed" not in labels(plan.gates)
    assert judged_by(plan, loaded(document).recipe) == plan
    assert difference_from(plan, loaded(document).recipe) == ""


@pytest.mark.parametrize(("written", "is_asked"), [({}, False), ({"contract": True}, True), ({"capabilities": ["chat"]}, True)])
def test_tensorrt_llm_is_asked_for_the_contract_only_where_the_recipe_says_so(written: Document, *, is_asked: bool) -> None:
    recipe = Recipe.model_validate(reference() | written)
    trt = recipe.variants["bf16"].model_copy(update={"engine": "tensorrt-llm"})
    assert (contract_of(recipe, trt) is not None) == is_asked


def test_a_promise_asks_for_the_contract_with_its_checks(document: Document, engine: EngineEnvironment) -> None:
    document["capabilities"] = ["chat", "reasoning"]
    plan = only(plans_of(document, engine, choice=Choice(profile="throughput")))
    promised = [*CAPABILITIES["chat"], *CAPABILITIES["reasoning"]]
    assert labels(plan.gates) == [*SMOKE_GATES, "smoke_golden", *CONTRACT, *promised, *SCORES]
    assert judged_by(plan, loaded(document).recipe) == plan


@pytest.mark.parametrize(("promised", "checks"), [(["chat"], CAPABILITIES["chat"]), ([], [])])
def test_a_variant_can_promise_something_else(
    promised: list[str], checks: list[str], document: Document, engine: EngineEnvironment
) -> None:
    document["capabilities"] = ["chat", "tools"]
    document["variants"]["fp8"]["capabilities"] = promised
    plan = only(plans_of(document, engine, choice=Choice(variant="fp8", profile="throughput")))
    assert plan.contract is not None
    assert [check.name for check in plan.contract.checks] == [*CONTRACT, *checks]


def test_what_an_engine_does_not_offer_is_left_out_only_of_what_is_promised() -> None:
    recipe = Recipe.model_validate(reference() | {"capabilities": ["chat"]})
    trt = recipe.variants["bf16"].model_copy(update={"engine": "tensorrt-llm"})
    for capabilities, there in ((["chat"], False), (["chat", "vision"], True)):
        contract = contract_of(recipe.model_copy(update={"capabilities": capabilities}), trt)
        assert contract is not None
        assert [name in contract.not_asked for name in ("contract_vision_broken", "contract_hang_up")] == [there, True]


def test_without_a_golden_text_nothing_is_held_to_it(document: Document, engine: EngineEnvironment) -> None:
    plan = only(plans_of(document, engine, choice=Choice(variant="fp8", profile="throughput")))
    assert plan.smoke_golden is None
    assert labels(plan.gates) == [*SMOKE_GATES, *CONTRACT, *SCORES]


# --- the network between nodes


def test_infiniband_is_a_gate_of_its_own_and_makes_nccl_tell(document: Document, gpu_engine: EngineEnvironment) -> None:
    plain = only(plans_of(document, gpu_engine, H200))
    document["gpu_types"]["h200"]["network"] = "infiniband"
    plan = only(plans_of(document, gpu_engine, H200))
    assert plan.server.environment == plain.server.environment | {"NCCL_DEBUG": "INFO"}
    assert labels(plan.gates) == [*SMOKE_GATES, *CONTRACT, "nccl_infiniband", *SCORES]
    assert judged_by(plain, loaded(document).recipe).gates == plan.gates
    assert judged_by(plan, loaded(document).recipe) == plan


@pytest.mark.parametrize("level", ["INFO", "TRACE", "info"])
def test_what_makes_nccl_tell_enough_stays(document: Document, gpu_engine: EngineEnvironment, level: str) -> None:
    document["gpu_types"]["h200"] |= {"network": "infiniband", "environment": {"NCCL_DEBUG": level}}
    plan = only(plans_of(document, gpu_engine, H200))
    assert plan.server.environment == {"NCCL_DEBUG": level}


@pytest.mark.parametrize("level", ["WARN", "VERSION", "1", ""])
def test_what_keeps_nccl_from_telling_is_refused(document: Document, gpu_engine: EngineEnvironment, level: str) -> None:
    document["gpu_types"]["h200"]["network"] = "infiniband"
    document["variants"]["fp8"]["environment"] = {"NCCL_DEBUG": level}
    with pytest.raises(CallerError, match=r"^environment\.NCCL_DEBUG: .*NCCL must log its channels"):
        plans_of(document, gpu_engine, H200)


def test_another_recipe_judges_by_its_own_gates_and_golden_text(document: Document, engine: EngineEnvironment) -> None:
    plans = plans_of(document, engine)
    for plan in plans:
        assert judged_by(plan, loaded(document).recipe) == plan
    document["gates"][0]["minimum"] = 0.99
    document["variants"]["bf16"]["smoke_golden"] = " 13"
    document["accuracy"][0]["num_questions"] = 7
    planned = judged_by(plans[0], loaded(document).recipe)
    bounds = {gate.label: gate.bound for gate in planned.gates}
    assert (bounds[SCORES[0]], bounds["ttft_p50_ms"], planned.smoke_golden) == (0.99, 500.0, " 13")
    assert planned.model_copy(update={"gates": plans[0].gates, "smoke_golden": " 12"}) == plans[0]


@pytest.mark.parametrize(("field", "name"), [("gpu_type", "h100"), ("variant", "int4"), ("profile", "balanced")])
def test_who_lacks_the_cell_cannot_judge_it(document: Document, engine: EngineEnvironment, field: str, name: str) -> None:
    elsewhere = changed(plans_of(document, engine)[0], "cell", **{field: name})
    with pytest.raises(CallerError, match=f"no {field.replace('gpu_', 'GPU ')} '{name}'"):
        judged_by(elsewhere, loaded(document).recipe)


def test_run_ids_never_repeat_and_can_be_names_of_folders(document: Document, engine: EngineEnvironment) -> None:
    names = {*(new_run_id() for _ in range(100)), *(plan.run_id for plan in plans_of(document, engine))}
    assert len(names) == 102
    assert all("/" not in run_id and not run_id.startswith(".") for run_id in names)


FILES = {"a.json": b"{}", "sub/b.bin": b"\0\0\0"}
CHANGES = {
    "text": FILES | {"a.json": b"{ }"},
    "last byte": FILES | {"sub/b.bin": b"\0\0\1"},
    "emptied": FILES | {"sub/b.bin": b""},
    "renamed": {"a.json": b"{}", "sub/c.bin": b"\0\0\0"},
    "moved": {"a.json": b"{}", "b.bin": b"\0\0\0"},
    "removed": {"sub/b.bin": b"\0\0\0"},
    "added": FILES | {"empty": b""},
    "swapped": {"a.json": b"\0\0\0", "sub/b.bin": b"{}"},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_the_digest_changes_with_any_files_content_or_name(tmp_path: Path, changes: dict[str, bytes]) -> None:
    for name, files in (("first", FILES), ("same", FILES), ("changed", changes)):
        for path, body in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_bytes(body)
    os.utime(tmp_path / "same" / "a.json", (0, 0))
    first, same, changed_digest = (content_digest(tmp_path / name) for name in ("first", "same", "changed"))
    assert first == same != changed_digest
    assert first.startswith("sha256:")
