"""ScoredQuestions: what lm-eval's own files say of those that flipped, whole where they may be, cut and counted where not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.builders.accuracy import CAPTURED, change_samples
from tests.builders.accuracy import CAPTURED_PLAN as TASK
from tests.builders.changed import changed
from tests.builders.comparisons import QUESTIONS as ASKED
from tests.builders.comparisons import ask, cell_plan, keep_baseline, loss_gate
from tests.html import Reader
from tests.lm_eval_files import EMPTY, FLEXIBLE, RIGHT, STRICT, WRONG, Answering, hashed, right_but, text_of
from tests.lm_eval_files import Reply as Scored
from tests.report.builder import SCRIPT, compared_report, passed_report
from vllm_qualify.evidence.accuracy.answers import write
from vllm_qualify.evidence.accuracy.samples import read_answers
from vllm_qualify.evidence.accuracy.thinking import REPLIES, Reply
from vllm_qualify.judge.compare.places import answers_path
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.gates import Gate, gate_of
from vllm_qualify.report import questions as room
from vllm_qualify.report.details import Details, details_of
from vllm_qualify.report.flips import Excerpt
from vllm_qualify.report.model import Report, read_report
from vllm_qualify.report.page import render_page, render_words
from vllm_qualify.report.questions import MOST_CHARACTERS, NOT_BROUGHT, ScoredQuestions, score_questions, way
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.publishing import publish_run

AGAINST = cell_plan([loss_gate()])
LOST, GAINED = ASKED[3], ASKED[5]


def read_scored(evidence: Path, plan: CellPlan = AGAINST) -> ScoredQuestions:
    (scored,) = score_questions(plan, evidence)
    return scored


def captured_plan(*gates: Gate) -> CellPlan:
    return cell_plan(gates, accuracy=[TASK])


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """A question that was lost and one that was gained; the words of the baseline's answers were brought."""
    return asked_twice(tmp_path, right_but([GAINED]), right_but([LOST]))


def asked_twice(folder: Path, theirs: Answering, ours: Answering, brings_words: bool = True) -> Path:
    """The evidence of a cell and of its baseline."""
    evidence = folder / "evidence"
    keep_baseline(evidence, theirs)
    ask(evidence, ours)
    for step in (folder / "baseline-gsm8k").glob("r1-b*") if brings_words else ():
        shutil.copytree(step, evidence / "baseline" / "accuracy" / "gsm8k" / step.name)
    return evidence


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def change_words(evidence: Path, question: int, **changes: Any) -> None:
    """What lm-eval wrote of a question here."""
    for path in (evidence / "accuracy" / "gsm8k").glob("r*/samples_*.jsonl"):
        rows = [hashed(row | changes) if row["doc_id"] == question else row for row in read_rows(path)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (0.0, 1.0, "lost"),
        (1.0, 0.0, "gained"),
        (0.5, 0.51, "lost"),
        (1.0, 0.6, None),
        (0.5, 0.0, None),
        (None, 1.0, None),
        (0.0, None, None),
    ],
)
def test_which_way_a_question_flips(ours: float | None, theirs: float | None, expected: str | None) -> None:
    assert way(ours, theirs) == expected


def test_what_flipped_is_reported_with_both_answers(evidence: Path) -> None:
    scored = read_scored(evidence)
    assert (scored.asked, scored.lost, scored.gained, scored.notes) == (len(ASKED), 1, 1, [])
    assert scored.against == AGAINST.compared_with.run_id
    assert [(flip.question, scored.ways[flip.question]) for flip in scored.flips] == [(LOST, "lost"), (GAINED, "gained")]
    lost = scored.flips[0]
    assert lost.asked == Excerpt(text=f"the one at place {LOST}?")
    assert lost.target == Excerpt(text=f"#### {LOST}")
    assert (lost.theirs, lost.ours) == (Excerpt(text=text_of(LOST, RIGHT)), Excerpt(text=text_of(LOST, WRONG)))
    assert scored.numbers == ASKED
    assert set(scored.ours) == set(scored.theirs) == {0.0, 1.0}


