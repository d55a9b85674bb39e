"""Attempts that never succeeded, so that they go on failing: confused envelopes, keys given twice, hostile plans and fields."""

import base64
import json
import os
import random
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from rich.console import Console

from tests.approval.builder import CELL, NOW, RUN, approved, made_key, publish_report
from tests.approval.conftest import key, store
from tests.builders.server_plans import AWKWARD, IMAGE, PROCESS, plan, run_by_a_shell
from tests.html import Reader
from tests.report import builder
from tests.report.builder import page_link
from vllm_qualify.approval.errors import NotApprovedError, OtherKeyError, TamperedError
from vllm_qualify.approval.formats import deployable
from vllm_qualify.approval.layout import approval_key, pointer_key, readable
from vllm_qualify.approval.published import PublishedRun, read_run, stored_object
from vllm_qualify.approval.signing import IN_TOTO, PrivateKey, new_key, open_envelope, public_keys, sign
from vllm_qualify.approval.verify import export, verify
from vllm_qualify.engine.server import ServerPlan, config_text
from vllm_qualify.errors import HostError, StoreError
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.store import MOST_DOCUMENT_BYTES, Store, TooLongError
from vllm_qualify.report.diff import diff
from vllm_qualify.report.model import Report
from vllm_qualify.report.page import render_page
from vllm_qualify.report.terminal import show_diff, show_report
from vllm_qualify.runs.judging import check_judgement

__all__ = ["key", "store"]

Document = dict[str, Any]
STATEMENT = b'{"_type":"https://in-toto.io/Statement/v1"}'


@pytest.fixture
def bundle(store: Store, key: PrivateKey, tmp_path: Path) -> DirectoryStore:
    """An exported approval: whoever has it may change every byte."""
    approved(store, publish_report(store, tmp_path / "runs"), key)
    export(store, CELL, tmp_path / "bundle")
    return DirectoryStore(tmp_path / "bundle")


def rewrite(store: Store, key: str, change: Callable[[bytes], bytes]) -> None:
    path = Path(store.locate(key))
    path.chmod(0o644)
    path.write_bytes(change(path.read_bytes()))


# --- envelopes


def signed_raw(key: PrivateKey, text: bytes) -> Document:
    """The signature of a text as it is, without DSSE's own framing."""
    signature = key.sign(text)
    return {"keyid": signature.keyid, "sig": base64.b64encode(bytes.fromhex(signature.signature)).decode()}


def pae(kind: str, payload: bytes) -> bytes:
    """DSSE's framing, by its specification: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md"""
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)


CONFUSIONS: dict[str, Callable[[bytes], bytes]] = {
    "the payload alone": lambda payload: payload,
    "its base64": base64.b64encode,
    "another type": lambda payload: pae("application/json", payload),
    "no type": lambda payload: pae("", payload),
    "an older framing": lambda payload: pae(IN_TOTO, payload).replace(b"DSSEv1", b"DSSEv0"),
    "a longer type and a shorter payload": lambda payload: pae(f"{IN_TOTO} {len(payload)}", payload[1:]),
    "a length that is not its own": lambda payload: pae(IN_TOTO, payload + b" ")[:-1],
    "nothing": lambda _: b"",
}


def enveloped(payload: bytes, *signatures: Document) -> bytes:
    return readable({"payload": base64.b64encode(payload).decode(), "payloadType": IN_TOTO, "signatures": list(signatures)})


def test_the_framing_here_is_the_one_that_is_signed(key: PrivateKey) -> None:
    """Else none of the confusions below would show anything."""
    body = enveloped(STATEMENT, signed_raw(key, pae(IN_TOTO, STATEMENT)))
    assert body == sign(STATEMENT, key)
    assert open_envelope(body, [key.public_key], "here").payload == STATEMENT


