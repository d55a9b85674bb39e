"""The qualification of a release: on this machine, or on the fleet's hosts."""

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from pydantic import BaseModel, ConfigDict, Field

from tasks.approve import approve_automatically, await_decision, check_signing_key
from tasks.check import asking, check_code, check_request, fetch_models, find_baselines, plan, provide_engines
from tasks.decide import judge, publish
from tasks.fleet import RELEASE, claim, pin_revision, resolve, run_on_fleet
from tasks.machine import machine
from tasks.measure import (
    answered,
    bring_baseline,
    check_contract,
    fit,
    measure_accuracy,
    measure_likelihood,
    measure_load,
    measure_soak,
    measure_speculation,
    measure_speculation_in_turn,
    measure_sweep,
    serve_cells,
    smoke_test,
)
from tasks.orchestrator import provide_server
from tasks.outcome import nothing_to_do, outcome_state, was_qualified
from tasks.reuse import begin_attempt, published_before, reuse_finished, still_to_do
from tasks.starts import measure_starts
from vllm_qualify.drift.question import Question
from vllm_qualify.engine.launch import Launch
from vllm_qualify.evidence.serving import Served
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import sharing_a_server
from vllm_qualify.plan.choice import Choice
from vllm_qualify.publish.kept import Reuse
from vllm_qualify.runs.baseline import Against
from vllm_qualify.runs.failed import keeping_evidence, publishing
from vllm_qualify.runs.folder import Run, lacking, start_run
from vllm_qualify.runs.home import default_store_url
from vllm_qualify.runs.publishing import Published


class QualifyHost(BaseModel):
    """What to qualify on one machine, and where the results go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str = Field(description="A recipe of the catalog (reference) or the path of a YAML file.")
    allow_code: bool = Field(
        default=False, description="Whether the recipe may run code, unless it is the catalog's; read it first."
    )
    choice: Choice = Field(
        default=Choice(), description="Which of the recipe's cells; by default all on this machine's GPU type."
    )
    launch: Launch = Field(default=Launch(), description="How the server is started; for docker, from which image.")
    store: str = Field(default_factory=default_store_url, description="s3://bucket/prefix or file:///folder.")
    against: Against = Field(default=Against(), description="What the cells are compared with.")
    port: int | None = Field(default=None, ge=1, le=65535, description="The server's port; by default a free one.")
    price_usd_gpu_hour: float | None = Field(default=None, gt=0, description="What a GPU costs an hour; replaces the recipe's.")
    time_budget_s: float | None = Field(
        default=None, gt=0, description="How long each cell's load may take; replaces the recipe's. See load.time_budget_s."
    )
    reuse: Reuse = Field(
        default=Reuse(),
        description="The runs whose finished stages are reused if the inputs are the same: none, unfinished ones, or all.",
    )
    renew_days: int | None = Field(
        default=None,
        ge=0,
        description="Leave out cells whose approval is of the same inputs and holds for more than so many days."
        " Empty qualifies all.",
    )


class QualifyRelease(QualifyHost):
    """What to qualify, on which GPU types, and who decides."""

    gpu_types: list[str] = Field(
        default=[], description="On the fleet: the GPU types whose hosts qualify it. Empty qualifies on this machine."
    )
    queue: str = Field(default=RELEASE, description="On the fleet: the work queue. A release goes before a requalification.")
    release_key: str | None = Field(
        default=None, description="Of the event that started this: another run with the same key does nothing."
    )
    decision_timeout_s: float = Field(
        default=0,
        ge=0,
        description="On this machine: how long to wait for a person's decision about each report that passed and is not"
        " approved automatically. It is made with `vllm-qualify approve` or at the approver. 0 does not wait.",
    )


@flow(name="qualify-release", flow_run_name="qualify {request.recipe}", validate_parameters=True)
def qualify_release(request: QualifyRelease) -> State[list[Published]]:
    """Qualify every chosen cell of a recipe; on the fleet, each GPU type on a host of its own."""
    check_signing_key()
    if not request.gpu_types:
        return outcome_state([decided(published, request) for published in qualify_here(request)])
    check_code(request.recipe, request.allow_code)
    if not claim(request.store, request.release_key):
        return nothing_to_do("another flow run handles this release")
    pinned = request.model_copy(update={"launch": resolve(request.launch)})
    return run_on_fleet({gpu_type: on_host(pinned, gpu_type) for gpu_type in request.gpu_types}, request.queue, request.store)


def qualified(request: QualifyRelease) -> list[Published]:
    """The reports of `qualify_release`, whatever their verdicts. Raises the error that stopped the flow."""
    provide_server()
    # Prefect's types do not allow for a flow that returns its own final state.
    state: Any = qualify_release(request, return_state=True)
    published: list[Published] = state.result(raise_on_failure=not was_qualified(state))
    return published


def on_host(request: QualifyRelease, gpu_type: str) -> dict[str, Any]:
    """The request for a host of this GPU type, as JSON."""
    choice = pin_revision(request.recipe, request.choice.model_copy(update={"gpu_type": gpu_type}))
    asked = {name: getattr(request, name) for name in QualifyHost.model_fields} | {"choice": choice}
    return QualifyHost(**asked).model_dump(mode="json")


@flow(name="qualify-host", flow_run_name="qualify {request.recipe} on {request.choice.gpu_type}", validate_parameters=True)
def qualify_host(request: QualifyHost) -> State[list[Published]]:
    """Qualify the chosen cells on this machine; the run's final state gives their outcomes."""
    check_signing_key()
    return outcome_state(qualify_here(request))


