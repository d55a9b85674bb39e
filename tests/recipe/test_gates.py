"""Gates in their forms, waivers, tasks: what a recipe can say of judging, and what is refused."""

import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.recipes import Document, reference, write
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe import gates
from vllm_qualify.recipe.gates import BaseGate, Gate, gate_of
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.metrics import METRICS, least_requests

P99 = {"metric": "tpot_p99_ms", "maximum": 300, "unit": "ms"}
SCORE = {"metric": "exact_match", "filter": "strict-match", "unit": "fraction"}
PAIRED = SCORE | {"max_loss": 0.008}
UNLIKELIER = {"metric": "answer_nll_nat_per_tok", "max_nll_increase": 0.01, "unit": "nat/tok"}
AGREEING = {"metric": "text_top1_share", "min_top1_agreement": 0.98, "unit": "fraction"}
SINCE_ANCHOR = SCORE | {"max_loss_since_anchor": 0.016}
LONGER = {"metric": "output_tok_per_answer", "task": "gsm8k", "max_worsening": 0.1, "unit": "fraction"}
RELATIVE = {"metric": "ttft_p50_ms", "max_worsening": 0.05, "unit": "fraction"}
CELL = {"gpu_type": "cpu", "variant": "bf16", "profile": "balanced"}
GATE, WHO, WHY = "exact_match (gsm8k, strict-match)", "ada@example.com", "known, see the tracker"
WAIVER = {"gate": GATE, **CELL, "owner": WHO, "reason": WHY, "expires": date(2026, 12, 1)}


