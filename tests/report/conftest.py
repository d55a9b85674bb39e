import pytest

from tests.report.builder import approved_report, not_approved_report
from vllm_qualify.report.model import Report


@pytest.fixture(scope="session")
def approved() -> Report:
    return approved_report()


@pytest.fixture(scope="session")
def not_approved() -> Report:
    return not_approved_report()
