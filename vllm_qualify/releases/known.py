"""The known releases of a source, and who handles them: each release is handled once, even if processes crash.

A release is recorded before its event is emitted. The event is emitted again until a run claims the release, so it is emitted
at least once. Only one of the runs that get the event can hold the claim, so the release is handled at most once.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Literal, TypeVar
from uuid import UUID, uuid5

from pydantic import ValidationError

from vllm_qualify.approval.layout import JSON, Line, Moment, canonical, readable, reason_of, sha256
from vllm_qualify.errors import AlreadyExistsError, StoreError
from vllm_qualify.publish.store import MissingObjectError, Store, retry_swap
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.releases.source import Available, Source

# Longer than an event needs to reach its consumer.
AGAIN_AFTER_S = 3600.0
_EVENTS = UUID("688d7bc1-2441-4f92-95af-cba67b216be0")
_KEY = re.compile(r"[0-9a-f]{64}")
M = TypeVar("M", bound=Frozen)


class Sighting(Frozen):
    """A seen release. `tags` are all tags that it has ever had. If `noted`, it existed before the source was watched."""

    key: str
    identity: str
    tags: list[str]
    seen_at: Moment
    emitted_at: Moment | None = None
    noted: bool = False

    @property
    def event_id(self) -> UUID:
        """The event's id. It is the same at each emission."""
        return uuid5(_EVENTS, self.key)

    def is_open(self, now: datetime, again_after_s: float) -> bool:
        """Whether it must be emitted, unless it is claimed."""
        return not self.noted and (self.emitted_at is None or (now - self.emitted_at).total_seconds() >= again_after_s)


class Known(Frozen):
    """The releases of one source, in the order in which they were seen. Nothing is ever removed, so no content comes twice."""

    known_version: Literal[1] = 1
    source: Source
    releases: list[Sighting] = []


class Claim(Frozen):
    """The claim on a release. `by` is the flow run that handles it."""

    claim_version: Literal[1] = 1
    by: Line
    at: Moment


def note_new(
    store: Store,
    source: Source,
    available: Sequence[Available],
    now: datetime,
    backfill: bool = False,
    again_after_s: float = AGAIN_AFTER_S,
) -> list[Sighting]:
    """Record the new ones among the available releases, and return those that must be emitted now. Raises StoreError.

    `available` has the newest release first. A release must be emitted if it is not claimed, and was never emitted or last
    emitted at least `again_after_s` ago. The first look notes all releases without emitting them. `backfill` makes
    the newest release due, at any look.
    """

    def with_sightings(before: Known | None) -> Known:
        seen = {each.key: each for each in before.releases} if before else {}
        for each in reversed(available):
            key = release_key(source, each.identity)
            new = Sighting(key=key, identity=each.identity, tags=[], seen_at=now, noted=before is None)
            old = seen.get(key, new)
            seen[key] = old.model_copy(update={"tags": list(dict.fromkeys([*old.tags, *each.tags]))})
        if backfill and available:
            newest = release_key(source, available[0].identity)
            seen[newest] = seen[newest].model_copy(update={"noted": False})
        return Known(source=source, releases=list(seen.values()))

    known = _change_known(store, source, with_sightings)
    return [each for each in known.releases if each.is_open(now, again_after_s) and not store.exists(_claim_key(each.key))]


def record_emission(store: Store, source: Source, key: str, now: datetime) -> None:
    """Record that a release was emitted. Raises StoreError, and ValueError if it was never seen, a defect of the caller."""

    def with_emission(before: Known | None) -> Known:
        if before is None or key not in [each.key for each in before.releases]:
            raise ValueError(f"{key!r} was never seen")
        # The latest time counts, in whatever order the emissions are recorded.
        releases = [
            each.model_copy(update={"emitted_at": max(now, each.emitted_at or now)}) if each.key == key else each
            for each in before.releases
        ]
        return before.model_copy(update={"releases": releases})

    _change_known(store, source, with_emission)


def taken_untold(store: Store, source: Source) -> Iterator[tuple[Sighting, Claim]]:
    """The releases that somebody claimed though no event of them was ever emitted, each with the claim. Raises StoreError.

    It may be that the process crashed between the two. Or somebody wrote the claim, so that nobody handles the release.
    """
    try:
        known = _parse(Known, store.get(known_key(source)), store.locate(known_key(source)))
    except MissingObjectError:
        return
    for sighting in known.releases:
        if not sighting.noted and sighting.emitted_at is None and store.exists(_claim_key(sighting.key)):
            yield sighting, read_claim(store, sighting.key)


def not_a_run(store: Store, key: str, held: Claim) -> StoreError:
    """What to say of a claim by something that is no flow run of this server."""
    problem = f"the release is claimed by '{held.by}', which is no flow run of this server: nobody handles it"
    return StoreError(problem, "find out who wrote this claim, delete it, and look again", store.locate(_claim_key(key)))


def claim(store: Store, key: str, by: str, now: datetime) -> bool:
    """Claim the release for `by`. Return whether `by` holds the claim: only one can, and a repeated call returns the same."""
    try:
        store.put_new(_claim_key(key), readable(Claim(by=by, at=now).model_dump(mode="json")), JSON)
    except AlreadyExistsError:
        return read_claim(store, key).by == by
    return True


def read_claim(store: Store, key: str) -> Claim:
    """The claim on a release. Raises MissingObjectError while it is not claimed."""
    return _parse(Claim, store.get(_claim_key(key)), store.locate(_claim_key(key)))


def release_key(source: Source, identity: str) -> str:
    """The key of a release. It depends on the digest or commit, not on tag or branch: a tag that moves is a new release."""
    return sha256(canonical([source.kind, source.name, identity, source.recipe]))


def known_key(source: Source) -> str:
    return f"releases/{source.slug}.json"


def _claim_key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not the key of a release")
    return f"releases/claims/{key}.json"


def _change_known(store: Store, source: Source, change: Callable[[Known | None], Known]) -> Known:
    key = known_key(source)

    def attempt() -> Known:
        before, tag = None, None
        with suppress(MissingObjectError):
            body, tag = store.read(key)
            before = _parse(Known, body, store.locate(key))
        after = change(before)
        if after != before:
            store.swap(key, readable(after.model_dump(mode="json")), JSON, tag)
        return after

    return retry_swap(attempt, "what is known", "look again", store.locate(key))


def _parse(model: type[M], body: bytes, place: str) -> M:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        remedy = "read it with the version that wrote it, or restore it from an earlier version of the object"
        raise StoreError(f"this is not as it was written: {reason_of(error)}", remedy, place) from error
