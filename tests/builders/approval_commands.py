"""The commands about approvals, as a release manager types them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.approval.builder import made_key, publish_report
from vllm_qualify import cli
from vllm_qualify.approval.signing import PRIVATE_KEY, PUBLIC_KEY
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store

Command = Callable[..., tuple[int, str, str]]
WHO = ("--by", "Ada", "--reason", "it is faster")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The default store, with a run that passed, and a key pair in the environment."""
    monkeypatch.setenv("VLLM_QUALIFY_HOME", str(tmp_path))
    made_key(tmp_path / "approver.pem")
    monkeypatch.setenv(f"{PRIVATE_KEY}_FILE", str(tmp_path / "approver.pem"))
    monkeypatch.setenv(f"{PUBLIC_KEY}_FILE", str(tmp_path / "approver.pem.pub"))
    opened = open_store((tmp_path / "store").as_uri())
    publish_report(opened, tmp_path / "runs")
    return opened


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line; its exit code, output and errors."""
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def called(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["vllm-qualify", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, " ".join(output.err.split())

    return called
