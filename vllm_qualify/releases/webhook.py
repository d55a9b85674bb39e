"""Incoming webhooks of registries and of the hub: hints that a source should be looked at now.

Nothing that they say is believed: whoever looks asks the registry or the hub itself.
"""

import hmac
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from vllm_qualify.approval.layout import parsed
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.releases.registry import registry_and_path
from vllm_qualify.releases.source import Source

WEBHOOK = "webhook"
_HARBOR_PUSHES = ("PUSH_ARTIFACT", "harbor.artifact.pushed")


class Hint(NamedTuple):
    """Something was pushed to an image's repository, named without its registry, or to a model."""

    kind: Literal["image", "model"]
    name: str


def secret_in(headers: Mapping[str, str]) -> str:
    """What a sender shows: Hugging Face in a header of its own, a registry and Harbor in `Authorization`; empty without one.

    Docker Hub has no such header: its secret can only be a part of the webhook's address.
    """
    named = {name.lower(): value for name, value in headers.items()}
    return named.get("x-webhook-secret") or named.get("authorization", "").removeprefix("Bearer ")


def check_secret(shown: str, expected: str) -> None:
    """Raises CallerError if they differ, HostError if none is expected. The time that it takes tells nothing of the secret."""
    if not expected:
        raise HostError("no secret is set for webhooks", "set one, here and at the sender", WEBHOOK, kind="webhook-secret")
    if not hmac.compare_digest(shown.encode(), expected.encode()):
        raise CallerError("the webhook's secret is not ours", "set the same at the sender", WEBHOOK, kind="webhook-secret")


def hints_in(body: bytes) -> list[Hint]:
    """What a webhook of a Docker registry, Docker Hub, Harbor or Hugging Face says; none if nothing was pushed.

    Raises:
        CallerError: it is of none of them.
    """
    try:
        document = parsed(body)
        return list(dict.fromkeys(_hints(document)))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = "this is no webhook of a Docker registry, Docker Hub, Harbor or Hugging Face"
        raise CallerError(problem, "see what its sender sends", WEBHOOK, kind="webhook-body") from error


def meant(sources: Iterable[Source], hints: Iterable[Hint]) -> list[Source]:
    """The sources that should be looked at. By which name a registry is known differs, so its path alone counts."""
    wanted = {(hint.kind, hint.name.casefold()) for hint in hints}
    return [source for source in sources if (source.kind, _path(source).casefold()) in wanted]


def _path(source: Source) -> str:
    return registry_and_path(source.name)[1] if source.kind == "image" else source.name


def _hints(document: dict[str, Any]) -> list[Hint]:
    if "events" in document:
        return [hint for event in document["events"] for hint in _of_registry(event)]
    if "push_data" in document:
        return [_image(document["repository"]["repo_name"])]
    if "repo" in document:
        return _of_hugging_face(document)
    return _of_harbor(document)


def _of_registry(event: dict[str, Any]) -> list[Hint]:
    """A pushed layer has no tag."""
    target = event["target"]
    return [_image(target["repository"])] if event["action"] == "push" and target.get("tag") else []


def _of_harbor(document: dict[str, Any]) -> list[Hint]:
    """In Harbor's own form, or as a CloudEvent."""
    about = document["event_data"] if "event_data" in document else document["data"]
    name = about["repository"]["repo_full_name"]
    return [_image(name)] if document["type"] in _HARBOR_PUSHES else []


def _of_hugging_face(document: dict[str, Any]) -> list[Hint]:
    scope, repo = document["event"]["scope"], document["repo"]
    is_push = scope.split(".")[0] == "repo" and repo["type"] == "model"
    return [Hint("model", _text(repo["name"]))] if is_push else []


def _image(name: object) -> Hint:
    return Hint("image", _text(name))


def _text(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError("a name is missing")
    return name
