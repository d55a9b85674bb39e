"""The releases that a source has now; for images the versions in an OCI registry, with the digests that tags point to now."""

import hashlib
import ipaddress
import re
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import httpx
from docker import auth
from docker.errors import DockerException
from pydantic import BaseModel, StrictStr, ValidationError

from vllm_qualify.answers import PLAIN, bounded
from vllm_qualify.engine.hub import resolve_commit, wait_asked_s
from vllm_qualify.engine.image import DIGEST, parse_reference
from vllm_qualify.engine.provision import Launch, check_launch
from vllm_qualify.errors import CallerError, HostError, QualifyError
from vllm_qualify.limits import call_within
from vllm_qualify.releases.login import Login, RefusedError, credentials_for
from vllm_qualify.releases.source import WATCH, Available, Source, VersionRule

DOCKER_HUB, DOCKER_HUB_ADDRESS = auth.INDEX_NAME, "registry-1.docker.io"
# Both kinds of index and image. A registry converts or refuses a kind that is not accepted, and the digest would differ.
MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
# Some registries refuse a higher number.
TAGS_PER_PAGE = 100
MOST_PAGES = 1000
# vLLM's own repository has some 150 versions. Of an older tag it is not noticed that it moved.
NEWEST_TAGS = 500
# So many tags are asked for at a time: a registry far away takes a tenth of a second for each.
AT_ONCE = 8
# For one read, for one answer, and for all that a repository is asked.
READ_S, ANSWER_S, WHOLE_S = 30.0, 60.0, 300.0
# Of one answer. A page of 100 tags has some kilobytes; a manifest has 4 MiB at most, by OCI's distribution specification.
MOST_BYTES = 8 * 2**20


def available_at(source: Source) -> list[Available]:
    """The releases of a source, newest first; for a model its one commit. Raises CallerError, HostError."""
    if source.kind == "image":
        return releases_in(source.name, source.rule)
    commit = resolve_commit(source.name, source.revision, WATCH)
    return [Available(identity=commit, tags=[source.revision] if source.revision else [])]


def pin_images(launch: Launch) -> Launch:
    """The launch with its images by tag and digest, without Docker Engine. A host then refuses a tag that has moved since.

    Raises CallerError if the options do not fit or a registry has no such image, else HostError as `releases_in`.
    """
    check_launch(launch)
    images = {"image": (launch.image, "--image"), "client_image": (launch.client_image, "--client-image")}
    return launch.model_copy(update={name: _pin_reference(text, option) for name, (text, option) in images.items() if text})


def _pin_reference(text: str, option: str) -> str:
    image = parse_reference(text, "", option)
    if image.digest or not image.tag:
        return text
    with ImageRepository(image.repository) as repository:
        digest = repository.digest(image.tag)
    if digest is None:
        raise CallerError(f"the registry has no {text}", "check the name and the tag", option)
    return f"{text}@{digest}"


def releases_in(name: str, rule: VersionRule) -> list[Available]:
    """The releases in a repository that the rule allows, newest first: each digest once, with its tags.

    Only the NEWEST_TAGS newest versions are looked at. Raises CallerError if the name is not valid or the registry has no such
    repository, and HostError if it requires a login, is not trusted, or does not answer as one does; with `retry` if the
    problem may be temporary.
    """
    try:
        return call_within(WHOLE_S, lambda: _releases_in(name, rule))
    except TimeoutError as error:
        raise _unreachable_error(name, f"it has not listed its tags within {WHOLE_S:.0f} s") from error


def _releases_in(name: str, rule: VersionRule) -> list[Available]:
    digests: dict[str, list[str]] = {}
    with ImageRepository(name) as repository, ThreadPoolExecutor(AT_ONCE) as threads:
        tags = rule.newest_first(repository.tags())[:NEWEST_TAGS]
        for tag, digest in zip(tags, threads.map(repository.digest, tags), strict=True):
            if digest:
                digests.setdefault(digest, []).append(tag)
    return [Available(identity=digest, tags=tags) for digest, tags in digests.items()]


def registry_and_path(name: str) -> tuple[str, str]:
    """A repository's registry and its path there, by Docker's rules. Raises CallerError."""
    try:
        # In Docker's grammar this fails if the name already has a tag or a digest.
        parse_reference(f"{name}:tag", platform="")
        registry, path = auth.resolve_repository_name(name)
    except (CallerError, DockerException) as error:
        raise CallerError(f"'{name}' is not a repository of images", "write it like vllm/vllm-openai", WATCH) from error
    return registry, f"library/{path}" if registry == DOCKER_HUB and "/" not in path else path


