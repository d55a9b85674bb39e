"""A real registry, and a server that answers as no registry here does."""

import base64
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tasks import webhooks
from tests.builders.registries import ALL, basic_login, bearer, login
from tests.docker_engine import push_image
from tests.releases.docker_registry import IDENTITY, PASSWORD, USER, WEBHOOK_SECRET, Registries, registries
from tests.releases.service import Answer, Asked, serving
from vllm_qualify.errors import CallerError, HostError, QualifyError
from vllm_qualify.releases.login import Credentials, credentials_for
from vllm_qualify.releases.registry import (
    MANIFESTS,
    TAGS_PER_PAGE,
    ImageRepository,
    available_at,
    registry_and_path,
    releases_in,
)
from vllm_qualify.releases.source import Available, ImageSource, VersionRule

DIGEST = "sha256:" + "a" * 64


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registries]:
    with registries(tmp_path_factory.mktemp("registry")) as started:
        yield started


# --- the real one


def test_versions_with_their_digests_newest_first(real: Registries) -> None:
    pushed = {f"v0.{minor}.0": real.push("a/many", f"v0.{minor}.0", f"{minor}") for minor in range(TAGS_PER_PAGE + 30)}
    for other in ("latest", "nightly-0b254989", "v0.200.0rc1", "v0.200.0-cu130"):
        real.push("a/many", other, other)
    releases = releases_in(f"{real.open}/a/many", VersionRule())
    newest_first = [f"v0.{minor}.0" for minor in reversed(range(12, TAGS_PER_PAGE + 30))]
    assert releases == [Available(identity=pushed[tag], tags=[tag]) for tag in newest_first]


def test_a_tag_that_moved_is_at_its_new_digest_and_two_tags_on_one_are_one_release(real: Registries) -> None:
    first = real.push("a/moved", "v0.32.0", "first")
    assert releases_in(f"{real.open}/a/moved", ALL) == [Available(identity=first, tags=["v0.32.0"])]
    second = real.push("a/moved", "v0.32.0", "second")
    assert releases_in(f"{real.open}/a/moved", ALL) == [Available(identity=second, tags=["v0.32.0"])]
    assert first != second
    real.push("a/moved", "0.32.0", "second")
    assert releases_in(f"{real.open}/a/moved", ALL) == [Available(identity=second, tags=["v0.32.0", "0.32.0"])]


def test_the_digest_is_that_of_what_was_pushed_an_image_an_index_or_nothing(real: Registries) -> None:
    image = push_image(real.open, "a/kinds", "v1.0.0")
    indexes = [real.push("a/kinds", f"v1.0.{number}", media_type=MANIFESTS[place]) for number, place in ((1, 0), (2, 2))]
    with ImageRepository(f"{real.open}/a/kinds") as repository:
        assert [repository.digest(f"v1.0.{number}") for number in range(4)] == [image, *indexes, None]


def test_the_same_image_described_in_ocis_words_has_another_digest(real: Registries) -> None:
    push_image(real.open, "a/oci", "docker")
    with ImageRepository(f"{real.open}/a/oci") as repository:
        docker = repository.digest("docker")
        text = real.client.get(f"/v2/a/oci/manifests/{docker}", headers={"Accept": MANIFESTS[3]}).text
        body = text.replace(MANIFESTS[3], MANIFESTS[1]).encode()
        digest = real.push_manifest("a/oci", "oci", body, MANIFESTS[1])
        assert repository.digest("oci") == digest != docker


def test_no_such_repository_is_the_callers(real: Registries) -> None:
    with pytest.raises(CallerError) as raised:
        releases_in(f"{real.open}/a/nothing", ALL)
    assert (raised.value.kind, raised.value.place) == ("image-missing", "watch")
    assert f"{real.open}/a/nothing" in raised.value.problem


@pytest.mark.parametrize("way", ["basic", "token"])
def test_a_registry_that_wants_a_login(way: str, real: Registries, docker_config: Path) -> None:
    digest, registry = real.push("a/closed", "v1.0.0"), getattr(real, way)
    for password in (None, "wrong"):
        if password:
            basic_login(docker_config, registry, password)
        with pytest.raises(HostError) as raised:
            releases_in(f"{registry}/a/closed", ALL)
        assert (raised.value.kind, raised.value.retry) == ("login-required", False)
        assert f"`docker login {registry}`" in raised.value.remedy
    basic_login(docker_config, registry)
    assert releases_in(f"{registry}/a/closed", ALL) == [Available(identity=digest, tags=["v1.0.0"])]