def qualify_here(request: QualifyHost) -> list[Published]:
    """Qualify all chosen cells; cells with the same server share one.

    Cells that an earlier start of this flow run published are not qualified again.
    """
    engines = check_request(request.recipe, request.choice, request.launch, request.store, request.allow_code)
    pulled_s = provide_engines(engines)
    replaced = (request.price_usd_gpu_hour, request.time_budget_s)
    plans = plan(request.recipe, request.choice, engines, pulled_s, *replaced, request.allow_code)
    published = [approve_automatically(each, request.store) for each in published_before(plans, request.store)]
    to_qualify = still_to_do(plans, published, request.store, request.renew_days)
    to_qualify = find_baselines(to_qualify, request.store, request.against)
    fetch_models(to_qualify)
    with asking(to_qualify) as question:
        begin_attempt(to_qualify, request.store)
        for cells in sharing_a_server(to_qualify):
            published += [approve_automatically(each, request.store) for each in qualify_cells(cells, request, question)]
    return published


def qualify_cells(plans: list[CellPlan], request: QualifyHost, question: Question) -> list[Published]:
    """Serve, check, measure, judge and publish cells of one server. A failed gate is a verdict, not an exception.

    The drift check of the recipe runs while the first server starts. Nothing is measured before the engine accepts the recipe.

    This is not a flow: to begin and end one takes as many requests to Prefect's server as all tasks of a cell.
    """
    first = plans[0]
    with machine(f"run {first.run_id}", first.server.engine.launcher):
        runs = [start_run(cell) for cell in plans]
        with keeping_evidence(runs):
            runs = [fit_and_reuse(run, request, question) for run in runs]
            measure_all(runs, request, question)
    with keeping_evidence(runs):
        for run in runs:
            judge(run)
    with publishing(runs, request.store) as published:
        for run in runs:
            published.append(publish(run, request.store))
    return published


def fit_and_reuse(run: Run, request: QualifyHost, question: Question) -> Run:
    """The run, fitted if it needs a fit, with the stages that need not be measured again."""
    if run.plan.fit:
        run = fit(run, request.store, request.reuse, question)
    reuse_finished(run, request.store, request.reuse)
    return run


def measure_all(runs: list[Run], request: QualifyHost, question: Question) -> None:
    """Measure all stages that are missing. If none is, no server starts, but the report still has the drift check's answer.

    Then the server is started again, if gates against a baseline need that, or to compare it in turn with the same server
    without speculative decoding.
    """
    for run in runs:
        if run.plan.baseline:
            bring_baseline(run, request.store)
    if all(run.stage("serve") and not lacking(run) for run in runs):
        answered(runs, question)
    else:
        with serve_cells(runs, request.port, request.store, question) as served:
            for run in runs:
                measure(served, run, runs[0], request.store)
    for run in runs:
        if run.plan.undrafted_in_turn:
            measure_speculation_in_turn(run, request.store)
    measure_starts(runs, request.store)


def measure(served: Served, run: Run, first: Run, store: str) -> None:
    """Measure one cell's stages; answers and scores that it shares with the server's first cell are reused."""
    smoke_test(served, run, store)
    if run.plan.contract:
        check_contract(served, run, store)
    measure_accuracy(served, run, first, store)
    if run.plan.scores_answers:
        measure_likelihood(served, run, first, store)
    measure_load(served, run, store)
    if run.plan.is_speculative and not run.plan.undrafted_in_turn:
        measure_speculation(served, run, store)
    if run.plan.sweep:
        measure_sweep(served, run, store)
    if run.plan.soak:
        measure_soak(served, run, store)


def decided(published: Published, request: QualifyRelease) -> Published:
    """The cell with a person's decision, if it passed, nothing decided about it yet, and the request waits for one."""
    is_open = published.passed and not published.decision and request.decision_timeout_s
    return await_decision(published, request.store, request.decision_timeout_s) if is_open else published
