"""The commands of approvals, as a release manager types them."""

import json
from pathlib import Path
from typing import get_args

import pytest

from tests.approval.builder import CELL, NEWER, RUN, made_key, publish_report, with_gate
from tests.builders.approval_commands import WHO, Command, command, store
from tests.builders.changed import changed
from tests.report.builder import image_report, passed_report
from tests.terminal import typed
from vllm_qualify.approval.layout import Format
from vllm_qualify.approval.signing import PASSWORD, PRIVATE_KEY, PUBLIC_KEY
from vllm_qualify.engine.environment import digest_of
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.report.model import Report

__all__ = ["command", "store"]

pytestmark = pytest.mark.usefixtures("believed")


@pytest.mark.usefixtures("store")
def test_a_report_is_approved_listed_deployed_verified_and_revoked(command: Command, tmp_path: Path) -> None:
    code, out, _ = command("approve", RUN, *WHO)
    assert (code, "approved by Ada on" in out) == (0, True)
    code, out, _ = command("approved", "list", "--json")
    (cell,) = json.loads(out)
    assert (code, cell["cell"], cell["state"], cell["last"]["run_id"]) == (0, CELL, "approved", RUN)
    assert "approved" in command("approved", "list")[1]
    code, out, _ = command("approved", "get", CELL, "--format", "config")
    assert (code, out.splitlines()[0].startswith(f"# cell {CELL}; run {RUN}")) == (0, True)
    release = passed_report().plan.cell.release
    engine, model = f"vLLM {release.engine.version} {release.engine.digest}", f"{release.model} at {release.revision}"
    known = json.loads(command("approved", "get", CELL, "--format", "json")[1])["annotations"]
    assert (known["engine"], known["model"]) == (engine, model)
    assert f"; engine {engine}; model {model}" in out.splitlines()[0]
    code, out, _ = command("verify", CELL)
    assert (code, f"{CELL}, run {RUN}: approved by Ada" in out) == (0, True)
    code, out, _ = command("approved", "export", CELL, str(tmp_path / "bundle"))
    assert command("verify", out.strip())[0] == code == 0
    assert command("revoke", CELL, "--by", "Eve", "--reason", "it crashes")[0] == 0
    for looked in (("verify", CELL), ("approved", "get", CELL)):
        code, _, err = command(*looked)
        assert (code, f"run {RUN} was revoked by Eve" in err) == (14, True)
    assert json.loads(command("approved", "list", "--json")[1])[0]["state"] == "revoked"


def of_an_image_and_a_folder(report: Report) -> Report:
    files = {"config.json": "ab" * 32}
    release = changed(image_report().plan.cell.release, model="./models/llama", revision=digest_of(files), files=files)
    server = changed(image_report().plan.server, model="/models/llama", revision=None, parts=[])
    return changed(changed(report, "plan.cell", release=release), "plan", server=server)


