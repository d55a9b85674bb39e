"""What a sign matches, what it leaves alone, and whose turn it names."""

from pathlib import Path

import pytest

from tests.builders.failures import CASES, FAILED, MADE_CASES
from tests.builders.signs import LINES, NCCL, SAID
from vllm_qualify.engine.failure.classify import READY, classify_log
from vllm_qualify.engine.failure.meanings import FailureClass, Turn
from vllm_qualify.engine.failure.signs import GENERAL_SIGNS, LAST_SIGNS, SIGNS

GPU_LOGS = Path(__file__).parents[3] / "shared" / "data" / "h200"
STARTS = Path(__file__).parents[1] / "evidence" / "captured" / "startup"
HEALTHY = [
    *sorted(STARTS.glob("*.log")),
    # Only where the logs of GPU runs are.
    *sorted(path for path in GPU_LOGS.glob("*.server.log") if not path.name.startswith("fails-")),
]
# What healthy starts log, too.
SURVIVED = [
    f"{NCCL}NUMA auto-detection is off",
    f'{NCCL}Missing "iommu=pt" from the kernel command line which can lead to system instability or hang!',
    f"{NCCL}Ignoring the value of NCCL_MADE",
    f"{NCCL}Retrying the connection to 192.0.2.1",
    f"{NCCL}Kernel is older than 5.1, which CAN LEAD TO hangs",
    f"{NCCL}NET/Plugin: made",
    "pynvml.NVMLError_NotSupported: Not Supported",
    "ERROR 11-20 12:00:00 [config.py:128] Error retrieving safetensors: Repo id must be in the form 'repo_name' or "
    "'namespace/repo_name': '/made'. Use `repo_type` argument if needed.",
    "vm:31685:31685 [0] NCCL INFO ncclOsDlopen(libnccl-env.so) failed: libnccl-env.so: cannot open shared object file: No such "
    "file or directory",
    "[2026-01-01 00:00:00,000 W 1 1] made.cc:9: Failed to connect to GCS at address 192.0.2.1:6379 within 5 seconds.",
    "2026-01-01 00:00:00,000\tWARNING worker.py:1843 -- OSError: [Errno 28] No space left on device",
    "WARNING:made.module:OSError: [Errno 28] No space left on device",
    # Words like those of the signs, that no failing start has.
    "nvidia-container-toolkit 1.17 is installed",
    "the process was not Killed, and runs on",
    "NVML Shared Library Not Found: no GPU is looked for here",
    "ERROR 11-20 12:00:00 [__init__.py:48] Failed to load plugin made",
    "2026-01-01 00:00:00.000 1 kserve INFO [model_server.py:register_model():398] OSError: [Errno 28] No space left on device",
    "2026-01-01 00:00:00.000 1 kserve WARNING [made.py:1] httpx.ConnectError: All connection attempts failed",
    "INFO 11-20 12:00:00 [made.py:1] Fatal Python error: Segmentation fault is what faulthandler would write",
    "RESOURCE_EXHAUSTED: the quota of requests is used up",
    "Loaded the tool parser 'made', which was not found before",
    "Command '['/usr/bin/gcc', '--version']' returned exit status 0",
    "The signal handler prints Segmentation fault when one occurs",
    "ERROR 11-20 12:00:00 [fa_utils.py:57] Cannot use FA version 2 is not supported due to FA2 is only supported on devices "
    "with compute capability >= 8",
    "ERROR 11-20 12:00:00 [made.py:9] Failed to import Triton kernels. Please make sure your triton version is compatible.",
    "WARNING: This container was built for NVIDIA Driver Release 560.35 or later, but",
    "INFO 11-20 12:00:00 [made.py:9] the tensor's shape is not divisible by 16, and is padded",
    "WARNING 11-20 12:00:00 [made.py:9] No such file or directory: '/made/generation_config.json'",
    "the option is not compatible with older clients",
    "the layer only supports Hopper kernels where they are faster",
    "504 is the number of the made layers",
    "WARNING 11-20 12:00:00 [made.py:9] TCPStore: a worker timed out once, and was asked again",
    "made/cpp_extension.py:9: UserWarning: the detected CUDA version is older than that of torch",
    "only per-tensor scales are supported by the older kernel, and the newer one is taken",
    "the tokenizer of the draft could not be loaded from the cache, and was fetched",
    "INFO 11-20 12:00:00 [made.py:9] Loading lora made failed once, and was done again",
    "a prompt that is longer than the maximum model length is refused",
    "75 multimodal tokens stand for 75 placeholder tokens",
    "the weights of the draft were not found in the checkpoint, and are shared with the model",
    "WARNING 11-20 12:00:00 [made.py:9] KeyError: 'made' in the older cache, which is written anew",
    "INFO 11-20 12:00:00 [made.py:9] AssertionError: made is caught, and the slower way is taken",
    "yaml.scanner.ScannerError is what a broken file would raise",
    "FP8 quantization is not supported on older GPUs, and this one is newer",
    "KeyError: 'MADE_TOKEN'",
    "tokenizer_config.json: 100%|##########| 1.00k/1.00k [00:00<00:00, 1.00MB/s]",
    # One or more for each general sign of the surroundings.
    "E0000 00:00:1764500000.000000       1 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register factory "
    "for plugin cuDNN when one has already been registered",
    "[Gloo] Rank 0 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7",
    "WARNING 11-20 12:00:00 [made.py:1] No device found: made",
    "INFO 11-20 12:00:00 [made.py:1] Unable to initialize backend 'tpu': made",
    "Device 0: made is available",
    "running hook made: done",
    "ninja: no work to do.",
    "[1/2] /usr/bin/gcc -O3 -shared -fPIC main.c -o made.so",
    "cc: warning: made.c: linker input file unused because linking not done",
    "runtime cuDNN library: 9.1.0, source was compiled with: 9.1.0",
    "[1764500000.000000] [made:1    :0] parser.c:1 UCX  INFO  UCX_* env variables: made",
    "made: ibv_devices: 2 found",
    "hardware decoder: made",
    "GPU 0 needs no reset",
    "made: CUDA capability sm_90 is compatible with the installation",
    "nrt_init status=0",
    "synStatus: OK",
    "Building wheel for made: finished with status 'done'",
    "Requirement already satisfied: made",
    "Authorization: Bearer",
    "Access to model made is not restricted",
    "Running 503 requests",
    "Timeout: 30 s",
    "/dev/made is 40% full",
    "open /made: ok, write permission granted",
    "RPC server: listening on 0.0.0.0:50052",
    "handshake with made completed",
    "metadata server: http://192.0.2.1:8080",
    "FlashInfer is available",
    "made exited with code 0",
    "made terminated with status 0",
    "made received signal 15",
    "[2026-01-01 00:00:00,000 I 1 1] (raylet) node_manager.cc:1: Raylet process started",
    "Transfer engine made initialized",
    "listening on http://0.0.0.0:8000: port is allocated",
    "wait for READY",
    "the size of /dev/shm is 64 MB",
    "/dev/vfio/1: device is not busy",
    "sh: made: done",
]
SMALL = "torch.OutOfMemoryError: CUDA out of memory."
# Words that tell something only where nothing else in the log does.
WEAK = [
    "[2026-01-01 00:00:00,000 E 1 1] gcs.h:179: Failed to connect to GCS at address 192.0.2.1:6379 within 5 seconds.",
    "/opt/nvshmem/src/init.cu:1007: non-zero status: 7 nvshmem setup connections failed",
    f"{NCCL}Could not find real path of /sys/class/made",
]


