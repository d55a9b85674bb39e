"""The first screen in Prefect's UI: the same as the page's, and text from outside stays text."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.builders.changed import changed
from tests.report.builder import HOSTILE, image_report, not_passed_report, passed_report, waiver_of
from vllm_qualify.report import head, words
from vllm_qualify.report.markdown import artifact_key, escape_text, first_screen
from vllm_qualify.report.model import Report
from vllm_qualify.secrets import plain

PAGE = "https://store.example/reports/a cell/report.html"
ESCAPES = (
    *("# x", "**x**", "[x](javascript:alert(1))", "![x](http://e)", "`x`"),
    *("a | b", "<b>x</b>", "&lt;b&gt;", "~~x~~", "x\\"),
)
LINKING = ("http://evil.example", "<http://evil.example>", "www.evil.example", "a@evil.example", "[x]: http://evil.example")


def _tokens(markdown: str) -> list[Token]:
    return list(_walk_tokens(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(markdown)))


def _walk_tokens(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _walk_tokens(token.children or [])


def _text(markdown: str) -> str:
    return "".join(token.content for token in _tokens(markdown) if token.type == "text")


def _links(markdown: str) -> list[object]:
    return [token.attrs["href"] for token in _tokens(markdown) if token.type == "link_open"]


def test_the_first_screen_tells_what_the_page_tells_first() -> None:
    report = image_report()
    text = _text(first_screen(report, PAGE))
    engine = report.plan.cell.release.engine
    assert engine.image is not None
    made = [engine.image.reference, engine.digest, report.plan.cell.release.revision, "NVIDIA H200", report.run_id]
    expected = [f"PASSED: {report.plan.cell.id}", *made, words.time(report.created_at), words.tally(report.judgement)]
    for row in words.gate_rows(report.judgement):
        expected += [row.gate, row.value, row.bound, row.interval, row.change]
    assert [missing for missing in expected if missing not in text] == []


def test_it_tells_what_keeps_the_cell_from_being_approved(not_approved: Report) -> None:
    text = _text(first_screen(not_approved, PAGE))
    assert f"Decided by {', '.join(head.deciding_gates(not_approved))}" in text
    for gate in not_approved.judgement.gates:
        assert gate.verdict == "pass" or plain(gate.because) in text


def test_a_waiver_is_reported_with_its_owner(not_approved: Report) -> None:
    waiver = waiver_of("ttft_p99_ms", "Grace [/ops]", "**known**")
    judged = not_approved.judgement.gates
    gates = [changed(gate, waiver=waiver) if gate.gate.label == waiver.gate else gate for gate in judged]
    waived = changed(not_approved, "judgement", gates=gates)
    assert "by Grace [/ops], which waives no invalid evidence: **known**" in _text(first_screen(waived, PAGE))


def test_outside_text_is_markup_neither_in_markdown_nor_in_html(not_approved: Report) -> None:
    shown = first_screen(not_approved, PAGE)
    markup = {"html_inline", "html_block", "image", "code_inline", "fence", "em_open"}
    assert not {token.type for token in _tokens(shown)} & markup
    assert _links(shown) == ["https://store.example/reports/a%20cell/report.html"]
    assert [text for text in HOSTILE if text not in _text(shown)] == []
    assert [sign for sign in ("<script", "<img", "\x1b", "\u202e") if sign in shown] == []


@pytest.mark.parametrize("text", [*HOSTILE, *ESCAPES, *LINKING])
def test_signs_of_markdown_and_html_are_shown(text: str) -> None:
    cell = f"| {escape_text(text)} | end |"
    tokens = _tokens(f"| a | b |\n| --- | --- |\n{cell}\n")
    assert [token.content for token in tokens if token.type == "text"] == ["a", "b", text, "end"]
    assert not re.search(r"https?://|www\.|@", cell)


@given(st.text())
def test_any_text_is_shown_as_it_is(text: str) -> None:
    line = re.sub(r"[ \t\n]+", " ", plain(text)).strip(" ")
    assert _text(f"x{escape_text(text)}x") == f"x{line}x"


@pytest.mark.parametrize(
    "page", ["javascript:alert(1)", "data:text/html,x", "x](javascript:alert(1))", "s3://bucket/x", "file:///a b/report.html"]
)
def test_an_address_that_a_browser_could_run_or_would_not_follow_is_no_link(page: str) -> None:
    shown = first_screen(passed_report(), page)
    assert _links(shown) == []
    assert page in _text(shown)


def test_an_address_cannot_end_its_link() -> None:
    (address,) = _links(first_screen(passed_report(), "https://e/x)](<y>)\n[z](javascript:alert(1))/report.html"))
    assert str(address).startswith("https://e/x")


def test_a_cell_has_a_key_of_its_own_that_prefect_takes() -> None:
    cells = ["llama-3.1-8b/fp8/h200/throughput", "llama-3.1/8b-fp8/h200/throughput", "llama_3.1-8b/fp8/h200/throughput"]
    keys = [artifact_key("report", cell) for cell in cells]
    assert len(set(keys)) == len(cells)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key) for key in keys)
    assert artifact_key("report", not_passed_report().plan.cell.id) == keys[0]
