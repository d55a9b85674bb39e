"""Accuracy: what the captured files of the real lm-eval measure, and how asking ends when something goes wrong."""

import json
import math
import re
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.registry import get_model
from scipy import stats

from tests.builders.accuracy import (
    CAPTURED,
    CAPTURED_PLAN,
    CAPTURED_STEPS,
    NOBODY,
    asking,
    change_samples,
    read_rows,
    with_settings,
    write_rows,
    write_task,
)
from tests.fakes.openai_server import Book
from vllm_qualify.engine.server import Server
from vllm_qualify.errors import HostError, RecipeError, ReleaseError
from vllm_qualify.evidence.accuracy import lm_eval_internals as internals
from vllm_qualify.evidence.accuracy.blocks import BLOCKS
from vllm_qualify.evidence.accuracy.lm_eval_process import running_lm_eval
from vllm_qualify.evidence.accuracy.measurements import describe_missing_answers, describe_retries, parse_task
from vllm_qualify.evidence.accuracy.samples import read_answers
from vllm_qualify.evidence.accuracy.thinking import REPLIES, Reply, read_replies, split_thinking
from vllm_qualify.evidence.measurement import Measurement, interval_of_means, share_interval
from vllm_qualify.evidence.sequential import Levels, Sides, sides
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.recipe.sampling import Sampling