@pytest.mark.parametrize("name", CONFUSIONS)
def test_what_the_key_signed_for_something_else_signs_no_approval(key: PrivateKey, name: str) -> None:
    body = enveloped(STATEMENT, signed_raw(key, CONFUSIONS[name](STATEMENT)))
    with pytest.raises(TamperedError):
        open_envelope(body, [key.public_key], "here")


def test_a_second_signature_brings_no_trust_to_the_first(key: PrivateKey, tmp_path: Path) -> None:
    """Of an own key beside the trusted one, over another payload."""
    other = made_key(tmp_path / "other.pem")
    trusted, own = (signed_raw(each, pae(IN_TOTO, text)) for each, text in ((key, b"{}"), (other, STATEMENT)))
    for signatures in ([trusted, own], [own, trusted], [own | {"keyid": trusted["keyid"]}], [trusted | {"sig": own["sig"]}]):
        with pytest.raises(TamperedError):
            open_envelope(enveloped(STATEMENT, *signatures), [key.public_key], "here")
    with pytest.raises(OtherKeyError):
        open_envelope(enveloped(STATEMENT, own), [key.public_key], "here")


def test_a_public_key_of_the_forgers_in_the_place_of_the_trusted_one_opens_nothing(
    bundle: DirectoryStore, key: PrivateKey, tmp_path: Path
) -> None:
    """The whole bundle signed anew by another key holds by that key alone."""
    new_key(tmp_path / "forger.pem")
    forger = public_keys([tmp_path / "forger.pem.pub"])
    with pytest.raises(OtherKeyError):
        verify(bundle, CELL, forger, NOW)
    opened = open_envelope(bundle.get(approval_key(CELL, RUN)), [key.public_key], "here")
    forged = sign(opened.payload, made_key(tmp_path / "forgers.pem"))
    rewrite(bundle, approval_key(CELL, RUN), lambda _: forged)
    with pytest.raises(OtherKeyError):
        verify(bundle, CELL, [key.public_key], NOW)


# --- a key given twice