@pytest.mark.parametrize(("said", "kind", "bare", "inside"), SAID, ids=[said[-60:] for said, *_ in SAID])
def test_a_line_tells_the_class_and_whose_turn_it_is(said: str, kind: FailureClass, bare: Turn, inside: Turn) -> None:
    failures = [classify_log(said, FAILED, in_image=in_image) for in_image in (False, True)]
    assert [(failure.kind, failure.whose_turn) for failure in failures] == [(kind, bare), (kind, inside)], failures[0].problem


@pytest.mark.parametrize(("said", "kind", "turn"), LINES, ids=[said[:60] for said, *_ in LINES])
def test_what_many_programs_say_tells_class_and_turn(said: str, kind: FailureClass, turn: Turn) -> None:
    failure = classify_log(f"{said}\n", FAILED)
    assert (failure.kind, failure.whose_turn) == (kind, turn), failure.problem


TRACED = """Traceback (most recent call last):
  File "/made/lib/{frame}
    made()
{said}
"""
FRAMES: list[tuple[str, str, FailureClass]] = [
    ('vllm/config/model.py", line 9, in __post_init__', "ValueError: made words of a made version", "refused-configuration"),
    ('vllm/engine/arg_utils.py", line 9, in _verify_made', "NotImplementedError: made words", "refused-configuration"),
    ('vllm/model_executor/models/made.py", line 9, in load_weights', "ValueError: made words", "weights-do-not-fit"),
    ('transformers/models/auto/tokenization_auto.py", line 9, in made', "OSError: made words", "incomplete-model"),
    ('vllm/v1/engine/core_client.py", line 9, in __init__', "RuntimeError: made words", "unknown"),
    ('made/config/model.py", line 9, in __post_init__', "ValueError: made words", "unknown"),
]


