"""Before anything is started: the recipe, the machine, the engine, the model and the store."""

from prefect import get_run_logger, task

from vllm_qualify.engine.environment import find_engine
from vllm_qualify.engine.gpu import detect
from vllm_qualify.engine.plan import CellPlan, Choice, plan_cells
from vllm_qualify.publish.store import open_store
from vllm_qualify.recipe.loading import load_recipe


@task(name="check", task_run_name="check {recipe}")
def check(recipe: str, choice: Choice, store: str) -> list[CellPlan]:
    """The plans of the chosen cells. Raises CallerError, HostError, StoreError."""
    loaded = load_recipe(recipe)
    open_store(store).check()
    plans = plan_cells(loaded, choice, find_engine(), detect(choice.gpu_type))
    for plan in plans:
        get_run_logger().info(f"cell {plan.cell.id} on vLLM {plan.cell.release.engine.version}, {plan.fingerprint.name}")
    return plans
