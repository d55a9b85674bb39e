"""A report that says more than its evidence: changed in the store, with every hash made to fit again."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.qualified import COMMAND, Qualified, run
from vllm_qualify.approval.actions import approve
from vllm_qualify.approval.decision import ruling
from vllm_qualify.approval.errors import TamperedError
from vllm_qualify.approval.head import head_of
from vllm_qualify.approval.published import read_run
from vllm_qualify.approval.signing import PRIVATE_KEY, new_key, private_key
from vllm_qualify.approver.decisions import Desk
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.bundle import Manifest
from vllm_qualify.publish.stores import open_store
from vllm_qualify.report.model import read_report

pytestmark = pytest.mark.engine
Document = dict[str, Any]
Change = Callable[[Document], None]
ADA = ("--by", "Ada", "--reason", "it passed every gate")


@dataclass(frozen=True)
class Target:
    """A copy of the demo's store, with a key to sign."""

    folder: Path
    run_id: str
    cell: str
    key: Path

    @property
    def store(self) -> str:
        return self.folder.as_uri()

    def tamper(self, change: Change) -> None:
        """Change the report, and in its manifest the hash and all that must follow from the report."""
        path = self.folder / "reports" / self.cell / self.run_id / "report.json"
        report = json.loads(path.read_text())
        change(report)
        path.chmod(0o644)
        path.write_text(json.dumps(report))
        manifest_path = path.with_name("manifest.json")
        manifest = json.loads(manifest_path.read_text())
        (named,) = (each for each in manifest["objects"] if each["key"].endswith("/report.json"))
        named |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "size": path.stat().st_size}
        with contextlib.suppress(StoreError):  # a report that nobody can read has no head
            manifest |= head_of_changed(manifest, path)
        files = [file for stage in report["stages"] for file in stage["files"]]
        assert files
        for file in files:
            key = f"evidence/{file['sha256']}/{Path(file['path']).name}"
            if key not in [each["key"] for each in manifest["objects"]]:
                manifest["objects"].append({"key": key, "sha256": file["sha256"], "size": file["size"]})
        manifest_path.chmod(0o644)
        manifest_path.write_text(json.dumps(manifest))

    def put(self, name: str, body: bytes) -> Document:
        """Evidence of the attacker's own. Returns its entry but for the path."""
        digest = hashlib.sha256(body).hexdigest()
        path = self.folder / "evidence" / digest / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        return {"sha256": digest, "size": len(body)}

    def approve(self, home: Path) -> Any:
        environment = {f"{PRIVATE_KEY}_FILE": str(self.key)}
        return run(home, COMMAND, "approve", self.run_id, *ADA, "--store", self.store, **environment)

    def assert_not_signed(self, change: Change, message: str) -> None:
        """By the approver, which the command asks too: a command of its own for each change would take half a minute."""
        self.tamper(change)
        store = open_store(self.store)
        with pytest.raises((TamperedError, StoreError)) as refused:
            desk = Desk(store, private_key(self.key.read_text()), {})
            desk.approve(read_run(store, self.cell, self.run_id), ruling("approve", "Ada", "it passed every gate"))
        assert message in str(refused.value)
        assert not (self.folder / "approvals").exists()

    def verify(self, home: Path, *options: str) -> Any:
        return run(home, COMMAND, "verify", self.cell, "--store", self.store, "--public-key", f"{self.key}.pub", *options)


def head_of_changed(manifest: Document, path: Path) -> Document:
    """Raises StoreError."""
    starts = Manifest.model_validate(manifest).starts
    head: Document = head_of(read_report(path.read_bytes(), str(path)), starts).model_dump(mode="json")
    return head


@pytest.fixture
def target(approved: Qualified, tmp_path: Path) -> Target:
    assert approved.done.returncode == 0, approved.done.stdout + approved.done.stderr
    shutil.copytree(approved.home / "store", tmp_path / "store")
    shutil.rmtree(tmp_path / "store" / "approvals", ignore_errors=True)
    new_key(tmp_path / "key.pem")
    return Target(tmp_path / "store", approved.report.run_id, approved.report.plan.cell.id, tmp_path / "key.pem")


def accuracy_of(report: Document) -> Document:
    document: Document = next(each for each in report["judgement"]["gates"] if each["gate"]["metric"] == "exact_match")
    return document


def lower_value(report: Document) -> None:
    """As a report would look whose model answers 10 % of the questions, but for the word `pass`."""
    accuracy_of(report)["value"] = 0.1


