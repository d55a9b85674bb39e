"""Of a page of metrics, only what is asked for is parsed; what is no such page is refused."""

import pytest

from vllm_qualify.engine.metrics_page import samples_of, sums_of

PAGE = """\
# HELP vllm:prompt_tokens_total Prefilled tokens.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="a \\"b\\" _total"} 3.0
vllm:prompt_tokens_total{engine="1",model_name="a"} 4.0
vllm:prompt_tokens_total_of_another 9.0
vllm:num_requests_running{engine="0"} 2.0
"""


def test_values_are_summed_over_labels_and_names_are_whole_names() -> None:
    assert sums_of(PAGE, ("vllm:prompt_tokens_total", "vllm:num_requests_running", "vllm:not_there")) == {
        "vllm:prompt_tokens_total": 7.0,
        "vllm:num_requests_running": 2.0,
    }
    assert sums_of(PAGE, ("vllm:prompt_tokens",)) == {}


def test_samples_are_those_of_the_wanted_lines() -> None:
    samples = samples_of(PAGE, lambda line: 'engine="0"' in line)
    assert [(sample.name, sample.labels["engine"], sample.value) for sample in samples] == [
        ("vllm:prompt_tokens_total", "0", 3.0),
        ("vllm:num_requests_running", "0", 2.0),
    ]
    assert samples[0].labels["model_name"] == 'a "b" _total'


@pytest.mark.parametrize("page", ["<html>Not found</html>", '{"detail": "Not Found"}', "vllm:prompt_tokens_total{engine= 3"])
def test_what_is_no_page_of_metrics_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        sums_of(page, ("vllm:prompt_tokens_total",))
