"""Containers as data: their command, how they ended, whose they are. With a real engine: tests/live/test_docker.py."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.builders.server_plans import AWKWARD, run_by_a_shell
from tests.fakes.vllm import ReplyHandler
from vllm_qualify.engine.containers import leftovers
from vllm_qualify.engine.containers.leftovers import CELL_LABEL, OWNER_LABEL, ROLE_LABEL, RUN_LABEL, owner_label
from vllm_qualify.engine.containers.plan import Bind, ContainerPlan, command_line, shell_command
from vllm_qualify.engine.containers.run import RunningContainer
from vllm_qualify.engine.failure.end import End
from vllm_qualify.engine.process import Leftover
from vllm_qualify.errors import HostError

DIGEST = "vllm/vllm-openai@sha256:" + "0" * 64


def plan(**others: Any) -> ContainerPlan:
    return ContainerPlan(**({"image": DIGEST, "platform": "linux/amd64", "arguments": ["--config", "/c.yaml"]} | others))


def after(command: list[str], option: str) -> list[str]:
    return [word for before, word in pairwise(command) if before == option]


# --- the command for people


def test_everything_of_a_plan_is_in_the_command() -> None:
    binds = [Bind(source=Path("/w"), target="/model"), Bind(source=Path("/h"), target="/cache", read_only=False)]
    whole = plan(
        name="vllm-qualify-1-server",
        entrypoint="sleep",
        arguments=["infinity"],
        environment={"VLLM_LOGGING_LEVEL": "INFO"},
        passed=["HF_TOKEN"],
        binds=binds,
        labels={RUN_LABEL: "1", CELL_LABEL: "r/v/h200/p", ROLE_LABEL: "server"},
        gpus=[2, 3],
        port=8123,
        network="container:0123",
        shared_memory_gib=32,
        memory_limit_mib=1536,
    )
    command = command_line(whole)
    assert after(command, "--name") == ["vllm-qualify-1-server"]
    assert after(command, "--entrypoint") == ["sleep"]
    assert after(command, "--env") == ["VLLM_LOGGING_LEVEL=INFO", "HF_TOKEN"]
    assert after(command, "--mount") == ["type=bind,source=/w,target=/model,readonly", "type=bind,source=/h,target=/cache"]
    assert after(command, "--label") == ["vllm-qualify.run=1", "vllm-qualify.cell=r/v/h200/p", "vllm-qualify.role=server"]
    assert after(command, "--publish") == ["127.0.0.1:8123:8000"]
    assert after(command, "--network") == ["container:0123"]
    assert after(command, "--memory") == ["1536m"]
    assert after(command, "--shm-size") == ["32g"]
    assert after(command, "--cap-drop") == ["ALL"]
    assert not any(part.startswith("--ipc") for part in command)
    assert command[-2:] == [DIGEST, "infinity"]
    assert set(command_line(plan())) - {"--config", "/c.yaml"} <= set(command)


@pytest.mark.parametrize(("gpus", "asked"), [([], []), ([0], ['"device=0"']), ([2, 3], ['"device=2,3"']), ("all", ["all"])])
def test_gpus_are_asked_for_as_docker_reads_them(gpus: list[int] | str, asked: list[str]) -> None:
    """The quotes are docker's own: it reads the value as a row of CSV."""
    assert after(command_line(plan(gpus=gpus)), "--gpus") == asked


def test_a_passed_variable_has_no_value_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_mine")
    made = plan(passed=["HF_TOKEN", "NOT_SET"])
    assert after(command_line(made), "--env") == ["HF_TOKEN", "NOT_SET"]
    for text in (shell_command(made), made.model_dump_json(), repr(made)):
        assert "hf_secret_of_mine" not in text


