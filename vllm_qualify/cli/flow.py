"""The flows, with Prefect's defaults."""

import importlib
import logging
import os
from typing import Any

STATE_CHANGES = ("Beginning ", "Finished in state ")


def flow_module() -> Any:
    """The module flows.qualify, which is above the package: only its name stands here."""
    set_up_prefect()
    module = importlib.import_module("flows.qualify")
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_for_people)
    return module


def _is_for_people(record: logging.LogRecord) -> bool:
    """Whether to show a log record. Prefect logs every state, and each exception twice; the command shows an error once."""
    if record.name.startswith("great_expectations") and record.levelno < logging.WARNING:
        return False
    is_orchestrators = record.name.startswith("prefect.")
    return not (is_orchestrators and (record.exc_info or record.getMessage().startswith(STATE_CHANGES)))


def set_up_prefect() -> None:
    """Set Prefect's defaults: an ephemeral server, its home in ours, and log lines of time and message only."""
    from vllm_qualify.runs.home import make_home

    if "PREFECT_API_URL" not in os.environ and "PREFECT_PROFILE" not in os.environ:
        os.environ.setdefault("PREFECT_HOME", str(make_home() / "prefect"))
    # Its default of 20 s is too short on a busy host, since it first creates its database.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
    os.environ.setdefault("PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT", "%(asctime)s  %(message)s")
    os.environ.setdefault("PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT", "%(asctime)s  %(message)s")
    os.environ.setdefault("PREFECT_LOGGING_FORMATTERS_STANDARD_DATEFMT", "%H:%M:%S")
