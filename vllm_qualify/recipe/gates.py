"""Gates: rules over one metric. The keys of a gate show its kind, so a recipe does not name the kind."""

import math
from abc import abstractmethod
from datetime import date
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, TypeAdapter, model_validator

from vllm_qualify.recipe.metrics import ANSWER_TOKENS, LIKELIHOODS, METRICS, NCCL_INFINIBAND, PATH_METRICS, TOP1_SHARES, Metric
from vllm_qualify.recipe.values import FilterName, Frozen, Name, Number, TaskName, Text

POINTS = "pp"
"""Percentage points: the unit of a difference between two shares."""

Comparison = Literal["answers", "tokens", "load", "likelihood", "anchor"]
"""What is compared: with the baseline the answers to each question, their tokens, the figures of the load, or how likely texts
are; with the anchor the answers."""

Verdict = Literal["pass", "fail", "inconclusive", "invalid"]
"""Of one gate, or of a cell: the worst of its gates'."""


class Limits(NamedTuple):
    """The range in which a gate is met, both ends included. None is an open end."""

    at_least: float | None = None
    at_most: float | None = None


def _above_zero(number: float) -> float:
    if not number > 0:
        raise ValueError("it must be above 0: no measurement can show that nothing at all was lost")
    return number


AboveZero = Annotated[Number, AfterValidator(_above_zero)]


class BaseGate(Frozen):
    """A rule over one metric. Without a `task`, it is on the recipe's only task."""

    compares: ClassVar[Comparison | None] = None
    """what gates of this kind compare, and with which run; None for a gate on the metric itself"""
    meaning_form: ClassVar[str] = "{}"
    """the judged quantity, around the metric's meaning"""
    points: ClassVar[bool] = False
    """whether value and bounds are shown to people in percentage points"""
    is_least: ClassVar[bool] = False
    """whether the kind's only key is the least value, and not the most"""

    metric: Text = Field(description="a name of the metrics")
    filter: FilterName | None = Field(
        None,
        description="lm-eval's filter, like `strict-match` or `flexible-extract`, or `none` for tasks without one: required"
        " for a score, refused for others",
    )
    task: TaskName | None = Field(None, description="the task of a score; needed where `accuracy` has more than one")
    unit: Text = Field(description="the metric's unit, exactly; of a loss or a worsening it is `fraction`")

    @classmethod
    @abstractmethod
    def fits(cls, metric: Metric) -> bool:
        """Whether a gate of this kind can be on the metric."""

    @property
    def limits(self) -> Limits:
        """The range of values in which it is met; by default up to the value of the kind's only key, or from it on."""
        end: float = getattr(self, self.own_keys()[0])
        return Limits(at_least=end) if self.is_least else Limits(at_most=end)

    @property
    def meaning(self) -> str:
        """The judged quantity, in words for people."""
        return self.meaning_form.format(METRICS[self.metric].meaning)

    @property
    def shown_unit(self) -> str:
        """The unit in which its value and bounds are shown to people."""
        return POINTS if self.points else self.unit

    @classmethod
    @cache
    def own_keys(cls) -> tuple[str, ...]:
        return tuple(name for name in cls.model_fields if name not in BaseGate.model_fields)

    @classmethod
    def form(cls) -> str:
        """`reference and margin`."""
        return " and ".join(cls.own_keys())

    @property
    def bounds(self) -> list[float]:
        """The closed ends of its range, the lower one first."""
        return [end for end in self.limits if end is not None]

    @property
    def bound(self) -> float | list[float]:
        """For documents: the only bound, or both."""
        return self.bounds[0] if len(self.bounds) == 1 else self.bounds

    @property
    def cannot_fail(self) -> bool:
        """Whether every value that can be measured meets it."""
        (at_least, at_most), (least, most) = self.limits, self.possible
        return (at_least is None or at_least <= least) and (at_most is None or at_most >= most)

    @property
    def possible(self) -> tuple[float, float]:
        """The least and the most that the judged quantity can be."""
        return (-math.inf, math.inf) if self.is_compared else METRICS[self.metric].possible

    @property
    def against(self) -> Comparison | None:
        """What is compared, and with which run; None for a gate on the metric itself."""
        return self.compares

    @property
    def is_against_baseline(self) -> bool:
        return self.against not in (None, "anchor")

    @property
    def is_against_anchor(self) -> bool:
        return self.against == "anchor"

    @property
    def is_compared(self) -> bool:
        return self.against is not None

    @property
    def is_over_starts(self) -> bool:
        """Whether further starts of the server measure what it compares. Likelihoods and tokens are of the first one alone."""
        return self.against in ("answers", "load")

    @property
    def has_noise(self) -> bool:
        return self.unit != "bool"

    @property
    def label(self) -> str:
        against = {"against_baseline": self.is_against_baseline, "against_anchor": self.is_against_anchor}
        return label_of(self.metric, self.task, self.filter, **against)

    @model_validator(mode="after")
    def _fits_its_metric(self) -> Self:
        metric = _metric_of(self.metric)
        if not self.fits(metric):
            raise ValueError(f"{metric.name} takes no gate with {self.form()}")
        unit = metric.compared_unit if self.is_compared else metric.unit
        if self.unit != unit:
            raise ValueError(f"the unit of {self.label} is '{unit}', not '{self.unit}'")
        if metric.is_score and self.filter is None:
            raise ValueError(f"a gate on {metric.name} names lm-eval's filter, like strict-match or flexible-extract")
        if not metric.is_score and self.filter is not None:
            raise ValueError(f"{metric.name} has no filter")
        if metric.stage != "accuracy" and self.task is not None:
            raise ValueError(f"{metric.name} is of no task")
        for bound in self.bounds:
            if metric.unit in ("fraction", "bool") and not 0 <= bound <= 1:
                raise ValueError(f"{metric.name} lies between 0 and 1, the bound {bound} does not")
            if bound < 0:
                raise ValueError(f"{metric.name} is never negative, the bound {bound} is")
        return self


