"""What all tests share: where live parts are missing their tests skip, and in CI an empty live set fails."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vllm_qualify.engine.environment import EngineEnvironment, find_engine
from vllm_qualify.errors import HostError

IN_CI = bool(os.environ.get("CI"))
LIVE_MARKERS = ("engine", "s3", "browser")
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


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test writes into the user's own folder of runs."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("VLLM_QUALIFY_HOME", str(folder))
    return folder


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    outcome = yield
    if call.when == "call" and outcome.get_result().passed:
        RAN.update(marker for marker in LIVE_MARKERS if item.get_closest_marker(marker))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a whole run in which a live set did not run at all is a failure."""
    is_whole_run = session.config.args == session.config.getini("testpaths") and not session.config.option.markexpr
    missing = [marker for marker in LIVE_MARKERS if not RAN[marker]]
    if IN_CI and is_whole_run and missing and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter.write_line(f"no live test ran for: {', '.join(missing)}", red=True)
