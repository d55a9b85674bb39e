"""Other projects' gates, from their published formulas (August to November 2026), for `gates.py`.

Each gate gets one run's right answers, the number of questions and the reference, and says whether the run passes.
"""

import math
from collections.abc import Callable

from scipy import stats

AccuracyGate = Callable[[int, int, float], bool]

# TensorRT-LLM's accuracy_core.py, for gsm8k: z for the chances of a wrong fail and of a wrong pass, SD of one answer in points.
Z_ALPHA, Z_BETA, SIGMA = float(stats.norm.ppf(0.05)), float(stats.norm.ppf(0.2)), 50.0


def vllm_relative(right: int, questions: int, reference: float) -> bool:
    """As `.buildkite/lm-eval-harness/test_lm_eval_correctness.py`."""
    return right / questions >= reference * (1 - 0.08)


def vllm_absolute(right: int, questions: int, reference: float) -> bool:
    """As `tests/evals/gsm8k`."""
    return right / questions >= reference - 0.08


def vllm_wilson(rtol: float) -> AccuracyGate:
    """vLLM's pull request 44704: the one-sided lower bound of 95 % by Wilson's formula."""

    def passes(right: int, questions: int, reference: float) -> bool:
        return wilson_lower(right, questions) >= reference * (1 - rtol)

    return passes


def wilson_lower(right: int, questions: int) -> float:
    z, share = -Z_ALPHA, right / questions
    reach = z * math.sqrt(share * (1 - share) / questions + (z / (2 * questions)) ** 2)
    return (share + z * z / (2 * questions) - reach) / (1 + z * z / questions)


def tensorrt_llm(right: int, questions: int, reference: float) -> bool:
    return 100 * right / questions >= tensorrt_llm_threshold(100 * reference, questions)


def tensorrt_llm_threshold(reference: float, questions: int) -> float:
    """The threshold in points, like the reference."""
    return reference + Z_ALPHA * math.sqrt(2 * SIGMA**2 / questions)


def tensorrt_llm_visible(questions: int) -> float:
    """The smallest loss in points that it finds in 80 % of runs."""
    return -(Z_ALPHA + Z_BETA) * math.sqrt(2 * SIGMA**2 / questions)


def inferencex(right: int, questions: int, _reference: float) -> bool:
    """As `utils/evals/thresholds.yaml`: gsm8k's default, for any model."""
    return right / questions >= 0.90


def tt_inference_server(right: int, questions: int, reference: float) -> bool:
    """As `acceptance_criteria.py`."""
    return right >= math.floor(questions * reference * (1 - 0.05))


ACCURACY: dict[str, AccuracyGate] = {
    "vLLM, 8 % relative": vllm_relative,
    "vLLM, .08 absolute": vllm_absolute,
    "vLLM 44704, Wilson, rtol .08": vllm_wilson(0.08),
    "vLLM 44704, Wilson, rtol 0": vllm_wilson(0.0),
    "TensorRT-LLM, hypothesis test": tensorrt_llm,
    "InferenceX, .90": inferencex,
    "tt-inference-server, 5 %": tt_inference_server,
}
