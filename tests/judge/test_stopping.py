"""Measuring ends once every gate is decided or nothing more could help, and not before."""

import json
import shutil
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from infra.bench import worlds
from tests.builders.comparisons import (
    AVAILABLE,
    CANDIDATE,
    LOAD,
    QUESTIONS,
    SETTINGS,
    ask,
    baseline_task,
    captured_load,
    cell_plan,
    keep_baseline,
    loss_gate,
    one,
    server_plan,
    task_plan,
    worsening_gate,
)
from tests.builders.loads import change, copy_repeat, scale
from tests.builders.starts import ask_once
from tests.builders.worlds import world_of
from tests.evidence.commands import BENCH, PROCESS, SERVER
from tests.lm_eval_files import FLEXIBLE, RIGHT, STRICT, WRONG, Answering, Asked, Reply, page, right_but
from vllm_qualify.evidence import starts
from vllm_qualify.evidence.accuracy import lm_eval_process
from vllm_qualify.evidence.accuracy.blocks import BLOCKS
from vllm_qualify.evidence.accuracy.lm_eval_process import LmEval
from vllm_qualify.evidence.accuracy.samples import find_only_file
from vllm_qualify.evidence.load import result
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.serving import Served
from vllm_qualify.evidence.stages.accuracy import ACCURACY
from vllm_qualify.evidence.stages.table import parse_unfinished
from vllm_qualify.evidence.stages.world import AskingLimits
from vllm_qualify.judge.compare.enough import repetitions
from vllm_qualify.judge.compare.gates import compare
from vllm_qualify.judge.compare.places import answers_path
from vllm_qualify.judge.stopping import accuracy_decided, another_start, load_undecided
from vllm_qualify.judge.verdict import is_decided, surely_misses
from vllm_qualify.plan.cell import BetweenStarts, CellPlan, TaskPlan
from vllm_qualify.recipe.accuracy import LEAST_REPETITIONS, Accuracy
from vllm_qualify.recipe.gates import Gate, Waiver, gate_of
from vllm_qualify.recipe.sampling import Sampling

OTHER = Accuracy(task="other", num_questions=20)


def score_gate(minimum: float, name_filter: str = STRICT, task: str = "gsm8k") -> Gate:
    return gate_of(metric="exact_match", task=task, filter=name_filter, minimum=minimum, unit="fraction")


def decided(plan: CellPlan, evidence: Path) -> bool:
    return accuracy_decided(plan, evidence, plan.accuracy[0])


def sampled_task(times: int, repetitions: int) -> tuple[TaskPlan, Asked]:
    """A task of so many samples of each question, and how it is asked."""
    warm = {"sampling": Sampling(temperature=0.7), "samples_per_question": times}
    task = task_plan(SETTINGS.model_copy(update=warm), repetitions=repetitions)
    return task, Asked(task, AVAILABLE, config={"generation_kwargs": {"temperature": 0.7}})


def cut_samples(folder: Path) -> None:
    path = find_only_file(folder, "samples_*.jsonl")
    path.write_text(path.read_text()[:-100])


# --- Accuracy


@pytest.mark.parametrize(
    ("gates", "missed", "steps", "is_over"),
    [
        pytest.param([score_gate(0.9)], 0, 1, False, id="undecided"),
        pytest.param([score_gate(0.5)], 0, 1, True, id="surely met"),
        pytest.param([score_gate(0.9)], 40, 1, True, id="surely missed"),
        pytest.param([score_gate(0.9), score_gate(0.2, FLEXIBLE)], 0, 1, False, id="one undecided"),
        pytest.param([score_gate(0.5), score_gate(0.2, FLEXIBLE)], 0, 1, True, id="both surely met"),
        pytest.param([loss_gate(0.02)], 0, 1, False, id="a loss undecided"),
        pytest.param([loss_gate(0.02)], 40, 1, True, id="a loss that is sure"),
        pytest.param([loss_gate(0.9)], 0, 1, True, id="surely no loss"),
        pytest.param([loss_gate(0.005)], 0, 39, False, id="a loss undecided to the end"),
        pytest.param([score_gate(0.9), loss_gate(0.02)], 40, 1, True, id="both surely missed"),
        pytest.param([score_gate(0.01, FLEXIBLE), loss_gate(0.02)], 0, 1, False, id="only the score surely met"),
        pytest.param([], 0, 1, True, id="no gate"),
    ],
)
def test_asking_goes_on_while_a_gate_is_open(evidence: Path, gates: list[Gate], missed: int, steps: int, is_over: bool) -> None:
    keep_baseline(evidence, right_but([]))
    ask(evidence, right_but(QUESTIONS[:missed]), steps)
    assert decided(cell_plan(gates), evidence) is is_over


