"""Pages in a real browser with the network off: what they do that they must not, and whom they leave out."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Dialog, Page, sync_playwright

from tests.ci import IN_CI

CHROMIUM = Path("/usr/bin/chromium-headless-shell")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--renderer-process-limit=1",
    "--in-process-gpu",
]
NARROW, WIDE, HEIGHT = 375, 1440, 900
WIDTHS = (NARROW, 768, 1024, WIDE)
SCREENSHOTS = Path(__file__).parents[1] / ".screenshots"

# What a browser's speed on this machine is measured with.
PLAIN_TABLE = f"<!doctype html><title>plain</title><table>{'<tr><td>gsm8k<td>0.996<td>passed' * 10_000}</table>"

Scheme = Literal["light", "dark"]
# Colours are the same on every width, and the order of the parts is the same in every colour.
LOOKS: tuple[tuple[int, Scheme], ...] = ((NARROW, "dark"), (WIDE, "light"))
Faults = list[str]
Opened = tuple[Page, Faults]
Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one file: while it is open no other event loop can run in its process."""
    if not CHROMIUM.exists():
        reason = f"no {CHROMIUM}: run infra/debian-package.sh {CHROMIUM.name}"
        if IN_CI:
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

    def open_file(file: Path, width: int, scheme: Scheme = "light", *, fragment: str = "", script: bool = True) -> Opened:
        context = browser.new_context(
            viewport={"width": width, "height": HEIGHT}, color_scheme=scheme, java_script_enabled=script
        )
        contexts.append(context)
        context.set_offline(True)
        page, faults = context.new_page(), Faults()
        _watch(page, faults, file.as_uri())
        page.goto(f"{file.as_uri()}{fragment}", wait_until="networkidle")
        return page, faults

    yield open_file
    for context in contexts:
        context.close()


def _watch(page: Page, faults: Faults, address: str) -> None:
    def dismiss(dialog: Dialog) -> None:
        faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("console", lambda said: faults.append(f"console {said.type}: {said.text}"))
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("request", lambda asked: None if asked.url.partition("#")[0] == address else faults.append(f"request: {asked.url}"))
    page.on("dialog", dismiss)


def barriers(page: Page) -> str:
    """What axe finds that keeps people out, in its words; empty if it finds nothing."""
    # Of what passes it need not tell each element.
    violations = Axe().run(page, options={"resultTypes": ["violations"]})
    return str(violations.generate_report()) if violations.violations_count else ""


def opening_ratio(opened: Open, file: Path, width: int, folder: Path, *, fragment: str = "") -> float:
    """How many times as much of a core the file takes to open as a plain table of 10,000 rows: so on any machine, busy or not.

    The least of three times each, taken in turns.
    """
    plain = folder / "plain.html"
    plain.write_text(PLAIN_TABLE, encoding="utf-8")
    pages = [opened(file, width, fragment=fragment)[0], opened(plain, width)[0]]
    own, its = zip(*([_opening_cpu_s(page) for page in pages] for _ in range(3)), strict=True)
    return float(min(own) / min(its))


def _opening_cpu_s(page: Page) -> float:
    """What the page's main thread computes until it is loaded once more."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.reload(wait_until="load")
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return float(metrics["TaskDuration"])


def photograph(page: Page, name: str) -> Path:
    """The whole page as a picture, for people to look at."""
    SCREENSHOTS.mkdir(exist_ok=True)
    # What is far from the screen need not be drawn: the screen becomes as high as the page.
    width = page.evaluate("document.documentElement.clientWidth")
    page.set_viewport_size({"width": width, "height": page.evaluate("document.documentElement.scrollHeight")})
    # A worker's picture takes the place of an earlier run's at once.
    file, fresh = SCREENSHOTS / f"{name}.png", SCREENSHOTS / f"{name}-{os.getpid()}.new.png"
    page.screenshot(path=fresh)
    fresh.replace(file)
    return file
