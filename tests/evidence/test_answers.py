"""Answers: which questions are asked when, what lm-eval's captured files say of each, and that bad ones are refused."""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.accuracy import (
    CAPTURED,
    CAPTURED_PLAN,
    CAPTURED_STEPS,
    change_document,
    change_samples,
    read_rows,
    with_settings,
    write_rows,
)
from tests.lm_eval_files import Asked, hashed, right_but
from vllm_qualify.evidence.accuracy.answers import Answer, Answered, load, write
from vllm_qualify.evidence.accuracy.blocks import BLOCKS, LEAST_BLOCK, plan_steps, read_planned
from vllm_qualify.evidence.accuracy.letters import TaskReply
from vllm_qualify.evidence.accuracy.samples import _parse_step, read_answers
from vllm_qualify.evidence.measurement import UNUSABLE
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy

STRICT, FLEXIBLE = "exact_match,strict-match", "exact_match,flexible-extract"
# As read by eye in the captured files: question, repetition, strict-match, flexible-extract, length.
SCORED = [
    (9, 1, 0.0, 0.0, 126),
    (11, 1, 1.0, 1.0, 106),
    (1, 1, 0.0, 0.0, 117),
    (10, 1, 0.0, 1.0, 108),
    (0, 1, 0.0, 1.0, 106),
    (8, 1, 0.0, 0.0, 117),
    (3, 1, 0.0, 0.0, 111),
    (7, 1, 0.0, 0.0, 117),
    (3, 2, 0.0, 0.0, 111),
    (11, 2, 1.0, 1.0, 106),
]