STRICT, FLEXIBLE = "strict-match", "flexible-extract"
UNTHINKING = "unthinking_answers"
OF_ANSWERS: tuple[str, ...] = ("truncated_answers", "output_tok_per_answer", "looping_answers", "other_script_answers")
OF_ANSWERS += ("unread_answers", "lost_by_form_answers")
LEVELS = Levels()
# Of the captured answers: the looks are after 2, 4, 6 and all 8 questions. Fewer cuts or tokens are better.
AT_THE_LAST = sides("lower", LEVELS, [2, 4, 6, 8], 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(CAPTURED, tmp_path / "accuracy" / "gsm8k")


def by_filter(folder: Path, plan: TaskPlan = CAPTURED_PLAN) -> dict[str, Measurement]:
    """The scores by their filters, and what has no filter by its name."""
    rows = {each.filter or each.metric: each for each in parse_task(folder, plan, LEVELS)}
    assert all(each.task == "gsm8k" for each in rows.values())
    return rows


def why_invalid(row: Measurement) -> str:
    assert row.value is None
    return row.invalid_because or ""


def change_reply(folder: Path, step: str, question: int, text: str) -> None:
    """Scores and all else stay as they are."""
    change_samples(folder, lambda rows: [row.update(resps=[[text]]) for row in rows if row["doc_id"] == question], step)


def traced_lines(folder: Path, measurement: Measurement) -> list[str]:
    places = [trace.rpartition(":") for trace in measurement.traced_to]
    assert places
    return [(folder.parents[1] / path).read_text().split("\n")[int(number) - 1] for path, _, number in places]


def test_the_captured_files_give_a_score_for_each_filter_and_the_cut_answers_with_their_lines() -> None:
    rows = parse_task(CAPTURED, CAPTURED_PLAN, LEVELS)
    assert [(each.metric, each.task, each.filter, each.value, each.unit, each.sample_count) for each in rows] == [
        ("exact_match", "gsm8k", STRICT, 1 / 8, "fraction", 8),
        ("exact_match", "gsm8k", FLEXIBLE, 3 / 8, "fraction", 8),
        ("truncated_answers", "gsm8k", None, 8 / 10, "fraction", 8),
        # these pages of metrics have no counts of tokens
        ("output_tok_per_answer", "gsm8k", None, None, "tok", 0),
        ("looping_answers", "gsm8k", None, 0.0, "fraction", 8),
        ("other_script_answers", "gsm8k", None, 0.0, "fraction", 8),
        ("unread_answers", "gsm8k", None, 0.0, "fraction", 8),
        ("lost_by_form_answers", "gsm8k", None, 0.0, "fraction", 8),
    ]
    for row, words in zip(rows, ("exact_match,strict-match", "exact_match,flexible-extract", "length"), strict=False):
        assert [trace.split("/")[:3] for trace in row.traced_to] == [["accuracy", "gsm8k", step] for step in CAPTURED_STEPS]
        assert all(f'"{words}"' in line for line in traced_lines(CAPTURED, row))


def test_the_interval_is_of_the_look(folder: Path) -> None:
    """The looks are after 2, 4, 6 and all 8 questions; further repetitions are of the last. Of cuts the bad side is above."""
    rows = by_filter(folder)
    assert rows[FLEXIBLE].interval == share_interval(3, 8, sides("higher", LEVELS, [2, 4, 6, 8], 3))
    assert rows["truncated_answers"].interval == share_interval(8 / 10 * 8, 8, AT_THE_LAST)
    for step in ("r2-b1", "r1-b4", "r1-b3"):
        shutil.rmtree(folder / step)
    row = by_filter(folder)[FLEXIBLE]
    assert (row.value, row.sample_count) == (2 / 4, 4)
    assert row.interval == share_interval(2, 4, sides("higher", LEVELS, [2, 4, 6, 8], 1))


def test_a_single_look_has_the_levels_themselves() -> None:
    assert sides("higher", LEVELS, [8], 0) == pytest.approx(Sides(LEVELS.false_pass, LEVELS.false_fail), rel=1e-9)
    assert stats.norm.isf(LEVELS.false_pass) == pytest.approx(1.8807936, abs=1e-6)


def test_a_question_counts_with_the_mean_of_its_answers(folder: Path) -> None:
    """Question 11 is asked twice: it is right by strict-match, and then wrong."""
    path = next((folder / "r2-b1").glob("samples_*"))
    path.write_text(path.read_text().replace('"exact_match": 1.0', '"exact_match": 0.0'))
    results = next((folder / "r2-b1").glob("results_*"))
    results.write_text(results.read_text().replace('match": 0.5,', 'match": 0.0,').replace('extract": 0.5,', 'extract": 0.0,'))
    rows = by_filter(folder)
    assert (rows[STRICT].value, rows[STRICT].sample_count) == (0.5 / 8, 8)
    assert rows[FLEXIBLE].value == 2.5 / 8


def test_empty_replies_are_wrong_answers_and_too_many_are_invalid(folder: Path) -> None:
    """None of the two was right. An empty one was, of question 10."""
    change_reply(folder, "r1-b1", 9, "")
    change_reply(folder, "r1-b4", 3, "")
    row = by_filter(folder, with_settings(CAPTURED_PLAN, max_unanswered=0.2))[STRICT]
    assert (row.value, row.sample_count) == (1 / 8, 8)
    for plan in (CAPTURED_PLAN, with_settings(CAPTURED_PLAN, max_unanswered=0.19)):
        rows = by_filter(folder, plan)
        assert set(rows) == {STRICT, FLEXIBLE, *OF_ANSWERS}
        assert all("2 of 10 replies are empty" in why_invalid(each) for each in rows.values())
    # No answer at all is invalid, whatever is allowed.
    for step in CAPTURED_STEPS:
        for question in range(12):
            change_reply(folder, step, question, "")
    assert all(each.value is None for each in by_filter(folder, with_settings(CAPTURED_PLAN, max_unanswered=1.0)).values())


def change_rows(folder: Path, name: str, **fields: object) -> None:
    """The same fields of each answer, by one filter, in all steps; lm-eval's own score of each step follows."""
    for path in folder.glob("*/samples_*"):
        rows = read_rows(path)
        changed = [row | fields if row["filter"] == name else row for row in rows]
        write_rows(path, changed)
        scores = [row["exact_match"] for row in changed if row["filter"] == name]
        results = next(path.parent.glob("results_*"))
        document = json.loads(results.read_text())
        document["results"]["gsm8k"][f"exact_match,{name}"] = sum(scores) / len(scores)
        results.write_text(json.dumps(document))


def test_a_filter_that_found_no_answer_at_all_is_invalid_and_not_a_score_of_0(folder: Path) -> None:
    before = {name: row.value for name, row in by_filter(folder).items()}
    change_rows(folder, STRICT, filtered_resps=["[invalid]"], exact_match=0.0)
    rows = by_filter(folder)
    assert "the filter strict-match found an answer in none of the 10 replies" in why_invalid(rows[STRICT])
    assert rows[STRICT].sample_count == 8
    assert {name: row.value for name, row in rows.items()} == before | {STRICT: None}
    # Wrong answers that were found are a score of 0.
    change_rows(folder, STRICT, filtered_resps=["7"], exact_match=0.0)
    assert by_filter(folder)[STRICT].value == 0.0


@pytest.mark.parametrize("is_told", [False, True])
def test_a_server_that_was_started_anew_between_two_blocks_measured_nothing(folder: Path, is_told: bool) -> None:
    """Its page tells when it began; of an older one a count that is less than at the first tells it."""
    for step in CAPTURED_STEPS:
        for name in ("metrics-before.txt", "metrics-after.txt"):
            page, is_later = folder / step / name, step in CAPTURED_STEPS[2:]
            began = f"process_start_time_seconds {1.79582917621e9 + 60 * is_later}\n" if is_told else ""
            text = page.read_text() if is_told or not is_later else re.sub(r"(_total\{.*\}) \S+", r"\1 0.0", page.read_text())
            page.write_text(text + began)
    sign = "it began at 01:26:16, and then at 01:27:16" if is_told else "its count of vllm:request_success_total went back"
    message = f"the server was started anew between the end of r1-b2 and the start of r1-b3: {sign}"
    assert message in why_invalid(by_filter(folder)[STRICT])


@pytest.mark.parametrize("gone", [".", "r1-b1", "r1-b1/results_*", "r1-b1/samples_*", "task.json", "r*-b*"])
def test_files_that_are_missing_make_the_task_invalid(folder: Path, gone: str) -> None:
    for path in [folder] if gone == "." else folder.glob(gone):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for plan, others in ((CAPTURED_PLAN, ()), (with_settings(CAPTURED_PLAN, think_end="</think>"), (UNTHINKING,))):
        rows = parse_task(folder, plan, LEVELS)
        wanted = [(metric, "gsm8k", None) for metric in ("exact_match", *OF_ANSWERS, *others)]
        assert [(each.metric, each.task, each.filter) for each in rows] == wanted
        assert all("lm-eval left no usable result" in why_invalid(each) for each in rows)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("pattern", "instead", "message"),
    [
        (r"(?s).+", "# no answer: ConnectError\n", "no vllm:request_success_total"),
        (r"(?s).+", "trtllm_request_success_total 8.0\n", "no vllm:request_success_total"),
        (r"(?s).+", "not of Prometheus {", "it is not known"),
        ('finished_reason="length"', 'finished_reason="cut"', "with finished_reason length"),
        (r"} .+", "} NaN", "the server counts nan answers"),
        # 8 of 10 answers were cut. Of infinitely many that would be none.
        (r'(finished_reason="stop".*}) .*', r"\1 +Inf", "inf answers"),
    ],
)
def test_without_its_counts_nobody_knows_how_many_answers_were_cut(
    folder: Path, when: str, pattern: str, instead: str, message: str
) -> None:
    change_page(folder, when, pattern, instead)
    rows = by_filter(folder)
    assert message in why_invalid(rows["truncated_answers"])
    assert rows[STRICT].value == 1 / 8


def change_page(folder: Path, when: str, pattern: str, instead: str) -> None:
    path = folder / "r1-b2" / f"metrics-{when}.txt"
    path.write_text(re.sub(pattern, instead, path.read_text()))


def test_fewer_counts_than_answers_are_none(folder: Path) -> None:
    shutil.copy(folder / "r1-b2" / "metrics-before.txt", folder / "r1-b2" / "metrics-after.txt")
    message = "the server counts 0 answers to the 2 questions of r1-b2"
    assert message in why_invalid(by_filter(folder)["truncated_answers"])


def test_a_task_of_likelihoods_has_no_answers_to_cut(folder: Path) -> None:
    for path in folder.glob("r*-b*/results_*"):
        path.write_text(path.read_text().replace('"output_type": "generate_until"', '"output_type": "multiple_choice"'))
    rows = by_filter(folder)
    assert all("compares likelihoods" in why_invalid(rows[metric]) for metric in OF_ANSWERS)
    assert rows[STRICT].value == 1 / 8
    assert {answer.length for answer in read_answers(folder, CAPTURED_PLAN).answers} == {None}


