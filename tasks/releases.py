"""Find what the fleet qualifies: new releases, and approved cells, which it qualifies again.

Each release is reported as a Prefect event. An automation then starts its qualification.
"""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from prefect import get_client, get_run_logger
from prefect.events import Event, Resource
from prefect.exceptions import ObjectNotFound

from tasks.step import step
from vllm_qualify.approval.pointer import read_pointer
from vllm_qualify.approval.published import read_run
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.provision import Launch
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.choice import Choice
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.releases import known
from vllm_qualify.releases.known import Sighting
from vllm_qualify.releases.registry import available_at, releases_in
from vllm_qualify.releases.source import ImageSource, ModelSource, Source, VersionRule

# The event's name; the automation of deployments/setup.py matches it.
NEW_RELEASE = "vllm-qualify.release.new"


@step("sources", "sources of {recipe}")
def sources(recipe: str, repository: str, rule: VersionRule) -> list[Source]:
    """Where a recipe's releases appear: the engine's images, and the recipe's models on the hub. Raises CallerError."""
    loaded = load_recipe(recipe).recipe
    hub = {(variant.model, variant.revision) for variant in loaded.variants.values() if not variant.is_local}
    models = [ModelSource(name=model, revision=revision, recipe=loaded.name) for model, revision in sorted(hub, key=str)]
    return [ImageSource(name=repository, rule=rule, recipe=loaded.name), *models]


def choice_of(recipe: str, source: Source, sighting: Sighting) -> Choice:
    """For a new model revision: the variant that serves the model, at that revision. For a new image: the recipe's defaults."""
    if isinstance(source, ImageSource):
        return Choice()
    followed = (source.name, source.revision)
    variants = load_recipe(recipe).recipe.variants.items()
    serving = next(name for name, variant in variants if (variant.model, variant.revision) == followed)
    return Choice(variant=serving, revision=sighting.identity)


def gpu_types_of(recipe: str, wanted: list[str]) -> list[str]:
    """Those of the wanted GPU types that a recipe has. Raises CallerError if there are none."""
    has = load_recipe(recipe).recipe.gpu_types
    gpu_types = [gpu_type for gpu_type in wanted if gpu_type in has]
    if not gpu_types:
        raise CallerError(f"the recipe {recipe} has none of {', '.join(wanted)}", f"it has: {', '.join(has)}", "gpu_types")
    return gpu_types


def image_of(source: Source, sighting: Sighting, repository: str, rule: VersionRule) -> str:
    """The image by tag and digest: the new one, or for a new model the newest one. Raises CallerError, HostError."""
    if isinstance(source, ImageSource):
        return f"{source.name}:{sighting.tags[0]}@{sighting.identity}"
    releases = releases_in(repository, rule)
    if not releases:
        raise CallerError(f"{repository} has no image to serve the new model with", "see its tags and the rule", "repository")
    return f"{repository}:{releases[0].tags[0]}@{releases[0].identity}"


@step("look", "look at {source.name}")
def look_for_releases(source: Source, store: str, backfill: bool) -> list[Sighting]:
    """The releases of the source that have no event yet. Raises CallerError, HostError, StoreError."""
    releases = available_at(source)
    due = known.note_new(open_store(store), source, releases, datetime.now(UTC), backfill)
    get_run_logger().info(f"{source.name} has {len(releases)} releases, {len(due)} of them new")
    return due


@step("tell")
def emit_event(source: Source, sighting: Sighting, request: dict[str, Any], store: str) -> None:
    """Emit the event of a release, with the request that qualifies it; then note in the store that it was emitted.

    The server has the event when this returns. After a crash before the note, the event is emitted again. Only one of the
    runs that it starts claims the release. Raises StoreError if the note cannot be written.
    """
    named = {"prefect.resource.id": f"vllm-qualify.release.{sighting.key}", "prefect.resource.name": source.name}
    event = Event(
        id=sighting.event_id,
        event=NEW_RELEASE,
        occurred=datetime.now(UTC),
        resource=Resource(named),
        payload={"request": request, "source": source.name, "identity": sighting.identity, "tags": sighting.tags},
    )
    with get_client(sync_client=True) as client:
        client.request("POST", "/events", json=[event.model_dump(mode="json")])
    known.record_emission(open_store(store), source, sighting.key, datetime.now(UTC))
    get_run_logger().info(f"emitted: {source.name} {' '.join(sighting.tags)} {sighting.identity}")


@step("claims")
def check_claims(source: Source, store: str) -> None:
    """Raises StoreError if a release that was never told is claimed by no flow run of this server."""
    opened = open_store(store)
    for sighting, held in known.taken_untold(opened, source):
        if not is_flow_run(held.by):
            raise known.not_a_run(opened, sighting.key, held)


def is_flow_run(by: str) -> bool:
    """Whether Prefect's server has a flow run of this id."""
    try:
        with get_client(sync_client=True) as client:
            return client.read_flow_run(UUID(by)) is not None
    except (ValueError, ObjectNotFound):
        return False


@step("approved cells", "approved cells of {recipe}")
def approved_cells(recipe: str, store: str) -> list[tuple[str, Choice, Launch]]:
    """GPU type, choice and launch of each cell of a recipe that was approved and not revoked since.

    Raises CallerError if there is no such recipe, and TamperedError, StoreError if the store cannot be trusted or read.
    """
    opened, folder = open_store(store), f"approvals/{load_recipe(recipe).recipe.name}/"
    cells = []
    for key in [key for key in opened.keys(folder) if key.endswith("/pointer.json")]:
        cell = key.removeprefix("approvals/").removesuffix("/pointer.json")
        pointer = read_pointer(opened, cell)
        if pointer is None or pointer.last.revoked:
            get_run_logger().info(f"{cell} was revoked: a person qualifies it again")
            continue
        plan = read_run(opened, cell, pointer.last.run_id).report.plan
        choice = Choice(gpu_type=plan.cell.gpu_type, variant=plan.cell.variant, profile=plan.cell.profile)
        # An image by its tag, if it had one. The tag may name a newer image by now.
        images = {"image": plan.server.engine, "client_image": plan.client_image}
        named = {name: image.reference for name, image in images.items() if isinstance(image, EngineImage)}
        cells.append((plan.cell.gpu_type, choice, Launch(launcher=plan.server.engine.launcher, **named)))
    return cells