Document = dict[str, Any]
Change = Callable[[Document], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(CAPTURED, tmp_path / "gsm8k")


def results_of(folder: Path, step: str = "r1-b1") -> Path:
    return next((folder / step).glob("results_*.json"))


def samples_of(folder: Path, step: str = "r1-b1") -> Path:
    return next((folder / step).glob("samples_*.jsonl"))


def prompt(row: Document, text: str) -> None:
    row["arguments"]["gen_args_0"]["arg_0"] = text
    row.update(hashed(row))


def refused(folder: Path, plan: TaskPlan = CAPTURED_PLAN) -> str:
    with pytest.raises(UNUSABLE) as raised:
        read_answers(folder, plan)
    return repr(raised.value)


plans = st.builds(
    lambda asked, more, seed: (Accuracy(num_questions=asked, seed=seed), asked + more),
    st.integers(1, 60),
    st.integers(0, 40),
    st.integers(0, 2**31),
)


@given(plans)
def test_each_repetition_asks_the_same_questions_once_in_equal_blocks(plan: tuple[Accuracy, int]) -> None:
    """More repetitions only add steps, and the order in blocks is that of all at once."""
    asked, available = plan
    whole, blocks = (plan_steps(asked, available, 3, sequential=sequential) for sequential in (False, True))
    assert [(step.repetition, step.block) for step in whole] == [(1, 1), (2, 1), (3, 1)]
    assert len({frozenset(step.questions) for step in whole}) == 1
    count = max(1, min(BLOCKS, asked.num_questions // LEAST_BLOCK))
    for step in whole:
        assert len(step.questions) == len(set(step.questions)) == asked.num_questions
        assert set(step.questions) <= set(range(available))
        parts = [block for block in blocks if block.repetition == step.repetition]
        assert [block.block for block in parts] == list(range(1, count + 1))
        assert step.questions == [question for block in parts for question in block.questions]
        sizes = [len(block.questions) for block in parts]
        assert max(sizes) - min(sizes) <= 1
    for steps, sequential in ((whole, False), (blocks, True)):
        fewer = plan_steps(asked, available, 2, sequential=sequential)
        assert steps[: len(fewer)] == fewer


def test_orders_are_drawn_by_the_seed_and_differ_by_repetition() -> None:
    one, other = (plan_steps(Accuracy(num_questions=100, seed=seed), 1000, 2, sequential=False) for seed in (1, 2))
    assert one[0].questions != one[1].questions
    assert set(one[0].questions) != set(other[0].questions)
    assert set(one[0].questions) != set(range(100))


@given(plans, st.booleans())
def test_a_drawn_order_asks_the_same_questions(plan: tuple[Accuracy, int], sequential: bool) -> None:
    asked, available = plan
    usual, *drawn = (plan_steps(asked, available, 2, sequential=sequential, order=order) for order in ("", "a" * 32, "b" * 32))
    for steps in drawn:
        assert [(step.folder, len(step.questions)) for step in steps] == [(step.folder, len(step.questions)) for step in usual]
        for repetition in (1, 2):
            of_both = [[q for step in each if step.repetition == repetition for q in step.questions] for each in (steps, usual)]
            assert sorted(of_both[0]) == sorted(of_both[1])
    one, other = ([question for step in steps for question in step.questions] for steps in drawn)
    assert one != other or asked.num_questions < 8
    assert len({step.seeded_by for steps in (usual, *drawn) for step in steps if step.block == 1}) == 6


def test_the_order_never_changes() -> None:
    """Runs of different releases of this project are compared block by block."""
    blocks = plan_steps(Accuracy(num_questions=5), 10, 2, sequential=False)
    assert [step.questions for step in blocks] == [[9, 1, 8, 3, 7], [3, 7, 8, 9, 1]]


def test_the_captured_files_give_each_answer_with_its_line() -> None:
    answered = read_answers(CAPTURED, CAPTURED_PLAN)
    assert [
        (each.question, each.repetition, each.scores[STRICT], each.scores[FLEXIBLE], each.length) for each in answered.answers
    ] == SCORED
    assert not any(each.unanswered for each in answered.answers)
    found_nothing = {(each.question, each.repetition): each.nothing_by for each in answered.answers}
    assert (found_nothing[9, 1], found_nothing[10, 1], found_nothing[11, 1]) == (["strict-match"], ["strict-match"], [])
    assert answered.keys == [("exact_match", "strict-match"), ("exact_match", "flexible-extract")]
    assert (answered.task, answered.task_version, answered.lm_eval) == ("gsm8k", "3.0", "0.4.13")
    for answer in answered.answers:
        path, _, number = answer.traced_to.rpartition(":")
        row = json.loads((CAPTURED / path).read_text().split("\n")[int(number) - 1])
        assert (row["doc_id"], row["doc_hash"]) == (answer.question, answer.doc_hash)


def test_where_data_and_functions_lie_is_not_of_the_configuration(folder: Path) -> None:
    """A function has an address in memory."""

    def move(results: Document) -> None:
        config = results["configs"]["gsm8k"]
        config["dataset_kwargs"]["data_files"]["test"] = "/elsewhere/test.jsonl"
        config["metadata"]["config_source"] = "/elsewhere/gsm8k.yaml"

    for step in CAPTURED_STEPS:
        change_document(results_of(folder, step), move)
    hash_of_captured = read_answers(CAPTURED, CAPTURED_PLAN).config_hash
    assert read_answers(folder, CAPTURED_PLAN).config_hash == hash_of_captured
    for number, path in enumerate(folder.glob("r*-b*/results_*")):
        results = json.loads(path.read_text())
        results["configs"]["gsm8k"]["process_results"] = f"functools.partial(<function score at 0x7f3a{number}>)"
        path.write_text(json.dumps(results))
    assert read_answers(folder, CAPTURED_PLAN).config_hash != hash_of_captured


@pytest.mark.parametrize("key", ["doc_to_text", "num_fewshot", "generation_kwargs", "filter_list", "fewshot_config"])
def test_how_it_asks_and_scores_is_of_the_configuration(folder: Path, key: str) -> None:
    change_document(results_of(folder), lambda results: results["configs"]["gsm8k"].update({key: "another"}))
    assert "were not measured with one version of the task" in refused(folder)


@pytest.mark.parametrize("available", [-1, 0, 7, 10**15])
def test_a_task_of_too_few_or_endless_questions_is_refused(folder: Path, available: int) -> None:
    """With fewer than planned, a part would count as all. The steps of endless ones would take all memory of who reads them."""
    (folder / "task.json").write_text(json.dumps({"available": available}))
    assert f"the task has {available} questions, where 8 to 1000000 were expected" in refused(folder)


@pytest.mark.parametrize(("copies", "problem"), [(20, None), (21, "21 of 400"), (399, "399 of 400")])
def test_copies_of_one_question_are_no_further_questions(copies: int, problem: str | None, tmp_path: Path) -> None:
    """A few data sets have a question twice."""
    task = TaskPlan(settings=Accuracy(num_questions=400), num_concurrent=4, repetitions=1, sequential=False)
    folder = tmp_path / "gsm8k"
    Asked(task, available=400).write(folder, right_but([]))
    (path,) = folder.glob("r1-b1/samples_*.jsonl")
    rows = read_rows(path)
    content = {name: rows[399][name] for name in ("doc", "target", "arguments")}
    write_rows(path, [hashed(row | content) if row["doc_id"] < copies else row for row in rows])
    if problem:
        assert f"{problem} questions are copies of others" in refused(folder, task)
    else:
        assert len(read_answers(folder, task).answers) == 400


# --- Random changes of what lm-eval wrote

ROWS = read_rows(samples_of(CAPTURED))
RESULTS = json.loads(results_of(CAPTURED).read_text())
KEYS = ["doc_id", "doc_hash", "prompt_hash", "target_hash", "exact_match", "filter", "doc", "target", "arguments"]
SPECIAL = [0.0, -0.0, 0.5, 1.0, math.nan, math.inf, -math.inf, 1e-300, 1e308, "1.0", "0", None, {"question": "?"}, []]
TRUE = {
    answer.question: answer for answer in read_answers(CAPTURED, CAPTURED_PLAN).answers if answer.traced_to.startswith("r1-b1/")
}


(FIRST,) = (step for step in read_planned(CAPTURED, CAPTURED_PLAN) if step.folder == "r1-b1")


def other(drawn: Random) -> Any:
    """What may stand in the place of a value."""
    kinds: list[Callable[[], Any]] = [
        lambda: drawn.choice(SPECIAL),
        lambda: drawn.uniform(-2, 2),
        lambda: drawn.randint(-3, 12),
        lambda: drawn.random() < 0.5,
        lambda: "".join(drawn.choices("01 ae\u2028\x85é", k=drawn.randint(0, 3))),
    ]
    return drawn.choice(kinds)()


def changed_files(drawn: Random) -> list[bytes]:
    """The samples, or lm-eval's scores of them, but not both so that they agree."""
    rows, fields = [dict(row) for row in ROWS], {}
    if drawn.random() < 0.5:
        if drawn.random() < 0.5:
            fields[drawn.choice([STRICT, FLEXIBLE, "exact_match,other"])] = other(drawn)
    else:
        # Two scores could change places: the scores of both files would agree.
        keys = drawn.choices(KEYS, k=drawn.randint(0, 3))
        for key in keys if keys.count("exact_match") < 2 else keys[:1]:
            drawn.choice(rows)[key] = other(drawn)
    if drawn.random() < 0.5:
        rows = drawn.choices(rows, k=drawn.randint(2, 6))
    results = RESULTS | {"results": {"gsm8k": RESULTS["results"]["gsm8k"] | fields}}
    return [json.dumps(results).encode(), "".join(json.dumps(row) + "\n" for row in rows).encode()]


@pytest.mark.thorough
@settings(max_examples=50, database=None)
@given(seed=st.integers(0, 2**64))
def test_no_random_change_of_a_file_changes_an_answer(seed: int) -> None:
    """100 changes each: Hypothesis takes far longer to draw one than it takes to read the files."""
    drawn = Random(seed)
    for _ in range(100):
        try:
            _, answers = _parse_step(changed_files(drawn), [Path("samples")], FIRST, CAPTURED_PLAN, TaskReply(available=12))
        except UNUSABLE:
            continue
        for answer in answers:
            true = TRUE[answer.question]
            assert answer.scores == pytest.approx(true.scores, abs=1e-5)
            assert answer.model_copy(update={"traced_to": "", "scores": {}}) == true.model_copy(
                update={"traced_to": "", "scores": {}}
            )


@pytest.mark.parametrize("reply", ["", " \n", None])
def test_an_empty_reply_is_no_answer(folder: Path, reply: str | None) -> None:
    change_samples(folder, lambda rows: [row.update(resps=[[reply]]) for row in rows[::2]])
    answers = read_answers(folder, CAPTURED_PLAN).answers
    assert [answer.question for answer in answers if answer.unanswered] == [9]


@pytest.mark.parametrize("reply", ["\u2028", "\x85", "\x0c", "\x1c"])
def test_a_reply_with_an_odd_line_end_is_one_reply(folder: Path, reply: str) -> None:
    change_samples(folder, lambda rows: rows[0].update(resps=[[f"It is {reply}."]]))
    assert read_answers(folder, CAPTURED_PLAN).answers[0].length == len(f"It is {reply}.")


def test_only_the_first_steps_are_a_result(folder: Path, tmp_path: Path) -> None:
    assert "r2-b1 where the first blocks" in refused(folder, CAPTURED_PLAN.model_copy(update={"repetitions": 1}))
    shutil.rmtree(folder / "r2-b1")
    assert len(read_answers(folder, CAPTURED_PLAN).answers) == 8
    shutil.rmtree(folder / "r1-b2")
    assert "r1-b1, r1-b3, r1-b4 where the first blocks" in refused(folder)
    for step in folder.glob("r*-b*"):
        shutil.rmtree(step)
    assert "no blocks" in refused(folder)
    assert "FileNotFoundError" in refused(tmp_path / "nowhere")


def test_another_plan_asks_other_questions(folder: Path) -> None:
    """Also where the same files were read before."""
    read_answers(folder, CAPTURED_PLAN)
    for changed in ({"seed": 7}, {"num_questions": 9}, {"num_questions": 4}):
        problem = refused(folder, with_settings(CAPTURED_PLAN, **changed))
        assert re.search("asked|are not of its|where the first blocks", problem)


@pytest.mark.parametrize("which", [results_of, samples_of])
def test_a_cut_or_missing_file_and_one_too_many_are_refused(folder: Path, which: Callable[[Path], Path]) -> None:
    path = which(folder)
    text = path.read_text()
    for share in (0.0, 0.01, 0.5, 0.99):
        path.write_text(text[: int(len(text) * share)])
        assert refused(folder)
    path.rename(path.with_name(path.name.replace("_2026", "_2027")))
    path.write_text(text)
    assert "2 files" in refused(folder)
    for each in path.parent.glob(f"*{path.suffix}"):
        each.unlink()
    assert "0 files" in refused(folder)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda results: results["results"].clear(), "KeyError('gsm8k')"),
        (lambda results: results.pop("results"), "KeyError('results')"),
        (lambda results: results.pop("n-samples"), "KeyError('n-samples')"),
        (lambda results: results.pop("versions"), "KeyError('versions')"),
        (lambda results: results["n-samples"]["gsm8k"].update(effective=3), "where 2 of 12 questions were asked"),
        (lambda results: results["n-samples"]["gsm8k"].update(original=13), "where 2 of 12 questions were asked"),
        (lambda results: results["results"].update(gsm8k={}), "no known metric"),
        (lambda results: results["results"].update(gsm8k={"bleu,none": 0.5}), "no known metric among ['bleu,none']"),
        (lambda results: results["results"].update(gsm8k={"truncated_answers,none": 0.5}), "no known metric"),
        (lambda results: results["results"].update(gsm8k=None), "TypeError"),
        (lambda results: results.update(lm_eval_version="0.4.12"), "one version of the task"),
    ],
)
def test_results_that_do_not_fit_are_refused(folder: Path, how: Change, message: str) -> None:
    change_document(results_of(folder), how)
    assert message in refused(folder)


