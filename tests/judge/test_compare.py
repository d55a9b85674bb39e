"""The cell beside its baseline, from files as the tools leave them: what was lost is what was made to be lost."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.builders.closed_loop import bench_of
from tests.builders.comparisons import (
    AVAILABLE,
    CANDIDATE,
    CPU,
    LOAD,
    QUESTIONS,
    SETTINGS,
    against,
    all_of,
    ask,
    baseline_task,
    captured_load,
    cell_plan,
    in_turns,
    interval_of,
    keep_baseline,
    keep_history,
    loss_gate,
    one,
    reason,
    server_plan,
    task_plan,
    width,
    worsening_gate,
)
from tests.builders.loads import CAPTURED as CAPTURED_LOAD
from tests.builders.loads import SETTINGS as SLO_SETTINGS
from tests.builders.loads import change, copy_repeat, scale, with_goodput_of_none
from tests.directions import HIGHER_IS_BETTER
from tests.fakes.capacity import about, counts_of, page
from tests.lm_eval_files import CAPTURED, EMPTY, FLEXIBLE, RIGHT, STRICT, WRONG, Answering, Asked, Reply, hashed, right_but
from vllm_qualify.evidence.accuracy.answers import load, write
from vllm_qualify.evidence.accuracy.blocks import BLOCKS
from vllm_qualify.evidence.accuracy.letters import TaskReply
from vllm_qualify.evidence.accuracy.samples import find_only_file, read_answers
from vllm_qualify.evidence.load import result, steady
from vllm_qualify.evidence.load.ended import ENDED, Ended
from vllm_qualify.evidence.load.result import key_of
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.stages.table import parse_unfinished
from vllm_qualify.judge.compare.enough import knows_enough
from vllm_qualify.judge.compare.gates import compare
from vllm_qualify.judge.compare.noise import DAYS, SAMPLES, STARTS
from vllm_qualify.judge.compare.places import LOAD_STAGE, answers_path
from vllm_qualify.judge.compare.settings import load_differs, task_differs
from vllm_qualify.judge.verdict import is_decided, surely_misses
from vllm_qualify.plan.cell import BetweenStarts, CellPlan
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.recipe.load import Load, Slo
from vllm_qualify.recipe.metrics import GOODPUT, METRICS, PEAK_CHUNKS, TURN_TTFTS
from vllm_qualify.recipe.published import PublishedScore
from vllm_qualify.recipe.roles import PLACE, WORK, role_of
from vllm_qualify.recipe.sampling import Sampling

# --- The made-up files themselves


def test_made_up_files_are_read_like_the_captured_ones_and_have_their_form(tmp_path: Path) -> None:
    """The captured answers, written again by the builder: all but hashes, which are of other words, and dates in names."""
    settings = Accuracy(num_questions=8, num_fewshot=1, max_gen_toks=48)
    asked, folder = Asked(task_plan(settings, repetitions=2), 12), tmp_path / "gsm8k"
    replies = {
        (each.question, each.repetition): Reply(
            each.scores["exact_match,strict-match"], each.length or 0, each.scores["exact_match,flexible-extract"]
        )
        for each in read_answers(CAPTURED, asked.task).answers
    }
    asked.write(folder, lambda question, repetition: replies[question, repetition], asked.steps[:5])
    captured, answered = (read_answers(each, asked.task) for each in (CAPTURED, folder))
    chosen = {"question", "repetition", "scores", "length", "unanswered"}
    made, real = (
        [(each.model_dump(include=chosen), each.traced_to.split(":")[1]) for each in of.answers] for of in (answered, captured)
    )
    assert made == real
    assert answered.model_dump(exclude={"answers"}) == captured.model_dump(exclude={"answers"})
    own, tools = (TaskReply.model_validate_json((each / "task.json").read_bytes()) for each in (folder, CAPTURED))
    assert own == tools
    for ours, theirs in ((folder / step.folder, CAPTURED / step.folder) for step in asked.steps[:5]):
        names = [sorted(path.name.split("_")[0] for path in each.iterdir()) for each in (ours, theirs)]
        assert names[0] == names[1]
        results, captured_results = (json.loads(find_only_file(each, "results_*.json").read_text()) for each in (ours, theirs))
        assert list(results) == list(captured_results)
        for key in ("results", "n-samples", "versions", "configs", "higher_is_better", "n-shot"):
            assert results[key] == captured_results[key]
        for one_row, other in zip(rows_in(ours), rows_in(theirs), strict=True):
            assert list(one_row) == list(other)
            assert {type(value) for value in one_row.values()} == {type(value) for value in other.values()}


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in find_only_file(folder, "samples_*.jsonl").read_text().splitlines()]


# --- A loss


@pytest.mark.parametrize(("missed_before", "missed_now", "lost"), [(4, 4, 0.0), (4, 8, 0.1), (4, 2, -0.05), (0, 40, 1.0)])
def test_a_chosen_loss_is_found(evidence: Path, missed_before: int, missed_now: int, lost: float) -> None:
    keep_baseline(evidence, right_but(QUESTIONS[:missed_before]))
    ask(evidence, right_but(QUESTIONS[:missed_now]), steps=2 * BLOCKS)
    row = one(cell_plan([loss_gate()]), evidence)
    assert row.value == pytest.approx(lost)
    assert width(row) > 0
    assert (row.label, row.unit) == ("exact_match (gsm8k, strict-match) against the baseline", "fraction")
    assert row.sample_count == 80
    assert len(row.traced_to) == 2 * BLOCKS
    assert all((evidence / path).is_file() for path in row.traced_to)


@pytest.mark.parametrize(
    ("before", "now", "lost"),
    [
        pytest.param(
            lambda question, repetition: WRONG if question in QUESTIONS[:3] and repetition == 2 else RIGHT,
            right_but(QUESTIONS[:3]),
            3 * (2 / 3) / 40,
            id="right in two of three repetitions before, and never now",
        ),
        pytest.param(lambda *_: Reply(0.75), lambda *_: Reply(0.5), 0.25, id="between right and wrong"),
        pytest.param(
            lambda question, _: EMPTY if question in QUESTIONS[:4] else RIGHT,
            right_but(QUESTIONS[-4:]),
            4 / 36,
            id="what the baseline did not answer cannot be gained",
        ),
        pytest.param(
            lambda question, repetition: EMPTY if (question, repetition) == (QUESTIONS[0], 2) else RIGHT,
            right_but([]),
            0,
            id="an unanswered repetition of the baseline does not count",
        ),
    ],
)
def test_a_question_counts_by_the_share_of_its_answers(evidence: Path, before: Answering, now: Answering, lost: float) -> None:
    keep_baseline(evidence, before)
    ask(evidence, now)
    row = one(cell_plan([loss_gate(0.2)]), evidence)
    assert row.value == pytest.approx(lost)
    assert row.sample_count == 40


def test_before_all_were_asked_the_loss_is_that_of_the_questions_so_far(evidence: Path) -> None:
    first = CANDIDATE.steps[0].questions
    keep_baseline(evidence, right_but([]))
    ask(evidence, right_but(first[:2]), steps=1)
    row = one(cell_plan([loss_gate()]), evidence)
    assert row.value == pytest.approx(2 / len(first))
    assert row.sample_count == len(first)


def test_more_answers_than_a_margin_calls_for_can_be_judged(evidence: Path) -> None:
    """As when a run is judged again by a wider margin: two repetitions would have done, and three were made."""
    keep_baseline(evidence, right_but([]))
    plan = cell_plan([loss_gate(0.5)])
    ask(evidence, right_but([]), steps=3 * BLOCKS)
    assert knows_enough(plan, evidence, plan.accuracy[0])
    assert one(plan, evidence).value == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (CANDIDATE._replace(version=4.0), "the task gsm8k is not the baseline's: its prompts or its scoring changed"),
        (CANDIDATE._replace(config={"doc_to_text": "{{question}}"}), "its prompts or its scoring changed"),
        (CANDIDATE._replace(config={"num_fewshot": 2}), "its prompts or its scoring changed"),
        (CANDIDATE._replace(prompt="Q"), "40 questions are not the baseline's, or have other prompts"),
        (CANDIDATE._replace(available=AVAILABLE + 20), "questions are not the baseline's, or have other prompts"),
    ],
)
def test_another_task_is_not_compared(evidence: Path, changed: Asked, message: str) -> None:
    keep_baseline(evidence, right_but([]))
    ask(evidence, right_but([]), asked=changed)
    assert message in reason(one(cell_plan([loss_gate(0.2)]), evidence))


@pytest.mark.parametrize(
    "changed",
    [{"doc": {"question": "another"}}, {"arguments": {"gen_args_0": {"arg_0": "another"}}}, {"target": "another"}],
    ids=str,
)
def test_one_question_that_changed_is_reported(evidence: Path, changed: dict[str, Any]) -> None:
    keep_baseline(evidence, right_but([]))
    folder = ask(evidence, right_but([])) / "r1-b2"
    rows = rows_in(folder)
    first = rows[0]["doc_id"]
    rows = [hashed(row | changed) if row["doc_id"] == first else row for row in rows]
    find_only_file(folder, "samples_*.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    message = reason(one(cell_plan([loss_gate(0.2)]), evidence))
    assert message == f"1 questions are not the baseline's, or have other prompts: [{rows[0]['doc_id']}]"


@pytest.mark.parametrize(
    ("name", "then"),
    [
        ("api", "chat"),
        ("num_fewshot", 5),
        ("num_questions", 41),
        ("max_gen_toks", 256),
        ("seed", 1),
        ("sampling", "model"),
        ("system_prompt", "Be brief."),
        ("chat_template_kwargs", {"enable_thinking": True}),
        ("reasoning_effort", "low"),
        ("think_end", "</think>"),
        ("stop", ["Question:"]),
    ],
)
def test_a_task_that_was_asked_in_another_way_is_not_compared(evidence: Path, name: str, then: object) -> None:
    assert role_of(Accuracy, name) is WORK
    keep_baseline(evidence, right_but([]))
    ask(evidence, right_but([]))
    settings = SETTINGS.model_copy(update={name: then})
    message = reason(one(against(cell_plan([loss_gate(0.2)]), accuracy=[settings]), evidence))
    assert message == f"the baseline was asked gsm8k in another way: {name} {then}, now {getattr(SETTINGS, name)}"


@pytest.mark.parametrize(
    ("then", "now", "is_alike"), [(256, None, True), (None, 256, True), (None, 512, False), (48, None, False)]
)
def test_the_default_longest_reply_of_older_versions_is_that_of_now(then: int | None, now: int | None, is_alike: bool) -> None:
    """A length of the task's own is in the hash of the task."""
    task = task_plan(SETTINGS.model_copy(update={"max_gen_toks": now}))
    plan = against(cell_plan([loss_gate()], accuracy=[task]), accuracy=[SETTINGS.model_copy(update={"max_gen_toks": then})])
    assert (task_differs(plan, task) is None) == is_alike