def test_one_token_serves_many_requests(real: Registries, docker_config: Path) -> None:
    for patch in range(5):
        real.push("a/tokens", f"v1.0.{patch}", f"{patch}")
    basic_login(docker_config, real.token)
    before = len(real.tokens.asked)
    assert len(releases_in(f"{real.token}/a/tokens", ALL)) == 5
    assert len(real.tokens.asked) == before + 1
    assert "kept=1" in real.tokens.asked[-1].path


def test_a_login_that_left_a_token_instead_of_a_password(real: Registries, docker_config: Path) -> None:
    digest = real.push("a/identity", "v1.0.0")
    login(docker_config, real.token, auth=base64.b64encode(b"<token>:").decode(), identitytoken=IDENTITY)
    assert releases_in(f"{real.token}/a/identity", ALL) == [Available(identity=digest, tags=["v1.0.0"])]


def helper(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "docker-credential-tests"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_login_that_a_credential_helper_keeps(
    real: Registries, docker_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = real.push("a/helped", "v1.0.0")
    docker_config.write_text(json.dumps({"credHelpers": {real.basic: "tests"}}))
    helper(tmp_path, f"""echo '{{"Username": "{USER}", "Secret": "{PASSWORD}"}}'""", monkeypatch)
    assert releases_in(f"{real.basic}/a/helped", ALL) == [Available(identity=digest, tags=["v1.0.0"])]


@pytest.mark.parametrize("config", ['{"credsStore": "tests"}', '{"credsStore": "nobody"}', '{"auths": {"x": {"auth": "no"}}}'])
def test_a_configuration_that_gives_no_login_is_the_hosts(
    config: str, docker_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_config.write_text(config)
    helper(tmp_path, "echo locked >&2; exit 1", monkeypatch)
    with pytest.raises(HostError, match="Docker's configuration") as raised:
        ImageRepository("registry.example/vllm")
    assert raised.value.kind == "login-required"


def test_a_certificate_must_be_trusted(real: Registries, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = real.push("a/tls", "v1.0.0")
    with pytest.raises(HostError) as raised:
        releases_in(f"{real.tls}/a/tls", ALL)
    assert (raised.value.kind, raised.value.retry) == ("registry-untrusted", False)
    monkeypatch.setenv("SSL_CERT_FILE", str(real.certificate))
    assert releases_in(f"{real.tls}/a/tls", ALL) == [Available(identity=digest, tags=["v1.0.0"])]


def test_no_proxy_stands_between_this_machine_and_itself(real: Registries, monkeypatch: pytest.MonkeyPatch) -> None:
    real.push("a/near", "v1.0.0")
    with serving(lambda _: Answer(502)) as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://{proxy.address}")
        assert len(releases_in(f"{real.open}/a/near", ALL)) == 1
    assert proxy.asked == []


def test_its_own_webhook_makes_the_fleet_look(real: Registries, monkeypatch: pytest.MonkeyPatch) -> None:
    real.push("a/pushed", "v1.0.0")
    deadline = time.monotonic() + 60
    while not (requests := [asked for asked in real.webhook.asked if b"a/pushed" in asked.body]):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # it tells when it likes
    looks: list[object] = []
    monkeypatch.setattr(webhooks, "_plan_look", looks.append)
    monkeypatch.setenv(webhooks.SECRET, WEBHOOK_SECRET)
    with TestClient(webhooks.app) as ours:
        answer = ours.post("/webhooks", headers=dict(requests[0].headers), content=requests[0].body)
    assert (answer.status_code, len(looks)) == (202, 1)


# --- answers that the real one does not give

TOLD = Answer(headers={"Docker-Content-Digest": DIGEST})


def tags(*names: str, **headers: str) -> Answer:
    return Answer(body=json.dumps({"name": "x", "tags": list(names)}).encode(), headers=headers)


def listing(listed: Answer, of_tag: Answer = TOLD) -> Callable[[Asked], Answer]:
    return lambda asked: of_tag if asked.method == "HEAD" else listed


def asked_of(answer: Callable[[Asked], Answer]) -> list[Available]:
    with serving(answer) as service:
        return releases_in(f"{service.address}/x", ALL)


def failure_of(answer: Callable[[Asked], Answer]) -> QualifyError:
    with pytest.raises(QualifyError) as raised:
        asked_of(answer)
    return raised.value


PAGES = [[f"v1.{page}.{number}" for number in range(TAGS_PER_PAGE)] for page in range(3)]


@pytest.mark.parametrize("host", ["", "http://registry.internal:8080"])
def test_pages_are_followed_to_the_last(host: str) -> None:
    """As OCI's specification has them. Debian's registry gives all its tags at once, however few are asked for."""

    def answer(asked: Asked) -> Answer:
        if asked.method == "HEAD":
            return Answer(headers={"Docker-Content-Digest": f"sha256:{hashlib.sha256(asked.path.encode()).hexdigest()}"})
        page = int(asked.path.partition("last=")[2] or 0)
        following = f'<{host}/v2/x/tags/list?n={TAGS_PER_PAGE}&last={page + 1}>; rel="next"'
        return tags(*PAGES[page], **({"Link": following} if page + 1 < len(PAGES) else {}))

    releases = asked_of(answer)
    assert [release.tags for release in releases] == [[tag] for page in reversed(PAGES) for tag in reversed(page)]


def test_a_page_that_comes_again_is_the_last() -> None:
    again = tags("v1.0.0", Link='</v2/x/tags/list?n=100&last=v1.0.0>; rel="next"')
    assert asked_of(listing(again)) == [Available(identity=DIGEST, tags=["v1.0.0"])]


def test_a_tag_that_goes_meanwhile_is_left_out() -> None:
    def answer(asked: Asked) -> Answer:
        of_tag = Answer(404) if asked.path.endswith("v2.0.0") else TOLD
        return listing(tags("v1.0.0", "v2.0.0"), of_tag)(asked)

    assert asked_of(answer) == [Available(identity=DIGEST, tags=["v1.0.0"])]


def test_a_registry_that_tells_no_digest_gives_the_manifest() -> None:
    body = b'{"schemaVersion": 2}'

    def answer(asked: Asked) -> Answer:
        assert "manifests" not in asked.path or asked.headers["accept"] == ", ".join(MANIFESTS)
        return tags("v1.0.0") if "tags" in asked.path else Answer(body=body)

    assert asked_of(answer) == [Available(identity=f"sha256:{hashlib.sha256(body).hexdigest()}", tags=["v1.0.0"])]


def test_an_image_has_what_its_rule_lets_through() -> None:
    with serving(listing(tags("v0.12.0", "v0.13.0"))) as service:
        source = ImageSource(name=f"{service.address}/vllm", recipe="llama", rule=VersionRule(versions="<0.13"))
        assert available_at(source) == [Available(identity=DIGEST, tags=["v0.12.0"])]


def test_a_repository_without_tags_has_no_releases() -> None:
    assert asked_of(lambda _: Answer(body=b'{"name": "x", "tags": null}')) == []


@pytest.mark.parametrize(
    ("status", "kind", "whose", "retry"),
    [
        (401, "login-required", HostError, False),
        (403, "login-required", HostError, False),
        (404, "image-missing", CallerError, False),
        (429, "registry-rate-limit", HostError, True),
        (500, "registry-unreachable", HostError, True),
        (503, "registry-unreachable", HostError, True),
        (418, "registry-unknown", HostError, False),
    ],
)
def test_a_refusal_of_all_or_of_one_tag_names_who_must_act(
    status: int, kind: str, whose: type[QualifyError], retry: bool
) -> None:
    for answer in (listing(Answer(status)), *([listing(tags("v1.0.0"), Answer(status))] if status != 404 else [])):
        error = failure_of(answer)
        assert (error.kind, type(error), error.retry, error.place) == (kind, whose, retry, "watch")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b"null"])
def test_what_is_no_list_of_tags_is_no_registry(body: bytes) -> None:
    assert failure_of(lambda _: Answer(body=body)).kind == "registry-unknown"


def test_a_digest_of_another_kind_is_refused() -> None:
    strange = Answer(headers={"Docker-Content-Digest": "md5:abc"})
    assert failure_of(listing(tags("v1.0.0"), strange)).kind == "registry-unknown"


def test_nobody_answers() -> None:
    with serving(lambda _: Answer()) as gone:
        pass
    with pytest.raises(HostError) as raised:
        releases_in(f"{gone.address}/x", ALL)
    assert (raised.value.kind, raised.value.retry) == ("registry-unreachable", True)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (Answer(401), "login-required"),
        (Answer(404), "login-required"),
        (Answer(body=b"{}"), "login-required"),
        (Answer(body=b"<html>"), "login-required"),
        (Answer(429), "registry-rate-limit"),
        (Answer(503), "registry-unreachable"),
    ],
)
def test_a_token_server_that_gives_none(given: Answer, kind: str) -> None:
    with serving(lambda _: given) as tokens:
        assert failure_of(lambda _: bearer(f"http://{tokens.address}/token")).kind == kind


