"""Processes that share a store and take turns: one acts at a time, and a schedule says before each call who acts next."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Condition, Thread, current_thread
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.builders.wrapped_stores import Wrapped
from vllm_qualify.publish.store import Store


class Call(NamedTuple):
    """What a process is about to do. For a swap: its body, and how many swaps of this object there were when it was read."""

    process: int
    name: str
    key: str = ""
    body: bytes = b""
    seen: int = 0


class KilledError(BaseException):
    """The process ends here."""


class Turns:
    """Runs processes, each a function of its own view of the store. `choose` picks the call that is made next.

    `kills` says before which of its calls a process ends. Whoever sleeps waits for a turn instead.
    """

    def __init__(self, choose: "Choice", kills: Mapping[int, int] | None = None) -> None:
        self._choose, self._kills = choose, kills or {}
        self._changed = Condition()
        self._waiting: dict[int, Call] = {}
        self._running: set[int] = set()
        self._next: int | None = None
        self._made: Counter[int] = Counter()
        self.swaps: Counter[str] = Counter()
        # By process and key, lost ones too.
        self.tried: Counter[tuple[int, str]] = Counter()
        self.errors: list[BaseException] = []

    def run(self, stores: Sequence[Store], action: Callable[[int, Store], None]) -> None:
        """Each process has a store of its own, as it would in a process: a store may remember what it read."""
        self._running = set(range(len(stores)))
        threads = [
            Thread(target=self._process, args=(number, action, View(store, number, self)), name=f"turns-{number}", daemon=True)
            for number, store in enumerate(stores)
        ]
        with patch("time.sleep", self._sleep(time.sleep)):
            for thread in threads:
                thread.start()
            self._direct()
            for thread in threads:
                thread.join()
        if self.errors:
            raise self.errors[0]

    def _process(self, number: int, action: Callable[[int, Store], None], store: Store) -> None:
        try:
            action(number, store)
        except KilledError:
            pass
        except BaseException as error:  # a failed assertion too; `run` raises it
            self.errors.append(error)
        finally:
            with self._changed:
                self._running.remove(number)
                self._changed.notify_all()

    def _direct(self) -> None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._next is None and self._waiting.keys() == self._running)
                if not self._running:
                    return
                self._next = self._choose(self, [self._waiting[number] for number in sorted(self._waiting)]).process
                self._changed.notify_all()

    def wait(self, call: Call) -> None:
        """Return when the schedule says that this call is next. Raises KilledError if the process ends before it."""
        with self._changed:
            self._waiting[call.process] = call
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._next == call.process)
            del self._waiting[call.process]
            self._next = None
        self._made[call.process] += 1
        if self._made[call.process] == self._kills.get(call.process):
            raise KilledError

    def _sleep(self, really: Callable[[float], None]) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            _, _, number = current_thread().name.partition("turns-")
            self.wait(Call(int(number), "sleep")) if number else really(seconds)

        return sleep


Choice = Callable[[Turns, Sequence[Call]], Call]


class View(Wrapped):
    """A store as one process sees it: each call waits for its turn."""

    def __init__(self, store: Store, number: int, turns: Turns) -> None:
        super().__init__(store)
        self._number, self._turns, self._seen = number, turns, dict[str, int]()
        for name in ("get", "exists", "keys", "read"):
            setattr(self, name, self._in_turn(name))

    def _in_turn(self, name: str) -> Callable[[str], Any]:
        def call(key: str) -> Any:
            self._turns.wait(Call(self._number, name, key))
            if name == "read":
                self._seen[key] = self._turns.swaps[key]
            return getattr(self._store, name)(key)

        return call

    def put_new(self, key: str, body: bytes, content_type: str) -> None:
        self._turns.wait(Call(self._number, "put_new", key, body))
        super().put_new(key, body, content_type)

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        self._turns.wait(Call(self._number, "swap", key, body, self._seen.get(key, 0)))
        self._turns.tried[self._number, key] += 1
        super().swap(key, body, content_type, tag)
        self._turns.swaps[key] += 1