@pytest.mark.parametrize("awkward", [*AWKWARD, "*", "!"])
def test_a_shell_reads_back_exactly_the_words(awkward: str) -> None:
    made = plan(
        name="named",
        arguments=["--chat-template", awkward, awkward],
        environment={"AWKWARD": awkward},
        labels={CELL_LABEL: awkward},
        binds=[Bind(source=Path("/a folder/it's"), target="/model")],
        gpus=[0, 1],
        port=8000,
    )
    command = command_line(made)
    assert awkward in command
    assert f"AWKWARD={awkward}" in command
    assert run_by_a_shell(shell_command(made), {}) == command


def test_each_option_has_a_line_of_its_own() -> None:
    lines = shell_command(plan(name="named", environment={"A": "1", "B": "2"}, shared_memory_gib=32)).splitlines()
    assert [line.removesuffix(" \\").strip() for line in lines] == [
        *("docker run", "--detach", "--platform linux/amd64", "--cap-drop ALL", "--cap-add DAC_OVERRIDE"),
        *("--security-opt no-new-privileges", "--name named", "--shm-size 32g", "--env A=1", "--env B=2"),
        *(DIGEST, "--config /c.yaml"),
    ]


# --- how a container ended


@pytest.fixture
def watched(tmp_path: Path) -> RunningContainer:
    return RunningContainer(container_id="0123", state_file=tmp_path / "server.state", log=tmp_path / "server.log")


@pytest.mark.parametrize(
    ("state", "end"),
    [
        ({"exit_code": 0, "oom_killed": False}, End(exit_code=0)),
        ({"exit_code": 137, "oom_killed": True}, End(exit_code=137, oom_killed=True)),
        # a command in a container: only its container knows of memory
        ({"exit_code": 3}, End(exit_code=3)),
    ],
)
def test_its_state_tells_its_end(watched: RunningContainer, state: dict[str, Any], end: End) -> None:
    assert watched.end() is None, "without a state it runs"
    watched.state_file.write_text(json.dumps(state))
    assert watched.end() == end


def test_an_end_that_nobody_saw_is_the_error_that_hid_it(watched: RunningContainer) -> None:
    error = {"problem": "no Docker Engine answers", "remedy": "start it", "place": "load", "kind": "docker-gone", "retry": True}
    watched.state_file.write_text(json.dumps({"error": error}))
    with pytest.raises(HostError, match="no Docker Engine answers") as raised:
        watched.end()
    assert (raised.value.kind, raised.value.place, raised.value.retry) == ("docker-gone", "load", True)


# --- whose containers they are


# Docker Engine 20.10 on a busy machine, 10 s after it killed a vLLM server
STILL_ENDS = "Could not kill running container 8bd2, cannot remove - container 8bd2 PID 23465 is zombie and can not be killed."


class Host(ThreadingUnixStreamServer):
    """A stand-in for Docker Engine with containers and nothing else: it lists them by their labels, and removes them."""

    daemon_threads = True

    def __init__(self, address: str) -> None:
        super().__init__(address, Answers)
        self.containers: dict[str, dict[str, str]] = {}
        self.refusals = 0

    def listed(self, wanted: list[str]) -> list[dict[str, Any]]:
        return [
            {"Id": name, "Names": [f"/{name}"], "Labels": labels}
            for name, labels in self.containers.items()
            if set(wanted) <= set(labels)
        ]