HASHES = ("prompt_hash", "doc_hash", "target_hash")
NEEDED = ("exact_match", "resps", "filter", "doc_id", "prompt_hash", "filtered_resps")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda rows: rows.pop(0), "1 samples of strict-match"),
        (lambda rows: rows.pop(), "1 samples of flexible-extract"),
        (lambda rows: rows.append(rows[0]), "3 samples of strict-match"),
        (lambda rows: rows[0].update(doc_id=11), "2 samples of strict-match"),
        (lambda rows: rows[0].update(doc_id=1), "2 samples of strict-match"),
        (lambda rows: rows.clear(), "0 samples"),
        *((lambda rows, name=name: rows[0].pop(name), f"KeyError('{name}')") for name in NEEDED),
        (lambda rows: rows[0].update(exact_match=None), "TypeError"),
        (lambda rows: rows[0].update(resps=[]), "no reply"),
        (lambda rows: rows[0].update(resps=[[]]), "no reply"),
        (lambda rows: prompt(rows[1], "Another?"), "question 11 was asked with another prompt in repetition 2"),
        (lambda rows: rows.__setitem__(1, hashed(rows[1] | {"target": "5"})), "question 11 was asked with another prompt"),
        *(
            (lambda rows, name=name: rows[1].update({name: "0"}), f"the {name} of question 11 is not that of its content")
            for name in HASHES
        ),
        (lambda rows: rows[1].update(doc=rows[0]["doc"]), "the doc_hash of question 11 is not that of its content"),
        (lambda rows: rows[1].update(exact_match="1.0"), "the score '1.0' is no number"),
        (
            lambda rows: rows[1].update(filtered_resps=["[invalid]"]),
            "question 11 is right, and strict-match found no answer in its reply",
        ),
        (
            lambda rows: rows[3].update(filtered_resps=[["[invalid]", "[invalid]"]]),
            "question 11 is right, and flexible-extract found no answer in its reply",
        ),
    ],
)
def test_samples_that_do_not_fit_are_refused(folder: Path, how: Callable[[list[Document]], object], message: str) -> None:
    change_samples(folder, how)
    assert message in refused(folder)


