"""What the store's approved runs show of how much starts differ: by GPU type and metric, and of no other runs."""

import math
from pathlib import Path
from statistics import variance

import pytest

from tests.approval.builder import CELL, Change, approved, made_key, of_variant, publish_report
from tests.builders.changed import changed
from tests.report.builder import passed_report
from vllm_qualify.approval.actions import revoke
from vllm_qualify.approval.pointer import revocation
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.judge.start_means import StartMeans, between_starts
from vllm_qualify.plan.cell import BetweenStarts
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.layout import prepare
from vllm_qualify.publish.store import checked_now
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.report.model import Report
from vllm_qualify.runs.known_starts import MOST_RUNS, between_by_pointers, with_between

RUNS = [f"20260314T0926{second}Z-5f3d19" for second in range(10, 60)]
RATE = "output_throughput_tok_s"
GATE = gate_of(metric=RATE, max_worsening=0.05, unit="fraction")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = DirectoryStore(tmp_path / "store")
    prepare(store)
    return store


@pytest.fixture
def key(tmp_path: Path) -> PrivateKey:
    return made_key(tmp_path / "key")


def started(*slower: float) -> Change:
    """Further starts of the server, each so many times as slow as the first."""

    def change(report: Report) -> Report:
        (load,) = (stage for stage in report.stages if stage.stage == "load")
        (first,) = (row for row in load.measurements if row.metric == RATE)
        rows = [
            changed(first, start=number, repeats=[repeat / times for repeat in first.repeats])
            for number, times in enumerate(slower, start=2)
        ]
        stage = changed(load, stage="starts", measurements=rows)
        report = changed(report, "plan", gates=[*report.plan.gates, GATE], starts=3)
        gates = report.judgement.gates
        report = changed(report, "judgement", gates=[*gates, changed(gates[0], gate=GATE)])
        return changed(report, stages=[*report.stages, stage])

    return change


def publish(store: DirectoryStore, tmp_path: Path, key: PrivateKey, number: int, change: Change) -> PublishedRun:
    run = publish_report(store, tmp_path / "runs", RUNS[number], change)
    approved(store, run, key)
    return run


def known(store: DirectoryStore, **changes: object) -> list[BetweenStarts]:
    plan = changed(started(1.0)(passed_report()).plan, **changes)
    return with_between(plan, store, lambda _: None).between


def noise_of(report: Report) -> float:
    """The variance that the repeats of one start give its mean logarithm."""
    (first,) = (row for row in report.measurements if row.metric == RATE and row.start is None)
    logs = [math.log(repeat) for repeat in first.repeats]
    return variance(logs) / len(logs)


def test_starts_of_an_approved_run_are_known_and_told(store: DirectoryStore, tmp_path: Path, key: PrivateKey) -> None:
    publish(store, tmp_path, key, 0, started(1.02, 1.04))
    (between,) = known(store)
    logs = [0.0, math.log(1.02), math.log(1.04)]
    assert between.label == RATE
    assert between.variance == pytest.approx(variance(logs))
    assert between.noise == pytest.approx(noise_of(passed_report()))
    assert (between.freedom, between.runs) == (2.0, [RUNS[0]])
    said: list[str] = []
    with_between(started(1.0)(passed_report()).plan, store, said.append)
    assert said == [f"{CELL}: {RATE} from start to start is known from 1 approved run"]


def test_runs_of_one_release_in_a_cell_are_days_of_one_build(store: DirectoryStore, tmp_path: Path, key: PrivateKey) -> None:
    publish(store, tmp_path, key, 0, started(1.02))
    publish(store, tmp_path, key, 1, started(1.10))
    starts, days = known(store)
    logs = [math.log(1.02), math.log(1.10)]
    assert (starts.of, starts.freedom) == ("start", 2.0)
    assert starts.variance == pytest.approx((logs[0] ** 2 / 2 + logs[1] ** 2 / 2) / 2)
    assert (days.of, days.freedom, days.runs) == ("day", 1.0, RUNS[:2])
    assert days.variance == pytest.approx(variance(log / 2 for log in logs))
    assert days.noise == pytest.approx(starts.noise / 2)


def test_cells_of_a_gpu_type_are_pooled_around_their_own_means(store: DirectoryStore, tmp_path: Path, key: PrivateKey) -> None:
    publish(store, tmp_path, key, 0, started(1.02))
    publish(store, tmp_path, key, 1, lambda report: of_variant("other")(started(1.10)(report)))
    (between,) = known(store)
    assert between.freedom == 2.0
    assert between.variance == pytest.approx((math.log(1.02) ** 2 / 2 + math.log(1.10) ** 2 / 2) / 2)
    assert sorted(between.runs) == RUNS[:2]


