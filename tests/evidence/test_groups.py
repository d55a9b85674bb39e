"""A group of tasks as one task: what the real lm-eval leaves of it, its pooled score, and files of it that lie."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.evidence.commands import SERVER, STARTING
from tests.fakes.openai_server import Book, serving
from tests.lm_eval_files import hashed
from vllm_qualify.errors import RecipeError
from vllm_qualify.evidence.accuracy import LmEval, loading, parse_task, prepare_task
from vllm_qualify.evidence.answers import Answered, read_answers
from vllm_qualify.evidence.lm_eval_worker import TaskReply
from vllm_qualify.evidence.measurement import UNUSABLE
from vllm_qualify.evidence.members import Member, parts_of
from vllm_qualify.evidence.passages import _of_task
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.workload import Accuracy

pytestmark = pytest.mark.usefixtures("warm_lm_eval")

# How many questions each member has, and which of them the server answers wrongly.
SIZES = {"sums_large": 3, "sums_mid": 6, "sums_small": 4}
WRONG = {("sums_large", 2), ("sums_mid", 0), ("sums_mid", 5), ("sums_small", 1)}
MEMBER = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: {metric}}}]
filter_list: [{{name: {filter}, filter: [{{function: remove_whitespace}}, {{function: take_first}}]}}]
generation_kwargs: {{until: ["\\n"]}}
metadata: {{version: 1.0}}
"""
GROUP = {"group": "sums", "task": ["sums_small", "sums_large", "sums_mid"]}
KEY = "exact_match,trimmed"
# Numbers begin there: members are in the order of their names.
OFFSETS = {"sums_large": 0, "sums_mid": 3, "sums_small": 9}

Document = dict[str, Any]


def question(member: str, number: int) -> str:
    return f"the {number}th of {member}?"


def replies() -> dict[str, str]:
    return {
        question(member, number): "none" if (member, number) in WRONG else f" {member}-{number}"
        for member, size in SIZES.items()
        for number in range(size)
    }


