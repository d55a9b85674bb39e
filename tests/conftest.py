"""What all tests share: where live parts are missing their tests skip, and in CI an empty live set fails."""

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.ci import IN_CI
from vllm_qualify.engine.environment import EngineEnvironment, find_engine
from vllm_qualify.errors import HostError
from vllm_qualify.runs import judging

pytest_plugins = (
    "tests.ci",
    "tests.in_memory",
    "tests.browser",
    "tests.s3",
    "tests.docker_engine",
    "tests.fleet.fixtures",
    "tests.prefect_server",
    "tests.qualified",
)

# The engines that this user has installed are not those of the tests.
os.environ["XDG_DATA_HOME"] = str(Path(tempfile.gettempdir(), "vllm-qualify-no-engines"))

LIVE_MARKERS = ("engine", "docker", "s3", "browser", "fleet")
# Files whose names begin so share a Docker Engine, or runs of the demo.
SHARING = ("test_docker", "test_demo")
# Files that take minutes are begun first (with --no-loadscope-reorder), the longest before the others: so no process is left
# alone with one at the end. Those that wait most run beside those that compute.
LONG = (
    "tests/live/test_docker",
    "tests/live/test_load_profiles.py",
    "tests/live/test_demo",
    "tests/attacks/test_demo_report.py",
    "tests/live/test_fleet",
    "tests/live/test_soak.py",
    "tests/faults/test_network.py",
    "tests/faults/test_world.py",
    "tests/faults/test_store_away.py",
    "tests/faults/test_chaos",
    "tests/live/",
    "tests/report/test_opened.py",
    "tests/attacks/test_served_model.py",
    "tests/drift/test_candidate.py",
    "tests/publish/test_store_contract.py",
    "tests/test_fleet_flows.py",
    "tests/test_approving.py",
    "tests/test_tend.py",
    "tests/test_tasks.py",
    "tests/test_cli.py",
    "tests/test_bench_orchestrator.py",
    "tests/evidence/test_accuracy.py",
)
RAN: Counter[str] = Counter()


@pytest.fixture(scope="session")
def engine() -> EngineEnvironment:
    """The real engine environment."""
    try:
        return find_engine()
    except HostError as error:
        if IN_CI:
            raise
        pytest.skip(str(error))


# A machine may be busy: how long an example takes says nothing.
# Drawn alike in every run: a test that fails by chance tells nobody what to mend. `--hypothesis-profile anew` looks for more.
settings.register_profile("alike", deadline=None, derandomize=True)
settings.register_profile("anew", deadline=None)
settings.load_profile("alike")


def pytest_configure() -> None:
    """No test uses a Prefect server, or a profile of one, that its user happens to have."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of new folders. pytest would look through all earlier ones for the next number, for each test."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / f"home{number}" for number in count())


@pytest.fixture(autouse=True)
def home(_homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test writes into the user's own folder of runs."""
    folder = next(_homes)
    folder.mkdir()
    monkeypatch.setenv("VLLM_QUALIFY_HOME", str(folder))
    # Tests that share this machine or a Prefect server wait for nobody; what is measured in them is not judged by its speed.
    monkeypatch.setenv("VLLM_QUALIFY_LOCKS", str(folder))
    monkeypatch.setenv("VLLM_QUALIFY_HOST", folder.name)
    return folder


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports whose evidence is a few words are not judged again; tests/attacks/test_demo_report.py judges real evidence."""
    monkeypatch.setattr(judging, "check_judgement", lambda *_: [])


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """With several processes a file's tests stay in one of them, and so do files that share what takes minutes to make."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((shared for shared in SHARING if Path(file).name.startswith(shared)), file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((rank for rank, long in enumerate(LONG) if item.nodeid.startswith(long)), len(LONG)))


def pytest_collection_finish() -> None:
    """All that was imported and collected stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """With several processes the first one hears of every test."""
    if report.when == "call" and report.passed:
        RAN.update(marker for marker in LIVE_MARKERS if marker in report.keywords)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a whole run in which a live set did not run at all is a failure."""
    if hasattr(session.config, "workerinput"):
        return
    is_whole_run = session.config.args == session.config.getini("testpaths") and not session.config.option.markexpr
    missing = [marker for marker in LIVE_MARKERS if not RAN[marker]]
    if IN_CI and is_whole_run and missing and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter.write_line(f"no live test ran for: {', '.join(missing)}", red=True)
