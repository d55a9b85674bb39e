"""Deployments that attack whoever compares them with an approval: endless, slow and broken servers, and folders of traps."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.changed import changed
from tests.builders.deployed import answering, of_folder, told_replies, write_weights
from tests.builders.dripping import dripping
from tests.fakes.redirecting import redirecting
from tests.report.builder import passed_report
from vllm_qualify.approval.here import server as asked
from vllm_qualify.approval.here.finding import Finding
from vllm_qualify.approval.here.folder import compare_folder
from vllm_qualify.approval.here.server import compare_server
from vllm_qualify.errors import CallerError

RELEASE, SERVER = passed_report().plan.cell.release, passed_report().plan.server


def states_of(url: str, page: str | None = None) -> set[str]:
    return {found.state for found in compare_server(url, RELEASE, SERVER, page)}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "ANSWER_S", 0.5)


def test_a_server_that_drips_is_left() -> None:
    start = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{"
    began = time.monotonic()
    with dripping(start, b" ") as address:
        assert states_of(f"http://{address}") == {"cannot be told"}
    assert time.monotonic() - began < 10


def test_a_server_that_only_opens_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert states_of(f"http://127.0.0.1:{listener.getsockname()[1]}") == {"cannot be told"}


def test_a_reply_that_is_too_long_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "MOST_BYTES", 2**20)
    monkeypatch.setattr(asked, "ANSWER_S", 30.0)
    long = b'{"version": "0.32.0"}' + b" " * 2**21
    with answering(told_replies(passed_report()) | {"/version": long}) as url:
        found = {each.what: each for each in compare_server(url, RELEASE, SERVER, None)}
    assert (found["version of vLLM"].state, "longer than 1 MiB" in found["version of vLLM"].note) == ("cannot be told", True)
    assert found["served names"].state == "same"


def test_no_other_server_is_asked() -> None:
    with redirecting(307) as (url, others):
        assert states_of(url) == {"cannot be told"}
        assert others == []


REPLIES = {
    "binary": bytes(range(256)),
    "empty": b"",
    "another type": b'{"version": 32, "data": {"id": "llama-3.1-8b"}}',
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "types within": b'{"version": ["0.32.0"], "data": [{"id": true, "root": 1, "max_model_len": "8192"}]}',
    "many": b'{"data": [' + b",".join([b'{"id": "llama-3.1-8b"}'] * 2_000) + b"]}",
    "no UTF-8": b'{"version": "\xff", "data": [{"id": "\xff"}]}',
}


@pytest.mark.parametrize("body", REPLIES.values(), ids=REPLIES)
def test_a_reply_of_another_form_tells_nothing(body: bytes) -> None:
    with answering(dict.fromkeys(("/version", "/v1/models", "/metrics"), body)) as url:
        assert states_of(url, 'vllm:cache_config_info{block_size="16"} 1.0\n') == {"cannot be told"}


def test_a_refusal_tells_nothing_even_with_the_right_words() -> None:
    replies = {path: (500, body) for path, body in told_replies(passed_report()).items() if isinstance(body, bytes)}
    with answering(replies) as url:
        assert states_of(url) == {"cannot be told"}


def test_a_long_name_is_cut() -> None:
    with answering(told_replies(passed_report(), id="x" * 100_000)) as url:
        assert all(len(found.line) < 1_000 for found in compare_server(url, RELEASE, SERVER, None))


# --- folders


def compared(folder: Path) -> list[Finding]:
    """The folder compared with the approval of the weights that `write_weights` writes."""
    approved = folder.parent / "approved"
    if not approved.exists():
        write_weights(approved)
    plan = of_folder(approved)(passed_report()).plan
    return compare_folder(folder, plan.cell.release, plan.server)


def differing(folder: Path) -> dict[str, str]:
    return {found.what: found.here for found in compared(folder) if found.state == "different"}


def test_pipes_devices_sockets_and_links_to_nothing_are_named_and_not_read(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "model")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    (folder / "tokenizer.json").symlink_to("/dev/zero")
    (folder / "vocab.json").symlink_to(tmp_path / "nowhere")
    (folder / "round.json").symlink_to("round.json")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))
        assert differing(folder) == {
            "config.json": "a pipe, no plain file",
            "tokenizer.json": "a device, no plain file",
            "vocab.json": "a link to nothing, no plain file",
            "round.json": "a link to nothing, no plain file",
            "s": "a socket, no plain file",
        }


def test_what_a_link_out_of_the_folder_leads_to_is_compared_and_not_shown(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "model")
    (tmp_path / "secret").write_text("a password")
    (folder / "extra.json").symlink_to(tmp_path / "secret")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "secret")
    assert "password" not in str(compared(folder))
    assert set(differing(folder)) == {"config.json", "extra.json"}


def test_approved_content_behind_a_link_is_the_same(tmp_path: Path) -> None:
    """As in a cache of the hub, whose snapshots are links."""
    folder = write_weights(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert differing(folder) == {}


def test_a_link_back_has_an_end(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "model")
    (folder / "again").symlink_to(folder, target_is_directory=True)
    assert differing(folder) == {}


def test_an_endless_folder_is_refused(tmp_path: Path) -> None:
    """Ten folders, each with ten links to the next, are 10^10 paths."""
    folder = write_weights(tmp_path / "model")
    for level in range(10):
        (tmp_path / f"{level}").mkdir()
        for link in range(10):
            (tmp_path / f"{level}" / f"{link}").symlink_to(tmp_path / f"{level + 1}")
    (tmp_path / "10").mkdir()
    (tmp_path / "10" / "file").touch()
    (folder / "deep").symlink_to(tmp_path / "0")
    with pytest.raises(CallerError, match="more than 100,000 entries"):
        compared(folder)


def test_huge_files_cost_nothing(tmp_path: Path) -> None:
    """Those without an approved name are not read at all, and a hole of terabytes is no file of weights."""
    folder = write_weights(tmp_path / "model")
    for name, size in (("extra.safetensors", 2**40), ("model.safetensors", 2**41 + 1)):
        with (folder / name).open("wb") as file:
            file.truncate(size)
    began = time.monotonic()
    assert differing(folder) == {
        "extra.safetensors": "an additional file",
        "model.safetensors": f"{2**41 + 1:,} bytes, which were not read",
    }
    assert time.monotonic() - began < 10


def test_a_file_that_grows_while_it_is_read_has_an_end(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "model")
    with _growing(folder / "model.safetensors"):
        assert set(differing(folder)) == {"model.safetensors"}


def _growing(path: Path) -> "_Growth":
    return _Growth(path)


class _Growth:
    """Appends to a file until the block ends."""

    def __init__(self, path: Path) -> None:
        self._path, self._over = path, threading.Event()
        self._thread = threading.Thread(target=self._grow, daemon=True)

    def _grow(self) -> None:
        with self._path.open("ab") as file:
            while not self._over.is_set():
                file.write(bytes(2**16))
                file.flush()

    def __enter__(self) -> None:
        size = self._path.stat().st_size
        self._thread.start()
        while self._path.stat().st_size == size:
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_many_differences_are_counted(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "model")
    for number in range(500):
        (folder / f"{number}.json").touch()
    found = differing(folder)
    assert (len(found), found["more files"]) == (21, "480 more files differ")


def names() -> Iterator[str]:
    yield from ("\x1b[2J.json", "a\nsame  model.json", "\udcff.json")


def test_a_name_cannot_forge_a_line(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "model")
    for name in names():
        (folder / os.fsencode(name).decode(errors="surrogateescape")).touch()
    lines = [found.line for found in compared(folder) if found.state == "different"]
    assert len(lines) == 3
    assert all(line.startswith("  different") and "\n" not in line for line in lines)


def test_a_local_approvals_release_has_its_files(tmp_path: Path) -> None:
    """An approval without digests of files compares nothing, and never says same."""
    bare = changed(SERVER, parts=[part.model_copy(update={"files": {}}) for part in SERVER.parts])
    assert {found.state for found in compare_folder(write_weights(tmp_path / "m"), RELEASE, bare)} == {"cannot be told"}