def test_faults_of_texts_are_shares_of_the_questions(folder: Path) -> None:
    """Of 8 questions: 9 loops, and of those asked twice 11 loops once, and 3 is answered in Russian once."""
    change_reply(folder, "r1-b1", 9, "Finn finds 27 books. " * 40)
    change_reply(folder, "r1-b4", 3, "\u041e\u0442\u0432\u0435\u0442 4")
    change_reply(folder, "r2-b1", 11, "4" * 300)
    rows = by_filter(folder)
    looping = rows["looping_answers"]
    assert (looping.value, rows["other_script_answers"].value, rows[STRICT].value) == (1.5 / 8, 0.5 / 8, 1 / 8)
    assert looping.interval == share_interval(1.5, 8, AT_THE_LAST)
    assert all((folder.parents[1] / trace).is_file() for trace in looping.traced_to)


def test_thinking_that_loops_is_a_loop_whatever_the_answer_is(folder: Path) -> None:
    """Of 8 questions one, in its only answer; the file of thoughts is as the worker writes it."""
    row = next(row for row in step_rows(folder) if row["doc_id"] == 9)
    kept = {"prompt_hash": row["prompt_hash"], "finish_reason": "length", "thinking": "Wait. " * 99, "is_empty": False}
    replies = folder / "r1-b1" / "replies.jsonl"
    replies.write_text(json.dumps(kept) + "\n")
    assert by_filter(folder)["looping_answers"].value == 1 / 8
    replies.write_text("{")
    assert "no usable result" in why_invalid(by_filter(folder)["looping_answers"])


def count_tokens(folder: Path, tokens: dict[str, list[int]]) -> None:
    """Pages of metrics with vLLM's histogram. Before each step the server has had a reply of 7 tokens."""
    for path in folder.glob("r*-b*"):
        for name, replies in (("before", [7]), ("after", [7, *tokens[path.name]])):
            page = path / f"metrics-{name}.txt"
            page.write_text(page.read_text() + histogram(replies))


def histogram(replies: list[int]) -> str:
    bounds = [1, 2, 5, 10, 20, 50, 100, 200]
    about, name = 'engine="0",model_name="reference"', "vllm:request_generation_tokens"
    lines = [f'{name}_bucket{{{about},le="{bound}.0"}} {sum(each <= bound for each in replies)}.0' for bound in bounds]
    lines.append(f'{name}_bucket{{{about},le="+Inf"}} {len(replies)}.0')
    lines += [f"{name}_count{{{about}}} {len(replies)}.0", f"{name}_sum{{{about}}} {sum(replies)}.0"]
    return "".join(f"{line}\n" for line in [f"# HELP {name} Number.", f"# TYPE {name} histogram", *lines])


TOKENS = {"r1-b1": [30, 40], "r1-b2": [30, 30], "r1-b3": [20, 20], "r1-b4": [40, 40], "r2-b1": [20, 30]}


def test_tokens_of_answers_are_the_servers_own(folder: Path) -> None:
    """10 answers, 300 tokens: 30 each.

    Three are in the bucket from 10 to 20, seven in that from 20 to 50. At the lower ends they have 30 + 140 = 170 tokens, and
    squares of 300 + 2,800 = 3,100. The other 130 tokens add 130 times 20 + 50 to the squares. That makes 12,200, so the
    variance is at most 1,220 - 900 = 320.
    """
    count_tokens(folder, TOKENS)
    row = by_filter(folder)["output_tok_per_answer"]
    assert (row.value, row.unit, row.sample_count) == (30.0, "tok", 8)
    below, above = (-stats.norm.ppf(alpha) * math.sqrt(320 / 8) for alpha in AT_THE_LAST)
    assert row.interval
    assert (row.interval.lower, row.interval.upper) == pytest.approx((30 - below, 30 + above))
    assert all("vllm:request_generation_tokens_" in line for line in traced_lines(folder, row))


def test_a_reply_longer_than_all_buckets_counts_up_to_the_next_one(folder: Path) -> None:
    """Ten replies of 400 tokens, in the bucket above 200: no variance, whatever the buckets: 400 is within 500, the next."""
    count_tokens(folder, {step: [400, 400] for step in TOKENS})
    row = by_filter(folder)["output_tok_per_answer"]
    assert row.value == 400.0
    assert row.interval
    below = -stats.norm.ppf(AT_THE_LAST.below)
    # all at 200 and 500: a third and two thirds
    assert row.interval.lower == pytest.approx(400 - below * math.sqrt((200**2 / 3 + 2 * 500**2 / 3 - 400**2) / 8))


@pytest.mark.parametrize(
    ("when", "pattern", "instead", "message"),
    [
        ("after", r"vllm:request_generation_tokens_sum.*\n", "", "has no vllm:request_generation_tokens"),
        ("before", r"vllm:request_generation_tokens_bucket.*\n", "", "has no vllm:request_generation_tokens"),
        ("after", r"(?s).+", "# no answer: ConnectError\n", "has no vllm:request_generation_tokens"),
        ("after", r"(tokens_sum{.*}) .*", r"\1 NaN", "counts nan tokens"),
        ("after", r"(tokens_sum{.*}) .*", r"\1 +Inf", "counts inf tokens"),
        ("after", r"(tokens_sum{.*}) .*", r"\1 -5", "counts -12 tokens"),
        ("after", r"(tokens_count{.*}) .*", r"\1 2.0", "of 1 answers to 2 questions"),
        ("after", r"(tokens_count{.*}) .*", r"\1 9.0", "3 answers in its buckets|2 answers in its buckets"),
        ("after", r'le="50.0"', 'le="51.0"', "other buckets"),
        ("after", r'(le="200.0"}) .*', r"\1 1.0", "counts 60 tokens"),
        ("after", r"(tokens_sum{.*}) .*", r"\1 {", "not known"),
    ],
)
def test_counts_of_tokens_that_lie_are_invalid(folder: Path, when: str, pattern: str, instead: str, message: str) -> None:
    count_tokens(folder, TOKENS)
    change_page(folder, when, pattern, instead)
    rows = by_filter(folder)
    assert re.search(message, why_invalid(rows["output_tok_per_answer"]))
    assert rows[STRICT].value == 1 / 8


