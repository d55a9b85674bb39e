"""The chain on a cell's page: what it draws of the approved runs, without a script, and where its figures come from."""

from pathlib import Path

import pytest

from tests.approval.builder import CELL, NEWER, OLDER, RUN, approved, made_key, of_plan, publish_report, row_of
from tests.builders.boards import TAKEN_BACK, cell_page_of
from tests.report.builder import SCRIPT
from vllm_qualify.approval.actions import revoke
from vllm_qualify.approval.chain_chart import HEIGHT, TOP, chart_of
from vllm_qualify.approval.index import LINKS_SHOWN, make_again
from vllm_qualify.approval.row import ChainLink, Row
from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.publish.bundle import Score
from vllm_qualify.publish.directory import DirectoryStore


def score(value: float, metric: str = "exact_match (gsm8k, strict-match)") -> Score:
    return Score(metric=metric, value=value, interval=Interval(lower=value - 0.01, upper=value + 0.01))


def chained(*links: ChainLink) -> Row:
    return Row(cell=CELL, chain=list(links))


FIRST = ChainLink(run_id=OLDER, score=score(0.92), establishes=True)
SECOND = ChainLink(run_id=RUN, score=score(0.913), establishes=True, anchor=OLDER)
THIRD = ChainLink(run_id=NEWER, score=score(0.906), anchor=OLDER)


def test_each_approved_run_is_a_point_with_its_interval_and_the_anchor_a_line() -> None:
    chart = chart_of(chained(FIRST, SECOND, THIRD))
    assert chart
    heights = [mark.y for mark in chart.marks]
    # Lower scores are drawn lower, as far apart as they are, and within the drawing.
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.2)
    assert TOP < heights[0] < heights[1] < heights[2] < HEIGHT
    assert all(mark.top < mark.y < mark.bottom for mark in chart.marks)
    assert [mark.is_baseline for mark in chart.marks] == [True, True, False]
    assert chart.anchor_y == heights[0]
    assert chart.summary == "3 approved runs: newest 90.60 %, -1.40 points since the anchor"


def test_what_is_not_comparable_or_revoked_is_not_drawn() -> None:
    other = ChainLink(run_id="20260101T000000Z-aaaaaa", score=score(0.5, "exact_match (gsm8k, flexible-extract)"))
    gone = SECOND.model_copy(update={"revoked": True})
    chart = chart_of(chained(other, FIRST, gone, ChainLink(run_id="20260102T000000Z-aaaaaa"), THIRD))
    assert chart
    assert [mark.title[:23].rstrip(",:") for mark in chart.marks] == [OLDER, NEWER]


@pytest.mark.parametrize("links", [[], [ChainLink(run_id=RUN)], [FIRST.model_copy(update={"revoked": True})]])
def test_without_a_score_nothing_is_drawn(links: list[ChainLink]) -> None:
    row = chained(*links)
    assert chart_of(row) is None
    assert "svg" not in {tag for tag, _ in cell_page_of(row).elements}


@pytest.mark.parametrize(
    ("links", "anchor"),
    [
        ([], None),
        ([FIRST], OLDER),
        ([FIRST, THIRD.model_copy(update={"anchor": RUN})], RUN),
        ([FIRST, SECOND.model_copy(update={"new_anchor": True, "anchor": None})], RUN),
        ([FIRST.model_copy(update={"revoked": True}), SECOND.model_copy(update={"anchor": None})], RUN),
    ],
)
def test_the_anchor_is_that_of_the_newest_approved_run(links: list[ChainLink], anchor: str | None) -> None:
    assert chained(*links).anchor == anchor


def test_the_page_draws_it_itself_and_no_text_breaks_out() -> None:
    hostile = FIRST.model_copy(update={"run_id": f'{SCRIPT}"', "score": score(0.92, f"{SCRIPT}</svg>")})
    same = SECOND.model_copy(update={"score": score(0.9, f"{SCRIPT}</svg>"), "anchor": hostile.run_id})
    page = cell_page_of(chained(hostile, same))
    assert [len(page.all(tag)) for tag in ("svg", "circle")] == [1, 2]
    assert any(line.get("stroke-dasharray") for line in page.all("line"))
    # The page's data and its own script.
    assert len(page.all("script")) == 2
    assert SCRIPT not in page.text


# --- from what is stored


@pytest.mark.thorough
def test_it_has_all_approved_baselines_and_the_newest_others(tmp_path: Path) -> None:
    store, key = DirectoryStore(tmp_path / "store"), made_key(tmp_path / "key.pem")
    runs = [f"20260314T0900{number:02}Z-5f3d19" for number in range(LINKS_SHOWN + 3)]
    for number, run_id in enumerate(runs):
        approved(store, publish_report(store, tmp_path / "runs", run_id, of_plan(establishes=number == 0)), key)
    links = row_of(store).chain
    assert [link.run_id for link in links] == [runs[0], *runs[3:]]
    assert all(link.score for link in links)
    assert [link.establishes for link in links[:2]] == [True, False]
    # Made again from the manifests alone, it is the same.
    assert make_again(store, CELL).chain == links
    revoke(store, CELL, runs[0], TAKEN_BACK)
    assert [link.revoked for link in row_of(store).chain[:2]] == [True, False]
