"""The board: what it shows of an index, that no name breaks out of it, and that no older one stays over a newer one."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random

import pytest

from tests.approval.builder import CELL, NEWER, OLDER, RUN, approved, of_variant, publish_report, row_of, with_gate
from tests.approval.stores import Interrupted, rewrite
from tests.builders.boards import BEGAN, TAKEN_BACK, Page, cell_page_of, entry, large_row, line
from tests.builders.wrapped_stores import Wrapped
from tests.report.builder import CONTROL, IMAGE, SCRIPT
from vllm_qualify.approval.actions import revoke
from vllm_qualify.approval.board import NEVER, BoardState, board_revision, render_board, write_board
from vllm_qualify.approval.cell_page import render_cell_page, write_cell_page
from vllm_qualify.approval.index import index_problem, make_again, read_index, write_index
from vllm_qualify.approval.layout import BOARD_KEY, INDEX_KEY, JSON, cell_index_key, cell_page_key
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.approval.row import Index, Row, Standing, brief
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.errors import StoreBusyError, StoreError
from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.publish.bundle import ReleaseTry, Score, Summary
from vllm_qualify.publish.store import Store, Stored
from vllm_qualify.report import page as report_page
from vllm_qualify.secrets import plain

PAGE = f"cells/{CELL}/index.html"
TO_ROOT = "../../../../../"
OTHER = CELL.replace("fp8", "bf16")
CLOSING = "</script></style><!--"
LINES = "\u2028\u2029"


# --- a page as a browser reads it


def page_of(*rows: Row) -> Page:
    return Page(render_board(Index(revision=3, cells=list(map(brief, rows)))))


def shown(page: Page, cell: str = CELL) -> list[str]:
    """The columns of a cell's row."""
    return next(row for row in page.rows if "/".join(row[:4]) == cell)


# --- what it shows


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (Row(cell=CELL, last=entry(), reports=[line(standing="approved")]), "approved"),
        (Row(cell=CELL, last=entry(revoked=TAKEN_BACK), reports=[line(standing="revoked")]), "revoked"),
        (Row(cell=CELL, reports=[line()]), "waiting for a decision"),
        (Row(cell=CELL, reports=[line(standing="not passed")]), "not passed"),
        (Row(cell=CELL, reports=[line(standing="rejected"), line(OLDER, "not passed")]), "rejected"),
        (Row(cell=CELL, last=entry(), reports=[]), "approved"),
        (Row(cell=CELL, reports=[]), NEVER),
    ],
)
def test_a_cell_has_the_state_of_its_last_approval_or_of_its_newest_report(row: Row, state: BoardState) -> None:
    assert shown(page_of(row))[4] == state


@pytest.mark.parametrize("standing", ["waiting for a decision", "not passed", "rejected"])
def test_what_became_of_a_newer_report_stands_beside_the_approval(standing: Standing) -> None:
    page = page_of(Row(cell=CELL, last=entry(), reports=[line(NEWER, standing), line(standing="approved")]))
    assert shown(page)[4] == f"approvednewer report: {standing}"
    assert page.links == [PAGE, f"reports/{CELL}/{RUN}/report.html", f"reports/{CELL}/{NEWER}/report.html"]


def test_without_its_script_the_page_has_dates_and_names_and_what_is_missing() -> None:
    columns = shown(page_of(Row(cell=CELL, last=entry(), reports=[line(standing="approved")])))
    assert columns[5:] == ["vLLM 0.32.0", "2026-03-14by Ada", "2026-06-12", "2026-03-14"]
    columns = shown(page_of(Row(cell=CELL, reports=[])))
    assert columns[5:8] == ["— (not reported)", "— (never approved)", "— (never approved)"]


@pytest.mark.parametrize(("number", "said"), [(None, ""), (1, ""), (3, "try 3")])
def test_a_report_says_which_try_of_its_release_it_is(number: int | None, said: str) -> None:
    tried = ReleaseTry(release="5" * 64, number=number, verdict="fail") if number else None
    row = Row(cell=CELL, reports=[line(standing="not passed", tried=tried)])
    assert shown(page_of(row))[8] == f"2026-03-14{said}"
    assert ("try 3 of this release" in render_cell_page(row)) == bool(said)


def test_the_engine_is_that_of_what_the_state_is_about() -> None:
    old, new = (Summary(engine="vllm", engine_version=version) for version in ("0.31.0", "0.32.0"))
    reports = [line(NEWER, summary=new), line(standing="approved", summary=old)]
    assert shown(page_of(Row(cell=CELL, last=entry(), reports=reports)))[5] == "vLLM 0.31.0"
    assert shown(page_of(Row(cell=CELL, reports=reports)))[5] == "vLLM 0.32.0"