def test_a_model_that_recommends_other_numbers_now_is_not_compared() -> None:
    """Both recipes say `sampling: model`, which is asked otherwise once the model's file has changed."""
    settings = SETTINGS.model_copy(update={"sampling": "model"})
    then, now = (task_plan(settings, recommended=Sampling(temperature=each)) for each in (0.6, 1.0))
    plan = cell_plan([loss_gate(0.2)], accuracy=[now])
    assert task_differs(against(plan, accuracy=[now.asked_settings]), now) is None
    assert task_differs(against(plan, accuracy=[then.asked_settings]), now) == (
        "the baseline was asked gsm8k in another way: sampling {'temperature': 0.6}, now {'temperature': 1.0}"
    )


def test_every_other_setting_may_change(evidence: Path) -> None:
    keep_baseline(evidence, right_but([]))
    ask(evidence, right_but([]))
    others: dict[str, object]
    others = {"num_concurrent": 9, "most_repetitions": 5, "sequential": False, "max_unanswered": 0.1, "time_limit_s": 9.0}
    others |= {"samples_per_question": 3, "published": [PublishedScore(score=0.9, source="a model card")]}
    assert others.keys() == {name for name in Accuracy.model_fields if role_of(Accuracy, name) not in (WORK, PLACE)}
    settings = SETTINGS.model_copy(update=others)
    assert one(against(cell_plan([loss_gate(0.2)]), accuracy=[settings]), evidence).value == 0


