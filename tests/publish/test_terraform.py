"""The policies in infra/terraform against what the code asks for; the server that judges them is a real one."""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.publish.policies import FOLDER, Statement, document, let, parsed, resources
from tests.s3 import client_of_environment
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.order import sequence_key
from vllm_qualify.publish.s3_settings import ACTIONS, KMS_ACTIONS, LOCK_ACTION, settings_of
from vllm_qualify.publish.store import PROBE_KEY, SWAP_PROBE_KEY, ChangedError
from vllm_qualify.publish.stores import open_store

FILES = sorted(FOLDER.glob("*.tf"))
LIFECYCLE = "aws_s3_bucket_lifecycle_configuration"

REPORTS = "reports/tiny/base/h200/chat/20260101-1"
APPROVALS = "approvals/tiny/base/h200/chat"
LOCKED_PROBE = settings_of({"VLLM_QUALIFY_S3_OBJECT_LOCK": "governance:1"}).probe_key()
PROBES = {PROBE_KEY, LOCKED_PROBE, SWAP_PROBE_KEY}
PUBLISHED = {f"evidence/{'0' * 64}/load.json", f"{REPORTS}/report.json", f"{REPORTS}/manifest.json"}
PUBLISHED |= {"runs/20260101-1.json", "layout.json"}
INDEX = {"index.json", "index.html", *(f"cells/tiny/base/h200/chat/index.{end}" for end in ("json", "html"))}
STATED = {f"{APPROVALS}/20260101-1/{name}.json" for name in ("decision", "approval", "entry", "revocation")}
COUNTER = {sequence_key("tiny/base/h200/chat")}
POINTER = {f"{APPROVALS}/pointer.json"}
KNOWN, CLAIMS = {"releases/vllm-openai.json"}, {f"releases/claims/{'0' * 64}.json"}
CHANGEABLE = INDEX | COUNTER | POINTER | KNOWN
DOOR = {"pruning.json"}
EVERY = PROBES | PUBLISHED | STATED | CHANGEABLE | CLAIMS | DOOR


def actions(name: str) -> set[str]:
    return {action for statement in document(name) for action in statement["actions"]}


def keys_for(statements: list[Statement], action: str) -> set[str]:
    """Those of all keys to which the statements with this action apply."""
    patterns = [pattern for statement in statements if action in statement["actions"] for pattern in resources(statement)]
    return {key for key in EVERY for pattern in patterns if fnmatchcase(f"arn:aws:s3:::bucket/{key}", pattern)}


def null_conditions(statement: Statement) -> set[str]:
    """The headers whose absence makes the statement apply."""
    conditions = statement.get("condition", [])
    return {condition["variable"] for condition in conditions if (condition["test"], condition["values"]) == ("Null", ["true"])}


@pytest.mark.thorough
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_file_is_terraform(path: Path) -> None:
    assert parsed(path)


@pytest.mark.thorough
def test_the_bucket_is_closed_encrypted_and_kept() -> None:
    kinds = {kind for resource in parsed(FOLDER / "main.tf")["resource"] for kind in resource}
    wanted = ["versioning", "object_lock_configuration", "server_side_encryption_configuration", "public_access_block"]
    assert kinds >= {f"aws_s3_bucket_{kind}" for kind in [*wanted, "policy", "lifecycle_configuration"]}


def lifecycle() -> tuple[list[str], list[Mapping[str, Any]]]:
    """The prefixes whose earlier versions go, and all other rules."""
    (configuration,) = (each[LIFECYCLE]["store"] for each in parsed(FOLDER / "main.tf")["resource"] if LIFECYCLE in each)
    (earlier,) = (dynamic["rule"] for dynamic in configuration["dynamic"])
    (content,) = earlier["content"]
    assert content["noncurrent_version_expiration"] == [{"noncurrent_days": "${var.noncurrent_days}"}]
    assert content["expiration"] == [{"expired_object_delete_marker": True}], "what is there now stays"
    return list(earlier["for_each"].values()), configuration["rule"]


def test_a_rule_ends_the_earlier_versions_of_all_that_changes_or_is_pruned() -> None:
    prefixes, _ = lifecycle()
    assert {key for key in EVERY if key.startswith(tuple(prefixes))} >= CHANGEABLE | DOOR | PUBLISHED - {"layout.json"}


def test_no_rule_ends_what_anybody_published_or_decided() -> None:
    _, rules = lifecycle()
    ending = [rule for rule in rules if "expiration" in rule]
    assert [rule["filter"] for rule in ending] == [[{"prefix": "attempts/"}]]
    assert not [key for key in EVERY if key.startswith("attempts/")]


def test_every_variable_is_used_and_every_used_one_is_there() -> None:
    declared = {name for variable in parsed(FOLDER / "variables.tf")["variable"] for name in variable}
    text = "".join(path.read_text() for path in FILES if path.name != "variables.tf")
    assert declared
    assert {*re.findall(r"\bvar\.([\w.]+)", text)} == declared | {"object_lock.mode", "object_lock.days"}