def test_what_was_not_approved_or_was_revoked_shows_nothing(store: DirectoryStore, tmp_path: Path, key: PrivateKey) -> None:
    publish_report(store, tmp_path / "runs", RUNS[0], started(1.02))
    assert known(store) == []
    run = publish(store, tmp_path, key, 1, started(1.02))
    assert known(store) != []
    revoke(store, run.cell, run.run_id, revocation("Ada", "it was too slow", checked_now(store)))
    assert known(store) == []


def test_another_gpu_type_or_metric_tells_nothing(store: DirectoryStore, tmp_path: Path, key: PrivateKey) -> None:
    publish(store, tmp_path, key, 0, started(1.02))
    plan = passed_report().plan
    assert known(store, cell=changed(plan.cell, gpu_type="b200")) == []
    assert known(store, gates=[gate_of(metric="ttft_p50_ms", max_worsening=0.05, unit="fraction")]) == []
    assert known(store, gates=plan.gates) == []
    assert known(store, establishes=True) == []


@pytest.mark.parametrize("other", [{"recipe": "another"}, {"profile": "latency"}])
def test_cells_of_another_recipe_or_profile_tell_nothing(
    other: dict[str, str], store: DirectoryStore, tmp_path: Path, key: PrivateKey
) -> None:
    """Other models and other loads: their starts may be far quieter."""
    publish(store, tmp_path, key, 0, started(1.02))
    assert known(store) != []
    assert known(store, cell=changed(passed_report().plan.cell, **other)) == []


def test_pairs_in_turns_are_known_apart_from_starts_of_one_build() -> None:
    """By hand: two runs with pairs of two starts, .1 and .3 apart: variances .005 and .045."""
    builds = {
        name: [
            StartMeans(label="m", of="pair", means=[0.0, apart], noises=[0.0, 0.0]),
            StartMeans(label="m", means=[5.0], noises=[0.0]),
        ]
        for name, apart in (("one", 0.1), ("two", 0.3))
    }
    (pairs,) = between_starts("m", builds, ["one", "two"])
    assert (pairs.of, pairs.freedom) == ("pair", 2.0)
    assert pairs.variance == pytest.approx(0.025)


def test_one_start_of_each_build_tells_nothing(store: DirectoryStore, tmp_path: Path, key: PrivateKey) -> None:
    publish(store, tmp_path, key, 0, started())
    assert known(store) == []


def test_only_the_newest_runs_of_a_cell_are_read(store: DirectoryStore, tmp_path: Path, key: PrivateKey) -> None:
    for number in range(MOST_RUNS + 2):
        publish(store, tmp_path, key, number, started(1.02))
    between, _ = known(store)
    assert between.runs == RUNS[2 : MOST_RUNS + 2]


def test_the_approver_finds_the_same_without_the_index(store: DirectoryStore, tmp_path: Path, key: PrivateKey) -> None:
    publish(store, tmp_path, key, 0, started(1.02))
    run = publish_report(store, tmp_path / "runs", RUNS[1], started(1.02))
    assert between_by_pointers(run, store) == known(store)
    (tmp_path / "store" / "index.json").unlink()
    assert between_by_pointers(run, store) != []
    assert known(store) == []


def test_the_variance_is_that_of_starts_around_their_builds_mean() -> None:
    builds = {
        "one": [StartMeans(label="m", means=[1.0, 3.0], noises=[0.5, 0.7])],
        "two": [
            StartMeans(label="m", means=[10.0], noises=[0.1]),
            StartMeans(label="m", means=[13.0, 16.0], noises=[0.2, 0.3]),
        ],
        "alone": [
            StartMeans(label="m", means=[99.0], noises=[9.0]),
            StartMeans(label="n", means=[1.0, 2.0], noises=[0.0, 0.0]),
        ],
    }
    starts, days = between_starts("m", builds, ["a"])
    assert (starts.freedom, days.freedom) == (2.0, 1.0)
    assert starts.variance == pytest.approx(((1 + 1) + (1.5**2 + 1.5**2)) / 2)
    assert starts.noise == pytest.approx((0.6 + 0.25) / 2)
    # Of the two runs of one build, with the means 10 and 14.5.
    assert days.variance == pytest.approx(2 * 2.25**2)
    assert days.noise == pytest.approx((0.1 + 0.25 / 2) / 2)
    assert between_starts("n", {"one": builds["one"]}, ["a"]) == []


@pytest.mark.parametrize(
    "spoiled",
    [
        {"label": "m", "means": [1.0], "noises": [0.1, 0.1]},
        {"label": "m", "means": [], "noises": []},
        {"label": "m", "means": [1.0, 2.0], "noises": [0.1, 0.1], "repeats": [3]},
        {"label": "m", "means": [1.0], "noises": [0.1], "repeats": [0]},
        {"label": "m", "means": [float("nan")], "noises": [0.1]},
        {"label": "m", "means": [1.0], "noises": [-0.1]},
        {"label": "m", "means": [1.0] * 17, "noises": [0.1] * 17},
    ],
)
def test_a_manifest_with_other_means_is_refused(spoiled: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        StartMeans.model_validate(spoiled)