def test_a_task_that_the_baseline_was_not_asked_or_a_filter_that_it_does_not_have_is_not_compared(evidence: Path) -> None:
    ask(evidence, right_but([]))
    plan = against(cell_plan([loss_gate(0.2)]), accuracy=[])
    assert reason(one(plan, evidence)) == "the baseline was not asked gsm8k"
    keep_baseline(evidence, right_but([]))
    assert "0 measurements of exact_match (gsm8k, none)" in reason(one(cell_plan([loss_gate(0.2, "none")]), evidence))


def test_a_baseline_that_was_asked_once_is_to_be_made_anew(evidence: Path) -> None:
    keep_baseline(evidence, right_but([]), Asked(baseline_task(repetitions=1), AVAILABLE))
    ask(evidence, right_but([]))
    message = "the baseline was asked each question once, so the noise is unknown: establish it anew"
    assert reason(one(cell_plan([loss_gate(0.2)]), evidence)) == message


@pytest.mark.parametrize("share", [None, 0.0, 0.001, 0.5, 0.99])
def test_a_baseline_whose_answers_are_gone_or_cut_is_invalid(evidence: Path, share: float | None) -> None:
    keep_baseline(evidence, right_but([]))
    ask(evidence, right_but([]))
    path = evidence / "baseline" / answers_path("gsm8k")
    text = path.read_text()
    path.unlink()
    if share is not None:
        path.write_text(text[: int(len(text) * share)])
    assert "no usable " in reason(one(cell_plan([loss_gate(0.2)]), evidence))


@pytest.mark.parametrize("name", ["task.json", "r1-b2", "r1-b2/results_*.json", "r1-b2/samples_*.jsonl"])
@pytest.mark.parametrize("share", [None, 0.0, 0.5])
def test_a_candidate_whose_files_are_gone_or_cut_is_invalid(evidence: Path, name: str, share: float | None) -> None:
    keep_baseline(evidence, right_but([]))
    path = next(ask(evidence, right_but([])).glob(name))
    if path.is_dir():
        shutil.rmtree(path)
    elif share is None:
        path.unlink()
    else:
        path.write_text(path.read_text()[: int(path.stat().st_size * share)])
    assert "no usable " in reason(one(cell_plan([loss_gate(0.2)]), evidence))


@pytest.mark.parametrize(
    ("length", "message"), [(89, "0.89"), (90, None), (100, None), (110, None), (111, "1.11"), (1, "0.01"), (1000, "10.00")]
)
def test_replies_of_another_length_are_another_work(evidence: Path, length: int, message: str | None) -> None:
    keep_baseline(evidence, right_but([]))
    ask(evidence, lambda *_: Reply(1.0, length))
    row = one(cell_plan([loss_gate(0.2)]), evidence)
    if message is None:
        assert row.value == 0
    else:
        assert f"replies are {message} times as long as the baseline's, and comparable from 0.9 to 1.1" in reason(row)


