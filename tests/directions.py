"""Which way each metric is better, written by hand: more throughput is better, more time is worse.

Tests of directions take this table, not the code's own. A new metric gets its line here, unless its unit is that of a cost.
"""


def _checks(names: str) -> list[str]:
    return [f"contract_{name}" for name in names.split()]


# The checks of the API's contract.
CONTRACT = _checks(
    "models completion stream stream_usage stream_end max_tokens stop n seed logprobs prompt_too_long bad_body unknown_model"
    " alive hang_up many"
)
# Those that each capability adds.
CAPABILITIES = {
    "chat": _checks("chat chat_stream chat_stream_usage chat_stream_end chat_turns chat_system chat_end"),
    "tools": _checks("tools_auto tools_stream tools_none tools_required tools_named tools_text tools_result tools_again"),
    "parallel_tools": _checks("parallel_tools parallel_tools_stream"),
    "reasoning": _checks("reasoning reasoning_stream reasoning_tags"),
    "json_schema": _checks("json_object json_schema json_schema_all_of"),
    "vision": _checks("vision vision_two vision_broken"),
    "responses": _checks("responses responses_stream"),
}
# That of the schemas which a recipe brings.
OWN_SCHEMAS = "contract_own_schemas"
HIGHER_IS_BETTER = {
    OWN_SCHEMAS,
    "path_cold",
    "path_cached",
    "path_concurrent",
    "path_evicted",
    "path_aborted",
    "path_awake",
    "path_constrained",
    "path_reordered",
    "schema_valid_share",
    "tool_call_valid_share",
    "nccl_infiniband",
    "smoke_model_identity",
    "smoke_finish_reason",
    "smoke_usage",
    "smoke_determinism",
    "smoke_golden",
    *CONTRACT,
    *(check for checks in CAPABILITIES.values() for check in checks),
    "exact_match",
    "acc",
    "acc_norm",
    "f1",
    "em",
    "prompt_level_strict_acc",
    "prompt_level_loose_acc",
    "relaxed_accuracy",
    "anywhere_accuracy",
    "string_match_all",
    "answer_top1_share",
    "text_top1_share",
    "request_throughput_req_s",
    "output_throughput_tok_s",
    "total_throughput_tok_s",
    "output_throughput_tok_s_gpu",
    "total_throughput_tok_s_gpu",
    "peak_output_chunks_per_s",
    "goodput_req_s",
    "prefix_hit_share",
    "acceptance_length_tok",
    "speculative_speedup",
    "speculative_speedup_batch1",
    "acceptance_length_batch1_tok",
    "speculative_same_text",
    "slo_concurrency_req",
    "slo_request_rate_req_s",
    "slo_goodput_req_s",
}
# Less time, memory and cost is better: metrics of these units need no line.
COSTS = {"s", "ms", "MiB", "MiB/h", "%/h", "usd/Mtok"}
# And so is less of these, of other units.
LOWER_IS_BETTER = {
    "gpu_idle_share",
    "truncated_answers",
    "output_tok_per_answer",
    "looping_answers",
    "other_script_answers",
    "unread_answers",
    "lost_by_form_answers",
    "unthinking_answers",
    "answer_nll_nat_per_tok",
    "text_nll_nat_per_tok",
    "soak_failed_share",
    *(f"path_{path}_changed_share" for path in ("cold", "cached", "concurrent", "evicted", "aborted", "awake")),
    *(f"path_{path}_first_token_nll_change_nat" for path in ("cold", "cached", "concurrent", "evicted", "aborted", "awake")),
}