def test_tokens_without_a_bucket_that_ends_are_invalid(folder: Path) -> None:
    """Nothing then bounds how long a reply was."""
    count_tokens(folder, TOKENS)
    for path in folder.glob("r*-b*/metrics-*.txt"):
        path.write_text(re.sub(r'vllm:request_generation_tokens_bucket{.*le="[\d.]+"}.*\n', "", path.read_text()))
    assert "no bucket that ends" in why_invalid(by_filter(folder)["output_tok_per_answer"])


# From here on with the real lm-eval.

QUESTIONS = {f"How many are {number} and 1?": f" They are {number + 1}.\n#### {number + 1}" for number in range(12)}
ROWS = [{"question": question, "answer": answer.strip()} for question, answer in QUESTIONS.items()]
SOME = frozenset(list(QUESTIONS)[:2])


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("test", "shots"):
        write_rows(tmp_path / f"{name}.jsonl", ROWS)
    return tmp_path / "test.jsonl", tmp_path / "shots.jsonl"


def plan_of(data: tuple[Path, Path] | None, **changed: Any) -> TaskPlan:
    settings = Accuracy(**({"num_questions": 12, "num_fewshot": 2, "time_limit_s": 60.0} | changed))
    return TaskPlan(settings=settings, num_concurrent=4, repetitions=2, sequential=True, questions=data)


Asked = tuple[Path, TaskPlan]
Ask = Callable[..., Asked]


@pytest.fixture
def ask(tmp_path: Path, data: tuple[Path, Path]) -> Ask:
    """Asks the first steps of the task. A step has a block of the questions, or all of them if the task is not `sequential`."""

    def ask_steps(
        book: Book, most: int = 1, *, start: int = 1, at_once: int = 4, sequential: bool = True, **settings: Any
    ) -> Asked:
        shutil.rmtree(tmp_path / "accuracy", ignore_errors=True)
        update = {"num_concurrent": at_once, "sequential": sequential}
        folder, plan = tmp_path / "accuracy" / "gsm8k", plan_of(data, **settings).model_copy(update=update)
        with asking(book, plan, folder, start=start) as run:
            for step in run.steps[:most]:
                run.ask(step)
        return folder, plan

    return ask_steps


def test_prompts_are_made_before_the_server_answers(tmp_path: Path, data: tuple[Path, Path]) -> None:
    """The first block is then asked at once."""
    with running_lm_eval(NOBODY, "reference", plan_of(data), tmp_path / "lm-eval") as lm_eval:
        deadline = time.monotonic() + 120
        while "12/12" not in lm_eval.process.log.read_text():
            lm_eval.check()
            assert time.monotonic() < deadline, lm_eval.process.log.read_text()
            time.sleep(0.05)  # another process writes the log: it can only be read again
        assert "Building contexts" in lm_eval.process.log.read_text()


@pytest.mark.parametrize("at_once", [4, 1])
def test_requests_that_fail_once_are_asked_again_and_counted(
    at_once: int, tmp_path: Path, data: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "shhhhhhhh")
    told: list[tuple[int, int, str]] = []
    book = Book(QUESTIONS, failing=SOME, dropped=frozenset(list(QUESTIONS)[2:4]), once=True)
    folder, plan = tmp_path / "accuracy" / "gsm8k", plan_of(data).model_copy(update={"num_concurrent": at_once})
    folder.mkdir(parents=True)
    (folder / "left of an earlier try").touch()
    with asking(book, plan, folder, lambda done, total, part="": told.append((done, total, part))) as run:
        assert [step.folder for step in run.steps] == [f"r{one}-b{two}" for one in (1, 2) for two in range(1, BLOCKS + 1)]
        for step in run.steps[:BLOCKS]:
            run.ask(step)
        of_first, requests = [*told], sum(book.asked.values())
        run.ask(run.steps[BLOCKS])
    shutil.rmtree(folder / "r2-b1")
    assert by_filter(folder, plan)[STRICT].value == 1.0
    # The blocks of a repetition are counted together, and the second repetition is named. One after another, lm-eval shows its
    # progress now and then.
    assert {(total, part) for _, total, part in of_first} == {(12, "")}
    assert [done for done, _, _ in of_first] == sorted(done for done, _, _ in of_first)
    assert of_first[-1][0] == 12 or (at_once == 1 and of_first[-1][0] > 9)
    assert {(total, part) for _, total, part in told[len(of_first) :]} == {(12, "repetition 2")}
    assert requests == 16
    assert describe_retries(folder, plan).startswith("4 requests failed, and lm-eval asked again: it tries each 3 times")
    assert {path.name for path in folder.iterdir()} == {"task.json", *(f"r1-b{block}" for block in range(1, BLOCKS + 1))}
    assert "shhhhhhhh" not in " ".join(run.lm_eval.command)
    assert not any(b"shhhhhhhh" in path.read_bytes() for path in folder.parent.rglob("*") if path.is_file())


def test_chat_sends_the_examples_as_turns_and_an_absent_reply_is_a_wrong_answer(ask: Ask) -> None:
    book = Book(QUESTIONS, absent=frozenset(list(QUESTIONS)[:1]), empty=frozenset(list(QUESTIONS)[1:2]))
    folder, plan = ask(book, BLOCKS, api="chat", max_unanswered=0.2)
    turns = ("user", "assistant", "user", "assistant", "user")
    assert {tuple(turn["role"] for turn in prompt) for prompt in book.prompts} == {turns}
    row = by_filter(folder, plan)[STRICT]
    assert row.value == pytest.approx(10 / 12)
    assert row.sample_count == 12
    assert {answer.question for answer in read_answers(folder, plan).answers if answer.unanswered} == {0, 1}


GREEDY_KEYS = {"messages", "model", "max_tokens", "temperature", "stop", "seed"}
THINKING = {"enable_thinking": True, "thinking_budget": 64}