def test_a_loss_that_is_sure_stays_one_whatever_the_length(evidence: Path) -> None:
    keep_baseline(evidence, right_but([]))
    ask(evidence, lambda *_: Reply(0.0, 1))
    gate = loss_gate(0.2)
    row = one(cell_plan([gate]), evidence)
    assert row.value == 1
    assert surely_misses(gate, [row])


def test_lengths_are_compared_question_by_question(evidence: Path) -> None:
    """The first block has the questions with long replies: against all of the baseline's they would be far too long."""
    first = CANDIDATE.steps[0].questions
    keep_baseline(evidence, lambda question, _: Reply(1.0, 1000 if question in first else 10))
    ask(evidence, lambda *_: Reply(1.0, 1000), steps=1)
    assert one(cell_plan([loss_gate()]), evidence).value == 0


@pytest.mark.parametrize("empty", [1, 8])
def test_empty_replies_are_lost_and_not_short(evidence: Path, empty: int) -> None:
    """Two empty replies beside eight wrong ones are ten lost."""
    settings = SETTINGS.model_copy(update={"max_unanswered": 0.5})
    keep_baseline(evidence, right_but([]))
    answers = dict.fromkeys(QUESTIONS[:empty], EMPTY) | dict.fromkeys(QUESTIONS[-4:], WRONG)
    ask(evidence, lambda question, _: answers.get(question, RIGHT), asked=Asked(task_plan(settings), AVAILABLE))
    row = one(cell_plan([loss_gate(0.5)], accuracy=[task_plan(settings)]), evidence)
    assert row.value == pytest.approx((4 + empty) / 40)
    assert row.sample_count == 40


def test_a_candidate_in_whose_replies_no_filter_found_an_answer_is_invalid(evidence: Path) -> None:
    """Also beside a baseline with the same fault, of which it lost nothing."""
    unread = Reply(0.0, is_unread=True)
    keep_baseline(evidence, lambda *_: unread)
    ask(evidence, lambda *_: unread)
    message = reason(one(cell_plan([loss_gate(0.02)]), evidence))
    assert f"the filter {STRICT} found an answer in none of the" in message


@pytest.mark.parametrize("empty", [20, 40])
def test_more_unanswered_than_the_recipe_allows_is_no_comparison(evidence: Path, empty: int) -> None:
    keep_baseline(evidence, right_but([]))
    ask(evidence, lambda question, _: EMPTY if question in QUESTIONS[:empty] else RIGHT)
    plan = cell_plan([loss_gate(0.2)])
    (score, *_) = parse_unfinished("accuracy", plan, evidence)
    assert all(f"{empty} of 40 replies are empty" in reason(row) for row in (score, one(plan, evidence)))


# --- Several gates


def test_each_filter_has_its_own_loss(evidence: Path) -> None:
    keep_baseline(evidence, right_but([]))
    ask(evidence, lambda question, _: Reply(question not in QUESTIONS[:4], flexible=question not in QUESTIONS[:10]))
    losses = {each.filter: each.value for each in all_of(cell_plan([loss_gate(0.2), loss_gate(0.2, FLEXIBLE)]), evidence)}
    assert losses == {STRICT: pytest.approx(4 / 40), FLEXIBLE: pytest.approx(10 / 40)}


def test_each_task_has_its_own_loss_and_one_that_is_gone_says_nothing_of_another(evidence: Path) -> None:
    others = Accuracy(task="other", num_questions=20)
    asked, before = Asked(task_plan(others), 20, "acc"), Asked(baseline_task(others), 20, "acc")
    keep_baseline(evidence, right_but([]))
    keep_baseline(evidence, right_but([]), before)
    ask(evidence, right_but(QUESTIONS[:4]))
    ask(evidence, right_but(range(10)), asked=asked)
    plan = cell_plan([loss_gate(0.2), loss_gate(0.5, task="other", metric="acc")], accuracy=[task_plan(), task_plan(others)])
    losses = {each.label: each.value for each in all_of(plan, evidence)}
    assert losses == {
        "exact_match (gsm8k, strict-match) against the baseline": pytest.approx(4 / 40),
        "acc (other, strict-match) against the baseline": pytest.approx(10 / 20),
    }
    shutil.rmtree(evidence / "accuracy" / "other")
    assert [each.value for each in all_of(plan, evidence)] == [pytest.approx(4 / 40), None]


def test_only_the_asked_gates_are_compared_and_none_without_a_baseline(evidence: Path) -> None:
    absolute = gate_of(metric="exact_match", task="gsm8k", filter=STRICT, minimum=0.9, unit="fraction")
    gates = [absolute, loss_gate(0.2), loss_gate(0.2, FLEXIBLE)]
    assert [each.filter for each in all_of(cell_plan(gates), evidence, gates[:2])] == [STRICT]
    assert compare(cell_plan(gates, baseline=None), evidence, []) == []


# --- What differs between starts


def with_history(plan: CellPlan, deviation: float, *of: Literal["start", "pair", "day"]) -> CellPlan:
    """The plan, with what approved runs showed of the metric of its only gate."""
    (gate,) = plan.gates
    label = gate.label.removesuffix(" against the baseline")
    about: dict[str, Any] = {"variance": deviation**2, "noise": 0.0, "freedom": 20.0, "runs": ["earlier"]}
    return plan.model_copy(update={"between": [BetweenStarts(label=label, of=each, **about) for each in of]})


