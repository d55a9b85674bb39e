"""The report's page, and the page about an error, in a real browser with the network off."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser import HEIGHT, LOOKS, NARROW, WIDE, WIDTHS, Open, Scheme, barriers, opening_ratio, photograph
from tests.builders.changed import changed
from tests.report.builder import CHARTS, CONTROL, HOSTILE, IMAGE, MARKUP, QUESTIONS, SCRIPT, image_report, page_link
from vllm_qualify.errors import HostError
from vllm_qualify.report.failure import render_failure, run_failure
from vllm_qualify.report.flips import Excerpt, FirstReply
from vllm_qualify.report.model import Report
from vllm_qualify.report.page import render_page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

PAGES = ("approved_page", "hostile_page", "image_page", "detailed_page", "compared_page", "failure_page")


def saved(folder: Path, page: str) -> Path:
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def failure_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With hostile words wherever an error has some."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "evidence" / "serve").mkdir(parents=True)
    (folder / "evidence" / "serve" / f"{IMAGE.replace('/', '')}.log").write_text("x")
    hostile = f"{SCRIPT}{MARKUP}{IMAGE}{CONTROL}"
    lines = [*HOSTILE, hostile * 9]
    error = HostError(f"the server ended: {hostile}", f"ask {hostile}", "serve", lines, kind=hostile, retry=True)
    return render_failure(run_failure(error, image_report().plan, folder, ["fit"], ["another run"]))


@pytest.fixture(params=PAGES)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(tmp_path, request.getfixturevalue(request.param))


@pytest.fixture
def hostile_file(hostile_page: str, tmp_path: Path) -> Path:
    return saved(tmp_path, hostile_page)


@pytest.fixture
def compared_file(compared_page: str, tmp_path: Path) -> Path:
    return saved(tmp_path, compared_page)


def test_it_opens_without_a_network_an_error_or_a_request(opened: Open, written: Path) -> None:
    page, faults = opened(written, WIDE)
    assert page.locator("h1").is_visible()
    assert faults == []


def test_it_never_scrolls_sideways(opened: Open, written: Path) -> None:
    page, _ = opened(written, NARROW)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": HEIGHT})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_charts_are_seen_on_a_wide_and_a_narrow_screen(opened: Open, detailed_page: str, tmp_path: Path) -> None:
    file = saved(tmp_path, detailed_page)
    for width in (NARROW, WIDE):
        page, faults = opened(file, width)
        boxes = [chart.bounding_box() for chart in page.get_by_role("img").all()]
        assert len(boxes) == CHARTS
        assert all(box and box["width"] > 300 and box["height"] > 60 for box in boxes)
        assert page.get_by_role("row", name="concurrency-32").is_visible()
        assert page.get_by_text(SCRIPT).count() > 3
        assert faults == []


def test_the_policy_stops_a_script_that_escaping_would_miss(opened: Open, hostile_page: str, tmp_path: Path) -> None:
    file = saved(tmp_path, hostile_page.replace("</main>", f"{SCRIPT}<img src=x onerror=alert(1)></main>"))
    _, faults = opened(file, WIDE)
    assert not [fault for fault in faults if fault.startswith("dialog")]
    assert any("Content Security Policy" in fault for fault in faults)


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_the_failing_gate_is_on_the_first_screen(opened: Open, hostile_file: Path, width: int) -> None:
    """On a wide one, also its row. Hostile text runs no script there."""
    page, faults = opened(hostile_file, width)
    boxes = [page.get_by_text("exact_match (gsm8k, strict-match)").first.bounding_box()]
    if width == WIDE:
        row = page.locator("tr", has=page.get_by_text("fail", exact=True)).first
        assert "exact_match (gsm8k, strict-match)" in row.inner_text()
        boxes.append(row.bounding_box())
    assert all(box and box["y"] + box["height"] < HEIGHT for box in boxes)
    assert page.locator("script, img, red, [onerror]").count() == 0
    assert page.get_by_text(SCRIPT).count() > 0
    assert page.get_by_text(MARKUP).count() > 0
    assert faults == []


@pytest.mark.parametrize("width", [NARROW, 1024, 1280, WIDE])
@pytest.mark.parametrize("name", ["hostile_page", "detailed_page", "compared_page"])
def test_every_reason_is_read_to_its_end(
    opened: Open, name: str, width: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """No reason lies beyond the screen, or beyond what its table scrolls."""
    page, _ = opened(saved(tmp_path, request.getfixturevalue(name)), width)
    ends = page.evaluate(
        """[...document.querySelectorAll('.gates .why span')].map(each => {
            const around = each.closest('.wide').getBoundingClientRect(), own = each.getBoundingClientRect()
            return [own.right, around.width ? Math.min(around.right, innerWidth) : innerWidth]
        })"""
    )
    assert len(ends) > 5
    assert [end for end, most in ends if end > most + 0.5] == []


def test_a_small_chance_is_one_word_without_an_exponent(opened: Open, not_approved: Report, tmp_path: Path) -> None:
    """It stands on one line, however narrow the column is."""
    worst = not_approved.judgement.gates[0]
    gates = [changed(each, p_value=1e-9) if each == worst else each for each in not_approved.judgement.gates]
    page, _ = opened(saved(tmp_path, render_page(changed(not_approved, "judgement", gates=gates), page_link)), 1280)
    assert not re.search(r"\d[eE][-+]?\d+\s*%", page.locator("body").inner_text())
    lines = page.evaluate(
        """told => {
            const walk = document.createTreeWalker(document.querySelector('.gates'), NodeFilter.SHOW_TEXT)
            while (walk.nextNode() && !walk.currentNode.data.includes(told)) {}
            const range = document.createRange(), at = walk.currentNode.data.indexOf(told)
            range.setStart(walk.currentNode, at)
            range.setEnd(walk.currentNode, at + told.length)
            return range.getClientRects().length
        }""",
        "under\u00a00.001\u00a0%",
    )
    assert lines == 1


def test_a_narrow_screen_begins_with_the_verdict_what_did_not_pass_and_what_changed(opened: Open, hostile_file: Path) -> None:
    page, _ = opened(hostile_file, NARROW)
    tops = page.evaluate(
        """Object.fromEntries(['h1', '.gates .unpassed', '#changes', '.facts', '.gates .passed', '#load', 'footer'].map(
            each => [each, document.querySelector(each).getBoundingClientRect().top + scrollY]))"""
    )
    assert list(tops) == sorted(tops, key=lambda name: tops[name])
    unpassed = page.locator(".gates .unpassed tr").count()
    # Each gate that did not pass takes half of a screen at most.
    assert tops["#changes"] < (unpassed + 2) * HEIGHT / 2


def test_the_first_screen_tells_cut_answers_and_three_replies(opened: Open, compared: Report, tmp_path: Path) -> None:
    """Replies are outside text: they are shown as they came, and run nothing."""
    said = [f"assistant\n12 + 30 = 32 {MARKUP}", SCRIPT, ""]
    replies = [FirstReply(question=number, said=Excerpt(text=text)) for number, text in enumerate(said)]
    questions = [changed(each, first_replies=replies) for each in compared.details.questions]
    accuracy = next(stage for stage in compared.stages if stage.stage == "accuracy")
    cut = changed(accuracy.measurements[0], metric="truncated_answers", filter=None, value=0.47, unit="fraction")
    stages = [
        changed(stage, measurements=[*stage.measurements, cut]) if stage is accuracy else stage for stage in compared.stages
    ]
    report = changed(changed(compared, "details", questions=questions), stages=stages)
    page, faults = opened(saved(tmp_path, render_page(report, page_link)), WIDE)
    box = page.locator(".facts .said").bounding_box()
    assert box
    assert box["y"] + box["height"] < HEIGHT
    shown = page.locator(".facts .said dd").inner_text()
    assert shown.split("\n") == [
        f"question 0: assistant ↵ 12 + 30 = 32 {MARKUP}",
        f"question 1: {SCRIPT}",
        "question 2: (empty)",
    ]
    assert "gsm8k: 47.00\u00a0%" in page.locator(".facts").inner_text()
    assert faults == []


def test_stacked_tables_stay_tables(opened: Open, hostile_file: Path) -> None:
    page, _ = opened(hostile_file, NARROW)
    assert page.get_by_role("table", name="Each rule with its verdict").get_by_role("row").count() == 10
    assert page.get_by_role("rowheader", name="ttft_p99_ms").first.is_visible()


def choose_topic(page: Page, topic: str) -> None:
    option = page.locator(".topics option", has_text=topic)
    page.locator(".topics").select_option(value=option.get_attribute("value"))


@pytest.mark.parametrize(
    ("choose", "flips", "rows"),
    [
        (lambda page: page.get_by_role("radio", name="all").check(), 6, QUESTIONS),
        (lambda page: page.get_by_role("radio", name="lost").check(), 3, 3),
        (lambda page: page.get_by_role("radio", name="gained").check(), 3, 3),
        # Of the first six questions 0, 3 and 5 are on law, 1 and 4 on the other topic; 2 has none.
        (lambda page: choose_topic(page, "law"), 3, 878),
        (lambda page: choose_topic(page, f"{SCRIPT}{IMAGE}"), 2, 440),
        (lambda page: page.get_by_role("checkbox", name="cut (2)").check(), 1, 2),
    ],
    ids=["all", "lost", "gained", "law", "hostile topic", "cut"],
)
def test_questions_are_chosen_without_a_script(
    opened: Open, compared_file: Path, choose: Callable[[Page], None], flips: int, rows: int
) -> None:
    page, faults = opened(compared_file, WIDE)
    choose(page)
    assert page.locator(".flip:visible").count() == flips
    page.get_by_text("Every question").click()
    listed = page.locator(".every tbody tr:visible")
    assert listed.count() == rows
    assert rows > 2 or listed.locator("th").all_inner_texts() == ["0", "300"]
    assert faults == []


def test_a_task_is_chosen_without_a_script(opened: Open, compared: Report, tmp_path: Path) -> None:
    (scored,) = compared.details.questions
    several = changed(compared, "details", questions=[scored, changed(scored, task="other", flips=[])])
    page, faults = opened(saved(tmp_path, render_page(several, page_link)), WIDE)
    assert page.locator(".questions:visible").count() == 2
    page.locator(".tasks").select_option(label="exact_match (other, strict-match)")
    assert page.locator(".questions:visible h3").all_inner_texts() == ["exact_match (other, strict-match)"]
    assert faults == []


def test_what_was_thought_is_folded(opened: Open, compared_file: Path) -> None:
    page, _ = opened(compared_file, WIDE)
    thinking = page.locator(".thinking")
    assert thinking.count() == 1
    assert not thinking.locator("pre").is_visible()
    thinking.locator("summary").click()
    assert thinking.locator("pre").is_visible()


@pytest.mark.parametrize("question", [5, 1200])
def test_a_link_opens_the_question_that_it_names(opened: Open, compared_file: Path, question: int) -> None:
    """One that flipped, and one of the list, which is closed."""
    page, faults = opened(compared_file, WIDE, fragment=f"#question-gsm8k-{question}")
    named = page.locator(f"[id='question-gsm8k-{question}']")
    box = named.bounding_box()
    assert box
    assert 0 <= box["y"] < HEIGHT
    assert faults == []


def test_the_list_leads_to_the_words(opened: Open, compared_file: Path) -> None:
    page, _ = opened(compared_file, WIDE)
    page.get_by_text("Every question").click()
    page.locator(".every").get_by_role("link", name="5", exact=True).click()
    expect(page).to_have_url(re.compile("#question-gsm8k-5$"))
    assert page.locator("[id='question-gsm8k-5']").is_visible()


def test_flips_are_filtered_and_opened_by_the_keyboard(opened: Open, compared_file: Path) -> None:
    page, _ = opened(compared_file, NARROW)
    page.get_by_role("radio", name="all").focus()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("radio", name="lost")).to_be_checked()
    expect(page.locator(".flip:visible")).to_have_count(3)
    first = page.locator(".flip").first
    first.locator("summary").first.focus()
    page.keyboard.press("Enter")
    expect(first).not_to_have_attribute("open", re.compile(""))


def test_answers_stand_side_by_side_and_on_a_narrow_screen_below_each_other(opened: Open, compared_file: Path) -> None:
    for width, beside in ((WIDE, True), (NARROW, False)):
        page, _ = opened(compared_file, width)
        boxes = [each.bounding_box() for each in page.locator(".flip").first.locator("dl > div").all()[2:]]
        assert boxes[0]
        assert boxes[1]
        assert (boxes[0]["y"] == boxes[1]["y"]) is beside


def test_the_first_key_leads_to_the_gates(opened: Open, compared_file: Path) -> None:
    page, _ = opened(compared_file, WIDE)
    page.keyboard.press("Tab")
    link = page.get_by_role("link", name="Skip to the gates")
    expect(link).to_be_focused()
    box = link.bounding_box()
    assert box is not None
    assert box["y"] >= 0
    page.keyboard.press("Enter")
    # A busy browser follows a link some time after the key.
    expect(page).to_have_url(re.compile("#gates$"))


def test_the_verdict_and_every_gate_of_an_approved_cell_fit_the_first_screen(
    opened: Open, approved_page: str, tmp_path: Path
) -> None:
    page, _ = opened(saved(tmp_path, approved_page), WIDE)
    box = page.get_by_role("table", name="Each rule with its verdict").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= HEIGHT


def test_what_scrolls_sideways_can_be_focused(opened: Open, compared_file: Path) -> None:
    """A keyboard scrolls only what has the focus, or has something in it that has."""
    for width in (NARROW, WIDE):
        page, _ = opened(compared_file, width)
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        stuck = page.evaluate(
            """[...document.querySelectorAll('body *')].filter(each => each.scrollWidth > each.clientWidth + 1
            && ['auto', 'scroll'].includes(getComputedStyle(each).overflowX)
            && each.tabIndex < 0 && !each.querySelector('a, button, input, summary')).length"""
        )
        assert stuck == 0


def test_twelve_thousand_questions_are_below_5_mb_and_open_fast(opened: Open, largest_page: str, tmp_path: Path) -> None:
    """Measured: 0.39 to 0.63, and 2.5 with all parts open."""
    file = saved(tmp_path, largest_page)
    assert file.stat().st_size < 5_000_000
    assert opening_ratio(opened, file, WIDE, tmp_path) < 1.2


def test_the_page_of_all_words_opens_fast(opened: Open, words_page: str, tmp_path: Path) -> None:
    """Measured: 0.65 to 1.05, and 6.4 with all parts open."""
    file, fragment = saved(tmp_path, words_page), "#question-mmlu_pro-12020"
    assert opening_ratio(opened, file, NARROW, tmp_path, fragment=fragment) < 3
    page, faults = opened(file, NARROW, fragment=fragment)
    assert page.locator("[id='question-mmlu_pro-12020']").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
    assert faults == []


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_it_keeps_nobody_out(opened: Open, written: Path, width: int, scheme: Scheme) -> None:
    """As far as axe can tell: names, roles, order, and whether the text can be read.

    The list of every question stays closed: 1,319 rows of one kind would take it a minute.
    """
    page, _ = opened(written, width, scheme)
    page.evaluate("document.querySelectorAll('details:not(.every)').forEach(each => each.open = true)")
    assert barriers(page) == ""


def test_axe_sees_what_keeps_people_out(opened: Open, hostile_page: str, tmp_path: Path) -> None:
    """The test above could fail: the same page with a link that has no name, and pale text."""
    broken = hostile_page.replace("</main>", '<a href="#gates"></a><p class="pale">hardly to be read</p></main>')
    broken = broken.replace("</style>", ".pale { color: #ddd; background: #eee }</style>")
    page, _ = opened(saved(tmp_path, broken), WIDE)
    problems = barriers(page)
    assert "link-name" in problems
    assert "color-contrast" in problems


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
@pytest.mark.parametrize("name", ["hostile_page", "compared_page", "failure_page"])
def test_pictures_are_made_for_people_to_look_at(
    opened: Open, name: str, width: int, scheme: Scheme, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    page, _ = opened(saved(tmp_path, request.getfixturevalue(name)), width, scheme)
    assert photograph(page, f"{name.removesuffix('_page')}-{width}-{scheme}").stat().st_size > 10_000