def test_what_was_never_qualified_is_shown_where_the_variant_has_its_like() -> None:
    cells = ["tiny/bf16/h100/chat", "tiny/bf16/h200/batch", "tiny/fp8/b200/chat", "other/bf16/cpu/chat"]
    page = page_of(*(Row(cell=cell, reports=[line()]) for cell in cells))
    states = {"/".join(row[:4]): row[4] for row in page.rows[1:]}
    gaps = {"tiny/bf16/h100/batch": NEVER, "tiny/bf16/h200/chat": NEVER}
    assert states == dict.fromkeys(cells, "waiting for a decision") | gaps
    assert list(states) == sorted(states)


def test_the_script_gets_each_cell_in_order() -> None:
    row = Row(cell=CELL, revision=7, last=entry(), reports=[line(NEWER), line(standing="approved")])
    [expected] = [attributes for attributes in page_of(row).all("tr") if "data-row" in attributes]
    assert (expected["data-cell"], expected["data-revision"]) == (CELL, "7")
    state, newer, by, expires, engines, started_s, runs = json.loads(str(expected["data-row"]))
    assert (state, newer, by, expires) == ("approved", "waiting for a decision", "Ada", "2026-06-12")
    assert (engines, started_s, runs) == (["vLLM 0.32.0"], BEGAN.timestamp(), [RUN, NEWER])


def test_the_page_of_a_cell_tells_its_script_each_run_in_order() -> None:
    metric, interval = "exact_match (gsm8k, strict-match)", Interval(lower=0.81, upper=0.85)
    score = Score(metric=metric, value=0.8339651250947688, interval=interval)
    figures = {"image": "vllm:v0.32.0", "gpus": 8, "score": score, "output_tok_s_per_gpu": 1576.04999}
    figures |= {"model": "meta-llama/Llama-3.1-8B", "revision": "9372c470eeadd5ecd9c3c74c2b3cb633f8e2f2fa"}
    summary = Summary(engine="vllm", engine_version="0.32.0", **figures)
    standing = "approved by Ada on 2026-03-14"
    reports = [line(NEWER), line(standing="approved", told=standing, summary=summary)]
    page = cell_page_of(Row(cell=CELL, last=entry(), reports=reports))
    texts: list[str] = page.data["texts"]
    assert (page.data["expires"], page.data["last"]) == ("2026-06-12", RUN)
    first, second = page.data["runs"]
    assert (first[0], texts[first[1]], first[2:]) == (NEWER, "vLLM 0.32.0", [None] * 5)
    assert (second[0], [texts[number] for number in second[1:3]]) == (RUN, ["vLLM 0.32.0", metric])
    assert second[3:] == [0.83397, 0.81, 0.85, 1576.0]
    untrusted = "— (none that can be trusted: see the report)"
    unnamed = "— (its manifest does not name it: see the report)"
    bare, whole = page.rows[1:]
    assert bare[:3] == [f"2026-03-14 09:26 UTC{NEWER}", "waiting for a decision", unnamed]
    assert bare[3:] == ["vLLM 0.32.0", "— (no image)", untrusted, untrusted, "— (no GPU)"]
    assert whole[:2] == [f"2026-03-14 09:26 UTC{RUN}", f"approved{standing}"]
    assert whole[2:5] == ["meta-llama/Llama-3.1-8B9372c470eead", "vLLM 0.32.0", "vllm:v0.32.0"]
    assert whole[5:] == [f"83.40\u00a0%81.00\u00a0% to 85.00\u00a0%{metric}", "1,576 tok/s", "8"]
    assert page.links == [f"{TO_ROOT}index.html", *(f"{TO_ROOT}reports/{CELL}/{run_id}/report.html" for run_id in (NEWER, RUN))]


def test_links_lead_to_what_was_published(store: Store, tmp_path: Path, key: PrivateKey) -> None:
    approved(store, publish_report(store, tmp_path, OLDER), key)
    publish_report(store, tmp_path, RUN, with_gate("fail"))
    publish_report(store, tmp_path, NEWER, of_variant("bf16"))
    path = Path(store.locate(BOARD_KEY))
    assert Page(path.read_text()).links == [
        f"cells/{OTHER}/index.html",
        f"reports/{OTHER}/{NEWER}/report.html",
        PAGE,
        f"reports/{CELL}/{OLDER}/report.html",
        f"reports/{CELL}/{RUN}/report.html",
    ]
    for place in (path, path.parent / PAGE):
        page = Page(place.read_text())
        assert all((place.parent / link).is_file() for link in page.links)
        assert store.url not in page.text


