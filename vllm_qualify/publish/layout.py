"""The layout of a store: its version, and for each run the cell that it is of, however many reports there are."""

import re
from contextlib import suppress
from typing import Literal, Self

from pydantic import ValidationError, model_validator

from vllm_qualify.errors import AlreadyExistsError, StoreError
from vllm_qualify.publish.store import MissingObjectError, Store, key_problem
from vllm_qualify.recipe.values import Frozen

LAYOUT_KEY = "layout.json"
JSON = "application/json"

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")


class Layout(Frozen):
    """`layout.json`: that the store has a key for each run and an index for each cell; written once."""

    layout_version: Literal[2] = 2


class Place(Frozen):
    """`runs/<run id>.json`: the cell that a run is of; written once, before the run's manifest."""

    run_id: str
    cell: str

    @model_validator(mode="after")
    def _is_a_place(self) -> Self:
        if key_problem(manifest_key(self.cell, self.run_id)):
            raise ValueError("it is not the place of a run")
        return self


def manifest_key(cell: str, run_id: str) -> str:
    return f"reports/{cell}/{run_id}/manifest.json"


def run_key(run_id: str) -> str:
    return f"runs/{run_id}.json"


def is_run_id(text: str) -> bool:
    return _RUN_ID.fullmatch(text) is not None


def prepare(store: Store) -> None:
    """Check a store before hours of work rely on it, and give a new one its layout. Raises as `Store.check` and `begin`."""
    store.check()
    begin(store)


def begin(store: Store) -> None:
    """Give a new store its layout. Raises StoreError if the store's layout is of another version."""
    if not check_layout(store):
        with suppress(AlreadyExistsError):
            store.put_new(LAYOUT_KEY, Layout().model_dump_json(indent=2).encode(), JSON)


def check_layout(store: Store) -> bool:
    """Whether the store has a layout: a new one has none. Raises StoreError if the layout is of another version."""
    try:
        Layout.model_validate_json(store.get(LAYOUT_KEY))
    except MissingObjectError:
        return False
    except ValidationError as error:
        remedy = "read it with a newer version of vllm-qualify"
        raise StoreError("the layout of the store is not known", remedy, store.locate(LAYOUT_KEY)) from error
    return True


def put_place(store: Store, run_id: str, cell: str) -> None:
    """Write where the store has a run. Raises AlreadyExistsError if a run of another cell has this id."""
    body = Place(run_id=run_id, cell=cell).model_dump_json(indent=2).encode()
    try:
        store.put_new(run_key(run_id), body, JSON)
    except AlreadyExistsError:
        if store.get(run_key(run_id)) != body:
            raise


def cell_of(store: Store, run_id: str) -> str:
    """The cell of a run whose publication began. Raises MissingObjectError, or StoreError if its place is not known."""
    if not is_run_id(run_id):
        raise no_run(store, run_id)
    key = run_key(run_id)
    untrusted = StoreError("this does not say where the run is", "find out who changed the store", store.locate(key))
    try:
        place = Place.model_validate_json(store.get(key))
    except MissingObjectError:
        check_layout(store)
        raise no_run(store, run_id) from None
    except ValidationError as error:
        raise untrusted from error
    if place.run_id != run_id:
        raise untrusted
    return place.cell


def no_run(store: Store, run_id: str) -> MissingObjectError:
    remedy = "check the id; a run without its manifest was not published whole"
    return MissingObjectError(f"no whole run '{run_id}'", remedy, store.url)