def restart_baseline(evidence: Path) -> None:
    """Write the baseline's answers as if each repetition had been on a start of its own."""
    path = evidence / "baseline" / answers_path("gsm8k")
    answered = load(path)
    moved = [each.model_copy(update={"start": each.repetition}) for each in answered.answers]
    write(answered.model_copy(update={"answers": moved}), path)


def test_samples_of_one_start_count_as_independent_and_the_measurement_says_so(evidence: Path) -> None:
    sampled = SETTINGS.model_copy(update={"sampling": Sampling(temperature=0.7)})
    config = {"generation_kwargs": {"temperature": 0.7}}
    keep_baseline(evidence, right_but([]), Asked(baseline_task(sampled), AVAILABLE, config=config))
    ask(evidence, right_but([]), asked=Asked(task_plan(sampled), AVAILABLE, config=config))
    assert one(cell_plan([loss_gate(0.2)], accuracy=[task_plan(sampled)]), evidence).not_in_interval == [STARTS, SAMPLES]


def test_two_starts_of_either_are_in_the_interval_and_one_start_of_each_is_said_not_to_be(evidence: Path) -> None:
    """The baseline's three repetitions have 0, 4 and 8 wrong answers of 40."""
    keep_baseline(evidence, lambda question, repetition: WRONG if question in QUESTIONS[: 4 * (repetition - 1)] else RIGHT)
    ask(evidence, right_but(QUESTIONS[:4]), steps=2 * BLOCKS)
    plan = cell_plan([loss_gate(0.2)])
    before = one(plan, evidence)
    restart_baseline(evidence)
    row = one(plan, evidence)
    assert (before.not_in_interval, row.not_in_interval) == ([STARTS], [])
    assert row.value == pytest.approx(before.value)


def test_what_is_known_of_starts_on_the_gpu_type_is_in_the_interval(evidence: Path) -> None:
    keep_baseline(evidence, right_but([]))
    ask(evidence, right_but([]), steps=2 * BLOCKS)
    plan = cell_plan([loss_gate(0.2)])
    before, row = one(plan, evidence), one(with_history(plan, 0.02, "start"), evidence)
    assert row.not_in_interval == []
    assert width(row) > width(before)


# --- Loads


def keep_loads(evidence: Path, slower: float = 1.0) -> None:
    """The captured load, so many times slower, beside the baseline's in turns with it and at its own time."""
    captured_load(evidence / "load", slower)
    captured_load(evidence / "load" / result.BESIDE)
    keep_history(evidence, captured_load(evidence.parent / "then" / "load"))


@pytest.mark.parametrize("slower", [1.2, 1 / 1.2])
def test_the_captured_repeats_are_worse_by_just_what_they_were_slowed(evidence: Path, slower: float) -> None:
    keep_loads(evidence, slower)
    gates = [worsening_gate(name) for name in ("ttft_p50_ms", "tpot_mean_ms", "output_throughput_tok_s")]
    for plan in (in_turns(gates), cell_plan(gates)):
        rows = compare(plan, evidence, parse_unfinished("load", plan, evidence))
        assert [each.value for each in rows] == pytest.approx([slower - 1] * 3)
        assert [each.label for each in rows] == [gate.label for gate in gates]
        assert all(each.unit == "fraction" and each.sample_count == 2 * (32 + 20) for each in rows)


def test_a_load_says_what_its_interval_does_not_have_and_that_it_is_beside_history(evidence: Path) -> None:
    """The captured repeats differ from each other, and each pair just by what it was slowed: pairs are surer."""
    keep_loads(evidence, 1.2)
    gate = worsening_gate()
    plans = (in_turns([gate]), cell_plan([gate]))
    before = [one(plan, evidence, "load") for plan in plans]
    assert [(row.not_in_interval, row.is_history) for row in before] == [([STARTS], False), ([STARTS, DAYS], True)]
    assert width(before[0]) < 1e-6 < 0.1 < width(before[1])
    after = [one(with_history(plan, 0.01, "start", "pair", "day"), evidence, "load") for plan in plans]
    assert [measurement.not_in_interval for measurement in after] == [[], []]
    assert all(width(now) > width(then) for now, then in zip(after, before, strict=True))


def test_history_does_not_decide_where_days_differ_by_more_than_the_margin(evidence: Path, tmp_path: Path) -> None:
    """Repeats that differ by nothing, beside days that differ by 3 %, twice, and a margin of 5 %."""
    for folder in (evidence / "load", tmp_path / "then" / "load"):
        captured_load(folder)
        copy_repeat(folder, 2, of=1)
    keep_history(evidence, tmp_path / "then" / "load")
    gate = worsening_gate()
    plan = cell_plan([gate])
    assert is_decided(gate, [one(plan, evidence, "load")])
    assert not is_decided(gate, [one(with_history(plan, 0.03, "day"), evidence, "load")])