# --- what it is made of


def hostile() -> Row:
    text = f"{SCRIPT}{IMAGE}{CLOSING}{CONTROL}{LINES}&amp;'{{{{ 7 * 7 }}}}"
    name = f"Ada {SCRIPT} {IMAGE} {CLOSING}"
    score = Score(metric=text, value=0.5)
    summary = Summary(engine="vllm", engine_version=text, image=text, score=score)
    last = entry().model_copy(update={"by": name, "run_id": f"javascript:{SCRIPT}"})
    reports = [line(f"javascript:{text}", summary=summary, told=text), line(f"x/../../{SCRIPT}", "approved")]
    return Row(cell=f"{text}/{IMAGE}/{SCRIPT}/{CONTROL}", last=last, reports=reports)


HARMLESS = Row(cell="a/b/c/d", last=entry(), reports=[line(NEWER), line()])


def hostile_pages() -> list[tuple[Page, Page]]:
    """The board and a cell's page, each hostile and harmless."""
    other = Row(cell=CELL, reports=[line()])
    return [(page_of(hostile(), other), page_of(HARMLESS, other)), (cell_page_of(hostile()), cell_page_of(HARMLESS))]


@pytest.mark.parametrize(("page", "harmless"), hostile_pages(), ids=["board", "cell"])
def test_no_hostile_name_breaks_out(page: Page, harmless: Page) -> None:
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in harmless.elements} | {"code"}
    for tag in ("script", "style", "tr", "td"):
        assert len(page.all(tag)) == len(harmless.all(tag)), tag
    for bad in (SCRIPT, "<img", "\x1b", "\u202e", " 49 "):
        assert bad not in re.sub(r"<(style|script)>.*?</\1>", "", page.text, flags=re.DOTALL), bad
    assert page.text.count("</script>") == len(page.all("script"))
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on") or name == "style"]


def test_hostile_names_are_reported_as_they_are() -> None:
    page, cells = page_of(hostile()), cell_page_of(hostile())
    assert any(SCRIPT in text and IMAGE in text and CLOSING in text for text in cells.data["texts"])
    assert not any(sign in cells.inside["script"][0] for sign in "<>&\u2028\u2029")
    name = "/".join(page.rows[1][:4])
    assert name == f"{plain(hostile().cell)}"
    assert all(part in name for part in (SCRIPT, IMAGE, CLOSING, "\\u202e"))


def test_no_link_leads_out_of_the_store() -> None:
    last = entry("20260314T092653Z-..").model_copy(update={"run_id": "../x"})
    rows = [
        hostile(),
        Row(cell="../../../etc", last=last, reports=[line()]),
        Row(cell="a/b/c/d", last=last, reports=[line("javascript:alert(1)")]),
        Row(cell="short", reports=[line("a+b@c=~,:-")]),
    ]
    link = "reports/short/a%2Bb%40c%3D~%2C%3A-/report.html"
    assert page_of(*rows).links == ["cells/a/b/c/d/index.html", "cells/short/index.html", link]
    board = f"{TO_ROOT}index.html"
    assert [cell_page_of(row).links for row in rows] == [[board], [board], [board], [board, f"{TO_ROOT}{link}"]]


