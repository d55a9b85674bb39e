"""The board and the pages of its cells in a real browser: from files with the network off, and straight from a bucket."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.approval.builder import CELL, NEWER, OLDER, RUN, publish_report
from tests.browser import HEIGHT, LOOKS, NARROW, WIDE, WIDTHS, Open, Scheme, barriers, opening_ratio, photograph
from tests.builders.boards import TAKEN_BACK, entry, large_row, line
from tests.report.builder import CONTROL, IMAGE, MARKUP, SCRIPT
from tests.s3 import BUCKET, Settings, client_of
from vllm_qualify.approval.board import render_board
from vllm_qualify.approval.cell_page import render_cell_page
from vllm_qualify.approval.row import Index, Row, brief
from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.publish.bundle import Score, Summary
from vllm_qualify.publish.stores import open_store

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

MODEL = f"meta-llama/Llama-3.1-8B-Instruct-{'a' * 60}{MARKUP}"
LLAMA, QWEN = "llama-3.1-8b/fp8/h200/throughput", "qwen-2.5-7b/bf16/h100/latency"
TODAY = datetime.now(UTC).date()
# A run over midnight finds a day less.
DAYS_LEFT = re.compile("in (40|39) days")


def summary(version: str, score: float | None = 0.83) -> Summary:
    """Without a score, of a run whose load was invalid too."""
    if score is None:
        return Summary(engine="vllm", engine_version=version, gpus=1, model=MODEL, revision=f"sha256:{'ab' * 32}")
    interval = Interval(lower=score - 0.02, upper=score + 0.02)
    scored = Score(metric="exact_match (gsm8k, strict-match)", value=score, interval=interval)
    return Summary(engine="vllm", engine_version=version, gpus=1, score=scored, output_tok_s_per_gpu=1500.0)


def few_rows() -> list[Row]:
    """One of each state, with names that would break out where they could."""
    approved = entry(cell=LLAMA).model_copy(update={"expires": TODAY + timedelta(days=40)})
    expired = entry(cell=QWEN).model_copy(update={"expires": TODAY})
    hostile = f"{SCRIPT}{IMAGE}{MARKUP}{CONTROL}"
    hostile_entry = entry(cell="x/y/b200/z", revoked=TAKEN_BACK).model_copy(update={"by": hostile})
    return [
        Row(
            cell=LLAMA,
            last=approved,
            reports=[
                line(NEWER, "not passed", summary=summary("0.33.0", None)),
                line(RUN, "approved", told="approved by Ada", summary=summary("0.32.0")),
                line(OLDER, "superseded", told="approved by Bob", summary=summary("0.31.0", 0.81)),
            ],
        ),
        Row(cell=QWEN, last=expired, reports=[line(RUN, "approved", summary=summary("0.32.0"))]),
        Row(cell=f"{hostile}/bf16/h100/latency", reports=[line(RUN, told=hostile, summary=summary(hostile))]),
        Row(cell="x/y/b200/z", last=hostile_entry, reports=[line(RUN, "revoked", told=hostile, summary=summary("0.32.0"))]),
    ]


@pytest.fixture
def llamas(board: Path) -> Path:
    """The page of a cell."""
    return board.parent / "cells" / LLAMA / "index.html"


@pytest.fixture
def board(tmp_path: Path) -> Path:
    return saved(tmp_path, few_rows())


@pytest.fixture(scope="module")
def large_board(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("board"), [large_row(number) for number in range(2000)])


def saved(folder: Path, rows: list[Row]) -> Path:
    file = folder / "index.html"
    file.write_text(render_board(Index(revision=7, cells=list(map(brief, rows)))), encoding="utf-8")
    for row in rows:
        page = folder / "cells" / row.cell / "index.html"
        if "<" not in row.cell:
            page.parent.mkdir(parents=True)
            page.write_text(render_cell_page(row), encoding="utf-8")
    return file


def shown(page: Page) -> list[str]:
    """The models of the rows that can be seen."""
    rows = page.locator("#cells > tbody > tr:not(.history):visible")
    # Text that is far from the screen is not drawn, and then is no inner text.
    return [name.strip() for name in rows.locator("th").all_text_contents()]


# --- what everybody sees


def test_it_opens_without_a_network_an_error_or_a_request(opened: Open, board: Path) -> None:
    page, faults = opened(board, WIDE)
    assert page.locator("#count").inner_text() == "4 of 4 cells"
    assert page.locator("script[src], img, red, [onerror]").count() == 0
    assert page.get_by_text(SCRIPT).count() > 0
    assert faults == []


@pytest.mark.parametrize(("file", "name"), [("board", "board"), ("llamas", "cell")], ids=["board", "cell"])
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_it_keeps_nobody_out(
    opened: Open, request: pytest.FixtureRequest, file: str, name: str, width: int, scheme: Scheme
) -> None:
    """As far as axe can tell."""
    page, faults = opened(request.getfixturevalue(file), width, scheme)
    assert barriers(page) == ""
    assert faults == []
    photograph(page, f"{name}-{width}-{scheme}")


@pytest.mark.parametrize("file", ["board", "llamas"])
def test_it_never_scrolls_sideways(opened: Open, request: pytest.FixtureRequest, file: str) -> None:
    page, _ = opened(request.getfixturevalue(file), WIDE)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": HEIGHT})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_without_its_script_the_cells_are_reported(opened: Open, board: Path) -> None:
    page, _ = opened(board, WIDE, script=False)
    row = page.locator("#cells > tbody > tr", has_text=LLAMA.split("/")[0])
    assert "approved" in row.inner_text()
    assert row.get_by_role("link").count() == 3


def test_an_approval_has_expired_on_its_day(opened: Open, board: Path) -> None:
    page, _ = opened(board, WIDE)
    states = dict(zip(shown(page), page.locator("#cells > tbody > tr > td.state").all_inner_texts(), strict=True))
    assert states["qwen-2.5-7b"] == "expired"
    assert states["llama-3.1-8b"].split("\n") == ["approved", "newer report: not passed"]
    assert page.get_by_text(DAYS_LEFT).is_visible()
    page, _ = opened(board.parent / "cells" / QWEN / "index.html", WIDE)
    assert page.locator("td.state").all_inner_texts() == ["expired"]


# --- filters and histories


@pytest.mark.parametrize(
    ("name", "chosen", "models"),
    [
        ("model", "llama-3.1-8b", ["llama-3.1-8b"]),
        ("gpu", "b200", ["x"]),
        ("engine", "vLLM 0.33.0", ["llama-3.1-8b"]),
        ("state", "expired", ["qwen-2.5-7b"]),
        ("state", "not passed", ["llama-3.1-8b"]),
    ],
)
def test_a_filter_leaves_what_it_names(opened: Open, board: Path, name: str, chosen: str, models: list[str]) -> None:
    page, faults = opened(board, WIDE)
    page.locator(f"#filter-{name}").select_option(chosen)
    assert shown(page) == models
    assert page.locator("#count").inner_text() == f"{len(models)} of 4 cells"
    page.get_by_role("button", name="Show all").click()
    expect(page.locator("#count")).to_have_text("4 of 4 cells")
    assert faults == []


def test_words_find_what_a_row_tells(opened: Open, board: Path) -> None:
    page, _ = opened(board, WIDE)
    page.get_by_role("searchbox", name="Text").fill(f"ada 0.33 {NEWER.upper()}")
    assert shown(page) == ["llama-3.1-8b"]
    page.get_by_role("searchbox", name="Text").fill("nobody")
    assert shown(page) == []


def test_what_is_chosen_is_in_the_address(opened: Open, board: Path) -> None:
    page, _ = opened(board, WIDE)
    page.locator("#filter-gpu").select_option("h200")
    expect(page).to_have_url(re.compile("#gpu=h200$"))
    again, _ = opened(board, WIDE, fragment=page.url[page.url.index("#") :])
    assert shown(again) == ["llama-3.1-8b"]


def test_a_row_leads_to_its_cell_and_the_cell_back(opened: Open, board: Path) -> None:
    page, faults = opened(board, WIDE)
    page.get_by_role("link", name=LLAMA).focus()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(LLAMA)
    page.get_by_role("link", name="board").click()
    expect(page.locator("h1")).to_have_text("Board")
    assert [fault for fault in faults if not fault.startswith("request: file:")] == []


def test_a_cells_page_draws_each_version(opened: Open, llamas: Path) -> None:
    page, faults = opened(llamas, WIDE)
    accuracy, output = page.get_by_role("img").all()
    assert "lowest 81.00\u00a0%, highest 83.00\u00a0%" in str(accuracy.get_attribute("aria-label"))
    # The newest report's load was invalid: it has no point, and says so.
    assert [chart.locator("circle").count() for chart in (accuracy, output)] == [2, 2]
    text = page.locator("main").inner_text()
    assert "1 of 3 reports have no such value" in text
    assert [name in text for name in ("0.31.0", "0.32.0", "0.33.0")] == [True] * 3
    assert page.locator("main").get_by_role("link").count() == 3
    assert page.get_by_text(DAYS_LEFT).is_visible()
    assert faults == []


@pytest.mark.parametrize("width", [NARROW, 1280])
def test_a_cells_page_names_each_runs_model_and_revision(opened: Open, llamas: Path, width: int) -> None:
    """A long name makes its column no wider than the screen, and stands beside no other's words."""
    page, faults = opened(llamas, width)
    models = page.locator("td.model")
    named, *others = (text.split("\n") for text in models.all_inner_texts())
    assert named == [MODEL, "sha256:abababababab"]
    assert ["its manifest does not name it" in " ".join(other) for other in others] == [True, True]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for cell in models.all():
        own, after = cell.bounding_box(), cell.locator("xpath=following-sibling::td[1]").bounding_box()
        assert own
        assert after
        assert after["x"] >= own["x"] + own["width"] - 1 or after["y"] >= own["y"] + own["height"] - 1
        assert cell.evaluate("each => each.scrollWidth <= each.clientWidth + 1")
    assert faults == []


