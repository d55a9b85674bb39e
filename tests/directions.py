"""Which way each metric is better, written by hand: more throughput is better, more time is worse.

Tests of directions take this table, not the code's own. A new metric gets its line here, unless its unit is that of a cost.
"""

# The checks of the API's contract.
CONTRACT = [
    "contract_models",
    "contract_completion",
    "contract_stream",
    "contract_stream_usage",
    "contract_stream_end",
    "contract_max_tokens",
    "contract_stop",
    "contract_n",
    "contract_seed",
    "contract_logprobs",
    "contract_prompt_too_long",
    "contract_bad_body",
    "contract_unknown_model",
    "contract_alive",
    "contract_hang_up",
    "contract_many",
]
# Those that each capability adds.
CAPABILITIES = {
    "chat": [
        "contract_chat",
        "contract_chat_stream",
        "contract_chat_stream_usage",
        "contract_chat_stream_end",
        "contract_chat_turns",
        "contract_chat_system",
        "contract_chat_end",
    ],
    "tools": [
        "contract_tools_auto",
        "contract_tools_stream",
        "contract_tools_none",
        "contract_tools_required",
        "contract_tools_named",
        "contract_tools_result",
    ],
    "parallel_tools": ["contract_parallel_tools", "contract_parallel_tools_stream"],
    "reasoning": ["contract_reasoning", "contract_reasoning_stream", "contract_reasoning_tags"],
    "json_schema": ["contract_json_object", "contract_json_schema"],
    "vision": ["contract_vision", "contract_vision_two", "contract_vision_broken"],
    "responses": ["contract_responses", "contract_responses_stream"],
}
HIGHER_IS_BETTER = {
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
    "unthinking_answers",
    "answer_nll_nat_per_tok",
    "text_nll_nat_per_tok",
    "soak_failed_share",
}
