"""Prefect's server in the same process tree gets no heartbeats; another one does."""

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings

from tasks.embedded import without_heartbeats

OFTEN_S = 45
URL = "http://127.0.0.1:4200/api"


def frequency() -> int | None:
    return get_current_settings().flows.heartbeat_frequency


def test_flows_on_an_embedded_server_send_no_heartbeats() -> None:
    asked = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: OFTEN_S}
    with temporary_settings(asked, restore_defaults={PREFECT_API_URL}):
        with without_heartbeats():
            assert frequency() is None
        assert frequency() == OFTEN_S


def test_the_frequency_is_back_after_a_flow_that_fails() -> None:
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: OFTEN_S}, restore_defaults={PREFECT_API_URL}):
        with pytest.raises(KeyboardInterrupt), without_heartbeats():
            raise KeyboardInterrupt
        assert frequency() == OFTEN_S


def test_flows_on_another_server_send_theirs() -> None:
    with temporary_settings({PREFECT_API_URL: URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: OFTEN_S}), without_heartbeats():
        assert frequency() == OFTEN_S
        assert get_current_settings().api.url == URL
