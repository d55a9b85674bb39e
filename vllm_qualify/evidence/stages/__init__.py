"""The stages of a qualification, a file each. A stage measures into its own folder, and is parsed from there, now or later."""

from vllm_qualify.evidence.stages.accuracy import AskingLimits, accuracy_stage, asks_alike
from vllm_qualify.evidence.stages.baseline import baseline_stage
from vllm_qualify.evidence.stages.contract import contract_stage
from vllm_qualify.evidence.stages.fit import fit_result, fit_stage
from vllm_qualify.evidence.stages.likelihood import likelihood_stage, scored_answers, scored_texts, scores_alike
from vllm_qualify.evidence.stages.load import load_stage, loads_of, parse_beside
from vllm_qualify.evidence.stages.serve import idle_gpus, serve_stage, warm_starts
from vllm_qualify.evidence.stages.smoke import smoke_stage
from vllm_qualify.evidence.stages.soak import soak_stage
from vllm_qualify.evidence.stages.speculation import servers_in_turn, speculation_in_turn, speculation_stage, why_not_compared
from vllm_qualify.evidence.stages.stage import MACHINE, UNKEPT, StageKind, stage_folder, start_s
from vllm_qualify.evidence.stages.starts import (
    begin_start,
    end_start,
    measure_start,
    parse_beside_in,
    plan_of_start,
    starts_stage,
)
from vllm_qualify.evidence.stages.sweep import sweep_plan, sweep_stage
from vllm_qualify.evidence.stages.table import (
    TABLE,
    judged_by,
    longest_s,
    on_the_server,
    parse,
    parse_unfinished,
    taken_over,
    wanted,
)

__all__ = [
    "MACHINE",
    "TABLE",
    "UNKEPT",
    "AskingLimits",
    "StageKind",
    "accuracy_stage",
    "asks_alike",
    "baseline_stage",
    "begin_start",
    "contract_stage",
    "end_start",
    "fit_result",
    "fit_stage",
    "idle_gpus",
    "judged_by",
    "likelihood_stage",
    "load_stage",
    "loads_of",
    "longest_s",
    "measure_start",
    "on_the_server",
    "parse",
    "parse_beside",
    "parse_beside_in",
    "parse_unfinished",
    "plan_of_start",
    "scored_answers",
    "scored_texts",
    "scores_alike",
    "serve_stage",
    "servers_in_turn",
    "smoke_stage",
    "soak_stage",
    "speculation_in_turn",
    "speculation_stage",
    "stage_folder",
    "start_s",
    "starts_stage",
    "sweep_plan",
    "sweep_stage",
    "taken_over",
    "wanted",
    "warm_starts",
    "why_not_compared",
]
