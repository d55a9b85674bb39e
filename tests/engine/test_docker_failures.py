"""Messages of Docker Engine about containers that did not start and images that did not come, and who must act on each.

Those about registries are of Docker Engine 20.10 and of Docker Hub.
"""

import pytest

from vllm_qualify.engine.failure.docker import classify_answer, classify_start
from vllm_qualify.errors import CallerError, HostError, QualifyError, ReleaseError

# --- starts

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
OTHER_PLATFORM = ("wrong-platform", ReleaseError)
NO_PROGRAM = ("not-vllm-openai", ReleaseError)
IMAGE_GONE = ("image-missing", HostError)
MOUNT = ("mount-refused", HostError)

STARTS = [
    # met here, with Docker Engine 20.10.24
    ('could not select device driver "" with capabilities: [[gpu]]', NO_GPU),
    (f"{ENDPOINT}Error starting userland proxy: listen tcp4 127.0.0.1:5000: bind: address already in use", PORT),
    (f"{ENDPOINT}Bind for 127.0.0.1:5123 failed: port is already allocated", PORT),
    ('invalid mount config for type "bind": bind source path does not exist: /nonono', MOUNT),
    (f'{SHIM}exec: "/nope": stat /nope: no such file or directory: unknown', NO_PROGRAM),
    (f'{SHIM}exec: "python3": executable file not found in $PATH: unknown', NO_PROGRAM),
    ("No such image: 127.0.0.1:5000/tiny:77", IMAGE_GONE),
    (
        "image with reference 127.0.0.1:5000/tiny:1 was found but does not match the specified platform: "
        "wanted linux/arm64, actual: linux/amd64",
        OTHER_PLATFORM,
    ),
    # of NVIDIA's runtime
    ('unable to retrieve OCI runtime error: exec: "nvidia-container-runtime": executable file not found in $PATH', NO_GPU),
    ('could not select device driver "nvidia" with capabilities: [[gpu]]', NO_GPU),
    ("unknown or invalid runtime name: nvidia", NO_GPU),
    (f"{HOOK}initialization error: nvml error: driver not loaded: unknown", NO_GPU),
    (f"{HOOK}initialization error: load library failed: libnvidia-ml.so.1: cannot open shared object file: unknown", NO_GPU),
    (f"{HOOK}device error: 7: unknown device: unknown", NO_GPU),
    ("CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all", NO_GPU),
    # the whole message, of NVIDIA's container toolkit in its legacy mode
    (
        f"{HOOK}requirement error: unsatisfied condition: cuda>=12.9, please update your driver to a newer version, "
        "or use an earlier cuda container: unknown.",
        OLD_DRIVER,
    ),
    ("requirements not met: unsatisfied condition: driver>=575", OLD_DRIVER),
    # of two signs the one that explains the other wins
    (f"{HOOK}initialization error: requirement error: unsatisfied condition: cuda>=12.9", OLD_DRIVER),
    (f"{HOOK}device error: 9: unknown device: not a directory: unknown", NO_GPU),
    (f'invalid mount config for type "bind": bind source path does not exist: /x; {ENDPOINT}address already in use', PORT),
    ('exec: "python3": stat /usr/bin/python3: exec format error', OTHER_PLATFORM),
    # others
    ("failed to set up container networking: failed to bind host port 127.0.0.1:8000/tcp: address already in use", PORT),
    (f"{SHIM}exec /usr/bin/python3: exec format error", OTHER_PLATFORM),
    (
        f'{SHIM}error mounting "/a" to rootfs at "/b": mount /a:/b (via /proc/self/fd/6), flags: 0x5000: '
        "not a directory: unknown: Are you trying to mount a directory onto a file (or vice-versa)?",
        MOUNT,
    ),
    ("a message that nobody has met", ("docker-refused", HostError)),
]


@pytest.mark.parametrize(("said", "expected"), STARTS)
def test_a_message_about_a_start_has_its_class_and_is_kept(said: str, expected: tuple[str, type[QualifyError]]) -> None:
    error = classify_start(said, IMAGE, 8000, "serve")
    assert (error.kind, type(error)) == expected
    assert error.place == "serve"
    assert not error.retry, "what a container needs does not come by itself"
    assert error.remedy
    assert said in str(error) or expected in (NO_PROGRAM, IMAGE_GONE)


@pytest.mark.parametrize(
    ("said", "problem", "remedy"),
    [
        ("Bind for 127.0.0.1:5123 failed: port is already allocated", "port 5123 is in use", "--port"),
        ("requirements not met: unsatisfied condition: driver>=575", "driver is too old", "update this host's driver"),
        (f'{SHIM}exec: "nvidia-smi": executable file not found in $PATH', f"{IMAGE} has no program nvidia-smi", "interface"),
    ],
)
def test_the_port_the_driver_or_the_program_that_is_lacking_is_named(said: str, problem: str, remedy: str) -> None:
    error = classify_start(said, IMAGE, 5123, "check")
    assert problem in error.problem
    assert remedy in error.remedy


# --- registries

LOCAL = "127.0.0.1:5000/tiny:1"
NOBODYS = "sha256:" + "0" * 64

MISSING = ("image-missing", CallerError, False)
LOGIN = ("login-required", HostError, False)
UNREACHABLE = ("registry-unreachable", HostError, True)
RATE_LIMIT = ("registry-rate-limit", HostError, True)
DISK_FULL = ("disk-full", HostError, False)
UNTRUSTED = ("registry-untrusted", HostError, False)
PLATFORM = ("wrong-platform", ReleaseError, False)
MISMATCH = ("digest-mismatch", ReleaseError, False)

