"""A group whose tasks each have data of their own: a folder of local questions, through the real lm-eval."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from tests.builders.accuracy import (
    NOBODY,
    Replies,
    Row,
    answer_in_order,
    ask_task,
    await_task_reply,
    draw_picture,
    exam_row,
    read_rows,
    refuse_task,
    write_rows,
    write_task,
)
from tests.fakes.openai_server import Book
from tests.recipes import reference, write
from vllm_qualify.cli.recipe import data_app
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.evidence.accuracy.data import fetch
from vllm_qualify.evidence.accuracy.lm_eval_process import running_lm_eval
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.plan.questions import check_questions
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.recipe.presets import PRESETS

LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).parent
SUBJECTS = ("anatomy", "astronomy", "virology")
MEMBERS = [f"mmlu_{subject}_generative" for subject in SUBJECTS]


def choice(subject: str, question: str, answer: int) -> Row:
    return {"question": question, "subject": subject, "choices": ["bone", "star", "germ", "none"], "answer": answer}


QUESTIONS = {
    MEMBERS[0]: [choice("anatomy", "What is a rib?", 0), choice("anatomy", "What is a fern?", 3)],
    MEMBERS[1]: [choice("astronomy", "What is Vega?", 1)],
    MEMBERS[2]: [choice("virology", "What is measles?", 2), choice("virology", "What is a mouse?", 3)],
}
EXAMPLES = {
    member: [choice(subject, f"What is in {subject}?", at)]
    for at, (member, subject) in enumerate(zip(MEMBERS, SUBJECTS, strict=True))
}
SAID = {"a rib": " A", "a fern": " B", "Vega": " b.", "measles": " C\nQuestion", "a mouse": " It is D"}
# In the order of the tasks' names. Case and points do not count, nor what follows the line; words before the letter do.
SCORES = [1, 0, 1, 1, 0]


def write_folder(folder: Path, files: dict[str, list[Row]]) -> Path:
    folder.mkdir(parents=True)
    for name, rows in files.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def plan_of(root: Path, members: list[str] = MEMBERS, **changed: Any) -> TaskPlan:
    """Three subjects of lm-eval's mmlu, by generation, with QUESTIONS and EXAMPLES."""
    own = root / "tasks"
    own.mkdir()
    (own / "three.yaml").write_text(json.dumps({"group": "three", "task": members}))
    settings = {"task": "three", "num_questions": 5, "num_fewshot": 1, "time_limit_s": 120.0} | changed
    files = [dict(zip(members, rows.values(), strict=True)) for rows in (QUESTIONS, EXAMPLES)]
    given = [write_folder(root / name, each) for name, each in zip(("test", "shots"), files, strict=True)]
    return TaskPlan(settings=Accuracy(**settings), num_concurrent=4, questions=given, folder=own)


def test_scores_are_those_computed_by_hand_and_examples_the_tasks_own(tmp_path: Path) -> None:
    book = Book(Replies(SAID))
    answers = answer_in_order(plan_of(tmp_path), tmp_path, book)
    assert [answer.scores["exact_match,get_response"] for answer in answers] == SCORES
    assert [answer.topic for answer in answers] == [SUBJECTS[place] for place in (0, 0, 1, 2, 2)]
    for request in book.requests:
        (subject,) = [subject for subject in SUBJECTS if f"about {subject}." in request["prompt"]]
        assert f"What is in {subject}?" in request["prompt"]
        assert request["prompt"].count("What is in") == 1


def test_likelihoods_choose_the_answers_that_were_computed_by_hand(tmp_path: Path) -> None:
    """Three subjects of lm-eval's mmlu as the preset `base` asks it, with a server that finds these letters the likeliest."""
    (mmlu,) = (task for task in PRESETS["base"] if task["task"] == "mmlu")
    asked_so = mmlu | {"task": "three", "num_fewshot": 1, "num_questions": 5, "time_limit_s": 120.0}
    likeliest = {"a rib": " A", "a fern": " B", "Vega": " B", "measles": " C", "a mouse": " A"}

    def choose(text: str) -> str:
        return next(letter for words, letter in likeliest.items() if words in text.rpartition("\n\n")[2])

    book = Book({}, choose=choose)
    answers = answer_in_order(plan_of(tmp_path, [f"mmlu_{subject}" for subject in SUBJECTS], **asked_so), tmp_path, book)
    assert [answer.scores["acc,none"] for answer in answers] == [1, 0, 1, 1, 0]
    assert len(book.prompts) == 4 * 5
    assert all(text.count("\nAnswer:") == 2 for text in book.prompts)