@pytest.mark.parametrize("page", [page for page, _ in hostile_pages()], ids=["board", "cell"])
def test_the_policy_allows_this_script_and_this_style_and_nothing_else(page: Page) -> None:
    [policy] = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    [style], [*data, script] = page.inside["style"], page.inside["script"]
    assert str(policy).split("; ") == [
        "default-src 'none'",
        f"style-src '{source(style)}'",
        f"script-src '{source(script)}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert [attributes.get("type") for attributes in page.all("script")] == [*["application/json"] * len(data), None]
    assert not [name for _, attributes in page.elements for name in attributes if name in ("src", "style", "onclick")]


def source(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@pytest.mark.parametrize("page", [page_of(), cell_page_of(HARMLESS)], ids=["board", "cell"])
def test_the_script_makes_no_markup_of_text(page: Page) -> None:
    script = page.inside["script"][-1]
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", ".style", "fetch("):
        assert name not in script, name


@pytest.mark.thorough
def test_2000_cells_are_a_small_page() -> None:
    rows = [large_row(number) for number in range(2000)]
    text = render_board(Index(revision=1, cells=list(map(brief, rows))))
    assert len(text.encode()) < 2_500_000
    assert len(Page(text).rows) == 2001


# --- its colours


def colours(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """By name, in the light and in the dark."""
    themes = [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block)) for block in re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    ]
    light, dark = themes[:2]
    return light, light | dark


def test_the_colours_are_those_of_the_reports_page() -> None:
    theirs = colours(Path(report_page.__file__).with_name("page.css").read_text())
    for board, report in zip(colours(page_of().inside["style"][0]), theirs, strict=True):
        assert board == {name: report[name] for name in board}


# --- never older


def index_of(revision: int) -> Index:
    return Index(revision=revision, cells=[brief(Row(cell=CELL, revision=revision, reports=[line(f"run-{revision}")]))])


@pytest.mark.parametrize("revision", [2, 3])
def test_an_older_index_writes_nothing(store: Store, revision: int) -> None:
    assert board_revision(store) == 0
    write_board(store, index_of(3))
    assert board_revision(store) == 3
    before = store.read(BOARD_KEY)
    write_board(store, index_of(revision).model_copy(update={"cells": []}))
    assert store.read(BOARD_KEY) == before


@pytest.mark.parametrize("there", [None, 1])
def test_of_two_writers_the_newer_index_stays(store: Store, there: int | None) -> None:
    for late, meanwhile in ((4, 5), (7, 6)):
        if there is not None:
            write_board(store, index_of(there))
        write_board(Interrupted(store, partial(write_board, store, index_of(meanwhile))), index_of(late))
        assert store.get(BOARD_KEY).decode() == render_board(index_of(max(late, meanwhile)))


def test_of_many_writers_the_newest_index_stays(store: Store) -> None:
    revisions = list(range(1, 41))
    Random(7).shuffle(revisions)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda revision: write_board(store, index_of(revision)), revisions))
    assert store.get(BOARD_KEY).decode() == render_board(index_of(40))


def row_at(revision: int, cell: str = CELL) -> Row:
    return Row(cell=cell, revision=revision, reports=[line("20260314T092653Z-abcdef")])


def indexes(revision: int) -> dict[str, bytes]:
    return {
        INDEX_KEY: index_of(revision).model_dump_json().encode(),
        cell_index_key(CELL): row_at(revision).model_dump_json().encode(),
    }


def pages_drawn_at_3(store: Store, there: dict[str, bytes]) -> list[str]:
    """The board and the cell's page of one who wrote revision 3 of their indexes, while the store has others by now."""
    for key, body in there.items():
        store.swap(key, body, JSON, None)
    write_board(store, index_of(3))
    write_cell_page(store, row_at(3))
    return [store.get(key).decode() for key in (BOARD_KEY, cell_page_key(CELL))]


@pytest.mark.parametrize("revision", [2, 3, 9])
def test_a_page_shows_the_newest_index(store: Store, revision: int) -> None:
    newest = max(revision, 3)
    drawn = pages_drawn_at_3(store, indexes(revision))
    assert drawn == [render_board(index_of(newest)), render_cell_page(row_at(newest))]


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff", row_at(9, OTHER).model_dump_json().encode()])
def test_what_is_no_index_by_now_is_passed_over(store: Store, body: bytes) -> None:
    drawn = pages_drawn_at_3(store, dict.fromkeys(indexes(3), body))
    assert drawn == [render_board(index_of(3)), render_cell_page(row_at(3))]


def index_at(revision: int, other: int) -> Index:
    """Two cells, the other at a revision of its own."""
    rows = [Row(cell=CELL, revision=1, reports=[line("run-1")])]
    rows.append(Row(cell=OTHER, revision=other, reports=[line(f"run-{other}")]))
    return Index(revision=revision, cells=list(map(brief, rows)))


def test_a_row_stays_until_its_cell_changes(store: Store) -> None:
    write_board(store, index_at(1, 1))
    before = store.read(BOARD_KEY)
    seen = before.body.replace(b">llama-3.1-8b<", b">seen<")
    store.swap(BOARD_KEY, seen, "text/html", before.tag)
    write_board(store, index_at(2, 2))
    drawn = store.get(BOARD_KEY)
    assert (drawn.count(b">seen<"), drawn.count(b">llama-3.1-8b<")) == (1, 1)
    assert drawn.count(b"run-2") == before.body.count(b"run-1") // 2


