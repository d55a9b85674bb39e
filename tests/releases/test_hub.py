"""The hub's answers, from a server of the tests' own at HF_ENDPOINT."""

import json

import huggingface_hub.constants
import pytest

from tests.releases.service import Answer, serving
from vllm_qualify.engine.hub import Repository, fetch, resolve_commit
from vllm_qualify.errors import CallerError, HostError, QualifyError
from vllm_qualify.releases.registry import available_at
from vllm_qualify.releases.source import Available, ModelSource

MODEL, COMMIT = "org/tiny-llama", "9" * 40


def failure_of(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> QualifyError:
    with serving(lambda _: answer) as hub, pytest.raises(QualifyError) as raised:
        monkeypatch.setenv("HF_ENDPOINT", f"http://{hub.address}/")
        resolve_commit(MODEL, "main", "check")
    return raised.value


def info(**fields: object) -> Answer:
    return Answer(body=json.dumps({"id": MODEL, **fields}).encode())


def test_a_storage_that_does_not_answer_is_the_hubs_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """hf_xet 1.8 raises a bare RuntimeError: meta-pytorch/torchforge#109, huggingface/xet-core#394."""
    said = "Task error: File reconstruction error: CAS Client Error: Request middleware error: error sending request for url"

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(HostError) as raised:
        fetch(Repository(name=MODEL, commit=COMMIT), "check")
    assert (raised.value.kind, raised.value.retry, said in raised.value.problem) == ("hub-unreachable", True, True)


@pytest.mark.parametrize(
    ("revision", "path"),
    [
        (None, f"/api/models/{MODEL}"),
        ("main", f"/api/models/{MODEL}/revision/main"),
        ("refs/pr/1", f"/api/models/{MODEL}/revision/refs%2Fpr%2F1"),
    ],
)
def test_a_model_is_at_one_commit(revision: str | None, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    with serving(lambda _: info(sha=COMMIT)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://{hub.address}/")
        releases = available_at(ModelSource(name=MODEL, recipe="llama", revision=revision))
    assert releases == [Available(identity=COMMIT, tags=[revision] if revision else [])]
    assert [(asked.path, asked.headers["authorization"]) for asked in hub.asked] == [(path, "Bearer hf_ours")]


@pytest.mark.parametrize(
    ("status", "code", "kind", "whose", "retry"),
    [
        (401, "RepoNotFound", "login-required", HostError, False),
        (401, "", "login-required", HostError, False),
        (403, "GatedRepo", "login-required", HostError, False),
        (404, "RepoNotFound", "model-missing", CallerError, False),
        (404, "RevisionNotFound", "model-missing", CallerError, False),
        (429, "", "hub-rate-limit", HostError, True),
        (500, "", "hub-unreachable", HostError, True),
        (503, "", "hub-unreachable", HostError, True),
        (418, "", "hub-unreachable", HostError, False),
    ],
)
def test_a_refusal_names_who_must_act(
    status: int, code: str, kind: str, whose: type[QualifyError], retry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = failure_of(Answer(status, headers={"X-Error-Code": code}), monkeypatch)
    assert (error.kind, type(error), error.retry, error.place) == (kind, whose, retry, "check")
    assert f"{MODEL} at main" in error.problem
    assert kind != "login-required" or "HF_TOKEN" in error.remedy


@pytest.mark.parametrize("answer", [info(), info(sha=None), Answer(body=b"<html>"), Answer(body=b"[]"), Answer(body=b"{}")])
def test_an_answer_without_a_commit_is_no_commit(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failure_of(answer, monkeypatch).kind == "hub-unknown"


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _: Answer()) as gone:
        monkeypatch.setenv("HF_ENDPOINT", f"http://{gone.address}")
    with pytest.raises(HostError) as raised:
        resolve_commit(MODEL, None, "check")
    assert (raised.value.kind, raised.value.retry) == ("hub-unreachable", True)


def test_offline_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # Read when the library is imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    error = failure_of(info(sha=COMMIT), monkeypatch)
    assert (error.kind, error.retry) == ("hub-offline", False)
    assert "HF_HUB_OFFLINE" in error.remedy


def test_a_name_that_is_none_is_the_callers() -> None:
    with pytest.raises(CallerError, match="not a model of the hub"):
        resolve_commit("a/b/c", None, "check")