def test_an_answer_is_asked_greedily_and_with_one_seed_unless_the_recipe_says_so(ask: Ask) -> None:
    """What every earlier version sent: old evidence can still be compared."""
    book = Book(QUESTIONS)
    ask(book, api="chat")
    assert {frozenset(request) for request in book.requests} == {frozenset(GREEDY_KEYS)}
    assert {(request["temperature"], request["seed"], request["max_tokens"]) for request in book.requests} == {(0, 1234, 256)}


@pytest.mark.parametrize("at_once", [4, 1])
def test_what_the_recipe_says_of_asking_arrives_at_the_server(at_once: int, ask: Ask) -> None:
    """With the lm-eval that is installed: it has no documented contract for what its arguments become in a request."""
    book, numbers = Book(QUESTIONS), {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "presence_penalty": 1.5}
    of_template: dict[str, Any] = {"chat_template_kwargs": THINKING, "reasoning_effort": "low"}
    settings = {"max_gen_toks": 999, "sampling": Sampling(**numbers), "system_prompt": "Be brief."} | of_template
    folder, plan = ask(book, BLOCKS, at_once=at_once, api="chat", **settings)
    sent = numbers | of_template | {"max_tokens": 999, "stop": ["Question:", "</s>", "<|im_end|>"]}
    for request in book.requests:
        assert set(request) == GREEDY_KEYS | set(sent)
        assert {name: request[name] for name in sent} == sent
        assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert by_filter(folder, plan)[STRICT].value == 1.0
    # A host that asked otherwise than it planned is found out by lm-eval's own file.
    warmth = plan.settings.sampling.model_copy(update={"temperature": 0.7})  # type: ignore[union-attr]  # it has one
    warmer = with_settings(plan, sampling=warmth)
    assert "temperature was 0.6 in r1-b1, and 0.7 is planned" in why_invalid(parse_task(folder, warmer, LEVELS)[0])


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("stop", [[], ["END", "Q:"]])
def test_a_reply_ends_at_the_recipes_own_texts(api: str, stop: list[str], ask: Ask) -> None:
    book = Book(QUESTIONS)
    ask(book, api=api, stop=stop)
    assert [request["stop"] for request in book.requests] == [stop] * len(book.requests)
    assert book.requests


def test_a_sampled_answer_has_a_seed_of_its_own_that_the_next_run_gives_it_again(ask: Ask) -> None:
    """vLLM gives the same answer to the same prompt with the same seed."""
    seeds: list[list[int]] = []
    for start in (1, 1, 2):
        book = Book(QUESTIONS)
        ask(book, 2, start=start, sequential=False, sampling=Sampling(temperature=1), num_questions=4)
        seeds.append(sorted(request["seed"] for request in book.requests))
        assert len(set(seeds[-1])) == 8
        assert all(0 <= seed < 2**31 for seed in seeds[-1])
    assert seeds[0] == seeds[1]
    assert not {*seeds[0]} & {*seeds[2]}


def test_a_sampled_question_counts_with_the_mean_of_its_samples(tmp_path: Path, data: tuple[Path, Path]) -> None:
    book = Book(QUESTIONS, sampled=frozenset(QUESTIONS) - SOME)
    settings = plan_of(data, sampling=Sampling(temperature=1), samples_per_question=3).settings
    plan = plan_of(data).model_copy(update={"settings": settings, "repetitions": 3})
    folder = tmp_path / "accuracy" / "gsm8k"
    with asking(book, plan, folder) as run:
        for step in run.steps[: 2 * BLOCKS]:
            run.ask(step)
        assert why_invalid(by_filter(folder, plan)[STRICT]) == "24 answers, where 36 are wanted: samples_per_question is 3"
        for step in run.steps[2 * BLOCKS :]:
            run.ask(step)
    right: dict[str, list[bool]] = {}
    for request in book.requests:
        question = request["prompt"].rpartition("Question: ")[2].removesuffix("\nAnswer:")
        right.setdefault(question, []).append(question in SOME or request["seed"] % 2 == 0)
    means = [statistics.fmean(answers) for answers in right.values()]
    assert len({tuple(sorted(answers)) for answers in right.values()}) > 2
    assert {len(answers) for answers in right.values()} == {3}
    row = by_filter(folder, plan)[STRICT]
    assert row.value == pytest.approx(statistics.fmean(means))
    assert row.sample_count == 12
    # There is one look, when all samples are there.
    assert row.interval == interval_of_means(means, 36, sides("higher", LEVELS, [12], 0))


@pytest.mark.parametrize("repetitions", [1, 2])
def test_a_plan_cannot_ask_for_fewer_samples_than_its_recipe(repetitions: int) -> None:
    """A plan from another machine is held against the recipe by its tasks' settings, and has this number beside them."""
    claimed = with_settings(CAPTURED_PLAN, sampling=Sampling(temperature=1), samples_per_question=3)
    assert claimed.model_copy(update={"repetitions": repetitions}).least_repetitions == 3


AT = Sides(0.03, 0.05)


def test_samples_of_questions_that_are_always_or_never_right_are_worth_no_more_than_one_each() -> None:
    once, often = share_interval(21, 30, AT), interval_of_means([1.0] * 21 + [0.0] * 9, 30 * 16, AT)
    assert often.lower < once.lower
    assert once.upper < often.upper
    assert interval_of_means([1.0] * 30, 30 * 16, AT) == share_interval(30, 30, AT)
    assert interval_of_means([0.0] * 30, 30 * 16, AT) == share_interval(0, 30, AT)
    # Those of questions that are alike are worth as many answers.
    assert interval_of_means([0.75] * 30, 30 * 16, AT) == share_interval(0.75 * 30 * 16, 30 * 16, AT)


