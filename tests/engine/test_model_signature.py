"""Signatures of models that model-signing 1.1.1 itself wrote, and what was changed, added or removed since then."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders.comparisons import server_plan
from vllm_qualify.engine.model_signature import MOST_BYTES, SIGNATURE, check_publisher, check_signed
from vllm_qualify.engine.server import MODEL, Part, ServerPlan
from vllm_qualify.errors import HubError
from vllm_qualify.recipe.publisher import key_id

SIGNED = Path(__file__).parent / "signed"
TEMPLATE = "more/chat_template.jinja"
FILES = {
    "config.json": '{"model_type": "opt"}\n',
    "model.safetensors": "weights\n",
    "pytorch_model.bin": "weights again\n",
    TEMPLATE: "{{ messages }}\n",
    ".gitattributes": "* text\n",
}


def key(name: str) -> str:
    return (SIGNED / f"{name}.pub").read_text()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model, with the signature by a key on P-256."""
    folder = tmp_path / "model"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / SIGNATURE).write_bytes((SIGNED / "p256.sig").read_bytes())
    return folder


def check(model: Path, by: str = "p256", left_out: tuple[str, ...] = ()) -> None:
    check_signed(model, key(by), left_out, "a/model", "check")


def refused(model: Path, by: str = "p256") -> str:
    with pytest.raises(HubError) as raised:
        check(model, by)
    assert (raised.value.kind, raised.value.retry) == ("model-signature", False)
    assert raised.value.remedy
    return raised.value.problem


@pytest.mark.parametrize("curve", ["p256", "p384"])
def test_a_signed_model_is_taken(model: Path, curve: str) -> None:
    (model / SIGNATURE).write_bytes((SIGNED / f"{curve}.sig").read_bytes())
    check(model, curve)


def test_links_as_in_the_hubs_cache_are_followed(model: Path) -> None:
    blob = model.parent / "blob"
    (model / "model.safetensors").rename(blob)
    (model / "model.safetensors").symlink_to(blob)
    check(model)
    blob.write_text("others\n")
    assert "model.safetensors is not what was signed" in refused(model)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "changed": (lambda model: (model / "config.json").write_text("{}"), "config.json is not what was signed"),
    "template": (lambda model: (model / TEMPLATE).write_text("{{ evil }}"), f"{TEMPLATE} is not what was signed"),
    "added": (lambda model: (model / "modeling.py").write_text("evil"), "modeling.py is not what was signed"),
    "hidden": (lambda model: (model / ".evil").write_text("evil"), ".evil is not what was signed"),
    "removed": (lambda model: (model / "config.json").unlink(), "config.json is missing"),
    "moved": (
        lambda model: (model / TEMPLATE).rename(model / "chat_template.jinja"),
        f"chat_template.jinja is not what was signed; {TEMPLATE} is missing",
    ),
    "unsigned": (lambda model: (model / SIGNATURE).unlink(), "a/model has no model.sig"),
    "long": (lambda model: (model / SIGNATURE).write_bytes(b" " * (MOST_BYTES + 1)), "more than 16 MiB"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_is_not_what_was_signed_is_refused(model: Path, change: str) -> None:
    make, message = CHANGES[change]
    make(model)
    assert message in refused(model)


def test_what_is_not_served_need_not_be_there(model: Path) -> None:
    (model / "pytorch_model.bin").unlink()
    check(model, left_out=("pytorch_model.bin",))
    assert "pytorch_model.bin is missing" in refused(model)


@pytest.mark.parametrize(
    ("signature", "by", "message"),
    [
        *((one, other, f"is not by the key {key_id(key(other))[:16]}") for one, other in (("p256", "p384"), ("p384", "p256"))),
        *((form, "p256", "signs something else than files by SHA-256") for form in ("shards", "blake2")),
    ],
)
def test_a_signature_by_another_key_or_of_another_form_is_refused(model: Path, signature: str, by: str, message: str) -> None:
    (model / SIGNATURE).write_bytes((SIGNED / f"{signature}.sig").read_bytes())
    assert message in refused(model, by)


def bundle() -> dict[str, Any]:
    return dict(json.loads((SIGNED / "p256.sig").read_bytes()))


def with_payload(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = bundle()
    statement = json.loads(base64.b64decode(document["dsseEnvelope"]["payload"]))
    change(statement)
    document["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    return json.dumps(document).encode()


def with_envelope(**changes: object) -> bytes:
    document = bundle()
    return json.dumps(document | {"dsseEnvelope": document["dsseEnvelope"] | changes}).encode()


FORGED = {
    "empty": b"",
    "no json": b"\xff\x00",
    "deep": b"[" * 100_000,
    "no object": b"[]",
    "no signature": with_envelope(signatures=[]),
    "two signatures": with_envelope(signatures=bundle()["dsseEnvelope"]["signatures"] * 2),
    "an empty signature": with_envelope(signatures=[{"sig": ""}]),
    "no base64": with_envelope(payload="%%%"),
    "another type": with_envelope(payloadType="text/plain"),
    "another payload": with_payload(lambda statement: statement["predicate"]["resources"].pop()),
    "another space": with_payload(lambda _: None),
    "a certificate": json.dumps(bundle() | {"dsseEnvelope": None}).encode(),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_signature_is_refused(model: Path, forged: str) -> None:
    (model / SIGNATURE).write_bytes(FORGED[forged])
    assert refused(model)


def served(model: str, **changes: Any) -> ServerPlan:
    return server_plan().model_copy(update={"model": model, "revision": None, "signed_by": key("p256")} | changes)


def test_a_folder_is_checked_where_the_recipe_names_a_key(model: Path) -> None:
    check_publisher(served(str(model)), None, "check")
    (model / "config.json").write_text("{}")
    with pytest.raises(HubError, match=r"config\.json is not what was signed"):
        check_publisher(served(str(model)), None, "check")
    check_publisher(served(str(model), signed_by=None), None, "check")


def test_of_the_hub_weights_in_a_second_format_may_be_left_out(model: Path) -> None:
    part = Part(option=MODEL, name="org/model", revision="0" * 40, files=dict.fromkeys(FILES, "sha256:…"))
    of_hub = served("org/model", revision=part.revision, parts=[part])
    (model / "pytorch_model.bin").unlink()
    check_publisher(of_hub, model, "check")
    (model / "model.safetensors").unlink()
    with pytest.raises(HubError, match=r"model\.safetensors is missing"):
        check_publisher(of_hub, model, "check")