def test_where_no_filter_has_found_an_answer_yet_all_questions_are_asked(evidence: Path) -> None:
    """It may find one in the next reply. A gate by another filter may be decided before."""
    keep_baseline(evidence, right_but([]))
    unread = Reply(0.0, is_unread=True)
    blocks = len(Asked(task_plan(), AVAILABLE).steps) // task_plan().repetitions
    ask(evidence, lambda *_: unread, steps=blocks - 1)
    plan = cell_plan([score_gate(0.5), loss_gate(0.02)])
    assert not decided(plan, evidence)
    shutil.rmtree(evidence / "accuracy")
    ask(evidence, lambda *_: unread, steps=blocks)
    assert decided(plan, evidence)


@pytest.mark.parametrize("undecided", [score_gate(0.9), loss_gate(0.02)])
@pytest.mark.parametrize("failing", [score_gate(0.95, FLEXIBLE), loss_gate(0.05, FLEXIBLE)])
def test_one_gate_that_surely_fails_is_enough(evidence: Path, failing: Gate, undecided: Gate) -> None:
    keep_baseline(evidence, right_but([]))
    ask(evidence, lambda *_: Reply(1.0, flexible=0.0), steps=1)
    for gates in ([failing, undecided], [undecided, failing]):
        assert decided(cell_plan(gates), evidence)
    assert not decided(cell_plan([undecided]), evidence)


@pytest.mark.parametrize("gate", [score_gate(0.5), score_gate(0.99)])
def test_nothing_is_decided_before_all_samples_are_there(evidence: Path, gate: Gate) -> None:
    """Both are plain after the first block: one is met, one is missed."""
    task, asked = sampled_task(2, 2)
    plan = cell_plan([gate], accuracy=[task])
    assert repetitions(plan, evidence, task) == 2
    for steps, is_over in ((1, False), (BLOCKS, False), (2 * BLOCKS - 1, False), (2 * BLOCKS, True)):
        shutil.rmtree(evidence, ignore_errors=True)
        ask(evidence, lambda question, _: WRONG if question % 3 == 0 else RIGHT, steps, asked)
        assert decided(plan, evidence) is is_over


def test_what_is_asked_beyond_the_samples_is_no_further_look_at_the_score(evidence: Path) -> None:
    """Two samples are right, and those that a comparison asks for later are all wrong."""
    task, asked = sampled_task(2, 4)
    plan = cell_plan([score_gate(0.5)], accuracy=[task])
    ask(evidence, lambda _, repetition: RIGHT if repetition <= 2 else WRONG, 3 * BLOCKS, asked)
    rows = {row.filter or row.metric: row for row in parse_unfinished("accuracy", plan, evidence)}
    looped = rows["looping_answers"]
    assert (rows[STRICT].value, looped.value, looped.sample_count) == (1.0, 0.0, 40)


def test_a_waived_gate_that_surely_fails_decides_nothing(evidence: Path) -> None:
    failing, undecided = score_gate(0.95, FLEXIBLE), score_gate(0.9)
    ask(evidence, lambda *_: Reply(1.0, flexible=0.0), steps=1)
    plan = cell_plan([failing, undecided])
    assert decided(plan, evidence)
    cell, about = {"gpu_type": "cpu", "variant": "bf16", "profile": "balanced"}, {"owner": "ada", "reason": "known"}
    waiver = Waiver(gate=failing.label, expires=date(9999, 1, 1), **cell, **about)
    assert not decided(plan.model_copy(update={"waivers": [waiver]}), evidence)


