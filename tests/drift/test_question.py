"""The question that is asked while a server starts: who waits for it, and what is left of it."""

import tempfile
import threading
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.builders.processes import alive, children_that_run, until
from tests.fakes.vllm import leave_unclear, make_engine
from tests.recipes import reference, write
from vllm_qualify.drift.question import Question
from vllm_qualify.engine.environment import EngineEnvironment, find_engine
from vllm_qualify.engine.gpu import detect
from vllm_qualify.engine.provision import Engines
from vllm_qualify.errors import HostError, QualifyError, RecipeError, ReleaseError
from vllm_qualify.plan.cells import plan_cells
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.loading import load_recipe

NOT_STARTED = ReleaseError("the server ended with exit code 1", "see its log", "serve")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineEnvironment:
    """A stand-in, which answers at once."""
    monkeypatch.setenv("VLLM_QUALIFY_ENGINE", str(make_engine(tmp_path / "engine")))
    return find_engine()


def question(engine: EngineEnvironment, folder: Path, **server: object) -> Question:
    document = reference()
    document["gpu_types"]["cpu"]["server"] |= server
    loaded = load_recipe(str(write(document, folder / "mine.yaml")))
    return Question(plan_cells(loaded, Choice(), Engines(engine=engine), detect("cpu")), folder / "cache")


def hang(engine: EngineEnvironment) -> None:
    """From now on it answers no question."""
    # Where its packages are, asked with -c, is not the question.
    engine.python.write_text('#!/bin/sh\n[ "$2" != -c ] || exit 1\nexec sleep 600\n')


def find_asked() -> list[int]:
    """The ids of the processes that are asked here: each knows another one, that of its namespace."""
    return children_that_run(["sleep", "600"])


@contextmanager
def asked(it: Question) -> Iterator[None]:
    """By a thread of its own, as a flow does it."""

    def ask() -> None:
        with suppress(QualifyError):
            it.ask()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        it.give_up()
        thread.join()


def nothing() -> None:
    """The server is well."""


def test_who_waits_gets_an_error_with_a_remedy_if_the_asking_tasks_time_is_over(
    engine: EngineEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_time(*_: object) -> None:
        raise CancelledError

    monkeypatch.setattr("vllm_qualify.drift.question.check_plans", out_of_time)
    it = question(engine, tmp_path)
    with pytest.raises(CancelledError):
        it.ask()
    with pytest.raises(HostError, match="the engine was not asked"):
        it.check()


def test_an_answer_is_kept_and_stays_when_whoever_asked_has_ended(engine: EngineEnvironment, tmp_path: Path) -> None:
    first = question(engine, tmp_path)
    assert not first.is_kept
    assert first.ask() == first.unasked == []
    first.settle()
    first.check()
    first.explain(NOT_STARTED)
    assert first.unasked == []
    assert question(engine, tmp_path).is_kept
    assert not question(engine, tmp_path, **{"max-model-len": 1024}).is_kept


def test_what_an_engine_could_not_tell_is_known_after_it(engine: EngineEnvironment, tmp_path: Path) -> None:
    leave_unclear(engine.python.parents[1], "no hub")
    it = question(engine, tmp_path)
    with asked(it):
        assert it.unasked == ["whether options refuse each other, for 1 of 1 cells: no hub"]


def test_a_refused_recipe_ends_who_waits_for_it_and_explains_a_failed_start(engine: EngineEnvironment, tmp_path: Path) -> None:
    it = question(engine, tmp_path, **{"max-num-sequences": 4, "compilation-config": {"modes": 3}})
    it.check()
    with asked(it), pytest.raises(RecipeError, match="does not take what the recipe asks") as raised:
        it.explain(NOT_STARTED)
    for look in (it.check, lambda: it.wait(nothing)):
        with pytest.raises(RecipeError, match="does not take"):
            look()
    log_text = "\n".join(raised.value.log_tail)
    assert [each for each in ("no option --max-num-sequences", "no field modes") if each not in log_text] == []
    assert raised.value.__cause__ is NOT_STARTED


def test_an_engine_that_cannot_be_asked_ends_it_too_and_explains_nothing(engine: EngineEnvironment, tmp_path: Path) -> None:
    it = question(engine, tmp_path)
    engine.python.write_text("#!/bin/sh\necho why; exit 1\n")
    with asked(it), pytest.raises(HostError, match="exit code 1"):
        it.wait(nothing)
    it.explain(NOT_STARTED)


def test_who_waits_looks_at_the_server_meanwhile(engine: EngineEnvironment, tmp_path: Path) -> None:
    it = question(engine, tmp_path)
    hang(engine)

    def ended() -> None:
        raise NOT_STARTED

    with asked(it), pytest.raises(ReleaseError):
        it.wait(ended)


def test_a_question_that_is_given_up_leaves_no_process(
    engine: EngineEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    it = question(engine, tmp_path)
    hang(engine)
    with asked(it):
        assert until(lambda: find_asked() != [], 30)
        (process,) = find_asked()
    assert not alive(process)
    assert not list((tmp_path / "cache").glob("*"))


def test_a_question_that_nobody_asked_is_waited_for_by_nobody(engine: EngineEnvironment, tmp_path: Path) -> None:
    """The task that was to ask can end before it begins: a lost Prefect server, a cancelled run."""
    it = question(engine, tmp_path)
    it.settle()
    with pytest.raises(HostError, match="the engine was not asked"):
        it.wait(nothing)
    it.explain(NOT_STARTED)