@pytest.mark.parametrize(
    ("gate", "limits", "label"),
    [
        (SCORE | {"filter": "f", "minimum": 0.9}, (0.9, None), "exact_match (f)"),
        (SCORE | {"task": "gsm8k", "reference": 0.92, "margin": 0.02}, (0.9, None), "exact_match (gsm8k, strict-match)"),
        ({"metric": "ttft_p99_ms", "reference": 200, "margin": 10, "unit": "ms"}, (None, 210), "ttft_p99_ms"),
        (PAIRED, (None, 0.008), "exact_match (strict-match) against the baseline"),
        (SINCE_ANCHOR, (None, 0.016), "exact_match (strict-match) against the anchor"),
        (RELATIVE, (None, 0.05), "ttft_p50_ms against the baseline"),
        (LONGER, (None, 0.1), "output_tok_per_answer (gsm8k) against the baseline"),
        (UNLIKELIER, (None, 0.01), "answer_nll_nat_per_tok against the baseline"),
        (AGREEING, (0.98, None), "text_top1_share against the baseline"),
    ],
)
def test_a_gate_has_a_range_and_a_label(gate: dict[str, Any], limits: tuple[float | None, float | None], label: str) -> None:
    made = gate_of(**gate)
    assert (made.limits, made.label) == (limits, label)


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        (PAIRED | {"max_loss": 0.0}, "must be above 0"),
        (PAIRED | {"max_loss": 1.5}, "between 0 and 1"),
        (RELATIVE | {"unit": "ms"}, "'fraction', not 'ms'"),
        (LONGER | {"unit": "tok"}, "'fraction', not 'tok'"),
        (LONGER | {"filter": "strict-match"}, "has no filter"),
        (LONGER | {"metric": "truncated_answers"}, "give 'maximum', or 'reference and margin', and nothing"),
        (RELATIVE | {"metric": "startup_s"}, "give 'maximum', or 'reference and margin', and nothing"),
        ({"metric": "ttft_p99_ms", "max_loss": 0.1, "unit": "fraction"}, "or 'max_worsening'"),
        ({"metric": "ttft_p99_ms", "reference": 200, "unit": "ms"}, "'reference and margin'"),
        ({"metric": "ttft_p99_ms", "reference": 200, "margin": -1, "unit": "ms"}, "must be above 0"),
        ({"metric": "ttft_p99_ms", "maximum": 200, "unit": "ms", "task": "gsm8k"}, "is of no task"),
        (UNLIKELIER | {"unit": "fraction"}, "'nat/tok', not 'fraction'"),
        (UNLIKELIER | {"max_nll_increase": 0.0}, "must be above 0"),
        (UNLIKELIER | {"task": "gsm8k"}, "is of no task"),
        (UNLIKELIER | {"metric": "answer_top1_share"}, "give 'min_top1_agreement', and nothing beside"),
        ({"metric": "answer_top1_share", "minimum": 0.9, "unit": "fraction"}, "give 'min_top1_agreement', and nothing"),
        (AGREEING | {"min_top1_agreement": 1.0}, "less than 1"),
        (AGREEING | {"metric": "exact_match", "filter": "f"}, "or 'max_loss'"),
        ({"metric": "truncated_answers", "filter": "f", "maximum": 0.1, "unit": "fraction"}, "has no filter"),
    ],
)
def test_a_gate_that_says_too_much_or_too_little_is_refused(gate: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gate_of(**gate)


@pytest.mark.parametrize(
    ("gate", "key", "message"),
    [
        # A misspelled key, also beside the keys of several kinds, goes before the one that it was meant to be.
        (P99 | {"maxmum": 5}, "maxmum", "unknown key"),
        ({"metric": "tpot_p99_ms", "maxmum": 300, "unit": "ms"}, "maxmum", "unknown key (1 more after this)"),
        (PAIRED | {"maxmum": 5, "minimum": 0.9}, "maxmum", "unknown key"),
        (PAIRED | {"minimum": 0.9}, "", "or 'max_loss', or 'max_loss_since_anchor', and nothing beside"),
        (PAIRED | {"minimum": 0.9, "metric": "exact_mtach"}, "", "no metric 'exact_mtach'; known: startup_s"),
        (SCORE, "", "give 'minimum', or 'reference and margin', or 'max_loss'"),
        (SCORE | {"minimum": None}, "", "give 'minimum', or"),
        (SCORE | {"minimum": "high"}, "minimum", "valid number, got 'high'"),
        (SCORE | {"reference": 0.9, "margin": 0}, "margin", "it must be above 0"),
        ({"minimum": 0.9, "max_loss": 0.1}, "metric", "Field required"),
        ({"metric": ["exact_match"], "minimum": 0.9}, "metric", "valid string"),
        (SCORE | {"minimum": 0.9, "task": 7}, "task", "valid string"),
        (7, "", "a gate is a mapping of keys"),
        (["metric"], "", "a gate is a mapping of keys"),
    ],
)
def test_a_mistake_in_a_gate_is_one_error_with_its_place(tmp_path: Path, gate: Any, key: str, message: str) -> None:
    document = reference()
    document["gates"] = [gate]
    file = write(document, tmp_path / "mine.yaml")
    with pytest.raises(CallerError) as raised:
        load_recipe(str(file))
    assert raised.value.place == f"{file}: gates.0{f'.{key}' if key else ''}"
    assert message in raised.value.problem


OWN_KEYS = ("minimum", "maximum", "reference", "margin", "max_loss", "max_loss_since_anchor", "max_worsening")
ALL_KEYS = ("metric", "filter", "task", "unit", *OWN_KEYS, "max_nll_increase", "min_top1_agreement")


def test_a_misspelled_key_is_reported_with_the_keys_of_every_kind(tmp_path: Path) -> None:
    with pytest.raises(CallerError) as raised:
        load_recipe(str(write(with_gate(reference(), P99 | {"maxmum": 5}), tmp_path / "mine.yaml")))
    assert raised.value.remedy == f"allowed here: {', '.join(ALL_KEYS)}"


NULLS = dict.fromkeys(("filter", "task", *OWN_KEYS))
KINDS_AS_WRITTEN: list[tuple[dict[str, Any], type[BaseGate]]] = [
    (SCORE | {"task": "gsm8k", "minimum": 0.9}, gates.Minimum),
    (P99, gates.Maximum),
    (SCORE | {"reference": 0.92, "margin": 0.02}, gates.Reference),
    (PAIRED, gates.MaxLoss),
    (SINCE_ANCHOR, gates.MaxLossSinceAnchor),
    (RELATIVE, gates.MaxWorsening),
    (LONGER, gates.MaxWorsening),
    (UNLIKELIER, gates.MaxNllIncrease),
    (AGREEING, gates.MinTop1Agreement),
]


@pytest.mark.parametrize(("gate", "kind"), KINDS_AS_WRITTEN)
def test_a_gate_is_read_as_it_was_written(gate: dict[str, Any], kind: type[BaseGate]) -> None:
    """Nothing but its keys tells its kind. Documents of before there were kinds had every key, null where it was not given."""
    made = TypeAdapter(Gate).validate_json(json.dumps(NULLS | gate))
    assert (type(made), made) == (kind, gate_of(**gate))
    written = TypeAdapter(Gate).dump_json(made)
    assert {key: value for key, value in json.loads(written).items() if value is not None} == gate
    assert type(TypeAdapter(Gate).validate_json(written)) is kind


def test_a_kind_refuses_a_metric_that_it_is_not_for() -> None:
    with pytest.raises(ValueError, match="tpot_p99_ms takes no gate with minimum"):
        gates.Minimum(metric="tpot_p99_ms", minimum=1.0, unit="ms")


def test_a_percentile_needs_as_many_requests_as_mlperf_says() -> None:
    """MLPerf Inference's early stopping: 459 requests without a miss for p99 at 99 %."""
    assert [least_requests(name) for name in ("ttft_p99_ms", "tpot_p90_ms", "itl_p50_ms", "e2el_mean_ms")] == [459, 44, 7, 1]
    assert all(metric.quantile is None or metric.name.endswith("_ms") for metric in METRICS.values())


def two_tasks() -> Document:
    document = reference()
    document["accuracy"].append({"task": "arc_easy", "num_questions": 100})
    return document


def with_gate(document: Document, gate: dict[str, Any]) -> Document:
    document["gates"].append(gate)
    return document


def with_load_gate(gate: dict[str, Any], **load: Any) -> Document:
    document = reference()
    profile = document["gpu_types"]["cpu"]["profiles"]["balanced"]
    profile["gates"].append(gate)
    profile["load"] |= load
    return document


def with_waiver(**changes: Any) -> Document:
    return reference() | {"waivers": [WAIVER | changes]}


def anchored(*since: dict[str, Any], **more: Any) -> Document:
    document = reference()
    document["gates"] = [gate for gate in document["gates"] if "max_loss" not in gate] + [*since]
    return document | more


def named(**changes: str) -> dict[str, str]:
    return CELL | {"run": "20260301T080000Z-0a1b2c"} | changes


GOODPUT = {"metric": "goodput_req_s", "minimum": 1, "unit": "req/s"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (two_tasks(), "must name its 'task', one of gsm8k, arc_easy"),
        (with_gate(reference(), PAIRED), "more than one gate on exact_match (gsm8k, strict-match) against the baseline"),
        (with_gate(reference(), {**PAIRED, "task": "mmlu"}), "a task that accuracy does not have: gsm8k"),
        (with_waiver(gate="exact_match"), "there is no gate 'exact_match' to be waived; there are: exact_match (gsm8k"),
        (with_waiver(variant="fp8"), "is for cpu/fp8/balanced, which the recipe does not have"),
        (with_waiver(gate="contract_chat"), "there is no gate 'contract_chat'"),
        (with_waiver(gate="contract_seed") | {"contract": False}, "there is no gate 'contract_seed'"),
        (with_waiver(gate="path_cached"), "there is no gate 'path_cached'"),
        (with_gate(reference(), {"metric": "path_cached", "minimum": 1, "unit": "bool"}), "path_cached gates by itself"),
        (with_waiver(gate="smoke_determinism"), "there is no gate 'smoke_determinism'"),
        (reference() | {"contract": False, "capabilities": ["chat"]}, "capabilities are checked by the API's contract"),
        (with_waiver(expires="soon"), "valid date"),
        (with_waiver(owner=""), "at least 1 character"),
        (anchored(SINCE_ANCHOR), "needs one with max_loss on the same score beside it"),
        (anchored(SINCE_ANCHOR, PAIRED | {"filter": "flexible-extract"}), "needs one with max_loss on the same score"),
        (anchored(SINCE_ANCHOR | {"max_loss_since_anchor": 0.007}, PAIRED), "must be max_loss or more"),
        (anchored(anchors=[named(variant="bf17")]), "an anchor is for cpu/bf17/balanced, which the recipe does not have"),
        (anchored(anchors=[named(), named(run="other")]), "cpu/bf16/balanced has more than one anchor"),
    ],
)
def test_what_does_not_go_together_is_one_clear_error(tmp_path: Path, document: Document, message: str) -> None:
    with pytest.raises(CallerError) as raised:
        load_recipe(str(write(document, tmp_path / "mine.yaml")))
    assert message in str(raised.value)


