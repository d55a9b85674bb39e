"""Data Docs: Great Expectations' page is drawn by templates that are compiled once."""

import re
from pathlib import Path

import pytest
from great_expectations.render.view import DefaultJinjaPageView
from jinja2 import Environment

from tests.builders.scores import GATE, MEASURED
from vllm_qualify.judge.data_docs import InMemory, PageView
from vllm_qualify.judge.expectations import judge


def page(folder: Path) -> str:
    """The page, without what differs by time or chance."""
    judge([GATE], [MEASURED], "docs", docs=folder)
    (page_file,) = (folder / "validations").rglob("*.html")
    text = re.sub(r"\d{8}T\d{6}\.\d+Z|\d{4}-\d\d-\d\d[T ][\d:.+]+", "TIME", page_file.read_text())
    return re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}", "ID", text)


def test_the_page_is_that_of_great_expectations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is drawn by kept templates, the third by Great Expectations alone."""
    ours, again = page(tmp_path / "1"), page(tmp_path / "2")
    monkeypatch.setattr(PageView, "__init__", DefaultJinjaPageView.__init__)
    assert ours == again == page(tmp_path / "3")
    assert GATE.label in ours


def test_templates_are_compiled_for_the_first_page_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_of = Environment.compile

    def counting(self: Environment, source: str, name: str | None = None, filename: str | None = None) -> object:
        compiled.append(str(name))
        return compile_of(self, source, name, filename)

    monkeypatch.setattr("vllm_qualify.judge.data_docs.COMPILED", InMemory())
    monkeypatch.setattr(Environment, "compile", counting)
    page(tmp_path / "1")
    assert "page.j2" in compiled
    compiled.clear()
    page(tmp_path / "2")
    assert compiled == []
