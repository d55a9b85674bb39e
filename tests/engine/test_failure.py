"""Failure classes on real logs: captured/README.md tells where each comes from."""

import json
import re
import time
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders.failures import CAPTURED, CASES, FAILED, GIVEN_UP, KILLED, MADE_CASES, USAGE, Case
from tests.builders.signs import LINES
from tests.builders.signs import SAID as LINES_SAID
from vllm_qualify.engine.failure.classify import MOST_LINES, classify_log
from vllm_qualify.engine.failure.end import End
from vllm_qualify.engine.failure.meanings import IN_AN_IMAGE, MEANINGS, FailureClass
from vllm_qualify.engine.failure.signs import GENERAL_SIGNS, LAST_SIGNS, SIGNS, SIGNS_OF_CLASSES

# Some hundred times what it takes.
HOSTILE_LIMIT_S = 20.0
TAIL = """(APIServer pid=223598)     raise RuntimeError("Engine core initialization failed. "
(APIServer pid=223598)                        "See root cause above. "
(APIServer pid=223598) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


BY_LOG = {case.log: case for case in CASES}
QUIET = ("DEBUG", "INFO", "WARNING")
# Lines made for the test around words that we could not capture, and that stand where the comment says.
MADE: list[tuple[str, FailureClass, list[str]]] = [
    (  # https://github.com/vllm-project/vllm/issues/49497
        "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist, as made for the test",
        "no-compiler",
        ["nvcc", "/usr/local/cuda"],
    ),
    (  # https://github.com/vllm-project/vllm/issues/32468
        "(APIServer pid=1) ERROR 11-20 12:00:00 [made.py:1] made: Engine core proc EngineCore_DP0 died unexpectedly",
        "killed",
        ["EngineCore_DP0"],
    ),
    (  # https://github.com/autowarefoundation/autoware/discussions/2961
        "made: the container has an unsatisfied condition: cuda>=12.9, says its runtime",
        "driver-too-old",
        ["cuda>=12.9"],
    ),
    # Words of transformers 5: a model's own code, its configuration, its tokenizer.
    (
        "ValueError: The repository acme/made contains custom code which must be executed to correctly load the model.",
        "refused-configuration",
        ["code of its own"],
    ),
    # vLLM 0.32's whole word on `vllm serve ./real.gguf`.
    (
        "OSError: It looks like the config file at './real.gguf' is not a valid JSON file.",
        "unsupported-architecture",
        ["GGUF file, ./real.gguf"],
    ),
    ("OSError: It looks like the config file at '/made/config.json' is not a valid JSON file.", "incomplete-model", ["/made"]),
    (
        "ValueError: Unrecognized model in acme/made. Should have a `model_type` key in its config.json.",
        "incomplete-model",
        ["acme/made"],
    ),
    (
        "OSError: acme/made does not appear to have a file named preprocessor_config.json. Checkout the hub's page",
        "incomplete-model",
        ["preprocessor_config.json"],
    ),
    (
        "OSError: Can't load tokenizer for '/made/model'. If you were trying to load it from",
        "incomplete-model",
        ["/made/model"],
    ),
    (
        'Traceback (most recent call last):\n  File "/made/transformers/configuration_utils.py", line 9, in made\n    made()\n'
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "incomplete-model",
        ["Expecting value"],
    ),
    # Words of huggingface_hub 1.
    (
        "huggingface_hub.errors.EntryNotFoundError: 404 Client Error. Entry Not Found for url: https://made.invalid/config.json.",
        "incomplete-model",
        ["config.json"],
    ),
    (
        "OSError: Consistency check failed: file should be of size 4096 but has size 1024 (model.safetensors).",
        "hub-unreachable",
        ["4096", "1024"],
    ),
    # Words of pydantic 2 and vLLM: a key that a configuration does not have, and a class that could not be imported.
    (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\nmade_key\n"
        "  Unexpected keyword argument [type=unexpected_keyword_argument, input_value=1, input_type=int]",
        "invalid-value",
        ["SpeculativeConfig", "made_key", "Unexpected keyword"],
    ),
    (
        "  Value error, Model architectures ['MadeForCausalLM'] failed to be inspected. Please check the logs for more "
        "details.",
        "broken-installation",
        ["MadeForCausalLM", "could not import"],
    ),
    ("LookupError: made for the test, and known to nobody", "unknown", ["known to nobody"]),
    # Words of vLLM 0.32: lora_model.py, weight_utils.py, models/utils.py, platforms, utils of CUDA graphs.
    (
        "ValueError: While loading /made/adapter, expected target modules in ['q_proj'] but received ['made_proj']. "
        "Please verify",
        "refused-configuration",
        ["/made/adapter", "made_proj"],
    ),
    (
        "ValueError: MadeForCausalLM has no vLLM implementation and the Transformers implementation is not compatible "
        "with vLLM.",
        "unsupported-architecture",
        ["MadeForCausalLM"],
    ),
    (
        "AssertionError: Attempted to load weight (torch.Size([8, 4])) into parameter (torch.Size([16, 4]))",
        "weights-do-not-fit",
        ["[8, 4]", "[16, 4]"],
    ),
    ("ValueError: No valid attention backend found for cuda with made. Reasons: {made}.", "unsupported-backend", ["made"]),
    (
        "ValueError: invalid literal for int() with base 10: 'GPU-00000000-0000-0000-0000-000000000000'",
        "engine-bug",
        ["GPU-00000000"],
    ),
    (
        "ValueError: Cannot provide a placement group of placement_group_specs=[{'GPU': 1.0}] within 1800 seconds.",
        "too-few-gpus",
        ["1800 seconds"],
    ),
    # Words of PyTorch 2: loading, CUDA, ROCm, compiling.
    (
        "RuntimeError: size mismatch for model.made.weight: copying a param with shape torch.Size([2]) from checkpoint",
        "weights-do-not-fit",
        ["model.made.weight"],
    ),
    (
        'Traceback (most recent call last):\n  File "/made/models/made.py", line 9, in load_weights\n    m()\nAssertionError',
        "weights-do-not-fit",
        ["AssertionError"],
    ),
    (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 192.00 "
        "GiB of which "
        "1.00 GiB is free.",
        "cuda-out-of-memory",
        ["2.00 GiB", "192.00 GiB"],
    ),
    ("RuntimeError: HIP error: out of memory", "cuda-out-of-memory", []),
    (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "out-of-memory",
        ["shm"],
    ),
    ("RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.", "driver-too-old", ["PTX"]),
    ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "no-gpu", ["busy"]),
    ("RuntimeError: CUDA error: invalid device ordinal", "too-few-gpus", ["ordinal"]),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", "crashed", ["CUBLAS"]),
    ("HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception.", "crashed", ["HSA"]),
    (
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use 'spawn'",
        "engine-bug",
        ["forked"],
    ),
    ("torch._dynamo.exc.BackendCompilerFailed: backend='made' raised: made", "engine-bug", ["BackendCompilerFailed"]),
    ("made:12:34 [0] NCCL WARN Could not find real path of /sys/class/made", "nccl-failure", ["real path"]),
    # Words of FlashAttention, Triton and their compilers.
    ("RuntimeError: FlashAttention only supports Ampere GPUs or newer.", "unsupported-backend", ["FlashAttention", "Ampere"]),
    (
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 122880, Hardware limit: 101376.",
        "unsupported-backend",
        ["122880", "101376"],
    ),
    ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable.", "no-compiler", ["C compiler"]),
    # The linker's and the kernel's words.
    ("OSError: /home/made/.cache/flashinfer/90/made.so: file too short", "compile-cache", ["/home/made/.cache/flashinfer"]),
    (
        'Traceback (most recent call last):\n  File "/made/torch/_inductor/codecache.py", line 9, in load\n    made()\n'
        "_pickle.UnpicklingError: pickle data was truncated",
        "compile-cache",
        ["truncated"],
    ),
    ("OSError: [Errno 30] Read-only file system: '/made/.cache'", "no-permission", ["/made/.cache"]),
    ("OSError: [Errno 28] No space left on device: '/made/hub/blobs/made'", "disk-full", ["/made/hub"]),
    ("OSError: [Errno 24] Too many open files: '/made/model.safetensors'", "process-limit", ["Too many open files"]),
    ("AttributeError: module 'made' has no attribute 'made_fn'", "broken-installation", ["made_fn"]),
]
TOLD_BY_OTHERS = [
    {"folder": folder, "in_image": False} | case
    for folder in ("told", "told_again", "told_later", "told_anew", "told_last")
    for case in json.loads((CAPTURED.with_name(folder) / "cases.json").read_text())
]
# What ends a server by its own words; the other logs say nothing, and the end decides.
SEEN_IN_LOG = [case for case in CASES if case.end in (USAGE, FAILED) and case.kind not in ("killed", "crashed", "unknown")]


@pytest.mark.parametrize("case", [*CASES, *MADE_CASES], ids=lambda case: case.log)
def test_a_log_gives_what_failed_whose_turn_it_is_and_a_few_of_its_own_lines(case: Case) -> None:
    failure = classify_log(case.text, case.end)
    assert (failure.kind, failure.whose_turn, failure.retry) == (case.kind, case.turn, case.retry), failure.problem
    assert [name for name in case.named if name not in failure.problem] == [], failure.problem
    assert 0 < len(failure.lines) <= MOST_LINES
    assert [line for line in failure.lines if line.removesuffix(" …") not in case.text] == []


@pytest.mark.parametrize(("line", "kind", "named"), MADE)
def test_words_that_no_captured_log_has_tell_what_failed(line: str, kind: FailureClass, named: list[str]) -> None:
    failure = classify_log(line, FAILED)
    assert failure.kind == kind
    assert [name for name in named if name not in failure.problem] == [], failure.problem


def test_every_captured_log_is_a_case_and_names_its_source_and_every_kind_has_one() -> None:
    logs = {path.stem for path in CAPTURED.glob("*.log")}
    listed = set(re.findall(r"^\| `([^`]+)` \|", (CAPTURED / "README.md").read_text(), re.M))
    assert logs == set(BY_LOG) == listed
    assert [case.log for case in CASES if not case.log.startswith(case.kind)] == []
    kinds = {case.kind for case in [*CASES, *MADE_CASES]} | {kind for _, kind, _ in MADE}
    assert kinds == set(get_args(FailureClass)) == set(MEANINGS)


@pytest.mark.parametrize("case", SEEN_IN_LOG, ids=lambda case: case.log)
def test_the_cause_is_found_however_the_lines_end_are_coloured_and_prefixed_and_before_its_consequences(case: Case) -> None:
    plain = classify_log(case.text, case.end)
    coloured = re.sub(r"\([^()]*pid=\d+[^()]*\)", "\x1b[0;36m\\g<0>\x1b[0;0m", case.text)
    variants = {
        "CRLF": case.text.replace("\n", "\r\n"),
        "coloured processes": coloured,
        "coloured lines": "".join(f"\x1b[31m{line}\x1b[0m\n" for line in case.text.split("\n")),
        "compose": "".join(f"vllm-1  | {line}\n" for line in case.text.split("\n")),
        "timestamps": "".join(f"2026-02-24T20:21:58.123456789Z {line}\n" for line in case.text.split("\n")),
        "consequences": f"{case.text}\n{TAIL}{BY_LOG['nccl-failure-watchdog'].text}",
    }
    problems = {name: classify_log(text, case.end).problem for name, text in variants.items()}
    assert problems == dict.fromkeys(variants, plain.problem)


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "ERROR 11-20 12:00:00 core.py:900] ",
        "ERROR 11-20 12:00:00 [core.py:900] ",
        "(EngineCore pid=123) ERROR 11-20 12:00:00 [core.py:900] ",
        "(EngineCore_DP0 pid=123) (Worker_TP1 pid=7) ERROR 11-20 12:00:00 [v1/executor/multiproc_executor.py:492] ",
        "(VllmWorker rank=1 pid=97) ERROR 03-20 23:26:06 [multiproc_executor.py:375] ",
        "(RayWorkerWrapper pid=1463574, ip=192.0.2.1) ",
        "(Worker pid=2291010) [Stage-0] ERROR 03-12 08:22:28 [multiproc_executor.py:800] ",
        "[rank0]: ",
        "[default0]:",
        "[pod/made-5d9c/vllm] ",
        "Nov  3 12:00:00 made vllm[123]: (EngineCore pid=123) ",
        "vllm-1  | (APIServer pid=1) ",
        "[2026-02-24T20:21:58Z] (EngineCore_DP0 pid=6940) ",
    ],
)
@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", "cuda-out-of-memory"),
        ("MemoryError", "out-of-memory"),
        ("  Value error, max_num_batched_tokens must be positive [type=value_error]", "refused-configuration"),
    ],
)
def test_a_cause_is_found_behind_every_prefix(prefix: str, said: str, kind: FailureClass) -> None:
    assert classify_log(f"{prefix}{said}\n", FAILED).kind == kind


OUT_OF_MEMORY, WATCHDOG, STARTED = "cuda-out-of-memory-weights.log", "nccl-failure-watchdog.log", "killed.log"
WAITING, LIMIT = "hub-rate-limit-waiting.log", End(exit_code=1, oom_killed=True)
NEXT_LINE = "(APIServer pid=1) INFO 11-20 13:36:46 [model.py:2152] Using max model len 2048\n"
SAID = "11-20 12:00:00 [core.py:900] torch.OutOfMemoryError: CUDA out of memory\n"
SOURCE_LINES = '  File "worker.py", line 3, in load\n    raise RuntimeError("CUDA out of memory")\nLookupError: \'weight\'\n'
LOGGED = "(APIServer pid=1) ERROR 11-20 12:00:00 [made.py:9] "
REQUESTS = (
    f"{LOGGED}ValueError: Unsupported chat content part type: made\n"
    f"{LOGGED}pydantic_core._pydantic_core.ValidationError: 1 validation error for ChatCompletionRequest\n{LOGGED}made\n"
)
ILLEGAL = "(EngineCore pid=7) torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
DENIED = "Exception in thread Thread-1:\n(EngineCore pid=7) PermissionError: [Errno 13] Permission denied: '/.config'\n"
STATISTICS = "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='stats.made.invalid', port=443): Read timed out.\n"
SMALL = "kv-cache-too-small-gpu.log"
NO_FALLBACK = (
    "ValueError: Selected backend AttentionBackendEnum.MADE is not valid for this configuration. Reason: falling back\n"
)
ASSERTED = (
    'Traceback (most recent call last):\n  File "/made/plugin.py", line 1, in made\nAssertionError\n'
    'Traceback (most recent call last):\n  File "/made/models/made.py", line 1, in load_weights\nAssertionError\n'
)
SHARED_MEMORY = "RuntimeError: unable to write to file </torch_12_3>: No space left on device (28)\n"
WEIGHED = [
    *(("a note or a warning is no cause", [f"(EngineCore pid=123) {level} {SAID}"], KILLED, "killed") for level in QUIET),
    ("a source line of a traceback is no cause", [SOURCE_LINES], FAILED, "unknown"),
    ("the earliest cause wins", [OUT_OF_MEMORY, WATCHDOG], FAILED, "cuda-out-of-memory"),
    ("the earliest cause wins, also the other way", [WATCHDOG, OUT_OF_MEMORY], FAILED, "nccl-failure"),
    ("the memory limit explains an NCCL failure", ["nccl-failure-cuda.log"], LIMIT, "out-of-memory"),
    ("the memory limit explains a silent death", ["killed-worker.log"], LIMIT, "out-of-memory"),
    ("the memory limit explains no other cause", ["unknown-model-hub.log"], LIMIT, "unknown-model"),
    ("a hung server whose log tells a cause failed by it", [OUT_OF_MEMORY], GIVEN_UP, "cuda-out-of-memory"),
    ("a hung server whose process was killed failed by that", ["killed-worker.log"], GIVEN_UP, "killed"),
    ("what the server survived is no cause", ["hub-rate-limit.log", STARTED], KILLED, "killed"),
    ("what came after its start is one", [STARTED, "cuda-out-of-memory-graphs.log"], FAILED, "cuda-out-of-memory"),
    ("a request's error is no cause", [STARTED, REQUESTS, ILLEGAL], FAILED, "crashed"),
    ("a permission that a thread lacks is survived", [DENIED, SMALL], FAILED, "kv-cache-too-small"),
    ("statistics that did not arrive are survived", [STATISTICS, SMALL], FAILED, "kv-cache-too-small"),
    ("a refusal may speak of falling back", [NO_FALLBACK], FAILED, "unsupported-backend"),
    ("a traceback through the frame counts where another one does not", [ASSERTED], FAILED, "weights-do-not-fit"),
    ("shared memory is no disk", [SHARED_MEMORY], FAILED, "out-of-memory"),
    ("a wait for the hub that is over is no cause", [WAITING, NEXT_LINE], GIVEN_UP, "hung"),
    ("a wait for the hub is no cause of a kill", [WAITING], KILLED, "killed"),
]


@pytest.mark.parametrize(("parts", "end", "kind"), [each[1:] for each in WEIGHED], ids=[each[0] for each in WEIGHED])
def test_signs_are_weighed(parts: list[str], end: End, kind: FailureClass) -> None:
    log = "".join(BY_LOG[part.removesuffix(".log")].text if part.endswith(".log") else part for part in parts)
    assert classify_log(log, end).kind == kind


@pytest.mark.parametrize(
    ("end", "kind", "named"),
    [
        (End(exit_code=-9), "killed", "signal 9 (SIGKILL)"),
        (End(exit_code=137), "killed", "signal 9 (SIGKILL)"),
        (End(exit_code=143), "killed", "signal 15 (SIGTERM)"),
        (End(exit_code=-11), "crashed", "signal 11 (SIGSEGV)"),
        (End(exit_code=134), "crashed", "signal 6 (SIGABRT)"),
        (End(exit_code=137, oom_killed=True), "out-of-memory", "memory limit"),
        (End(exit_code=0), "unknown", "exit code 0"),
        (End(exit_code=255), "unknown", "exit code 255"),
        (End(exit_code=None, waited_s=90), "hung", "90 s"),
        (End(exit_code=None), "hung", "does not answer any more"),
    ],
)
@pytest.mark.parametrize("log", ["killed", None])
def test_a_log_without_a_cause_leaves_it_to_the_end(log: str | None, end: End, kind: FailureClass, named: str) -> None:
    failure = classify_log(BY_LOG[log].text if log else "", end)
    assert failure.kind == kind
    assert named in failure.problem
    assert bool(failure.lines) == bool(log)


KEY = "(EngineCore pid=7) ERROR 11-20 12:00:00 [core.py:900] LookupError: 'model'"
BY_KEY = "exit code 1: LookupError: 'model'"
UNDESTROYED = "[rank0]:[W1224 08:50:36 ProcessGroupNCCL.cpp:1524] Warning: destroy_process_group() was not called"
STILL_READ = "".join(BY_LOG["broken-installation-spawned-main"].text.partition("Fatal Python error")[1:])
DISK = "OSError: the disk is gone"
REDACTED = "vllm: error: unrecognized arguments: --token [redacted]"
TOLD: dict[str, tuple[str, End, str, list[str]]] = {
    "noise of the end": (f"{KEY}\n{TAIL}asyncio.exceptions.CancelledError\n{UNDESTROYED}\n", FAILED, BY_KEY, [KEY]),
    "threads that still read": (f"{KEY}\n{STILL_READ}", FAILED, BY_KEY, [KEY]),
    "an exception and not a kill": (f"{KEY}\n{BY_LOG['killed-engine-starting'].text}", FAILED, BY_KEY, [KEY]),
    "the last first": (f"{DISK}\n\nDuring handling of it:\n\n{KEY}\n", FAILED, BY_KEY, [KEY, DISK]),
    "a last line without a message": ("RuntimeError:\n\n", FAILED, "exit code 1: RuntimeError:", ["RuntimeError:"]),
    "nothing but a consequence": ("KeyboardInterrupt\nthe end\n", FAILED, "KeyboardInterrupt", ["KeyboardInterrupt"]),
    "nothing but vLLM's consequences": (TAIL, FAILED, "Engine core initialization failed", [TAIL.splitlines()[-1]]),
    "a hung server's exception": (f"{DISK}\nwaiting\n", GIVEN_UP, "last line: waiting", [DISK, "waiting", DISK]),
    "a redacted secret": (REDACTED, USAGE, "--token [redacted]", [REDACTED]),
}


@pytest.mark.parametrize(("log", "end", "problem", "lines"), TOLD.values(), ids=TOLD.keys())
def test_a_failure_is_told_by_its_exceptions_and_their_lines(log: str, end: End, problem: str, lines: list[str]) -> None:
    failure = classify_log(log, end)
    assert problem in failure.problem
    assert failure.lines == lines


@pytest.mark.parametrize("prefix", ["", "(EngineCore pid=7) ", "(EngineCore pid=7) ERROR 11-20 12:00:00 [core.py:900] "])
def test_an_exception_without_a_message_takes_the_line_in_which_it_begins(prefix: str) -> None:
    said = ["RuntimeError: ", "", "        The layer has no weights.", "        There are 3 of them.", "    "]
    log = "".join(f"{prefix}{line}\n" for line in said) + TAIL
    failure = classify_log(log, FAILED)
    assert failure.problem == "the server ended with exit code 1: RuntimeError: The layer has no weights."
    assert failure.lines == [f"{prefix}RuntimeError:", f"{prefix}        The layer has no weights."]


@pytest.mark.parametrize(
    ("log", "telling"),
    [
        ("kv-cache-too-small-gpu", "the estimated maximum model length is 49440"),
        ("no-compiler-nvcc", "/bin/sh: 1: /nowhere/bin/nvcc: not found"),
        ("killed-engine-h200", "engine core exited unexpectedly"),
        # of a cause over several lines
        ("nccl-failure-duplicate-gpu", "^Duplicate GPU detected"),
        ("cuda-out-of-memory-in-nccl", "Cuda failure 'out of memory'"),
    ],
)
def test_the_telling_line_stands_first(log: str, telling: str) -> None:
    assert re.search(telling, classify_log(BY_LOG[log].text, BY_LOG[log].end).lines[0])


def test_a_line_without_end_is_cut() -> None:
    failure = classify_log("ValueError: " + "x" * 100_000, FAILED)
    assert len(failure.lines[0]) < 1100
    assert len(failure.problem) < 500


def test_every_sign_is_shown_by_a_captured_log_or_else_by_a_made_line() -> None:
    signs = [*SIGNS, *GENERAL_SIGNS, *LAST_SIGNS, *SIGNS_OF_CLASSES]
    patterns = {sign.pattern.pattern for sign in signs}
    by_log = {
        sign.pattern.pattern
        for sign in signs
        for case in [*CASES, *MADE_CASES]
        if sign.kind == case.kind and sign.pattern.search(unprefixed(case.text))
    }
    told = [(case["kinds"], unprefixed(text_of_others(case))) for case in TOLD_BY_OTHERS]
    by_log |= {
        sign.pattern.pattern for sign in signs for kinds, text in told if sign.kind in kinds and sign.pattern.search(text)
    }
    lines = [*(said for said, _, _ in MADE), *(said for said, *_ in LINES_SAID), *(said for said, *_ in LINES)]
    by_line = {sign.pattern.pattern for sign in signs for line in lines if sign.pattern.search(line)}
    assert by_log | by_line == patterns


def text_of_others(case: dict[str, Any]) -> str:
    return (CAPTURED.with_name(case["folder"]) / f"{case['log']}.log").read_text()


def unprefixed(text: str) -> str:
    return re.sub(r"^(?:\([^()]*pid=\d+[^()]*\) |ERROR \S+ \S+ \S+\] ?)*", "", text, flags=re.M)


@pytest.mark.thorough
@given(st.text(), st.integers(-64, 255) | st.none(), st.booleans())
def test_any_log_and_any_end_have_a_failure(log: str, exit_code: int | None, oom_killed: bool) -> None:
    failure = classify_log(log, End(exit_code=exit_code, oom_killed=oom_killed))
    assert failure.problem
    assert failure.remedy


HOSTILE = (
    *("Model architectures ", "Model architectures [a", "Unknown quantization method: ", "NCCL error", "NCCL error: "),
    *("NCCL error: a(", "NCCL WARN ncclInvalidUsage ", "out of memory ", "out of memory\n", "ConnectError: "),
    *("ConnectError: a\n", "LocalEntryNotFoundError: ", "Cannot access gated repo for url https://a/b/c "),
    *("error: argument a: 1 validation error for a ", "Server error '500 ", "RuntimeError:\n", "sh: 1: ", "sh: 1: nvcc"),
    *("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=A,", "(pid=", "pid=1", "a | ", "a.A"),
    *("1", " ", "\n"),
)


@pytest.mark.thorough
@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("opening", ["", "(pid=", "(EngineCore pid=1) ERROR 11-20 12:00:00 [core.py:900] "])
def test_a_hostile_log_is_read_in_seconds(opening: str, piece: str) -> None:
    """Of a pattern whose work grows with the square of the log or more, one of these takes minutes."""
    log = opening + piece * (100_000 // len(piece))
    began_s = time.process_time()
    assert classify_log(log, KILLED).problem
    assert time.process_time() - began_s < HOSTILE_LIMIT_S


@pytest.mark.thorough
def test_the_lines_of_a_hostile_log_are_read_in_seconds() -> None:
    """The same in lines, as long as what is read of one."""
    for piece in HOSTILE:
        log = f"{piece * (2000 // len(piece))}\n" * 40
        began_s = time.process_time()
        assert classify_log(log, KILLED).problem
        assert time.process_time() - began_s < HOSTILE_LIMIT_S, piece


def test_a_long_log_is_read_in_seconds() -> None:
    lines = f"{DISK}\n{KEY}\n" * 100
    failure = classify_log(lines * 500, KILLED)
    assert failure.kind == "killed"


@pytest.mark.parametrize("case", TOLD_BY_OTHERS, ids=[f"{case['folder']}-{case['log']}" for case in TOLD_BY_OTHERS])
def test_what_others_told_of_has_the_class_and_turn_that_were_decided_by_hand(case: dict[str, Any]) -> None:
    end = End(exit_code=case["exit_code"], waited_s=case["waited_s"])
    failure = classify_log(text_of_others(case), end, in_image=case["in_image"])
    is_right = failure.kind in case["kinds"] and failure.whose_turn in case["turns"]
    assert is_right != case.get("missed", False), failure.problem
    assert "{" not in failure.remedy


LINKED = "ImportError: /made/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"
RUNTIME = "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory"
CUBIN = "RuntimeError: flashinfer-cubin version (0.6.13) does not match flashinfer version (0.6.14)."


@pytest.mark.parametrize(("said", "has_remedy"), [(LINKED, False), (RUNTIME, False), (CUBIN, True)])
def test_a_broken_package_is_the_images_owners_or_on_a_bare_host_the_operators(said: str, has_remedy: bool) -> None:
    """What a sign says to do itself is kept."""
    bare, inside = classify_log(said, FAILED), classify_log(said, FAILED, in_image=True)
    assert (bare.kind, bare.whose_turn, bare.retry) == ("broken-installation", "host", False)
    remedy = bare.remedy if has_remedy else IN_AN_IMAGE["broken-installation"].remedy
    assert inside == bare.model_copy(update={"whose_turn": "release", "remedy": remedy})


@pytest.mark.parametrize(
    ("said", "kind", "turn"),
    [
        ("RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist", "no-compiler", "release"),
        # The driver is the host's, also where the server runs from an image.
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", "no-gpu", "host"),
        ("RuntimeError: CUDA driver version is insufficient for CUDA runtime version", "driver-too-old", "host"),
    ],
)
def test_an_images_owner_gets_what_the_image_lacks_and_nothing_of_the_hosts(said: str, kind: str, turn: str) -> None:
    failure = classify_log(said, FAILED, in_image=True)
    assert (failure.kind, failure.whose_turn) == (kind, turn)