def test_without_its_script_the_reports_of_a_cell_are_reported(opened: Open, llamas: Path) -> None:
    page, _ = opened(llamas, WIDE, script=False)
    assert page.locator("main").get_by_role("link").count() == 3
    assert page.locator("td.state").all_inner_texts()[1].split("\n") == ["approved", "approved by Ada"]


def test_no_name_breaks_out_of_the_page_of_a_cell(opened: Open, board: Path) -> None:
    page, faults = opened(board.parent / "cells/x/y/b200/z/index.html", WIDE)
    assert page.get_by_text(SCRIPT).count() > 0
    assert page.locator("script[src], img, red, [onerror]").count() == 0
    assert faults == []


def test_the_policy_stops_a_script_that_escaping_would_miss(opened: Open, board: Path) -> None:
    board.write_text(board.read_text().replace("</main>", f"{SCRIPT}<img src=x onerror=alert(1)></main>"))
    page, faults = opened(board, WIDE)
    assert not [fault for fault in faults if fault.startswith("dialog")]
    assert any("Content Security Policy" in fault for fault in faults)
    assert page.locator("#count").inner_text() == "4 of 4 cells"


# --- two thousand cells


def test_2000_cells_open_fast(opened: Open, large_board: Path, tmp_path: Path) -> None:
    """Measured: 0.37 to 0.46, and 1.2 with all rows drawn and all parts open."""
    assert opening_ratio(opened, large_board, WIDE, tmp_path) < 1.0


