"""Take the documentation's pictures, from a store with real runs.

    python -m infra.screenshots FOLDER

opens the board in FOLDER and follows its links to the newest approved report, and to one that did not pass, whose flipped
questions it shows. It writes docs/images, and needs Debian's chromium-headless-shell.
"""

import argparse
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium-headless-shell")
IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 375, "height": 812}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the store, where index.html lies")
    board = parser.parse_args().folder / "index.html"
    if not board.is_file():
        print(f"{board}: no board: qualify something first", file=sys.stderr)
        return 2
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        _board(_opened(browser, board.as_uri()))
        approved, refused = (_report(_opened(browser, board.as_uri()), state) for state in ("approved", "not passed"))
        _photograph(_opened(browser, approved), "report")
        _photograph(_opened(browser, approved, NARROW), "report-narrow")
        _questions(_opened(browser, refused))
        browser.close()
    return 0


def _opened(browser: Browser, address: str, size: dict[str, int] = WIDE) -> Page:
    page = browser.new_page(viewport={"width": size["width"], "height": size["height"]})
    page.goto(address)
    return page


def _board(page: Page) -> None:
    """Photograph the board."""
    page.set_viewport_size(WIDE | {"height": page.evaluate("document.documentElement.scrollHeight")})
    _photograph(page, "board")


def _report(page: Page, state: str) -> str:
    """The address of the newest report of the first cell in that state."""
    page.locator("#filter-state").select_option(state)
    return str(page.locator("#cells > tbody > tr:visible > td:last-child a").first.evaluate("link => link.href"))


def _questions(page: Page) -> None:
    section = page.locator("section", has=page.locator("#questions"))
    section.scroll_into_view_if_needed()
    page.locator("#questions").evaluate("title => title.scrollIntoView()")
    _photograph(page, "questions")


def _photograph(page: Page, name: str) -> None:
    page.screenshot(path=IMAGES / f"{name}.png")


if __name__ == "__main__":
    sys.exit(main())