@pytest.mark.parametrize("there", [1, 2], ids=["not the one before", "the one before"])
def test_a_board_with_one_new_row_is_the_board_as_a_whole(store: Store, there: int) -> None:
    write_board(store, index_at(there, 1))
    write_board(store, index_at(3, 7))
    assert store.get(BOARD_KEY).decode() == render_board(index_at(3, 7))


def test_a_board_with_several_new_rows_is_the_board_as_a_whole(store: Store) -> None:
    cells = [f"model-{number}/bf16/h100/chat" for number in range(30)]
    changed = [cells[29], cells[3], cells[0], cells[17], cells[18]]

    def at(revision: int, new: int) -> Index:
        rows = (Row(cell=cell, revision=new if cell in changed else 1, reports=[line(f"run-{cell[6:8]}")]) for cell in cells)
        return Index(revision=revision, cells=sorted(map(brief, rows), key=lambda row: row.cell))

    write_board(store, at(1, 1))
    kept = store.read(BOARD_KEY)
    store.swap(BOARD_KEY, kept.body.replace(b">model-5<", b">seen<"), "text/html", kept.tag)
    write_board(store, at(2, 2))
    drawn = store.get(BOARD_KEY)
    assert drawn.count(b">seen<") == 1
    assert drawn.replace(b">seen<", b">model-5<").decode() == render_board(at(2, 2))


def test_a_cell_that_was_never_qualified_gets_its_row(store: Store) -> None:
    """The board has a row for it already, and the one that comes makes another gap."""
    cells = [f"model/bf16/{pair}" for pair in ("h100/batch", "h100/chat", "h200/chat", "h200/batch", "b200/chat")]
    for revision, count in ((1, 3), (3, 4), (5, 5)):
        index = Index(revision=revision, cells=[brief(Row(cell=cell, revision=1)) for cell in sorted(cells[:count])])
        write_board(store, index)
        assert store.get(BOARD_KEY).decode() == render_board(index)
        assert store.get(BOARD_KEY).count(b'data-revision="0"') == {3: 1, 4: 0, 5: 1}[count]


class Counting(Wrapped):
    """Counts the boards that are written, and lets another write one when the board was read as often as `after` says."""

    def __init__(self, store: Store, after: int = 0, other: Callable[[], object] = lambda: None) -> None:
        super().__init__(store)
        self.after, self.other, self.reads, self.written = after, other, 0, 0
        self.read = self._counted

    def _counted(self, key: str) -> Stored:
        if self.reads == self.after:
            self.other()
        self.reads += 1
        return self._store.read(key)

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        self.written += 1
        super().swap(key, body, content_type, tag)


def test_a_board_that_another_is_about_to_draw_is_waited_for(store: Store) -> None:
    write_board(store, index_at(1, 1))
    counting = Counting(store, 2, lambda: write_board(store, index_at(2, 2)))
    write_board(counting, index_at(2, 2), after=2)
    assert (counting.reads, counting.written) == (3, 0)


@pytest.mark.parametrize(("revision", "after", "reads"), [(2, 2, 7), (4, 4, 7), (2, 1, 1)])
def test_a_board_that_another_left_undrawn_is_drawn(store: Store, revision: int, after: int, reads: int) -> None:
    """Nothing is waited for if the board is the one before."""
    write_board(store, index_at(1, 1))
    counting = Counting(store)
    write_board(counting, index_at(revision, revision), after=after)
    assert (counting.reads, counting.written) == (reads, 1)
    assert store.get(BOARD_KEY).decode() == render_board(index_at(revision, revision))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda page: re.sub(rb'data-form="[0-9a-f]+"', b'data-form="0"', page).replace(b">llama-3.1-8b<", b">seen<"),
        lambda page: page.replace(b"</tbody>", b"", 1),
        lambda page: b"\n".join(line for line in page.split(b"\n") for _ in range(1 + line.startswith(b"<tr data-cell"))),
        lambda page: b"\n".join(line for line in page.split(b"\n") if not line.startswith(b"<tr data-cell")),
        lambda page: page + b"\n",
    ],
    ids=["of another version", "without an end", "rows twice", "no rows", "longer"],
)
def test_a_board_that_somebody_changed_gets_no_new_row_but_is_drawn_anew(store: Store, spoil: Callable[[bytes], bytes]) -> None:
    write_board(store, index_at(1, 1))
    before = store.read(BOARD_KEY)
    assert spoil(before.body) != before.body
    store.swap(BOARD_KEY, spoil(before.body), "text/html", before.tag)
    write_board(store, index_at(2, 2))
    assert store.get(BOARD_KEY).decode() == render_board(index_at(2, 2))


