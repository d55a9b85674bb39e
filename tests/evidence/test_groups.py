"""A group of tasks as one task: what the real lm-eval leaves of it, its pooled score, and files of it that lie."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders.accuracy import (
    NOBODY,
    ask_task,
    await_task_reply,
    change_document,
    read_rows,
    refuse_task,
    write_rows,
    write_task,
)
from tests.fakes.openai_server import Book
from tests.lm_eval_files import hashed
from vllm_qualify.evidence.accuracy.blocks import parts_of
from vllm_qualify.evidence.accuracy.letters import Member, TaskReply
from vllm_qualify.evidence.accuracy.lm_eval_process import running_lm_eval
from vllm_qualify.evidence.accuracy.measurements import parse_task
from vllm_qualify.evidence.accuracy.samples import read_answers
from vllm_qualify.evidence.measurement import UNUSABLE
from vllm_qualify.evidence.passages import _read_task
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy

# How many questions each member has, and which of them the server answers wrongly.
SIZES = {"sums_large": 3, "sums_mid": 6, "sums_small": 4}
WRONG = {("sums_large", 2), ("sums_mid", 0), ("sums_mid", 5), ("sums_small", 1)}
# How each member is asked and scored.
MEMBER = {
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "generation_kwargs": {"until": ["\n"]},
    "metadata": {"version": 1.0},
}
GROUP = {"group": "sums", "task": ["sums_small", "sums_large", "sums_mid"]}
KEY = "exact_match,trimmed"
# Numbers begin there: members are in the order of their names.
OFFSETS = {"sums_large": 0, "sums_mid": 3, "sums_small": 9}

Document = dict[str, Any]
Attack = Callable[[Path, Path, Path], object]


def question(member: str, number: int) -> str:
    return f"the {number}th of {member}?"


def replies() -> dict[str, str]:
    return {
        question(member, number): "none" if (member, number) in WRONG else f" {member}-{number}"
        for member, size in SIZES.items()
        for number in range(size)
    }


def member_file(folder: Path, name: str, size: int, metric: str = "exact_match", filter_name: str = "trimmed") -> None:
    rows = [{"question": question(name, number), "answer": f"{name}-{number}"} for number in range(size)]
    steps = [{"function": "remove_whitespace"}, {"function": "take_first"}]
    filters = [{"name": filter_name, "filter": steps}]
    write_task(folder, name, rows, metric_list=[{"metric": metric}], filter_list=filters, **MEMBER)


def group_folder(folder: Path, group: Document | None = None) -> Path:
    """A task_folder with three members and their group."""
    folder.mkdir(parents=True)
    for name, size in SIZES.items():
        member_file(folder, name, size)
    (folder / "sums.yaml").write_text(json.dumps(group or GROUP))
    return folder


def plan_of(folder: Path, **changed: Any) -> TaskPlan:
    settings = Accuracy(**({"task": "sums", "num_questions": 13, "num_fewshot": 0, "time_limit_s": 120.0} | changed))
    return TaskPlan(settings=settings, num_concurrent=4, repetitions=2, sequential=True, folder=folder)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TaskPlan]:
    """The files of a group: each question was asked twice."""
    root = tmp_path_factory.mktemp("group")
    plan, folder = plan_of(group_folder(root / "tasks")), root / "accuracy" / "sums"
    ask_task(plan, root, Book(replies()))
    return folder, plan


@pytest.fixture
def copy(asked: tuple[Path, TaskPlan], tmp_path: Path) -> Path:
    return shutil.copytree(asked[0], tmp_path / "accuracy" / "sums")


def test_the_questions_of_all_members_are_one_list_with_one_score(asked: tuple[Path, TaskPlan]) -> None:
    folder, _ = asked
    reply = TaskReply.model_validate_json((folder / "task.json").read_bytes())
    assert [(member.name, member.questions) for member in reply.members] == sorted(SIZES.items())
    assert reply.available == 13
    answered = read_answers(*asked)
    assert sorted(answer.question for answer in answered.answers) == sorted(2 * list(range(13)))
    of_member = {
        answer.question: (member, answer.question - offset)
        for answer in answered.answers
        for member, offset in OFFSETS.items()
        if offset <= answer.question < offset + SIZES[member]
    }
    for answer in answered.answers:
        assert answer.topic == of_member[answer.question][0]
        assert answer.scores == {KEY: float(of_member[answer.question] not in WRONG)}
        row = json.loads((folder / answer.traced_to.partition(":")[0]).read_text().split("\n")[0])
        assert row["doc"]["question"].endswith(f"of {answer.topic}?")
    assert (answered.task, answered.keys) == ("sums", [("exact_match", "trimmed")])
    # Members number their questions alike, and each answer is a passage.
    assert len(_read_task(folder, "sums")) == 13
    # The score is the mean over all questions: that of the members' means would be (2/3 + 4/6 + 3/4) / 3.
    score, cut, *_ = parse_task(*asked, Levels())
    named = (score.metric, score.task, score.filter, score.value, score.sample_count)
    assert named == ("exact_match", "sums", "trimmed", 9 / 13, 13)
    assert score.interval is not None
    assert cut.value == 0
    assert len(score.traced_to) == len(list(folder.glob("r*-b*")))


def test_a_group_is_the_same_whichever_of_its_members_were_asked(copy: Path, asked: tuple[Path, TaskPlan]) -> None:
    """Its comparison with a baseline may end after any block, and a block may have no question of a member."""
    whole = read_answers(copy, asked[1])
    for path in [path for path in copy.glob("r*-b*") if path.name != "r1-b1"]:
        shutil.rmtree(path)
    one = read_answers(copy, asked[1])
    assert {answer.topic for answer in one.answers} < set(SIZES)
    assert one.config_hash == whole.config_hash


# --- Files that lie


def results_of(path: Path) -> Path:
    return next(path.parent.glob("results_*.json"))


def name_of(samples: Path) -> str:
    return samples.name.removeprefix("samples_").rpartition("_")[0]


def changing_reply(change: Callable[[Document], object]) -> Attack:
    return lambda copy, *_: change_document(copy / "task.json", change)


def changing_results(change: Callable[[Document, str], object]) -> Attack:
    """Changes the results of a step with two members; `change` gets the name of the first, too."""
    return lambda _, first, __: change_document(results_of(first), lambda results: change(results, name_of(first)))


def a_question_in_two_members(_: Path, first: Path, second: Path) -> None:
    """Also with the hashes of its content."""
    rows, others = read_rows(first), read_rows(second)
    write_rows(second, [*others, hashed(rows[0] | {"doc_id": others[0]["doc_id"]})])


def one_question_is_all(copy: Path, *_: Path) -> None:
    """Each member has one question again and again, always well."""
    one = read_rows(next(copy.glob("r1-b1/samples_*")))[0]
    content = {name: one[name] for name in ("doc", "target", "arguments")}
    for path in copy.glob("r*-b*/samples_*"):
        write_rows(path, [hashed(row | content) for row in read_rows(path)])


def another_question_in_the_second_repetition(copy: Path, *_: Path) -> None:
    path = next(copy.glob("r2-b1/samples_*"))
    first, *others = read_rows(path)
    write_rows(path, [hashed(first | {"doc": {"question": "another?", "answer": "1"}}), *others])


def a_better_mean(copy: Path, *_: Path) -> None:
    path = results_of(next(copy.glob("r1-b*/samples_sums_mid_*")))
    change_document(path, lambda results: results["results"]["sums_mid"].update({KEY: 0.123}))


def a_better_answer(copy: Path, *_: Path) -> None:
    for path in copy.glob("r*-b*/samples_sums_mid_*"):
        write_rows(path, [row | {"exact_match": 1.0} for row in read_rows(path)])


def a_member_scored_otherwise(_: Path, first: Path, __: Path) -> None:
    write_rows(first, [row | {"acc": row["exact_match"], "filter": "other"} for row in read_rows(first)])

    def change(results: Document) -> None:
        of_member = results["results"][name_of(first)]
        of_member["exact_match,other"] = of_member.pop(KEY)

    change_document(results_of(first), change)


def another_version_of_a_member(copy: Path, *_: Path) -> None:
    path = results_of(next(copy.glob("r1-b*/samples_sums_small_*")))
    change_document(path, lambda results: results["configs"]["sums_small"].update(doc_to_text="Say it: {{answer}}"))


def members_of_other_sizes(reply: Document) -> None:
    reply["members"][0]["questions"] += 1
    reply["members"][1]["questions"] -= 1


def a_member_left_out(reply: Document) -> None:
    reply["available"] -= reply["members"].pop(1)["questions"]


# Each changes a copy of the evidence. A step of it has two files of samples.
ATTACKS: dict[str, tuple[Attack, str]] = {
    "member is missing": (lambda _, first, __: first.unlink(), "the files of samples in"),
    "results of a member are missing": (
        changing_results(lambda results, member: results["results"].pop(member)),
        "are not of the members that it asked",
    ),
    "further results": (
        changing_results(lambda results, _: results["results"].update(sums={KEY: 1.0})),
        "are not of the members that it asked",
    ),
    "samples of no member": (
        lambda _, first, __: shutil.copy(first, first.with_name(first.name.replace("samples_sums_", "samples_others_"))),
        "samples_others",
    ),
    "samples of another time": (
        lambda _, first, __: first.rename(first.with_name(first.name.replace("_2026", "_2025"))),
        "the files of samples in",
    ),
    "samples of the other member": (lambda _, first, second: shutil.copy(second, first), "questions, each once"),
    "a question in two members": (a_question_in_two_members, "questions, each once"),
    "one question is all": (one_question_is_all, "are copies of others"),
    "another question later": (another_question_in_the_second_repetition, "was asked with another prompt"),
    "counts of another size": (
        changing_results(lambda results, member: results["n-samples"][member].update(original=99)),
        "lm-eval counts {'original': 99",
    ),
    "a better mean": (a_better_mean, "0.123, is not its samples'"),
    "a better answer": (a_better_answer, "is not its samples' 1.0"),
    "a member scored otherwise": (a_member_scored_otherwise, "were not scored alike"),
    "another version": (another_version_of_a_member, "sums_small was not measured with the version that was loaded"),
    "members of other sizes": (changing_reply(members_of_other_sizes), ""),
    "members that do not add up": (
        changing_reply(lambda reply: reply.update(available=12)),
        "12 questions, where the members have others in all",
    ),
    "a member twice": (
        changing_reply(lambda reply: reply["members"].__setitem__(1, reply["members"][0] | {"questions": 6})),
        "a member is there twice",
    ),
    "a member left out": (changing_reply(a_member_left_out), ""),
    "no members": (changing_reply(lambda reply: reply.update(members=[])), ""),
    "odd name": (changing_reply(lambda reply: reply["members"][0].update(name="../sums")), "not the name of an lm-eval task"),
    "no number": (changing_reply(lambda reply: reply["members"][0].update(questions="3")), "valid integer"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_files_that_lie_are_invalid(copy: Path, asked: tuple[Path, TaskPlan], name: str) -> None:
    attack, message = ATTACKS[name]
    steps = [sorted(step.glob("samples_*")) for step in sorted(copy.glob("r*-b*"))]
    first, second, *_ = next(files for files in steps if len(files) > 1)
    attack(copy, first, second)
    with pytest.raises(UNUSABLE) as raised:
        read_answers(copy, asked[1])
    assert message in str(raised.value)
    assert [each.value for each in parse_task(copy, asked[1], Levels())] == [None] * 7


# --- What cannot be one task


def aggregated(**how: Any) -> Document:
    return GROUP | {"aggregate_metric_list": [{"metric": "exact_match", "aggregation": "mean"} | how]}


@pytest.mark.parametrize(
    ("group", "change", "message"),
    [
        (aggregated(weight_by_size=False), {}, "does not score by the mean over all its questions: its exact_match"),
        (GROUP, {"metric": "acc"}, "sums_large has the metrics exact_match, and sums_mid acc"),
        (GROUP, {"filter_name": "other"}, "sums_large has the filters trimmed, and sums_mid other"),
        (GROUP | {"task": ["sums_small", "sums_none"]}, {}, "names sums_none, which is no task"),
        (GROUP | {"task": ["sums_small", "sums_mid", "sums_small"]}, {}, "has sums_small twice"),
        (GROUP | {"task": []}, {}, "has no tasks"),
        (GROUP | {"task": ["sums"]}, {}, "nested more than 10 deep"),
        (GROUP | {"task": ["sums_mid", {"task": "../../sums_small"}]}, {}, "which is no task"),
    ],
)
def test_a_group_that_cannot_be_one_task_is_refused(
    tmp_path: Path, group: Document, change: dict[str, str], message: str
) -> None:
    folder = group_folder(tmp_path / "tasks", group)
    member_file(folder, "sums_mid", 6, **change)
    error = refuse_task(plan_of(folder), tmp_path / "lm-eval")
    assert message in str(error)
    assert error.place == "accuracy.sums"
    assert error.remedy


def test_a_group_in_a_group_and_one_that_says_it_is_the_mean_are_measured(tmp_path: Path) -> None:
    inner = {"group": "inner", "task": ["sums_mid", "sums_large"]}
    folder = group_folder(tmp_path / "tasks", aggregated(weight_by_size=True) | {"task": ["inner", "sums_small"]})
    (folder / "inner.yaml").write_text(json.dumps(inner))
    with running_lm_eval(NOBODY, "reference", plan_of(folder), tmp_path / "lm-eval") as lm_eval:
        assert [member.name for member in await_task_reply(lm_eval).members] == sorted(SIZES)


def test_a_block_has_parts_of_the_members_that_it_asks() -> None:
    kept = {"task_version": "1", "config_hash": "", "output_type": "generate_until"}
    members = [Member(name=name, questions=count, **kept) for name, count in (("a", 3), ("b", 1), ("c", 5))]
    parts = parts_of(members, [8, 0, 4, 2])
    assert [(part.task, part.offset, part.questions) for part in parts] == [("a", 0, [0, 2]), ("c", 4, [0, 4])]