ANSWERS = [
    # met here, with Docker Engine 20.10.24
    ("manifest unknown: manifest unknown", MISSING),
    (f"manifest for 127.0.0.1:5000/tiny@{NOBODYS} not found: manifest unknown: manifest unknown", MISSING),
    ('Get "http://127.0.0.1:5999/v2/": dial tcp 127.0.0.1:5999: connect: connection refused', UNREACHABLE),
    ('Head "http://127.0.0.1:29167/v2/nope/manifests/2": no basic auth credentials', LOGIN),
    ("login attempt to http://127.0.0.1:29167/v2/ failed with status: 401 Unauthorized", LOGIN),
    ('Get "https://registry-1.docker.io/v2/": dial tcp: lookup registry-1.docker.io on 10.0.0.1:53: no such host', UNREACHABLE),
    ("failed to register layer: Error processing tar file(exit status 1): write /lib/x: no space left on device", DISK_FULL),
    (
        "image with reference 127.0.0.1:5000/tiny:1 was found but does not match the specified platform: "
        "wanted linux/arm64, actual: linux/amd64",
        PLATFORM,
    ),
    ("no matching manifest for linux/arm64/v8 in the manifest list entries", PLATFORM),
    # Docker Hub's, and of registries beyond this machine
    (
        "pull access denied for x/y, repository does not exist or may require 'docker login': "
        "denied: requested access to the resource is denied",
        LOGIN,
    ),
    ("unauthorized: authentication required", LOGIN),
    (
        "toomanyrequests: You have reached your pull rate limit. You may increase the limit by authenticating and upgrading: "
        "https://www.docker.com/increase-rate-limit",
        RATE_LIMIT,
    ),
    ("received unexpected HTTP status: 429 Too Many Requests", RATE_LIMIT),
    ('Get "https://ghcr.io/v2/": net/http: TLS handshake timeout', UNREACHABLE),
    ("received unexpected HTTP status: 503 Service Unavailable", UNREACHABLE),
    ("received unexpected HTTP status: 500 Internal Server Error", UNREACHABLE),
    ('Get "https://ghcr.io/v2/": dial tcp 10.1.2.3:443: i/o timeout', UNREACHABLE),
    # a pull that broke off
    ("error pulling image configuration: download failed after attempts=6: unexpected EOF (layer 3)", UNREACHABLE),
    ("write tcp 10.0.0.2:41000->10.1.2.3:443: write: broken pipe", UNREACHABLE),
    ("stream error: stream ID 7; INTERNAL_ERROR; received from peer", UNREACHABLE),
    ("http2: server sent GOAWAY and closed the connection; LastStreamID=1999", UNREACHABLE),
    ("dial tcp: lookup ghcr.io: Temporary failure in name resolution", UNREACHABLE),
    ("received unexpected HTTP status: 522 <none>", UNREACHABLE),
    ("name unknown: repository name not known to registry", MISSING),
    (f"manifest verification failed for digest {NOBODYS}", MISMATCH),
    (f"filesystem layer verification failed for digest {NOBODYS}", MISMATCH),
    # a tag, a digest and a port can hold any number
    (f"manifest for x/y@sha256:{'503' * 21}0 not found: manifest unknown: manifest unknown", MISSING),
    ("manifest for x/y:nightly-4290ab not found: manifest unknown", MISSING),
    ('Get "http://127.0.0.1:5429/v2/": dial tcp 127.0.0.1:5429: connect: connection refused', UNREACHABLE),
    ('Get "https://registry.example/v2/": EOF', UNREACHABLE),
    ("net/http: request canceled (Client.Timeout exceeded while awaiting headers)", UNREACHABLE),
    ('Get "https://registry.example/v2/": x509: certificate signed by unknown authority', UNTRUSTED),
    ('Get "https://registry.example/v2/": http: server gave HTTP response to HTTPS client', UNTRUSTED),
    ("Proxy Authentication Required", ("proxy-login-required", HostError, False)),
    # of two signs the one that explains the other wins; the first is an answer of 403
    ("denied: toomanyrequests: rate exceeded", RATE_LIMIT),
    ("unauthorized: manifest unknown", LOGIN),
    ("manifest unknown: no matching manifest for linux/arm64", PLATFORM),
    ("unexpected EOF: write /var/lib/docker/tmp/x: no space left on device", DISK_FULL),
    ("a message that nobody has met", ("registry-unknown", HostError, False)),
]


@pytest.mark.parametrize(("stage", "option"), [("pull", "--image"), ("check", "--client-image")])
@pytest.mark.parametrize(("said", "expected"), ANSWERS)
def test_a_message_about_a_registry_has_its_class_and_is_kept(
    said: str, expected: tuple[str, type[QualifyError], bool], stage: str, option: str
) -> None:
    error = classify_answer(said, LOCAL, option, stage)
    assert (error.kind, type(error), error.retry) == expected
    assert LOCAL in error.problem
    assert error.remedy
    assert error.place == (option if expected == MISSING else stage)
    assert said in str(error) or expected in (MISSING, DISK_FULL)


@pytest.mark.parametrize(
    ("reference", "command"),
    [
        (LOCAL, "`docker login 127.0.0.1:5000`"),
        (f"127.0.0.1:5000/deep/tiny@{NOBODYS}", "`docker login 127.0.0.1:5000`"),
        ("ghcr.io/org/vllm:1", "`docker login ghcr.io`"),
        ("localhost/vllm:1", "`docker login localhost`"),
        *((of_docker_hub, "`docker login`") for of_docker_hub in (IMAGE, "vllm:5000", f"org/vllm@{NOBODYS}")),
    ],
)
def test_the_remedy_of_a_login_names_the_registrys_host_unless_it_is_docker_hub(reference: str, command: str) -> None:
    assert command in classify_answer("no basic auth credentials", reference, "--image", "check").remedy
