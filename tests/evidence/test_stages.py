"""The table of the stages: which are part of a run, what determines them, and that each of them is in it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evidence.test_sharing import cell
from vllm_qualify.evidence.stages import TABLE, on_the_server, parse_unfinished, wanted
from vllm_qualify.plan.cell import CellPlan, LikelihoodPlan
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.recipe.metrics import METRICS, STAGES, Stage
from vllm_qualify.recipe.workload import Fit, Likelihood, Soak, Sweep

COMPARED = gate_of(metric="ttft_p50_ms", max_worsening=0.05, unit="fraction")
ALWAYS: list[Stage] = ["serve", "smoke", "accuracy", "load"]


def scoring(plan: CellPlan) -> CellPlan:
    """Which becomes a baseline."""
    return plan.model_copy(update={"likelihood": LikelihoodPlan(settings=Likelihood()), "establishes": True})


def drafting(plan: CellPlan) -> CellPlan:
    server = plan.server.model_copy(update={"arguments": plan.server.arguments | {"speculative-config": {"method": "ngram"}}})
    return plan.model_copy(update={"server": server})


def test_every_stage_is_in_the_table_in_its_order() -> None:
    assert tuple(TABLE) == STAGES
    assert all(name == kind.name for name, kind in TABLE.items())


@pytest.mark.parametrize(
    ("change", "more", "on_server"),
    [
        (lambda plan: plan, [], []),
        (lambda plan: plan.model_copy(update={"sweep": Sweep(concurrencies=[1])}), ["sweep"], ["sweep"]),
        (lambda plan: plan.model_copy(update={"soak": Soak(soak_min=1.0, soak_share=0.5)}), ["soak"], ["soak"]),
        (drafting, ["speculation"], ["speculation"]),
        (lambda plan: plan.model_copy(update={"starts": 2, "gates": [*plan.gates, COMPARED]}), ["starts"], []),
        (lambda plan: plan.model_copy(update={"starts": 1, "gates": [*plan.gates, COMPARED]}), [], []),
        (lambda plan: plan.model_copy(update={"starts": 2}), [], []),
        (lambda plan: plan.model_copy(update={"fit": Fit(max_num_seqs=True)}), ["fit"], []),
        (lambda plan: plan.model_copy(update={"likelihood": LikelihoodPlan(settings=Likelihood())}), [], []),
    ],
    ids=["plain", "sweep", "soak", "draft", "starts", "one start", "compares nothing", "fit", "likelihood without a baseline"],
)
def test_the_plan_tells_which_stages_are_part_of_its_run(
    change: Callable[[CellPlan], CellPlan], more: list[Stage], on_server: list[Stage]
) -> None:
    plan = change(cell())
    assert set(wanted(plan)) == {*ALWAYS, *more}
    assert on_the_server(plan) == [*ALWAYS[1:], *on_server]


def test_a_run_that_becomes_a_baseline_scores_its_answers_before_its_load() -> None:
    assert on_the_server(scoring(cell())) == ["smoke", "accuracy", "likelihood", "load"]


def test_the_report_shows_the_settings_of_what_is_asked_for() -> None:
    plan = scoring(cell()).model_copy(update={"sweep": Sweep(concurrencies=[1, 2])})
    shown = {title: settings for kind in TABLE.values() for title, settings in kind.settings(plan).items()}
    assert list(shown) == ["smoke", "accuracy: gsm8k", "likelihood", "load", "sweep"]
    assert shown["sweep"]["concurrencies"] == [1, 2]


@pytest.mark.parametrize("stage", ["serve", "smoke", "accuracy", "likelihood", "load"])
def test_a_stage_that_left_nothing_has_measurements_that_say_so(stage: Stage, tmp_path: Path) -> None:
    rows = parse_unfinished(stage, scoring(cell()), tmp_path)
    assert rows
    assert all(row.invalid_because and METRICS[row.metric].stage == stage for row in rows)
