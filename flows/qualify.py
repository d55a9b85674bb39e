"""The qualification of a release."""

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field

from tasks.check import check, check_drift, plan, provide_engines
from tasks.decide import judge, publish, show
from tasks.measure import measure_accuracy, measure_load, served, smoke_test
from vllm_qualify.engine.launch import Launch
from vllm_qualify.engine.plan import CellPlan, Choice
from vllm_qualify.qualification import Published, default_store_url, keeping_evidence, start_run


class QualifyRelease(BaseModel):
    """What to qualify, and where the results go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str = Field(description="A recipe of the catalog (reference) or the path of a YAML file.")
    choice: Choice = Field(
        default=Choice(), description="Which of the recipe's cells; by default all on this machine's GPU type."
    )
    launch: Launch = Field(default=Launch(), description="How the server is started; for docker, from which image.")
    store: str = Field(default_factory=default_store_url, description="s3://bucket/prefix or file:///folder.")
    port: int | None = Field(default=None, ge=1, le=65535, description="The server's port; by default a free one.")


class QualifyCell(BaseModel):
    """One planned cell."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: CellPlan
    store: str
    port: int | None = None


@flow(name="qualify-release", flow_run_name="qualify {request.recipe}", validate_parameters=True)
def qualify_release(request: QualifyRelease) -> list[Published]:
    """Qualify every chosen cell of a recipe, one after another."""
    engines = check(request.recipe, request.choice, request.launch, request.store)
    provide_engines(engines)
    plans = plan(request.recipe, request.choice, engines)
    check_drift(plans)
    return [qualify_cell(QualifyCell(plan=cell, store=request.store, port=request.port)) for cell in plans]


@flow(name="qualify-cell", flow_run_name="{request.plan.run_id}")
def qualify_cell(request: QualifyCell) -> Published:
    """Serve, check, measure, judge and publish one cell. A failed gate is a verdict; exceptions are for the world."""
    run = start_run(request.plan)
    with keeping_evidence(run):
        with served(run, request.port) as server:
            smoke_test(server, run)
            measure_accuracy(server, run)
            measure_load(server, run)
        report = judge(run)
        published = publish(report, run, request.store)
        show(report, published)
    return published