# --- Folders that lie


ASTRONOMY, VIROLOGY = (f"{member}.jsonl" for member in MEMBERS[1:])
# The file that is changed; what it then has, or None where it is gone; the problem, and the remedy.
LIES: dict[str, tuple[str, str | None, str, str]] = {
    "member is missing": (f"test/{ASTRONOMY}", None, f"test lacks 1 of 3 tasks of three: {ASTRONOMY}", "add them"),
    "file of another task": ("test/anatomy.jsonl", "{}", "test/anatomy.jsonl is of no task of three", "correct its name"),
    "examples of another task": ("shots/others.jsonl", "{}", "shots/others.jsonl is of no task of three", "correct its name"),
    "examples are missing": (f"shots/{VIROLOGY}", None, f"{MEMBERS[2]} needs solved examples", f"shots/{VIROLOGY}"),
    "other fields": (
        f"test/{ASTRONOMY}",
        '{"query": "?", "choices": [], "answer": 1}',
        f"three does not find its fields in test/{ASTRONOMY}",
        "JSON lines",
    ),
    "no json": (f"test/{VIROLOGY}", "question,answer", f"three does not find its fields in test/{VIROLOGY}", "JSON lines"),
    "an answer too high": (
        f"test/{ASTRONOMY}",
        "\n".join(map(json.dumps, (QUESTIONS[MEMBERS[1]][0], choice("astronomy", "What is Vega?", 7)))),
        f"three does not find its fields in test/{ASTRONOMY}",
        "JSON lines",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_folder_that_is_not_the_groups_is_refused_with_its_file(name: str, tmp_path: Path) -> None:
    file, text, message, remedy = LIES[name]
    plan = plan_of(tmp_path)
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(f"{text}\n")
    error = refuse_task(plan, tmp_path / "lm-eval")
    assert message in str(error)
    assert remedy in error.remedy
    assert error.place == "accuracy.three"


def write_huge_files(folder: Path) -> None:
    for name in ("b", "c"):
        with (folder / f"{name}.jsonl").open("wb") as file:
            file.truncate(3 * 2**29)


def write_many_files(folder: Path) -> None:
    for number in range(5_000):
        os.link(folder / "a.jsonl", folder / f"{number}.jsonl")


ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (lambda folder: (folder / "b.jsonl").symlink_to("/etc/passwd"), "'b.jsonl' is a link"),
    "link to a folder": (lambda folder: (folder / "b.jsonl").symlink_to("/etc"), "'b.jsonl' is a link"),
    "inner folder": (lambda folder: (folder / "b.jsonl").mkdir(), "'b.jsonl' is no plain file"),
    "pipe": (lambda folder: os.mkfifo(folder / "b.jsonl"), "'b.jsonl' is no plain file"),
    "notes": (lambda folder: (folder / "notes.txt").write_text("mine"), "'notes.txt' is no plain file TASK.jsonl"),
    "nothing": (lambda folder: (folder / "a.jsonl").unlink(), "is empty"),
    "huge": (write_huge_files, "3.0 GiB of questions, where 2 are allowed"),
    "many": (write_many_files, "more than 5,000 files"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_folder_with_other_things_is_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    attack, message = ATTACKS[name]
    folder = tmp_path / "test"
    with pytest.raises(HostError, match=r"no questions at .*/test"):
        check_questions(folder)
    write_folder(folder, {"a": [{"question": "?"}]})
    check_questions(folder)
    attack(folder)
    with pytest.raises(CallerError) as raised:
        check_questions(folder)
    assert message in str(raised.value)
    assert raised.value.place == str(folder)
    assert raised.value.remedy


# --- Fetched


def own_group(folder: Path) -> dict[str, list[Row]]:
    """Two tasks with data of their own, the first with examples. Returns the questions of each."""
    rows = {
        "sums": [{"question": f"{number} + 1?", "answer": f"{number + 1}", "kind": "x"} for number in range(4)],
        "zeros": [{"question": f"{number} times 0?", "answer": "0", "kind": "x"} for number in range(3)],
    }
    write_task(folder, "sums", rows["sums"])
    write_task(folder, "zeros", rows["zeros"], fewshot_split="test", training_split="test")
    YAML(typ="safe").dump({"group": "both", "task": ["zeros", "sums"]}, folder / "both.yaml")
    return rows


def test_each_task_with_data_of_its_own_is_fetched_into_a_file_which_asks_the_same(tmp_path: Path) -> None:
    rows = own_group(tmp_path / "tasks")
    settings = Accuracy(task="both", num_questions=7, num_fewshot=0, time_limit_s=120.0)
    plan = TaskPlan(settings=settings, num_concurrent=4, folder=tmp_path / "tasks")
    reply = fetch(plan, tmp_path / "data")
    assert (reply.questions, reply.shots, set(reply.members)) == (7, 2, {"sums", "zeros"})
    there = {path.relative_to(tmp_path / "data").as_posix() for path in (tmp_path / "data").rglob("*.jsonl")}
    assert there == {"test/sums.jsonl", "test/zeros.jsonl", "shots/sums.jsonl"}
    for name, wanted in rows.items():
        assert read_rows(tmp_path / "data" / "test" / f"{name}.jsonl") == wanted
    local = plan.model_copy(update={"questions": [tmp_path / "data" / "test", tmp_path / "data" / "shots"]})
    said = Replies({row["question"]: row["answer"] for each in rows.values() for row in each})
    asked = [
        {(answer.question, answer.doc_hash, answer.prompt_hash) for answer in ask_task(each, folder, Book(said))[0].answers}
        for each, folder in ((plan, tmp_path / "own"), (local, tmp_path / "local"))
    ]
    assert len(asked[0]) == 7
    assert asked[0] == asked[1]


def test_the_command_shows_the_lines_for_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own_group(tmp_path / "tasks")
    document = reference()
    document["accuracy"] = [
        {"task": "both", "num_questions": 7, "num_fewshot": 1, "task_folder": "tasks"},
        {"task": "sums", "num_questions": 4, "task_folder": "tasks"},
    ]
    document["gates"] = [{"metric": "truncated_answers", "task": "both", "maximum": 0.5, "unit": "fraction"}]
    recipe = write(document, tmp_path / "mine.yaml")
    done = CliRunner().invoke(data_app, ["fetch", str(recipe), "--to", "data", "--allow-code"])
    assert done.exit_code == 0, done.output
    assert "both: 7 questions, 2 examples\n  questions: {test: data/both/test, shots: data/both/shots}\n" in done.output
    assert "  questions: {test: data/sums/test.jsonl, shots: data/sums/shots.jsonl}\n" in done.output


# --- The groups of the presets


@pytest.mark.thorough
def test_all_57_subjects_of_mmlu_are_read_from_a_folder(tmp_path: Path) -> None:
    """The preset `base`. Likelihoods are not asked here."""
    names = [path.stem for path in (LM_EVAL_TASKS / "mmlu" / "default").glob("mmlu_*.yaml")]
    assert len(names) == 57
    test = write_folder(tmp_path / "test", {name: [choice("x", f"What is {name}?", 1)] for name in names})
    shots = write_folder(tmp_path / "shots", {name: [choice("x", f"What is in {name}?", 2)] for name in names})
    settings = Accuracy(task="mmlu", num_questions=57, num_fewshot=1)
    plan = TaskPlan(settings=settings, num_concurrent=1, questions=[test, shots])
    with running_lm_eval(NOBODY, "reference", plan, tmp_path / "lm-eval") as lm_eval:
        reply = await_task_reply(lm_eval)
    assert {member.name: member.questions for member in reply.members} == dict.fromkeys(names, 1)


@pytest.mark.thorough
def test_all_30_subjects_of_mmmu_are_asked_from_a_folder_with_their_pictures(tmp_path: Path) -> None:
    """The preset `vision`. The right answer is A for each; the server says A to those of the first fifteen in their order."""
    texts = [path.read_text() for path in (LM_EVAL_TASKS / "mmmu").glob("mmmu_*.yaml")]
    names = sorted(line.removeprefix("task: ") for text in texts for line in text.split("\n") if line.startswith("task: "))
    assert len(names) == 30
    rows = {name: [exam_row(1, f"How many for {name} in <image 1>?", "A", draw_picture("red"))] for name in names}
    settings = Accuracy(task="mmmu_val", num_questions=30, num_fewshot=0, api="chat", stop=[], time_limit_s=120.0)
    plan = TaskPlan(settings=settings, num_concurrent=4, questions=[write_folder(tmp_path / "test", rows)])
    said = Replies({f"for {name} in": "(A)" if at < 15 else "(B)" for at, name in enumerate(names)})
    answered, _ = ask_task(plan, tmp_path, Book(said))
    scores = {answer.topic: answer.scores["acc,none"] for answer in answered.answers}
    assert scores == {name: float(at < 15) for at, name in enumerate(names)}
