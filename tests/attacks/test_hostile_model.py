"""Code of a model, and of a task, that looks for this user's keys: it runs, it looks, and it finds none."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.builders.hostile_models import (
    PLANTED,
    SENTINEL,
    check_unchanged,
    code,
    looked,
    make_hostile_model,
    others,
    run_confined,
    victim,
)
from tests.ci import IN_CI
from vllm_qualify.engine.confinement import KEPT_HOME, confining_process, isolation_problem, quiet_environment
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.landlock import can_confine
from vllm_qualify.engine.letter_box import copy_matching, read_plain, write_plain

__all__ = ["others", "victim"]

TASK = """\
task: hostile
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/test.jsonl}}}}
output_type: generate_until
test_split: test
doc_to_text: !function hostile.text
doc_to_target: answer
"""


@pytest.fixture(autouse=True)
def _needs_landlock() -> None:
    if not can_confine():
        (pytest.fail if IN_CI else pytest.skip)("this kernel has no Landlock of version 2")


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["server", "probe"])
def test_code_of_a_model_finds_no_key(
    kind: str, engine: EngineEnvironment, tmp_path: Path, victim: Path, others: dict[str, Any]
) -> None:
    make_hostile_model(tmp_path, victim, others=reachable(others))
    assert looked(kind, tmp_path, victim, engine) == []
    check_unchanged(others)


@pytest.mark.thorough
def test_a_function_of_a_task_finds_no_key(tmp_path: Path, victim: Path, others: dict[str, Any]) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "hostile.yaml").write_text(TASK.format(folder=tasks))
    (tasks / "test.jsonl").write_text('{"question": "1", "answer": "1"}\n{"question": "2", "answer": "2"}\n')
    (tasks / "hostile.py").write_text(
        f"{code(victim, tmp_path, others=reachable(others))}\n\ndef text(doc):\n    tell()\n    return doc['question']\n"
    )
    nothing = EngineEnvironment(python=tmp_path / "engine" / "bin" / "python")
    assert looked("task", tmp_path, victim, nothing) == []
    check_unchanged(others)


def reachable(others: dict[str, Any]) -> dict[str, Any]:
    """Without namespaces others are reached, as `doctor` says."""
    return {} if isolation_problem() else others


# --- the environment


@pytest.mark.parametrize(
    "name", sorted(PLANTED.keys() | {"VLLM_QUALIFY_STORE", "PREFECT_API_URL", "DOCKER_HOST", "SSH_AUTH_SOCK"})
)
def test_a_child_gets_only_what_is_listed_and_no_secret(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, PLANTED.get(name, "something"))
    assert name not in quiet_environment()


@pytest.mark.parametrize(
    "name", ["PATH", "LC_ALL", "CUDA_VISIBLE_DEVICES", "VLLM_USE_V2_MODEL_RUNNER", "NCCL_DEBUG", "HTTPS_PROXY"]
)
def test_a_child_keeps_what_it_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://proxy:3128")
    assert quiet_environment()[name] == "http://proxy:3128"


@pytest.mark.parametrize("name", ["HF_TOKEN", "HTTPS_PROXY"])
def test_only_a_child_that_downloads_gets_a_token_and_a_proxys_password(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, PLANTED[name])
    assert quiet_environment(downloads=True)[name] == PLANTED[name]


# --- the files and the rights


READS = """
for name in {!r}:
    try:
        print("read", open(name).read())
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize("named", ["home", "home/.aws", "home/keys/signing.pem", "."])
def test_a_path_of_a_recipe_opens_no_key(named: str, tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(victim))
    monkeypatch.setenv("VLLM_QUALIFY_PRIVATE_KEY_FILE", str(victim / "keys" / "signing.pem"))
    files = [str(victim / ".aws" / "credentials"), str(victim / "keys" / "signing.pem")]
    assert run_confined(tmp_path, READS.format(files), tmp_path / named).split() == ["PermissionError"] * 2


def test_a_model_within_the_home_is_read(tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(victim))
    (victim / "models").mkdir()
    (victim / "models" / "config.json").write_text("{}")
    script = f"print(open({str(victim / 'models' / 'config.json')!r}).read())"
    assert run_confined(tmp_path, script, victim / "models").strip() == "{}"


