"""The table of the stages: which are part of a run, what determines them, and that each of them is in it."""

from pathlib import Path

import pytest

from tests.builders.comparisons import lone_cell
from vllm_qualify.evidence.stages.table import TABLE, on_the_server, parse_unfinished, wanted_stages
from vllm_qualify.plan.cell import CellPlan, LikelihoodPlan
from vllm_qualify.recipe.accuracy import Likelihood
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.recipe.metrics import METRICS, STAGES, StageName
from vllm_qualify.recipe.searches import Fit, Soak, Sweep

COMPARED = gate_of(metric="ttft_p50_ms", max_worsening=0.05, unit="fraction")
ALWAYS: list[StageName] = ["serve", "smoke", "accuracy", "load"]


def scoring(plan: CellPlan) -> CellPlan:
    """Which becomes a baseline."""
    return plan.model_copy(update={"likelihood": LikelihoodPlan(settings=Likelihood()), "establishes": True})


def drafting(plan: CellPlan) -> CellPlan:
    server = plan.server.model_copy(update={"arguments": plan.server.arguments | {"speculative-config": {"method": "ngram"}}})
    return plan.model_copy(update={"server": server})


def test_every_stage_is_in_the_table_in_its_order() -> None:
    assert tuple(TABLE) == STAGES
    assert all(name == kind.name for name, kind in TABLE.items())


LIKELIHOOD = LikelihoodPlan(settings=Likelihood())
PLAIN = lone_cell()
# With what is part of the run besides, and what of that is measured on the server.
PLANS: dict[str, tuple[CellPlan, list[StageName], list[StageName]]] = {
    "plain": (PLAIN, [], []),
    "sweep": (lone_cell(sweep=Sweep(concurrencies=[1])), ["sweep"], ["sweep"]),
    "soak": (lone_cell(soak=Soak(soak_min=1.0, soak_share=0.5)), ["soak"], ["soak"]),
    "draft": (drafting(PLAIN), ["speculation"], ["speculation"]),
    "starts": (PLAIN.model_copy(update={"starts": 2, "gates": [*PLAIN.gates, COMPARED]}), ["starts"], []),
    "one start": (PLAIN.model_copy(update={"starts": 1, "gates": [*PLAIN.gates, COMPARED]}), [], []),
    "compares nothing": (lone_cell(starts=2), [], []),
    "fit": (lone_cell(fit=Fit(max_num_seqs=True)), ["fit"], []),
    "likelihood without a baseline": (lone_cell(likelihood=LIKELIHOOD), [], []),
}


@pytest.mark.parametrize(("plan", "more", "on_server"), PLANS.values(), ids=PLANS)
def test_the_plan_tells_which_stages_are_part_of_its_run(
    plan: CellPlan, more: list[StageName], on_server: list[StageName]
) -> None:
    assert set(wanted_stages(plan)) == {*ALWAYS, *more}
    assert on_the_server(plan) == [*ALWAYS[1:], *on_server]


def test_a_run_that_becomes_a_baseline_scores_its_answers_before_its_load() -> None:
    """The report shows the settings of what is asked for."""
    plan = scoring(lone_cell()).model_copy(update={"sweep": Sweep(concurrencies=[1, 2])})
    assert on_the_server(plan) == ["smoke", "accuracy", "likelihood", "load", "sweep"]
    shown = {title: settings for kind in TABLE.values() for title, settings in kind.settings(plan).items()}
    assert list(shown) == ["smoke", "accuracy: gsm8k", "likelihood", "load", "sweep"]
    assert shown["sweep"]["concurrencies"] == [1, 2]


@pytest.mark.parametrize("stage", ["serve", "smoke", "accuracy", "likelihood", "load"])
def test_a_stage_that_left_nothing_has_measurements_that_say_so(stage: StageName, tmp_path: Path) -> None:
    rows = parse_unfinished(stage, scoring(lone_cell()), tmp_path)
    assert rows
    assert all(row.invalid_because and METRICS[row.metric].stage == stage for row in rows)