@pytest.mark.parametrize(
    ("document", "name"),
    [(approval_key(CELL, RUN), "payload"), (pointer_key(CELL), "entries"), (manifest_key(CELL, RUN), "cell")],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_key_given_twice_is_found(bundle: DirectoryStore, key: PrivateKey, document: str, name: str, is_first: bool) -> None:
    """One reader takes the first value, another one the last."""

    def twice(body: bytes) -> bytes:
        text = body.decode()
        assert f'"{name}":' in text
        evil = f'"{name}": "evil", '
        return text.replace("{", f"{{{evil}", 1).encode() if is_first else f"{text.rstrip()[:-1]}, {evil[:-2]}}}\n".encode()

    rewrite(bundle, document, twice)
    with pytest.raises((NotApprovedError, StoreError)):
        verify(bundle, CELL, [key.public_key], NOW)


def replace_report(store: Store, run: PublishedRun, body: bytes) -> None:
    """The store has another report for the run, and a manifest that names it."""
    rewrite(store, run.report_object.key, lambda _: body)
    named = stored_object(run.report_object.key, body)

    def mended(manifest: bytes) -> bytes:
        document = json.loads(manifest)
        document["objects"] = [named.model_dump() if each["key"] == named.key else each for each in document["objects"]]
        return json.dumps(document).encode()

    rewrite(store, manifest_key(CELL, RUN), mended)


@pytest.mark.parametrize(("name", "evil"), [("model", "evil/model"), ("arguments", {}), ("served_model_name", "evil")])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_report_with_a_key_given_twice_is_not_signed(
    store: Store, tmp_path: Path, key: PrivateKey, name: str, evil: object, is_first: bool
) -> None:
    """Two parsers read it: one for what is judged, one for what is stated."""
    run = publish_report(store, tmp_path / "runs")
    report = json.loads(store.get(run.report_object.key))
    written = f'"server": {json.dumps(report["plan"]["server"])}'
    added = f'"{name}": {json.dumps(evil)}'
    twice = written.replace("{", f"{{{added}, ", 1) if is_first else f"{written[:-1]}, {added}}}"
    body = json.dumps(report).replace(written, twice).encode()
    assert body.count(twice.encode()) == 1
    replace_report(store, run, body)
    with pytest.raises(StoreError, match="a key is given twice"):
        approved(store, read_run(store, CELL, RUN), key)


@pytest.mark.parametrize("path", ["load/a b", "load/.hidden", "load/a\0b", "load/" + "a" * 300, "load/a\u00e9", "smoke"])
def test_evidence_with_a_name_that_no_store_takes_is_refused_in_one_line(store: Store, tmp_path: Path, path: str) -> None:
    """`smoke` is the folder of other evidence."""
    run = publish_report(store, tmp_path / "runs")
    body = store.get(run.report_object.key)
    assert b'"load/bench-1.json"' in body
    body = body.replace(b'"load/bench-1.json"', json.dumps(path).encode())
    replace_report(store, run, body)
    with pytest.raises((StoreError, HostError)) as refused:
        check_judgement(store, read_run(store, CELL, RUN))
    assert "\n" not in refused.value.problem


@pytest.mark.parametrize("name", ["report.json", "manifest.json"])
def test_a_document_without_an_end_is_not_read_whole(store: Store, tmp_path: Path, name: str) -> None:
    run = publish_report(store, tmp_path / "runs")
    path = Path(store.locate(f"reports/{run.cell}/{RUN}/{name}"))
    path.chmod(0o644)
    os.truncate(path, MOST_DOCUMENT_BYTES + 1)
    with pytest.raises(TooLongError):
        read_run(store, CELL, RUN)


@pytest.mark.parametrize("key", ["a b", "../up", ".store", "", "a//b"])
def test_an_object_with_a_key_that_no_store_takes_is_not_read(store: Store, tmp_path: Path, key: str) -> None:
    publish_report(store, tmp_path / "runs")

    def mended(manifest: bytes) -> bytes:
        document = json.loads(manifest)
        document["objects"].append(document["objects"][0] | {"key": key})
        return json.dumps(document).encode()

    rewrite(store, manifest_key(CELL, RUN), mended)
    with pytest.raises(StoreError, match="not a manifest"):
        read_run(store, CELL, RUN)


# --- 400 hostile plans

HOSTILE = [
    *AWKWARD,
    *('"; touch /tmp/taken; "', "'; touch /tmp/taken; '", "$(touch /tmp/taken)", "`touch /tmp/taken`", "\n- evil: true"),
    *("a\n---\nb", "}}, {{", "!!python/object/apply:os.system [x]", "*a", "&a", "<<: *a", "%TAG ! x", "\x85host: evil"),
    *("\u2028host: evil", "\r\nhost: evil", "\ttab", "--volume=/:/host", "\x1b]0;evil\x07", "\u202egnp.exe"),
    *("{{ .Values }}", "0x1f", "~", "null", "on"),
]


def hostile_plan(number: int) -> ServerPlan:
    chosen = random.Random(number)

    def text() -> str:
        return "".join(chosen.choices(HOSTILE, k=chosen.randint(1, 3)))

    def value() -> str:
        drawn = text()
        return f"x{drawn}" if drawn.startswith("-") else drawn

    return plan(
        engine=chosen.choice([IMAGE, IMAGE, PROCESS]),
        model=f"m{text()}",
        served_model_name=text(),
        arguments={"seed": value(), "override-generation-config": {text(): [text()]}, "lora-modules": [value(), value()]},
        environment={f"V{each}": text() for each in range(3)},
        inherited={"VLLM_X": text()},
    )


def read_yaml(text: str) -> list[Any]:
    """By libyaml: Compose and Kubernetes read YAML by translations of it. It takes a tenth of the time of Python's reader."""
    return list(yaml.load_all(text, yaml.CSafeLoader))


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(400))
def test_no_plan_breaks_out_of_what_people_deploy(number: int) -> None:
    server = hostile_plan(number)
    annotations = {"expires": server.served_model_name, "approved-by": server.environment["V0"]}
    comment, _, rest = deployable(server, "config", "tiny", annotations).partition("\n")
    assert comment.startswith("# ")
    assert comment.isprintable()
    assert rest == config_text(server, 8000)
    assert read_yaml(rest)[0]["served-model-name"] == [server.served_model_name]
    if server.engine == PROCESS:
        return
    command = run_by_a_shell(deployable(server, "docker", "tiny", annotations), {"HF_HOME": "/hub", "PATH": "/usr/bin:/bin"})
    message = json.loads(deployable(server, "json", "tiny", annotations))["docker"]
    assert len(command) == len(message)
    assert {f"{name}={value}" for name, value in server.environment.items()} <= set(command)
    (compose,) = read_yaml(deployable(server, "compose", "tiny", annotations))
    assert {name: set(each) for name, each in compose.items()} == {"services": {"tiny"}, "configs": {"server"}}
    assert compose["services"]["tiny"]["image"] == IMAGE.pinned
    objects = read_yaml(deployable(server, "kubernetes", "tiny", annotations))
    assert [each["kind"] for each in objects] == ["ConfigMap", "Deployment", "Service"]
    (container,) = objects[1]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == IMAGE.pinned
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