@pytest.mark.parametrize("form", get_args(Format))
def test_each_format_of_an_image_names_the_engines_version_and_both_digests(
    form: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process, which has no image, the formats are `config` and `json`: the test above."""
    monkeypatch.setenv("VLLM_QUALIFY_HOME", str(tmp_path))
    made_key(tmp_path / "approver.pem")
    for name, end in ((PRIVATE_KEY, ""), (PUBLIC_KEY, ".pub")):
        monkeypatch.setenv(f"{name}_FILE", str(tmp_path / f"approver.pem{end}"))
    store = open_store((tmp_path / "store").as_uri())
    release = publish_report(store, tmp_path / "runs", change=of_an_image_and_a_folder).report.plan.cell.release
    assert command("approve", RUN, *WHO)[0] == 0
    code, out, _ = command("approved", "get", CELL, "--format", form)
    assert (code, f"vLLM 0.32.0 {release.engine.digest}" in out, f"./models/llama at {release.revision}" in out) == (
        0,
        True,
        True,
    )


@pytest.mark.usefixtures("store")
def test_a_program_reads_a_cell_on_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    command("approve", RUN, *WHO)
    assert f"{CELL} " in command("approved", "list")[1]


def test_a_new_home_has_no_approvals(command: Command, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_QUALIFY_STORE", raising=False)
    assert command("approved", "list") == (0, "", f"nothing was ever approved in file://{home}/store")
    # Somebody typed this name, or it is not mounted.
    monkeypatch.setenv("VLLM_QUALIFY_STORE", f"file://{tmp_path}/absent")
    code, _, err = command("approved", "list")
    assert (code, "check the store's URL and that its file system is mounted" in err) == (3, True)


@pytest.mark.usefixtures("store")
def test_a_name_is_shown_as_it_is(command: Command) -> None:
    assert command("approve", RUN, "--by", "Ada [/ops]", "--reason", "it is faster")[0] == 0
    assert "Ada [/ops]" in command("approved", "list")[1]


@pytest.mark.usefixtures("store")
def test_a_rejection_is_final(command: Command) -> None:
    assert command("reject", RUN, "--by", "Bob", "--reason", "we do not need it")[0] == 0
    code, _, err = command("approve", RUN, *WHO)
    assert (code, f"run {RUN} was already rejected by Bob" in err) == (2, True)


def test_what_did_not_pass_is_not_approved(store: Store, command: Command, tmp_path: Path) -> None:
    publish_report(store, tmp_path / "runs", NEWER, with_gate("fail"))
    code, _, err = command("approve", NEWER, *WHO)
    assert (code, "ttft_p99_ms: fail" in err, "waive each gate by name" in err) == (2, True, True)


def test_each_way_not_to_hold_has_its_exit_code(store: Store, command: Command, tmp_path: Path) -> None:
    command("approve", RUN, *WHO)
    older = f"approvals/{CELL}/{RUN}/approval.json"
    made_key(tmp_path / "other.pem")
    code, _, err = command("verify", CELL, "--public-key", str(tmp_path / "other.pem.pub"))
    assert (code, "signed by key" in err) == (11, True)
    publish_report(store, tmp_path / "runs", NEWER)
    command("approve", NEWER, *WHO)
    code, _, err = command("verify", store.locate(older))
    assert (code, f"superseded by run {NEWER}" in err) == (13, True)
    evidence = next(path for key in store.keys("evidence/") if NEWER in (path := Path(store.locate(key))).read_text())
    evidence.unlink()
    code, _, err = command("verify", CELL)
    assert (code, "it is missing" in err, str(evidence) in err) == (10, True, True)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("approve", "no-such-run", *WHO), "no whole run 'no-such-run'"),
        (("approve", RUN, "--by", " ", "--reason", "x"), "give a name and a reason"),
        (("verify", CELL), f"nothing is approved in {CELL}"),
        (("verify", "my cell"), "write it as RECIPE/VARIANT/GPU_TYPE/PROFILE"),
        (("verify", "missing.json"), "cannot be read"),
        (("revoke", CELL, "--by", "Eve", "--reason", "x"), "nothing is approved"),
    ],
)
def test_a_mistake_is_reported_with_its_remedy(command: Command, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = command(*arguments)
    assert code in (2, 3)
    assert (out, message in err) == ("", True), err


@pytest.mark.usefixtures("store")
def test_without_a_key_nothing_is_decided(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(f"{PRIVATE_KEY}_FILE")
    code, _, err = command("approve", RUN, *WHO)
    assert (code, "vllm-qualify key new" in err) == (2, True)
    assert not (tmp_path / "store" / "approvals").exists()


def test_a_key_is_made_once(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "fresh.pem"
    code, out, _ = command("key", "new", "--no-passphrase", str(path))
    assert (code, f"{path}.pub" in out, path.stat().st_mode & 0o777) == (0, True, 0o600)
    assert "ENCRYPTED" not in path.read_text()
    code, _, err = command("key", "new", "--no-passphrase", str(path))
    assert (code, "keys are not replaced" in err) == (2, True)


def test_a_key_without_a_passphrase_is_asked_for_by_name(command: Command, tmp_path: Path) -> None:
    code, _, err = command("key", "new", str(tmp_path / "fresh.pem"))
    assert (code, f"{PASSWORD}_FILE" in err, "--no-passphrase" in err) == (2, True, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("store")
def test_a_program_has_the_passphrase_of_its_key_in_a_file(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, password = tmp_path / "fresh.pem", tmp_path / "password"
    password.write_text("open sesame\n")
    password.chmod(0o600)
    monkeypatch.setenv(f"{PASSWORD}_FILE", str(password))
    assert command("key", "new", str(path))[0] == 0
    assert ("ENCRYPTED" in path.read_text(), path.stat().st_mode & 0o777) == (True, 0o600)
    monkeypatch.setenv(f"{PRIVATE_KEY}_FILE", str(path))
    monkeypatch.setenv(f"{PUBLIC_KEY}_FILE", f"{path}.pub")
    assert command("approve", RUN, *WHO)[0] == 0
    monkeypatch.delenv(f"{PASSWORD}_FILE")
    code, _, err = command("approve", RUN, *WHO)
    assert (code, "the private key is encrypted" in err, f"{PASSWORD}_FILE" in err) == (2, True, True)
    assert command("verify", CELL)[0] == 0


@pytest.mark.thorough
def test_a_person_is_asked_for_the_passphrase(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key opens, so the message is that its evidence of a few words is not judged again."""
    path, asked = tmp_path / "fresh.pem", "Passphrase of the private key"
    code, shown = typed(["key", "new", str(path)], [(asked, "open sesame"), ("Repeat for confirmation", "open sesame")])
    assert (code, "open sesame" in shown, "ENCRYPTED" in path.read_text()) == (0, False, True)
    monkeypatch.setenv(f"{PRIVATE_KEY}_FILE", str(path))
    code, shown = typed(["approve", RUN, *WHO], [(asked, "open sezam")])
    assert (code, "does not open the private key" in shown, "open sezam" in shown) == (2, True, False)
    code, shown = typed(["approve", RUN, *WHO], [(asked, "open sesame")])
    assert (code, "does not open" in shown) == (10, False), shown
    assert list(store.keys("approvals/")) == []
