"""A gate on a score, and the measurement that it is judged by."""

from vllm_qualify.evidence.measurement import Interval, Measurement
from vllm_qualify.recipe.gates import gate_of

GATE = gate_of(metric="exact_match", task="gsm8k", filter="strict-match", minimum=0.5, unit="fraction")
MEASURED = Measurement(
    metric="exact_match",
    task="gsm8k",
    filter="strict-match",
    value=0.9,
    interval=Interval(lower=0.8, upper=0.95),
    unit="fraction",
    sample_count=100,
    source="results.json",
)