UNFAILABLE: list[dict[str, Any]] = [
    SCORE | {"minimum": 0},
    SCORE | {"reference": 0.1, "margin": 0.1},
    SCORE | {"max_loss": 1},
    {"metric": "truncated_answers", "maximum": 1, "unit": "fraction"},
    {"metric": "output_throughput_tok_s", "minimum": 0, "unit": "tok/s"},
    # The step's own token is one.
    {"metric": "acceptance_length_tok", "minimum": 1, "unit": "tok"},
]


@pytest.mark.parametrize("gate", UNFAILABLE, ids=str)
def test_a_gate_that_nothing_can_fail_is_refused(tmp_path: Path, gate: dict[str, Any]) -> None:
    document = reference() | {"gates": [gate]}
    with pytest.raises(CallerError) as raised:
        load_recipe(str(write(document, tmp_path / "mine.yaml")))
    assert f"nothing can fail the gate on {gate['metric']}" in raised.value.problem


@pytest.mark.parametrize(
    "gate",
    [
        SCORE | {"minimum": 1},
        SCORE | {"minimum": 0.001},
        SCORE | {"max_loss": 0.999},
        {"metric": "truncated_answers", "maximum": 0, "unit": "fraction"},
        {"metric": "acceptance_length_tok", "minimum": 1.01, "unit": "tok"},
        RELATIVE | {"max_worsening": 1000.0},
    ],
    ids=str,
)
def test_a_gate_that_little_can_fail_is_taken(tmp_path: Path, gate: dict[str, Any]) -> None:
    document = reference() | {"gates": [gate]}
    assert len(load_recipe(str(write(document, tmp_path / "mine.yaml"))).recipe.gates) == 1