def test_each_policy_has_what_the_code_asks_for_and_nothing_more() -> None:
    reads = {*ACTIONS["read"], *ACTIONS["list"]}
    writes = {*reads, *ACTIONS["write"], *ACTIONS["change"], LOCK_ACTION}
    assert actions("reader") == reads | {"kms:Decrypt"}
    assert actions("publisher") == actions("watcher") == actions("approver") == writes | set(KMS_ACTIONS)


def test_only_the_pruner_removes_and_no_approval() -> None:
    assert actions("pruner") == {*ACTIONS["read"], *ACTIONS["write"], *ACTIONS["delete"], *KMS_ACTIONS}
    removes = keys_for(document("pruner"), "s3:DeleteObject")
    assert removes == PUBLISHED - {"layout.json"}
    for name in ("reader", "publisher", "watcher", "approver"):
        assert "s3:DeleteObject" not in actions(name)
    assert keys_for(document("pruner"), "s3:PutObject") == INDEX | DOOR


def test_everybody_reads_everything() -> None:
    for name in ("reader", "publisher", "watcher", "approver", "pruner"):
        assert keys_for(document(name), "s3:GetObject") == EVERY
        assert ["arn:aws:s3:::bucket"] in [resources(each) for each in document(name) if "s3:ListBucket" in each["actions"]]


def test_each_writes_its_own_part() -> None:
    assert keys_for(document("reader"), "s3:PutObject") == set()
    assert keys_for(document("publisher"), "s3:PutObject") == PROBES | PUBLISHED | COUNTER | INDEX
    assert keys_for(document("watcher"), "s3:PutObject") == PROBES | PUBLISHED | COUNTER | INDEX | KNOWN | CLAIMS
    assert keys_for(document("approver"), "s3:PutObject") == PROBES | STATED | POINTER | INDEX


def test_who_writes_once_may_lock() -> None:
    assert keys_for(document("publisher"), LOCK_ACTION) >= PUBLISHED | {LOCKED_PROBE}
    assert keys_for(document("watcher"), LOCK_ACTION) >= PUBLISHED | CLAIMS | {LOCKED_PROBE}
    assert keys_for(document("approver"), LOCK_ACTION) >= STATED | {LOCKED_PROBE}


def test_nobody_writes_without_a_condition_or_replaces_what_is_written_once() -> None:
    denied = [statement for statement in document("bucket") if "s3:PutObject" in statement["actions"]]
    assert {statement["effect"] for statement in denied} == {"Deny"}
    assert all(each["principals"] == [{"type": "*", "identifiers": ["*"]}] for each in denied)
    without = {frozenset(null_conditions(statement)): keys_for([statement], "s3:PutObject") for statement in denied}
    assert without == {
        frozenset({"s3:if-none-match"}): EVERY - CHANGEABLE - DOOR - {SWAP_PROBE_KEY},
        frozenset({"s3:if-none-match", "s3:if-match"}): EVERY,
    }


def test_only_tls_is_taken() -> None:
    [tls] = [statement for statement in document("bucket") if statement["actions"] == ["s3:*"]]
    assert (tls["effect"], resources(tls)) == ("Deny", ["arn:aws:s3:::bucket", "arn:aws:s3:::bucket/*"])
    assert tls["condition"] == [{"test": "Bool", "variable": "aws:SecureTransport", "values": ["false"]}]


@pytest.mark.s3
@pytest.mark.usefixtures("radosgw_url")
@pytest.mark.parametrize(
    ("role", "writes"),
    [
        ("reader", set()),
        ("publisher", PUBLISHED | COUNTER | INDEX),
        ("watcher", PUBLISHED | COUNTER | INDEX | KNOWN | CLAIMS),
        ("approver", STATED | POINTER | INDEX),
    ],
)
def test_a_server_lets_each_do_its_part(become_denied: Callable[[], str], role: str, writes: set[str]) -> None:
    owner, bucket = client_of_environment(), uuid4().hex
    owner.create_bucket(Bucket=bucket)
    open_store(f"s3://{bucket}").put_new("reports/earlier", b"earlier", "text/plain")
    let(owner, bucket, "denied", role)
    become_denied()
    store = open_store(f"s3://{bucket}")
    assert store.get("reports/earlier") == b"earlier"
    if writes:
        store.check()
    for key in EVERY - PROBES:
        if key in writes:
            store.swap(key, b"1", "text/plain", None)
            with pytest.raises(ChangedError):
                store.swap(key, b"1 2", "text/plain", "0" * len(store.read(key).tag))
        else:
            with pytest.raises(StoreError, match="does not allow"):
                store.swap(key, b"1", "text/plain", None)
    assert set(store.keys("")) == writes | {"reports/earlier"}
