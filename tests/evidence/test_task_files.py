"""What lm-eval's task files say of a task, read without lm-eval: held against lm-eval's own reading of them."""

import random
from pathlib import Path
from typing import Any

import pytest

from vllm_qualify.evidence.accuracy import task_files
from vllm_qualify.evidence.accuracy.task_files import NoTaskError, TaskFile, UntoldError, describe, known_names, tasks_folder

OWN = """\
task: own
dataset_path: json
output_type: generate_until
metric_list: [{metric: exact_match}, {metric: !function own.same}]
filter_list: [{name: last, filter: [{function: take_first}]}]
num_fewshot: 0
generation_kwargs: {until: [], max_gen_toks: 32}
"""


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("task", "filters", "scores", "generates"),
    [
        ("gsm8k", {"strict-match", "flexible-extract"}, {"exact_match"}, True),
        ("gsm8k_cot", {"strict-match", "flexible-extract"}, {"exact_match"}, True),
        ("hellaswag", {"none"}, {"acc", "acc_norm"}, False),
        # A group of groups of tags, and a group of this project's.
        ("mmlu", {"none"}, {"acc"}, False),
        ("bfcl", {"ast"}, {"acc"}, True),
        # Its folder has another name.
        ("mmmu_val", {"none"}, {"acc"}, True),
        ("aime25", {"none"}, {"exact_match"}, True),
    ],
)
def test_a_task_of_lm_eval_has_its_filters_and_scores(task: str, filters: set[str], scores: set[str], generates: bool) -> None:
    described = describe(task, None)
    assert (set(described.filters), set(described.scores or ()), described.generates) == (filters, scores, generates)


@pytest.mark.parametrize("task", ["gsm8kk", "main", "exact_match", "gsm8k-cot", "GSM8K"])
def test_a_name_that_no_file_defines_is_no_task(task: str) -> None:
    with pytest.raises(NoTaskError):
        describe(task, None)


def test_all_names_are_known_for_the_nearest_one() -> None:
    names = set(known_names())
    assert {"gsm8k", "mmlu", "hellaswag", "gsm8k_platinum"} <= names
    assert len(names) > 10_000


@pytest.mark.thorough
def test_what_is_read_is_what_lm_eval_reads() -> None:
    """Of tasks drawn from all of lm-eval's, and of each that the catalog and the presets ask."""
    from lm_eval.tasks import TaskManager

    index = TaskManager().task_index
    plain = sorted(name for name, entry in index.items() if entry.kind.name == "TASK")
    drawn = random.Random(1).sample([name for name in plain if task_files.usual_folder(name)], 150)
    unlike = {name: (told, theirs) for name in drawn if (told := told_of(name)) != (theirs := said_by(index[name].cfg))}
    assert unlike == {}


def told_of(task: str) -> tuple[set[str], set[str] | None]:
    described = describe(task, None)
    return set(described.filters), None if described.scores is None else set(described.scores)


def said_by(config: dict[str, Any]) -> tuple[set[str], set[str] | None]:
    metrics = config.get("metric_list")
    named = None if metrics is None else {str(each["metric"]).rpartition("/")[2].rpartition(".")[2] for each in metrics}
    return {each["name"] for each in config.get("filter_list") or [{"name": "none"}]}, named


# --- a recipe's own folder


def test_an_own_task_goes_before_lm_evals(tmp_path: Path) -> None:
    folder = written(tmp_path / "tasks", own=OWN, gsm8k=OWN.replace("task: own", "task: gsm8k"))
    told = TaskFile(("last",), ("exact_match", "same"), generates=True, num_fewshot=0, reply_tok=32)
    assert (describe("own", folder), describe("gsm8k", folder)) == (told, told)
    assert "strict-match" in describe("gsm8k_cot", folder).filters


