"""A server that answers, compared with the approved one by its own words: /version, /v1/models and its page of metrics.

The server is hostile: its replies are bounded in time and size, typed, and lead to no other server. A server can say anything
of itself, and says nothing about the content of its weights.
"""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated
from urllib.parse import urlsplit

import httpx
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError

from vllm_qualify import answers
from vllm_qualify.approval.here.finding import DIFFERENT, SAME, Finding, compare, describe_engine, untold
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.engine.hub import folder_name
from vllm_qualify.engine.metrics_page import samples_of
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.cell import Release
from vllm_qualify.publish.bundle import evidence_key
from vllm_qualify.publish.store import Store

PLACE = "--here"
ANSWER_S = 10.0
MOST_BYTES = 4 * 2**20
MOST_MODELS = 1_000
CACHE = "vllm:cache_config_info"
# Of vLLM's CacheConfig: what its options set. The others depend on the free memory of a machine.
CACHE_SETTINGS = (
    "block_size",
    "cache_dtype",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "kv_offloading_size",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "num_gpu_blocks_override",
    "prefix_caching_hash_algo",
    "sliding_window",
)
_BY_URL = "a URL does not show it"


class _Version(BaseModel):
    version: StrictStr


class _Card(BaseModel):
    id: StrictStr
    root: StrictStr | None = None
    max_model_len: StrictInt | None = None


class _Cards(BaseModel):
    data: Annotated[list[_Card], Field(max_length=MOST_MODELS)]


class _NoAnswerError(Exception):
    """The server does not say it; the text says why."""


def check_url(text: str) -> str:
    """A server's address without a slash at its end, and without `/v1`. Raises CallerError if it is none over HTTP."""
    try:
        # httpx lets brackets pass that are not closed.
        urlsplit(text)
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError) as error:
        raise CallerError(f"the address is not one: {error}", _REMEDY, PLACE) from error
    if url.scheme not in ("http", "https") or not url.host:
        raise CallerError("only servers at http:// and https:// are asked", _REMEDY, PLACE)
    if url.userinfo or url.query or url.fragment:
        raise CallerError("the address has more than a server and a path", _REMEDY, PLACE)
    return str(url).rstrip("/").removesuffix("/v1")


_REMEDY = "write it like http://127.0.0.1:8000"


def compare_server(url: str, release: Release, server: ServerPlan, own_page: str | None) -> list[Finding]:
    """Compare what a server says of itself. `own_page` is the qualified server's page of metrics, if it is at hand."""
    told = [
        *_compare_version(url, release, server),
        *_compare_models(url, release, server),
        *_compare_cache(url, server, own_page),
    ]
    return [*told, *_list_untold(release, server)]


def read_own_page(store: Store, run: PublishedRun) -> str | None:
    """The qualified server's own page of metrics, of before its first load; None without a load. Raises StoreError."""
    for stage in run.report.stages:
        for file in stage.files:
            path = PurePosixPath(file.path)
            if path.parent.name == "load" and path.match("metrics-*-before.txt"):
                return store.get(evidence_key(file), MOST_BYTES).decode(errors="replace")
    return None


def _list_untold(release: Release, server: ServerPlan) -> Iterator[Finding]:
    revision = ", ".join([release.revision, *(part.revision for part in server.parts if part.option != "model")])
    yield untold("digest of the weights", _BY_URL, revision)
    yield untold("digest of the engine", _BY_URL, describe_engine(release, server))
    if server.variables:
        yield untold("environment variables", _BY_URL, ", ".join(sorted(server.variables)))
    options = [name for name in server.arguments if name not in ("max-model-len",)]
    yield untold("other options of the server", _BY_URL, ", ".join(options) or "none")


def _ask(url: str, path: str) -> bytes:
    """Raises _NoAnswerError."""
    try:
        answer = answers.ask_within("GET", f"{url}{path}", ANSWER_S, MOST_BYTES)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise _NoAnswerError(f"{path} asks for a key: name an address behind the gateway that adds it")
        if answer.status_code != httpx.codes.OK:
            raise _NoAnswerError(f"{path} answers {answer.status_code}")
        return answer.content
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _NoAnswerError(f"{path}: {str(error) or type(error).__name__}") from error


