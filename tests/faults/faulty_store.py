"""A store that fails where a schedule says: it refuses, loses its answer, ends the process, or lets others act in between."""

import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, cast

from vllm_qualify.errors import QualifyError, StoreBusyError
from vllm_qualify.publish.store import PrunableStore

T = TypeVar("T")
# `refused` and `lost` are what the network does: the store did not get the request, or its answer did not arrive. With
# `dies before` and `dies after` the process is killed around the request, without any cleaning up.
Fault = Literal["refused", "lost", "dies before", "dies after"]
KILLED = 137
PART = 250


def parts_and_size(usual: int) -> tuple[int, int]:
    """How many random schedules a test takes: in how many parts, so that each core can have one, and how many each part has.

    `make chaos` sets a number; else it is the usual one.
    """
    schedules = int(os.environ.get("VLLM_QUALIFY_CHAOS", usual))
    parts = max(1, schedules // PART)
    return parts, schedules // parts


def ends_well(work: Callable[[], object], step: object) -> bool:
    """Whether the work ends without an error. An error must say what is wrong, and the remedy."""
    try:
        work()
    except QualifyError as error:
        is_explained = bool(error.problem and error.remedy)
    else:
        return True
    assert is_explained, step
    return False


def child_ends_well(work: Callable[[], object], step: object) -> bool:
    """The same of a child process, so that it can be killed; then nothing is known but its end."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if ends_well(work, step) else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1, KILLED), step
    return code == 0


class _FaultyStore:
    def __init__(self, store: PrunableStore, faults: Mapping[int, Fault], meanwhile: Mapping[int, Callable[[], None]]) -> None:
        self._store, self._faults, self._meanwhile, self._calls = store, faults, meanwhile, 0

    def __getattr__(self, name: str) -> Any:
        passed_on = getattr(self._store, name)
        if name in ("url", "locate"):
            return passed_on
        if name == "keys":
            # A fault is one of the whole list.
            return lambda prefix: self._call(lambda: iter(list(passed_on(prefix))))
        return lambda *arguments: self._call(lambda: passed_on(*arguments))

    def _call(self, request: Callable[[], T]) -> T:
        number, self._calls = self._calls, self._calls + 1
        if others := self._meanwhile.get(number):
            others()
        fault = self._faults.get(number)
        if fault == "dies before":
            os._exit(KILLED)
        if fault == "refused":
            raise StoreBusyError("the store did not answer", "try again later", self._store.url)
        answer = request()
        if fault == "dies after":
            os._exit(KILLED)
        if fault == "lost":
            raise StoreBusyError("the store's answer was lost", "try again later", self._store.url)
        return answer


def faulty(
    store: PrunableStore, faults: Iterable[tuple[int, Fault]], meanwhile: Mapping[int, Callable[[], None]] | None = None
) -> PrunableStore:
    """Passes calls on. The call with the number of a fault fails with it; before that of `meanwhile`, others act."""
    return cast("PrunableStore", _FaultyStore(store, dict(faults), meanwhile or {}))
