"""The command that repeats a run."""

from vllm_qualify.engine.image import EngineImage
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.loading import catalog_names

COMMAND = ("vllm-qualify", "run")


def rerun(plan: CellPlan, *, anew: bool = True) -> list[str]:
    """The command for the same cell, image, baseline and anchor. If `anew` is false, finished stages are reused."""
    cell, server = plan.cell, plan.server
    chosen = {"--gpu-type": cell.gpu_type, "--variant": cell.variant, "--profile": cell.profile}
    chosen |= {"--launcher": server.engine.launcher}
    if isinstance(server.engine, EngineImage):
        chosen |= {"--image": server.engine.pinned}
    if plan.client_image:
        chosen |= {"--client-image": plan.client_image.pinned}
    if plan.baseline and not plan.establishes:
        chosen |= {"--baseline": plan.baseline.run_id}
    if plan.anchor and plan.anchor.chosen == "named by the caller":
        chosen |= {"--anchor": plan.anchor.run_id}
    if plan.price_usd_gpu_hour is not None:
        chosen |= {"--price-usd-gpu-hour": f"{plan.price_usd_gpu_hour:.15g}"}
    if plan.load.time_budget_s is not None:
        chosen |= {"--time-budget": f"{plan.load.time_budget_s:.15g}"}
    options = [part for pair in chosen.items() for part in pair]
    reuse = ["--reuse", "none"] if anew else []
    allowed = ["--allow-code"] if (plan.foreign_code or plan.openings) and cell.recipe not in catalog_names() else []
    becoming = ["--establish-baseline"] if plan.establishes else []
    return [*COMMAND, cell.recipe, *options, *allowed, *reuse, *becoming, *(["--new-anchor"] if plan.new_anchor else [])]