def member_file(folder: Path, name: str, size: int, **changed: str) -> None:
    data = folder / f"{name}.jsonl"
    rows = [{"question": question(name, number), "answer": f"{name}-{number}"} for number in range(size)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = MEMBER.format(**({"name": name, "data": data, "metric": "exact_match", "filter": "trimmed"} | changed))
    (folder / f"{name}.yaml").write_text(text)


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
    with serving(Book(replies())) as url:
        starting, server = STARTING.model_copy(update={"url": url}), SERVER.model_copy(update={"url": url})
        with loading(starting, "reference", plan, root / "lm-eval") as lm_eval:
            run = prepare_task(server, lm_eval, folder, lambda *_: None)
            for step in run.steps:
                run.ask(step)
    return folder, plan


@pytest.fixture
def copy(asked: tuple[Path, TaskPlan], tmp_path: Path) -> Path:
    return shutil.copytree(asked[0], tmp_path / "accuracy" / "sums")


def read(folder: Path, asked: tuple[Path, TaskPlan]) -> Answered:
    return read_answers(folder, asked[1])


def test_the_questions_of_all_members_are_one_list(asked: tuple[Path, TaskPlan]) -> None:
    answered = read(*asked[:1], asked)
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
        row = json.loads((asked[0] / answer.traced_to.partition(":")[0]).read_text().split("\n")[0])
        assert row["doc"]["question"].endswith(f"of {answer.topic}?")
    assert (answered.task, answered.keys) == ("sums", [("exact_match", "trimmed")])


def test_the_score_is_the_mean_over_all_questions(asked: tuple[Path, TaskPlan]) -> None:
    """9 of 13, where the mean of the members' means is (2/3 + 4/6 + 3/4) / 3."""
    score, cut, *_ = parse_task(*asked, Levels())
    assert (score.metric, score.task, score.filter, score.value, score.sample_count) == (
        "exact_match",
        "sums",
        "trimmed",
        9 / 13,
        13,
    )
    assert score.interval is not None
    assert cut.value == 0
    assert len(score.traced_to) == len(list(asked[0].glob("r*-b*")))


def test_the_reply_tells_the_members_and_their_sizes(asked: tuple[Path, TaskPlan]) -> None:
    reply = TaskReply.model_validate_json((asked[0] / "task.json").read_bytes())
    assert {member.name: member.questions for member in reply.members} == SIZES
    assert [member.name for member in reply.members] == sorted(SIZES)
    assert reply.available == 13


def test_a_group_is_the_same_whichever_of_its_members_were_asked(copy: Path, asked: tuple[Path, TaskPlan]) -> None:
    """Its comparison with a baseline may end after any block, and a block may have no question of a member."""
    whole = read(copy, asked)
    for path in [path for path in copy.glob("r*-b*") if path.name != "r1-b1"]:
        shutil.rmtree(path)
    one = read(copy, asked)
    assert {answer.topic for answer in one.answers} < set(SIZES)
    assert one.config_hash == whole.config_hash


def test_each_answer_is_a_passage(asked: tuple[Path, TaskPlan]) -> None:
    """Members number their questions alike."""
    assert len(_of_task(asked[0], "sums")) == 13


# --- Files that lie


def step_of(copy: Path, member: str) -> Path:
    return sorted(path.parent for path in copy.glob(f"r1-b*/samples_{member}_*"))[0]


def with_two_members(copy: Path) -> tuple[Path, Path, Path]:
    """A step, and its files of samples of two members."""
    for step in sorted(copy.glob("r*-b*")):
        if len(files := sorted(step.glob("samples_*"))) > 1:
            return step, files[0], files[1]
    raise AssertionError("no step has two members")


def rows_of(path: Path) -> list[Document]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def put(path: Path, rows: list[Document]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def results_with(step: Path, how: Callable[[Document], object]) -> None:
    path = next(step.glob("results_*.json"))
    document = json.loads(path.read_text())
    how(document)
    path.write_text(json.dumps(document))


def reply_with(copy: Path, how: Callable[[Document], object]) -> None:
    path = copy / "task.json"
    document = json.loads(path.read_text())
    how(document)
    path.write_text(json.dumps(document))


def member_is_missing(copy: Path) -> None:
    with_two_members(copy)[1].unlink()


def results_of_a_member_are_missing(copy: Path) -> None:
    step, first, _ = with_two_members(copy)
    member = first.name.removeprefix("samples_").rpartition("_")[0]
    results_with(step, lambda results: results["results"].pop(member))


def further_results(copy: Path) -> None:
    step, *_ = with_two_members(copy)
    results_with(step, lambda results: results["results"].update(sums={KEY: 1.0}))


def samples_of_no_member(copy: Path) -> None:
    _, first, _ = with_two_members(copy)
    shutil.copy(first, first.with_name(first.name.replace("samples_sums_", "samples_others_")))


def samples_of_another_time(copy: Path) -> None:
    _, first, _ = with_two_members(copy)
    first.rename(first.with_name(first.name.replace("_2026", "_2025")))


def samples_of_the_other_member(copy: Path) -> None:
    _, first, second = with_two_members(copy)
    first.write_text(second.read_text())


def a_question_in_two_members(copy: Path) -> None:
    """Also with the hashes of its content."""
    _, first, second = with_two_members(copy)
    rows, others = rows_of(first), rows_of(second)
    put(second, [*others, hashed(rows[0] | {"doc_id": others[0]["doc_id"]})])


def one_question_is_all(copy: Path) -> None:
    """Each member has one question again and again, always well."""
    one = rows_of(next(copy.glob("r1-b1/samples_*")))[0]
    for path in copy.glob("r*-b*/samples_*"):
        content = {name: one[name] for name in ("doc", "target", "arguments")}
        put(path, [hashed(row | content) for row in rows_of(path)])


def counts_of_another_size(copy: Path) -> None:
    step, first, _ = with_two_members(copy)
    member = first.name.removeprefix("samples_").rpartition("_")[0]
    results_with(step, lambda results: results["n-samples"][member].update(original=99))


def a_better_mean(copy: Path) -> None:
    step = step_of(copy, "sums_mid")
    results_with(step, lambda results: results["results"]["sums_mid"].update({KEY: 0.123}))


def a_better_answer(copy: Path) -> None:
    for path in copy.glob("r*-b*/samples_sums_mid_*"):
        put(path, [row | {"exact_match": 1.0} for row in rows_of(path)])


def a_member_scored_otherwise(copy: Path) -> None:
    step, first, _ = with_two_members(copy)
    member = first.name.removeprefix("samples_").rpartition("_")[0]
    put(first, [row | {"acc": row["exact_match"], "filter": "other"} for row in rows_of(first)])

    def change(results: Document) -> None:
        mean = results["results"][member].pop(KEY)
        results["results"][member]["exact_match,other"] = mean

    results_with(step, change)


def another_version_of_a_member(copy: Path) -> None:
    step = step_of(copy, "sums_small")
    results_with(step, lambda results: results["configs"]["sums_small"].update(doc_to_text="Say it: {{answer}}"))


def members_of_other_sizes(copy: Path) -> None:
    def change(reply: Document) -> None:
        reply["members"][0]["questions"] += 1
        reply["members"][1]["questions"] -= 1

    reply_with(copy, change)


def members_that_do_not_add_up(copy: Path) -> None:
    reply_with(copy, lambda reply: reply.update(available=12))


def a_member_twice(copy: Path) -> None:
    reply_with(copy, lambda reply: reply["members"].__setitem__(1, reply["members"][0] | {"questions": 6}))


def a_member_left_out(copy: Path) -> None:
    def change(reply: Document) -> None:
        reply["available"] -= reply["members"].pop(1)["questions"]

    reply_with(copy, change)


def no_members(copy: Path) -> None:
    reply_with(copy, lambda reply: reply.update(members=[]))


def a_member_with_an_odd_name(copy: Path) -> None:
    reply_with(copy, lambda reply: reply["members"][0].update(name="../sums"))


def a_member_with_no_number(copy: Path) -> None:
    reply_with(copy, lambda reply: reply["members"][0].update(questions="3"))


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (member_is_missing, "the files of samples in"),
        (results_of_a_member_are_missing, "are not of the members that it asked"),
        (further_results, "are not of the members that it asked"),
        (samples_of_no_member, "samples_others"),
        (samples_of_another_time, "the files of samples in"),
        (samples_of_the_other_member, "questions, each once"),
        (a_question_in_two_members, "questions, each once"),
        (one_question_is_all, "are copies of others"),
        (counts_of_another_size, "lm-eval counts {'original': 99"),
        (a_better_mean, "0.123, is not its samples'"),
        (a_better_answer, "is not its samples' 1.0"),
        (a_member_scored_otherwise, "were not scored alike"),
        (another_version_of_a_member, "sums_small was not measured with the version that was loaded"),
        (members_of_other_sizes, ""),
        (members_that_do_not_add_up, "12 questions, where the members have others in all"),
        (a_member_twice, "a member is there twice"),
        (a_member_left_out, ""),
        (no_members, ""),
        (a_member_with_an_odd_name, "not the name of an lm-eval task"),
        (a_member_with_no_number, "valid integer"),
    ],
)
def test_files_that_lie_are_invalid(
    copy: Path, asked: tuple[Path, TaskPlan], attack: Callable[[Path], None], message: str
) -> None:
    attack(copy)
    with pytest.raises(UNUSABLE) as raised:
        read(copy, asked)
    assert message in str(raised.value)
    assert [each.value for each in parse_task(copy, asked[1], Levels())] == [None] * 5


