"""vLLM's own messages: read from its source, decided by people, found in a log."""

import json
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement

from infra.engine_messages import describe, merge, read_messages, split
from infra.package_messages import PACKAGES_READ
from tests.builders.failures import FAILED
from vllm_qualify.engine.failure.classify import classify_log
from vllm_qualify.engine.failure.families import NOT_OF_A_START, decide
from vllm_qualify.engine.failure.meanings import FailureClass, Turn
from vllm_qualify.engine.failure.messages import PACKAGES, find_family, read_table
from vllm_qualify.engine.failure.package_families import decide_package
from vllm_qualify.recipe.loading import catalog_folder

SHARE_DECIDED = 0.95
MOST_BYTES = 150 * 1024
# Read by a person, one by one, in the source of vLLM 0.12 to 0.33, with the file that raises it: most of no sign of ours.
READ: list[tuple[str, str, FailureClass]] = [
    ("config/vllm.py", "ValueError: HiSparse does not support pipeline parallelism.", "refused-configuration"),
    ("config/parallel.py", "ValueError: tp_size=4 must be divisible by dcp_size=3.", "refused-configuration"),
    (
        "config/vllm.py",
        "ValueError: Async scheduling is not compatible with disable_padded_drafter_batch=True.",
        "refused-configuration",
    ),
    (
        "config/mamba.py",
        "ValueError: Unknown Mamba SSU backend: 'made'. Valid options are: TRITON, FLASHINFER",
        "invalid-value",
    ),
    (
        "engine/arg_utils.py",
        "ValueError: attention_backend and attention_config.backend are mutually exclusive",
        "refused-configuration",
    ),
    (
        "config/speculative.py",
        "ImportError: Arctic Inference is required for suffix decoding. Install via `pip install arctic-inference==0.1.1`.",
        "broken-installation",
    ),
    (
        "model_executor/layers/quantization/modelopt.py",
        "ValueError: Unsupported ModelOpt NVFP4 quant_algo: made. Supported: made.",
        "unsupported-quantization",
    ),
    (
        "model_executor/layers/fused_moe/oracle/unquantized.py",
        "ValueError: moe_backend='made' is not supported for unquantized MoE. Expected one of made.",
        "unsupported-backend",
    ),
    (
        "model_executor/models/apertus.py",
        "ValueError: Unsupported activation: made. Only xIELU is supported for now.",
        "unsupported-architecture",
    ),
    (
        "models/kimi_k3/nvidia/ops/latent_moe_tail.py",
        "ValueError: K3 latent-MoE tail fusion requires SM100.",
        "unsupported-backend",
    ),
    (
        "models/step5/nvidia/model.py",
        "ValueError: Step5 tensor parallel size 8 is incompatible with group count 3: one must divide the other.",
        "refused-configuration",
    ),
    (
        "v1/engine/core_client.py",
        "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by slow weight loading for"
        " large models. Waited 600s (configured by VLLM_ENGINE_READY_TIMEOUT_S). To increase the timeout, set the "
        "environment variable: VLLM_ENGINE_READY_TIMEOUT_S=<seconds>",
        "rendezvous",
    ),
    ("v1/executor/ray_utils.py", "ValueError: Placement group bundle cannot have more than 1 GPU.", "too-few-gpus"),
    (
        "lora/worker_manager.py",
        "RuntimeError: Number of requested LoRAs (9) is greater than the number of GPU LoRA slots (8).",
        "refused-configuration",
    ),
    ("model_executor/models/phi4mm.py", "AssertionError: This line should be unreachable.", "engine-bug"),
    (
        "model_executor/layers/fused_moe/routed_experts_capturer.py",
        "RuntimeError: Device buffer has already been initialized",
        "engine-bug",
    ),
]
SOURCE = """
def check(size, logger):
    if size < 0:
        raise ValueError(f"the made size {size} must not be " "below zero at all")
    if size == 1:
        raise RuntimeError("the made size %d is one of those" % size)
    if size == 2:
        raise TypeError("made sizes like {} are no numbers".format(size))
    if size == 3:
        raise ValueError("short")
    if size == 4:
        raise
    logger.error("the made size %s was read from a file", size)
    logger.info("the made size %s is only a note here", size)
    size.error("the made size is no logger's own word")
"""


def test_what_can_end_a_start_is_decided_in_each_version() -> None:
    table = read_table()
    assert {"0.12.0", "0.20.0", "0.26.0", "0.32.0", "0.33.0"} <= set(table.versions)
    for place, version in enumerate(table.versions):
        raised = [each for each in table.statements if place in each.versions and each.raised]
        families = [decide(each.place, each.text) for each in raised]
        ending = [family for family in families if family is None or family.fate not in NOT_OF_A_START]
        decided = [family for family in ending if family]
        assert len(raised) > 1000, version
        assert len(ending) > len(raised) / 2, version
        assert len(decided) / len(ending) >= SHARE_DECIDED, version


