"""The qualification of a release."""

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field

from tasks.approve import ask, automatic_ruling, check_signing_key, decide_approval
from tasks.check import check, check_drift, find_baselines, plan, provide_engines
from tasks.decide import judge, publish
from tasks.embedded import without_heartbeats
from tasks.measure import (
    bring_baseline,
    fit,
    measure_accuracy,
    measure_load,
    measure_speculation,
    measure_sweep,
    serving,
    smoke_test,
)
from vllm_qualify.baseline import Against
from vllm_qualify.engine.launch import Launch
from vllm_qualify.engine.plan import CellPlan, Choice, sharing_a_server
from vllm_qualify.evidence.serving import Served
from vllm_qualify.qualification import Published, Run, default_store_url, keeping_evidence, start_run


class QualifyRelease(BaseModel):
    """What to qualify, and where the results go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str = Field(description="A recipe of the catalog (reference) or the path of a YAML file.")
    choice: Choice = Field(
        default=Choice(), description="Which of the recipe's cells; by default all on this machine's GPU type."
    )
    launch: Launch = Field(default=Launch(), description="How the server is started; for docker, from which image.")
    store: str = Field(default_factory=default_store_url, description="s3://bucket/prefix or file:///folder.")
    against: Against = Field(default=Against(), description="What the cells are compared with.")
    port: int | None = Field(default=None, ge=1, le=65535, description="The server's port; by default a free one.")
    price_usd_gpu_hour: float | None = Field(default=None, gt=0, description="What a GPU costs an hour; over the recipe's.")
    decision_timeout_s: float = Field(
        default=0,
        ge=0,
        description="How long to wait here for a release manager's decision about each report that passed and is not approved"
        " automatically. 0 does not wait: decide with `vllm-qualify approve` or `reject`.",
    )
    signing_key_block: str = Field(
        default="vllm-qualify-private-key",
        description="The Secret block with the private key (PEM) that signs approvals, unless the environment has one.",
    )


class QualifyCells(BaseModel):
    """Planned cells that one server serves."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plans: list[CellPlan] = Field(min_length=1)
    store: str
    port: int | None = None


@flow(name="qualify-release", flow_run_name="qualify {request.recipe}", validate_parameters=True)
def qualify_release(request: QualifyRelease) -> list[Published]:
    """Qualify every chosen cell of a recipe; those that one server can serve, together."""
    check_signing_key(request.signing_key_block, request.decision_timeout_s)
    engines = check(request.recipe, request.choice, request.launch, request.store)
    pulled_s = provide_engines(engines)
    plans = plan(request.recipe, request.choice, engines, pulled_s, request.price_usd_gpu_hour)
    plans = find_baselines(plans, request.store, request.against)
    check_drift(plans)
    groups = [QualifyCells(plans=cells, store=request.store, port=request.port) for cells in sharing_a_server(plans)]
    with without_heartbeats():
        reported = [approve_automatically(each, request) for group in groups for each in qualify_cells(group)]
    return [settle(published, request) for published in reported]


@flow(name="qualify-cells", flow_run_name="{request.plans[0].run_id}")
def qualify_cells(request: QualifyCells) -> list[Published]:
    """Serve, check, measure, judge and publish cells. A failed gate is a verdict; exceptions are for the world."""
    runs = [fit(start_run(cell)) if cell.fit else start_run(cell) for cell in request.plans]
    with keeping_evidence(runs):
        for run in runs:
            if run.plan.baseline:
                bring_baseline(run, request.store)
        with serving(runs, request.port) as served:
            for run in runs:
                measure(served, run, runs[0])
        return [decide(run, request.store) for run in runs]


def measure(served: Served, run: Run, first: Run) -> None:
    """One cell's stages on the server; what it shares with the server's first cell is not asked again."""
    smoke_test(served, run)
    measure_accuracy(served, run, first)
    measure_load(served, run)
    if run.plan.is_speculative:
        measure_speculation(served, run)
    if run.plan.sweep:
        measure_sweep(served, run)


def decide(run: Run, store: str) -> Published:
    judge(run)
    return publish(run, store)


def approve_automatically(published: Published, request: QualifyRelease) -> Published:
    """As soon as a cell's servers were stopped: what becomes of the others does not hold it up."""
    wanted = automatic_ruling(published, request.signing_key_block)
    return decide_approval(published, wanted, request.store, request.signing_key_block) if wanted else published


def settle(published: Published, request: QualifyRelease) -> Published:
    """A release manager decides about what passed and is not decided, if the flow is to wait for that."""
    if published.told or not published.approved or not request.decision_timeout_s:
        return published
    wanted = ask(published, request.decision_timeout_s)
    return decide_approval(published, wanted, request.store, request.signing_key_block)
