"""Each release is handled once: whoever looks, in whatever order, and wherever it crashes."""

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_qualify.errors import StoreBusyError, StoreError
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.store import MOST_SWAPS, MissingObjectError, Store
from vllm_qualify.releases.known import (
    AGAIN_AFTER_S,
    Known,
    Sighting,
    claim,
    known_key,
    note_new,
    read_claim,
    record_emission,
    release_key,
)
from vllm_qualify.releases.source import Available, ImageSource, ModelSource, Source, VersionRule

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
AGAIN = NOW + timedelta(seconds=AGAIN_AFTER_S)
SOURCE = ImageSource(name="vllm/vllm-openai", recipe="llama")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def at(*numbers: int) -> list[Available]:
    """Releases of these numbers, which are given newest first."""
    return [Available(identity=digest(number), tags=[f"v0.{number}.0"]) for number in numbers]


def due(store: Store, available: list[Available], now: datetime = NOW, backfill: bool = False) -> list[str]:
    return [sighting.tags[0] for sighting in note_new(store, SOURCE, available, now, backfill)]


def known(store: Store) -> Known:
    return Known.model_validate_json(store.get(known_key(SOURCE)))


@pytest.fixture
def sighting(store: Store) -> Sighting:
    """The only release that appeared since the first look."""
    note_new(store, SOURCE, [], NOW)
    (seen,) = note_new(store, SOURCE, at(1), NOW)
    return seen


def test_the_first_look_only_notes(store: Store) -> None:
    assert due(store, at(2, 1)) == []
    assert [(each.tags, each.noted, each.seen_at) for each in known(store).releases] == [
        (["v0.1.0"], True, NOW),
        (["v0.2.0"], True, NOW),
    ]
    tag = store.read(known_key(SOURCE)).tag
    assert due(store, at(2, 1), AGAIN) == []
    assert store.read(known_key(SOURCE)).tag == tag, "nothing is written where nothing changed"


@pytest.mark.parametrize(
    ("before", "after", "backfill", "expected"),
    [
        pytest.param(at(1), at(3, 2, 1), False, ["v0.2.0", "v0.3.0"], id="what is new, the oldest first"),
        pytest.param([], at(1), False, ["v0.1.0"], id="new in a source that was empty"),
        pytest.param(None, at(3, 2, 1), True, ["v0.3.0"], id="a backfill at the first look"),
        pytest.param(at(2, 1), at(2, 1), True, ["v0.2.0"], id="a backfill of what was noted"),
    ],
)
def test_what_is_due(
    before: list[Available] | None, after: list[Available], backfill: bool, expected: list[str], store: Store
) -> None:
    if before is not None:
        note_new(store, SOURCE, before, NOW)
    assert due(store, after, backfill=backfill) == expected
    assert due(store, [], backfill=backfill) == expected


def test_what_was_emitted_is_due_again_only_later_and_what_was_claimed_never(store: Store, sighting: Sighting) -> None:
    record_emission(store, SOURCE, sighting.key, NOW)
    assert due(store, at(1), AGAIN - timedelta(seconds=1)) == []
    assert due(store, at(1), AGAIN) == ["v0.1.0"]
    assert claim(store, sighting.key, "run-1", NOW)
    assert due(store, at(1), AGAIN) == due(store, at(1), AGAIN, backfill=True) == []


@pytest.mark.usefixtures("sighting")
def test_a_release_whose_tag_moved_on_before_it_was_emitted_is_still_due(store: Store) -> None:
    assert due(store, [Available(identity=digest(9), tags=["v0.1.0"])]) == ["v0.1.0", "v0.1.0"]


def test_a_tag_that_moves_is_a_new_release_and_back_is_none(store: Store) -> None:
    first, second = (Available(identity=digest(number), tags=["v0.1.0"]) for number in (1, 2))
    note_new(store, SOURCE, [first], NOW)
    (moved,) = note_new(store, SOURCE, [second], NOW)
    assert moved.identity == second.identity
    assert note_new(store, SOURCE, [first], NOW) == [moved]


def test_tags_are_collected(store: Store) -> None:
    for tags in (["v0.1.0"], ["0.1.0", "v0.1.0"], ["0.1.0"]):
        note_new(store, SOURCE, [Available(identity=digest(1), tags=tags)], NOW)
    assert [each.tags for each in known(store).releases] == [["v0.1.0", "0.1.0"]]


def test_the_last_emission_counts_whoever_records_it_last(store: Store, sighting: Sighting) -> None:
    for when in (AGAIN, NOW):
        record_emission(store, SOURCE, sighting.key, when)
    assert known(store).releases[0].emitted_at == AGAIN
    with pytest.raises(ValueError, match="never seen"):
        record_emission(store, SOURCE, release_key(SOURCE, digest(2)), NOW)


# --- names


