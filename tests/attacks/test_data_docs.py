"""A recipe's text that would be a script in Great Expectations' page, which is shown beside the board."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.builders.scores import GATE, MEASURED
from vllm_qualify.judge.data_docs import POLICY
from vllm_qualify.judge.expectations import judge
from vllm_qualify.recipe.gates import gate_of

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    gate, row = GATE.model_copy(update={"filter": HOSTILE}), MEASURED.model_copy(update={"filter": HOSTILE})
    judge([gate], [row], "docs", docs=tmp_path)
    (page,) = (tmp_path / "validations").rglob("*.html")
    return page


@pytest.mark.parametrize("key", ["filter", "task"])
@pytest.mark.parametrize("text", [HOSTILE, "<meta http-equiv=refresh content=0>", "a&lt;b", 'a"b', "a b", "-x", ""])
def test_no_gate_has_a_name_that_would_be_markup(key: str, text: str) -> None:
    """The policy stops scripts, but no redirection."""
    gate = {"metric": "exact_match", "filter": "maj@64", "minimum": 0.5, "unit": "fraction"}
    assert gate_of(**gate).filter == "maj@64"
    with pytest.raises(ValueError, match="it is not the name of an lm-eval"):
        gate_of(**gate | {key: text})


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