@pytest.mark.thorough
@pytest.mark.parametrize(("count", "samples"), [(30, 4), (30, 16), (200, 2)])
@pytest.mark.parametrize(("right", "wrong"), [(2.0, 2.0), (0.3, 0.1), (9.0, 3.0), (200.0, 100.0)])
def test_the_interval_over_samples_errs_as_often_as_it_says(count: int, samples: int, right: float, wrong: float) -> None:
    """Questions' chances are drawn from a beta distribution: 4 and 5 % of the intervals may err, with room for chance."""
    rng, truth = np.random.default_rng(7), right / (right + wrong)
    means = rng.binomial(samples, rng.beta(right, wrong, (2000, count))) / samples
    intervals = [interval_of_means(row, count * samples, AT) for row in means.tolist()]
    assert np.mean([interval.lower > truth for interval in intervals]) < 0.03 + 0.013
    assert np.mean([interval.upper < truth for interval in intervals]) < 0.05 + 0.015


def step_rows(folder: Path, step: str = "r1-b1") -> list[dict[str, Any]]:
    return [row for path in (folder / step).glob("samples_*") for row in read_rows(path)]


def replies_of(folder: Path) -> dict[str, Reply]:
    """The kept replies of the first step by their question."""
    question_of = {row["prompt_hash"]: row["doc"]["question"] for row in step_rows(folder)}
    return {question_of[reply.prompt_hash]: reply for reply in read_replies(folder / "r1-b1")}


@pytest.mark.parametrize("at_once", [4, 1])
def test_thinking_that_the_server_splits_off_is_kept_beside_the_answers(at_once: int, ask: Ask) -> None:
    thoughts = {question: f"Is it {number}? #### 99" for number, question in enumerate(QUESTIONS)}
    folder, plan = ask(Book(QUESTIONS, thinking=thoughts), at_once=at_once, sequential=False, api="chat")
    assert {question: reply.thinking for question, reply in replies_of(folder).items()} == thoughts
    rows = by_filter(folder, plan)
    assert (rows[STRICT].value, rows["looping_answers"].value) == (1.0, 0.0)
    assert describe_missing_answers(folder, plan) == ""
    replies = folder / "r1-b1" / "replies.jsonl"
    replies.write_text("".join(replies.read_text().splitlines(keepends=True)[2:]))
    rows = by_filter(folder, plan)
    assert "2 answers have no reply in replies.jsonl" in why_invalid(rows["looping_answers"])
    assert rows[STRICT].value == 1.0


def test_answers_without_thinking_are_a_share_of_the_questions(ask: Ask) -> None:
    """Of 12: two have no thinking, one has blanks, and one reply is empty after its thinking, which counts as thinking."""
    none, other, blank, empty, *rest = QUESTIONS
    book = Book(QUESTIONS, thinking={blank: "\n\n", empty: "Hm."} | dict.fromkeys(rest, "So."), empty=frozenset([empty]))
    folder, plan = ask(book, sequential=False, api="chat", max_unanswered=0.1)
    row = by_filter(folder, plan)[UNTHINKING]
    assert (row.value, row.sample_count, row.unit) == (3 / 12, 12, "fraction")
    assert row.interval == share_interval(3, 12, sides("lower", LEVELS, [12], 0))
    assert {none, other} == {question for question, reply in replies_of(folder).items() if reply.thinking is None}
    assert all((folder.parents[1] / trace).is_file() for trace in row.traced_to)
    replies = folder / "r1-b1" / "replies.jsonl"
    whole = replies.read_text()
    # A reply that stands there twice belongs to no answer. An empty reply is no loss.
    twice = next(line for line in whole.splitlines(keepends=True) if '"So."' in line)
    for lies in ("".join(whole.splitlines(keepends=True)[2:]), whole + twice):
        replies.write_text(lies)
        assert "answers have no reply of their own" in why_invalid(by_filter(folder, plan)[UNTHINKING])


def test_where_nobody_thinks_only_think_end_says_that_one_should(ask: Ask) -> None:
    folder, plan = ask(Book(QUESTIONS), sequential=False, api="chat", think_end="</think>")
    silent = with_settings(plan, think_end=None)
    assert by_filter(folder, plan)[UNTHINKING].value == 1.0
    assert UNTHINKING not in by_filter(folder, silent)
    (folder / "r1-b1" / "replies.jsonl").unlink()
    message = "12 of 12 answers have no reply of their own in replies.jsonl"
    assert message in why_invalid(by_filter(folder, plan)[UNTHINKING])
    assert UNTHINKING not in by_filter(folder, silent)


def test_a_reply_that_never_came_has_no_thinking(ask: Ask) -> None:
    lost, *rest = QUESTIONS
    book = Book(QUESTIONS, absent=frozenset([lost]), thinking=dict.fromkeys(rest, "So."))
    assert by_filter(*ask(book, sequential=False, api="chat", max_unanswered=0.1))[UNTHINKING].value == 1 / 12


def test_of_a_question_asked_twice_the_mean_counts_by_replies_of_the_real_engine(folder: Path) -> None:
    """The reference chat model's reply, with its thinking, and the same one as the server has it where nothing is thought.

    Question 9 is without thinking, and 11, which is asked twice, once.
    """
    exchanges = map(json.loads, (CAPTURED.parents[1] / "chat" / "contract" / "exchanges.jsonl").read_text().splitlines())
    (reply_to_chat,) = [each["reply"] for each in exchanges if each["name"] == "chat 1"]
    (choice,) = json.loads(reply_to_chat)["choices"]
    assert choice["message"]["reasoning"] == "12+30=42"
    plain = choice | {"message": choice["message"] | {"reasoning": None}}
    for step in CAPTURED_STEPS:
        replies = []
        for prompt, question in {row["prompt_hash"]: row["doc_id"] for row in step_rows(folder, step)}.items():
            replied = plain if (step, question) in {("r1-b1", 9), ("r2-b1", 11)} else choice
            reply, _ = split_thinking("", replied, "12 + 30 = 42.", None)
            replies.append(reply.model_copy(update={"prompt_hash": prompt}))
        (folder / step / "replies.jsonl").write_text("".join(f"{reply.model_dump_json()}\n" for reply in replies))
    row = by_filter(folder)[UNTHINKING]
    assert (row.value, row.sample_count) == (1.5 / 8, 8)
    first = folder / "r1-b1" / "replies.jsonl"
    first.write_text(first.read_text().split("\n")[0] + "\n")
    assert "1 of 10 answers have no reply of their own" in why_invalid(by_filter(folder)[UNTHINKING])