@pytest.mark.parametrize("realm", ["", "nowhere", "http://[", "http://127.0.0.1:1/token"])
def test_a_token_server_that_cannot_be_asked(realm: str) -> None:
    assert failure_of(lambda _: bearer(realm)).kind == "registry-unreachable"


@pytest.mark.parametrize("challenge", ["", "Basic realm=x", "Negotiate", 'Digest realm="x"', "Bearer nonsense"])
def test_a_way_in_that_nobody_knows_asks_for_a_login(challenge: str) -> None:
    assert failure_of(lambda _: Answer(401, headers={"WWW-Authenticate": challenge})).kind == "login-required"


def test_a_token_that_ran_out_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_qualify.releases.registry.AT_ONCE", 1)
    uses = 3

    with serving(lambda _: Answer(body=json.dumps({"token": f"{len(tokens.asked)}"}).encode())) as tokens:
        used: list[str] = []

        def answer(asked: Asked) -> Answer:
            token = asked.headers.get("authorization")
            if token != f"Bearer {len(tokens.asked)}" or used.count(token) >= uses:
                return bearer(f"http://{tokens.address}/token")
            used.append(token)
            version = asked.path.rpartition(".")[2]
            digest = {"Docker-Content-Digest": f"sha256:{version:0>64}"}
            return Answer(headers=digest) if asked.method == "HEAD" else tags(*[f"v1.0.{number}" for number in range(8)])

        assert len(asked_of(answer)) == 8
    assert used == ["Bearer 1"] * 3 + ["Bearer 2"] * 3 + ["Bearer 3"] * 3