@pytest.mark.parametrize(("frame", "said", "kind"), FRAMES)
def test_an_exception_with_words_that_nobody_knows_is_told_by_where_it_comes_from(
    frame: str, said: str, kind: FailureClass
) -> None:
    log = TRACED.format(frame=frame, said=said)
    assert classify_log(log, FAILED).kind == kind
    assert classify_log(f"{log}{SMALL}\n", FAILED).kind == "cuda-out-of-memory"


@pytest.mark.parametrize("said", SURVIVED)
def test_what_a_healthy_start_logs_is_no_sign(said: str) -> None:
    assert classify_log(said, FAILED).kind == "unknown"


@pytest.mark.parametrize("said", WEAK)
def test_words_that_a_start_may_survive_give_way_to_any_other_cause(said: str) -> None:
    assert classify_log(f"{said}\n{SMALL}\n", FAILED).kind == "cuda-out-of-memory"


def test_nccls_warnings_give_way_to_a_general_sign_and_to_a_killed_process() -> None:
    for line, kind in (
        ("OSError: [Errno 28] No space left on device: '/made'", "disk-full"),
        ("(APIServer pid=1) ERROR 11-20 12:00:00 [made.py:1] Engine core proc EngineCore_DP0 died unexpectedly", "killed"),
    ):
        assert classify_log(f"{WEAK[2]}\n{line}\n", FAILED).kind == kind


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.name)
def test_no_sign_is_in_a_healthy_start(path: Path) -> None:
    """Also not if the server had ended without a word. Some of these were stopped in the end."""
    for log in (path.read_text(), path.read_text().replace(READY, "")):
        failure = classify_log(log, FAILED)
        assert failure.kind == "unknown" or "stopped from outside" in failure.problem, failure.problem


def test_a_sign_needs_only_words_that_its_matches_have() -> None:
    texts = [case.text for case in [*CASES, *MADE_CASES]] + [said for said, *_ in [*SAID, *LINES]]
    for sign in [*SIGNS, *GENERAL_SIGNS, *LAST_SIGNS]:
        for text in texts if sign.needs else []:
            matches = [match[0] for match in sign.pattern.finditer(text)]
            assert [match for match in matches if not any(words in match for words in sign.needs)] == []