class ImageRepository(AbstractContextManager["ImageRepository"]):
    """A repository, read over HTTP with the credentials of `docker login`; a context manager.

    httpx takes proxies and certificates from the environment (HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE). A registry on this machine
    may use plain HTTP. Nothing is retried here: an error says whether and when a retry may help. The methods raise the same as
    `releases_in`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._registry, path = registry_and_path(name)
        address = DOCKER_HUB_ADDRESS if self._registry == DOCKER_HUB else self._registry
        is_here = _is_this_machine(address)
        login = Login(credentials_for(self._registry))
        self._http = httpx.Client(
            auth=login,
            event_hooks={"request": [login.check], "response": [bounded(ANSWER_S, MOST_BYTES)]},
            headers={"Accept-Encoding": PLAIN},
            timeout=READ_S,
            follow_redirects=True,
            # Docker contacts this machine without a proxy, whatever NO_PROXY says.
            mounts={f"all://{_host_name(address)}": None} if is_here else None,
        )
        with self._explaining_errors():
            self._http.base_url = f"{self._find_scheme(address) if is_here else 'https'}://{address}/v2/{path}/"

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def tags(self) -> list[str]:
        """All tags, in the registry's order."""
        tags: dict[str, None] = {}
        address: httpx.URL | str = f"tags/list?n={TAGS_PER_PAGE}"
        for _ in range(MOST_PAGES):
            page, address = self._read_page(address)
            # The last page can be empty. A registry without paging can return the first page forever.
            is_last = not address or tags.keys() >= set(page)
            tags.update(dict.fromkeys(page))
            if is_last:
                return list(tags)
        raise self._unknown_error(f"its list of tags has no end after {MOST_PAGES} pages")

    def digest(self, tag: str) -> str | None:
        """The digest of the tag's index or manifest, as the registry serves it and Docker pins it. None if the tag is gone."""
        headers = {"Accept": ", ".join(MANIFESTS)}
        with self._explaining_errors():
            answer = self._http.head(f"manifests/{tag}", headers=headers)
            if answer.status_code == httpx.codes.NOT_FOUND:
                return None
            answer.raise_for_status()
            digest = answer.headers.get("Docker-Content-Digest")
            if digest is None:
                body = self._http.get(f"manifests/{tag}", headers=headers).raise_for_status().content
                digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if not re.fullmatch(DIGEST, digest):
            raise self._unknown_error(f"it has no SHA-256 digest for the tag {tag}")
        return str(digest)

    def _find_scheme(self, address: str) -> str:
        """The scheme of a registry on this machine. HTTPS is tried first, as in Docker."""
        try:
            self._http.get(f"https://{address}/v2/", auth=None)
        except httpx.TransportError as error:
            return "https" if _is_untrusted(error) else "http"
        return "https"

    def _read_page(self, address: httpx.URL | str) -> tuple[list[str], httpx.URL | str]:
        with self._explaining_errors():
            answer = self._http.get(address).raise_for_status()
            following = answer.links.get("next", {}).get("url")
            # Only the path of a link counts. Behind a proxy it can name another host, which must not get our login.
            after = self._http.base_url.copy_with(raw_path=answer.url.join(following).raw_path) if following else ""
        try:
            return _Tags.model_validate_json(answer.content).tags or [], after
        except ValidationError as error:
            raise self._unknown_error("its answer is not a list of tags") from error

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPStatusError as error:
            raise self._refusal_error(error.response) from error
        except RefusedError as error:
            raise self._login_error(str(error)) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if not _is_untrusted(error):
                raise _unreachable_error(self._name, str(error)) from error
            problem = f"the certificate of the registry of {self._name} is not trusted: {error}"
            remedy = "name its authority's certificate in SSL_CERT_FILE"
            raise HostError(problem, remedy, WATCH, kind="registry-untrusted") from error

    def _refusal_error(self, answer: httpx.Response) -> QualifyError:
        said = f"it answered {answer.status_code} {answer.reason_phrase}".strip()
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            return self._login_error(said)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return CallerError(f"the registry has no {self._name}", "check the name", WATCH, kind="image-missing")
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            problem, remedy = f"the registry's rate limit stopped {self._name}", "wait, or log in with `docker login`"
            wait_s = wait_asked_s(answer.headers)
            return HostError(problem, remedy, WATCH, kind="registry-rate-limit", retry=True, retry_after_s=wait_s)
        if answer.is_server_error:
            return _unreachable_error(self._name, said, wait_asked_s(answer.headers))
        return self._unknown_error(said)

    def _login_error(self, said: str) -> HostError:
        login = "docker login" if self._registry == DOCKER_HUB else f"docker login {self._registry}"
        problem = f"the registry asks for a login, or has no {self._name}: {said}"
        return HostError(problem, f"`{login}`, and check the name", WATCH, kind="login-required")

    def _unknown_error(self, said: str) -> HostError:
        problem, remedy = f"the registry of {self._name} does not answer as one does: {said}", "check the address"
        return HostError(problem, remedy, WATCH, kind="registry-unknown")


class _Tags(BaseModel):
    """A page of tags. Some registries say null for none."""

    tags: list[StrictStr] | None


def _unreachable_error(name: str, said: str, wait_s: float = 0.0) -> HostError:
    problem, remedy = f"the registry of {name} does not answer: {said}", "check the registry, the network and the proxy"
    return HostError(problem, remedy, WATCH, kind="registry-unreachable", retry=True, retry_after_s=wait_s)


def _is_this_machine(address: str) -> bool:
    host = _host_name(address)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(address: str) -> str:
    return address.partition(":")[0]


def _is_untrusted(error: BaseException | None) -> bool:
    while error and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None
