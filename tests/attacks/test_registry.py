"""A host that a registry redirects to, or its token server, and that wants the credentials of `docker login`."""

import base64
import json
from pathlib import Path

import httpx
import pytest

from tests.builders.registries import ALL, basic_login, bearer, login
from tests.releases.conftest import docker_config as docker_config
from tests.releases.docker_registry import IDENTITY
from tests.releases.service import Answer, Asked, serving
from vllm_qualify.errors import HostError
from vllm_qualify.releases.login import Credentials, Login, RefusedError
from vllm_qualify.releases.registry import releases_in


def test_a_host_that_the_registry_redirects_to_gets_no_login_by_a_challenge_of_its_own(docker_config: Path) -> None:
    with (
        serving(lambda _: Answer(body=b'{"token": "t"}')) as thief,
        serving(lambda _: bearer(f"http://{thief.address}/t")) as host,
    ):

        def answer(asked: Asked) -> Answer:
            return Answer(307, headers={"Location": f"http://{host.address}{asked.path}"})

        with serving(answer) as registry:
            basic_login(docker_config, registry.address)
            with pytest.raises(HostError) as raised:
                releases_in(f"{registry.address}/x", ALL)
    assert raised.value.kind == "login-required"
    assert thief.asked == []
    assert [asked.headers.get("authorization") for asked in host.asked] == [None]


def test_a_token_server_does_not_pass_a_login_on(docker_config: Path) -> None:
    """The refresh token is in the body, which a redirect with 307 would send again."""
    with serving(lambda _: Answer(body=json.dumps({"access_token": "t"}).encode())) as thief:

        def token(asked: Asked) -> Answer:
            return Answer(307, headers={"Location": f"http://{thief.address}{asked.path}"})

        with serving(token) as tokens, serving(lambda _: bearer(f"http://{tokens.address}/t")) as registry:
            login(docker_config, registry.address, auth=base64.b64encode(b"<token>:").decode(), identitytoken=IDENTITY)
            with pytest.raises(HostError, match="sends the login to another host") as raised:
                releases_in(f"{registry.address}/x", ALL)
    assert raised.value.kind == "login-required"
    assert thief.asked == []
    assert [IDENTITY.encode() in asked.body for asked in tokens.asked] == [True]


def test_a_login_is_not_sent_without_encryption_where_the_registry_has_it() -> None:
    flow = Login(Credentials("user", "password")).auth_flow(httpx.Request("GET", "https://registry.example/v2/"))
    asked = next(flow)
    challenge = {"WWW-Authenticate": 'Bearer realm="http://tokens.example/t",service="s"'}
    with pytest.raises(RefusedError, match="without encryption"):
        flow.send(httpx.Response(401, headers=challenge, request=asked))
