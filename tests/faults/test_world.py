"""What the world around a command does to it: each fault ends as one error with its remedy, soon and before work is lost."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.qualified import COMMAND
from tests.runs.test_runs import judged, run
from vllm_qualify.engine.confinement import _homes
from vllm_qualify.runs import home as homes
from vllm_qualify.runs.folder import Run

__all__ = ["judged", "run"]

# Whoever hangs is stopped here; what the product allows itself is in its own limits, 15 s in sum.
HANGS_S = 120


def ended(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )


def assert_one_error(done: subprocess.CompletedProcess[str], told: str, remedy: str) -> None:
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr.count("error (the operator must act)") == 1
    assert "Traceback" not in done.stderr
    assert told in done.stderr
    assert f"remedy: {remedy}" in done.stderr


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b'{"run_id": 7}'])
@pytest.mark.parametrize("file", ["plan.json", "stages/load.json"])
def test_a_damaged_file_of_a_run_is_told(file: str, damage: bytes, run: Run) -> None:
    (run.folder / file).write_bytes(damage)
    assert_one_error(ended(COMMAND, "rejudge", run.id), f"{run.folder / file}: damaged", "delete the run's folder")


def test_a_report_is_shown_whatever_became_of_its_plans_file(run: Run) -> None:
    (run.folder / "plan.json").write_bytes(b"{")
    assert ended(COMMAND, "report", "show", run.id).returncode == 0


def test_an_empty_home_is_the_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_QUALIFY_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    usual = tmp_path / "user" / ".vllm-qualify"
    assert homes.home() == usual
    assert _homes()[1] == usual
    assert homes.default_store_url() == f"file://{usual}/store"
