"""The report says how often the server was started, and what each start measured of what is compared."""

from tests.builders.changed import changed
from tests.report.builder import compared_report, page_link, passed_report
from vllm_qualify.evidence.measurement import invalid
from vllm_qualify.report.diff import diff
from vllm_qualify.report.head import facts, starts_rows
from vllm_qualify.report.model import Report
from vllm_qualify.report.page import render_page
from vllm_qualify.report.points import strips

RATE, SCORE = "output_throughput_tok_s", "exact_match (gsm8k, strict-match)"


def start_twice(report: Report, planned: int = 3) -> Report:
    """The report with a second start: a third slower, its answers spoiled, and nothing about the time to the first token."""
    (load,) = (stage for stage in report.stages if stage.stage == "load")
    (rate,) = (row for row in load.measurements if row.metric == RATE)
    assert rate.value is not None
    slower = changed(rate, start=2, value=rate.value * 2 / 3, interval=None)
    why = "the answers of start 2 are <b>a copy</b>"
    spoiled = invalid("exact_match", why, "", task="gsm8k", filter="strict-match", start=2)
    stage = changed(load, stage="starts", measurements=[slower, spoiled])
    return changed(changed(report, "plan", starts=planned), stages=[*report.stages, stage])


def test_each_compared_metric_has_a_value_for_each_start() -> None:
    rows = {row.metric: row for row in starts_rows(start_twice(compared_report()))}
    assert list(rows) == [SCORE, RATE, "ttft_p99_ms"]
    first, second = (float(value.split()[0].replace(",", "")) for value in rows[RATE].values)
    assert abs(second / first - 2 / 3) < 0.01
    assert [row.values[1] for row in rows.values()][::2] == ["—", "—"]
    assert rows[SCORE].notes == ["the answers of start 2 are <b>a copy</b>"]


def test_the_first_screen_has_the_number_of_starts_and_their_values() -> None:
    report = compared_report()
    message = dict(facts(start_twice(report)))["Starts"]
    assert message.startswith("2 of at most 3; ")
    assert RATE in message
    assert "Starts" not in dict(facts(passed_report()))
    assert "Starts" not in dict(facts(changed(report, "plan", starts=1)))
    assert dict(facts(changed(report, "plan", starts=2)))["Starts"] == "1 of at most 2"
    assert starts_rows(report) == []


def test_other_figures_are_those_of_the_first_start() -> None:
    report = compared_report()
    assert [strip.ours for strip in strips(start_twice(report))] == [strip.ours for strip in strips(report)]
    differences = diff(report, start_twice(report))
    labels = [*differences.alone_a, *differences.alone_b, *(each.label for each in differences.measurements)]
    assert [label for label in labels if "start 2" in label] == []


def test_the_page_has_them_with_outside_text_escaped() -> None:
    page = render_page(start_twice(compared_report()), page_link)
    assert "Starts of the server" in page
    assert "start 2</th>" in page
    assert "<b>a copy</b>" not in page
    assert "&lt;b&gt;a copy&lt;/b&gt;" in page
    assert "Starts of the server" not in render_page(compared_report(), page_link)
