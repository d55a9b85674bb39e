"""Login at a registry: sends the credentials of `docker login` in the way that the registry requests."""

import base64
from collections.abc import Generator
from typing import Any, NamedTuple
from urllib.request import parse_http_list, parse_keqv_list

import httpx
from docker import auth, credentials
from docker.errors import DockerException

from vllm_qualify.errors import HostError
from vllm_qualify.releases.source import WATCH


class RefusedError(Exception):
    """The token server of a registry gave no token."""


class Credentials(NamedTuple):
    """The credentials for one registry. `identity` is a token that some logins store instead of user and password."""

    user: str = ""
    password: str = ""
    identity: str = ""

    @property
    def basic(self) -> str:
        return f"Basic {base64.b64encode(f'{self.user}:{self.password}'.encode()).decode()}"


def credentials_for(registry: str) -> Credentials:
    """The credentials in Docker's own configuration (DOCKER_CONFIG) and its credential helpers; empty without a login.

    Raises HostError if the configuration cannot be read, or a helper fails.
    """
    try:
        config = auth.load_config().resolve_authconfig(registry) or {}
    except (DockerException, credentials.StoreError, ValueError) as error:
        problem, remedy = f"Docker's configuration gives no login for {registry}: {error}", f"`docker login {registry}`"
        raise HostError(problem, remedy, WATCH, kind="login-required") from error
    # Files and helpers write its keys in two different ways.
    named = {name.lower(): value for name, value in config.items()}
    return Credentials(named.get("username", ""), named.get("password", ""), named.get("identitytoken", ""))


class Login(httpx.Auth):
    """Basic, or a token (Bearer) of the server that the registry names. Without credentials the token is anonymous.

    A token is kept until the registry refuses it. A request raises RefusedError if there is none, or if the credentials would
    go to a host that the registry did not name. `check` must see every request.
    """

    requires_response_body = True

    def __init__(self, own: Credentials) -> None:
        self._own, self._header = own, ""
        self._realm: httpx.URL | None = None

    def check(self, request: httpx.Request) -> None:
        """For every request, also one that follows a redirect: a login that is in the body goes to the token server alone.

        Raises RefusedError if the token server sends it to another host.
        """
        if request.method == "POST" and not (self._realm and _has_one_origin(request.url, self._realm)):
            raise RefusedError("its token server sends the login to another host")

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if self._header:
            request.headers["Authorization"] = self._header
        response = yield request
        # Only the registry itself says where its login is: a host that it redirects to must not (CVE-2020-15157).
        if response.status_code != httpx.codes.UNAUTHORIZED or not _has_one_origin(response.request.url, request.url):
            return
        scheme, asked = _parse_challenge(response)
        if scheme == "basic" and self._own.password:
            self._header = self._own.basic
        elif scheme == "bearer":
            answer = yield self._token_request(asked, request)
            self._header = f"Bearer {_read_token(answer)}"
        else:
            return
        request.headers["Authorization"] = self._header
        yield request

    def _token_request(self, asked: dict[str, str], request: httpx.Request) -> httpx.Request:
        wanted: dict[str, str] = {name: asked[name] for name in ("service", "scope") if name in asked}
        realm = httpx.URL(asked.get("realm", ""))
        if request.url.scheme == "https" and realm.scheme == "http":
            raise RefusedError("it wants its login sent to an address without encryption")
        self._realm = realm
        # httpx gives a request that is made here no time limit, so it gets the original request's.
        limits: dict[str, Any] = {"timeout": request.extensions["timeout"]}
        if self._own.identity:
            form = wanted | {"grant_type": "refresh_token", "refresh_token": self._own.identity, "client_id": "vllm-qualify"}
            return httpx.Request("POST", realm, data=form, extensions=limits)
        headers = {"Authorization": self._own.basic} if self._own.password else {}
        return httpx.Request("GET", realm.copy_merge_params(wanted), headers=headers, extensions=limits)


def _has_one_origin(one: httpx.URL, other: httpx.URL) -> bool:
    return (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)


def _parse_challenge(response: httpx.Response) -> tuple[str, dict[str, str]]:
    scheme, _, rest = response.headers.get("WWW-Authenticate", "").partition(" ")
    try:
        return scheme.lower(), parse_keqv_list(parse_http_list(rest))
    except ValueError:
        return "", {}


def _read_token(answer: httpx.Response) -> str:
    if answer.is_client_error and answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
        raise RefusedError(f"its token server answered {answer.status_code}")
    answer.raise_for_status()
    try:
        body = answer.json()
        return str(body.get("token") or body["access_token"])
    except (ValueError, LookupError, AttributeError) as error:
        raise RefusedError("its token server gave no token") from error