def test_what_a_metric_can_be() -> None:
    possible = {name: METRICS[name].possible for name in ("exact_match", "startup_s", "soak_ttft_growth_pct_h")}
    assert possible == {"exact_match": (0, 1), "startup_s": (0, math.inf), "soak_ttft_growth_pct_h": (-math.inf, math.inf)}


@pytest.mark.parametrize(
    "document",
    [
        with_load_gate(P99, num_prompts=918),
        with_load_gate(GOODPUT, slo={"ttft_ms": 200.0}),
        with_waiver(),
        with_waiver(gate="contract_seed"),
        with_waiver(gate="contract_chat") | {"capabilities": ["chat"]},
    ],
)
def test_what_goes_together_is_taken(tmp_path: Path, document: Document) -> None:
    assert load_recipe(str(write(document, tmp_path / "mine.yaml"))).recipe.name == "reference"


def test_a_recipe_with_one_task_need_not_name_it_and_one_with_several_names_it(tmp_path: Path) -> None:
    document = two_tasks()
    document["gates"] = [gate | {"task": "gsm8k"} for gate in document["gates"] if gate["metric"] == "exact_match"]
    for source in ("reference", str(write(document, tmp_path / "mine.yaml"))):
        recipe = load_recipe(source).recipe
        (profile,) = recipe.gpu_types["cpu"].profiles.values()
        assert {gate.task for gate in recipe.gates_of(profile) if gate.filter} == {"gsm8k"}


def test_a_gate_against_the_anchor_stands_beside_one_against_the_baseline(tmp_path: Path) -> None:
    document = anchored(PAIRED, SINCE_ANCHOR, anchors=[named()])
    recipe = load_recipe(str(write(document, tmp_path / "mine.yaml"))).recipe
    assert [gate.against for gate in recipe.gates if gate.is_compared] == ["likelihood", "answers", "anchor"]
    assert recipe.anchors[0].run == named()["run"]