@pytest.mark.parametrize(("place", "said", "kind"), READ, ids=[said[:50] for _, said, _ in READ])
def test_a_message_is_found_by_its_words_and_decided(place: str, said: str, kind: FailureClass) -> None:
    """By its place alone no message would be known: a log need not have a traceback."""
    family = find_family(said)
    assert family is not None
    assert family.fate == kind
    log = f"(EngineCore pid=7) ERROR 11-20 12:00:00 [core.py:900] {said}\n"
    failure = classify_log(log, FAILED)
    assert (failure.kind, failure.lines) == (kind, [log.strip()])
    assert any(place == each.place for each in read_table().statements)


def test_words_of_a_parent_of_a_request_and_of_nobody_decide_nothing() -> None:
    for said in (
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "ValueError: When using `tool_choice`, `tools` must be set.",
        "RuntimeError: the disk is gone",
        "",
    ):
        family = find_family(said)
        assert family is None or family.fate in NOT_OF_A_START
        assert classify_log(said, FAILED).kind == "unknown"
        assert classify_log(said, FAILED).whose_turn == "unclear"


def test_messages_are_read_from_source_with_their_values_left_open() -> None:
    said = read_messages(iter([("made/file.py", SOURCE), ("benchmarks/made.py", SOURCE)]))
    assert said == {
        ("made/file.py", "ValueError", "the made size {} must not be below zero at all"),
        ("made/file.py", "RuntimeError", "the made size {} is one of those"),
        ("made/file.py", "TypeError", "made sizes like {} are no numbers"),
        ("made/file.py", "ValueError", "short"),
        ("made/file.py", "", "the made size {} was read from a file"),
    }


def _versions() -> Iterator[tuple[str, str]]:
    yield "1.0.0", 'raise ValueError("an older message of a made place")'
    yield "1.10.0", 'raise ValueError("a newer message of a made place")'
    yield "1.9.0", 'raise ValueError("an older message of a made place")'


def test_a_table_has_its_versions_in_order_and_tells_what_is_new_and_not_decided() -> None:
    by_version = {version: read_messages(iter([("nowhere/made.py", code)])) for version, code in _versions()}
    table = merge(by_version)
    assert table.versions == ["1.0.0", "1.9.0", "1.10.0"]
    assert split(table) == by_version
    told = list(describe(table))
    assert [line for line in told if "not decided" in line] == [
        "  new, not decided: nowhere/made.py: ValueError: a newer message of a made place"
    ]
    assert json.loads(json.dumps(table.statements))[0][4] == [2]


# Read by a person in the packages' text. No sign of ours has these words.
OF_PACKAGES: list[tuple[str, FailureClass, Turn]] = [
    ("AssertionError: Torch not compiled with CUDA enabled", "broken-installation", "host"),
    ("RuntimeError: 0 active drivers ([]). There should only be one.", "no-gpu", "host"),
    ("huggingface_hub.errors.HFValidationError: Cannot have -- or .. in repo_id: 'acme/a--b'.", "unknown-model", "recipe"),
    ("ValueError: mlp_layer_types length (3) must equal num_hidden_layers (4).", "incomplete-model", "release"),
    ("ConnectionError: Could not read 'made' from GCS. Did GCS start successfully?", "rendezvous", "host"),
    ("torch.AcceleratorError: CUDA error: system not yet initialized", "no-gpu", "host"),
    ("RuntimeError: HIP error: no ROCm-capable device is detected", "no-gpu", "host"),
    ("RuntimeError: Triton Error [CUDA]: forward compatibility was attempted on non supported HW", "driver-too-old", "host"),
    ("RuntimeError: CUDA error: peer access is not supported between these two devices", "nccl-failure", "host"),
    ("RuntimeError: HIP error: hipErrorECCNotCorrectable", "crashed", "release"),
    ("RuntimeError: CUDA error: operation not permitted when stream is capturing", "engine-bug", "release"),
]


@pytest.mark.parametrize(("said", "kind", "turn"), OF_PACKAGES, ids=[said[:50] for said, _, _ in OF_PACKAGES])
def test_a_package_says_who_must_act(said: str, kind: FailureClass, turn: Turn) -> None:
    failure = classify_log(f"(EngineCore pid=7) ERROR 11-20 12:00:00 [core.py:900] {said}\n", FAILED)
    assert (failure.kind, failure.whose_turn) == (kind, turn)


def test_what_the_table_of_packages_holds_is_decided_and_it_stays_small() -> None:
    table = read_table(PACKAGES)
    assert {Requirement(name).name for name in table.versions} == set(PACKAGES_READ)
    assert [each for each in table.statements if decide_package(each.place, each.text) is None] == []
    assert (catalog_folder() / PACKAGES).stat().st_size < MOST_BYTES
