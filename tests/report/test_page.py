"""The page: whole, escaped, and good in a real browser with the network off."""

import os
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Dialog, Page, sync_playwright

from tests.report.builder import HOSTILE, IMAGE, MARKUP, SCRIPT, approved_report, image_report, not_approved_report
from vllm_qualify.evidence.measurement import EvidenceFile
from vllm_qualify.judge.verdict import Judgement
from vllm_qualify.report.model import Report
from vllm_qualify.report.page import render_page

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
UNLINKABLE = ("javascript:alert(1)", " javascript:alert(1)", "JavaScript:alert(1)", "data:text/html,x", "http://[", "")
WIDTHS = (375, 768, 1024, 1440)
Opened = tuple[Page, list[str]]
Open = Callable[[Path, int], Opened]


def _link(file: EvidenceFile) -> str:
    return f"evidence/{quote(file.path)}"


class _Reader(HTMLParser):
    """Elements and text of a page, as any browser would take them apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def having(self, name: str) -> list[str]:
        return [found[name] or "" for _, found in self.elements if name in found]


@pytest.fixture(scope="module")
def approved_page() -> str:
    return render_page(approved_report(), _link)


@pytest.fixture(scope="module")
def hostile_page() -> str:
    return render_page(not_approved_report(), _link)


@pytest.fixture(scope="module")
def image_page() -> str:
    return render_page(image_report(), _link)


# --- the text of the page


def test_outside_text_stays_text(hostile_page: str) -> None:
    read = _Reader(hostile_page)
    assert not {"script", "img", "iframe", "object", "embed", "red"} & {tag for tag, _ in read.elements}
    assert not [name for _, found in read.elements for name in found if name.startswith("on")]
    for text in HOSTILE:
        assert text in read.text
    assert "\x1b" not in hostile_page
    assert "\u202e" not in hostile_page


def test_the_page_is_complete_in_itself(hostile_page: str) -> None:
    read = _Reader(hostile_page)
    assert read.having("src") == []
    assert all(address.startswith(("#", "evidence/", "data:,")) for address in read.having("href"))
    assert "url(" not in hostile_page
    assert "@import" not in hostile_page


def test_the_page_tells_everything_of_the_report(not_approved: Report, hostile_page: str) -> None:
    text = _Reader(hostile_page).text
    release = not_approved.plan.cell.release
    told = [
        "NOT APPROVED",
        not_approved.plan.cell.id,
        not_approved.run_id,
        str(not_approved.rejudged_from),
        release.engine.version,
        release.engine.digest,
        release.model,
        release.revision,
        "NVIDIA H200",
        "2026-03-14 10:40:53 UTC",
        "gpu-memory-utilization",
        "VLLM_LOGGING_LEVEL",
        "16 min 23 s",
        "evaluated expectations",
        *(gate.because for gate in not_approved.judgement.gates if gate.verdict == "fail"),
        *(file.path for file in not_approved.files),
        *(file.sha256 for file in not_approved.files),
        *(row.metric for stage in not_approved.stages for row in stage.measurements),
    ]
    assert [missing for missing in told if missing not in text] == []


def test_commands_are_told_exactly(hostile_page: str) -> None:
    text = _Reader(hostile_page).text
    assert f"--note '{SCRIPT}' '{MARKUP}'" in text
    assert f"--model '{IMAGE}' --dataset-name random" in text


def test_an_image_is_told_with_its_digest_platform_and_labels(image_page: str) -> None:
    plan = image_report().plan
    read = _Reader(image_page)
    for engine in (plan.cell.release.engine, plan.client):
        assert engine is not None
        assert engine.image is not None
        about = engine.image
        told = [about.reference, engine.digest, about.platform, about.image_id, about.created, engine.version]
        assert [missing for missing in told if missing not in read.text] == []
        assert [name for name in about.labels if f"label {name}" not in read.text] == []
    assert "Image under test" in read.text
    assert "Image of the load client" in read.text


def test_what_an_image_says_of_itself_stays_text(image_page: str) -> None:
    read = _Reader(image_page)
    assert not {"script", "img", "red", "cudatools@nvidia.com"} & {tag for tag, _ in read.elements}
    for text in (SCRIPT, f"label maintainer{IMAGE}", "<cudatools@nvidia.com>"):
        assert text in read.text
    assert "\x1b" not in image_page
    assert "\u202e" not in image_page


def test_without_a_client_image_only_the_image_under_test_is_told() -> None:
    report = image_report()
    alone = report.model_copy(update={"plan": report.plan.model_copy(update={"client": None, "client_image": None})})
    text = _Reader(render_page(alone, _link)).text
    assert "Image under test" in text
    assert "load client" not in text
    assert "v0.31.0" not in text


def test_an_environment_of_this_machine_has_no_image(approved_page: str) -> None:
    text = _Reader(approved_page).text
    assert "from a local environment" in text
    for absent in ("Images", "Image under test", "platform", "image ID", "label "):
        assert absent not in text


def test_tables_have_captions_and_scopes(hostile_page: str) -> None:
    tags = [tag for tag, _ in _Reader(hostile_page).elements]
    assert tags.count("table") == tags.count("caption") > 8
    assert all("scope" in found for tag, found in _Reader(hostile_page).elements if tag == "th")
    assert [tags.count(landmark) for landmark in ("header", "nav", "main", "footer", "h1")] == [1] * 5


@pytest.mark.parametrize("address", UNLINKABLE)
def test_an_address_that_is_no_file_is_not_linked(approved: Report, address: str) -> None:
    addresses = _Reader(render_page(approved, lambda _: address)).having("href")
    assert all(found.startswith(("#", "data:,")) for found in addresses)


def test_addresses_of_a_store_are_linked(approved: Report) -> None:
    addresses = _Reader(render_page(approved, lambda file: f"../../evidence/{file.sha256}/x?a=1&b=2")).having("href")
    assert f"../../evidence/{approved.files[0].sha256}/x?a=1&b=2" in addresses


def test_a_report_with_nothing_in_it_says_so(approved: Report) -> None:
    nothing = Judgement(verdict="invalid", gates=[], suite={}, validation={})
    text = _Reader(render_page(approved.model_copy(update={"judgement": nothing, "stages": []}), _link)).text
    assert "NOT APPROVED" in text
    assert "No gate was judged" in text
    assert text.count("this stage is not in the report") == 4
    assert "no stage left a file" in text
    assert "holds no statistics" in text


# --- the page in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        reason = f"no {CHROMIUM}: run infra/chromium.sh"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Opens a file with the network off; the list fills with whatever the page does that it must not."""
    contexts = []

    def dismiss_into(faults: list[str]) -> Callable[[Dialog], None]:
        def dismiss(dialog: Dialog) -> None:
            faults.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        return dismiss

    def open_file(file: Path, width: int) -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        context.set_offline(True)
        page, faults = context.new_page(), list[str]()
        page.on("console", lambda said: faults.append(f"console {said.type}: {said.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("request", lambda asked: faults.append(f"request: {asked.url}") if asked.url != file.as_uri() else None)
        page.on("dialog", dismiss_into(faults))
        page.goto(file.as_uri(), wait_until="networkidle")
        return page, faults

    yield open_file
    for context in contexts:
        context.close()


@pytest.fixture(scope="module", params=["approved_page", "hostile_page", "image_page"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(request.getfixturevalue(request.param), encoding="utf-8")
    return file


@pytest.fixture
def hostile_file(hostile_page: str, tmp_path: Path) -> Path:
    file = tmp_path / "report.html"
    file.write_text(hostile_page, encoding="utf-8")
    return file


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_it_opens_without_a_network_an_error_or_a_request(opened: Open, written: Path) -> None:
    page, faults = opened(written, 1440)
    assert page.locator("h1").is_visible()
    assert faults == []


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_it_never_scrolls_sideways(opened: Open, written: Path) -> None:
    page, _ = opened(written, WIDTHS[0])
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_hostile_text_runs_no_script(opened: Open, hostile_file: Path) -> None:
    page, faults = opened(hostile_file, 1440)
    assert page.locator("script, img, red, [onerror]").count() == 0
    assert page.get_by_text(SCRIPT).count() > 0
    assert page.get_by_text(MARKUP).count() > 0
    assert faults == []


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_the_policy_stops_a_script_that_escaping_would_miss(opened: Open, hostile_page: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(hostile_page.replace("</main>", f"{SCRIPT}<img src=x onerror=alert(1)></main>"), encoding="utf-8")
    _, faults = opened(file, 1440)
    assert not [fault for fault in faults if fault.startswith("dialog")]
    assert any("Content Security Policy" in fault for fault in faults)


@pytest.mark.browser
@pytest.mark.timeout(120)
@pytest.mark.parametrize("width", [375, 1440])
def test_the_failing_gate_is_on_the_first_screen(opened: Open, hostile_file: Path, width: int) -> None:
    page, _ = opened(hostile_file, width)
    box = page.get_by_text("exact_match (strict-match)").first.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 900


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_the_failing_gates_row_is_above_the_fold(opened: Open, hostile_file: Path) -> None:
    page, _ = opened(hostile_file, 1440)
    row = page.locator("tr", has=page.get_by_text("fail", exact=True)).first
    box = row.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 900
    assert "exact_match (strict-match)" in row.inner_text()


@pytest.mark.browser
@pytest.mark.timeout(120)
def test_stacked_tables_stay_tables(opened: Open, hostile_file: Path) -> None:
    page, _ = opened(hostile_file, 375)
    assert page.get_by_role("table", name="Each rule with its verdict").get_by_role("row").count() == 10
    assert page.get_by_role("rowheader", name="ttft_p99_ms").first.is_visible()
