"""Which way each metric is better, written by hand: more throughput is better, more time is worse.

Tests of directions take this table, not the code's own. A new metric gets its line here.
"""

HIGHER_IS_BETTER = {
    "nccl_infiniband",
    "smoke_model_identity",
    "smoke_finish_reason",
    "smoke_usage",
    "smoke_determinism",
    "smoke_golden",
    "exact_match",
    "acc",
    "acc_norm",
    "f1",
    "em",
    "prompt_level_strict_acc",
    "prompt_level_loose_acc",
    "request_throughput_req_s",
    "output_throughput_tok_s",
    "total_throughput_tok_s",
    "goodput_req_s",
    "acceptance_length_tok",
    "speculative_speedup",
    "speculative_speedup_batch1",
    "acceptance_length_batch1_tok",
    "speculative_same_text",
    "slo_concurrency_req",
    "slo_request_rate_req_s",
    "slo_goodput_req_s",
}
LOWER_IS_BETTER = {
    "startup_s",
    "startup_warm_s",
    "startup_image_s",
    "startup_process_s",
    "startup_weights_s",
    "startup_compile_s",
    "startup_graphs_s",
    "startup_ready_s",
    "gpu_idle_share",
    "truncated_answers",
    "slo_cost_usd_mtok",
    *(f"{time}_{at}_ms" for time in ("ttft", "tpot", "itl", "e2el") for at in ("mean", "p50", "p90", "p99")),
}
