"""`verify --here`: what is deployed, compared with the approval, as whoever deploys types it."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.approval.builder import CELL, RUN, made_key, publish_report
from tests.builders.approval_commands import WHO, Command, command
from tests.builders.changed import changed
from tests.builders.deployed import CACHE_PAGE, WEIGHTS, answering, of_folder, told_replies, write_weights
from tests.report.builder import image_report, passed_report
from vllm_qualify.approval.signing import PRIVATE_KEY, PUBLIC_KEY
from vllm_qualify.engine.server import Part
from vllm_qualify.publish.stores import open_store
from vllm_qualify.report.model import Report

__all__ = ["command"]

pytestmark = pytest.mark.usefixtures("believed")
OWN_PAGE = {"load/metrics-1-before.txt": CACHE_PAGE.replace("NUMBER", "9000")}
NOTHING_ELSE = "nothing differs in what could be compared"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a key of its own, and no Docker Engine."""
    monkeypatch.setenv("VLLM_QUALIFY_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    made_key(tmp_path / "approver.pem")
    monkeypatch.setenv(f"{PRIVATE_KEY}_FILE", str(tmp_path / "approver.pem"))
    monkeypatch.setenv(f"{PUBLIC_KEY}_FILE", str(tmp_path / "approver.pem.pub"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    return tmp_path / "home"


@pytest.fixture
def approve_run(home: Path, command: Command) -> Callable[..., None]:
    """Publishes a run and approves it."""

    def done(change: Callable[[Report], Report] = lambda report: report) -> None:
        publish_report(open_store((home / "store").as_uri()), home / "runs", change=change, **OWN_PAGE)
        assert command("approve", RUN, *WHO)[0] == 0

    return done


@pytest.fixture
def weights(tmp_path: Path, approve_run: Callable[..., None]) -> Path:
    """A copy of the folder that was approved."""
    approve_run(of_folder(write_weights(tmp_path / "approved")))
    shutil.copytree(tmp_path / "approved", tmp_path / "deployed")
    return tmp_path / "deployed"


def test_the_approved_weights_are_the_same_wherever_they_lie(weights: Path, command: Command) -> None:
    code, out, _ = command("verify", CELL, "--here", str(weights))
    assert (code, f"folder {weights}: {NOTHING_ELSE}" in out) == (0, True)
    assert "same            model: sha256:" in out
    assert "cannot be told  engine: approved vLLM 0.32.0 sha256:" in out


def test_refused_weights_in_the_approved_folder_are_told_apart(weights: Path, tmp_path: Path, command: Command) -> None:
    approved = tmp_path / "approved"
    body = bytearray(WEIGHTS["model.safetensors"])
    body[5000] ^= 1
    (approved / "model.safetensors").write_bytes(bytes(body))
    assert command("verify", CELL)[0] == command("verify", CELL, "--deep")[0] == 0
    code, out, _ = command("verify", CELL, "--here", str(approved))
    was, now = (hashlib.sha256(each).hexdigest() for each in (WEIGHTS["model.safetensors"], body))
    assert (code, f"different       model.safetensors: approved sha256:{was}; here sha256:{now}" in out) == (1, True)
    assert "1 thing differs from what was approved" in out
    # Each target has a result of its own.
    code, out, _ = command("verify", CELL, "--here", str(weights), "--here", str(approved))
    assert (code, out.count(NOTHING_ELSE)) == (1, 1)


def test_files_that_are_missing_or_additional_are_named(weights: Path, command: Command) -> None:
    (weights / "config.json").unlink()
    (weights / "tokenizer").mkdir()
    (weights / "tokenizer" / "extra.json").write_text("{}")
    # A name of bytes that are no text.
    os.close(os.open(os.fsencode(weights) + b"/\xff", os.O_CREAT | os.O_WRONLY, 0o644))
    code, out, _ = command("verify", CELL, "--here", str(weights), "--json")
    (found,) = json.loads(out)["here"]
    assert code == 1
    assert {each["what"]: each["here"] for each in found["findings"] if each["state"] == "different"} == {
        "config.json": "missing",
        "tokenizer/extra.json": "an additional file",
        "\udcff": "an additional file",
    }


def test_a_download_of_the_hubs_model_is_compared_with_the_hubs_hashes(
    tmp_path: Path, approve_run: Callable[..., None], command: Command
) -> None:
    """Git's hash of small files, SHA-256 of large ones. What the download keeps beside them is no difference."""
    config, model = WEIGHTS["config.json"], WEIGHTS["model.safetensors"]
    git = hashlib.sha1(f"blob {len(config)}\0".encode() + config, usedforsecurity=False).hexdigest()
    files = {
        "config.json": f"gitBlob:{git}",
        "model.safetensors": f"sha256:{hashlib.sha256(model).hexdigest()}",
        "model.bin": f"sha256:{'0' * 64}",
    }

    def of_hub(report: Report) -> Report:
        release = report.plan.cell.release
        part = Part(option="model", name=release.model, revision=release.revision, files=files)
        return changed(report, "plan.server", parts=[part])

    approve_run(of_hub)
    folder = write_weights(tmp_path / "download")
    (folder / "README.md").unlink()
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").touch()
    code, out, _ = command("verify", CELL, "--here", str(folder))
    assert (code, NOTHING_ELSE in out) == (0, True)
    (folder / "config.json").write_bytes(config + b" ")
    code, out, _ = command("verify", CELL, "--here", str(folder))
    assert (code, f"config.json: approved gitBlob:{git}; here gitBlob:" in out) == (1, True)


def test_an_image_is_compared_by_its_digest(approve_run: Callable[..., None], command: Command) -> None:
    def of_image(report: Report) -> Report:
        plan = image_report().plan
        return changed(changed(report, "plan.cell", release=plan.cell.release), "plan", server=plan.server)

    approve_run(of_image)
    digest = image_report().plan.cell.release.engine.digest
    code, out, _ = command("verify", CELL, "--here", f"mirror.example/vllm@{digest}")
    assert (code, f"same            digest: {digest}" in out) == (0, True)
    code, out, _ = command("verify", CELL, "--here", f"mirror.example/vllm@sha256:{'e' * 64}")
    assert (code, f"different       digest: approved {digest}; here sha256:eeee" in out) == (1, True)
    # Without Docker Engine nothing says what a tag names.
    code, out, _ = command("verify", CELL, "--here", "mirror.example/vllm:v0.32.0")
    assert (code, "no Docker Engine answers" in out, "nothing could be compared" in out) == (1, True, True)


def test_an_image_says_nothing_of_an_approved_process(approve_run: Callable[..., None], command: Command) -> None:
    approve_run()
    code, out, _ = command("verify", CELL, "--here", f"vllm/vllm-openai@sha256:{'e' * 64}")
    assert (code, "nothing could be compared" in out, "ran as a process" in out) == (1, True, True)


def test_a_server_is_compared_by_what_it_says(approve_run: Callable[..., None], command: Command) -> None:
    approve_run()
    with answering(told_replies(passed_report())) as url:
        code, out, _ = command("verify", CELL, "--here", f"{url}/v1/")
    assert (code, NOTHING_ELSE in out) == (0, True)
    for line in (
        "version of vLLM: 0.32.0",
        "longest context: 8192",
        "model: meta-llama/Llama-3.1-8B-Instruct",
        "cache_dtype: fp8",
    ):
        assert f"same            {line}" in out
    # The blocks follow from the free memory of a machine.
    assert "num_gpu_blocks" not in out
    assert "cannot be told  digest of the weights: approved" in out
    assert "a URL does not show it" in out


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        ("/version", b'{"version": "0.33.0"}', "version of vLLM: approved 0.32.0; here 0.33.0"),
        ("/v1/models", {"id": "other"}, "served names: approved llama-3.1-8b; here other"),
        ("/v1/models", {"root": "evil/model"}, "model: approved meta-llama/Llama-3.1-8B-Instruct; here evil/model"),
        ("/v1/models", {"max_model_len": 4096}, "longest context: approved 8192; here 4096"),
        ("/metrics", CACHE_PAGE.replace('"0.9"', '"0.95"').encode(), "gpu_memory_utilization: approved 0.9; here 0.95"),
    ],
)
def test_a_server_that_says_something_else_differs(
    path: str, body: bytes | dict[str, object], line: str, approve_run: Callable[..., None], command: Command
) -> None:
    approve_run()
    report = passed_report()
    replies = told_replies(report, **body) if isinstance(body, dict) else told_replies(report) | {path: body}
    with answering(replies) as url:
        code, out, _ = command("verify", CELL, "--here", url)
    assert (code, f"different       {line}\n" in out) == (1, True)


def test_a_servers_path_says_nothing_of_local_weights(weights: Path, command: Command) -> None:
    with answering(told_replies(passed_report(), root="/models/llama")) as url:
        code, out, _ = command("verify", CELL, "--here", url, "--here", str(weights))
    assert (code, "cannot be told  model: approved" in out, "name the folder with --here" in out) == (0, True, True)


@pytest.mark.parametrize(("shown", "code"), [("0.32.0+cpu", 0), ("0.32.0.post1", 1), ("0.32.0\x1b[2J", 1), ("../" * 90, 1)])
def test_a_version_may_lack_its_builds_mark(shown: str, code: int, approve_run: Callable[..., None], command: Command) -> None:
    approve_run()
    with answering(told_replies(passed_report()) | {"/version": json.dumps({"version": shown}).encode()}) as url:
        done, out, _ = command("verify", CELL, "--here", url)
    assert (done, "\x1b" in out) == (code, False)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("file:///etc/passwd", "only servers at http:// and https:// are asked"),
        ("ftp://host/model", "only servers at http:// and https:// are asked"),
        ("http://", "only servers at http:// and https:// are asked"),
        ("http://[", "the address is not one"),
        ("http://user:word@host/", "more than a server and a path"),
        ("http://host/?key=1", "more than a server and a path"),
        ("./no-such-folder", "there is no folder ./no-such-folder"),
        ("Not An Image", "is not an image reference"),
        ("vllm/vllm-openai", "neither a tag nor a digest"),
    ],
)
def test_what_is_no_target_is_the_callers_mistake(
    target: str, message: str, approve_run: Callable[..., None], command: Command
) -> None:
    approve_run()
    code, out, err = command("verify", CELL, "--here", target)
    assert (code, message in err, "user:word" in out + err) == (2, True, False)


def test_an_approval_that_does_not_hold_is_compared_with_nothing(weights: Path, command: Command) -> None:
    assert command("revoke", CELL, "--by", "Eve", "--reason", "it crashes")[0] == 0
    code, out, _ = command("verify", CELL, "--here", str(weights))
    assert (code, out) == (14, "")
