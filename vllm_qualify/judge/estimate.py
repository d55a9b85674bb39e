"""What answers and a load take, reported before they start, and of a load at each look: minutes, GPU-minutes, and the cost."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_qualify.evidence.load.client import Made
from vllm_qualify.evidence.load.figures import OUTPUT
from vllm_qualify.evidence.measurement import UNUSABLE, StageEvidence
from vllm_qualify.evidence.starts import FIRST, repeats_of
from vllm_qualify.judge.compare import BASELINE, LOAD_STAGE
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.workload import USUAL_TOKENS, Load

# Settings that must be the same in two loads, so that the throughput of one says how long the other takes.
ALIKE = {"input_len", "output_len", "length_spread", "prompts_sha256", "api", "max_concurrency"}
TPOT = ("tpot_p50_ms", "tpot_mean_ms", "tpot_p90_ms", "tpot_p99_ms")


def line_before(plan: CellPlan, evidence: Path) -> str:
    """The line before a load's first repeat. The estimate is by the baseline's load or by what the gates demand."""
    looks = plan.load.looks
    repeats = _range(f"{looks[0]}", f"{looks[-1]}") + (" repeat" if looks[-1] == 1 else " repeats")
    known = _expected(plan, evidence)
    if known is None:
        most = taken(plan, looks[-1] * _turns(plan) * plan.load.time_limit_s)
        duration = f"the first one will show how long they take, and by time_limit_s up to {most}"
        return f"load: {repeats}; {duration}{_budget(plan.load)}{_starts(plan)}"
    repeat_s, why = known
    times = taken(plan, looks[0] * repeat_s, looks[-1] * repeat_s)
    return f"load: {repeats} of about {repeat_s:.0f} s, {why}: {times}{_budget(plan.load)}{_starts(plan)}"


def line_before_accuracy(plan: CellPlan, evidence: Path) -> str:
    """The line before the first question: how many answers of how many tokens, and how long the most would take.

    The rate is that of the baseline's load. Most answers are shorter than they may be. A length of a task's own is not known
    yet: lm-eval has not loaded it.
    """
    tasks = [f"{task.name} {_answers(task)}" for task in plan.accuracy]
    tokens = sum(_most_answers(task) * (task.settings.max_gen_toks or USUAL_TOKENS) for task in plan.accuracy)
    own = [task.name for task in plan.accuracy if task.settings.max_gen_toks is None]
    more = f", or more if {' or '.join(own)} has a longer reply of its own" if own else ""
    line = f"accuracy: {', '.join(tasks)}; at most {tokens:,} tokens{more}"
    rate = _rate_of_baseline(plan, evidence)
    return f"{line}, at the rate of the baseline's load {taken(plan, tokens / rate)}" if rate else line


def _answers(task: TaskPlan) -> str:
    least = task.settings.num_questions * task.least_repetitions
    answers = _range(f"{least:,}", f"{_most_answers(task):,}")
    return f"{answers} answer{'' if answers == '1' else 's'} of up to {task.settings.max_gen_toks or USUAL_TOKENS:,} tokens"


def _most_answers(task: TaskPlan) -> int:
    return task.settings.num_questions * task.repetitions


def line_before_soak(plan: CellPlan) -> str:
    """The line before a soak. Raises ValueError for a cell without one."""
    if plan.soak is None:
        raise ValueError("the profile has no soak")
    clients, rate = plan.soak.of(plan.load)
    at = f"{clients} client{'s' if clients > 1 else ''}" if rate is None else f"{rate:g} req/s"
    return f"soak: {taken(plan, plan.soak.duration_s)}, with {at}"


def line_before_start(plan: CellPlan, number: int, gates: Sequence[Gate]) -> str:
    """The line before a further start of the server: for which gates, and of how many starts."""
    waiting = ", ".join(gate.label for gate in gates)
    return f"starts: the server is started again, as start {number} of at most {plan.starts}, for {waiting}"


def after(plan: CellPlan, made: Made) -> str | None:
    """The line after the first repeat, and at each look that is not the last; None after other repeats."""
    looks = plan.load.looks
    left = looks[-1] - made.repeats
    if left == 0 or (made.undecided is not None and not made.undecided):
        return None
    if made.undecided is not None:
        times = taken(plan, left * made.longest_s)
        state = f"after {made.repeats} repeat{'s' if made.repeats > 1 else ''} undecided: {', '.join(made.undecided)}"
        return f"load: {state}; up to {left} more: {times}{_budget(plan.load)}"
    if made.repeats > 1:
        return None
    least = looks[0] - made.repeats
    times = taken(plan, least * made.longest_s, left * made.longest_s)
    return f"load: {_range(f'{least}', f'{left}')} more of about {made.longest_s:.0f} s: {times}{_budget(plan.load)}"


def taken(plan: CellPlan, least_s: float, most_s: float | None = None) -> str:
    """`11 to 22 min, 44 to 88 GPU-min, $1.83 to $3.67` for all GPUs that a load holds. A server on a CPU has no GPU-minutes."""
    gpus = len(plan.server.gpus) + (len(plan.beside.gpus) if plan.beside else 0)
    both = [seconds / 60 for seconds in (least_s, least_s if most_s is None else most_s)]
    costs = [f"{_range(*map(_figure, both))} min"]
    if gpus:
        costs.append(f"{_range(*(_figure(gpus * minutes) for minutes in both))} GPU-min")
    if plan.price_usd_gpu_hour is not None:
        # A server on a CPU counts as one machine, as in the sweep.
        usd_min = plan.price_usd_gpu_hour * max(1, gpus) / 60
        costs.append(_range(*(f"${usd_min * minutes:,.2f}" for minutes in both)))
    return ", ".join(costs)


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def _turns(plan: CellPlan) -> int:
    return 2 if plan.beside else 1


def _budget(settings: Load) -> str:
    return "" if settings.time_budget_s is None else f"; within time_budget_s {settings.time_budget_s:g}"


def _starts(plan: CellPlan) -> str:
    """How often the server may be started again for a load that is compared, and with how many repeats each time."""
    if plan.starts == FIRST or not any(gate.against == "load" for gate in plan.gates):
        return ""
    repeats, more = repeats_of(plan.load), plan.starts - FIRST
    each = _range(f"{repeats[0]}", f"{repeats[-1]}") + (" repeat" if repeats[-1] == 1 else " repeats")
    again = f"{each} on each of up to {more} more start{'s' if more > 1 else ''}"
    return f"; then {again} of the server"


def _expected(plan: CellPlan, evidence: Path) -> tuple[float, str] | None:
    """How long one repeat takes, with that of a baseline in turns, and the reason; None if it is not known."""
    if plan.load.request_rate:
        return _turns(plan) * plan.load.num_prompts / plan.load.request_rate, "at its request_rate"
    if plan.load.trace:
        return None
    tokens = (plan.load.num_prompts + plan.load.num_warmups) * plan.load.output_len * _turns(plan)
    rate = _rate_of_baseline(plan, evidence)
    if rate:
        return tokens / rate, "as fast as the baseline"
    demanded = max(_demanded(plan), default=None)
    return (tokens / demanded, "if as fast as its gates demand") if demanded else None


def _rate_of_baseline(plan: CellPlan, evidence: Path) -> float | None:
    """The baseline's output tokens per second, if its load was like the plan's; else None."""
    if plan.baseline is None:
        return None
    then, now = (load.model_dump(include=ALIKE) for load in (plan.baseline.load, plan.load))
    if then != now:
        return None
    try:
        stage = StageEvidence.model_validate_json((evidence / BASELINE / LOAD_STAGE).read_bytes())
    except UNUSABLE:
        # The comparison reports this.
        return None
    return next((row.value for row in stage.measurements if row.metric == OUTPUT and row.against is None), None)


def _demanded(plan: CellPlan) -> Iterator[float]:
    """The output tokens per second that absolute gates require. For a time per token, every client counts as under way."""
    for gate in plan.gates:
        at_least, at_most = gate.limits
        if gate.is_compared:
            continue
        if gate.metric == OUTPUT and at_least:
            yield at_least
        elif gate.metric in TPOT and at_most:
            yield 1000 * plan.load.max_concurrency / at_most