def _metric_of(name: str) -> Metric:
    if name not in METRICS:
        raise ValueError(f"no metric '{name}'; known: {', '.join(METRICS)}")
    return METRICS[name]


def label_of(
    metric: str, task: str | None, filter_name: str | None, *, against_baseline: bool, against_anchor: bool = False
) -> str:
    """`exact_match (gsm8k, strict-match)`, `ttft_p99_ms against the baseline`."""
    of = ", ".join(name for name in (task, filter_name) if name)
    other = " against the baseline" if against_baseline else " against the anchor" if against_anchor else ""
    return metric + (f" ({of})" if of else "") + other


class Minimum(BaseGate):
    """Where higher is better: the metric must be at least `minimum`."""

    is_least = True

    minimum: Number = Field(description="the bound where higher is better")

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.direction == "higher" and not metric.is_only_compared


class Maximum(BaseGate):
    """Where lower is better: the metric must be at most `maximum`."""

    maximum: Number = Field(description="the bound where lower is better")

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.direction == "lower" and not metric.is_only_compared


class Reference(BaseGate):
    """The metric may be worse than `reference` by at most `margin`."""

    reference: Number = Field(description="with `margin`: the bound is the margin below it, or above it where lower is better")
    margin: AboveZero = Field(description="above 0")

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return not metric.is_only_compared

    @property
    def limits(self) -> Limits:
        # In decimals, as people calculate: 0.92 - 0.02 is 0.9.
        reference, margin = Decimal(str(self.reference)), Decimal(str(self.margin))
        if METRICS[self.metric].direction == "higher":
            return Limits(at_least=float(reference - margin))
        return Limits(at_most=float(reference + margin))


class _Loss(BaseGate):
    """A loss of a score, question by question."""

    points = True

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.is_score

    @property
    def possible(self) -> tuple[float, float]:
        return -1.0, 1.0


class MaxLoss(_Loss):
    """For a score: at most the share `max_loss` of the questions may be lost against the baseline, question by question."""

    compares = "answers"
    meaning_form = "what is lost of the {}"

    max_loss: AboveZero = Field(
        description="of a score: the share of the questions that may be lost against the baseline, above 0"
    )


class MaxLossSinceAnchor(_Loss):
    """For a score: at most the share `max_loss_since_anchor` of the questions may be lost against the cell's anchor.

    It goes with a gate with `max_loss` on the same score, which decides how often questions are asked.
    """

    compares = "anchor"
    meaning_form = "what is lost since the anchor of the {}"

    max_loss_since_anchor: AboveZero = Field(
        description="of a score: the share of the questions that may be lost against the anchor; at least `max_loss` of the"
        " same score"
    )


class MaxWorsening(BaseGate):
    """For the load, and for tokens per answer: how many times worse than the baseline's figure it may be, minus 1.

    With a `max_worsening` of 0.05, a time may be 1.05 times as long, and a rate may fall to 1/1.05. Answers may have 1.05 times
    as many tokens; both runs answer the same questions, and are compared question by question.
    """

    compares = "load"
    meaning_form = "how much worse: {}"

    max_worsening: AboveZero = Field(
        description="of the load or of tokens per answer: how many times worse than the baseline's, less 1, above 0"
    )

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.stage == "load" or metric.name == ANSWER_TOKENS

    @property
    def against(self) -> Comparison:
        return "tokens" if self.metric == ANSWER_TOKENS else "load"


class MaxNllIncrease(BaseGate):
    """For a likelihood: per token, the negative log-likelihood may be at most so much larger than under the baseline.

    Both builds score the same texts, and the increase is taken text by text.
    """

    compares = "likelihood"
    meaning_form = "increase of the {}"

    max_nll_increase: AboveZero = Field(
        description="of a likelihood: how much larger it may be than under the baseline, in nats per token, above 0"
    )

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.name in LIKELIHOODS