class Answers(ReplyHandler):
    server: Host

    def do_GET(self) -> None:  # noqa: N802  (the base class calls it)
        address = urlsplit(self.path)
        if address.path.endswith("/containers/json"):
            filters = json.loads(parse_qs(address.query)["filters"][0])
            self._answer(200, self.server.listed(filters["label"]))
        else:
            self._answer(200, {"Version": "20.10.24", "ApiVersion": "1.41", "Os": "linux", "Arch": "amd64"})

    def do_DELETE(self) -> None:  # noqa: N802  (the base class calls it)
        if self.server.refusals:
            self.server.refusals -= 1
            self._answer(500, {"message": STILL_ENDS})
        elif self.server.containers.pop(urlsplit(self.path).path.rpartition("/")[2], None) is None:
            self._answer(404, {"message": "No such container"})
        else:
            self._send(204, b"", "application/json")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    # a socket's path must be short
    with tempfile.TemporaryDirectory() as folder, Host(f"{folder}/s") as serving:
        Thread(target=serving.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/s")
        yield serving
        serving.shutdown()


@pytest.fixture(scope="module")
def gone() -> str:
    """The owner that a process called itself which has ended."""
    script = "from vllm_qualify.engine.containers.leftovers import owner_label; print(owner_label())"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def of(owned_by: str, **others: str) -> dict[str, str]:
    return {RUN_LABEL: "1", CELL_LABEL: "r/v/cpu/p", OWNER_LABEL: owned_by} | others


MACHINE, BOOT, NAMESPACE, PID, START = range(5)


def test_an_owner_is_known_by_machine_boot_namespace_process_and_start() -> None:
    parts = owner_label().split(":")
    assert len(parts) == 5
    assert parts[BOOT] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert parts[PID] == str(os.getpid())
    assert parts[START].isdigit()
    assert owner_label() == owner_label()


NULL_BOOT, OTHER = "00000000-0000-0000-0000-000000000000", "f" * 32


@pytest.mark.parametrize(
    ("lives", "changes", "is_left"),
    [
        (True, {}, False),
        # another process has the number since
        (True, {START: "1"}, True),
        # nothing lives on from before the machine started
        (True, {BOOT: NULL_BOOT, NAMESPACE: "1"}, True),
        # nothing is known of an owner that cannot be seen from here, whatever the other machine's boot
        (False, {MACHINE: OTHER}, False),
        (False, {MACHINE: OTHER, BOOT: "another"}, False),
        (False, {NAMESPACE: "1"}, False),
        *((False, {PID: number}, False) for number in ("", "x", "-1", "1.5")),
    ],
)
def test_an_owner_is_gone_only_if_that_is_known(
    host: Host, gone: str, lives: bool, changes: dict[int, str], is_left: bool
) -> None:
    parts = dict(enumerate((owner_label() if lives else gone).split(":")))
    host.containers["it"] = of(":".join((parts | changes).values()))
    assert bool(leftovers.find_leftovers()) == is_left


# Of others, whose containers have no label of ours, or one that says nothing.
GARBAGE = ("", ":", "::::", "someone", "a:b:c:d:e", "a:b:c:1:2:3:4")
THEIRS = {"plain": {}, "unowned": {RUN_LABEL: "1"}} | {f"garbage{number}": of(label) for number, label in enumerate(GARBAGE)}


def test_what_a_process_that_ended_left_is_found_and_removed_and_nothing_else(host: Host, gone: str) -> None:
    others = THEIRS | {"mine": of(owner_label()), "no run": {OWNER_LABEL: gone}}
    host.containers = others | {"left": of(gone), "probe": {RUN_LABEL: "", OWNER_LABEL: gone}}
    found = [Leftover(id=name, name=name, run=run) for name, run in (("left", "1"), ("probe", ""))]
    assert leftovers.find_leftovers() == found
    assert leftovers.remove_leftovers() == found
    assert host.containers == others
    assert leftovers.remove_leftovers() == []


def test_a_container_that_still_ends_is_removed_when_it_has_ended_and_one_that_never_ends_is_reported(
    host: Host, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the engine's own words."""
    monkeypatch.setattr(leftovers, "REMOVE_EVERY_S", 0.01)
    host.containers["left"], host.refusals = of(gone), 2
    assert [each.name for each in leftovers.remove_leftovers()] == ["left"]
    assert host.containers == {}
    monkeypatch.setattr(leftovers, "REMOVED_WITHIN_S", 0.05)
    host.containers["left"], host.refusals = of(gone), 1000
    with pytest.raises(HostError, match="PID 23465 is zombie") as raised:
        leftovers.remove_leftovers()
    assert raised.value.kind == "docker-refused"