def test_what_was_compared_is_traced_to_both(evidence: Path) -> None:
    keep_loads(evidence)
    row = one(in_turns([worsening_gate()]), evidence, "load")
    assert row.source == "load/bench-*.json beside load/beside/bench-*.json"
    files = [path.split(":")[0] for path in row.traced_to]
    assert files == [f"load/{folder}bench-{repeat}.json" for folder in ("", "beside/") for repeat in (1, 2)]
    assert all((evidence / file).is_file() for file in files)
    assert one(cell_plan([worsening_gate()]), evidence, "load").source == "load/bench-*.json beside load/bench-*.json"


UNLIKE: list[tuple[dict[str, Any], str]] = [
    (
        {"fingerprint": CPU.model_copy(update={"count": 4})},
        "the baseline was measured on Some CPU · cores: 4 · 8 GiB, and this is Some CPU · cores: 2 · 8 GiB",
    ),
    ({"client_version": "0.31.0"}, "the baseline's load client was vLLM 0.31.0, and this one is 0.32.0"),
    *(
        ({"load": LOAD.model_copy(update={name: getattr(LOAD, name) + 1})}, "the baseline's load was another one")
        for name in ("input_len", "output_len", "max_concurrency", "burstiness", "num_prompts", "num_warmups", "seed")
    ),
    ({"load": LOAD.model_copy(update={"counted_from": "second chunk"})}, "window, first token of chats, seed or SLO"),
]


