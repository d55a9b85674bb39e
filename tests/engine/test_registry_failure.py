"""What Docker Engine says of a registry, and whose turn it then is. Messages of Docker Engine 20.10 and of Docker Hub."""

import pytest

from vllm_qualify.engine.registry_failure import classify_answer
from vllm_qualify.errors import CallerError, HostError, QualifyError, ReleaseError

LOCAL = "127.0.0.1:5000/tiny:1"
HUB = "vllm/vllm-openai:v0.32.0"
NOBODYS = "sha256:" + "0" * 64

MISSING = ("image-missing", CallerError, False)
LOGIN = ("login-required", HostError, False)
UNREACHABLE = ("registry-unreachable", HostError, True)
RATE_LIMIT = ("registry-rate-limit", HostError, True)
DISK_FULL = ("disk-full", HostError, False)
PLATFORM = ("wrong-platform", ReleaseError, False)
MISMATCH = ("digest-mismatch", ReleaseError, False)
UNKNOWN = ("registry-unknown", HostError, False)

SAID = [
    # met here, with Docker Engine 20.10.24
    ("manifest unknown: manifest unknown", MISSING),
    (f"manifest for 127.0.0.1:5000/tiny@{NOBODYS} not found: manifest unknown: manifest unknown", MISSING),
    ('Get "http://127.0.0.1:5999/v2/": dial tcp 127.0.0.1:5999: connect: connection refused', UNREACHABLE),
    ('Head "http://127.0.0.1:29167/v2/nope/manifests/2": no basic auth credentials', LOGIN),
    ("login attempt to http://127.0.0.1:29167/v2/ failed with status: 401 Unauthorized", LOGIN),
    (
        'Get "https://registry-1.docker.io/v2/": dial tcp: lookup registry-1.docker.io on 10.0.0.1:53: no such host',
        UNREACHABLE,
    ),
    (
        "failed to register layer: Error processing tar file(exit status 1): write /lib/x: no space left on device",
        DISK_FULL,
    ),
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
    ("Proxy Authentication Required", ("proxy-login-required", HostError, False)),
    ("a message that nobody has met", UNKNOWN),
]


@pytest.mark.parametrize(("said", "expected"), SAID)
def test_a_message_has_its_class(said: str, expected: tuple[str, type[QualifyError], bool]) -> None:
    error = classify_answer(said, LOCAL, "--image", "pull")
    assert (error.kind, type(error), error.retry) == expected
    assert LOCAL in error.problem
    assert error.remedy


@pytest.mark.parametrize(
    "said", ["x509: certificate signed by unknown authority", "http: server gave HTTP response to HTTPS client"]
)
def test_a_registry_that_is_not_trusted_is_the_operators_to_mend(said: str) -> None:
    error = classify_answer(f'Get "https://registry.example/v2/": {said}', "registry.example/x:1", "--image", "check")
    assert (error.kind, type(error), error.retry) == ("registry-untrusted", HostError, False)
    assert said in error.problem
    assert "certificate" in error.remedy


@pytest.mark.parametrize("option", ["--image", "--client-image"])
def test_what_is_missing_is_the_option_that_named_it(option: str) -> None:
    assert classify_answer("manifest unknown", LOCAL, option, "pull").place == option


@pytest.mark.parametrize("said", [said for said, expected in SAID if expected != MISSING])
def test_what_the_world_did_names_the_stage(said: str) -> None:
    assert classify_answer(said, LOCAL, "--image", "pull").place == "pull"
    assert classify_answer(said, LOCAL, "--image", "check").place == "check"


@pytest.mark.parametrize(
    ("reference", "command"),
    [
        (LOCAL, "`docker login 127.0.0.1:5000`"),
        (f"127.0.0.1:5000/deep/tiny@{NOBODYS}", "`docker login 127.0.0.1:5000`"),
        ("ghcr.io/org/vllm:1", "`docker login ghcr.io`"),
        ("localhost/vllm:1", "`docker login localhost`"),
    ],
)
def test_the_remedy_of_a_login_names_the_registrys_host(reference: str, command: str) -> None:
    assert command in classify_answer("no basic auth credentials", reference, "--image", "check").remedy


@pytest.mark.parametrize("reference", [HUB, "vllm:5000", f"org/vllm@{NOBODYS}"])
def test_docker_hub_needs_no_host(reference: str) -> None:
    remedy = classify_answer("unauthorized: incorrect username or password", reference, "--image", "check").remedy
    command = remedy.split("`")[1]
    assert command.split() == ["docker", "login"]


@pytest.mark.parametrize(("said", "expected"), [pair for pair in SAID if pair[1] not in (MISSING, DISK_FULL)])
def test_the_registrys_own_words_are_kept(said: str, expected: tuple[str, type[QualifyError], bool]) -> None:
    error = classify_answer(said, LOCAL, "--image", "pull")
    assert said in str(error), expected


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        # an answer of 403 whose body says that there were too many
        ("denied: toomanyrequests: rate exceeded", "registry-rate-limit"),
        ("unauthorized: manifest unknown", "login-required"),
        ("manifest unknown: no matching manifest for linux/arm64", "wrong-platform"),
        ("unexpected EOF: write /var/lib/docker/tmp/x: no space left on device", "disk-full"),
    ],
)
def test_of_two_signs_the_one_that_explains_the_other_wins(said: str, kind: str) -> None:
    assert classify_answer(said, LOCAL, "--image", "pull").kind == kind
