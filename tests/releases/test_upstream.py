"""A source is asked where it is."""

import json

import pytest

from tests.releases.service import Answer, Asked, serving
from vllm_qualify.releases.registry import available_at
from vllm_qualify.releases.source import Available, ImageSource, ModelSource, VersionRule

COMMIT, DIGEST = "9" * 40, "sha256:" + "a" * 64


@pytest.mark.parametrize(("revision", "tags"), [(None, []), ("main", ["main"])])
def test_a_model_is_at_one_commit(revision: str | None, tags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _: Answer(body=json.dumps({"id": "org/tiny", "sha": COMMIT}).encode())) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://{hub.address}")
        releases = available_at(ModelSource(name="org/tiny", recipe="llama", revision=revision))
    assert releases == [Available(identity=COMMIT, tags=tags)]
    assert ("revision" in hub.asked[0].path) == (revision is not None)


def test_an_image_has_what_its_rule_lets_through() -> None:
    def answer(asked: Asked) -> Answer:
        if asked.method == "HEAD":
            return Answer(headers={"Docker-Content-Digest": DIGEST})
        return Answer(body=json.dumps({"tags": ["v0.12.0", "v0.13.0"]}).encode())

    with serving(answer) as registry:
        source = ImageSource(name=f"{registry.address}/vllm", recipe="llama", rule=VersionRule(versions="<0.13"))
        assert available_at(source) == [Available(identity=DIGEST, tags=["v0.12.0"])]