@pytest.mark.parametrize(("changes", "message"), UNLIKE)
def test_an_unlike_load_is_not_compared(evidence: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    captured_load(evidence / "load")
    keep_history(evidence, captured_load(tmp_path / "then" / "load"))
    plan = cell_plan([worsening_gate()])
    assert one(plan, evidence, "load").value == pytest.approx(0)
    assert message in reason(one(against(plan, **changes), evidence, "load"))


@pytest.mark.parametrize(("changes", "message"), UNLIKE)
def test_in_turns_it_does_not_matter_how_it_was_measured_then(evidence: Path, changes: dict[str, Any], message: str) -> None:
    captured_load(evidence / "load")
    captured_load(evidence / "load" / result.BESIDE)
    plan = against(in_turns([worsening_gate()]), **changes)
    assert message in (load_differs(plan) or "")
    assert one(plan, evidence, "load").value == pytest.approx(0)


def test_how_often_a_load_is_repeated_may_change_and_the_slo_where_no_goodput_is_compared() -> None:
    others: dict[str, object] = {"repeats": 9, "most_repeats": 9, "min_duration_s": 1.0, "time_limit_s": 9.0}
    others |= {"time_budget_s": 99.0, "slo": Slo(ttft_ms=5.0), "prompts": "moved.jsonl", "trace": "moved.jsonl"}
    others |= {"seeded_by": "another"}
    compared = {"input_len", "output_len", "length_spread", "shared_prefix_len", "prompts_sha256", "api", "window", "turns"}
    compared |= {"max_concurrency", "request_rate", "burstiness", "trace_speed", "num_prompts", "num_warmups", "seed"}
    compared |= {"counted_from"}
    assert {*others, *compared} == Load.model_fields.keys()
    then = LOAD.model_copy(update=others)
    assert load_differs(against(cell_plan([worsening_gate()]), load=then)) is None
    assert "SLO" in (load_differs(against(cell_plan([worsening_gate(GOODPUT)]), load=then)) or "")


@pytest.mark.parametrize("make", [in_turns, cell_plan])
def test_whose_measurement_is_invalid_is_reported(evidence: Path, tmp_path: Path, make: Callable[..., CellPlan]) -> None:
    ours, beside, then = evidence / "load", evidence / "load" / result.BESIDE, tmp_path / "then" / "load"
    plan, message = make([worsening_gate()]), "repeat 2: 39 of 40 requests completed, 1 failed"
    for folder in (ours, beside, then):
        captured_load(folder)
    for folder in (beside, then):
        change(folder, 2, completed=39, failed=1)
    keep_history(evidence, then)
    assert reason(one(plan, evidence, "load")) == f"the baseline's: {message}"
    change(ours, 2, completed=39, failed=1)
    assert reason(one(plan, evidence, "load")) == message


def test_a_load_that_is_not_there_is_invalid(evidence: Path) -> None:
    for plan in (in_turns([worsening_gate()]), cell_plan([worsening_gate()])):
        assert reason(one(plan, evidence, "load"))
    captured_load(evidence / "load")
    assert "the baseline's: bench left no usable result" in reason(one(in_turns([worsening_gate()]), evidence, "load"))
    assert "No such file or directory: load.json" in reason(one(cell_plan([worsening_gate()]), evidence, "load"))
    (evidence / "baseline").mkdir()
    (evidence / "baseline" / LOAD_STAGE).write_text('{"stage": "load"')
    assert "no usable comparison" in reason(one(cell_plan([worsening_gate()]), evidence, "load"))


def test_repeats_that_have_no_pair_are_invalid(evidence: Path) -> None:
    """The numbers of both are those of looks."""
    ours, beside = (captured_load(evidence / place) for place in ("load", f"load/{result.BESIDE}"))
    for folder, repeats in ((ours, (3, 4)), (beside, (3,))):
        for repeat in repeats:
            copy_repeat(folder, repeat, of=2)
    settings = LOAD.model_copy(update={"most_repeats": 4})
    row = one(in_turns([worsening_gate()], load=settings), evidence, "load")
    assert "4 repeats in load and 3 in beside, which ran in turns" in reason(row)


@pytest.mark.parametrize("make", [in_turns, cell_plan])
def test_a_load_that_ended_early_has_no_interval(evidence: Path, tmp_path: Path, make: Callable[..., CellPlan]) -> None:
    """Surely no worse, had it been a look: two of at least three repeats are none."""
    for folder in (evidence / "load", evidence / "load" / result.BESIDE, tmp_path / "then" / "load"):
        captured_load(folder)
    keep_history(evidence, tmp_path / "then" / "load")
    settings = LOAD.model_copy(update={"repeats": 3, "time_budget_s": 100.0})
    ended = Ended(time_budget_s=100.0, repeats=2, spent_s=80.0, longest_s=50.0)
    (evidence / "load" / ENDED).write_text(ended.model_dump_json())
    row = one(make([worsening_gate()], load=settings), evidence, "load")
    assert row.value == pytest.approx(0)
    assert (row.interval, row.ended_because) == (None, ended.because)


@pytest.mark.parametrize("warming", ["load", f"load/{result.BESIDE}"])
def test_a_first_repeat_that_one_of_them_left_out_is_left_out_of_both(evidence: Path, warming: str) -> None:
    """The pairs that are left are those that were measured side by side: 1.2 times slower, the first aside."""
    folders = captured_load(evidence / "load", 1.2), captured_load(evidence / "load" / result.BESIDE)
    for folder in folders:
        for repeat in (3, 4):
            copy_repeat(folder, repeat, of=2 - repeat % 2)
    scale(evidence / warming, 1, 3.0)
    settings = LOAD.model_copy(update={"most_repeats": 4})
    row = one(in_turns([worsening_gate()], load=settings), evidence, "load")
    assert row.value == pytest.approx(0.2)
    assert width(row) == pytest.approx(0, abs=1e-6)
    assert {place.rpartition("/")[2].split(".")[0] for place in row.traced_to} == {"bench-2", "bench-3", "bench-4"}


@pytest.mark.parametrize(("wrong", "shares"), [pytest.param(1, True, id="little"), pytest.param(30, False, id="much")])
def test_gates_share_the_chance_of_a_fail_only_where_nothing_may_be_lost(evidence: Path, wrong: int, *, shares: bool) -> None:
    """Where something surely is lost, a gate fails as if it were the only one. None shares the chance of a wrong pass."""
    keep_baseline(evidence, right_but([]))
    ask(evidence, right_but(QUESTIONS[:wrong]))
    measured = parse_unfinished("accuracy", cell_plan([]), evidence)
    plans = (cell_plan([loss_gate(), *more]) for more in ([], [worsening_gate(), worsening_gate("tpot_p50_ms")]))
    alone, together = (interval_of(compare(plan, evidence, measured, [loss_gate()])[0]) for plan in plans)
    assert together.upper == alone.upper
    assert (together.lower < alone.lower) is shares
    assert (alone.lower > 0) is not shares


def test_a_repeat_of_0_is_not_so_many_times_worse(evidence: Path) -> None:
    captured_load(evidence / "load" / result.BESIDE)
    shutil.copytree(CAPTURED_LOAD, evidence / "load", dirs_exist_ok=True)
    with_goodput_of_none(evidence / "load", (1, 2))
    plan = in_turns([worsening_gate(GOODPUT)], load=SLO_SETTINGS)
    assert "a repeat is 0" in reason(one(plan, evidence, "load"))


# --- Each metric's direction


REPEATS, PROMPTS, CLIENTS = 3, 620, 4
# Just enough requests for a 99th percentile, and an SLO that all of them meet.
SIZE = {"input_len": 5, "shared_prefix_len": 5, "output_len": 4, "max_concurrency": CLIENTS, "num_prompts": PROMPTS}
TIMES = {"num_warmups": 0, "repeats": REPEATS, "most_repeats": REPEATS, "min_duration_s": 0.1, "slo": Slo(ttft_ms=1e6)}
LONG = Load.model_validate(SIZE | TIMES)
ACCEPTED = 2.5
# Half of each prompt is the same in all of them, of which so much was in the server's prefix cache.
ASKED_TOK, CACHED = 6_200, 0.4
# A peak counts whole chunks in whole seconds, and turns are of other loads.
OF_LOAD = [
    metric.name for metric in METRICS.values() if metric.stage == "load" and metric.name not in (PEAK_CHUNKS, *TURN_TTFTS)
]
SCORES = [metric.name for metric in METRICS.values() if metric.is_score]


def slowed(by: float) -> dict[str, Any]:
    """One made-up load, its server so many times slower."""
    return bench_of([LONG.output_len] * PROMPTS, CLIENTS, lambda _: by, seed=1)


def write_load(folder: Path, slower: float) -> Path:
    """What bench would leave of a server with a draft model that is so many times slower, and drafts and remembers as badly.

    The others are slower than the first by a trace, so that there is some noise.
    """
    folder.mkdir(parents=True)
    for repeat, trace in enumerate((1.0, 1.0001, 1.00005), start=1):
        result = slowed(slower * trace)
        result["start_times"] = [1000 * repeat + start for start in result["start_times"]]
        requests = steady.requests_of(result, CLIENTS)
        figures = steady.figures_of(steady.whole_window(requests, result["duration"]), LONG.slo)
        fields = {key_of(name): value for name, value in figures.items()}
        drafts, accepted = {"spec_decode_num_drafts": 1000}, 1000 * (ACCEPTED / slower - 1)
        drafted = drafts | {"spec_decode_acceptance_length": ACCEPTED / slower, "spec_decode_accepted_tokens": accepted}
        counted = drafts | {"spec_decode_num_accepted_tokens": accepted, "prefix_cache_queries": ASKED_TOK}
        counted |= {"prefix_cache_hits": ASKED_TOK * CACHED / slower}
        asked = about(LONG, None, [10] * PROMPTS, [LONG.output_len] * PROMPTS)
        (folder / f"bench-{repeat}.json").write_text(json.dumps(result | fields | drafted | asked))
        (folder / f"metrics-{repeat}-before.txt").write_text(page(**dict.fromkeys(counted, 0)))
        (folder / f"metrics-{repeat}-after.txt").write_text(page(0, *counts_of(asked), **counted))
    return folder


Compared = dict[float, dict[str, dict[str, Measurement]]]


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """By how much slower the candidate is: its measurements, and its comparisons in turns and with a history, by metric."""
    gates = [worsening_gate(name) for name in OF_LOAD]
    rows: Compared = {}
    on_two_gpus = server_plan().model_copy(update={"gpus": [0, 1]})
    then = write_load(tmp_path_factory.mktemp("then") / "load", 1.0)
    for slower in (1.0, 1.2, 1 / 1.2):
        evidence = tmp_path_factory.mktemp("evidence")
        write_load(evidence / "load", slower)
        shutil.copytree(then, evidence / "load" / result.BESIDE)
        keep_history(evidence, then, LONG, gpus=2)
        about = {"load": LONG, "server": on_two_gpus}
        beside, history = cell_plan(gates, beside=on_two_gpus, **about), cell_plan(gates, **about)
        ours = parse_unfinished("load", beside, evidence)
        rows[slower] = {
            "absolute": {each.metric: each for each in ours},
            "in turns": {each.metric: each for each in compare(beside, evidence, ours)},
            "history": {each.metric: each for each in compare(history, evidence, ours)},
        }
    return rows


@pytest.mark.parametrize("how", ["in turns", "history"])
@pytest.mark.parametrize("metric", OF_LOAD)
def test_a_load_that_is_20_percent_worse_than_the_baseline_is_called_worse(loads: Compared, metric: str, how: str) -> None:
    gate = worsening_gate(metric)
    same, worse, better = (loads[slower][how][metric] for slower in (1.0, 1.2, 1 / 1.2))
    assert [each.value for each in (same, worse, better)] == pytest.approx([0, 0.2, 1 / 1.2 - 1], abs=0.0015)
    assert [surely_misses(gate, [each]) for each in (same, worse, better)] == [False, True, False]


@pytest.mark.parametrize("metric", OF_LOAD)
def test_a_load_that_is_20_percent_worse_than_a_bound_allows_is_called_worse(loads: Compared, metric: str) -> None:
    same, worse, better = (loads[slower]["absolute"][metric] for slower in (1.0, 1.2, 1 / 1.2))
    assert same.value is not None
    higher = metric in HIGHER_IS_BETTER
    bound = {"minimum": same.value / 1.05} if higher else {"maximum": same.value * 1.05}
    gate = gate_of(**{"metric": metric, "unit": METRICS[metric].unit, **bound})
    assert [surely_misses(gate, [each]) for each in (same, worse, better)] == [False, True, False]


@pytest.mark.parametrize("metric", SCORES)
def test_a_score_that_is_20_percent_worse_is_called_worse(tmp_path: Path, metric: str) -> None:
    """Of 40 questions 8 more are missed, or 8 more are found."""
    paired = loss_gate(metric=metric)
    absolute = gate_of(metric=metric, task="gsm8k", filter=STRICT, minimum=0.9, unit="fraction")
    before, asked = Asked(baseline_task(), AVAILABLE, metric), Asked(task_plan(), AVAILABLE, metric)
    for name, before_missed, now_missed, is_worse in (("same", 2, 2, False), ("worse", 2, 10, True), ("better", 10, 2, False)):
        evidence = tmp_path / name / "evidence"
        keep_baseline(evidence, right_but(QUESTIONS[:before_missed]), before)
        # so often that the noise is known to be none
        ask(evidence, right_but(QUESTIONS[:now_missed]), steps=6 * BLOCKS, asked=asked)
        plan = cell_plan([paired, absolute])
        measured = parse_unfinished("accuracy", plan, evidence)
        (lost,) = compare(plan, evidence, measured)
        assert lost.value == pytest.approx((now_missed - before_missed) / 40)
        assert surely_misses(paired, [lost]) is is_worse
        assert surely_misses(absolute, measured) is is_worse