def _compare_version(url: str, release: Release, server: ServerPlan) -> Iterator[Finding]:
    what, approved = f"version of {server.engine_kind.title}", release.engine.version
    try:
        here = _Version.model_validate_json(_ask(url, "/version")).version
    except _NoAnswerError as error:
        yield untold(what, str(error), approved)
    except ValidationError:
        yield untold(what, "/version does not say one", approved)
    else:
        state = SAME if _is_same_version(approved, here) else DIFFERENT
        yield Finding(what=what, state=state, approved=approved, here=here[:100])


def _is_same_version(approved: str, here: str) -> bool:
    """Whether both name one version. A build's own mark (`+cpu`) counts if both have one: a server may leave it out."""
    try:
        first, second = Version(approved), Version(here)
    except InvalidVersion:
        return approved == here
    return first == second or (first.public == second.public and None in (first.local, second.local))


def _compare_models(url: str, release: Release, server: ServerPlan) -> Iterator[Finding]:
    names, approved_len = sorted(server.names), server.arguments.get("max-model-len")
    try:
        cards = _Cards.model_validate_json(_ask(url, "/v1/models")).data
    except (_NoAnswerError, ValidationError) as error:
        why = str(error) if isinstance(error, _NoAnswerError) else "/v1/models does not list models as vLLM does"
        for what, says in (("served names", names), ("model", release.model), ("longest context", approved_len or "")):
            yield untold(what, why, says)
        return
    yield compare("served names", names, sorted({card.id for card in cards}))
    own = next((card for card in cards if card.id in names), None)
    yield _compare_root(release, server, own.root if own else None)
    yield _compare_length(approved_len, own.max_model_len if own else None)


def _compare_root(release: Release, server: ServerPlan, root: str | None) -> Finding:
    if root is None:
        return untold("model", "/v1/models does not say it", release.model)
    if server.is_local:
        return untold("model", "a path does not tell what is in it: name the folder with --here", release.model, root)
    cached = PurePosixPath(folder_name(release.model), "snapshots", release.revision)
    if PurePosixPath(root).parts[-3:] == cached.parts:
        return Finding(what="model", state=SAME, approved=release.model, here=f"{release.model} at {release.revision}")
    return compare("model", release.model, root)


def _compare_length(approved: object, here: int | None) -> Finding:
    what = "longest context"
    is_number = isinstance(approved, int | str) and str(approved).isdecimal()
    if here is None or not is_number:
        note = "/v1/models does not say it" if here is None else "the approved options leave it to the model"
        return untold(what, note, "" if approved is None else approved, "" if here is None else here)
    return compare(what, int(str(approved)), here)


def _compare_cache(url: str, server: ServerPlan, own_page: str | None) -> Iterator[Finding]:
    what = "settings of the cache"
    if own_page is None:
        yield untold(what, "the evidence is not at hand: name the cell in its store")
        return
    approved = _read_settings(own_page)
    if not approved:
        yield untold(what, "the qualified server did not tell them")
        return
    try:
        here = _read_settings(_ask(url, server.engine_kind.metrics_path).decode(errors="replace"))
    except _NoAnswerError as error:
        yield untold(what, str(error))
        return
    for name in CACHE_SETTINGS:
        if name in approved and name in here:
            yield compare(name, approved[name], here[name])
        elif name in approved:
            yield untold(name, "its page of metrics does not say it", approved[name])


def _read_settings(page: str) -> Mapping[str, str]:
    """The settings of the cache on a page of metrics, all engines' values of each. Empty if it does not tell them."""
    try:
        samples = [each for each in samples_of(page, lambda line: line.startswith(CACHE)) if each.name == CACHE]
    # The parser's own errors for what is no page of metrics.
    except (ValueError, LookupError, TypeError):
        return {}
    values = {name: sorted({each.labels[name] for each in samples if name in each.labels}) for name in CACHE_SETTINGS}
    return {name: " or ".join(found) for name, found in values.items() if found}
