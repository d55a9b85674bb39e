"""Gates: rules over one metric. Each kind has its own file; all kinds are listed here.

The keys of a gate show its kind, so a recipe does not name the kind.
"""

from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag, TypeAdapter

from vllm_qualify.recipe.gates.bound import Maximum, Minimum
from vllm_qualify.recipe.gates.gate import POINTS, BaseGate, Comparison, Limits, Verdict, label_of, metric_of
from vllm_qualify.recipe.gates.max_loss import MaxLoss
from vllm_qualify.recipe.gates.max_loss_since_anchor import MaxLossSinceAnchor
from vllm_qualify.recipe.gates.max_nll_increase import MaxNllIncrease
from vllm_qualify.recipe.gates.max_worsening import MaxWorsening
from vllm_qualify.recipe.gates.min_top1_agreement import MinTop1Agreement
from vllm_qualify.recipe.gates.reference import Reference
from vllm_qualify.recipe.gates.waiver import Waiver
from vllm_qualify.recipe.metrics import METRICS, NCCL_INFINIBAND, Metric

__all__ = [
    "KINDS",
    "POINTS",
    "TAGS",
    "BaseGate",
    "Comparison",
    "Gate",
    "Gates",
    "Limits",
    "MaxLoss",
    "MaxLossSinceAnchor",
    "MaxNllIncrease",
    "MaxWorsening",
    "Maximum",
    "MinTop1Agreement",
    "Minimum",
    "Reference",
    "Verdict",
    "Waiver",
    "gate_of",
    "label_of",
    "refused_in_recipes",
]

# Every kind with its tag. The tag is the name in brackets, so that it cannot be a key of a document.
_AnyKind = (
    Annotated[Minimum, Tag("[Minimum]")]
    | Annotated[Maximum, Tag("[Maximum]")]
    | Annotated[Reference, Tag("[Reference]")]
    | Annotated[MaxLoss, Tag("[MaxLoss]")]
    | Annotated[MaxLossSinceAnchor, Tag("[MaxLossSinceAnchor]")]
    | Annotated[MaxWorsening, Tag("[MaxWorsening]")]
    | Annotated[MaxNllIncrease, Tag("[MaxNllIncrease]")]
    | Annotated[MinTop1Agreement, Tag("[MinTop1Agreement]")]
)
KINDS: tuple[type[BaseGate], ...] = tuple(get_args(tagged)[0] for tagged in get_args(_AnyKind))


def _tag(kind: type[BaseGate]) -> str:
    return f"[{kind.__name__}]"


TAGS = frozenset(map(_tag, KINDS))
_KEYS_OF_KINDS = frozenset(key for kind in KINDS for key in kind.own_keys())


def _kind_of(keys: dict[str, Any]) -> type[BaseGate]:
    """The kind that has the most of the given keys. If several have the same number, a kind that fits the metric."""
    given, metric = _given(keys), _metric_in(keys)
    return max(KINDS, key=lambda kind: (len(given.intersection(kind.own_keys())), metric is None or kind.fits(metric)))


def _given(keys: dict[str, Any]) -> set[str]:
    """The given keys that only some kinds have. A key that is null counts as left out."""
    return {key for key, value in keys.items() if key in _KEYS_OF_KINDS and value is not None}


def _metric_in(keys: dict[str, Any]) -> Metric | None:
    name = keys.get("metric")
    return METRICS.get(name) if isinstance(name, str) else None


def _tag_of(gate: Any) -> str:
    return _tag(_kind_of(gate) if isinstance(gate, dict) else type(gate))


def _of_one_kind(gate: Any) -> Any:
    """The gate without the keys of other kinds. Raises ValueError unless its keys are exactly those of one kind.

    Unknown keys stay: the kind refuses them with a better error.
    """
    if isinstance(gate, BaseGate):
        return gate
    if not isinstance(gate, dict):
        raise ValueError("a gate is a mapping of keys")
    others = gate.keys() - _KEYS_OF_KINDS
    if others <= BaseGate.model_fields.keys() and isinstance(gate.get("metric"), str):
        _check_form(metric_of(gate["metric"]), _given(gate))
    kept = others.union(_kind_of(gate).own_keys())
    return {key: value for key, value in gate.items() if key in kept}


def _check_form(metric: Metric, given: set[str]) -> None:
    fitting = [kind for kind in KINDS if kind.fits(metric)]
    if not any(given == set(kind.own_keys()) for kind in fitting):
        forms = ", or ".join(f"'{kind.form()}'" for kind in fitting)
        raise ValueError(f"{metric.direction} is better for {metric.name}: give {forms}, and nothing beside")


Gate = Annotated[_AnyKind, Discriminator(_tag_of), BeforeValidator(_of_one_kind)]
_GATE: TypeAdapter[Gate] = TypeAdapter(Gate)


def gate_of(**keys: Any) -> Gate:
    """The gate with these keys, which are written as in a recipe. Raises pydantic.ValidationError."""
    return _GATE.validate_python(keys)


def refused_in_recipes(metric: Metric) -> str | None:
    """Why a recipe may have no gate on the metric; None if it may."""
    if metric.stage == "smoke":
        return "smoke always gates by itself; leave it out"
    if metric.stage == "contract":
        return "the API's contract gates by itself; leave this out"
    if metric.name == NCCL_INFINIBAND:
        return f"{metric.name} gates by itself where a GPU type has `network: infiniband`; leave it out"
    if metric.stage == "serve":
        return f"{metric.name} is measured once a run, which shows no noise to judge it by"
    if metric.stage == "sweep":
        remedy = "set load.max_concurrency to the number wanted, and gate the latencies there"
        return f"{metric.name} comes from one search, which shows no noise to judge it by: {remedy}"
    return None


def _for_a_recipe(gate: Gate) -> Gate:
    if refusal := refused_in_recipes(METRICS[gate.metric]):
        raise ValueError(refusal)
    return gate


Gates = list[Annotated[Gate, AfterValidator(_for_a_recipe)]]