@pytest.mark.parametrize("gate", [score_gate(0.9), loss_gate(0.02)])
def test_files_that_are_unusable_end_the_asking(evidence: Path, gate: Gate) -> None:
    keep_baseline(evidence, right_but([]))
    folder = ask(evidence, right_but([]), steps=2)
    assert not decided(cell_plan([gate]), evidence)
    cut_samples(folder / "r1-b1")
    assert decided(cell_plan([gate]), evidence)


def test_a_comparison_that_is_invalid_ends_the_asking_unless_another_gate_is_undecided(evidence: Path) -> None:
    ask(evidence, right_but([]), steps=1)
    assert decided(cell_plan([loss_gate(0.02)]), evidence)
    assert not decided(cell_plan([loss_gate(0.02), score_gate(0.9)]), evidence)


def test_gates_of_other_tasks_and_other_stages_are_not_waited_for(evidence: Path) -> None:
    """Neither for a loss of another task that was begun, nor for one that surely fails."""
    keep_baseline(evidence, right_but([]), Asked(baseline_task(OTHER), 20))
    ask(evidence, right_but([]), steps=1)
    ask(evidence, right_but([]), steps=1, asked=Asked(task_plan(OTHER), 20))
    tasks = [task_plan(), task_plan(OTHER)]
    others = [score_gate(0.9, task="other"), loss_gate(0.02, task="other"), worsening_gate()]
    assert decided(cell_plan([score_gate(0.5), *others], accuracy=tasks), evidence)
    assert not decided(cell_plan([score_gate(0.9), score_gate(0.95, task="other")], accuracy=tasks), evidence)


def test_without_a_baseline_of_the_plan_a_loss_is_not_waited_for(evidence: Path) -> None:
    """As of a task in a run that is to be a baseline, whose own gates are all absolute."""
    ask(evidence, right_but([]), steps=1)
    gates = [score_gate(0.5), loss_gate(0.02, task="other")]
    plan = cell_plan(gates, baseline=None, accuracy=[task_plan(), task_plan(OTHER)])
    assert plan.establishes
    assert decided(plan, evidence)


# --- A run that is to be a baseline


def establishing(gates: list[Gate], settings: Accuracy = SETTINGS) -> CellPlan:
    task = task_plan(settings, sequential=False)
    return cell_plan(gates, baseline=None, accuracy=[task])


def decisions_of(plan: CellPlan, folder: Path, answering: Answering) -> list[bool]:
    """Whether asking is over after each of ten repetitions."""
    decisions = []
    for repetition in range(1, 11):
        ask(folder / str(repetition), answering, repetition, Asked(plan.accuracy[0], AVAILABLE))
        decisions.append(decided(plan, folder / str(repetition)))
    return decisions


def steady_or_not(question: int, repetition: int) -> Reply:
    """Every other answer to half of the questions is wrong; in each repetition as many are."""
    return WRONG if question in (QUESTIONS[:10] if repetition % 2 else QUESTIONS[10:20]) else RIGHT


@pytest.mark.parametrize(
    ("answering", "max_loss", "needed"),
    [
        pytest.param(right_but([]), 0.5, LEAST_REPETITIONS, id="no noise"),
        pytest.param(steady_or_not, 0.5, LEAST_REPETITIONS, id="noise, and a wide margin"),
        pytest.param(right_but([]), 0.024, 5, id="a margin for which few differences are too many"),
        pytest.param(steady_or_not, 0.14, 6, id="noise"),
        pytest.param(steady_or_not, 0.01, 10, id="noise, and more than the recipe allows"),
    ],
)
def test_a_baseline_is_asked_as_its_noise_needs(tmp_path: Path, answering: Answering, max_loss: float, needed: int) -> None:
    plan = establishing([score_gate(0.2), loss_gate(max_loss)])
    assert decisions_of(plan, tmp_path, answering) == [repetition >= needed for repetition in range(1, 11)]
    assert repetitions(plan, tmp_path, plan.accuracy[0]) == 10


