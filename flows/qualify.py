"""The qualification of a release: on this machine, or on the fleet's hosts."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.approve import approve_automatically, await_decision, check_signing_key
from tasks.check import asking, check_code, check_request, fetch_models, find_baselines, plan, provide_engines
from tasks.decide import judge, publish
from tasks.fleet import claim, pin_revision, resolve, run_on_fleet
from tasks.machine import machine
from tasks.measure import await_answer, bring_baseline, fit, measure_speculation_in_turn, measure_stage, serve_cells
from tasks.orchestrator import provide_server
from tasks.outcome import nothing_to_do, outcome_state
from tasks.reuse import begin_attempt, published_before, reuse_finished, still_to_do
from tasks.starts import measure_starts
from vllm_qualify.drift.question import Question
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.stages.table import on_the_server
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import sharing_a_server
from vllm_qualify.runs.failed import keeping_evidence, publishing
from vllm_qualify.runs.folder import Run, lacking_stages, start_run
from vllm_qualify.runs.publishing import Published
from vllm_qualify.runs.request import QualifyHost, QualifyRelease

# A failed gate is a state that a flow returns, and a second measurement would hide it. Not left to a host's settings: since
# 3.9 Prefect tries such a flow again, too.
NO_RETRIES = 0


@dataclass
class Ended:
    """How a flow of this process ended, by its own word.

    Prefect's server is not asked. Where its answer is lost, the client gets the state without its data. And the result of a
    state is what a file has that the state names: to read it is to run it.
    """

    reported: list[Published] = field(default_factory=list)
    error: BaseException | None = None
    is_over: bool = False


_ended: ContextVar[Ended] = ContextVar("ended")


@flow(name="qualify-release", flow_run_name="qualify {request.recipe}", validate_parameters=True, retries=NO_RETRIES)
def qualify_release(request: QualifyRelease) -> State[list[Published]]:
    """Qualify every chosen cell of a recipe; on the fleet, each GPU type on a host of its own."""
    ended = _ended.get(Ended())
    try:
        state = qualify_anywhere(request, ended)
    except BaseException as error:
        ended.error = error
        raise
    ended.is_over = True
    return state


def qualify_anywhere(request: QualifyRelease, ended: Ended) -> State[list[Published]]:
    """Qualify here, or on the fleet. What was qualified here is noted in `ended`."""
    check_signing_key()
    if not request.gpu_types:
        ended.reported = [with_decision(published, request) for published in qualify_here(request)]
        return outcome_state(ended.reported)
    check_code(request.recipe, request.allow_code)
    if not claim(request.store, request.release_key):
        return nothing_to_do("another flow run handles this release")
    pinned = request.model_copy(update={"launch": resolve(request.launch)})
    return run_on_fleet({gpu_type: on_host(pinned, gpu_type) for gpu_type in request.gpu_types}, request.queue, request.store)


def run_qualification(request: QualifyRelease) -> list[Published]:
    """The reports of `qualify_release`, whatever their verdicts. Raises the error that stopped the flow, or HostError."""
    provide_server()
    ended = Ended()
    before = _ended.set(ended)
    try:
        # Prefect's types do not allow for a flow that returns its own final state.
        state: Any = qualify_release(request, return_state=True)
    finally:
        _ended.reset(before)
    if ended.error:
        raise ended.error
    if not ended.is_over:
        problem = f"Prefect did not run the flow to its end: {state.name}: {state.message}"
        raise HostError(problem, "see the log of Prefect's server, and run it again", "prefect")
    return ended.reported


def on_host(request: QualifyRelease, gpu_type: str) -> dict[str, Any]:
    """The request for a host of this GPU type, as JSON."""
    choice = pin_revision(request.recipe, request.choice.model_copy(update={"gpu_type": gpu_type}))
    asked = {name: getattr(request, name) for name in QualifyHost.model_fields} | {"choice": choice}
    return QualifyHost(**asked).model_dump(mode="json")


@flow(
    name="qualify-host",
    flow_run_name="qualify {request.recipe} on {request.choice.gpu_type}",
    validate_parameters=True,
    retries=NO_RETRIES,
)
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
    if all(run.stage("serve") and not lacking_stages(run) for run in runs):
        await_answer(runs, question)
    else:
        with serve_cells(runs, request.port, request.store, question) as served:
            for run in runs:
                for stage in on_the_server(run.plan):
                    measure_stage(stage, served, run, runs[0], request.store)
    for run in runs:
        if run.plan.undrafted_in_turn:
            measure_speculation_in_turn(run, request.store)
    measure_starts(runs, request.store)


def with_decision(published: Published, request: QualifyRelease) -> Published:
    """The cell with a person's decision, if it passed, nothing decided about it yet, and the request waits for one."""
    is_open = published.passed and not published.decision and request.decision_timeout_s
    return await_decision(published, request.store, request.decision_timeout_s) if is_open else published
