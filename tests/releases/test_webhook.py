"""Webhooks as their senders write them; forged and broken ones."""

import json
from contextlib import suppress

import pytest
from huggingface_hub import WebhookPayload
from hypothesis import given
from hypothesis import strategies as st

from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.releases.source import ImageSource, ModelSource, Source
from vllm_qualify.releases.webhook import Hint, check_secret, hints_in, meant, secret_in

DIGEST = "sha256:" + "a" * 64
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def event(action: str = "push", **target: object) -> dict[str, object]:
    return {
        "id": "320678d8-ca14-430f-8bb6-4ca139cd83f7",
        "action": action,
        "target": {"mediaType": MANIFEST, "digest": DIGEST, "repository": "vllm/vllm-openai", "tag": "v0.32.0", **target},
        "request": {"host": "registry.example:5000", "method": "PUT"},
    }


def harbor(type_: str = "PUSH_ARTIFACT") -> dict[str, object]:
    resources = [{"digest": DIGEST, "tag": "v0.32.0", "resource_url": "harbor.example/vllm/vllm-openai:v0.32.0"}]
    repository = {"name": "vllm-openai", "namespace": "vllm", "repo_full_name": "vllm/vllm-openai", "repo_type": "private"}
    return {"type": type_, "occur_at": 1690000000, "event_data": {"resources": resources, "repository": repository}}


def cloud_event(type_: str = "harbor.artifact.pushed") -> dict[str, object]:
    return {"specversion": "1.0", "type": type_, "source": "/projects/2", "data": harbor()["event_data"]}


def hugging_face(scope: str = "repo.content", type_: str = "model") -> dict[str, object]:
    return {
        "event": {"action": "update", "scope": scope},
        "repo": {"type": type_, "name": "org/Tiny-Llama", "id": "6", "private": False, "headSha": "c" * 40} | HUB_BESIDES,
        "webhook": {"id": "6", "version": 3},
    }


HUB_BESIDES = {"owner": {"id": "7"}, "url": {"web": "https://huggingface.co/org/Tiny-Llama"}}
DOCKER_HUB = {
    "callback_url": "https://registry.hub.docker.com/u/vllm/vllm-openai/hook/2141/",
    "push_data": {"pushed_at": 1417566161, "pusher": "ci", "tag": "v0.32.0"},
    "repository": {"name": "vllm-openai", "namespace": "vllm", "repo_name": "vllm/vllm-openai", "status": "Active"},
}
IMAGE, MODEL = Hint("image", "vllm/vllm-openai"), Hint("model", "org/Tiny-Llama")


def body(document: object) -> bytes:
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("document", "hints"),
    [
        ({"events": [event()]}, [IMAGE]),
        ({"events": [event(), event(tag="v0.32.1")]}, [IMAGE]),
        ({"events": [event(repository="a/b"), event()]}, [Hint("image", "a/b"), IMAGE]),
        ({"events": [event("pull"), event("delete")]}, []),
        ({"events": [event(tag="", mediaType="application/octet-stream")]}, []),
        ({"events": []}, []),
        (DOCKER_HUB, [IMAGE]),
        (harbor(), [IMAGE]),
        (harbor("DELETE_ARTIFACT"), []),
        (cloud_event(), [IMAGE]),
        (cloud_event("harbor.artifact.pulled"), []),
        (hugging_face(), [MODEL]),
        (hugging_face("repo"), [MODEL]),
        (hugging_face("discussion.comment"), []),
        (hugging_face(type_="dataset"), []),
    ],
)
def test_what_a_webhook_says(document: object, hints: list[Hint]) -> None:
    assert hints_in(body(document)) == hints


def test_the_hubs_webhook_is_as_its_own_library_reads_it() -> None:
    WebhookPayload.model_validate(hugging_face())


def test_a_digest_in_it_is_not_believed() -> None:
    said = [body(DOCKER_HUB), body({"events": [event(digest="sha256:" + "e" * 64)]}), body(hugging_face())]
    assert all("e" * 64 not in str(hint) and "c" * 40 not in str(hint) for each in said for hint in hints_in(each))


BROKEN = [
    b"",
    b"{",
    b"\xff",
    b"[]",
    b"{}",
    b"null",
    b"[" * 100_000,
    body({"events": None}),
    body({"events": [None]}),
    body({"events": [{"action": "push", "target": {"tag": "1"}}]}),
    body({"events": [event(repository=7)]}),
    body({"push_data": {}, "repository": {}}),
    body({"push_data": {}, "repository": {"repo_name": ""}}),
    body({"type": "PUSH_ARTIFACT", "event_data": {}}),
    body({"event": {"scope": 7}, "repo": {}}),
    body({"repo": {"type": "model", "name": "a/b"}}),
]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_body_of_nobody_gives_one_error(broken: bytes) -> None:
    with pytest.raises(CallerError, match="no webhook of") as raised:
        hints_in(broken)
    assert (raised.value.kind, raised.value.place) == ("webhook-body", "webhook")


JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(
                [
                    "events",
                    "event",
                    "repo",
                    "push_data",
                    "event_data",
                    "data",
                    "repository",
                    "target",
                    "type",
                    "action",
                    "scope",
                ]
            ),
            inner,
        )
    ),
)


@given(JSON)
def test_whatever_comes_is_understood_or_refused(document: object) -> None:
    with suppress(CallerError):
        assert all(hint.name for hint in hints_in(body(document)))


SOURCES: list[Source] = [
    ImageSource(name="vllm/vllm-openai", recipe="llama"),
    ImageSource(name="registry.example:5000/vllm/vllm-openai", recipe="llama"),
    ImageSource(name="registry.example:5000/vllm", recipe="llama"),
    ImageSource(name="ubuntu", recipe="llama"),
    ModelSource(name="org/tiny-llama", recipe="llama"),
    ModelSource(name="vllm/vllm-openai", recipe="llama"),
]


@pytest.mark.parametrize(
    ("hint", "which"),
    [
        (IMAGE, [0, 1]),
        (Hint("image", "library/ubuntu"), [3]),
        (MODEL, [4]),
        (Hint("image", "openai"), []),
    ],
)
def test_the_sources_that_are_meant(hint: Hint, which: list[int]) -> None:
    assert meant(SOURCES, [hint]) == [SOURCES[number] for number in which]


@pytest.mark.parametrize(
    "headers",
    [{"X-Webhook-Secret": "ours"}, {"x-webhook-secret": "ours"}, {"Authorization": "Bearer ours"}, {"Authorization": "ours"}],
)
def test_the_secret_is_where_its_sender_puts_it(headers: dict[str, str]) -> None:
    check_secret(secret_in(headers), "ours")


@pytest.mark.parametrize("shown", ["", "our", "ourss", "OURS", "öurs"])
def test_another_secret_is_refused(shown: str) -> None:
    with pytest.raises(CallerError) as raised:
        check_secret(secret_in({"X-Webhook-Secret": shown}), "ours")
    assert raised.value.kind == "webhook-secret"
    assert "ours" not in str(raised.value).replace("is not ours", "")


def test_without_a_secret_of_ours_nobody_comes_in() -> None:
    with pytest.raises(HostError) as raised:
        check_secret("", "")
    assert raised.value.kind == "webhook-secret"
