"""What answers and a load take, reported before they start, and of a load at each look: minutes, GPU-minutes, and the cost."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_qualify.evidence.load.client import Made
from vllm_qualify.evidence.measurement import UNUSABLE, StageEvidence
from vllm_qualify.evidence.starts import FIRST, repeats_of
from vllm_qualify.judge.compare.places import BASELINE, LOAD_STAGE
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.accuracy import USUAL_TOKENS
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.metrics import OUTPUT_THROUGHPUT, StageName
from vllm_qualify.recipe.roles import WORK, part

TPOT = ("tpot_p50_ms", "tpot_mean_ms", "tpot_p90_ms", "tpot_p99_ms")


def line_before_stage(stage: StageName, plan: CellPlan, evidence: Path) -> str:
    """The line before a stage of which it is known, or demanded, how long it will take; empty for others."""
    if stage == "accuracy":
        return line_before_accuracy(plan, evidence)
    if stage == "load":
        return line_before_load(plan, evidence)
    if stage != "soak" or plan.soak is None:
        return ""
    clients, rate = plan.soak.clients_and_rate(plan.load)
    at = f"{clients} client{'s' if clients > 1 else ''}" if rate is None else f"{rate:g} req/s"
    return f"soak: {cost_in_words(plan, plan.soak.duration_s)}, with {at}"


def line_before_load(plan: CellPlan, evidence: Path) -> str:
    """The line before a load's first repeat. The estimate is by the baseline's load or by what the gates demand."""
    looks, known = plan.load.looks, _expected_repeat(plan, evidence)
    if known is None:
        most = cost_in_words(plan, looks[-1] * _count_turns(plan) * plan.load.time_limit_s)
        duration = f"; the first one will show how long they take, and by time_limit_s up to {most}"
    else:
        repeat_s, why = known
        duration = f" of about {repeat_s:.0f} s, {why}: {cost_in_words(plan, looks[0] * repeat_s, looks[-1] * repeat_s)}"
    return f"load: {_repeats_words(looks)}{duration}{_budget_words(plan.load)}{_starts_words(plan)}"


def line_before_accuracy(plan: CellPlan, evidence: Path) -> str:
    """The line before the first question: how many answers of how many tokens, and how long the most would take.

    The rate is that of the baseline's load. Most answers are shorter than they may be. A length of a task's own is not known
    yet: lm-eval has not loaded it.
    """
    tasks, most_tok = list[str](), 0
    for task in plan.accuracy:
        questions, reply_tok = task.settings.num_questions, task.settings.max_gen_toks or USUAL_TOKENS
        answers = _range_words(f"{questions * task.least_repetitions:,}", f"{questions * task.repetitions:,}")
        tasks.append(f"{task.name} {answers} answer{'' if answers == '1' else 's'} of up to {reply_tok:,} tokens")
        most_tok += questions * task.repetitions * reply_tok
    own = [task.name for task in plan.accuracy if task.settings.max_gen_toks is None]
    more = f", or more if {' or '.join(own)} has a longer reply of its own" if own else ""
    rate = _rate_of_baseline(plan, evidence)
    cost = f", at the rate of the baseline's load {cost_in_words(plan, most_tok / rate)}" if rate else ""
    return f"accuracy: {', '.join(tasks)}; at most {most_tok:,} tokens{more}{cost}"


def line_before_start(plan: CellPlan, number: int, gates: Sequence[Gate]) -> str:
    """The line before a further start of the server: for which gates, and of how many starts."""
    waiting = ", ".join(gate.label for gate in gates)
    return f"starts: the server is started again, as start {number} of at most {plan.starts}, for {waiting}"


def line_after_repeat(plan: CellPlan, made: Made) -> str | None:
    """The line after the first repeat, and at each look that is not the last; None after other repeats."""
    looks = plan.load.looks
    left = looks[-1] - made.repeats
    if left == 0 or (made.undecided is not None and not made.undecided):
        return None
    if made.undecided is not None:
        times = cost_in_words(plan, left * made.longest_s)
        state = f"after {made.repeats} repeat{'s' if made.repeats > 1 else ''} undecided: {', '.join(made.undecided)}"
        return f"load: {state}; up to {left} more: {times}{_budget_words(plan.load)}"
    if made.repeats > 1:
        return None
    least = looks[0] - made.repeats
    more, times = _range_words(f"{least}", f"{left}"), cost_in_words(plan, least * made.longest_s, left * made.longest_s)
    return f"load: {more} more of about {made.longest_s:.0f} s: {times}{_budget_words(plan.load)}"


def cost_in_words(plan: CellPlan, least_s: float, most_s: float | None = None) -> str:
    """`11 to 22 min, 44 to 88 GPU-min, $1.83 to $3.67` for all GPUs that a load holds. A server on a CPU has no GPU-minutes."""
    gpus = len(plan.server.gpus) + (len(plan.beside.gpus) if plan.beside else 0)
    both = [seconds / 60 for seconds in (least_s, least_s if most_s is None else most_s)]
    costs = [f"{_range_words(*map(_figure_words, both))} min"]
    if gpus:
        costs.append(f"{_range_words(*(_figure_words(gpus * minutes) for minutes in both))} GPU-min")
    if plan.price_usd_gpu_hour is not None:
        # A server on a CPU counts as one machine, as in the sweep.
        usd_min = plan.price_usd_gpu_hour * max(1, gpus) / 60
        costs.append(_range_words(*(f"${usd_min * minutes:,.2f}" for minutes in both)))
    return ", ".join(costs)


def _range_words(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _repeats_words(looks: range) -> str:
    return _range_words(f"{looks[0]}", f"{looks[-1]}") + (" repeat" if looks[-1] == 1 else " repeats")


def _figure_words(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def _count_turns(plan: CellPlan) -> int:
    return 2 if plan.beside else 1


def _budget_words(settings: Load) -> str:
    return "" if settings.time_budget_s is None else f"; within time_budget_s {settings.time_budget_s:g}"


def _starts_words(plan: CellPlan) -> str:
    """How often the server may be started again for a load that is compared, and with how many repeats each time."""
    if plan.starts == FIRST or not any(gate.against == "load" for gate in plan.gates):
        return ""
    more = plan.starts - FIRST
    starts = f"{more} more start{'s' if more > 1 else ''} of the server"
    return f"; then {_repeats_words(repeats_of(plan.load))} on each of up to {starts}"


def _expected_repeat(plan: CellPlan, evidence: Path) -> tuple[float, str] | None:
    """How long one repeat takes, with that of a baseline in turns, and the reason; None if it is not known."""
    if plan.load.request_rate:
        return _count_turns(plan) * plan.load.num_prompts / plan.load.request_rate, "at its request_rate"
    if plan.load.trace:
        return None
    tokens = (plan.load.num_prompts + plan.load.num_warmups) * plan.load.output_len * _count_turns(plan)
    if rate := _rate_of_baseline(plan, evidence):
        return tokens / rate, "as fast as the baseline"
    demanded = max(_demanded_rates(plan), default=None)
    return (tokens / demanded, "if as fast as its gates demand") if demanded else None


def _rate_of_baseline(plan: CellPlan, evidence: Path) -> float | None:
    """The baseline's output tokens per second, if its load was like the plan's; else None."""
    if plan.baseline is None:
        return None
    # How many requests are sent, from which seed, and what is counted of them, hardly change the rate.
    same = {"num_prompts": 0, "num_warmups": 0, "seed": 0, "window": "", "counted_from": None, "slo": None}
    then, now = (part(load, WORK) | same for load in (plan.baseline.load, plan.load))
    if then != now:
        return None
    try:
        stage = StageEvidence.model_validate_json((evidence / BASELINE / LOAD_STAGE).read_bytes())
    except UNUSABLE:
        # The comparison reports this.
        return None
    return next((row.value for row in stage.measurements if row.metric == OUTPUT_THROUGHPUT and row.against is None), None)


def _demanded_rates(plan: CellPlan) -> Iterator[float]:
    """The output tokens per second that absolute gates require. For a time per token, every client counts as under way."""
    for gate in plan.gates:
        at_least, at_most = gate.limits
        if gate.is_compared:
            continue
        if gate.metric == OUTPUT_THROUGHPUT and at_least:
            yield at_least
        elif gate.metric in TPOT and at_most:
            yield 1000 * plan.load.max_concurrency / at_most