@pytest.mark.parametrize(("api", "at_once"), [("chat", 4), ("completions", 4), ("completions", 1)])
def test_each_answer_has_the_tokens_of_its_own_reply(api: str, at_once: int, ask: Ask) -> None:
    """Replies of two words to thirteen, and as many words of thinking."""
    words = {question: "so " * number + "#### 1" for number, question in enumerate(QUESTIONS)}
    folder, plan = ask(Book(words, thinking=words), at_once=at_once, sequential=False, api=api)
    given = {number: 2 * len(text.split()) for number, text in enumerate(words.values())}
    # The local questions are in the book's order.
    assert {answer.question: answer.output_tok for answer in read_answers(folder, plan).answers} == given


ODD_FIELDS = [7, ["a"], {"text": "a"}, None, {}, *({"completion_tokens": tokens} for tokens in (-1, "9", True))]


@pytest.mark.parametrize("odd", ODD_FIELDS, ids=str)
def test_thinking_that_is_no_text_and_a_usage_that_counts_nothing_are_none(odd: object) -> None:
    choice = {"index": 0, "finish_reason": odd, "message": {"content": "yes", "reasoning": odd}, "usage": odd}
    reply, answer = split_thinking("a", choice, "yes", None)
    assert (reply.thinking, reply.finish_reason, reply.output_tok, answer) == (None, None, None, "yes")


CHAT = [{"role": "user", "content": "é"}]


