"""The gates of a cell, and their waivers."""

from vllm_qualify.engine.kind import KINDS
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.choice import pick
from vllm_qualify.recipe.contract import Contract, checks_of
from vllm_qualify.recipe.gates import Gate, Minimum, Waiver
from vllm_qualify.recipe.metrics import NCCL_INFINIBAND
from vllm_qualify.recipe.recipe import Profile, Recipe, Serving
from vllm_qualify.recipe.serving import Arguments, Variant

# Seen of vLLM 0.32: docs/design/0036.
SEED_OF_DRAFTS = "with speculative decoding the same seed can give other texts"
SMOKE_GATES = ("smoke_model_identity", "smoke_finish_reason", "smoke_usage", "smoke_determinism")


def judged_by(plan: CellPlan, recipe: Recipe) -> CellPlan:
    """The plan with what `recipe` has for its cell: gates, waivers, golden text, contract, rule of approval, named anchor.

    Raises:
        CallerError: the recipe does not have the cell.
    """
    cell = plan.cell
    serving = pick(recipe.gpu_types, cell.gpu_type, "GPU type", "--recipe")
    variant = pick(recipe.variants, cell.variant, "variant", "--recipe")
    profile = pick(serving.profiles, cell.profile, "profile", "--recipe")
    changes = {
        "gates": gates_of(recipe, serving, variant, profile),
        "waivers": waivers_of(recipe, cell.gpu_type, cell.variant, cell.profile),
        "smoke_golden": variant.smoke_golden,
        "contract": contract_of(recipe, variant, serving, profile),
        "approval": recipe.approval,
        "named_anchor": anchor_of(recipe, cell.gpu_type, cell.variant, cell.profile),
    }
    return plan.model_copy(update=changes)


def waivers_of(recipe: Recipe, gpu_type: str, variant: str, profile: str) -> list[Waiver]:
    cell = (gpu_type, variant, profile)
    return [waiver for waiver in recipe.waivers if (waiver.gpu_type, waiver.variant, waiver.profile) == cell]


def anchor_of(recipe: Recipe, gpu_type: str, variant: str, profile: str) -> str | None:
    """The run that the recipe names as the cell's anchor."""
    cell = (gpu_type, variant, profile)
    return next((named.run for named in recipe.anchors if (named.gpu_type, named.variant, named.profile) == cell), None)


def gates_of(recipe: Recipe, serving: Serving, variant: Variant, profile: Profile) -> list[Gate]:
    return [
        *smoke_gates(variant),
        *contract_gates(contract_of(recipe, variant, serving, profile)),
        *network_gates(serving),
        *recipe.gates_of(profile),
    ]


def network_gates(serving: Serving) -> list[Gate]:
    return [] if serving.network is None else [Minimum(metric=NCCL_INFINIBAND, minimum=1.0, unit="bool")]


def smoke_gates(variant: Variant) -> list[Gate]:
    """The gates on smoke, which a recipe cannot leave out."""
    metrics = [*SMOKE_GATES, *(["smoke_golden"] if variant.smoke_golden is not None else [])]
    return [Minimum(metric=metric, minimum=1.0, unit="bool") for metric in metrics]


def contract_of(recipe: Recipe, variant: Variant, *others: Arguments) -> Contract | None:
    """What of the API's contract a variant's server is asked; None if it is asked for nothing.

    `others` are the further layers of the server's options.
    """
    promised, kind = recipe.promised(variant), KINDS[variant.engine]
    is_asked = kind.is_held_to_contract if recipe.contract is None else recipe.contract
    if not (is_asked or promised):
        return None
    asked = {check.name for check in checks_of(promised)}
    not_asked = {name: why for name, why in kind.not_offered.items() if name in asked}
    if _drafts(kind.speculative, variant, *others):
        not_asked["contract_seed"] = SEED_OF_DRAFTS
    limit_s = recipe.smoke.time_limit_s
    return Contract(capabilities=promised, not_asked=not_asked, aliases=recipe.aliases, time_limit_s=limit_s)


def _drafts(option: str, *layers: Arguments) -> bool:
    """Whether a server has speculative decoding, in any version."""
    return any(option in options for layer in layers for options in (layer.server, *(each.server for each in layer.by_version)))


def contract_gates(contract: Contract | None) -> list[Gate]:
    """The gates on the API's contract: all of it or none."""
    return [Minimum(metric=check.name, minimum=1.0, unit="bool") for check in contract.checks] if contract else []
