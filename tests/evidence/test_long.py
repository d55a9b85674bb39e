"""Long contexts, through the real lm-eval and a server that reads its prompts: lengths, scores by hand, refusals."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.builders.accuracy import ask_task, await_task_reply, read_rows
from tests.evidence.commands import STARTING
from tests.fakes.openai_server import AROUND_TOK, Book, serving
from tests.recipes import reference, write
from vllm_qualify.cli import app
from vllm_qualify.errors import RecipeError
from vllm_qualify.evidence.accuracy.answers import Answered
from vllm_qualify.evidence.accuracy.letters import RefusedError
from vllm_qualify.evidence.accuracy.lm_eval_process import running_lm_eval
from vllm_qualify.evidence.accuracy.long.fitting import Tokenizer, fit_documents
from vllm_qualify.evidence.accuracy.long.questions import KINDS, asked, made, scores
from vllm_qualify.evidence.accuracy.measurements import parse_task
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy

KINDS_BY_HAND = ["single", "multikey", "multivalue", "tracking", "frequent"]
# Longer than the slack that a question may have.
SYSTEM = "Be brief and do not explain. " * 25


def solved(prompt: str) -> list[str]:
    """What a reader of the prompt finds."""
    text, _, question = prompt.rpartition("Question: ")
    if found := re.search(r"codes? of (\S+)\?", question):
        return re.findall(rf"A code of {re.escape(found[1])} is (\d+)\.", text)
    if found := re.search(r"value (\d+)\?", question):
        names: list[str] = []
        for name, source in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", text, re.MULTILINE):
            names += [name] if source in (found[1], *names) else []
        return names
    return [word for word, _ in Counter(text.split("\n\n")[1].split()).most_common(3)]


def plan_of(task: str = "long_1024", **settings: Any) -> TaskPlan:
    asked_so = {"api": "chat", "system_prompt": SYSTEM, "num_questions": 10, "time_limit_s": 120.0} | settings
    return TaskPlan(settings=Accuracy(task=task, **asked_so), num_concurrent=4)


def half(prompt: str) -> str:
    """The first half of what is asked for, rounded up, in other letters."""
    wanted = solved(prompt)
    return f"I found {' and '.join(wanted[: (len(wanted) + 1) // 2])}.".swapcase()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[TaskPlan, Answered, Path, Book]:
    book, folder = Book({}, solve=half, most_tok=1024), tmp_path_factory.mktemp("long")
    plan = plan_of(sequential=False, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    return (plan, *ask_task(plan, folder, book, most_blocks=1), book)


Run = tuple[TaskPlan, Answered, Path, Book]


def test_scores_are_those_computed_by_hand(run: Run) -> None:
    plan, answered, folder, _ = run
    answers = sorted(answered.answers, key=lambda each: each.question)
    assert [answer.topic for answer in answers] == KINDS_BY_HAND * 2
    # One of one, one of one, two of four, three of five, two of three.
    by_hand = [1, 1, 1 / 2, 3 / 5, 2 / 3] * 2
    assert [answer.scores["string_match_all,none"] for answer in answers] == pytest.approx(by_hand)
    row = next(row for row in parse_task(folder, plan, Levels()) if row.metric == "string_match_all")
    assert row.value == pytest.approx((1 + 1 + 1 / 2 + 3 / 5 + 2 / 3) / 5)


def test_a_prompt_with_its_reply_has_the_length_that_the_task_names(run: Run) -> None:
    """The template is counted as the chat has it."""
    *_, book = run
    sent = [[message["content"] for message in request["messages"]] for request in book.requests]
    lengths = [AROUND_TOK + sum(len(text.split()) for text in said) + 128 for said in sent]
    assert len(lengths) == 10
    assert all(said[0] == SYSTEM for said in sent)
    # Room for the template is a multiple of 64, and 64 tokens may be left.
    assert all(1024 - 2 * 64 <= length <= 1024 for length in lengths)
    assert {request["max_tokens"] for request in book.requests} == {128}
    (around,) = [request for request in book.tokenized if "messages" in request]
    assert [message["role"] for message in around["messages"]] == ["system", "user"]
    assert around["chat_template_kwargs"] == {"enable_thinking": False, "reasoning_effort": "low"}


def test_completions_have_the_length_too(tmp_path: Path) -> None:
    book = Book({}, solve=half, most_tok=1024)
    plan = plan_of(api="completions", system_prompt=None, num_questions=5, max_gen_toks=300, sequential=False)
    answered, _ = ask_task(plan, tmp_path, book, most_blocks=1)
    assert sorted(answer.scores["string_match_all,none"] for answer in answered.answers) == [1 / 2, 3 / 5, 2 / 3, 1, 1]
    lengths = [len(request["prompt"].split()) + 300 for request in book.requests]
    assert all(1024 - 2 * 64 <= length <= 1024 for length in lengths)
    assert {request["max_tokens"] for request in book.requests} == {300}


def test_the_evidence_has_how_each_question_was_made(run: Run) -> None:
    """No two prompts begin alike beyond the first sentences."""
    _, _, folder, book = run
    prompts = sorted(request["messages"][-1]["content"] for request in book.requests)
    assert len({prompt.partition("\n\n")[2][:60] for prompt in prompts}) == 10
    (path,) = folder.glob("r1-b1/samples_*.jsonl")
    assert sorted(asked(row["doc"]) for row in read_rows(path)) == prompts


@pytest.mark.parametrize("kind", KINDS_BY_HAND)
def test_a_reader_of_the_text_finds_what_is_asked_for(kind: str) -> None:
    for number in range(20):
        for size in (KINDS[kind].least, 300):
            question = made(kind, 7, number, size)
            assert sorted(solved(question.text)) == sorted(question.wanted)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("1234567, 7654321", 1.0),
        ("1234567", 0.5),
        ("THE CODES: 7654321.", 0.5),
        ("", 0.0),
        ("123 4567", 0.0),
        ("abc", 0.0),
        # RULER does not ask what else a reply has.
        ("1234567 7654321 1111111", 1.0),
    ],
)
def test_a_reply_scores_the_share_that_it_has(reply: str, score: float) -> None:
    assert scores({"wanted": ["1234567", "7654321"]}, [reply]) == {"string_match_all": score}
    # Capital letters do not matter.
    assert scores({"wanted": ["ABCDE"]}, ["abcde"]) == {"string_match_all": 1.0}


def documents(seed: int, count: int = 10, book: Book | None = None, tokens: int = 1024) -> list[dict[str, Any]]:
    with serving(book or Book({}, most_tok=4096)) as url:
        return fit_documents(Tokenizer(url, "reference"), tokens, 128, {"prompt": "one"}, seed, count)


def test_questions_are_the_same_for_a_seed_and_differ_for_another() -> None:
    first, again, other = documents(1), documents(1), documents(2)
    assert first == again
    assert [asked(one) == asked(two) for one, two in zip(first, other, strict=True)] == [False] * 10
    assert documents(1, count=5) == first[:5]


@pytest.mark.parametrize(
    ("tokens", "most", "message"),
    [
        (8192, 4096, "8,192 tokens are asked, prompt and reply, and the server takes 4,096"),
        (200, 4096, "a question of the kind single has"),
        (128, 4096, "and 0 are left"),
        (1024, 0, "the server counts no tokens by /tokenize: HTTP 404"),
    ],
)
def test_a_length_that_cannot_be_asked_is_refused(tokens: int, most: int, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        documents(1, book=Book({}, most_tok=most), tokens=tokens)


def test_a_tokenizer_that_counts_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that says 1 for every text would have the text grow for ever."""
    monkeypatch.setattr(Tokenizer, "count", lambda *_, **__: 1)
    with pytest.raises(RefusedError, match="no question of the kind single has"):
        documents(1)


def test_a_server_that_takes_less_is_refused_in_the_recipes_words(tmp_path: Path) -> None:
    with serving(Book({}, most_tok=512)) as url, pytest.raises(RecipeError) as refused:
        starting = STARTING.model_copy(update={"url": url})
        with running_lm_eval(starting, "reference", plan_of(), tmp_path / "lm-eval") as lm_eval:
            await_task_reply(lm_eval)
    assert "long_1024 cannot be asked: 1,024 tokens are asked, prompt and reply, and the server takes 512" in str(refused.value)
    assert "max-model-len" in (refused.value.remedy or "")


def test_there_is_no_data_of_them_to_fetch(tmp_path: Path) -> None:
    document = reference()
    gate = {"metric": "string_match_all", "task": "long_1024", "filter": "none", "minimum": 0.9, "unit": "fraction"}
    document |= {"accuracy": [{"task": "long_1024", "num_questions": 10}], "gates": [gate]}
    done = CliRunner().invoke(app, ["data", "fetch", str(write(document, tmp_path / "mine.yaml")), "--to", str(tmp_path)])
    assert "the recipe has no task with data that is not here" in str(done.exception)