def no_gate(report: Document) -> None:
    report["judgement"]["gates"] = [each for each in report["judgement"]["gates"] if each["gate"]["metric"] != "exact_match"]


def another_bound(report: Document) -> None:
    accuracy_of(report)["gate"]["minimum"] = 0.01


def no_stages(report: Document) -> None:
    report["stages"] = report["stages"][:1]


def no_files(report: Document) -> None:
    for stage in report["stages"]:
        if stage["stage"] == "accuracy":
            stage["files"] = []


def no_measurements(report: Document) -> None:
    """Those of the report do not count: they are parsed again."""
    for stage in report["stages"]:
        stage["measurements"] = []


def another_server(**changes: str) -> Change:
    """What people would deploy; the release, which the report shows, stays."""
    return lambda report: report["plan"]["server"].update(changes)


def another_option(name: str, value: object) -> Change:
    return lambda report: report["plan"]["server"]["arguments"].update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_server(model="/srv/evil"), "its server had another model than the plan"),
        (another_option("max-model-len", 131_072), "its server had another max-model-len than the plan"),
        (another_option("trust-remote-code", True), "its server had another trust-remote-code than the plan"),
        (another_server(served_model_name="gpt-large"), "its server had another served-model-name than the plan"),
        (another_option("tokenizer", "/srv/evil"), "its server had another tokenizer than the plan"),
        (lower_value, "is said to be 0.1, and is 0.9"),
        (no_gate, "is a gate of the plan, and was not judged"),
        (another_bound, "is no gate of the plan"),
        (no_stages, "is said to be pass, and is invalid"),
        (no_files, "not a report of version 2"),
    ],
)
def test_a_report_that_was_changed_is_not_signed(target: Target, change: Change, message: str) -> None:
    target.assert_not_signed(change, message)


def test_a_report_that_was_changed_is_not_signed_by_the_command(target: Target, home: Path) -> None:
    target.tamper(lower_value)
    done = target.approve(home)
    assert done.returncode == 10, done.stdout + done.stderr
    assert "is said to be 0.1, and is 0.9" in done.stderr.replace("\n", " ")
    assert not (target.folder / "approvals").exists()


def test_evidence_that_was_replaced_is_not_signed(target: Target) -> None:
    """Wrong answers in place of the right ones, each hash made to fit."""

    def worse(report: Document) -> None:
        (stage,) = (each for each in report["stages"] if each["stage"] == "accuracy")
        for file in stage["files"]:
            name = Path(file["path"]).name
            if name.startswith("samples_"):
                lines = (target.folder / "evidence" / file["sha256"] / name).read_text().splitlines()
                samples = [json.loads(line) | {"exact_match": 0.0} for line in lines]
                file |= target.put(name, "".join(json.dumps(each) + "\n" for each in samples).encode())

    target.assert_not_signed(worse, "its evidence does not give its verdicts")


def test_a_log_of_another_server_is_not_signed(target: Target) -> None:
    """Its config file says what the plan says, and the engine said otherwise."""

    def served_evil(report: Document) -> None:
        (stage,) = (each for each in report["stages"] if each["stage"] == "serve")
        for file in stage["files"]:
            if file["path"] == "serve/server.log":
                log = (target.folder / "evidence" / file["sha256"] / "server.log").read_text()
                other = log.replace("with config: model='", "with config: model='/srv/evil")
                assert other != log
                file |= target.put("server.log", other.encode())

    target.assert_not_signed(served_evil, "its model is /srv/evil")


def test_what_somebody_signed_without_judging_it_again_is_found_by_verify(target: Target, home: Path) -> None:
    target.tamper(lower_value)
    store = open_store(target.store)
    run_there = read_run(store, target.cell, target.run_id)
    ada = ruling("approve", "Ada", "it passed every gate")
    approve(store, run_there, ada, 90, private_key(target.key.read_text()), datetime.now(UTC))
    assert target.verify(home).returncode == 0
    deep = target.verify(home, "--deep")
    assert deep.returncode == 10, deep.stdout + deep.stderr
    assert "is said to be 0.1" in deep.stderr.replace("\n", " ")


def test_what_nobody_changed_is_signed_and_holds_when_it_is_judged_again(target: Target, home: Path) -> None:
    target.tamper(no_measurements)
    done = target.approve(home)
    assert done.returncode == 0, done.stdout + done.stderr
    deep = target.verify(home, "--deep")
    assert deep.returncode == 0, deep.stdout + deep.stderr
    assert deep.stdout.rstrip().endswith("objects checked, and judged again")