def reading_model(kind: str, prompt: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """lm-eval's model after it made a request with this prompt, and the prompt and choice of each reply that is read."""
    no_tokenizer = {} if "chat" in kind else {"tokenizer_backend": None}
    model, read_each = get_model(kind)(model="m", base_url="http://127.0.0.1:9", **no_tokenizer), list[tuple[str, Any]]()

    def read(prompt: str, choice: dict[str, Any], text: str | None) -> str | None:
        read_each.append((prompt, choice))
        return split_thinking(prompt, choice, text, None)[1]

    internals.read_replies(model, read)
    model._create_payload(prompt, generate=True, gen_kwargs={})
    return model, read_each


def test_each_choice_is_read_with_its_prompt_and_of_two_it_is_not_known_which_has_how_many_tokens() -> None:
    choices = [{"index": 0, "text": "yes"}, {"index": 1, "text": "no"}]
    model, read = reading_model("local-completions", "a")
    model.parse_generations({"choices": choices, "usage": {"completion_tokens": 9}})
    assert read == [("a", choice) for choice in choices]
    model, read = reading_model("local-chat-completions", CHAT)
    assert model.parse_generations({"choices": [{"index": 0, "message": {"content": "yes"}}]}) == ["yes"]
    assert [prompt for prompt, _ in read] == ['[{"role": "user", "content": "é"}]']


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_thinking_that_the_server_leaves_in_the_reply_is_not_scored(api: str, ask: Ask) -> None:
    """One reply is cut in its thinking, one ends in it, and one does not think. All thoughts have another answer."""
    cut, ended, plain = list(QUESTIONS)[:3]
    thought = "It is #### 99"
    replies = {question: f"{thought}</think>\n\n{answer}" for question, answer in QUESTIONS.items()}
    replies |= {cut: thought, ended: f"{thought}</think>", plain: QUESTIONS[plain]}
    book = Book(replies, cut=frozenset([cut]))
    folder, plan = ask(book, sequential=False, api=api, think_end="</think>", max_unanswered=0.2)
    kept = replies_of(folder)
    assert {reply.thinking for question, reply in kept.items() if question != plain} == {thought}
    assert kept[plain].thinking is None
    assert [reply.is_empty for reply in (kept[cut], kept[ended], kept[plain])] == [True, True, False]
    rows = by_filter(folder, plan)
    assert rows[STRICT].value == rows[FLEXIBLE].value == pytest.approx(10 / 12)
    assert rows[UNTHINKING].value == 1 / 12
    words = "of 12 replies, 1 was cut while still thinking and 1 ended without an answer after the thinking"
    assert describe_missing_answers(folder, plan) == words
    fewer = with_settings(plan, max_unanswered=0.1)
    problem = f"2 of 12 replies are empty, and max_unanswered is 0.1; {words}"
    assert why_invalid(by_filter(folder, fewer)[STRICT]) == problem
    # lm-eval's confined process wrote this file, and may have run a task's own code.
    (folder / "r1-b1" / "replies.jsonl").write_text('{"prompt_hash": 7}\n')
    assert "left no usable result" in why_invalid(parse_task(folder, fewer, LEVELS)[0])


@pytest.mark.parametrize(
    "reply",
    [
        {"error": {"message": "filtered"}},
        {"choices": None},
        {"choices": 7},
        {"choices": [None]},
        {"choices": ["yes"]},
        {"choices": [{"message": {"content": "yes"}}]},
        {"choices": [{"index": 0, "message": "yes"}]},
        {"choices": [{"index": "0", "message": {"content": "yes"}}]},
    ],
)
def test_a_malformed_reply_is_an_empty_answer_and_no_failure_of_lm_eval(reply: dict[str, Any]) -> None:
    assert reading_model("local-chat-completions", CHAT)[0].parse_generations(reply) == [""]


@pytest.mark.parametrize(("wanted", "sent"), [(None, 1280), (256, 256), (9000, 9000)])
def test_a_recipes_budget_goes_over_a_tasks_own(wanted: int | None, sent: int, tmp_path: Path) -> None:
    options = {"until": ["\n\n"], "max_gen_toks": 1280, "temperature": 0.0}
    write_task(tmp_path / "tasks", "long", ROWS, doc_to_text="Question: {{question}}", generation_kwargs=options)
    plan = plan_of(None, task="long", max_gen_toks=wanted, num_fewshot=0).model_copy(update={"folder": tmp_path / "tasks"})
    book = Book(QUESTIONS)
    with asking(book, plan, tmp_path / "accuracy" / "long") as run:
        run.ask(run.steps[0])
        run.ask(run.steps[1])
    assert {request["max_tokens"] for request in book.requests} == {sent}


@pytest.mark.parametrize(
    "form", [r"So the answer is $\boxed{%s}$.", "We get\n$$\n\\boxed{%s}\n$$", "They are %s..."], ids=["latex", "lines", "dots"]
)
def test_right_answers_in_a_form_that_no_filter_reads_are_form_and_not_knowledge(form: str, ask: Ask) -> None:
    book = Book({question: form % answer.rpartition("####")[2].strip() for question, answer in QUESTIONS.items()})
    rows = by_filter(*ask(book, sequential=False))
    assert (rows[FLEXIBLE].value, rows["lost_by_form_answers"].value) == (0.0, 1.0)
    assert "read so, the score is 100.0% and not 0.0%; that would be form and not knowledge" in rows[FLEXIBLE].finding


def test_a_score_says_what_its_own_filter_does_not_read(ask: Ask) -> None:
    """Ten replies are read by flexible-extract alone: strict-match loses them to form, though another filter reads them."""
    plain = {question: f"They are {number + 1}" for number, question in enumerate(QUESTIONS) if number >= 2}
    rows = by_filter(*ask(Book(QUESTIONS | plain), sequential=False))
    assert (rows[STRICT].value, rows[FLEXIBLE].value) == (2 / 12, 1.0)
    assert "read so, the score is 100.0% and not 16.7%" in rows[STRICT].finding
    assert (rows["lost_by_form_answers"].value, rows[FLEXIBLE].finding) == (0.0, "")


def test_wrong_answers_are_no_loss_of_form_and_right_ones_are_none(ask: Ask) -> None:
    wrong = dict.fromkeys(SOME, r"It is $\boxed{77}$.")
    rows = by_filter(*ask(Book(QUESTIONS | wrong), sequential=False))
    assert rows[FLEXIBLE].value == 10 / 12
    assert (rows["lost_by_form_answers"].value, rows["unread_answers"].value, rows[FLEXIBLE].finding) == (0.0, 0.0, "")


def test_replies_in_which_no_filter_finds_anything_are_counted(ask: Ask) -> None:
    rows = by_filter(*ask(Book(QUESTIONS | dict.fromkeys(SOME, "I do not know.")), sequential=False))
    assert rows["unread_answers"].value == 2 / 12


def test_thoughts_that_a_stop_text_ended_are_told_with_the_remedy(folder: Path) -> None:
    """vLLM looks for `stop` in the thoughts, and lm-eval sends gsm8k's `until` as that."""
    stopped = Reply(prompt_hash="a", finish_reason="stop", stop_reason="Question:", thinking="Question: is", is_empty=True)
    own = stopped.model_copy(update={"stop_reason": None})
    lines = "".join(f"{reply.model_dump_json()}\n" for reply in (stopped, stopped, own))
    (folder / "r1-b1" / REPLIES).write_text(lines)
    told = describe_missing_answers(folder, CAPTURED_PLAN)
    assert "2 were ended in the thinking by the stop text 'Question:': set stop: [] for this task" in told
    assert "1 ended without an answer after the thinking" in told


def test_requests_that_always_fail_are_no_wrong_answers(tmp_path: Path, data: tuple[Path, Path]) -> None:
    folder, plan = tmp_path / "accuracy" / "gsm8k", plan_of(data)
    book = Book(QUESTIONS, failing=SOME, dropped=frozenset(QUESTIONS) - SOME)
    with pytest.raises(HostError, match="lm-eval ended with exit code 1") as raised, asking(book, plan, folder) as run:
        run.ask(run.steps[0])
    assert any("Error" in line for line in raised.value.log_tail)
    assert all(each.value is None for each in parse_task(folder, plan, LEVELS))


def test_slow_answers_end_at_the_time_limit_or_with_the_server_and_never_as_wrong_ones(
    tmp_path: Path, data: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(_: Server) -> None:
        raise ReleaseError("the server ended", "see its log", "serve")

    folder, plan = tmp_path / "accuracy" / "gsm8k", plan_of(data)
    with asking(Book(QUESTIONS, delay_s=30), plan, folder) as run:
        run.lm_eval = run.lm_eval.model_copy(update={"task": with_settings(plan, time_limit_s=2.0)})
        with pytest.raises(HostError, match="gsm8k took longer than its 2 s"):
            run.ask(run.steps[0])
        monkeypatch.setattr(Server, "check_alive", ended)
        with pytest.raises(ReleaseError, match="the server ended"):
            run.ask(run.steps[1])
    assert all(each.value is None for each in parse_task(folder, plan, LEVELS))


@pytest.mark.parametrize(
    ("changed", "place", "message"),
    [
        ({"num_questions": 13}, "accuracy.gsm8k.num_questions", "the recipe asks 13 questions, and the task has 12"),
        ({"task": "gsm9k"}, "accuracy.gsm9k", "there is no task 'gsm9k' in lm-eval"),
        ({"task": "choices", "api": "chat"}, "accuracy.choices", "it compares likelihoods, which chat does not give"),
        ({"task": "choices", "num_fewshot": 0}, "accuracy.choices", "lm-eval needs the server's tokenizer"),
        ({"task": "choices", "sampling": Sampling(temperature=1)}, "accuracy.choices", "compares likelihoods, and samples no"),
    ],
)
def test_what_lm_eval_cannot_measure_is_reported_with_a_remedy(
    tmp_path: Path, data: tuple[Path, Path], changed: dict[str, Any], place: str, message: str
) -> None:
    # What a task of one's own reads is in its folder: lm-eval can open nothing else.
    of_choices = {"output_type": "multiple_choice", "doc_to_choice": ["one", "two"], "doc_to_target": 0}
    write_task(tmp_path / "tasks", "choices", ROWS, **of_choices, metric_list=[{"metric": "acc"}])
    plan = plan_of(data, **changed)
    if changed.get("task") == "choices":
        plan = plan.model_copy(update={"folder": tmp_path / "tasks", "questions": None})
    with pytest.raises(RecipeError, match=message) as raised, asking(Book(QUESTIONS), plan, tmp_path / "task") as run:
        run.ask(run.steps[0])
    assert raised.value.place == place
    assert raised.value.remedy