def test_a_release_has_one_key_and_one_event_whatever_its_tags() -> None:
    """They never change: in another version of this code everything would be new."""
    key = release_key(SOURCE, digest(1))
    assert key == "4ff7ad85e3c1636eb1c836805c7b5c5cadd23a25eec96ef0c3a1dc80a81aded6"
    events = {Sighting(key=key, identity=digest(1), tags=[tag], seen_at=NOW).event_id for tag in ("v1", "v2")}
    assert events == {UUID("a2cc4f62-4aea-55b6-888f-5858cdf0d860")}
    assert known_key(SOURCE) == "releases/llama-image-vllm-vllm-openai-1598f824d04f.json"


@pytest.mark.parametrize(
    ("other", "same_releases"),
    [
        (SOURCE.model_copy(update={"name": "vllm/vllm-openai-cpu"}), False),
        (SOURCE.model_copy(update={"recipe": "qwen"}), False),
        (ModelSource(name="vllm/vllm-openai", recipe="llama"), False),
        (SOURCE.model_copy(update={"rule": VersionRule(versions=">=0.10")}), True),
    ],
    ids=["repository", "recipe", "kind", "rule"],
)
def test_another_source_has_another_key_and_another_rule_alone_the_same_releases(other: Source, same_releases: bool) -> None:
    assert known_key(other) != known_key(SOURCE)
    assert (release_key(other, digest(1)) == release_key(SOURCE, digest(1))) is same_releases


NAMES = st.from_regex(r"[A-Za-z0-9./:_-]{1,200}", fullmatch=True)


@given(name=NAMES, revision=st.none() | st.text(min_size=1))
def test_every_source_has_a_key_that_stores_take(name: str, revision: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryStore(Path(folder))
        for source in (ImageSource(name=name, recipe="llama"), ModelSource(name=name, recipe="llama", revision=revision)):
            assert not store.exists(known_key(source))


# --- claims


def test_one_run_gets_a_claim_and_keeps_it(store: Store) -> None:
    key = release_key(SOURCE, digest(1))
    with pytest.raises(MissingObjectError):
        read_claim(store, key)
    assert [claim(store, key, by, NOW) for by in ("run-1", "run-2", "run-1")] == [True, False, True]
    assert (read_claim(store, key).by, read_claim(store, key).at) == ("run-1", NOW)
    other = release_key(SOURCE, digest(2))
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda number: claim(store, other, f"run-{number}", NOW), range(16)))
    assert Counter(got) == {True: 1, False: 15}


@pytest.mark.parametrize("key", ["", "../x", "a/b", "A" * 64, "0" * 63])
def test_a_claim_of_what_is_no_key_is_a_defect(key: str, store: Store) -> None:
    with pytest.raises(ValueError, match="not the key of a release"):
        claim(store, key, "run-1", NOW)


# --- records that cannot be read


@pytest.mark.parametrize("body", [b"", b"{}", b'{"known_version": 2}', b"[]"])
def test_a_record_of_another_version_is_left_alone(body: bytes, store: Store) -> None:
    store.swap(known_key(SOURCE), body, "application/json", None)
    with pytest.raises(StoreError, match="not as it was written"):
        note_new(store, SOURCE, at(1), NOW)
    assert store.get(known_key(SOURCE)) == body


def test_a_record_is_read_as_it_was_written(store: Store) -> None:
    source = ModelSource(name="org/tiny", recipe="llama", revision="main")
    note_new(store, source, [Available(identity="9" * 40, tags=["main"])], NOW)
    (key,) = store.keys("releases/llama-model-org-tiny-")
    written = json.loads(store.get(key))
    assert written["source"] == {"kind": "model", "name": "org/tiny", "recipe": "llama", "revision": "main"}
    key, seen = release_key(ModelSource(name="org/tiny", recipe="llama"), "9" * 40), "2026-01-31T12:00:00Z"
    release = {"key": key, "identity": "9" * 40, "tags": ["main"], "seen_at": seen, "emitted_at": None, "noted": True}
    assert written["releases"] == [release]


# --- several at once


def test_of_many_lookers_at_once_nothing_is_lost(store: Store) -> None:
    note_new(store, SOURCE, [], NOW)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: note_new(store, SOURCE, at(number), NOW), range(16)))
    assert sorted(due(store, [])) == sorted(f"v0.{number}.0" for number in range(16))
    assert len(known(store).releases) == 16


def test_of_two_first_looks_the_later_one_is_no_first(store: Store, tmp_path: Path) -> None:
    """The second one reads before the first has written: what only it has seen is new."""
    hooked = Hooked(tmp_path, before_swap=lambda: note_new(store, SOURCE, at(1), NOW))
    assert [each.tags for each in note_new(hooked, SOURCE, at(2, 1), NOW)] == [["v0.2.0"]]