@pytest.mark.parametrize("target", ["[invalid]", "This conclusion is Invalid.", ["valid", "invalid"]])
def test_the_word_of_a_filter_that_found_nothing_can_be_the_target(folder: Path, target: object) -> None:
    def invalid(rows: list[Document]) -> None:
        rows[1].update(hashed(rows[1] | {"target": target, "filtered_resps": ["[invalid]"]}))
        rows[3].update(hashed(rows[3] | {"target": target}))

    change_samples(folder, invalid)
    shutil.rmtree(folder / "r2-b1")
    assert read_answers(folder, CAPTURED_PLAN).answers[1].scores[STRICT] == 1.0


def test_a_task_that_scores_by_a_function_of_its_own_may_call_it_right(folder: Path) -> None:
    change_samples(folder, lambda rows: rows[1].update(filtered_resps=["[invalid]"]))
    for step in folder.glob("r*-b*"):
        change_document(
            results_of(folder, step.name), lambda results: results["configs"]["gsm8k"].update(process_results="def own(): …")
        )
    answered = read_answers(folder, CAPTURED_PLAN).answers[1]
    assert (answered.scores[STRICT], answered.nothing_by) == (1.0, ["strict-match"])


@pytest.mark.parametrize("reported", [0.75, 0.0, 2.0, -1.0, float("nan"), float("inf")])
def test_a_score_that_contradicts_its_samples_is_refused(folder: Path, reported: float) -> None:
    change_document(results_of(folder), lambda results: results["results"]["gsm8k"].update({STRICT: reported}))
    assert f"{reported}, is not its samples' 0.5" in refused(folder)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 1.5, 2.0, -1.0])
