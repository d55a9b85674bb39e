"""The flows of a fleet, which run automatically."""

from typing import Any

from prefect import flow, get_run_logger
from pydantic import Field

from tasks.fleet import start_on_fleet
from tasks.machine import alone
from tasks.releases import (
    approved_cells,
    check_claims,
    choice_of,
    emit_event,
    gpu_types_of,
    image_of,
    look_for_releases,
    sources,
)
from tasks.tend import lost_runs, restart_lost
from vllm_qualify.engine.provision import Launch
from vllm_qualify.errors import QualifyError
from vllm_qualify.plan.request import Against, Reuse
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.releases.known import Sighting
from vllm_qualify.releases.source import Source, VersionRule
from vllm_qualify.runs.home import default_store_url
from vllm_qualify.runs.request import REQUALIFICATION, QualifyHost, QualifyRelease


class Request(Frozen):
    """The settings that most flows of the fleet share."""

    store: str = Field(default_factory=default_store_url, description="s3://bucket/prefix or file:///folder.")


class WatchReleases(Request):
    """Where to look for new releases, and what to qualify with them."""

    recipes: list[str] = Field(min_length=1, description="The recipes that are qualified with every new release.")
    allow_code: bool = Field(
        default=False,
        description="Whether the recipes may run code or open their servers, unless they are the catalog's; read them first.",
    )
    gpu_types: list[str] = Field(min_length=1, description="On which GPU types; of those that a recipe has.")
    repository: str = Field(default="vllm/vllm-openai", description="The images' repository, in any registry.")
    rule: VersionRule = Field(default=VersionRule(), description="Which of its tags are releases.")
    backfill: bool = Field(default=False, description="Qualify the newest release too, though it was there before.")


class Requalify(Request):
    """Which approvals are renewed, and when."""

    recipes: list[str] = Field(min_length=1, description="The recipes whose approved cells are qualified again.")
    allow_code: bool = Field(
        default=False,
        description="Whether the recipes may run code or open their servers, unless they are the catalog's; read them first.",
    )
    renew_days: int = Field(default=14, ge=0, description="How many days before its end an approval is renewed.")
    reuse: Reuse = Field(
        default=Reuse(of="all", most_age_days=30), description="The runs whose finished stages are reused if nothing changed."
    )


class TendFleet(Frozen):
    """When a run counts as lost."""

    silent_s: float = Field(default=180, ge=10, description="How long a run may give no sign of life, in seconds.")
    confirm_s: float = Field(
        default=60,
        ge=0,
        description="How long such a run is listened for once more, in seconds: the server may have been away itself, and a"
        " heartbeat comes every 30 s.",
    )
    settled_s: float = Field(
        default=60,
        ge=0,
        description="How long a crashed run is left alone, in seconds: a worker reports a crash a second time, and would say"
        " so of a run that was started again in between. Such a run's next heartbeat, every 30 s, tells that it goes on.",
    )
    most_starts: int = Field(default=5, ge=1, description="How often a run is started before it is given up.")


@flow(name="watch-releases", flow_run_name="watch {request.repository}", validate_parameters=True)
def watch_releases(request: WatchReleases) -> None:
    """Emit one event for each new image digest and model revision; an automation then starts its qualification.

    A source that does not answer keeps nobody from the others. The flow fails when all were looked at.
    """
    failed: list[QualifyError] = []
    for recipe in request.recipes:
        for source in sources(recipe, request.repository, request.rule):
            try:
                _look_at(source, recipe, request)
            except QualifyError as error:
                get_run_logger().error(str(error))
                failed.append(error)
    if failed:
        raise failed[0]


def _look_at(source: Source, recipe: str, request: WatchReleases) -> None:
    for sighting in look_for_releases(source, request.store, request.backfill):
        emit_event(source, sighting, qualification(request, recipe, source, sighting), request.store)
    check_claims(source, request.store)


def qualification(request: WatchReleases, recipe: str, source: Source, sighting: Sighting) -> dict[str, Any]:
    """The request that qualifies a release, as JSON: a new image with the recipe's model, or a new model on the newest one."""
    return QualifyRelease(
        recipe=recipe,
        allow_code=request.allow_code,
        choice=choice_of(recipe, source, sighting),
        launch=Launch(launcher="docker", image=image_of(source, sighting, request.repository, request.rule)),
        store=request.store,
        against=Against(establish="none"),
        gpu_types=gpu_types_of(recipe, request.gpu_types),
        renew_days=0,
        release_key=sighting.key,
    ).model_dump(mode="json")


@flow(name="requalify", flow_run_name="requalify", validate_parameters=True)
def requalify(request: Requalify) -> None:
    """Qualify approved cells again if the approval ends soon, or if image, model, recipe, host or driver has changed.

    A host of the cell's GPU type checks each cell. Releases that wait for that GPU type go first.
    """
    for recipe in request.recipes:
        for gpu_type, choice, launch in approved_cells(recipe, request.store):
            again = QualifyHost(
                recipe=recipe,
                allow_code=request.allow_code,
                choice=choice,
                launch=launch,
                store=request.store,
                against=Against(establish="none"),
                reuse=request.reuse,
                renew_days=request.renew_days,
            )
            start_on_fleet(gpu_type, again.model_dump(mode="json"), REQUALIFICATION)


@flow(name="tend-fleet", flow_run_name="tend the fleet", validate_parameters=True)
def tend_fleet(request: TendFleet) -> None:
    """Start a run again if its process, its host or the server was lost; give it up after too many starts."""
    with alone("vllm-qualify-tend") as is_alone:
        for lost in lost_runs(request.silent_s, request.confirm_s, request.settled_s) if is_alone else []:
            restart_lost(lost, request.most_starts)