def test_root_keeps_no_right_that_reads_another_process(tmp_path: Path) -> None:
    script = "print(*(line for line in open('/proc/self/status') if line.startswith(('Cap', 'NoNew'))))"
    status = dict(line.split() for line in run_confined(tmp_path, script).splitlines() if line.split())
    kept = 1 << 1 | 1 << 14
    assert all(int(status[f"Cap{name}:"], 16) & ~kept == 0 for name in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
    assert status["NoNewPrivs:"] == "1"


REACHES = """
import os
# The guard; for an isolated process, which cannot name it, the first one of its namespace, a fork of it.
parent = os.getppid() or 1
for reach in (
    lambda: open(f"/proc/{parent}/environ").read(),
    lambda: open(f"/proc/{parent}/mem", "rb"),
    lambda: os.readlink(f"/proc/{parent}/fd/1"),
    lambda: os.listdir(f"/proc/{parent}/root/root"),
    lambda: open("/etc/shadow").read(),
    lambda: os.listdir("/tmp"),
    lambda: os.kill(parent, 0),
):
    try:
        print("reached", reach())
    except PermissionError:
        print("refused")
"""


def test_the_guard_and_what_started_it_are_out_of_reach(tmp_path: Path) -> None:
    assert run_confined(tmp_path, REACHES).split() == ["refused"] * 7


# --- files that a confined process wrote


def test_a_link_in_a_letter_box_leads_nowhere(tmp_path: Path) -> None:
    secret, box, into = tmp_path / "secret", tmp_path / "box", tmp_path / "into"
    for folder in (box, into):
        folder.mkdir()
    secret.write_text(SENTINEL)
    (box / "results_1.json").symlink_to(secret)
    (box / "order.part").symlink_to(secret)
    os.mkfifo(box / "samples_1.jsonl")
    (box / "metrics-before.txt").write_text("a lie")
    copy_matching(box, into, ["results_*.json", "samples_*.jsonl"])
    assert list(into.iterdir()) == []
    assert read_plain(box / "results_1.json") is None
    write_plain(box / "order", b"{}")
    assert (secret.read_text(), (box / "order").read_bytes()) == (SENTINEL, b"{}")
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(OSError, match="elsewhere"):
        copy_matching(tmp_path / "elsewhere", into, ["*"])


PROC = """
import subprocess, sys
name = "open('/proc/self/comm', 'w').write('named')"
exec(name)
subprocess.run([sys.executable, "-c", name], check=True)
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/sysrq", "/proc/sys/vm/overcommit_memory"):
    try:
        open(path, "w").close()
    except OSError as error:
        print("refused", path, error.errno)
    else:
        print("OPENED", path)
"""


def test_threads_are_named_in_proc_and_the_machines_settings_there_stay(tmp_path: Path) -> None:
    """CUDA does not start where it may not write its threads' names. Root could name a program in core_pattern."""
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    message = run_confined(tmp_path, PROC)
    assert message.count("refused") == 3, message
    assert "OPENED" not in message
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before
    assert not os.statvfs("/proc/sys").f_flag & os.ST_RDONLY, "this process's own view is not changed"


def test_what_torch_compiles_is_kept_unless_a_model_brings_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model's code could leave a library there, which the next run would load."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with confining_process({}) as confinement:
        kept = Path(confinement.environment["TORCHINDUCTOR_CACHE_DIR"])
        assert kept.is_relative_to(tmp_path)
        assert any(kept.is_relative_to(folder) for folder in confinement.rules.writable)
        # Torch would compile its headers into TMPDIR, for each server anew.
        assert confinement.environment["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] == "0"
    with confining_process({}, is_trusting=True) as confinement:
        own = Path(confinement.environment["TORCHINDUCTOR_CACHE_DIR"])
        assert own.is_relative_to(confinement.environment["TMPDIR"])
        assert str(tmp_path / KEPT_HOME) not in confinement.rules.writable


def test_a_tool_of_the_path_comes_with_its_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler in a folder of its own reads headers beside its `bin`; a `bin` in a home opens nothing more of it."""
    for folder in ("gcc/bin", "gcc/lib", "home/bin", "home/lib"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}/gcc/bin:{tmp_path}/home/bin:/bin")
    with confining_process({}) as confinement:
        assert str(tmp_path / "gcc") in confinement.rules.readable
        assert not {str(tmp_path / "home"), "/"} & set(confinement.rules.readable)