def test_of_2000_cells_a_filter_leaves_the_right_ones(opened: Open, large_board: Path) -> None:
    page, faults = opened(large_board, WIDE)
    page.locator("#filter-gpu").select_option("h200")
    page.get_by_role("searchbox", name="Text").fill("fp8 latency")
    cells = page.locator("#cells > tbody > tr").evaluate_all("rows => rows.map((row) => row.dataset.cell)")
    parts = [cell.split("/") for cell in cells]
    wanted = [model for model, variant, gpu, profile in parts if (variant, gpu, profile) == ("fp8", "h200", "latency")]
    assert shown(page) == wanted
    assert len(wanted) > 50
    assert faults == []


# --- straight from a bucket


@pytest.fixture
def published(radosgw_url: str, radosgw_settings: Settings, tmp_path: Path) -> Iterator[str]:
    """The address of a board in a bucket that everybody may read, with one report."""
    store = open_store(radosgw_url)
    publish_report(store, tmp_path / "runs")
    prefix = radosgw_url.removeprefix(f"s3://{BUCKET}/")
    client = client_of(radosgw_settings)
    allowed = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{BUCKET}/{prefix}/*"}
    client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps({"Version": "2012-10-17", "Statement": [allowed]}))
    yield f"{radosgw_settings['AWS_ENDPOINT_URL']}/{BUCKET}/{prefix}"
    client.delete_bucket_policy(Bucket=BUCKET)


@pytest.mark.s3
def test_it_is_read_straight_from_a_bucket(browser: Browser, published: str) -> None:
    page = browser.new_page()
    faults: list[str] = []
    page.on("console", lambda said: faults.append(said.text))
    page.on("response", lambda got: faults.append(f"{got.status}: {got.url}") if not got.ok else None)
    page.goto(f"{published}/index.html")
    assert page.locator("#count").inner_text() == "1 of 1 cells"
    page.get_by_role("link", name=CELL).click()
    expect(page.locator("h1")).to_have_text(CELL)
    page.locator("main").get_by_role("link").first.click()
    expect(page.locator("h1")).to_contain_text(CELL)
    expect(page).to_have_url(f"{published}/reports/{CELL}/{RUN}/report.html")
    assert faults == []
    with page.expect_navigation():
        page.get_by_role("link", name="report.json").click()
    assert json.loads(page.locator("body").inner_text())["run_id"] == RUN
    page.close()