@pytest.mark.parametrize("known", [(), ("b/b/b/b",), ("a/b/b/b", "b/b/b/b", "c/b/b/b", "c/b/b/b-2")], ids=len)
@pytest.mark.parametrize("cell", ["a/a/a/a", "b/b/b/b", "b/b/b/b.1", "c/b/b/b", "c/b/b/b-2", "d/d/d/d"])
def test_an_index_gets_a_new_row_in_its_place(known: tuple[str, ...], cell: str) -> None:
    before = Index(revision=3, cells=[brief(Row(cell=name, revision=1, reports=[line()])) for name in known])
    changed = before.with_row(brief(Row(cell=cell, revision=5, reports=[line()])))
    assert [changed.revision_of(name) for name in (cell, "e/e/e/e")] == [5, None]
    assert [row.cell for row in changed.cells] == sorted({*known, cell})
    assert [row for row in changed.cells if row.cell != cell] == [row for row in before.cells if row.cell != cell]


def test_a_board_that_changes_all_the_time_is_reported(store: Store) -> None:
    write_board(store, index_of(1))
    text = store.get(BOARD_KEY)

    class Restless(Wrapped):
        def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
            nonlocal text
            text += b" "
            super().swap(key, text, content_type, tag)
            super().swap(key, body, content_type, tag)

    with pytest.raises(StoreBusyError, match="the board changes all the time"):
        write_board(Restless(store), index_of(2))


def test_somebody_elses_page_is_left_alone(store: Store, run: PublishedRun, key: PrivateKey) -> None:
    ours = b"<!doctype html><title>Our bucket</title>"
    rewrite(store, BOARD_KEY, ours)
    with pytest.raises(StoreError, match="not a board"):
        write_board(store, index_of(9))
    done = approved(store, run, key)
    assert (done.index_problem or "").startswith("the board is not up to date: ")
    assert store.get(BOARD_KEY) == ours
    assert row_of(store).last == done.pointer.last


# --- with the index


class Failing(Wrapped):
    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        if key == BOARD_KEY:
            raise StoreError("the disk is full", "free space on it", self.locate(key))
        super().swap(key, body, content_type, tag)


def board_is_up_to_date(store: Store) -> bool:
    """With the page of its one cell."""
    is_drawn = store.get(cell_page_key(CELL)).decode() == render_cell_page(row_of(store))
    return is_drawn and store.get(BOARD_KEY).decode() == render_board(read_index(store))


def test_the_board_follows_each_step(store: Store, run: PublishedRun, key: PrivateKey) -> None:
    steps: dict[str, Callable[[], object]] = {
        "waiting for a decision": lambda: run,
        "approved": lambda: approved(store, run, key),
        "revoked": lambda: revoke(store, CELL, None, TAKEN_BACK),
    }
    for state, step in steps.items():
        step()
        assert board_is_up_to_date(store)
        assert shown(Page(store.get(BOARD_KEY).decode()))[4] == state


def test_a_board_that_could_not_be_written_is_made_up_for_by_the_next(store: Store, run: PublishedRun, key: PrivateKey) -> None:
    done = approved(Failing(store), run, key)
    assert (done.index_problem or "").startswith("the board is not up to date: ")
    assert "the disk is full" in (done.index_problem or "")
    assert not board_is_up_to_date(store)
    assert row_of(store).last == done.pointer.last
    assert index_problem(store, CELL) is None
    assert board_is_up_to_date(store)


def test_an_index_that_was_deleted_goes_on_from_the_boards_revision(store: Store, run: PublishedRun, key: PrivateKey) -> None:
    approved(store, run, key)
    before, row = read_index(store).revision, row_of(store).revision
    for name in (INDEX_KEY, cell_index_key(CELL)):
        Path(store.locate(name)).unlink()
    revoke(store, CELL, None, TAKEN_BACK)
    assert (read_index(store).revision, row_of(store).revision) == (before + 1, row + 1)
    assert board_is_up_to_date(store)


@pytest.mark.usefixtures("run")
def test_a_board_that_was_deleted_is_drawn_again(store: Store) -> None:
    for name in (BOARD_KEY, cell_page_key(CELL)):
        Path(store.locate(name)).unlink()
    make_again(store, CELL)
    write_index(store)
    assert board_is_up_to_date(store)
