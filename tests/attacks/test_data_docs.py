"""A recipe's text that would be a script in Great Expectations' page, which is shown beside the board."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.judge.test_data_docs import FOUND, GATE
from vllm_qualify.judge.data_docs import POLICY
from vllm_qualify.judge.expectations import judge

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    gate, found = GATE.model_copy(update={"filter": HOSTILE}), FOUND.model_copy(update={"filter": HOSTILE})
    judge([gate], [found], "docs", docs=tmp_path)
    (page,) = (tmp_path / "validations").rglob("*.html")
    return page


def test_the_policy_comes_before_all_else(page: Path) -> None:
    text = page.read_text()
    assert text.partition("<head>")[2].startswith(POLICY)
    assert "script" not in text.partition("<head>")[0]


@pytest.mark.browser
def test_nothing_runs_and_nothing_is_loaded(page: Path, browser: Browser) -> None:
    opened, refused, asked = browser.new_page(), set[str](), set[str]()
    opened.on("request", lambda request: asked.add(request.url))
    opened.on("requestfailed", lambda request: refused.add(request.url) if request.failure == "csp" else None)
    opened.goto(page.as_uri())
    assert opened.title() != "taken"
    assert "is valid" in opened.inner_text("body")
    others = {url for url in asked if not url.startswith(("file:", "data:"))}
    assert others
    assert others <= refused
