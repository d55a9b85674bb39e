"""Published scores beside ours, by hand; sources are hostile."""

from typing import Any

import pytest

from tests.builders.changed import changed
from tests.html import Reader
from tests.report.builder import CONTROL, IMAGE, SCRIPT, page_link, passed_report
from vllm_qualify.recipe.published import PublishedScore
from vllm_qualify.report.model import Report
from vllm_qualify.report.page import published_rows, render_page

CARD, LONGEST = "https://huggingface.co/acme/model", "longest reply, in tokens"


def report_with(*published: PublishedScore, longest: int | None = 256) -> Report:
    """The task is asked by completions with 5 shots and 256 tokens; by strict-match 1,100 of 1,319 are right, 83.4 %."""
    report = passed_report()
    (task,) = report.plan.accuracy
    asked = changed(task, "settings", published=list(published), max_gen_toks=longest)
    return changed(report, "plan", accuracy=[asked])


def test_a_published_score_is_beside_ours_with_its_interval() -> None:
    (row,) = published_rows(report_with(PublishedScore(score=0.9, source=CARD, filter="strict-match", of="BF16")))
    assert (row.task, row.score, row.source, row.address, row.of) == ("gsm8k", "90.00\u00a0%", CARD, CARD, "BF16")
    (ours,) = row.ours
    assert ours.startswith("exact_match (strict-match): 83.4")
    assert "interval 81.64 to 85.01" in ours


@pytest.mark.parametrize(
    ("asked", "longest", "differs"),
    [
        ({"num_fewshot": 5, "api": "completions", "max_gen_toks": 256}, 256, []),
        (
            {"num_fewshot": 0, "api": "chat", "max_gen_toks": 32768, "note": "sampled"},
            256,
            ["shots: 0 there, 5 here", "API: chat there, completions here", f"{LONGEST}: 32,768 there, 256 here", "sampled"],
        ),
        (
            {},
            256,
            ["shots: not said there, 5 here", "API: not said there, completions here", f"{LONGEST}: not said there, 256 here"],
        ),
        (
            {"num_fewshot": 5, "api": "completions", "max_gen_toks": 256},
            None,
            [f"{LONGEST}: 256 there, the task's own, or else 256, here"],
        ),
    ],
)
def test_what_differs_in_the_asking_is_said(asked: dict[str, Any], longest: int | None, differs: list[str]) -> None:
    (row,) = published_rows(report_with(PublishedScore(score=0.9, source="card", **asked), longest=longest))
    assert row.differs == differs


def test_another_metric_has_no_score_of_ours() -> None:
    report = report_with(PublishedScore(score=0.9, source="card", metric="acc"))
    (row,) = published_rows(report)
    assert row.ours == []
    assert "no such score was measured" in render_page(report, page_link)


@pytest.mark.parametrize(
    "source", ["javascript:alert(1)", "data:text/html,x", "https:", "http://[", f"{SCRIPT}{IMAGE}{CONTROL}"]
)
def test_a_hostile_source_is_text(source: str) -> None:
    page = Reader(render_page(report_with(PublishedScore(score=0.9, source=source, of=SCRIPT, note=IMAGE)), page_link))
    assert source not in page.having("href")
    assert not {"script", "img"} & {tag for tag, _ in page.elements}
    assert SCRIPT in page.text


def test_a_web_address_is_a_link_and_without_any_score_there_is_no_section() -> None:
    page = render_page(report_with(PublishedScore(score=0.9, source=f'{CARD}?a=1&b="x')), page_link)
    assert f'{CARD}?a=1&b="x' in Reader(page).having("href")
    assert 'id="published"' not in render_page(passed_report(), page_link)