def test_other_data_is_noticed(copy: Path, asked: tuple[Path, TaskPlan]) -> None:
    """A question that is another one in the second repetition."""
    path = next(copy.glob("r2-b1/samples_*"))
    rows = rows_of(path)
    put(path, [hashed(rows[0] | {"doc": {"question": "another?", "answer": "1"}}), *rows[1:]])
    with pytest.raises(UNUSABLE, match="was asked with another prompt"):
        read(copy, asked)


# --- What cannot be one task


def refusal(folder: Path, log: Path, **changed: Any) -> RecipeError:
    with (
        pytest.raises(RecipeError) as raised,
        loading(STARTING.model_copy(update={"url": "http://127.0.0.1:9"}), "reference", plan_of(folder, **changed), log) as it,
    ):
        reply_of(it)
    return raised.value


def reply_of(lm_eval: LmEval) -> TaskReply:
    deadline = time.monotonic() + 120
    while not lm_eval.has_task_reply():
        lm_eval.check()
        assert time.monotonic() < deadline
        time.sleep(0.05)  # another process writes it
    return lm_eval.task_reply()


def aggregated(**how: Any) -> Document:
    return GROUP | {"aggregate_metric_list": [{"metric": "exact_match", "aggregation": "mean"} | how]}


@pytest.mark.parametrize(
    ("group", "change", "message"),
    [
        (aggregated(weight_by_size=False), {}, "does not score by the mean over all its questions: its exact_match"),
        (GROUP, {"metric": "acc"}, "sums_large has the metrics exact_match, and sums_mid acc"),
        (GROUP, {"filter": "other"}, "sums_large has the filters trimmed, and sums_mid other"),
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
    error = refusal(folder, tmp_path / "lm-eval")
    assert message in str(error)
    assert error.place == "accuracy.sums"
    assert error.remedy


def test_a_group_in_a_group_and_one_that_says_it_is_the_mean_are_measured(tmp_path: Path) -> None:
    inner = {"group": "inner", "task": ["sums_mid", "sums_large"]}
    folder = group_folder(tmp_path / "tasks", aggregated(weight_by_size=True) | {"task": ["inner", "sums_small"]})
    (folder / "inner.yaml").write_text(json.dumps(inner))
    with loading(
        STARTING.model_copy(update={"url": "http://127.0.0.1:9"}), "reference", plan_of(folder), tmp_path / "lm-eval"
    ) as lm_eval:
        assert [member.name for member in reply_of(lm_eval).members] == sorted(SIZES)


def member(name: str, questions: int) -> Member:
    return Member(name=name, questions=questions, task_version="1", config_hash="", output_type="generate_until")


def test_a_block_has_parts_of_the_members_that_it_asks() -> None:
    members = [member("a", 3), member("b", 1), member("c", 5)]
    parts = parts_of(members, [8, 0, 4, 2])
    assert [(part.member.name, part.offset, part.questions) for part in parts] == [("a", 0, [0, 2]), ("c", 4, [0, 4])]
