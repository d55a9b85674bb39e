"""Failure classes on real logs: captured/README.md tells where each comes from."""

import re
import time
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_qualify.engine.failure import MEANINGS, MOST_LINES, SIGNS, End, Failure, FailureClass, Turn, classify_log

CAPTURED = Path(__file__).parent / "captured"
USAGE = End(exit_code=2)
FAILED = End(exit_code=1)
KILLED = End(exit_code=-9)
# Some hundred times what it takes.
HOSTILE_LIMIT_S = 20.0
GIVEN_UP = End(exit_code=None, waited_s=300)
TAIL = """(APIServer pid=223598)     raise RuntimeError("Engine core initialization failed. "
(APIServer pid=223598)                        "See root cause above. "
(APIServer pid=223598) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


class Case(NamedTuple):
    log: str
    end: End
    kind: FailureClass
    turn: Turn
    retry: bool
    named: list[str]

    @property
    def text(self) -> str:
        return (CAPTURED / f"{self.log}.log").read_text()


class Made(NamedTuple):
    """A line made for the test around words that we could not capture, and where they stand."""

    line: str
    end: End
    kind: FailureClass
    named: list[str]
    source: str


CASES = [
    Case("unknown-flag-config", USAGE, "unknown-flag", "recipe", False, ["--no-such-flag"]),
    Case("unknown-flag-config-value", USAGE, "unknown-flag", "recipe", False, ["--kv-cache-dtypo"]),
    Case("unknown-flag-command-line", USAGE, "unknown-flag", "recipe", False, ["--no-such-flag"]),
    Case("invalid-value-number", USAGE, "invalid-value", "recipe", False, ["--max-num-seqs", "banana"]),
    Case("invalid-value-choice", USAGE, "invalid-value", "recipe", False, ["--dtype", "bfloat17"]),
    Case("invalid-value-json", USAGE, "invalid-value", "recipe", False, ["--compilation-config", "Invalid JSON"]),
    Case("invalid-value-unknown-field", USAGE, "invalid-value", "recipe", False, ["pass_config.enable_no_such_pass"]),
    Case("unknown-model-folder", FAILED, "unknown-model", "recipe", False, ["/models/missing"]),
    Case("unknown-model-hub", FAILED, "unknown-model", "recipe", False, ["acme/no-such-model"]),
    Case("unknown-revision", FAILED, "unknown-revision", "recipe", False, ["acme/tiny-1b", "deadbeef"]),
    Case("gated-model-no-token", FAILED, "gated-model", "hub", False, ["acme/gated-8b", "no account"]),
    Case("gated-model-not-listed", FAILED, "gated-model", "hub", False, ["acme/gated-8b", "not in its list"]),
    Case("hub-rate-limit", FAILED, "hub-rate-limit", "hub", True, ["acme/tiny-1b", "429"]),
    Case("hub-rate-limit-waiting", End(exit_code=None, waited_s=200), "hub-rate-limit", "hub", True, ["244.0 s", "429"]),
    Case("hub-rate-limit-older-client", FAILED, "hub-rate-limit", "hub", True, ["acme/tiny-1b", "429"]),
    Case("cuda-out-of-memory-weights", FAILED, "cuda-out-of-memory", "recipe", False, ["GPU 0", "512.00 MiB", "139.80 GiB"]),
    Case("cuda-out-of-memory-loading-h200", FAILED, "cuda-out-of-memory", "recipe", False, ["weights", "GPU 0", "160.00 MiB"]),
    Case("cuda-out-of-memory-fragmented", FAILED, "cuda-out-of-memory", "recipe", False, ["70.00 GiB", "13.99 GiB"]),
    Case("cuda-out-of-memory-fraction", FAILED, "cuda-out-of-memory", "recipe", False, ["1024.00 MiB", "126.29 GiB"]),
    Case("cuda-out-of-memory-shared", FAILED, "cuda-out-of-memory", "recipe", False, ["512.00 MiB", "499.56 MiB"]),
    Case("cuda-out-of-memory-capture", FAILED, "cuda-out-of-memory", "recipe", False, ["1024.00 MiB", "129.12 MiB"]),
    Case("cuda-out-of-memory-graphs", FAILED, "cuda-out-of-memory", "recipe", False, []),
    Case("cuda-out-of-memory-context", FAILED, "cuda-out-of-memory", "recipe", False, []),
    Case("cuda-out-of-memory-cublas", FAILED, "cuda-out-of-memory", "recipe", False, ["cuBLAS", "cublasCreate"]),
    Case("cuda-out-of-memory-in-nccl", FAILED, "cuda-out-of-memory", "recipe", False, ["NCCL"]),
    Case("cuda-out-of-memory-sampler", FAILED, "cuda-out-of-memory", "recipe", False, ["256 requests"]),
    Case("gpu-memory-in-use", FAILED, "gpu-memory-in-use", "host", True, ["7.34", "139.8", "0.92", "128.62"]),
    Case("kv-cache-too-small-without-estimate", FAILED, "kv-cache-too-small", "recipe", False, ["1000000", "2.38"]),
    Case("unsupported-quantization-fp8", FAILED, "unsupported-quantization", "recipe", False, ["fp8", "75", "70"]),
    Case("unsupported-quantization-awq", FAILED, "unsupported-quantization", "recipe", False, ["awq", "75", "70"]),
    Case("unsupported-quantization-scheme", FAILED, "unsupported-quantization", "recipe", False, ["scheme", "75", "70"]),
    Case("driver-too-old-warning", FAILED, "driver-too-old", "host", False, ["CUDA 12.8"]),
    Case("driver-too-old-error", FAILED, "driver-too-old", "host", False, ["CUDA 12.4"]),
    Case("driver-too-old-803", FAILED, "driver-too-old", "host", False, ["Error 803"]),
    Case("driver-too-old-803-warning", FAILED, "driver-too-old", "host", False, ["Error 803"]),
    Case("driver-too-old-804", FAILED, "driver-too-old", "host", False, ["Error 804"]),
    Case("driver-too-old-insufficient", FAILED, "driver-too-old", "host", False, ["insufficient"]),
    Case("no-gpu-802", FAILED, "no-gpu", "host", False, ["Error 802"]),
    Case("no-gpu-device-type", FAILED, "no-gpu", "host", False, ["Failed to infer device type"]),
    Case("no-gpu-driver", FAILED, "no-gpu", "host", False, ["Found no NVIDIA driver"]),
    Case("no-gpu-libcuda", FAILED, "no-gpu", "host", False, ["libcuda.so.1"]),
    Case("nccl-failure-cuda", FAILED, "nccl-failure", "host", False, ["unhandled cuda error"]),
    Case("nccl-failure-interface", FAILED, "nccl-failure", "host", False, ["no network interface"]),
    Case("nccl-failure-interface-vllm", FAILED, "nccl-failure", "host", False, ["invalid usage"]),
    Case("nccl-failure-remote", FAILED, "nccl-failure", "host", False, ["remote process exited"]),
    Case("nccl-failure-shared-memory", FAILED, "nccl-failure", "host", False, ["/dev/shm/nccl-6077IZ", "9637888"]),
    Case("nccl-failure-shared-memory-debug", FAILED, "nccl-failure", "host", False, ["/dev/shm/nccl-BtLPqf"]),
    Case("nccl-failure-watchdog", FAILED, "nccl-failure", "host", True, ["ALLREDUCE", "10017 ms"]),
    Case("nccl-failure-watchdog-killed", FAILED, "nccl-failure", "host", True, ["ALLREDUCE", "10010 ms"]),
    Case("out-of-memory-bad-alloc", FAILED, "out-of-memory", "host", False, ["std::bad_alloc"]),
    Case("out-of-memory-mapping", FAILED, "out-of-memory", "host", False, ["Errno 12"]),
    Case("killed-worker", End(exit_code=0), "killed", "host", True, ["VllmWorker-0", "without telling why"]),
    Case("killed-engine-starting", FAILED, "killed", "host", True, ["EngineCore", "signal 9 (SIGKILL)"]),
    Case("hung-waiting-for-engine", End(exit_code=None, waited_s=45), "hung", "release", False, ["Waiting for 1 local"]),
    Case("hub-unreachable-503", FAILED, "hub-unreachable", "hub", True, ["acme/tiny-1b", "503 Service Unavailable"]),
    Case("hub-unreachable-refused", FAILED, "hub-unreachable", "hub", True, ["Connection refused"]),
    Case("hub-unreachable-name", FAILED, "hub-unreachable", "hub", True, ["hub.invalid", "Name or service not known"]),
    Case("not-in-cache", FAILED, "not-in-cache", "host", False, ["HF_HUB_OFFLINE"]),
    Case("port-in-use", FAILED, "port-in-use", "host", True, ["Address already in use"]),
    Case("unsupported-architecture", FAILED, "unsupported-architecture", "release", False, ["NoSuchForCausalLM"]),
    Case("refused-configuration-length", FAILED, "refused-configuration", "recipe", False, ["4096", "2048"]),
    Case("cuda-out-of-memory-reading", FAILED, "cuda-out-of-memory", "recipe", False, ["10.00 GiB", "9.29 GiB", "139.80 GiB"]),
    Case("no-gpu-reading", FAILED, "no-gpu", "host", False, ["No CUDA GPUs"]),
    Case("nccl-failure-duplicate-gpu", FAILED, "nccl-failure", "host", False, ["rank 0", "rank 1"]),
    Case("gated-model-bad-token", FAILED, "gated-model", "hub", False, ["acme/tiny-1b", "401"]),
    Case("refused-configuration-heads", FAILED, "refused-configuration", "recipe", False, ["heads (4)", "parallel size (3)"]),
    Case("kv-cache-too-small-cpu", FAILED, "kv-cache-too-small", "recipe", False, ["1000000", "2.38", "1.0", "419200"]),
    Case("unsupported-quantization-bitsandbytes", FAILED, "unsupported-quantization", "recipe", False, ["bitsandbytes"]),
    Case("unsupported-quantization-no-such", FAILED, "unsupported-quantization", "recipe", False, ["nosuch"]),
    Case("incomplete-model-no-weights", FAILED, "incomplete-model", "release", False, ["/models/no-weights"]),
    Case("incomplete-model-broken-weights", FAILED, "incomplete-model", "release", False, ["incomplete metadata"]),
    Case("unknown-model-no-config", FAILED, "unknown-model", "recipe", False, ["/models/no-config"]),
    Case("kv-cache-too-small-none-left", FAILED, "kv-cache-too-small", "recipe", False, ["no memory"]),
    Case("out-of-memory-limit", FAILED, "out-of-memory", "host", False, ["1073479680"]),
    Case("out-of-memory-import", FAILED, "out-of-memory", "host", False, ["MemoryError"]),
    Case("out-of-memory-at-start", FAILED, "out-of-memory", "host", False, ["0.99"]),
    Case("broken-installation-libraries", FAILED, "broken-installation", "host", False, ["nvidia_cutlass_dsl", "libraries"]),
    Case("broken-installation-spawned-main", FAILED, "broken-installation", "host", False, ["whenever it is imported"]),
    Case("broken-installation-module", FAILED, "broken-installation", "host", False, ["No module named 'msgspec'"]),
    Case("broken-installation-shared-library", FAILED, "broken-installation", "host", False, ["libzmq"]),
    Case("no-compiler-c", FAILED, "no-compiler", "host", False, ["Permission denied: ''"]),
    Case("no-compiler-cpp", FAILED, "no-compiler", "host", False, ["No working C++ compiler", "g++"]),
    Case("too-few-gpus", FAILED, "too-few-gpus", "host", False, ["4 ranks", "2 GPUs"]),
    Case("unsupported-backend-attention", FAILED, "unsupported-backend", "recipe", False, ["CUTLASS_MLA", "capability"]),
    Case("unsupported-backend-moe", FAILED, "unsupported-backend", "recipe", False, ["FP8", "FLASHINFER_TRTLLM", "device"]),
    Case("invalid-value-attention-backend", FAILED, "invalid-value", "recipe", False, ["FLASHY"]),
    Case("refused-configuration-quantization", FAILED, "refused-configuration", "recipe", False, ["awq"]),
    Case("gpu-memory-in-use-given-back", FAILED, "gpu-memory-in-use", "host", True, ["89.76", "90.46"]),
    Case("gpu-memory-in-use-h200", FAILED, "gpu-memory-in-use", "host", True, ["100.89", "139.8", "0.95", "132.81"]),
    Case("kv-cache-too-small-none-left-gpu", FAILED, "kv-cache-too-small", "recipe", False, ["no memory"]),
    Case("kv-cache-too-small-gpu", FAILED, "kv-cache-too-small", "recipe", False, ["131072", "16.0", "6.04", "49440"]),
    Case("no-compiler-nvcc", FAILED, "no-compiler", "host", False, ["/nowhere/bin/nvcc"]),
    Case("killed-engine-h200", End(exit_code=0), "killed", "host", True, ["engine core"]),
    Case("port-in-use-h200", FAILED, "port-in-use", "host", True, ["Address already in use"]),
    Case("killed", KILLED, "killed", "host", True, ["signal 9 (SIGKILL)"]),
    Case("killed-engine", End(exit_code=0), "killed", "host", True, ["engine core"]),
    Case("killed-terminated", End(exit_code=0), "killed", "host", True, ["stopped from outside"]),
    Case("crashed", End(exit_code=-11), "crashed", "release", False, ["SIGSEGV"]),
    Case("crashed-engine", End(exit_code=0), "crashed", "release", False, ["SIGSEGV"]),
    Case("hung", End(exit_code=None, waited_s=45), "hung", "release", False, ["45 s"]),
    Case("hung-engine-stopped", End(exit_code=None, waited_s=120), "hung", "release", False, ["120 s"]),
    Case(
        "unknown-weights", FAILED, "unknown", "release", False, ["no module or parameter named 'layers.0.mlp.down_proj.weight'"]
    ),
    Case("unknown-first-completion", End(exit_code=0), "unknown", "release", False, ["head_dim=16"]),
]
BY_LOG = {case.log: case for case in CASES}
MADE = [
    Made(
        "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist, as made for the test",
        FAILED,
        "no-compiler",
        ["nvcc", "/usr/local/cuda"],
        "https://github.com/vllm-project/vllm/issues/49497",
    ),
    Made(
        "(APIServer pid=1) ERROR 11-20 12:00:00 [made.py:1] made: Engine core proc EngineCore_DP0 died unexpectedly",
        FAILED,
        "killed",
        ["EngineCore_DP0"],
        "https://github.com/vllm-project/vllm/issues/32468",
    ),
    Made(
        "made: the container has an unsatisfied condition: cuda>=12.9, says its runtime",
        FAILED,
        "driver-too-old",
        ["cuda>=12.9"],
        "https://github.com/autowarefoundation/autoware/discussions/2961",
    ),
]
# What ends a server by its own words; the other logs say nothing, and the end decides.
SEEN_IN_LOG = [case for case in CASES if case.end in (USAGE, FAILED) and case.kind not in ("killed", "crashed", "unknown")]


def read(log: str, end: End | None = None) -> Failure:
    case = BY_LOG[log]
    return classify_log(case.text, end or case.end)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.log)
def test_a_captured_log_gives_what_failed_whose_turn_it_is_and_a_few_of_its_own_lines(case: Case) -> None:
    failure = classify_log(case.text, case.end)
    assert (failure.kind, failure.whose_turn, failure.retry) == (case.kind, case.turn, case.retry), failure.problem
    assert [name for name in case.named if name not in failure.problem] == [], failure.problem
    assert 0 < len(failure.lines) <= MOST_LINES
    assert [line for line in failure.lines if line.removesuffix(" …") not in case.text] == []


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.kind)
def test_words_that_no_captured_log_has_tell_what_failed(made: Made) -> None:
    failure = classify_log(made.line, made.end)
    assert failure.kind == made.kind
    assert [name for name in made.named if name not in failure.problem] == [], failure.problem


def test_every_captured_log_is_a_case_and_names_its_source() -> None:
    logs = {path.stem for path in CAPTURED.glob("*.log")}
    listed = set(re.findall(r"^\| `([^`]+)` \|", (CAPTURED / "README.md").read_text(), re.M))
    assert logs == set(BY_LOG)
    assert listed == logs


def test_every_kind_has_a_captured_log_and_a_meaning() -> None:
    assert {case.kind for case in CASES} == set(get_args(FailureClass)) == set(MEANINGS)


def test_a_captured_log_is_named_after_its_kind() -> None:
    assert [case.log for case in CASES if not case.log.startswith(case.kind)] == []


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
    assert {name: classify_log(text, case.end).problem for name, text in variants.items()} == dict.fromkeys(
        variants, plain.problem
    )


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


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING"])
def test_notes_and_warnings_are_no_causes(level: str) -> None:
    said = f"(EngineCore pid=123) {level} 11-20 12:00:00 [core.py:900] torch.OutOfMemoryError: CUDA out of memory\n"
    assert classify_log(said, KILLED).kind == "killed"


def test_source_lines_of_a_traceback_are_no_causes() -> None:
    said = '  File "worker.py", line 3, in load\n    raise RuntimeError("CUDA out of memory")\nKeyError: \'weight\'\n'
    assert classify_log(said, FAILED).kind == "unknown"


def test_the_earliest_cause_wins() -> None:
    memory, watchdog = BY_LOG["cuda-out-of-memory-weights"].text, BY_LOG["nccl-failure-watchdog"].text
    assert classify_log(memory + watchdog, FAILED).kind == "cuda-out-of-memory"
    assert classify_log(watchdog + memory, FAILED).kind == "nccl-failure"


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


def test_the_memory_limit_explains_an_nccl_failure_and_a_silent_death_but_no_other_cause() -> None:
    limit = End(exit_code=1, oom_killed=True)
    assert read("nccl-failure-cuda", limit).kind == "out-of-memory"
    assert read("killed-worker", limit).kind == "out-of-memory"
    assert read("unknown-model-hub", limit).kind == "unknown-model"


def test_a_hung_server_whose_log_tells_a_cause_failed_by_that_cause() -> None:
    assert read("cuda-out-of-memory-weights", GIVEN_UP).kind == "cuda-out-of-memory"
    assert read("killed-worker", GIVEN_UP).kind == "killed"


def test_what_the_server_survived_is_no_cause() -> None:
    started = BY_LOG["killed"].text
    assert classify_log(BY_LOG["hub-rate-limit"].text + started, KILLED).kind == "killed"
    assert classify_log(started + BY_LOG["cuda-out-of-memory-graphs"].text, FAILED).kind == "cuda-out-of-memory"


def test_a_wait_for_the_hub_that_is_over_is_no_cause() -> None:
    waited = BY_LOG["hub-rate-limit-waiting"].text
    assert (
        classify_log(waited + "(APIServer pid=1) INFO 11-20 13:36:46 [model.py:2152] Using max model len 2048\n", GIVEN_UP).kind
        == "hung"
    )
    assert classify_log(waited, KILLED).kind == "killed"


def test_an_unknown_failure_shows_its_exception_and_not_the_noise_of_the_end() -> None:
    log = (
        "Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-20 12:00:00 [core.py:900] KeyError: 'model.layers.0.weight'\n"
        f"{TAIL}"
        "asyncio.exceptions.CancelledError\n"
        "[rank0]:[W1224 08:50:36 ProcessGroupNCCL.cpp:1524] Warning: destroy_process_group() was not called\n"
    )
    failure = classify_log(log, FAILED)
    assert failure.kind == "unknown"
    assert failure.lines == ["(EngineCore pid=7) ERROR 11-20 12:00:00 [core.py:900] KeyError: 'model.layers.0.weight'"]
    assert failure.problem == "the server ended with exit code 1: KeyError: 'model.layers.0.weight'"


@pytest.mark.parametrize("prefix", ["", "(EngineCore pid=7) ", "(EngineCore pid=7) ERROR 11-20 12:00:00 [core.py:900] "])
def test_an_exception_without_a_message_takes_the_line_in_which_it_begins(prefix: str) -> None:
    said = ["RuntimeError: ", "", "        The layer has no weights.", "        There are 3 of them.", "    "]
    log = "".join(f"{prefix}{line}\n" for line in said) + TAIL
    failure = classify_log(log, FAILED)
    assert failure.problem == "the server ended with exit code 1: RuntimeError: The layer has no weights."
    assert failure.lines == [f"{prefix}RuntimeError:", f"{prefix}        The layer has no weights."]


def test_an_exception_without_a_message_may_be_the_last_line() -> None:
    assert classify_log("RuntimeError:\n\n", FAILED).problem == "the server ended with exit code 1: RuntimeError:"
    assert classify_log("KeyboardInterrupt\nthe end\n", FAILED).lines == ["KeyboardInterrupt"]


def test_an_interpreter_that_ends_while_its_threads_read_is_a_consequence() -> None:
    end = BY_LOG["broken-installation-spawned-main"].text.partition("Fatal Python error")
    assert "KeyError: 'model'" in classify_log("KeyError: 'model'\n" + end[1] + end[2], FAILED).problem


def test_of_several_exceptions_the_last_is_shown_first() -> None:
    log = "OSError: the disk is gone\n\nDuring handling of it:\n\nKeyError: 'model'\n"
    assert classify_log(log, FAILED).lines == ["KeyError: 'model'", "OSError: the disk is gone"]


@pytest.mark.parametrize(
    ("log", "telling"),
    [
        ("kv-cache-too-small-gpu", "the estimated maximum model length is 49440"),
        ("no-compiler-nvcc", "/bin/sh: 1: /nowhere/bin/nvcc: not found"),
        ("killed-engine-h200", "engine core exited unexpectedly"),
    ],
)
def test_the_telling_line_stands_first(log: str, telling: str) -> None:
    assert telling in read(log).lines[0]


def test_of_a_cause_over_several_lines_the_most_telling_is_shown_first() -> None:
    assert read("nccl-failure-duplicate-gpu").lines[0].startswith("Duplicate GPU detected")
    assert "Cuda failure 'out of memory'" in read("cuda-out-of-memory-in-nccl").lines[0]


def test_a_process_that_ended_by_an_exception_was_not_killed() -> None:
    log = "(Worker pid=7) ERROR 11-20 12:00:00 [worker.py:9] KeyError: 'model'\n" + BY_LOG["killed-engine-starting"].text
    failure = classify_log(log, FAILED)
    assert failure.kind == "unknown"
    assert "KeyError: 'model'" in failure.problem


def test_a_hung_server_shows_an_exception_that_it_did_not_end_by() -> None:
    failure = classify_log("ValueError: no such layer\nstill waiting\n", GIVEN_UP)
    assert failure.kind == "hung"
    assert failure.lines[0] == "ValueError: no such layer"


def test_an_unknown_failure_with_nothing_but_consequences_shows_those() -> None:
    assert "Engine core initialization failed" in classify_log(TAIL, FAILED).problem


def test_a_redacted_secret_stays_redacted() -> None:
    failure = classify_log("vllm: error: unrecognized arguments: --token [redacted]\n", USAGE)
    assert failure.problem.endswith("--token [redacted]")


def test_a_line_without_end_is_cut() -> None:
    failure = classify_log("ValueError: " + "x" * 100_000, FAILED)
    assert len(failure.lines[0]) < 1100
    assert len(failure.problem) < 500


def test_every_sign_is_shown_by_a_captured_log_or_else_by_a_made_line() -> None:
    patterns = {sign.pattern.pattern for sign in SIGNS}
    by_log = {
        sign.pattern.pattern
        for sign in SIGNS
        for case in CASES
        if sign.kind == case.kind and sign.pattern.search(unprefixed(case.text))
    }
    by_line = {sign.pattern.pattern for sign in SIGNS for made in MADE if sign.pattern.search(made.line)}
    assert by_log | by_line == patterns
    assert by_log & by_line == set()


def unprefixed(text: str) -> str:
    return re.sub(r"^(?:\([^()]*pid=\d+[^()]*\) |ERROR \S+ \S+ \S+\] ?)*", "", text, flags=re.M)


@pytest.mark.thorough
@given(st.text(), st.integers(-64, 255) | st.none(), st.booleans())
def test_any_log_and_any_end_have_a_failure(log: str, exit_code: int | None, oom_killed: bool) -> None:
    failure = classify_log(log, End(exit_code=exit_code, oom_killed=oom_killed))
    assert failure.problem
    assert failure.remedy


HOSTILE = [
    "Model architectures ",
    "Model architectures [a",
    "Unknown quantization method: ",
    "NCCL error",
    "NCCL error: ",
    "NCCL error: a(",
    "NCCL WARN ncclInvalidUsage ",
    "out of memory ",
    "out of memory\n",
    "ConnectError: ",
    "ConnectError: a\n",
    "LocalEntryNotFoundError: ",
    "Cannot access gated repo for url https://a/b/c ",
    "error: argument a: 1 validation error for a ",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=A,",
    "Server error '500 ",
    "RuntimeError:\n",
    "sh: 1: ",
    "sh: 1: nvcc",
    "(pid=",
    "pid=1",
    "a | ",
    "a.A",
    "1",
    " ",
    "\n",
]


@pytest.mark.thorough
@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("opening", ["", "(pid=", "(EngineCore pid=1) ERROR 11-20 12:00:00 [core.py:900] "])
def test_a_hostile_log_is_read_in_seconds(opening: str, piece: str) -> None:
    """Of a pattern whose work grows with the square of the log or more, one of these takes minutes."""
    log = opening + piece * (200_000 // len(piece))
    began_s = time.process_time()
    assert classify_log(log, KILLED).problem
    assert time.process_time() - began_s < HOSTILE_LIMIT_S


@pytest.mark.thorough
def test_the_lines_of_a_hostile_log_are_read_in_seconds() -> None:
    """The same in lines, as long as what is read of one."""
    for piece in HOSTILE:
        log = f"{piece * (2000 // len(piece))}\n" * 100
        began_s = time.process_time()
        assert classify_log(log, KILLED).problem
        assert time.process_time() - began_s < HOSTILE_LIMIT_S, piece


def test_a_long_log_is_read_in_seconds() -> None:
    lines = BY_LOG["hub-unreachable-refused"].text.replace("We couldn't connect", "We waited for it")
    failure = classify_log(lines * 500, KILLED)
    assert failure.kind == "killed"