def test_captured_samples_give_their_own_words(tmp_path: Path) -> None:
    """Of lm-eval's real files, where at the baseline question 9 was right and 11 was not, once of two times."""
    evidence, before = tmp_path / "evidence", tmp_path / "before"
    shutil.copytree(CAPTURED, evidence / "accuracy" / "gsm8k")
    shutil.copytree(CAPTURED, before)

    def exchange(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["filter"] == STRICT:
                row["exact_match"] = 1.0 - row["exact_match"]
                row["filtered_resps"] = ["49"]
                row["resps"] = [[f"then: {row['resps'][0][0]}"]]

    change_samples(before, exchange)
    kept = evidence / "baseline" / answers_path("gsm8k")
    kept.parent.mkdir(parents=True)
    write(read_answers(before, TASK), kept)
    shutil.copytree(before / "r1-b1", kept.parent / "r1-b1")

    scored = read_scored(evidence, captured_plan(loss_gate()))
    assert (scored.lost, scored.gained) == (1, 1)
    lost, gained = scored.flips
    assert (lost.question, gained.question) == (9, 11)
    asked, target, theirs, ours = (each.text for each in lost.texts)
    assert asked.startswith("Finn finds 27 books on Monday")
    assert target.endswith("#### 49")
    assert ours.startswith(" On Tuesday Finn finds 27+14=<<27+14=41>>41 books.")
    assert theirs == f"then: {ours}"
    assert dict(zip(scored.numbers, scored.theirs, strict=True))[11] == 0.5


def test_requests_that_were_asked_again_are_reported(evidence: Path) -> None:
    """A server that fails each third request would otherwise answer as well as one that fails none."""
    first, *others = sorted((evidence / "accuracy" / "gsm8k").glob("r*-b*"))
    (first / "tried.json").write_text('{"failed": 3, "most_tries": 3}')
    for folder in others:
        (folder / "tried.json").write_text('{"failed": 0, "most_tries": 3}')
    (note,) = read_scored(evidence).notes
    assert note.startswith("3 requests failed, and lm-eval asked again")


def test_words_that_were_not_brought_are_missing_and_reported(tmp_path: Path) -> None:
    scored = read_scored(asked_twice(tmp_path, right_but([GAINED]), right_but([LOST]), brings_words=False))
    assert scored.notes == [NOT_BROUGHT]
    assert [flip.theirs for flip in scored.flips] == [None, None]
    assert all(flip.ours and flip.asked for flip in scored.flips)


def test_the_answer_that_is_shown_came_out_as_the_question_did(tmp_path: Path) -> None:
    """Right once in three times is wrong: shown is a wrong one, and of the other a right one."""

    def seldom(question: int, repetition: int) -> Scored:
        return Scored(1.0 if repetition == 2 else 0.0, length=repetition) if question == GAINED else RIGHT

    scored = read_scored(asked_twice(tmp_path, seldom, right_but([])))
    assert (scored.lost, scored.gained) == (0, 1)
    assert scored.flips[0].theirs == Excerpt(text="x")


def test_an_empty_reply_is_lost_and_what_the_baseline_did_not_answer_has_not_flipped(tmp_path: Path) -> None:
    def all_but(empty: int) -> Answering:
        return lambda question, _: EMPTY if question == empty else RIGHT

    scored = read_scored(asked_twice(tmp_path, all_but(GAINED), all_but(LOST)))
    assert (scored.lost, scored.gained) == (1, 0)
    ours, theirs = (dict(zip(scored.numbers, scores, strict=True)) for scores in (scored.ours, scored.theirs))
    assert (ours[LOST], theirs[LOST]) == (0.0, 1.0)
    assert (ours[GAINED], theirs[GAINED]) == (1.0, None)


def test_without_a_baseline_the_questions_have_their_own_scores(tmp_path: Path) -> None:
    shutil.copytree(CAPTURED, tmp_path / "accuracy" / "gsm8k")
    gate = gate_of(metric="exact_match", task="gsm8k", filter=FLEXIBLE, minimum=0.1, unit="fraction")
    plan = captured_plan(gate).model_copy(update={"baseline": None})
    scored = read_scored(tmp_path, plan)
    assert (scored.filter, scored.against, scored.theirs, scored.flips, scored.notes) == (FLEXIBLE, None, [], [], [])
    assert dict(zip(scored.numbers, scored.ours, strict=True)) == {
        number: float(number in (0, 10, 11)) for number in (0, 1, 3, 7, 8, 9, 10, 11)
    }
    assert set(scored.ways.values()) == {None}


def test_answers_that_cannot_be_read_leave_nothing_and_the_baselines_only_a_note(evidence: Path, tmp_path: Path) -> None:
    (evidence / "baseline" / answers_path("gsm8k")).write_text("{")
    scored = read_scored(evidence)
    assert (scored.theirs, scored.flips, scored.asked) == ([], [], len(ASKED))
    assert scored.notes[0].startswith("the baseline's answers cannot be read: ")
    assert score_questions(AGAINST, tmp_path / "elsewhere") == []
    for path in (evidence / "accuracy" / "gsm8k").glob("r1-b1/samples_*"):
        path.write_text("{")
    assert details_of(AGAINST, evidence).questions == []


def test_long_words_are_cut_and_it_is_reported_how_much(evidence: Path) -> None:
    change_words(evidence, LOST, resps=[["é" * (MOST_CHARACTERS + 7)]], target="t" * 5000)
    lost = read_scored(evidence).flips[0]
    assert lost.ours == Excerpt(text="é" * MOST_CHARACTERS, cut=7)
    assert lost.target == Excerpt(text="t" * MOST_CHARACTERS, cut=3000)


def test_what_was_thought_is_apart_from_the_answer(evidence: Path) -> None:
    change_words(evidence, LOST, resps=[["<think>" + "t" * (MOST_CHARACTERS + 7) + "</think>the answer"]])
    change_words(evidence, GAINED, resps=[["<think>without an end"]])
    lost, gained = read_scored(evidence).flips
    assert (lost.our_thinking, lost.ours) == (Excerpt(text="t" * MOST_CHARACTERS, cut=7), Excerpt(text="the answer"))
    assert (gained.our_thinking, gained.ours) == (Excerpt(text="without an end"), Excerpt(text=""))
    assert lost.their_thinking is None
    assert lost.bytes == sum(len(each.text) for each in (lost.asked, lost.target, lost.theirs, lost.ours) if each) + 2000


def keep_replies(folder: Path, cut: int, thinking: str) -> None:
    """What the worker keeps beside lm-eval's files: one answer was cut, and each was thought about."""
    for step in folder.glob("r*-b*"):
        kept = [
            Reply(
                prompt_hash=row["prompt_hash"],
                finish_reason="length" if row["doc_id"] == cut else "stop",
                thinking=f"{thinking} {row['doc_id']}",
                is_empty=False,
            )
            for row in read_rows(next(step.glob("samples_*.jsonl")))
        ]
        (step / REPLIES).write_text("".join(f"{each.model_dump_json()}\n" for each in kept))


def test_thinking_that_the_server_split_off_is_shown_and_what_was_cut_is_known(evidence: Path) -> None:
    keep_replies(evidence / "accuracy" / "gsm8k", LOST, SCRIPT)
    scored = read_scored(evidence)
    assert scored.cut == [LOST]
    lost, gained = scored.flips
    assert (lost.our_thinking, lost.ours) == (Excerpt(text=f"{SCRIPT} {LOST}"), Excerpt(text=text_of(LOST, WRONG)))
    assert gained.our_thinking == Excerpt(text=f"{SCRIPT} {GAINED}")
    assert lost.their_thinking is None
    next((evidence / "accuracy" / "gsm8k").glob(f"r*-b*/{REPLIES}")).unlink()
    assert read_scored(evidence).cut is None


def test_questions_have_the_topics_of_their_data(evidence: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One topic alone or too many are none. A long name is cut, and what has no topic has none."""
    change_words(evidence, LOST, doc={"question": "q", "category": "law"})
    assert (read_scored(evidence).topics, read_scored(evidence).about) == ([], [])
    change_words(evidence, GAINED, doc={"question": "r", "category": "b" * 999})
    scored = read_scored(evidence)
    assert scored.topics == ["b" * 100, "law"]
    assert scored.about == [{LOST: 1, GAINED: 0}.get(number) for number in ASKED]
    monkeypatch.setattr(room, "MOST_TOPICS", 1)
    assert (read_scored(evidence).topics, read_scored(evidence).about) == ([], [])


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"doc": {"text": "no question"}, "arguments": {"gen_args_0": {"arg_0": "e" * 9000 + "the end"}}}, "the end"),
        ({"doc": "text", "arguments": {"gen_args_0": {"arg_0": ['[{"role": "user"}]']}}}, '{\\"role\\": \\"user\\"}]"]'),
    ],
)
def test_a_task_without_a_question_of_its_own_shows_its_prompts_end(
    evidence: Path, changes: dict[str, Any], shown: str
) -> None:
    change_words(evidence, LOST, **changes)
    asked = read_scored(evidence).flips[0].asked
    assert asked
    assert asked.text.endswith(shown)
    assert len(asked.text) <= MOST_CHARACTERS


def test_where_likelihoods_are_compared_the_choice_is_shown(evidence: Path) -> None:
    path = next((evidence / "baseline" / "accuracy" / "gsm8k").glob("r1-b1/samples_*.jsonl"))
    chosen = {"resps": [[[-1.5, True]], [[-2.5, False]]], "filtered_resps": [[-1.5, True], [-2.5, False]]}
    path.write_text("".join(json.dumps(row | chosen) + "\n" for row in read_rows(path)))
    assert read_scored(evidence).flips[0].theirs == Excerpt(text="[[-1.5, true], [-2.5, false]]")


def test_half_a_character_and_odd_line_ends_survive_the_report(evidence: Path) -> None:
    change_words(evidence, LOST, resps=[["a\u2028b\ud800c\x1b"]])
    scored = read_scored(evidence)
    assert scored.flips[0].ours == Excerpt(text="a\u2028b\\ud800c\x1b")
    report = changed(passed_report(), "details", questions=[scored])
    assert read_report(report.model_dump_json(), "here") == report


@pytest.mark.parametrize(("limit", "most", "kept"), [("MOST_FLIPS", 3, 3), ("MOST_BYTES", 1000, 4), ("MOST_BYTES", 1, 0)])
def test_what_is_too_much_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, kept: int
) -> None:
    evidence = asked_twice(tmp_path, right_but([]), right_but(ASKED[:10]))
    monkeypatch.setattr(room, limit, most)
    scored = read_scored(evidence)
    assert (scored.lost, [flip.question for flip in scored.flips]) == (10, ASKED[:kept])


def test_of_too_many_questions_those_that_flipped_stay(evidence: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_QUESTIONS", 4)
    scored = read_scored(evidence)
    assert (len(scored.numbers), scored.asked) == (4, len(ASKED))
    assert {LOST, GAINED} < set(scored.numbers)


def few_words(plan: CellPlan, evidence: Path) -> Report:
    details = Details(questions=score_questions(plan, evidence))
    return changed(passed_report(), plan=plan, stages=[], details=details)


def test_words_that_have_no_room_are_on_a_page_of_their_own(
    evidence: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It lies beside the report's page, in the run's folder and in the store, and the report's page leads to it."""
    report = few_words(AGAINST, evidence)
    assert render_words(report, evidence) == {}
    assert "questions.html" not in render_page(report, lambda file: file.path)
    change_words(evidence, LOST, resps=[["a" * MOST_CHARACTERS + SCRIPT]])
    monkeypatch.setattr(room, "MOST_FLIPS", 1)
    report, run = few_words(AGAINST, evidence), Run(folder=tmp_path)
    run.save_report(report)
    assert not [address for address in Reader(render_page(report)).having("href") if "questions.html" in address]
    store = open_store(f"file://{tmp_path}/store")
    published = publish_run(report, run, store)
    for folder in (tmp_path, Path(published.page).parent):
        page, more = (Reader((folder / name).read_text()) for name in ("report.html", "questions.html"))
        assert f"questions.html#question-gsm8k-{GAINED}" in page.having("href")
        assert f"#question-gsm8k-{LOST}" in page.having("href")
        assert {f"question-gsm8k-{number}" for number in (LOST, GAINED)} < set(more.having("id"))
        assert SCRIPT in more.text
        assert "script" not in {tag for tag, _ in more.elements}
        policies = [Reader.having(each, "content") for each in (page, more)]
        assert policies[0] == policies[1]
    stored = {each["key"] for each in json.loads(Path(published.manifest).read_text())["objects"]}
    assert f"{report.prefix}/questions.html" in stored


def test_each_filter_that_a_gate_is_on_has_its_own_and_all_of_a_task_may_flip(tmp_path: Path) -> None:
    evidence = asked_twice(tmp_path, right_but([]), lambda *_: Scored(0.0, flexible=1.0))
    strict, flexible = score_questions(cell_plan([loss_gate(), loss_gate(name_filter=FLEXIBLE)]), evidence)
    assert (strict.filter, strict.lost, len(strict.flips)) == (STRICT, len(ASKED), len(ASKED))
    assert (flexible.filter, flexible.lost) == (FLEXIBLE, 0)


def test_scores_that_are_not_beside_their_questions_are_refused() -> None:
    (scored,) = compared_report().details.questions
    whole = scored.model_dump()
    broken: list[tuple[dict[str, object], str]] = [
        ({"ours": scored.ours[1:]}, "each question has a score"),
        ({"theirs": scored.theirs[1:]}, "each question has a score"),
        ({"about": [0]}, "each has one or none"),
        ({"about": [9] * len(scored.numbers)}, "not among the topics"),
        ({"flips": [whole["flips"][0] | {"question": 99999}]}, "not among the questions"),
    ]
    for changes, said in broken:
        with pytest.raises(ValidationError, match=said):
            ScoredQuestions.model_validate(whole | changes)