def test_the_noisiest_of_its_gates_decides_how_often_a_baseline_is_asked(evidence: Path) -> None:
    gates = [loss_gate(0.5), loss_gate(0.01, FLEXIBLE)]
    plan = establishing(gates)
    ask(evidence, right_but([]), LEAST_REPETITIONS, Asked(plan.accuracy[0], AVAILABLE))
    assert decided(establishing(gates[:1]), evidence)
    assert not decided(plan, evidence)


def test_a_baseline_that_cannot_be_approved_or_has_unusable_files_is_asked_no_more(evidence: Path) -> None:
    plan = establishing([score_gate(0.9), loss_gate(0.05)])
    folder = ask(evidence, right_but(QUESTIONS), 1, Asked(plan.accuracy[0], AVAILABLE))
    assert decided(plan, evidence)
    cut_samples(folder / "r1-b1")
    assert decided(establishing([loss_gate(0.05)]), evidence)


# --- How often


@pytest.mark.parametrize(
    ("gates", "expected"),
    [
        pytest.param([], 1, id="no gate"),
        pytest.param([score_gate(0.9)], 1, id="no comparison"),
        pytest.param([loss_gate(0.5)], 10, id="what the recipe allows"),
        pytest.param([loss_gate(0.01, "none"), loss_gate(0.5)], 10, id="one of several gates"),
        pytest.param([loss_gate(0.01, task="other")], 1, id="of another task"),
        pytest.param([loss_gate(0.01, "none")], 1, id="a filter that the baseline does not have"),
    ],
)
def test_questions_are_asked_again_where_they_can_be_compared(evidence: Path, gates: list[Gate], expected: int) -> None:
    keep_baseline(evidence, right_but([]))
    assert repetitions(cell_plan(gates), evidence, task_plan()) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(("max_loss", "needed"), [(0.22, 3), (0.2, 4), (0.05, 10)])
def test_a_candidate_is_asked_until_the_comparison_knows_enough(tmp_path: Path, max_loss: float, needed: int) -> None:
    """It is worse by half of what the gate allows: no verdict ends it before, and one is not out of reach.

    By hand: the noise is 0.171, and 0.171 · (1/4 + 1/n) / 40 must be at most (max_loss / 4.22)²: 0.0027, 0.0022 and 0.00014.
    4.22 is the normal distribution's 2.170 for half of a wrong pass's 3 %, and its 2.054 for 2 % without a verdict.
    """
    wrong = QUESTIONS[40 - round(40 * max_loss / 2) :]

    def now_and_then(question: int, repetition: int) -> Reply:
        return WRONG if question in QUESTIONS[:20] and (QUESTIONS.index(question) + repetition) % 2 else RIGHT

    plan, decisions = cell_plan([loss_gate(max_loss)]), []

    def answering(question: int, repetition: int) -> Reply:
        return WRONG if question in wrong else now_and_then(question, repetition)

    for repetition in range(1, 11):
        evidence = tmp_path / str(repetition) / "evidence"
        keep_baseline(evidence, now_and_then, Asked(baseline_task(repetitions=4), AVAILABLE))
        ask(evidence, answering, repetition * BLOCKS)
        decisions.append(decided(plan, evidence))
    assert decisions.index(True) + 1 == needed


def test_a_baseline_that_is_gone_or_asked_once_calls_for_no_repetition(evidence: Path) -> None:
    plan = cell_plan([loss_gate(0.01)])
    assert repetitions(plan, evidence, task_plan()) == 1
    keep_baseline(evidence, right_but([]), Asked(baseline_task(repetitions=1), AVAILABLE))
    assert repetitions(plan, evidence, task_plan()) == 1


# --- Load


MORE = LOAD.model_copy(update={"most_repeats": 4})
SLOWEST = gate_of(metric="ttft_p50_ms", maximum=1.0, unit="ms")
WIDE = gate_of(metric="ttft_p50_ms", maximum=1000.0, unit="ms")
NARROW = gate_of(metric="tpot_p50_ms", maximum=5.5, unit="ms")