def test_a_record_that_changes_all_the_time_gives_up(store: Store, tmp_path: Path) -> None:
    others = iter(range(1, MOST_SWAPS + 2))
    hooked = Hooked(tmp_path, before_swap=lambda: note_new(store, SOURCE, at(next(others)), NOW), always=True)
    with pytest.raises(StoreBusyError, match="all the time"):
        note_new(hooked, SOURCE, at(0), NOW)


class Hooked(DirectoryStore):
    """A store in which somebody else does something between a read and the swap that follows."""

    def __init__(self, directory: Path, before_swap: Callable[[], object], always: bool = False) -> None:
        super().__init__(directory)
        self._hook, self._always, self._done = before_swap, always, False

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        if self._always or not self._done:
            self._done = True
            self._hook()
        super().swap(key, body, content_type, tag)


# --- crashes, anywhere


class CrashError(BaseException):
    """The process is gone: nothing of it goes on, and nothing in it notices."""


@dataclass
class World:
    """Releases that appear, watchers that look and emit, events that wait, runs that take and handle them."""

    folder: Path
    now: datetime = NOW
    released: list[int] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    handled: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    runs: int = 0
    crash_in: int | None = None
    meanwhile: list[str] = field(default_factory=list)

    def tick(self) -> None:
        """Before and after all that lasts, where a process may die."""
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0:
                raise CrashError

    @contextmanager
    def lasting(self) -> Iterator[None]:
        self.tick()
        yield
        self.tick()

    def release(self) -> None:
        self.released.append(len(self.released))

    def watch(self) -> None:
        shaky = Shaky(self)
        for sighting in note_new(shaky, SOURCE, at(*reversed(self.released)), self.now):
            with self.lasting():
                self.events.append(sighting.key)
            record_emission(shaky, SOURCE, sighting.key, self.now)

    def consume(self, run: str = "") -> None:
        """One run takes the event that waits longest; an event is delivered again until its run has ended."""
        if not self.events:
            return
        self.runs += 1
        run, key = run or f"run-{self.runs}", self.events[0]
        try:
            self._take(key, run)
        except CrashError:
            self.crash_in = None
            # The flow run is started again under its own name.
            self._take(key, run)
        self.events.pop(0)

    def _take(self, key: str, run: str) -> None:
        if claim(Shaky(self), key, run, self.now):
            self.handled[key].append(run)
            self.tick()

    def do(self, step: str, crash_in: int | None = None) -> None:
        self.crash_in = crash_in
        with suppress(CrashError):
            getattr(self, step)()
        self.crash_in = None

    def wait(self) -> None:
        self.now += timedelta(seconds=AGAIN_AFTER_S)


class Shaky(DirectoryStore):
    """The world's store: a process may die before and after a write, and others act before a swap."""

    def __init__(self, world: "World") -> None:
        super().__init__(world.folder)
        self._world = world

    def put_new(self, key: str, body: bytes, content_type: str) -> None:
        with self._world.lasting():
            super().put_new(key, body, content_type)

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        if self._world.meanwhile:
            others_crash, self._world.crash_in = self._world.crash_in, None
            getattr(self._world, self._world.meanwhile.pop())()
            self._world.crash_in = others_crash
        with self._world.lasting():
            super().swap(key, body, content_type, tag)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["release", "watch", "watch", "consume", "wait"]),
        st.none() | st.integers(0, 8),
        st.lists(st.sampled_from(["release", "watch", "consume", "wait"]), max_size=3),
    ),
    max_size=14,
)


@pytest.mark.thorough
@settings(max_examples=150)
@given(before=st.integers(0, 2), steps=STEPS)
def test_every_release_is_handled_once(before: int, steps: list[tuple[str, int | None, list[str]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for _ in range(before):
            world.release()
        note_new(DirectoryStore(Path(folder)), SOURCE, at(*reversed(world.released)), NOW)
        for step, crash_in, meanwhile in steps:
            world.meanwhile = meanwhile
            world.do(step, crash_in)
        world.meanwhile = []
        world.wait()
        world.watch()
        while world.events:
            world.consume()
        world.wait()
        world.watch()
        assert world.events == []
        expected = {release_key(SOURCE, digest(number)) for number in world.released[before:]}
        assert set(world.handled) == expected
        assert all(len(set(runs)) == 1 for runs in world.handled.values())


def test_without_a_claim_a_crash_would_have_it_handled_twice(store: Store, tmp_path: Path) -> None:
    """That the crashes above are real: one between the emission and its record emits again."""
    world = World(tmp_path)
    note_new(store, SOURCE, [], NOW)
    world.release()
    world.do("watch", crash_in=3)
    world.do("watch")
    assert len(world.events) == 2
    world.consume()
    world.consume()
    assert [len(runs) for runs in world.handled.values()] == [1]
