"""Approve what recipes approve themselves, as soon as it is published."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_qualify.approver.decisions import Desk
from vllm_qualify.errors import QualifyError, StoreError

LOOK_EVERY_S = 30.0

logger = logging.getLogger(__name__)


@contextmanager
def watching(desk: Desk, look_every_s: float) -> Iterator[None]:
    """Look for reports to approve within the block, in a thread of its own."""
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(desk, look_every_s, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(desk: Desk, look_every_s: float, ended: threading.Event) -> None:
    seen: set[tuple[str, str]] = set()
    while not ended.wait(look_every_s):
        seen |= approve_new(desk, seen)


def approve_new(desk: Desk, seen: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Approve each report that waits, was not seen before, and is approved by its recipe. Returns those that are settled.

    While the store does not answer a report is not settled: it is looked at again.
    """
    settled: set[tuple[str, str]] = set()
    try:
        waiting = desk.waiting()
    except StoreError as error:
        logger.warning("the store was not looked at: %s", error)
        return settled
    for cell, run_id in waiting:
        if (cell, run_id) in seen:
            continue
        try:
            logger.info(desk.approve_automatically(cell, run_id))
        except QualifyError as error:
            logger.warning("%s: run %s is not approved: %s", cell, run_id, error)
            if error.retry:
                continue
        settled.add((cell, run_id))
    return settled