def loads(evidence: Path, slower: float = 1.0, apart: float = 1.0) -> None:
    """Candidate and baseline in turns; the candidate's second repeat is so many times slower than its first was slowed."""
    captured_load(evidence / "load", slower)
    captured_load(evidence / "load" / result.BESIDE)
    scale(evidence / "load", 2, apart)


@pytest.mark.parametrize(
    ("gates", "slower", "apart", "undecided"),
    [
        pytest.param([NARROW], 1.0, 1.0, [NARROW], id="undecided"),
        pytest.param([WIDE], 1.0, 1.0, [], id="surely met"),
        pytest.param([SLOWEST], 1.0, 1.0, [], id="surely missed"),
        pytest.param([NARROW, SLOWEST], 1.0, 1.0, [], id="one surely missed"),
        pytest.param([NARROW, WIDE], 1.0, 1.0, [NARROW], id="one undecided"),
        pytest.param([worsening_gate()], 1.0, 1.0, [], id="surely no worse"),
        pytest.param([worsening_gate()], 1.2, 1.0, [], id="surely worse"),
        pytest.param([worsening_gate()], 1.0, 1.1, [worsening_gate()], id="undecided against the baseline"),
        pytest.param([worsening_gate(), NARROW], 1.2, 1.0, [], id="surely worse, and one undecided"),
        pytest.param([score_gate(0.9)], 1.0, 1.0, [], id="none of this stage"),
    ],
)
def test_repeats_go_on_while_a_gate_is_undecided(
    evidence: Path, gates: list[Gate], slower: float, apart: float, undecided: list[Gate]
) -> None:
    loads(evidence, slower, apart)
    lines = load_undecided(cell_plan(gates, beside=server_plan(), load=MORE), evidence)
    assert lines == [gate.label for gate in undecided]


@pytest.mark.parametrize("whose", ["load", f"load/{result.BESIDE}"])
def test_a_load_that_is_invalid_ends_the_repeats(evidence: Path, whose: str) -> None:
    loads(evidence, apart=1.1)
    plan = cell_plan([worsening_gate()], beside=server_plan(), load=MORE)
    assert load_undecided(plan, evidence)
    change(evidence / whose, 1, failed=1)
    assert not load_undecided(plan, evidence)


def test_a_history_that_cannot_be_compared_ends_the_repeats(evidence: Path) -> None:
    captured_load(evidence / "load")
    assert not load_undecided(cell_plan([worsening_gate()], load=MORE), evidence)


def test_more_repeats_decide(evidence: Path) -> None:
    """Two pairs differ by 2 %, and two others do not."""
    loads(evidence, apart=1.02)
    plan = cell_plan([worsening_gate(max_worsening=0.1)], beside=server_plan(), load=MORE)
    assert load_undecided(plan, evidence)
    for repeat in (3, 4):
        for folder in (evidence / "load", evidence / "load" / result.BESIDE):
            copy_repeat(folder, repeat, of=1)
    assert not load_undecided(plan, evidence)


# --- The whole loop


SIMULATED = Accuracy(num_questions=80, num_fewshot=1, max_gen_toks=48)
WORLD = 100
MARGIN = 0.08


def run_stage(
    patch: pytest.MonkeyPatch, plan: CellPlan, evidence: Path, chance: worlds.Chances, rng: np.random.Generator
) -> list[Measurement]:
    """The accuracy stage as a run has it, lm-eval replaced by answers that are right by chance."""

    def asking(_server: object, lm_eval: LmEval, folder: Path, _progress: object, _start: int) -> SimpleNamespace:
        asked = Asked(lm_eval.task, WORLD)
        asked.begin(folder)
        return SimpleNamespace(
            steps=asked.steps,
            ask=lambda step: asked.write_step(folder, step, lambda question, _: Reply(float(rng.random() < chance[question]))),
        )

    patch.setattr(lm_eval_process, "prepare_task", asking)
    until = AskingLimits(
        repetitions=lambda task: repetitions(plan, evidence, task),
        is_decided=lambda task: accuracy_decided(plan, evidence, task),
    )
    (task,) = plan.accuracy
    lm_eval = LmEval(task=task, process=PROCESS, letter_box=evidence, command=[])
    served = Served(server=SERVER, bench=BENCH, lm_eval={task.name: lm_eval})
    ACCURACY.run(world_of(served, plan, evidence, asking=until))
    return compare(plan, evidence, parse_unfinished("accuracy", plan, evidence))


