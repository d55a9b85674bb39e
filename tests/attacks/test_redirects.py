"""A model's server that leads to an address which only this machine may reach, such as a cloud's metadata."""

import httpx
import pytest

from tests.fakes.redirecting import redirecting
from vllm_qualify.answers import ask_within


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_answer_leads_to_another_server(status: int, method: str) -> None:
    with redirecting(status) as (url, asked):
        with pytest.raises(httpx.HTTPError, match="leads to another server"):
            ask_within(method, f"{url}/v1/completions", 10, json={"prompt": "one"})
        assert asked == []


def test_an_answer_may_lead_to_a_page_of_its_own_server() -> None:
    """As a path without its slash does."""
    with redirecting(307, within=True) as (url, asked):
        assert ask_within("GET", f"{url}/metrics", 10).json() == {"secret": "of another server"}
        assert asked == ["GET /metrics/"]


def test_who_asks_for_none_gets_the_answer_itself() -> None:
    with redirecting(307, within=True) as (url, asked):
        answer = ask_within("GET", f"{url}/metrics", 10, most_redirects=0)
        assert (answer.status_code, asked) == (307, [])