def test_a_redirect_to_another_host_does_not_get_the_login(docker_config: Path) -> None:
    with serving(lambda _: tags()) as elsewhere:

        def answer(asked: Asked) -> Answer:
            if "authorization" not in asked.headers:
                return Answer(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
            return Answer(307, headers={"Location": f"http://{elsewhere.address}{asked.path}"})

        with serving(answer) as service:
            basic_login(docker_config, service.address)
            assert releases_in(f"{service.address}/x", ALL) == []
    assert [asked.headers.get("authorization") for asked in elsewhere.asked] == [None]


# --- names


@pytest.mark.parametrize(
    ("name", "registry", "path"),
    [
        ("vllm/vllm-openai", "docker.io", "vllm/vllm-openai"),
        ("docker.io/vllm/vllm-openai", "docker.io", "vllm/vllm-openai"),
        ("index.docker.io/vllm/vllm-openai", "docker.io", "vllm/vllm-openai"),
        ("ubuntu", "docker.io", "library/ubuntu"),
        ("ghcr.io/org/team/vllm", "ghcr.io", "org/team/vllm"),
        ("localhost/vllm", "localhost", "vllm"),
        ("127.0.0.1:5000/vllm", "127.0.0.1:5000", "vllm"),
        ("registry:5000/vllm", "registry:5000", "vllm"),
    ],
)
def test_a_name_is_read_as_docker_does(name: str, registry: str, path: str) -> None:
    assert registry_and_path(name) == (registry, path)


@pytest.mark.parametrize("name", ["", "Vllm", "vllm:v1", f"vllm@{DIGEST}", "https://ghcr.io/x", "a//b", "-a.b/c", "x?y"])
def test_a_name_that_is_none_is_the_callers(name: str) -> None:
    with pytest.raises(CallerError, match="not a repository"):
        ImageRepository(name)


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("vllm/vllm-openai", "registry-1.docker.io:443"),
        ("ghcr.io/org/vllm", "ghcr.io:443"),
        ("127.example.org/x", "127.example.org:443"),
        ("registry.example:5000/vllm", "registry.example:5000"),
    ],
)
def test_a_registry_beyond_this_machine_is_asked_by_https_alone(
    name: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(lambda _: Answer(502)) as proxy:
        for variable in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(variable, f"http://{proxy.address}")
        with pytest.raises(HostError) as raised:
            releases_in(name, ALL)
    assert raised.value.kind == "registry-unreachable"
    assert [(asked.method, asked.path) for asked in proxy.asked] == [("CONNECT", address)]


def test_docker_hubs_login_is_named_as_docker_names_it(docker_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    basic_login(docker_config, "https://index.docker.io/v1/")
    monkeypatch.setenv("HOME", str(docker_config.parent))
    assert credentials_for("docker.io") == Credentials(USER, PASSWORD)
    assert credentials_for("ghcr.io") == Credentials()
