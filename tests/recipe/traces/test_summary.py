"""What `trace check` tells of a trace, counted by hand."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_qualify.cli.commands import app
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.traces.summary import summary_of
from vllm_qualify.recipe.traces.trace import Request, Trace

# Two bursts of five requests, 20 s apart; each prompt but the first begins with the same 16 tokens.
ARRIVALS_S = [0.0, 0.0, 0.0, 0.0, 0.0, 20.0, 20.0, 20.0, 20.0, 20.0]
TRACE = Trace.from_requests(
    16, [Request(at, 20 + number, 10 - number, (0, number + 1)) for number, at in enumerate(ARRIVALS_S)]
)


def test_arrivals_are_counted() -> None:
    summary = summary_of(TRACE, "mooncake")
    assert (summary.requests, summary.lasts_s, summary.mean_req_s, summary.peak_req_s) == (10, 20.0, 9 / 20, 0.5)
    # Nine times between requests, one of 20 s: the mean is 20/9 s, the variance 20²/9 s².
    assert summary.burstiness == pytest.approx((20 / 9) ** 2 / (20**2 / 9))


def test_lengths_are_counted() -> None:
    summary = summary_of(TRACE, "mooncake")
    assert [*summary.prompts.model_dump().values()] == [24, 28, 29, 29, 245]
    assert [*summary.replies.model_dump().values()] == [5, 9, 10, 10, 55]
    assert summary.longest_tok == 30
    assert (summary.shared_tok, summary.shared_share) == (9 * 16, 9 * 16 / 245)


def test_requests_all_at_once_have_no_rate() -> None:
    summary = summary_of(Trace.from_requests(16, [Request(0.0, 5, 5, (at,)) for at in range(3)]), "mooncake")
    assert (summary.mean_req_s, summary.burstiness) == (None, None)
    assert "all at once" in "\n".join(summary.lines)


def test_the_command_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"arrival_s": 0, "input_tok": 30, "output_tok": 4}\n{"arrival_s": 2, "input_tok": 50, "output_tok": 6}\n')
    shown = CliRunner().invoke(app, ["trace", "check", str(file)])
    assert shown.exit_code == 0
    assert "requests    2 in 2.0 s" in shown.stdout
    assert "prompts     median 30, p90 50, p99 50, most 50 tokens, 80 in all" in shown.stdout
    as_json = CliRunner().invoke(app, ["trace", "check", str(file), "--json", "--num-prompts", "1"])
    assert json.loads(as_json.stdout)["requests"] == 1


def test_the_command_names_the_line_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"arrival_s": 0, "input_tok": 30, "output_tok": 4}\n{"arrival_s": -2}\n')
    failed = CliRunner().invoke(app, ["trace", "check", str(file)])
    assert isinstance(failed.exception, CallerError)
    assert failed.exception.problem.startswith("line 2: ")


@pytest.mark.parametrize(("apart_s", "told"), [(1.0, False), (4.0, True)])
def test_the_busiest_stretch_is_told_where_the_trace_lasts_so_long(apart_s: float, told: bool) -> None:
    trace = Trace.from_requests(16, [Request(number * apart_s, 16, 1, (number,)) for number in range(5)])
    (arrivals,) = (line for line in summary_of(trace, "vllm-qualify").lines if line.startswith("arrivals"))
    assert ("busiest 10 s" in arrivals) == told