def test_a_sample_out_of_range_is_refused_whatever_the_mean(folder: Path, score: float) -> None:
    change_samples(folder, lambda rows: rows[0].update(exact_match=score))
    change_document(results_of(folder), lambda results: results["results"]["gsm8k"].update({STRICT: (score + 1) / 2}))
    assert "not between 0 and 1" in refused(folder)


def test_a_score_between_right_and_wrong_is_one(folder: Path) -> None:
    change_samples(folder, lambda rows: rows[0].update(exact_match=0.25, filtered_resps=["49"]))
    change_document(results_of(folder), lambda results: results["results"]["gsm8k"].update({STRICT: 0.625}))
    assert read_answers(folder, CAPTURED_PLAN).answers[0].scores[STRICT] == 0.25


answer_lists = st.lists(
    st.builds(
        Answer,
        question=st.integers(0, 10**6),
        repetition=st.integers(1, 10),
        doc_hash=st.text(),
        prompt_hash=st.text(),
        target_hash=st.text(),
        scores=st.dictionaries(st.text(), st.floats(0, 1), max_size=3),
        length=st.none() | st.integers(0, 10**6),
        unanswered=st.booleans(),
        traced_to=st.text(),
    ),
    max_size=5,
)


@given(answer_lists)
def test_answers_come_back_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, answers: list[Answer]) -> None:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    answered = Answered(
        task="gsm8k", task_version="3.0", config_hash="0" * 64, output_type="generate_until", lm_eval="0.4.13", answers=answers
    )
    write(answered, path)
    assert load(path) == answered