class MinTop1Agreement(BaseGate):
    """For a share of likeliest tokens: of the tokens, at least this share has the same likeliest one as under the baseline."""

    compares = "likelihood"
    is_least = True

    min_top1_agreement: Annotated[Number, Field(gt=0, lt=1)] = Field(
        description="of a share of likeliest tokens: the least share with the same likeliest one as under the baseline,"
        " between 0 and 1"
    )

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.name in TOP1_SHARES

    @property
    def meaning(self) -> str:
        whose = "the baseline's answers" if self.metric.startswith("answer") else "the recipe's texts"
        return f"share of the tokens of {whose} at which both builds find the same one likeliest"


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
TAGS = frozenset(f"[{kind.__name__}]" for kind in KINDS)
_KEYS_OF_KINDS = frozenset(key for kind in KINDS for key in kind.own_keys())


def _keys_given(gate: dict[str, Any]) -> set[str]:
    """The given keys that only some kinds have. A key that is null counts as left out."""
    return {key for key, value in gate.items() if key in _KEYS_OF_KINDS and value is not None}


def _kind_of(gate: dict[str, Any]) -> type[BaseGate]:
    """The kind that has the most of the given keys. If several have the same number, a kind that fits the metric."""
    given, name = _keys_given(gate), gate.get("metric")
    metric = METRICS.get(name) if isinstance(name, str) else None
    return max(KINDS, key=lambda kind: (len(given.intersection(kind.own_keys())), metric is None or kind.fits(metric)))


def _tag_of(gate: Any) -> str:
    return f"[{(_kind_of(gate) if isinstance(gate, dict) else type(gate)).__name__}]"


def _keep_one_kind(gate: Any) -> Any:
    """The gate without the keys of other kinds. Raises ValueError unless its keys are exactly those of one kind."""
    if isinstance(gate, BaseGate):
        return gate
    if not isinstance(gate, dict):
        raise ValueError("a gate is a mapping of keys")
    others = gate.keys() - _KEYS_OF_KINDS
    if others <= BaseGate.model_fields.keys() and isinstance(gate.get("metric"), str):
        metric, given = _metric_of(gate["metric"]), _keys_given(gate)
        fitting = [kind for kind in KINDS if kind.fits(metric)]
        if not any(given == set(kind.own_keys()) for kind in fitting):
            forms = ", or ".join(f"'{kind.form()}'" for kind in fitting)
            raise ValueError(f"{metric.direction} is better for {metric.name}: give {forms}, and nothing beside")
    # Unknown keys stay: the kind refuses them with a better error.
    kept = others.union(_kind_of(gate).own_keys())
    return {key: value for key, value in gate.items() if key in kept}


Gate = Annotated[_AnyKind, Discriminator(_tag_of), BeforeValidator(_keep_one_kind)]
_GATE: TypeAdapter[Gate] = TypeAdapter(Gate)


def gate_of(**keys: Any) -> Gate:
    """The gate with these keys, which are written as in a recipe. Raises pydantic.ValidationError."""
    return _GATE.validate_python(keys)


def refused_in_recipes(metric: Metric) -> str | None:
    """Why a recipe may have no gate on the metric; None if it may."""
    if metric.name == NCCL_INFINIBAND:
        return f"{metric.name} gates by itself where a GPU type has `network: infiniband`; leave it out"
    if metric.name in PATH_METRICS:
        return f"{metric.name} gates by itself unless a profile says `paths: false`; leave it out"
    remedy = "set load.max_concurrency to the number wanted, and gate the latencies there"
    refusals = {
        "smoke": "smoke always gates by itself; leave it out",
        "contract": "the API's contract gates by itself; leave this out",
        "serve": f"{metric.name} is measured once a run, which shows no noise to judge it by",
        "sweep": f"{metric.name} comes from one search, which shows no noise to judge it by: {remedy}",
    }
    return refusals.get(metric.stage)


def _may_be_in_a_recipe(gate: Gate) -> Gate:
    if refusal := refused_in_recipes(METRICS[gate.metric]):
        raise ValueError(refusal)
    if gate.cannot_fail:
        problem = f"nothing can fail the gate on {gate.label}: whatever is measured meets {gate.bounds[0]:g}"
        raise ValueError(f"{problem}. Give a bound that a bad model or server would miss, or leave the gate out")
    return gate


Gates = list[Annotated[Gate, AfterValidator(_may_be_in_a_recipe)]]


class Waiver(Frozen):
    """A gate of one cell that need not be passed until a given day, and the person who is responsible for that."""

    gate: Text = Field(
        description="the gate's name as reports have it, like `exact_match (gsm8k, strict-match) against the baseline`"
    )
    gpu_type: Name = Field(description="of the cell")
    variant: Name = Field(description="of the cell")
    profile: Name = Field(description="of the cell")
    owner: Text = Field(description="who answers for it")
    reason: Text = Field(description="why")
    expires: date = Field(description="the last day on which it holds, by UTC, like `2026-12-31`")