def release(patch: pytest.MonkeyPatch, folder: Path, lost: float, seed: int) -> tuple[str, int, int]:
    """A baseline is made, and a candidate that never answers such a share of the questions right is compared with it.

    Returns the verdict, and after how many answers of how many it was.
    """
    rng = np.random.default_rng(seed)
    pair = worlds.builds(rng, WORLD, 0.03, 0.0)
    candidate = pair.candidate * (rng.random(WORLD) >= lost)
    gate = loss_gate(MARGIN)
    before = establishing([gate], SIMULATED)
    assert run_stage(patch, before, folder / "then", pair.baseline, rng) == []
    plan = cell_plan([gate], accuracy=[task_plan(SIMULATED)])
    path = folder / "now" / "baseline" / answers_path("gsm8k")
    path.parent.mkdir(parents=True)
    shutil.copy(folder / "then" / answers_path("gsm8k"), path)
    rows = run_stage(patch, plan, folder / "now", candidate, rng)
    (measured,) = rows
    assert measured.invalid_because is None
    allowed = repetitions(plan, folder / "now", plan.accuracy[0]) * SIMULATED.num_questions
    decision = "fail" if surely_misses(gate, rows) else "pass"
    return decision if is_decided(gate, rows) else "undecided", measured.sample_count, allowed


@pytest.mark.thorough
def test_a_release_without_a_loss_passes_and_a_large_loss_fails_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = [release(monkeypatch, tmp_path / f"same-{seed}", 0.0, seed) for seed in range(5)]
    lost = [release(monkeypatch, tmp_path / f"lost-{seed}", 0.6, seed) for seed in range(5)]
    assert [verdict for verdict, _, _ in same] == ["pass"] * 5
    assert [verdict for verdict, _, _ in lost] == ["fail"] * 5
    assert all(asked < SIMULATED.num_questions < allowed for _, asked, allowed in lost)