def test_a_file_of_answers_that_is_cut_or_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(read_answers(CAPTURED, CAPTURED_PLAN), path)
    whole = path.read_text()
    lines = whole.split("\n")
    for text in (
        "",
        lines[0] + "\n",
        "\n".join(lines[:-2]) + "\n",
        whole[:-5],
        whole + lines[-2] + "\n",
        whole.replace('"question":9', '"question":"9"'),
        whole.replace('"unanswered":false', '"unanswered":0'),
        whole.replace('"length":126', '"length":126,"more":1'),
        whole.replace("1.0", "1.5"),
        whole.replace("1.0", "NaN"),
    ):
        path.write_text(text)
        with pytest.raises(UNUSABLE):
            load(path)
    assert Counter(line.count("exact_match") for line in lines[1:-1]) == {2: 10}


def test_the_same_files_are_parsed_once_wherever_they_lie_and_changed_ones_anew(folder: Path, tmp_path: Path) -> None:
    """A stage, each comparison and the report read them, and a run that is judged again has a copy."""
    first = read_answers(folder, CAPTURED_PLAN)
    again = read_answers(shutil.copytree(folder, tmp_path / "copy" / "gsm8k"), CAPTURED_PLAN)
    assert again == first
    assert all(one is other for one, other in zip(first.answers, again.answers, strict=True))
    write(first, tmp_path / "answers.jsonl")
    assert load(tmp_path / "answers.jsonl") is load(tmp_path / "answers.jsonl")
    change_samples(folder, lambda rows: rows[0].update(resps=[["another"]]))
    assert read_answers(folder, CAPTURED_PLAN).answers[0].length == len("another")


# --- lm-eval's own record of how it asked

CONFIG = ("configs", "gsm8k", "generation_kwargs")


@pytest.mark.parametrize(
    ("where", "recorded", "message"),
    [
        (("config", "model_args", "max_gen_toks"), 4096, "max_gen_toks was 4096 in r1-b2, and 48 is planned"),
        (("config", "model_args", "max_gen_toks"), None, "max_gen_toks was None in r1-b2, and 48 is planned"),
        (
            ("config", "model_args", "base_url"),
            "http://h/v1/chat/completions",
            "api was chat in r1-b2, and completions is planned",
        ),
        (("system_instruction",), "Think hard.", "system_prompt was Think hard. in r1-b2, and None is planned"),
        ((*CONFIG, "max_gen_toks"), 4096, "max_gen_toks was 4096 in r1-b2, and 48 is planned"),
        ((*CONFIG, "max_tokens"), 4096, "max_tokens was 4096 in r1-b2, and 48 is planned"),
    ],
)
def test_evidence_that_was_asked_otherwise_by_its_own_record_is_refused(
    folder: Path, where: tuple[str, ...], recorded: object, message: str
) -> None:
    def change(results: Document) -> None:
        inner = results
        for name in where[:-1]:
            inner = inner[name]
        inner[where[-1]] = recorded

    change_document(results_of(folder, "r1-b2"), change)
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("planned", "name", "recorded"),
    [
        ({"stop": ["END"]}, "until", ["Question:"]),
        ({"api": "chat", "chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", None),
        ({"max_gen_toks": 48}, "max_gen_toks", 4096),
    ],
)
def test_so_is_a_single_request_that_was_made_otherwise(
    tmp_path: Path, planned: dict[str, Any], name: str, recorded: object
) -> None:
    """The record of the run is as planned, and the samples are not."""
    task, folder = with_settings(CAPTURED_PLAN, **planned), tmp_path / "gsm8k"
    asked = Asked(task, 12, config={"generation_kwargs": {"temperature": 0.0} | task.gen_kwargs})
    asked.write(folder, right_but([]))
    read_answers(folder, task)
    change_samples(folder, lambda rows: rows[0]["arguments"]["gen_args_0"]["arg_1"].update({name: recorded}), "r1-b2")
    assert re.search(f"{name} was .* in r1-b2, and .* is planned", refused(folder, task))