def test_an_own_file_includes_others(tmp_path: Path) -> None:
    folder = written(tmp_path / "tasks", base=OWN, more="include: base.yaml\ntask: more\nnum_fewshot: 3\n")
    assert describe("more", folder) == describe("own", folder)._replace(num_fewshot=3)
    theirs = tasks_folder() / "gsm8k" / "gsm8k.yaml"
    written(folder, mine=f"include: {theirs}\ntask: mine\n")
    assert describe("mine", folder) == describe("gsm8k", None)


def test_a_group_says_what_its_tasks_have_in_common(tmp_path: Path) -> None:
    other = OWN.replace("task: own", "task: other").replace("num_fewshot: 0", "num_fewshot: 4")
    group = "group: both\ntask: [own, {task: other, num_fewshot: 2}]\n"
    folder = written(tmp_path / "tasks", own=OWN, other=other, both=group)
    assert describe("both", folder) == describe("own", folder)._replace(num_fewshot=None)
    written(folder, both=f"{group}filter_list: [{{name: first, filter: []}}]\n")
    assert describe("both", folder).filters == ("first",)
    written(folder, both="group: both\ntask: [{group: inner, task: [own]}, other]\n")
    assert describe("both", folder).filters == ("last",)


def test_a_tag_says_what_its_tasks_have_in_common(tmp_path: Path) -> None:
    folder = written(tmp_path / "tasks", own=f"{OWN}tag: [kind]\n")
    assert describe("kind", folder) == describe("own", folder)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("task: own\nclass: !function own.Task\n", "a class of Python code"),
        ("group: own\ntask: [gsm8k, hellaswag]\n", "no scores in common"),
        ("group: own\ntask: [nowhere_at_all]\n", "it names nowhere_at_all"),
        ("group: own\ntask: []\n", "names no tasks"),
        ("group: own\ntask: [own]\n", "nested more than 10 deep"),
        ("task: own\nfilter_list: all\n", "in a form that is not known"),
        ("task: own\nmetric_list: [acc]\n", "in a form that is not known"),
        # Their names are nowhere, so that any name may be theirs.
        ("include: own.yaml\ntask: own\n", "includes itself"),
        ("include: /etc/hostname\ntask: own\n", "not in the folder of tasks"),
        ("include: ../own.yaml\ntask: own\n", "not in the folder of tasks"),
        ("task: [", "cannot be read as YAML"),
        ("[" * 5000, "cannot be read as YAML"),
        ("task: own\nx: &x {a: 1}\ny: {<<: *x}\n", "cannot be read as YAML"),
        ("task: own\nx: !!python/object/apply:os.getcwd []\n", "cannot be read as YAML"),
        *((f"task: own\nx: !!{tag} ''\n", "cannot be read as YAML") for tag in ("int", "bool", "float", "timestamp")),
        ('include: "a\\0b"\ntask: own\n', "no path of a file"),
        ("- task: own\n", "no task file"),
        (f"task: own\nx: {'a' * 200_000}\n", "longer than 200,000 bytes"),
    ],
)
def test_what_a_file_leaves_open_is_told_as_unknown(text: str, why: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "tasks", own=text)
    with pytest.raises(UntoldError, match=why):
        describe("own", folder)


def test_a_task_whose_scores_are_codes_says_no_scores(tmp_path: Path) -> None:
    folder = written(tmp_path / "tasks", own=f"{OWN}process_results: !function own.scores\n", plain="task: plain\n")
    assert describe("own", folder).scores is None
    # lm-eval then takes those of the kind of output.
    assert describe("plain", folder) == TaskFile(("none",), None, generates=True, num_fewshot=None, reply_tok=None)


def test_a_folder_that_cannot_be_read_may_have_any_task(tmp_path: Path) -> None:
    with pytest.raises(UntoldError, match="nowhere cannot be read: No such file"):
        describe("gsm8k", tmp_path / "nowhere")


def test_a_folder_of_very_many_files_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_files, "MOST_FILES", 1)
    with pytest.raises(UntoldError, match="tasks has more than 1 task files"):
        describe("own", written(tmp_path / "tasks", own=OWN, other=OWN))
