"""Whether the tests run in CI: what is missing is an error there, and a failure is reported at once.

A run that somebody ends has no summary.
"""

import os

import pytest

# Of a reason, in letters.
LONGEST = 500
IN_CI = bool(os.environ.get("CI"))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if IN_CI and reporter is not None:
        config.pluginmanager.register(_AtOnce(reporter))


class _AtOnce:
    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else report.longreprtext.strip().rpartition("\n")[2]
            self._reporter.write_line(f"\n{report.nodeid} failed at its {report.when}: {reason[:LONGEST]}", red=True)
