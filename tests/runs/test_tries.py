"""How often a release was tried in its cell: counted in the store, told to all who decide, and dearer each time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.approval.builder import CELL, Change, publish_report, with_gate
from tests.builders.changed import changed
from tests.report.builder import passed_report
from vllm_qualify.engine.server import MODEL, Part
from vllm_qualify.plan.cell import CellPlan, EarlierTry
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.layout import prepare
from vllm_qualify.recipe.gates import Verdict
from vllm_qualify.report.model import Report
from vllm_qualify.runs.tries import departures_of_tries, with_tries

RUNS = [f"20260314T0926{second}Z-5f3d19" for second in range(53, 60)]


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = DirectoryStore(tmp_path / "store")
    prepare(store)
    return store


def publish(store: DirectoryStore, tmp_path: Path, *changes: Change) -> None:
    for run_id, change in zip(RUNS, changes, strict=False):
        publish_report(store, tmp_path / "runs", run_id, change)


def of(part: str, **changes: object) -> Change:
    return lambda report: changed(report, part, **changes)


OTHER_ENGINE = of("plan.cell.release.engine", digest=f"sha256:{'7' * 64}")


def tried(store: DirectoryStore, plan: CellPlan | None = None) -> CellPlan:
    return with_tries(plan or passed_report().plan, store, lambda _: None)


def test_earlier_runs_of_the_release_are_reported_oldest_first(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, tmp_path, with_gate("fail"), with_gate("inconclusive"), with_gate("pass"))
    verdicts = [(each.run_id, each.verdict) for each in tried(store).tries]
    assert verdicts == [(RUNS[0], "fail"), (RUNS[1], "inconclusive"), (RUNS[2], "pass")]


def test_what_is_no_try_of_the_release_is_not_counted(store: DirectoryStore, tmp_path: Path) -> None:
    """Nothing; another engine; a run that becomes a baseline; a run that is judged again."""
    assert tried(store).tries == []
    publish(store, tmp_path, OTHER_ENGINE, of("plan", establishes=True), of("", rejudged_from=RUNS[0]))
    assert tried(store).tries == []


def test_a_release_under_another_name_is_the_same_and_new_baselines_have_none(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, tmp_path, with_gate("fail"))
    renamed = changed(passed_report().plan, "cell.release", model="a-copy/of-the-model")
    assert [earlier.run_id for earlier in tried(store, renamed).tries] == RUNS[:1]
    assert tried(store, changed(passed_report().plan, establishes=True)).tries == []


FILES = {"config.json": "1" * 64, "model.safetensors": "2" * 64, "tokenizer.json": "3" * 64}
ADDED = [("README.md", True), ("LICENSE", True), (".gitattributes", True), ("images/plot.png", True), ("notes.json", True)]
ADDED += [("model-00002.safetensors", False), ("chat_template.jinja", False), ("modeling.py", False)]
ADDED += [("vocab.txt", False), ("1_Pooling/config.json", False)]


def in_folder(files: dict[str, str], revision: str) -> Change:
    return of("plan.cell.release", files=files, revision=f"sha256:{revision * 64}")


def of_the_hub(files: dict[str, str], revision: str) -> Change:
    def change(report: Report) -> Report:
        model = Part(option=MODEL, name="a-team/model", revision=revision * 40, files=files)
        named = changed(report, "plan.cell.release", revision=revision * 40, files={})
        return changed(named, "plan.server", parts=[model])

    return change


@pytest.mark.parametrize("keep", [in_folder, of_the_hub])
@pytest.mark.parametrize(("added", "is_same"), ADDED)
def test_a_file_that_no_engine_reads_begins_no_new_count(
    store: DirectoryStore, tmp_path: Path, keep: Callable[[dict[str, str], str], Change], added: str, is_same: bool
) -> None:
    publish(store, tmp_path, lambda report: keep(FILES, "1")(with_gate("fail")(report)))
    now = keep(FILES | {added: "4" * 64}, "2")(passed_report()).plan
    assert [earlier.run_id for earlier in tried(store, now).tries] == (RUNS[:1] if is_same else [])


@pytest.mark.parametrize("name", FILES)
def test_another_file_that_engines_read_is_another_release(store: DirectoryStore, tmp_path: Path, name: str) -> None:
    publish(store, tmp_path, lambda report: in_folder(FILES, "1")(with_gate("fail")(report)))
    now = in_folder(FILES | {name: "4" * 64}, "2")(passed_report()).plan
    assert tried(store, now).tries == []


def test_whoever_qualifies_again_is_reported(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, tmp_path, with_gate("fail"), with_gate("fail"))
    said: list[str] = []
    with_tries(passed_report().plan, store, said.append)
    assert said == [f"{CELL}: this release did not pass 2 times, so its gates pass less easily"]


def counting(*run_ids: str) -> Change:
    return of("plan", tries=[EarlierTry(run_id=run_id, verdict="fail") for run_id in run_ids])


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ([], []),
        ([with_gate("fail"), with_gate("inconclusive")], RUNS[:2]),
        ([with_gate("fail"), counting(RUNS[0]), with_gate("inconclusive")], RUNS[2:3]),
        ([with_gate("fail"), with_gate("pass"), with_gate("inconclusive")], [RUNS[0], RUNS[2]]),
        ([with_gate("fail"), counting(RUNS[0])], []),
        ([with_gate("invalid")], []),
        ([OTHER_ENGINE, of("plan", establishes=True)], []),
    ],
)
def test_what_a_plan_does_not_count_is_known_by_the_manifests(
    changes: list[Change], left_out: list[str], store: DirectoryStore, tmp_path: Path
) -> None:
    publish(store, tmp_path, *changes)
    counts_none = publish_report(store, tmp_path / "runs", RUNS[len(changes)])
    said = [f"does not count {', '.join(left_out)}, in which its release did not pass"] if left_out else []
    assert [*departures_of_tries(counts_none, store, signed)] == said
    counted = [EarlierTry(run_id=run_id, verdict="fail") for run_id in left_out]
    counts_all = publish_report(store, tmp_path / "runs", RUNS[len(changes) + 1], of("plan", tries=counted))
    assert [*departures_of_tries(counts_all, store, signed)] == []


def test_a_pass_that_nobody_approved_counts_no_tries_for_others(store: DirectoryStore, tmp_path: Path) -> None:
    """Its report may be made up. An approved one was judged by its evidence."""
    publish(store, tmp_path, with_gate("fail"), counting(RUNS[0]))
    last = publish_report(store, tmp_path / "runs", RUNS[2])
    assert [*departures_of_tries(last, store, signed)] == []
    said = [f"does not count {RUNS[0]}, in which its release did not pass"]
    assert [*departures_of_tries(last, store, lambda _: False)] == said


def signed(_: str) -> bool:
    return True


def test_a_run_with_a_larger_number_counts_too(store: DirectoryStore, tmp_path: Path) -> None:
    """Whoever publishes a run can give it the number of another one, or draw a number first and use it later."""
    first = publish_report(store, tmp_path / "runs", RUNS[0])
    publish_report(store, tmp_path / "runs", RUNS[1], with_gate("fail"))
    assert [*departures_of_tries(first, store, signed)] == [f"does not count {RUNS[1]}, in which its release did not pass"]


@pytest.mark.parametrize(
    ("verdicts", "unpassed"),
    [
        ([], 0),
        (["pass"], 0),
        (["fail"], 1),
        (["inconclusive", "fail"], 2),
        (["fail", "pass"], 0),
        (["fail", "pass", "inconclusive"], 1),
        # An invalid run decided nothing. It does not hide the tries before it either.
        (["invalid"], 0),
        (["fail", "invalid", "fail"], 2),
        (["pass", "fail", "invalid"], 1),
    ],
)
def test_tries_count_since_the_release_last_passed(verdicts: list[Verdict], unpassed: int) -> None:
    tries = [EarlierTry(run_id=run_id, verdict=verdict) for run_id, verdict in zip(RUNS, verdicts, strict=False)]
    assert changed(passed_report().plan, tries=tries).unpassed == unpassed
