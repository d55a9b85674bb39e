"""Secrets in forms that are easily overlooked, in files that others may read."""

import base64
import fcntl
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from vllm_qualify.engine.confinement import quiet_environment
from vllm_qualify.engine.host import FOLDER, holding_machine, lock_file
from vllm_qualify.engine.process import running_guarded
from vllm_qualify.errors import HostError
from vllm_qualify.secrets import redact, redact_file

PASSWORD = 'c0rrect "horse"/é'
PRINTS = [sys.executable, "-c", "print('x')"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PREFECT_API_AUTH_STRING", f"admin:{PASSWORD}"),
        *((name, PASSWORD) for name in ("PGPASSWORD", "MYSQL_PWD", "SMTP_PASS", "KEY_PASSPHRASE")),
        ("PREFECT_API_DATABASE_CONNECTION_URL", f"postgresql+asyncpg://prefect:{quote(PASSWORD, safe='')}@db/prefect"),
        ("HTTPS_PROXY", f"http://me:{quote(PASSWORD, safe='')}@proxy:3128"),
    ],
)
@pytest.mark.parametrize(
    "written",
    [
        PASSWORD,
        json.dumps(PASSWORD),
        json.dumps(PASSWORD, ensure_ascii=False),
        quote(PASSWORD, safe=""),
        base64.b64encode(PASSWORD.encode()).decode(),
    ],
)
def test_a_secret_is_found_in_every_form(
    name: str, value: str, written: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, value)
    assert redact(f"it says {written} here") in ("it says [redacted] here", 'it says "[redacted]" here')
    log = tmp_path / "a.log"
    log.write_text(f"it says {written} here")
    redact_file(log)
    assert "c0rrect" not in log.read_text()
    assert base64.b64encode(PASSWORD.encode()) not in log.read_bytes()


def test_the_header_of_a_login_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:s3cret-word")
    header = base64.b64encode(b"admin:s3cret-word").decode()
    assert redact(f"Authorization: Basic {header}") == "Authorization: Basic [redacted]"


@pytest.mark.parametrize("user", ["", "a", "me", "ada", "ada@example.org"])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_a_token_is_a_secret_also_within_the_header_of_a_login(
    user: str, encode: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client logs `user:token` by base64, where the token's letters depend on the length of the user's name."""
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret~word?with>much")
    for after in ("", "\n", ":x"):
        login = encode(f"{user}:hf_s3cret~word?with>much{after}".encode()).decode()
        assert redact(f"> Authorization: Basic {login} sent; key={login}.") == (
            "> Authorization: Basic [redacted] sent; key=[redacted]."
        )


def test_what_is_encoded_beside_a_secret_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret~word?with>much")
    text = f"image: {base64.b64encode(bytes(range(200))).decode()} and {base64.b64encode(b'hf_s3cret').decode()}"
    assert redact(text) == text


def test_a_short_secret_is_one_where_it_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "zq7xk2")
    assert redact("password=zq7xk2, (zq7xk2) azq7xk2b zq7xk29") == "password=[redacted], ([redacted]) azq7xk2b zq7xk29"


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "BYPASS_CHECKS", "COMPASS", "HF_TOKEN_FILE"])
def test_what_is_not_a_secret_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "plainvalue")
    assert redact("plainvalue") == "plainvalue"


def test_only_this_user_reads_a_log_while_it_is_written(tmp_path: Path) -> None:
    with running_guarded(PRINTS, quiet_environment(), tmp_path / "it.log"):
        assert stat.S_IMODE((tmp_path / "it.log").stat().st_mode) == 0o600


def test_a_log_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / "it.log").symlink_to(tmp_path / "theirs")
    with pytest.raises(HostError), running_guarded(PRINTS, quiet_environment(), tmp_path / "it.log"):
        pass
    assert (tmp_path / "theirs").read_text() == "kept"


def test_another_user_of_the_machine_cannot_hold_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else any of them could stop its qualifications for ever: to lock a file, it is enough to read it."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    # As an earlier version left it, and as it is made.
    lock_file().touch(0o666)
    lock_file().chmod(0o666)
    for _ in range(2):
        with holding_machine("me", lambda _: None):
            assert stat.S_IMODE(lock_file().stat().st_mode) & 0o007 == 0
        lock_file().unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_a_lock_of_another_user_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    lock_file().touch(0o600)
    os.chown(lock_file(), 65534, 65534)
    with lock_file().open("r+b") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(HostError, match="belongs to another user"), holding_machine("me", lambda _: None):
            pass


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("kept")
    lock_file().parent.mkdir(parents=True, exist_ok=True)
    lock_file().symlink_to(tmp_path / "theirs")
    with pytest.raises(HostError), holding_machine("me", lambda _: None):
        pass
    assert (tmp_path / "theirs").read_text() == "kept"