def test_the_stages_files_are_those_of_the_steps_that_were_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after the first block, with its answers typed beside the raw files."""
    keep_baseline(tmp_path / "evidence", right_but([]), Asked(baseline_task(SIMULATED), WORLD))
    plan, rng = cell_plan([loss_gate(MARGIN)], accuracy=[task_plan(SIMULATED)]), np.random.default_rng(1)
    (row,) = run_stage(monkeypatch, plan, tmp_path / "evidence", np.zeros(WORLD), rng)
    folder = tmp_path / "evidence" / "accuracy" / "gsm8k"
    assert sorted(path.name for path in folder.iterdir()) == ["answers.jsonl", "r1-b1", "task.json"]
    assert (row.value, row.sample_count) == (1.0, SIMULATED.num_questions // BLOCKS)


# --- Further starts


def measured_of_starts(plan: CellPlan, evidence: Path) -> list[Measurement]:
    return [*parse_unfinished("accuracy", plan, evidence), *parse_unfinished("starts", plan, evidence)]


def starts_for(plan: CellPlan, evidence: Path) -> list[str]:
    return [gate.label for gate in another_start(plan, evidence, measured_of_starts(plan, evidence))]


def start_again(evidence: Path, number: int, answering: Answering) -> None:
    """The candidate's answers in a further start, which asks each question once."""
    inside = starts.root(evidence, number) / "accuracy" / "gsm8k"
    ask_once(CANDIDATE).write(inside, answering)
    path = find_only_file(inside / "r1-b1", "results_*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"start_time": float(number)}))


@pytest.mark.parametrize(("planned", "done", "again"), [(1, 1, False), (2, 1, True), (2, 2, False), (3, 2, True)])
def test_a_run_to_be_a_baseline_is_started_as_often_as_planned(planned: int, done: int, again: bool, evidence: Path) -> None:
    plan = cell_plan([loss_gate(), score_gate(0.1)], baseline=None, starts=planned)
    ask(evidence, right_but(QUESTIONS[:4]))
    for number in range(2, done + 1):
        start_again(evidence, number, right_but(QUESTIONS[:5]))
    assert starts_for(plan, evidence) == ([loss_gate().label] if again else [])


def establish(evidence: Path, wrong: Sequence[int], *, starts: int, max_loss: float = 0.5) -> list[str]:
    """A run that becomes a baseline, with so many wrong answers in each start: for which gates it is started again."""
    plan = cell_plan([loss_gate(max_loss)], baseline=None, starts=starts, accuracy=[task_plan(sequential=False)])
    ask(evidence, right_but(QUESTIONS[: wrong[0]]), 2, Asked(plan.accuracy[0], AVAILABLE))
    for number, count in enumerate(wrong[1:], start=2):
        start_again(evidence, number, right_but(QUESTIONS[:count]))
    return starts_for(plan, evidence)


@pytest.mark.parametrize(
    ("wrong", "starts", "max_loss", "again"),
    [
        pytest.param([4, 4], 16, 0.5, True, id="two starts"),
        pytest.param([4, 4, 5], 16, 0.5, False, id="three that agree"),
        pytest.param([4, 30, 15], 16, 0.5, True, id="three that differ"),
        pytest.param([4, 30, 15], 3, 0.5, False, id="the recipe allows no more"),
        # Of forty questions none can show a loss of a fifth of a point, where starts differ by half of them.
        pytest.param([4, 30, 15], 16, 0.002, False, id="all starts would tell too little"),
    ],
)
def test_a_baseline_is_started_until_its_starts_are_known(
    evidence: Path, wrong: list[int], starts: int, max_loss: float, *, again: bool
) -> None:
    assert establish(evidence, wrong, starts=starts, max_loss=max_loss) == ([loss_gate().label] if again else [])


def test_a_start_that_does_not_count_ends_a_baselines_starts(evidence: Path) -> None:
    assert establish(evidence, [4, 30, 15], starts=16) == [loss_gate().label]
    for path in (evidence / "starts/2").rglob("metrics-before.txt"):
        path.write_text(page(stop=9000, length=9000))
    plan = cell_plan([loss_gate(0.5)], baseline=None, starts=16, accuracy=[task_plan(sequential=False)])
    assert starts_for(plan, evidence) == []


def test_a_quiet_baseline_of_two_starts_is_asked_often_enough(evidence: Path) -> None:
    """Three times and twice: at least four in all."""
    plan = cell_plan([loss_gate(0.5)], baseline=None, starts=2, accuracy=[task_plan(sequential=False)])
    for repetition, enough in ((2, False), (3, True)):
        shutil.rmtree(evidence / "accuracy", ignore_errors=True)
        ask(evidence, right_but([]), repetition, Asked(plan.accuracy[0], AVAILABLE))
        assert decided(plan, evidence) is enough
    (task,) = plan.accuracy
    assert starts.repetitions_of_further_start(task, plan, evidence) == 2


def test_further_starts_are_asked_for_all_samples(evidence: Path) -> None:
    plan = cell_plan([loss_gate()], starts=16, accuracy=[sampled_task(4, 4)[0]])
    (task,) = starts.plan_of(plan, evidence, 2).accuracy
    assert (task.repetitions, starts.repetitions_of_further_start(task, plan, evidence)) == (4, 4)


def test_what_cannot_be_compared_calls_for_no_start(evidence: Path) -> None:
    keep_baseline(evidence, right_but(QUESTIONS[:4]))
    cut_samples(ask(evidence, right_but(QUESTIONS[:4]), steps=2 * BLOCKS) / "r1-b1")
    assert starts_for(cell_plan([loss_gate(0.5)], starts=16), evidence) == []


@pytest.mark.parametrize(("asked", "again"), [(2, 1), (3, 2), (5, 4)])
def test_a_baselines_further_starts_are_asked_nearly_as_often_as_its_first(evidence: Path, asked: int, again: int) -> None:
    plan = cell_plan([loss_gate()], baseline=None, starts=16, accuracy=[task_plan(sequential=False)])
    ask(evidence, right_but([]), asked, Asked(plan.accuracy[0], AVAILABLE))
    (task,) = plan.accuracy
    assert starts.repetitions_of_further_start(task, plan, evidence) == again
    assert starts.repetitions_of_further_start(task, cell_plan([loss_gate()], starts=16), evidence) == 1


@pytest.mark.parametrize(("allowed", "needed"), [(1, 6), (2, 4), (16, 3)])
def test_a_baselines_first_start_is_asked_its_part_of_what_noise_calls_for(tmp_path: Path, allowed: int, needed: int) -> None:
    """By hand, 2 · noise · (3.815 / 0.14)² / 40: 7 times in all after three or four repetitions, of two or three starts."""
    plan = establishing([loss_gate(0.14)]).model_copy(update={"starts": allowed})
    assert decisions_of(plan, tmp_path, steady_or_not) == [repetition >= needed for repetition in range(1, 11)]


def test_no_start_is_made_for_likelihoods_alone(evidence: Path) -> None:
    """Their texts are scored on the first start only, so that another one would decide nothing."""
    likelier = gate_of(metric="answer_nll_nat_per_tok", max_nll_increase=0.01, unit="nat/tok")
    ask(evidence, right_but(QUESTIONS[:4]))
    assert starts_for(cell_plan([likelier], baseline=None, starts=2), evidence) == []
    assert starts_for(cell_plan([likelier, loss_gate()], baseline=None, starts=2), evidence) == [loss_gate().label]


def test_a_release_that_surely_fails_a_gate_is_not_started_again(evidence: Path) -> None:
    keep_baseline(evidence, right_but(QUESTIONS[:4]))
    ask(evidence, right_but(QUESTIONS[:5]))
    assert starts_for(cell_plan([loss_gate(0.5)], starts=2), evidence) == [loss_gate().label]
    assert starts_for(cell_plan([loss_gate(0.5), score_gate(0.999)], starts=2), evidence) == []


def test_a_gate_that_passes_by_one_start_of_each_needs_another(evidence: Path) -> None:
    """How much starts differ is not known then. One is never enough, whatever approved runs show."""
    keep_baseline(evidence, right_but(QUESTIONS[:4]))
    ask(evidence, right_but(QUESTIONS[:4]), steps=2 * BLOCKS)
    plan = cell_plan([loss_gate(0.5)], starts=2)
    row = one(plan, evidence)
    assert is_decided(loss_gate(0.5), [row])
    assert row.not_in_interval
    assert starts_for(plan, evidence) == [loss_gate().label]
    assert starts_for(plan.model_copy(update={"starts": 1}), evidence) == []
    known = BetweenStarts(label="exact_match (gsm8k, strict-match)", variance=1e-6, noise=0.0, freedom=20.0, runs=["a", "b"])
    assert starts_for(plan.model_copy(update={"between": [known]}), evidence) == [loss_gate().label]
    start_again(evidence, 2, right_but(QUESTIONS[:4]))
    (row,) = compare(plan, evidence, measured_of_starts(plan, evidence))
    assert not row.not_in_interval
    assert any(path.startswith("starts/2/accuracy/gsm8k/r1-b1/samples_") for path in row.traced_to)
    assert all((evidence / path).is_file() for path in row.traced_to)


def test_a_start_that_is_none_of_its_own_makes_the_comparison_invalid(evidence: Path) -> None:
    keep_baseline(evidence, right_but(QUESTIONS[:4]))
    ask(evidence, right_but(QUESTIONS[:4]))
    start_again(evidence, 2, right_but(QUESTIONS[:4]))
    for path in (evidence / "starts/2").rglob("metrics-before.txt"):
        path.write_text(page(stop=9000, length=9000))
    plan = cell_plan([loss_gate(0.5)], starts=2)
    (row,) = compare(plan, evidence, measured_of_starts(plan, evidence))
    assert "start 2: the server's counts go on" in (row.invalid_because or "")
    assert starts_for(plan.model_copy(update={"starts": 3}), evidence) == []
