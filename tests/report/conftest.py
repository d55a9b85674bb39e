"""Reports, and their pages' text."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.report.builder import (
    compared_report,
    detailed_report,
    image_report,
    largest_report,
    not_passed_report,
    page_link,
    passed_report,
)
from vllm_qualify.report import page
from vllm_qualify.report.model import Report
from vllm_qualify.report.page import WORDS, render_page, render_words
from vllm_qualify.report.questions import ALL_CHARACTERS, ALL_FLIPS


@pytest.fixture(scope="session")
def approved() -> Report:
    return passed_report()


@pytest.fixture(scope="session")
def not_approved() -> Report:
    return not_passed_report()


@pytest.fixture(scope="session")
def compared() -> Report:
    return compared_report()


def page_of(make_report: Callable[[], Report]) -> Any:
    return pytest.fixture(scope="session")(lambda: render_page(make_report(), page_link))


approved_page = page_of(passed_report)
hostile_page = page_of(not_passed_report)
image_page = page_of(image_report)
detailed_page = page_of(detailed_report)
compared_page = page_of(compared_report)
largest_page = page_of(largest_report)


@pytest.fixture(scope="session")
def words_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of all words beside the largest page: those of 602 questions. Reading them of evidence has tests of its own."""
    every = largest_report(ALL_FLIPS, ALL_CHARACTERS).details.questions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "all_words", lambda *_: every)
        return render_words(largest_report(), tmp_path_factory.mktemp("evidence"))[WORDS]
