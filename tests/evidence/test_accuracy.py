"""Accuracy: what lm-eval's captured files say, and that bad ones give no score."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.evidence.commands import SERVER, options
from vllm_qualify.evidence.accuracy import command_of, parse
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.recipe.model import Accuracy

CAPTURED = Path(__file__).parent / "captured" / "accuracy"
STAMP = "2026-11-20T11-13-16.148314"
RESULTS, SAMPLES = f"results_{STAMP}.json", f"samples_gsm8k_{STAMP}.jsonl"
SETTINGS = Accuracy(num_fewshot=1, num_questions=4, max_gen_toks=128)
STRICT, FLEXIBLE = "strict-match", "flexible-extract"
# Wilson's lower bound for 4 of 4 is 4 / (4 + z²), with z = 1.6448536 of one-sided 95 %.
LOWER_OF_4_OF_4 = 0.5965214

Document = dict[str, Any]
Change = Callable[[Document], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(CAPTURED, tmp_path / "accuracy")


def change_results(folder: Path, how: Change) -> None:
    document = json.loads((folder / RESULTS).read_text())
    how(document)
    (folder / RESULTS).write_text(json.dumps(document))


def read_samples(folder: Path) -> list[Document]:
    """Four of strict-match, then four of flexible-extract, each with doc_id 0 to 3."""
    return [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]


def write_samples(folder: Path, rows: list[Document]) -> None:
    (folder / SAMPLES).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def change_sample(folder: Path, how: Change, which: int = 0) -> None:
    """Change one sample, by default the first of strict-match."""
    rows = read_samples(folder)
    how(rows[which])
    write_samples(folder, rows)


def by_filter(folder: Path, settings: Accuracy = SETTINGS) -> dict[str | None, Measurement]:
    found = {measurement.filter: measurement for measurement in parse(folder, settings)}
    assert {measurement.metric for measurement in found.values()} == {"exact_match"}
    return found


def assert_strict_invalid(folder: Path, told: str, flexible: float | None = 1.0) -> None:
    """strict-match has no value, and why; flexible-extract, which is judged by itself, is as given."""
    found = by_filter(folder)
    assert found[STRICT].value is None
    assert told in (found[STRICT].invalid_because or "")
    assert found[FLEXIBLE].value == flexible


def assert_nothing(folder: Path, told: str, settings: Accuracy = SETTINGS) -> None:
    found = by_filter(folder, settings)
    assert found
    for measurement in found.values():
        assert measurement.value is None
        assert told in (measurement.invalid_because or "")


def test_the_captured_files_give_a_score_for_each_filter() -> None:
    found = parse(CAPTURED, SETTINGS)
    assert [(each.metric, each.filter, each.value, each.unit, each.sample_count) for each in found] == [
        ("exact_match", STRICT, 1.0, "fraction", 4),
        ("exact_match", FLEXIBLE, 1.0, "fraction", 4),
    ]
    for measurement in found:
        assert measurement.interval is not None
        assert measurement.interval.lower == pytest.approx(LOWER_OF_4_OF_4, abs=1e-6)
        assert measurement.interval.upper == 1.0
        assert measurement.invalid_because is None
        assert measurement.source == f"accuracy/{RESULTS}"


def test_each_filter_has_its_own_score(folder: Path) -> None:
    change_sample(folder, lambda row: row.update(exact_match=0.0))
    change_results(folder, lambda results: results["results"]["gsm8k"].update({f"exact_match,{STRICT}": 0.75}))
    found = by_filter(folder)
    assert (found[STRICT].value, found[FLEXIBLE].value) == (0.75, 1.0)
    # Wilson's bounds of 3 of 4 at 90 %: z = 1.6448536
    interval = found[STRICT].interval
    assert interval is not None
    assert interval.lower == pytest.approx(0.356167, abs=1e-5)
    assert interval.upper == pytest.approx(0.942093, abs=1e-5)


@pytest.mark.parametrize("reply", ["41\u2028dollars", "\u0085 41", "\u2029", "a\x0b\x0c\x1c b", "42\r\n", '"{', "é😀"])
def test_any_character_in_a_reply_leaves_the_score(folder: Path, reply: str) -> None:
    change_sample(folder, lambda row: row.update(resps=[[f"It is {reply}."]]))
    assert by_filter(folder)[STRICT].value == 1.0


@pytest.mark.parametrize("name", [RESULTS, SAMPLES])
def test_a_missing_file_is_invalid(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert_nothing(folder, f"0 files {name.split('_')[0]}")


def test_a_missing_folder_is_invalid(tmp_path: Path) -> None:
    assert_nothing(tmp_path / "accuracy", "0 files results*.json where one was expected")


@pytest.mark.parametrize("name", [RESULTS, SAMPLES])
def test_two_files_where_one_is_expected_are_invalid(folder: Path, name: str) -> None:
    shutil.copy(folder / name, folder / name.replace("11-13-16", "11-14-02"))
    assert_nothing(folder, "2 files")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_cut_result_file_is_invalid(folder: Path, share: float) -> None:
    text = (folder / RESULTS).read_text()
    (folder / RESULTS).write_text(text[: int(len(text) * share)])
    assert_nothing(folder, "JSONDecodeError")


def test_an_empty_file_of_samples_is_invalid(folder: Path) -> None:
    (folder / SAMPLES).write_text("")
    assert_nothing(folder, "0 samples of 4 questions")


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_a_cut_file_of_samples_is_invalid(folder: Path, share: float) -> None:
    text = (folder / SAMPLES).read_text()
    (folder / SAMPLES).write_text(text[: int(len(text) * share)])
    assert_nothing(folder, "JSONDecodeError")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (lambda results: results["results"].clear(), "KeyError('gsm8k')"),
        (lambda results: results.pop("results"), "KeyError('results')"),
        (lambda results: results.pop("n-samples"), "KeyError('n-samples')"),
        (lambda results: results["n-samples"].clear(), "KeyError('gsm8k')"),
        (lambda results: results["results"].update(gsm8k={}), "no known metric"),
        (lambda results: results["results"].update(gsm8k={"bleu,none": 0.5}), "no known metric among ['bleu,none']"),
        (lambda results: results["results"].update(gsm8k=None), "TypeError"),
    ],
    ids=["no task", "no results", "no counts", "no count", "no metric", "another metric", "null"],
)
def test_results_without_the_task_are_invalid(folder: Path, how: Change, told: str) -> None:
    change_results(folder, how)
    assert_nothing(folder, told)


def test_the_results_of_another_task_are_invalid(folder: Path) -> None:
    assert_nothing(folder, "0 files samples_gsm8k_cot*.jsonl", Accuracy(task="gsm8k_cot", num_questions=4))


@pytest.mark.parametrize("wanted", [3, 5, 500])
def test_another_number_of_questions_than_asked_is_invalid(wanted: int) -> None:
    settings = Accuracy(num_fewshot=1, num_questions=wanted)
    assert_nothing(CAPTURED, f"4 samples of {wanted} questions (lm-eval counts 4)", settings)


def test_a_question_without_its_sample_makes_its_filter_invalid(folder: Path) -> None:
    write_samples(folder, read_samples(folder)[1:])
    assert_strict_invalid(folder, "3 samples of 4 questions (lm-eval counts 4)")
    assert by_filter(folder)[STRICT].sample_count == 3


def test_a_question_counted_twice_makes_its_filter_invalid(folder: Path) -> None:
    change_sample(folder, lambda row: row.update(doc_id=1))
    assert_strict_invalid(folder, "4 samples of 4 questions")


def test_a_sample_too_many_makes_its_filter_invalid(folder: Path) -> None:
    rows = read_samples(folder)
    write_samples(folder, [*rows, rows[0]])
    assert_strict_invalid(folder, "5 samples of 4 questions")


@pytest.mark.parametrize("told", [3, 0, None, "4", 5])
def test_another_effective_count_is_invalid(folder: Path, told: Any) -> None:
    change_results(folder, lambda results: results["n-samples"]["gsm8k"].update(effective=told))
    assert_nothing(folder, f"4 samples of 4 questions (lm-eval counts {told})")


def test_a_filter_without_samples_is_invalid(folder: Path) -> None:
    write_samples(folder, [row for row in read_samples(folder) if row["filter"] != STRICT])
    assert_strict_invalid(folder, "0 samples of 4 questions")


def test_a_filter_without_a_score_has_no_measurement(folder: Path) -> None:
    change_results(folder, lambda results: results["results"]["gsm8k"].pop(f"exact_match,{STRICT}"))
    assert list(by_filter(folder)) == [FLEXIBLE]


@pytest.mark.parametrize("reply", ["", " \n", None])
def test_an_empty_reply_makes_its_filter_invalid(folder: Path, reply: str | None) -> None:
    change_sample(folder, lambda row: row.update(resps=[[reply]]))
    assert_strict_invalid(folder, "1 of 4 replies are empty")


def test_empty_replies_are_invalid_and_not_wrong_answers(folder: Path) -> None:
    rows = [row | {"resps": [[""]], "exact_match": 0.0} for row in read_samples(folder)]
    write_samples(folder, rows)
    change_results(
        folder, lambda results: results["results"]["gsm8k"].update({f"exact_match,{name}": 0.0 for name in (STRICT, FLEXIBLE)})
    )
    assert_nothing(folder, "4 of 4 replies are empty")


@pytest.mark.parametrize("score", [0.75, 0.0, 2.0, -1.0, float("nan"), float("inf"), True + 1e-3])
def test_a_score_that_contradicts_its_samples_is_invalid(folder: Path, score: float) -> None:
    change_results(folder, lambda results: results["results"]["gsm8k"].update({f"exact_match,{STRICT}": score}))
    assert_strict_invalid(folder, f"lm-eval's score {score} is not its samples' 1.0")


@pytest.mark.parametrize("score", [None, "N/A", [], 10**400])
def test_a_score_that_is_no_number_is_invalid(folder: Path, score: Any) -> None:
    change_results(folder, lambda results: results["results"]["gsm8k"].update({f"exact_match,{STRICT}": score}))
    assert_nothing(folder, "lm-eval left no usable result")


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 0.5, 2.0, -1.0])
@pytest.mark.parametrize("told", ["the same", 1.0, float("nan")])
def test_a_sample_that_is_neither_right_nor_wrong_makes_its_filter_invalid(folder: Path, score: float, told: Any) -> None:
    mean = (score + 3) / 4 if told == "the same" else told
    change_sample(folder, lambda row: row.update(exact_match=score))
    change_results(folder, lambda results: results["results"]["gsm8k"].update({f"exact_match,{STRICT}": mean}))
    assert_strict_invalid(folder, "a sample's score is neither 0 nor 1")


def test_scores_that_only_sum_up_to_the_told_one_are_invalid(folder: Path) -> None:
    rows = read_samples(folder)
    rows[0]["exact_match"], rows[1]["exact_match"] = 2.0, 0.0
    write_samples(folder, rows)
    assert_strict_invalid(folder, "neither 0 nor 1")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (lambda row: row.pop("exact_match"), "KeyError('exact_match')"),
        (lambda row: row.update(exact_match=None), "TypeError"),
        (lambda row: row.pop("resps"), "KeyError('resps')"),
        (lambda row: row.update(resps=[]), "IndexError"),
        (lambda row: row.update(resps=[[]]), "IndexError"),
        (lambda row: row.pop("filter"), "KeyError('filter')"),
        (lambda row: row.pop("doc_id"), "KeyError('doc_id')"),
    ],
)
def test_a_sample_without_what_is_read_is_invalid(folder: Path, how: Change, told: str) -> None:
    change_sample(folder, how)
    assert_nothing(folder, told)


def test_the_command_keeps_samples_and_needs_no_tokenizer(tmp_path: Path) -> None:
    settings = Accuracy(num_fewshot=5, num_questions=1319, num_concurrent=64, max_gen_toks=256, seed=7)
    command = command_of(SERVER, settings, tmp_path, local=False)
    assert command[:4] == [sys.executable, "-m", "lm_eval", "run"]
    found = options(command)
    assert found["--model"] == "local-completions"
    assert dict(pair.split("=", 1) for pair in found["--model_args"].split(",")) == {
        "model": "reference",
        "base_url": "http://127.0.0.1:8123/v1/completions",
        "num_concurrent": "64",
        "max_gen_toks": "256",
        "tokenizer_backend": "None",
        "tokenized_requests": "False",
    }
    assert found["--tasks"] == "gsm8k"
    assert found["--num_fewshot"] == "5"
    assert found["--seed"] == "7"
    assert found["--output_path"] == str(tmp_path / "results.json")
    assert "--log_samples" in found
    assert "--include_path" not in found
    # `--limit` would score fewer questions than the task has; their number is checked in what comes back.
    assert "--limit" not in found


def test_local_questions_come_from_a_task_of_the_evidence_folder(tmp_path: Path) -> None:
    assert options(command_of(SERVER, SETTINGS, tmp_path, local=True))["--include_path"] == str(tmp_path / "tasks")


def test_no_secret_is_in_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "shhhhhhhh")
    assert "shhhhhhhh" not in " ".join(command_of(SERVER, SETTINGS, tmp_path, local=True))
