"""Whole qualifications on the real engine, run once and looked at by many tests."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.prefect_server import keep_empty_database
from tests.s3 import BUCKET, Settings
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.publish.stores import open_store
from vllm_qualify.report.model import Report, load_report
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.publishing import publish_run

COMMAND = str(Path(sys.executable).parent / "vllm-qualify")


# What a load of seconds may rightly be refused for where something else keeps the machine busy.
DISTURBED = ("use more num_prompts", "see what slows this machine down", "give the client a core")


def undisturbed(measurement: Measurement) -> bool:
    """Whether it is valid; if not, something else kept the machine busy."""
    assert measurement.invalid_because is None or any(words in measurement.invalid_because for words in DISTURBED), measurement
    return measurement.invalid_because is None


@dataclass(frozen=True)
class Qualified:
    """A finished command with the folder of its run, the first below `home`; later ones judge it again."""

    done: subprocess.CompletedProcess[str]
    home: Path
    store: str

    @property
    def folder(self) -> Path:
        return min((self.home / "runs").iterdir())

    @property
    def report(self) -> Report:
        return load_report(self.folder)


def run(home: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a user has it: no Prefect server is running, and none is named; but for a test that uses `prefect_server`.

    It may wait for the machine as long as the runs of all other files take before it, for each of its servers.
    """
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=2000,
        env=os.environ | {"VLLM_QUALIFY_HOME": str(home)} | environment,
        check=False,
    )


def furnished(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what the first command leaves on a host: the engine's answers and Prefect's database."""
    share_answers(home, tmp_path_factory)
    (home / "prefect").mkdir()
    keep_empty_database(home / "prefect")
    return home


def share_answers(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What engines answered for one home is kept for all homes of a test run, as it is for all runs of a host."""
    own = tmp_path_factory.getbasetemp()
    answers = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "engines"
    answers.mkdir(exist_ok=True)
    (home / "engines").symlink_to(answers)


def processes_of(folder: Path) -> list[str]:
    """The command lines of the guards that name `folder`, and of the servers and tools of its runs, which do not."""
    lines, groups = [], _groups_of(folder)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            is_of_run = str(folder / "runs") in line or os.getpgid(int(path.parent.name)) in groups
        except OSError:
            continue
        if is_of_run and line and int(path.parent.name) != os.getpid():
            lines.append(line)
    return lines


def _groups_of(folder: Path) -> set[int]:
    """The process groups of the servers and tools of the runs, as their guards wrote them down."""
    states = [json.loads(path.read_text()) for path in (folder / "runs").rglob("*.state")]
    return {state["pid"] for state in states}


def of(engine: EngineEnvironment) -> dict[str, str]:
    return {"VLLM_QUALIFY_ENGINE": str(engine.python.parents[1])}


@pytest.fixture(scope="session")
def approved(engine: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Qualified:
    """`vllm-qualify demo`, its store a directory."""
    home = tmp_path_factory.mktemp("approved")
    return Qualified(run(home, COMMAND, "demo", **of(engine)), home, f"file://{home}/store")


@pytest.fixture(scope="session")
def on_a_server(_prefect_server: str) -> dict[str, str]:
    """The environment of commands that need not start a Prefect server of their own: that takes longer than they do."""
    return {"PREFECT_API_URL": _prefect_server}


@pytest.fixture(scope="session")
def again(
    engine: EngineEnvironment, approved: Qualified, on_a_server: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Qualified:
    """`vllm-qualify demo` once more, with the same store."""
    home = furnished(tmp_path_factory.mktemp("again"), tmp_path_factory)
    done = run(home, COMMAND, "demo", "--store", approved.store, **of(engine), **on_a_server)
    return Qualified(done, home, approved.store)


@pytest.fixture(scope="session")
def refused(
    engine: EngineEnvironment,
    approved: Qualified,
    radosgw_settings: Settings,
    on_a_server: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Qualified:
    """`vllm-qualify demo --weights regressed`, its store a real S3 service, to which the baseline was published."""
    home, store = furnished(tmp_path_factory.mktemp("refused"), tmp_path_factory), f"s3://{BUCKET}/demo"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in radosgw_settings.items():
            patch.setenv(name, value)
        publish_run(approved.report, Run(folder=approved.folder), open_store(store))
    environment = {**of(engine), **radosgw_settings, **on_a_server}
    done = run(home, COMMAND, "demo", "--weights", "regressed", "--store", store, **environment)
    return Qualified(done, home, store)
