"""The gates of a cell, and their waivers."""

from typing import Any

from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.plan.cell import Cell, CellPlan
from vllm_qualify.plan.choice import Selection, pick
from vllm_qualify.recipe.contract import Contract, checks_of
from vllm_qualify.recipe.gates import Gate, Minimum
from vllm_qualify.recipe.metrics import NCCL_INFINIBAND, PATH_METRICS, REORDERED, path_metric
from vllm_qualify.recipe.recipe import Recipe, Serving
from vllm_qualify.recipe.serving import Arguments, Variant

# Seen of vLLM 0.32: docs/design/0036.
SEED_OF_DRAFTS = "with speculative decoding the same seed can give other texts"
# The gates on smoke, which a recipe cannot leave out.
SMOKE_GATES = ("smoke_model_identity", "smoke_finish_reason", "smoke_usage", "smoke_determinism")


def judged_by(plan: CellPlan, recipe: Recipe) -> CellPlan:
    """The plan with what `recipe` has to judge its cell by. Raises CallerError if the recipe does not have the cell."""
    selection = select_cell(plan.cell, recipe)
    judging = judging_of(recipe, selection, plan.cell.profile)
    if plan.paths is None:
        # What was not measured is not judged; the recipe's own paths make it another plan than the recipe's.
        judging["gates"] = [gate for gate in judging["gates"] if gate.metric not in PATH_METRICS]
    elif not plan.warm_starts:
        judging["gates"] = [gate for gate in judging["gates"] if gate.metric != path_metric(REORDERED)]
    if plan.paths and (now := selection.profiles[plan.cell.profile].paths):
        judging["paths"] = plan.paths.model_copy(update={"must_be_proven": now.must_be_proven})
    return plan.model_copy(update=judging)


def judges_alike(one: CellPlan, other: CellPlan) -> bool:
    """Whether two plans judge by the same gates and waivers. Each variant of a recipe may have a golden text of its own."""
    if one.cell.variant == other.cell.variant:
        return (one.gates, one.waivers, one.smoke_golden) == (other.gates, other.waivers, other.smoke_golden)
    shared = [[gate for gate in plan.gates if gate.metric != "smoke_golden"] for plan in (one, other)]
    return shared[0] == shared[1] and not (one.waivers or other.waivers)


def select_cell(cell: Cell, recipe: Recipe) -> Selection:
    """What the recipe has for a cell. Raises CallerError if it does not have the cell."""
    serving = pick(recipe.gpu_types, cell.gpu_type, "GPU type", "--recipe")
    return Selection(
        gpu_type=cell.gpu_type,
        serving=serving,
        variant_name=cell.variant,
        variant=pick(recipe.variants, cell.variant, "variant", "--recipe"),
        profiles={cell.profile: pick(serving.profiles, cell.profile, "profile", "--recipe")},
    )


def judging_of(recipe: Recipe, selection: Selection, profile_name: str) -> dict[str, Any]:
    """The fields of a plan by which its cell is judged and approved, as the recipe has them."""
    serving, variant, profile = selection.serving, selection.variant, selection.profiles[profile_name]
    cell, contract = (selection.gpu_type, selection.variant_name, profile_name), contract_of(recipe, variant, serving, profile)
    checks = [*SMOKE_GATES, *(["smoke_golden"] if variant.smoke_golden is not None else [])]
    checks += [check.name for check in contract.checks] if contract else []
    checks += [] if serving.network is None else [NCCL_INFINIBAND]
    checks += recipe.path_checks_of(variant, serving, profile)
    return {
        "gates": [*(Minimum(metric=check, minimum=1.0, unit="bool") for check in checks), *recipe.gates_of(profile)],
        "waivers": [waiver for waiver in recipe.waivers if (waiver.gpu_type, waiver.variant, waiver.profile) == cell],
        "smoke_golden": variant.smoke_golden,
        "contract": contract,
        "approval": recipe.approval,
        "named_anchor": next((of.run for of in recipe.anchors if (of.gpu_type, of.variant, of.profile) == cell), None),
    }


def starts_of(serving: Serving, gates: list[Gate]) -> int:
    """How often the server is started at most: once, if no gate needs more."""
    return serving.starts if any(gate.is_over_starts for gate in gates) else 1


def contract_of(recipe: Recipe, variant: Variant, *others: Arguments) -> Contract | None:
    """What of the API's contract a variant's server is asked; None if it is asked for nothing.

    `others` are the further layers of the server's options.
    """
    promised, kind = recipe.capabilities_of(variant), KINDS[variant.engine]
    is_asked = kind.is_held_to_contract if recipe.contract is None else recipe.contract
    if not (is_asked or promised):
        return None
    asked = {check.name for check in checks_of(promised)}
    not_asked = {name: why for name, why in kind.not_offered.items() if name in asked}
    layers: list[Arguments] = [variant, *others]
    servers = [layer.server for layer in layers] + [each.server for layer in layers for each in layer.by_version]
    if any(kind.speculative in options for options in servers):
        not_asked["contract_seed"] = SEED_OF_DRAFTS
    limit_s = recipe.smoke.time_limit_s
    own = recipe.json_schemas if "json_schema" in promised else []
    return Contract(capabilities=promised, not_asked=not_asked, aliases=recipe.aliases, schemas=own, time_limit_s=limit_s)
