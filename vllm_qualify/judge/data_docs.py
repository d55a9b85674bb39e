"""Data Docs: Great Expectations' own page of a validation result. This module imports Great Expectations."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from great_expectations.data_context import AbstractDataContext
from great_expectations.render.view import DefaultJinjaPageView
from jinja2 import BytecodeCache
from jinja2.bccache import Bucket

# Great Expectations' fonts, and its animation for newcomers, would add 4 MB to each report.
UNNEEDED = ("*.gif", "*.otf")
# Great Expectations' page loads scripts of others, and shows texts of the recipe as they are. It may run and load nothing.
_ALLOWED = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:"
POLICY = f'<meta http-equiv="Content-Security-Policy" content="{_ALLOWED}">'


class InMemory(BytecodeCache):
    """A cache of compiled templates for the life of this process. A changed template is compiled again."""

    def __init__(self) -> None:
        self._compiled: dict[str, bytes] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        if bytecode := self._compiled.get(bucket.key):
            bucket.bytecode_from_string(bytecode)

    def dump_bytecode(self, bucket: Bucket) -> None:
        self._compiled[bucket.key] = bucket.bytecode_to_string()


COMPILED = InMemory()


class PageView(DefaultJinjaPageView):  # type: ignore[misc]  # mypy does not follow Great Expectations' imports, so it is Any
    """Great Expectations' page, unchanged, with compiled templates kept.

    Great Expectations makes a new view for each page. To compile the same templates again would take most of a page's time.
    """

    def __init__(self, custom_styles_directory: str | None = None, custom_views_directory: str | None = None) -> None:
        super().__init__(custom_styles_directory, custom_views_directory)
        self.env.bytecode_cache = COMPILED


def build_docs(context: AbstractDataContext, folder: Path) -> None:
    """Write the page of the context's validation result, which includes the suite, and all its files into `folder`.

    Great Expectations' index is slow to build, and would list only this page. Our index redirects to the page at once.
    """
    site = {
        "class_name": "SiteBuilder",
        "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(folder)},
        "site_section_builders": {
            "validations": {"view": {"module_name": __name__, "class_name": PageView.__name__}},
            # Not needed: a second page of the same expectations, and one of profiles, which do not exist.
            "expectations": "None",
            "profiling": "None",
        },
        "show_how_to_buttons": False,
    }
    context.add_data_docs_site("docs", site)
    context.build_data_docs(["docs"], build_index=False)
    for page in folder.rglob("*.html"):
        page.write_text(page.read_text().replace("<head>", f"<head>{POLICY}", 1))
    (folder / "index.html").write_text("".join(_index_lines(folder)))
    for path in [path for pattern in UNNEEDED for path in folder.rglob(pattern)]:
        path.unlink()


def _index_lines(folder: Path) -> Iterator[str]:
    yield "<!doctype html><title>Data Docs</title>\n"
    pages = sorted((folder / "validations").rglob("*.html"), key=lambda page: page.stat().st_mtime_ns)
    if not pages:
        # Great Expectations logs the error, and continues.
        yield "Great Expectations could not draw its page. Its suite and result are in report.json.\n"
        return
    place = quote(pages[-1].relative_to(folder).as_posix())
    yield f'<meta http-equiv="refresh" content="0; url={place}"><a href="{place}">The validation result</a>\n'