# --- every text of a report


def texts_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, str):
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield from texts_in(each, (*path, name))


def with_text(document: Document, path: tuple[Any, ...], text: str) -> Report | None:
    """The report with another text in one place; None if its model does not take it there."""
    changed = json.loads(json.dumps(document))
    place = changed
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = text
    try:
        return Report.model_validate_json(json.dumps(changed))
    except ValidationError:
        return None


def briefly_compared_report() -> Report:
    """With 40 of its 1,319 questions, and all that flipped: a row of the table is like another, and each page has all."""
    report = builder.compared_report()
    (scored,) = report.details.questions
    first = {name: getattr(scored, name)[:40] for name in ("numbers", "ours", "theirs", "about")}
    details = report.details.model_copy(update={"questions": [scored.model_copy(update=first | {"asked": 40})]})
    return report.model_copy(update={"details": details})


REPORTS = (
    *(builder.passed_report, builder.not_passed_report, builder.image_report, builder.detailed_report),
    briefly_compared_report,
)


def each_with_one_text(text: str) -> Iterator[Report]:
    """A report for each kind of place that takes any text, with `text` there. Of a list, one entry is like another."""
    seen: set[tuple[Any, ...]] = set()
    for make in REPORTS:
        document = json.loads(make().model_dump_json())
        for path in texts_in(document):
            kind = tuple(0 if isinstance(name, int) else name for name in path)
            if kind not in seen and (changed_report := with_text(document, path, text)):
                yield changed_report
            seen.add(kind)


@pytest.mark.thorough
def test_no_field_of_a_report_breaks_out_of_its_pages() -> None:
    """Nor out of a comparison. One field after the other: a template that forgets to escape one is found."""
    known = {tag for make in REPORTS for tag, _ in Reader(render_page(make(), page_link)).elements}
    tried, compared = 0, builder.compared_report()
    for report in each_with_one_text(f"{builder.SCRIPT}{builder.IMAGE}<hostile>{builder.CONTROL}"):
        tried += 1
        page, shown = render_page(report, page_link), StringIO()
        console = Console(file=shown, width=200)
        show_report(report, console, None)
        show_diff(diff(report, compared), console)
        show_diff(diff(compared, report), console)
        read = Reader(page)
        assert {tag for tag, _ in read.elements} <= known
        assert not [name for _, attributes in read.elements for name in attributes if name.startswith("on")]
        for message in (page, shown.getvalue()):
            assert not {"\x1b", "\u202e"} & set(message)
    assert tried >= 150
    assert not {"script", "img", "hostile"} & known
