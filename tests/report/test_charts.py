"""Charts of a run's course, as the page has them."""

import math
from xml.etree import ElementTree

import pytest

from tests.builders.watched import CAPTURED, QUEUED
from vllm_qualify.evidence.watched import series
from vllm_qualify.report.charts import draw_chart


def paths(svg: str) -> list[str]:
    """The charts' lines, without the axes and the legend. It is well-formed, or this raises."""
    drawing = ElementTree.fromstring(svg)  # noqa: S314  (our own text)
    every = [path.get("d") or "" for path in drawing.findall("{http://www.w3.org/2000/svg}path")]
    return every[1 : 1 + len(every) // 2]


def test_a_chart_of_a_real_load() -> None:
    course = series(CAPTURED / "queued", *QUEUED)
    svg = draw_chart("requests", "req", course.time_s, {"running": course.running, "waiting": course.waiting})
    running, waiting = paths(svg)
    assert running.startswith("M56 136L")
    assert running.count("L") == waiting.count("L") == len(course.time_s) - 1
    # 12 waited at most, at the top; the end is at the right.
    assert " 24L" in waiting
    assert waiting.split("L")[-1].startswith("632 ")
    assert ">12<" in svg


def test_a_chart_breaks_its_line_where_a_value_is_missing() -> None:
    svg = draw_chart("a", "s", [0.0, 1.0, 2.0, 3.0, 4.0], {"x": [1.0, 2.0, None, 2.0, None]})
    assert paths(svg) == ["M56 80L200 24M488 24h0"]


@pytest.mark.parametrize(
    ("largest", "written"),
    [
        *[(32.0, "32"), (0.25, "0.25"), (9_999.0, "9999"), (9_999.7, "10k"), (10_000.0, "10k"), (12_346.0, "12.35k")],
        *[(999_999.0, "1M"), (1_200_000.0, "1.2M"), (3.2e9, "3.2G")],
    ],
)
def test_a_charts_numbers_are_short_and_have_no_exponent(largest: float, written: str) -> None:
    svg = draw_chart("a", "tok/s", [0.0, largest], {"x": [0.0, largest]})
    texts = [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314  (our own text)
    assert texts == ["a", written, "tok/s", "0", f"{written} s", "x"]


def test_a_chart_takes_its_words_as_words_and_brings_nothing_along() -> None:
    evil = '<script>"&'
    svg = draw_chart(evil, evil, [0.0, 1.0], {evil: [1.0, 2.0]})
    root = ElementTree.fromstring(svg)  # noqa: S314  (our own text)
    assert root.get("aria-label") == evil
    assert [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")].count(evil) == 3
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags == {"svg", "path", "g", "text"}
    assert (root.get("viewBox"), root.get("stroke")) == ("0 0 640 160", "currentColor")
    assert "href" not in svg
    assert "#" not in svg


@pytest.mark.parametrize("values", [[0.0, 0.0], [math.pi, None]])
def test_a_chart_of_one_level_or_one_value_is_drawn(values: list[float | None]) -> None:
    assert "nan" not in draw_chart("a", "s", [0.0, 1.0], {"x": values})


@pytest.mark.parametrize(
    ("time_s", "lines"),
    [([0.0], {"x": []}), ([0.0], {"x": [None]}), ([], {}), ([0.0], {str(number): [1.0] for number in range(5)})],
)
def test_what_cannot_be_drawn_is_refused(time_s: list[float], lines: dict[str, list[float | None]]) -> None:
    with pytest.raises(ValueError, match="a chart"):
        draw_chart("a", "s", time_s, lines)
