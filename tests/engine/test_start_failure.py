"""What Docker Engine says when it does not start a container, and whose turn it then is."""

import pytest

from vllm_qualify.engine.start_failure import classify_start
from vllm_qualify.errors import HostError, QualifyError, ReleaseError

IMAGE = "vllm/vllm-openai:v0.32.0"
HOOK = (
    "failed to create task for container: failed to create shim task: OCI runtime create failed: runc create failed: "
    "unable to start container process: error during container init: error running hook #0: error running hook: exit status 1, "
    "stdout: , stderr: Auto-detected mode as 'legacy' nvidia-container-cli: "
)
ENDPOINT = "driver failed programming external connectivity on endpoint x (226aa9): "
SHIM = "failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: "

PORT = ("port-in-use", HostError)
OLD_DRIVER = ("driver-too-old", HostError)
NO_GPU = ("no-gpu-in-docker", HostError)
PLATFORM = ("wrong-platform", ReleaseError)
NO_PROGRAM = ("not-vllm-openai", ReleaseError)
GONE = ("image-missing", HostError)
MOUNT = ("mount-refused", HostError)
UNKNOWN = ("docker-refused", HostError)

SAID = [
    # met here, with Docker Engine 20.10.24
    ('could not select device driver "" with capabilities: [[gpu]]', NO_GPU),
    (f"{ENDPOINT}Error starting userland proxy: listen tcp4 127.0.0.1:5000: bind: address already in use", PORT),
    (f"{ENDPOINT}Bind for 127.0.0.1:5123 failed: port is already allocated", PORT),
    ('invalid mount config for type "bind": bind source path does not exist: /nonono', MOUNT),
    (f'{SHIM}exec: "/nope": stat /nope: no such file or directory: unknown', NO_PROGRAM),
    (f'{SHIM}exec: "python3": executable file not found in $PATH: unknown', NO_PROGRAM),
    ("No such image: 127.0.0.1:5000/tiny:77", GONE),
    (
        "image with reference 127.0.0.1:5000/tiny:1 was found but does not match the specified platform: "
        "wanted linux/arm64, actual: linux/amd64",
        PLATFORM,
    ),
    # of NVIDIA's runtime
    ('unable to retrieve OCI runtime error: exec: "nvidia-container-runtime": executable file not found in $PATH', NO_GPU),
    ('could not select device driver "nvidia" with capabilities: [[gpu]]', NO_GPU),
    ("unknown or invalid runtime name: nvidia", NO_GPU),
    (f"{HOOK}initialization error: nvml error: driver not loaded: unknown", NO_GPU),
    (f"{HOOK}initialization error: load library failed: libnvidia-ml.so.1: cannot open shared object file: unknown", NO_GPU),
    (f"{HOOK}device error: 7: unknown device: unknown", NO_GPU),
    ("CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all", NO_GPU),
    (f"{HOOK}requirement error: unsatisfied condition: cuda>=12.9, please update your driver to a newer version", OLD_DRIVER),
    ("requirements not met: unsatisfied condition: driver>=575", OLD_DRIVER),
    # others
    ("failed to set up container networking: failed to bind host port 127.0.0.1:8000/tcp: address already in use", PORT),
    (f"{SHIM}exec /usr/bin/python3: exec format error", PLATFORM),
    (
        f'{SHIM}error mounting "/a" to rootfs at "/b": mount /a:/b (via /proc/self/fd/6), flags: 0x5000: '
        "not a directory: unknown: Are you trying to mount a directory onto a file (or vice-versa)?",
        MOUNT,
    ),
    ("a message that nobody has met", UNKNOWN),
]


@pytest.mark.parametrize(("said", "expected"), SAID)
def test_a_message_has_its_class(said: str, expected: tuple[str, type[QualifyError]]) -> None:
    error = classify_start(said, IMAGE, 8000, "serve")
    assert (error.kind, type(error)) == expected
    assert error.place == "serve"
    assert not error.retry, "what a container needs does not come by itself"
    assert error.remedy


@pytest.mark.parametrize("cuda", ["12.4", "12.9"])
def test_a_driver_that_is_too_old_is_not_taken_for_a_missing_toolkit(cuda: str) -> None:
    """The whole message, of NVIDIA's container toolkit in its legacy mode."""
    condition = f"unsatisfied condition: cuda>={cuda}, please update your driver to a newer version, or use an earlier cuda"
    error = classify_start(f"{HOOK}requirement error: {condition} container: unknown.", IMAGE, None, "serve")
    assert (error.kind, type(error)) == OLD_DRIVER
    assert "update this host's driver" in error.remedy
    assert condition in error.problem


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (f"{HOOK}initialization error: requirement error: unsatisfied condition: cuda>=12.9", "driver-too-old"),
        (f"{HOOK}device error: 9: unknown device: not a directory: unknown", "no-gpu-in-docker"),
        (
            f'invalid mount config for type "bind": bind source path does not exist: /x; {ENDPOINT}address already in use',
            "port-in-use",
        ),
        ('exec: "python3": stat /usr/bin/python3: exec format error', "wrong-platform"),
    ],
)
def test_of_two_signs_the_one_that_explains_the_other_wins(said: str, kind: str) -> None:
    assert classify_start(said, IMAGE, 8000, "serve").kind == kind


def test_a_port_in_use_is_named() -> None:
    error = classify_start("Bind for 127.0.0.1:5123 failed: port is already allocated", IMAGE, 5123, "serve")
    assert error.problem.startswith("port 5123 is in use")
    assert "--port" in error.remedy


@pytest.mark.parametrize("program", ["/nope", "python3", "nvidia-smi"])
def test_the_program_that_the_image_lacks_is_named(program: str) -> None:
    said = f'{SHIM}exec: "{program}": executable file not found in $PATH: unknown'
    assert classify_start(said, IMAGE, None, "check").problem == f"{IMAGE} has no program {program}"


@pytest.mark.parametrize("said", [said for said, expected in SAID if expected not in (NO_PROGRAM, GONE)])
def test_dockers_own_words_are_kept(said: str) -> None:
    assert said in str(classify_start(said, IMAGE, 8000, "serve"))
