"""Baselines: which run a cell is compared with, how, and what is brought of it; told before a server is started."""

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.approval.builder import NOW
from tests.fakes.vllm import make_engine
from tests.recipes import Document, reference
from vllm_qualify.approval.actions import reject
from vllm_qualify.approval.decision import ruling
from vllm_qualify.approval.published import read_run
from vllm_qualify.engine.environment import EngineEnvironment, EngineIdentity
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.launch import Engines
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.evidence.measurement import StageEvidence, describe, valid
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.judge.compare import LOAD_STAGE, answers_path
from vllm_qualify.judge.verdict import Judgement
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.plan.cells import plan_cells
from vllm_qualify.plan.choice import Choice, select
from vllm_qualify.publish.bundle import evidence_key
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.metrics import Stage
from vllm_qualify.recipe.recipe import LoadedRecipe, Recipe
from vllm_qualify.report.model import Report, make_report
from vllm_qualify.runs.baseline import Against, bring, check_early, newest_baseline, with_baseline
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.home import home
from vllm_qualify.runs.publishing import publish_run

CPU = Fingerprint(gpu_type="cpu", name="Some CPU", count=2, memory_mib=8192)
H200 = Fingerprint(gpu_type="h200", name="NVIDIA H200", count=2, memory_mib=143_771, driver="580.159.04", devices=[0, 1])
CELL = "reference/bf16/cpu/balanced"
TTFT = {"metric": "ttft_p50_ms", "max_worsening": 0.05, "unit": "fraction"}
HEAD = {
    "task": "gsm8k",
    "task_version": "3.0",
    "config_hash": "c",
    "output_type": "generate_until",
    "lm_eval": "0.4.13",
    "answers": 4,
}
ANSWER = {"doc_hash": "d", "prompt_hash": "p", "target_hash": "t", "scores": {"exact_match,strict-match": 1.0}, "length": 9}
ASKED = [
    ANSWER | {"question": question, "repetition": repetition, "unanswered": False, "traced_to": "r1-b1/samples.jsonl:1"}
    for repetition in (1, 2)
    for question in (0, 1)
]
# Two questions, asked twice.
ANSWERS = "".join(f"{json.dumps(line)}\n" for line in (HEAD, *ASKED)).encode()
BENCH = b'{"completed": 128}\n'
IMAGE = EngineImage(repository="vllm/vllm-openai", tag="v0.31.0", digest=f"sha256:{'1' * 64}", platform="linux/amd64")

Change = Callable[[CellPlan], CellPlan]


@pytest.fixture
def engine(tmp_path: Path) -> EngineEnvironment:
    return EngineEnvironment(python=make_engine(tmp_path / "engine") / "bin" / "python")


@pytest.fixture
def document(tmp_path: Path) -> Document:
    """The reference recipe with weights of the test's own, and a gate on the load against the baseline."""
    document = reference()
    for name in document["variants"]:
        document["variants"][name]["model"] = str(weights(tmp_path / name))
    document["gpu_types"]["cpu"]["profiles"]["balanced"]["gates"].append(TTFT)
    return document


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store((tmp_path / "store").as_uri())
    store.check()
    return store


SCORES = "likelihood/answers.jsonl"
WORDS, THOUGHTS = "r1-b1/samples_gsm8k_2026-11-20.jsonl", "r1-b1/replies.jsonl"


def weights(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"name": folder.name}))
    return folder


def plan_of(document: Document, engine: EngineEnvironment, variant: str | None = None) -> CellPlan:
    loaded = LoadedRecipe(recipe=Recipe.model_validate(document), folder=Path("/recipes"))
    (plan,) = plan_cells(loaded, Choice(variant=variant), Engines(engine=engine), CPU)
    return plan


@pytest.fixture
def then(document: Document, engine: EngineEnvironment) -> CellPlan:
    """The plan of the baseline."""
    return plan_of(document, engine)


@pytest.fixture
def now(then: CellPlan, document: Document, engine: EngineEnvironment, tmp_path: Path) -> CellPlan:
    """The plan of the same cell with other weights."""
    assert then.cell.id == CELL
    document["variants"]["bf16"]["model"] = str(weights(tmp_path / "newer"))
    return plan_of(document, engine)


def planned_in(store: Store, plan: CellPlan, **against: Any) -> tuple[CellPlan, str]:
    """The plan with its baseline, and what was told."""
    messages: list[str] = []
    plan = with_baseline(plan, store, Against(**against), messages.append)
    return plan, "\n".join(messages)


def refused(store: Store, plan: CellPlan, **against: Any) -> CallerError:
    with pytest.raises(CallerError) as raised:
        planned_in(store, plan, **against)
    assert raised.value.place == "--baseline"
    return raised.value


def made(plan: CellPlan, run_id: str, folder: Path, verdict: str = "pass") -> tuple[Report, Run]:
    """A run that ended: its folder with its plan, its evidence and its report."""
    plan = plan.model_copy(update={"run_id": run_id})
    run = Run(folder=folder / run_id)
    for path, body in (
        (answers_path("gsm8k"), ANSWERS),
        ("accuracy/gsm8k/lm-eval.log", b"log\n"),
        (f"accuracy/gsm8k/{WORDS}", b"{}\n"),
        (f"accuracy/gsm8k/{THOUGHTS}", b"{}\n"),
        ("accuracy/gsm8k/r2-b1/replies.jsonl", b"{}\n"),
        ("accuracy/gsm8k/r2-b1/samples_gsm8k_2026-11-20.jsonl", b"{}\n"),
        (SCORES, b"{}\n"),
        ("likelihood/machine.json", b"{}\n"),
        ("load/bench-1.json", BENCH),
    ):
        (run.evidence / path).parent.mkdir(parents=True, exist_ok=True)
        (run.evidence / path).write_bytes(body)
    (run.folder / "plan.json").write_text(plan.model_dump_json(indent=2))
    judgement = Judgement.model_validate({"verdict": verdict, "gates": [], "levels": Levels(), "suite": {}, "validation": {}})
    report = make_report(plan, [stage_of(run, stage) for stage in ("accuracy", "likelihood", "load")], judgement)
    run.save_report(report)
    return report, run


def stage_of(run: Run, stage: Stage) -> StageEvidence:
    files = sorted(path for path in (run.evidence / stage).rglob("*") if path.is_file())
    measured = [valid("ttft_p50_ms", 20.0, "load/bench-*.json", sample_count=128, repeats=[20.0, 20.1])]
    return StageEvidence(
        stage=stage,
        started_at=datetime(2026, 3, 1, 8, tzinfo=UTC),
        duration_s=8.0,
        files=[describe(path, run.evidence) for path in files],
        measurements=measured if stage == "load" else [],
    )


def publish(store: Store, plan: CellPlan, tmp_path: Path, day: int = 1, verdict: str = "pass") -> Report:
    """A run of a day in March in the store, and nowhere in the folder of runs."""
    report, run = made(plan, f"202603{day:02}T080000Z-0a1b2c", tmp_path / "elsewhere", verdict)
    publish_run(report, run, store)
    return report


def established(store: Store, plan: CellPlan, tmp_path: Path, day: int = 1, verdict: str = "pass") -> Report:
    report = publish(store, planned_in(store, plan, establish="always")[0], tmp_path, day, verdict)
    assert report.plan.establishes
    return report


def overwrite(path: Path, body: bytes) -> None:
    """The store's own files are read-only."""
    path.chmod(0o644)
    path.write_bytes(body)


# --- Which run


def test_without_a_gate_against_one_no_baseline_is_looked_for(store: Store, now: CellPlan) -> None:
    plain = now.model_copy(update={"gates": [gate for gate in now.gates if not gate.is_against_baseline]})
    for establish in ("never", "none"):
        assert planned_in(store, plain, establish=establish) == (plain, "")
    plan, message = planned_in(store, plain, establish="always")
    assert plan == plain
    assert message == f"{plain.cell.id} has no gate against a baseline: it is not compared, and does not become one"


def test_a_store_without_a_baseline_is_refused_with_both_remedies(store: Store, now: CellPlan) -> None:
    error = refused(store, now)
    assert error.problem == f"{CELL} has gates against a baseline, and {store.url} has none of {CELL}"
    assert error.remedy == (
        "name a run with --baseline, or let this one become the baseline with --establish-baseline "
        "(of a deployment: against.run and against.establish)"
    )


@pytest.mark.parametrize("establish", ["none", "always"])
def test_the_first_run_can_become_the_baseline(store: Store, now: CellPlan, establish: str) -> None:
    plan, message = planned_in(store, now, establish=establish)
    assert plan.establishes
    assert (plan.baseline, plan.beside) == (None, None)
    assert not any(gate.is_against_baseline for gate in plan.judged)
    # In whole repetitions, as often as the recipe allows.
    assert [(task.sequential, task.repetitions) for task in plan.accuracy] == [(False, 10)]
    assert message.startswith(f"{CELL} becomes a baseline. ")


def test_where_there_is_a_baseline_only_always_makes_another(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path
) -> None:
    report = established(store, then, tmp_path)
    assert planned_in(store, now, establish="always")[0].establishes
    for establish in ("never", "none"):
        plan, message = planned_in(store, now, establish=establish)
        assert plan.baseline is not None
        assert plan.baseline.run_id == report.run_id
        assert [task.sequential for task in plan.accuracy] == [True]
        assert message.startswith(f"{CELL} is compared with run {report.run_id} of {CELL}")


def test_a_plan_has_what_must_be_alike(store: Store, then: CellPlan, now: CellPlan, tmp_path: Path) -> None:
    report = established(store, then, tmp_path)
    baseline = planned_in(store, now)[0].baseline
    assert baseline is not None
    assert (baseline.cell, baseline.fingerprint, baseline.load) == (then.cell, CPU, then.load)
    assert baseline.accuracy == [task.settings for task in report.plan.accuracy]
    assert baseline.client_version == then.client_version


def test_the_newest_approved_baseline_is_taken(store: Store, then: CellPlan, now: CellPlan, tmp_path: Path) -> None:
    """Neither a later candidate that was approved, nor a baseline that was not, nor one that was not published whole."""
    established(store, then, tmp_path, 1)
    wanted = established(store, then, tmp_path, 2)
    publish(store, planned_in(store, now)[0], tmp_path, 3)
    established(store, then, tmp_path, 4, verdict="fail")
    unfinished = established(store, then, tmp_path, 5)
    Path(store.locate(f"{unfinished.prefix}/manifest.json")).unlink()
    newest = newest_baseline(store, CELL)
    assert newest is not None
    assert newest.run_id == wanted.run_id
    assert newest_baseline(store, "reference/bf16/cpu/bal") is None


def test_a_rejected_run_that_is_named_is_refused(store: Store, then: CellPlan, now: CellPlan, tmp_path: Path) -> None:
    report = established(store, then, tmp_path)
    reject(store, read_run(store, CELL, report.run_id), ruling("reject", "Bob", "it forgets"), NOW)
    with pytest.raises(CallerError, match=r"was rejected by Bob on 2026-03-14: it forgets"):
        planned_in(store, now, run=report.run_id)


def test_a_report_that_is_not_its_manifests_is_no_baseline(store: Store, then: CellPlan, now: CellPlan, tmp_path: Path) -> None:
    path = Path(store.locate(f"{established(store, then, tmp_path).prefix}/report.json"))
    overwrite(path, path.read_bytes().replace(b'"num_questions": 500', b'"num_questions": 499'))
    with pytest.raises(StoreError, match="not what its manifest says"):
        planned_in(store, now)


def test_a_run_of_an_older_version_is_no_baseline_and_in_nobodys_way(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path
) -> None:
    older = publish(store, then, tmp_path, 1)
    path = Path(store.locate(f"{older.prefix}/manifest.json"))
    manifest = json.loads(path.read_text())
    del manifest["establishes"]
    overwrite(path, json.dumps(manifest).encode())
    assert planned_in(store, now, establish="none")[0].establishes


def test_another_cell_is_taken_where_the_variant_says_so(
    store: Store, then: CellPlan, document: Document, engine: EngineEnvironment, tmp_path: Path
) -> None:
    regressed = plan_of(document, engine, "regressed")
    assert (regressed.cell.id, regressed.baseline_cell) == ("reference/regressed/cpu/balanced", CELL)
    assert refused(store, regressed).problem.endswith(f"has none of {CELL}")
    report = established(store, then, tmp_path)
    baseline = planned_in(store, regressed)[0].baseline
    assert baseline is not None
    assert (baseline.run_id, baseline.cell.variant) == (report.run_id, "bf16")


def test_an_older_run_of_the_store_can_be_named(store: Store, then: CellPlan, now: CellPlan, tmp_path: Path) -> None:
    older = established(store, then, tmp_path, 1)
    established(store, then, tmp_path, 2)
    baseline = planned_in(store, now, run=older.run_id)[0].baseline
    assert baseline is not None
    assert baseline.run_id == older.run_id


@pytest.mark.parametrize("by_folder", [True, False])
def test_a_run_that_is_only_here_can_be_named(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path, by_folder: bool
) -> None:
    folder = tmp_path / "kept" if by_folder else home() / "runs"
    report, run = made(planned_in(store, then, establish="always")[0], "20260301T080000Z-0a1b2c", folder)
    baseline = planned_in(store, now, run=str(run.folder) if by_folder else run.id)[0].baseline
    assert baseline is not None
    assert baseline.run_id == report.run_id


@pytest.mark.parametrize(
    ("verdict", "establishes", "message"), [("fail", True, "did not pass"), ("pass", False, "is not a baseline")]
)
@pytest.mark.parametrize("here", [True, False])
def test_a_named_run_must_be_an_approved_baseline(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path, verdict: str, establishes: bool, message: str, here: bool
) -> None:
    established(store, then, tmp_path, 1)
    plan, _ = planned_in(store, then, establish="always" if establishes else "never")
    if here:
        report, _ = made(plan, "20260302T080000Z-0a1b2c", home() / "runs", verdict)
    else:
        report = publish(store, plan, tmp_path, 2, verdict)
    error = refused(store, now, run=report.run_id)
    assert error.problem == f"run {report.run_id} {message}"
    assert "--establish-baseline" in error.remedy


def test_a_named_run_that_is_nowhere_is_reported(store: Store, now: CellPlan) -> None:
    assert "no whole run '20200101T000000Z-000000'" in refused(store, now, run="20200101T000000Z-000000").problem


def test_what_is_missing_is_reported_before_an_engine_is_known(
    store: Store, then: CellPlan, document: Document, tmp_path: Path
) -> None:
    """Of any variant, by the cell that it is compared with."""
    loaded = LoadedRecipe(recipe=Recipe.model_validate(document), folder=Path("/recipes"))
    chosen = [select(loaded, Choice(variant=name), CPU) for name in ("bf16", "regressed")]

    def check(**against: Any) -> None:
        for selection in chosen:
            check_early(selection, loaded.recipe, store, Against(**against))

    for selection in chosen:
        with pytest.raises(CallerError, match=f"has none of {CELL}"):
            check_early(selection, loaded.recipe, store, Against())
    for establish in ("none", "always"):
        check(establish=establish)
    with pytest.raises(CallerError, match="no whole run"):
        check(run="20200101T000000Z-000000")
    report = established(store, then, tmp_path)
    check()
    check(run=report.run_id)


# --- In turns, or with its load as it was


@pytest.fixture
def baseline(store: Store, then: CellPlan, tmp_path: Path) -> Report:
    return established(store, then, tmp_path)


def not_in_turns(store: Store, plan: CellPlan, **against: Any) -> str:
    """Why not, as the caller is told."""
    planned, message = planned_in(store, plan, **against)
    assert planned.baseline is not None
    assert planned.beside is None
    return message.partition(", its load as it was then (")[2].removesuffix(")")


def test_other_weights_that_are_here_are_served_beside(store: Store, then: CellPlan, now: CellPlan, baseline: Report) -> None:
    plan, message = planned_in(store, now)
    assert baseline.plan.server == then.server
    assert plan.beside == then.server
    assert plan.server == now.server
    assert message.endswith(", its load in turns")
    assert CellPlan.model_validate_json(plan.model_dump_json()) == plan


def test_the_same_release_is_not_measured_beside_itself(store: Store, then: CellPlan, baseline: Report) -> None:
    assert baseline.passed
    assert not_in_turns(store, then) == "it is the same release with the same server"


@pytest.mark.parametrize(
    ("key", "value", "change"),
    [
        ("arguments", {"middleware": ["evil.Thing"]}, "it runs code that this recipe does not: server.middleware"),
        ("environment", {"NCCL_NET_PLUGIN": "evil"}, "it runs code that this recipe does not: environment.NCCL_NET_PLUGIN"),
        ("environment", {"HF_ENDPOINT": "http"}, "it has variables that no recipe may set: HF_ENDPOINT"),
    ],
)
def test_a_baseline_that_runs_other_code_is_not_served_beside(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path, key: str, value: dict[str, Any], change: str
) -> None:
    """Its plan comes from the store, and nobody allowed it here."""
    hostile = then.model_copy(update={"server": then.server.model_copy(update={key: value})})
    established(store, hostile, tmp_path)
    assert not_in_turns(store, now).startswith(change)


@pytest.mark.parametrize(
    ("key", "value"), [("arguments", {"max-num-seqs": 16}), ("environment", {"VLLM_CPU_KVCACHE_SPACE": "2"})]
)
def test_the_same_release_with_another_server_is_measured_beside_it(
    store: Store, then: CellPlan, baseline: Report, key: str, value: dict[str, Any]
) -> None:
    changed = then.model_copy(update={"server": then.server.model_copy(update={key: value})})
    assert planned_in(store, changed)[0].beside == baseline.plan.server


def test_who_wants_no_turns_gets_none(store: Store, now: CellPlan, baseline: Report) -> None:
    assert baseline.passed
    assert not_in_turns(store, now, in_turns=False) == "--no-in-turns"


def test_without_a_gate_on_the_load_nothing_is_served_beside(store: Store, now: CellPlan, baseline: Report) -> None:
    plan = now.model_copy(update={"gates": [gate for gate in now.gates if gate.against != "load"]})
    planned, message = planned_in(store, plan)
    assert planned.beside is None
    assert message == f"{CELL} is compared with run {baseline.run_id} of {CELL}"


@pytest.mark.parametrize("how", ["changed", "more", "gone"])
def test_weights_that_are_not_those_of_then_are_not_served(
    store: Store, then: CellPlan, now: CellPlan, baseline: Report, how: str
) -> None:
    assert baseline.passed
    folder = Path(then.server.model)
    if how == "gone":
        shutil.rmtree(folder)
    else:
        (folder / ("config.json" if how == "changed" else "more.json")).write_text("{}")
    assert not_in_turns(store, now) == "its weights are not here any more"


@pytest.mark.parametrize(
    ("how", "change"), [("changed", "its engine is not here any more"), ("gone", "its engine is not here: the engine's Python")]
)
def test_an_engine_that_is_not_that_of_then_is_not_started(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path, how: str, change: str
) -> None:
    """Each of the two has an environment of its own."""
    python = make_engine(tmp_path / "older") / "bin" / "python"
    server = then.server.model_copy(update={"engine": EngineEnvironment(python=python)})
    report = established(store, then.model_copy(update={"server": server}), tmp_path)
    assert planned_in(store, now)[0].beside == report.plan.server
    if how == "gone":
        python.unlink()
    else:
        python.write_text(python.read_text().replace("0" * 64, "1" * 64))
    assert not_in_turns(store, now).startswith(change)


def of_image(plan: CellPlan) -> CellPlan:
    """As of an image whose vLLM is 0.31.0."""
    identity = EngineIdentity(
        launcher="docker", version="0.31.0", digest=str(IMAGE.digest), python="3.12.1", packages={"vllm": "0.31.0"}
    )
    release = plan.cell.release.model_copy(update={"engine": identity})
    cell = plan.cell.model_copy(update={"release": release})
    return plan.model_copy(update={"cell": cell, "server": plan.server.model_copy(update={"engine": IMAGE})})


def with_client(plan: CellPlan) -> CellPlan:
    """The load client in an image of its own, for both."""
    identity = EngineIdentity(launcher="docker", version="0.32.0", digest="sha256:2", python="3.12.1", packages={})
    return plan.model_copy(update={"client_image": IMAGE, "client": identity})


def test_an_image_is_not_served_beside_a_process(store: Store, then: CellPlan, now: CellPlan, tmp_path: Path) -> None:
    established(store, with_client(of_image(then)), tmp_path)
    assert not_in_turns(store, now.model_copy(update={"client": with_client(now).client})) == "it is launched in another way"


def test_images_with_clients_of_their_own_are_not_measured_in_turns(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path
) -> None:
    established(store, of_image(then), tmp_path)
    newer = now.cell.release.engine.model_copy(update={"launcher": "docker", "version": "0.32.0"})
    release = now.cell.release.model_copy(update={"engine": newer})
    plan = of_image(now).model_copy(update={"cell": now.cell.model_copy(update={"release": release})})
    error = refused(store, plan)
    assert error.problem == (
        "the baseline's load client was vLLM 0.31.0, and this one is 0.32.0, and the two cannot be measured in turns"
        " (each would have the load client of its own image)"
    )
    assert "--client-image" in error.remedy


def test_an_image_is_pulled_by_its_digest_whatever_its_tag_means_by_now(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: list[EngineImage] = []
    identity = of_image(then).cell.release.engine
    monkeypatch.setattr("vllm_qualify.engine.image.pull", lambda image, _: pulled.append(image))
    monkeypatch.setattr(EngineImage, "identity", lambda _: identity)
    established(store, with_client(of_image(then)), tmp_path)
    beside = planned_in(store, with_client(of_image(now)))[0].beside
    assert beside is not None
    assert [beside.engine] == pulled == [IMAGE.model_copy(update={"tag": None})]


def on_gpus(plan: CellPlan, *devices: int) -> CellPlan:
    """Of a server that takes one GPU of a machine with these."""
    machine = H200.model_copy(update={"devices": list(devices), "count": len(devices)})
    server = plan.server.model_copy(update={"gpus": list(devices[:1])})
    return plan.model_copy(update={"fingerprint": machine, "server": server})


def test_the_baseline_gets_gpus_of_its_own(store: Store, then: CellPlan, now: CellPlan, tmp_path: Path) -> None:
    established(store, on_gpus(then, 0), tmp_path)
    plan, _ = planned_in(store, on_gpus(now, 0, 1))
    assert plan.server.gpus == [0]
    assert plan.beside is not None
    assert plan.beside.gpus == [1]
    plan, _ = planned_in(store, on_gpus(now, 2, 5, 7))
    assert plan.beside is not None
    assert (plan.server.gpus, plan.beside.gpus) == ([2], [5])


def test_too_few_gpus_for_both_are_reported(store: Store, then: CellPlan, now: CellPlan, tmp_path: Path) -> None:
    established(store, on_gpus(then, 0), tmp_path)
    assert not_in_turns(store, on_gpus(now, 0)) == "this machine has too few GPUs for both"


def test_a_baseline_of_another_gpu_type_has_no_load_to_compare_with(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path
) -> None:
    report = established(store, on_gpus(then, 0), tmp_path)
    error = refused(store, now, run=report.run_id)
    assert error.problem.startswith("the baseline was measured on NVIDIA H200")
    assert "the two cannot be measured in turns (it is for h200)" in error.problem
    plan = now.model_copy(update={"gates": [gate for gate in now.gates if gate.against != "load"]})
    assert planned_in(store, plan, run=report.run_id)[0].baseline is not None


def changed_load(plan: CellPlan, **changes: object) -> CellPlan:
    return plan.model_copy(update={"load": plan.load.model_copy(update=changes)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_client, "the baseline's load client was vLLM 0.32.0, and this one is 0.32.0+cpu"),
        (
            lambda plan: plan.model_copy(update={"fingerprint": CPU.model_copy(update={"count": 4})}),
            "the baseline was measured on Some CPU · cores: 4 · 8 GiB, and this is Some CPU · cores: 2 · 8 GiB",
        ),
        (lambda plan: changed_load(plan, input_len=256), "the baseline's load was another one"),
        (lambda plan: changed_load(plan, seed=1), "the baseline's load was another one"),
    ],
)
def test_a_load_of_then_that_cannot_be_compared_is_reported_before_anything_starts(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path, change: Change, message: str
) -> None:
    established(store, change(then), tmp_path)
    error = refused(store, now, in_turns=False)
    assert error.problem.startswith(message)
    assert error.problem.endswith("and the two cannot be measured in turns (--no-in-turns)")
    assert "--establish-baseline" in error.remedy
    assert planned_in(store, now)[0].beside is not None


def test_how_often_the_load_is_repeated_may_change(store: Store, then: CellPlan, now: CellPlan, tmp_path: Path) -> None:
    established(store, changed_load(then, repeats=9, min_duration_s=1.0), tmp_path)
    assert not_in_turns(store, now, in_turns=False) == "--no-in-turns"


def asked(plan: CellPlan, **changes: object) -> CellPlan:
    def changed(task: TaskPlan) -> TaskPlan:
        return task.model_copy(update={"settings": task.settings.model_copy(update=changes)})

    return plan.model_copy(update={"accuracy": [changed(task) for task in plan.accuracy]})


@pytest.mark.parametrize(
    ("name", "value"), [("num_questions", 400), ("num_fewshot", 4), ("api", "chat"), ("max_gen_toks", 64), ("seed", 7)]
)
@pytest.mark.parametrize("in_turns", [True, False])
def test_a_task_that_was_asked_in_another_way_is_reported_before_anything_starts(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path, name: str, value: object, in_turns: bool
) -> None:
    established(store, asked(then, **{name: value}), tmp_path)
    error = refused(store, now, in_turns=in_turns)
    assert error.problem.startswith(f"the baseline was asked gsm8k in another way: {name} {value}, now ")
    assert "--establish-baseline" in error.remedy


def test_a_task_that_the_baseline_was_not_asked_is_named(store: Store, then: CellPlan, now: CellPlan, tmp_path: Path) -> None:
    established(store, then.model_copy(update={"accuracy": []}), tmp_path)
    assert refused(store, now).problem == "the baseline was not asked gsm8k"


def test_a_task_without_a_gate_against_the_baseline_may_be_asked_in_another_way(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path
) -> None:
    established(store, asked(then, num_questions=400), tmp_path)
    plan = now.model_copy(update={"gates": [gate for gate in now.gates if gate.against != "answers"]})
    assert planned_in(store, plan)[0].baseline is not None


def test_a_baseline_that_scored_other_texts_is_reported_before_anything_starts(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path
) -> None:
    assert now.likelihood is not None
    established(store, then.model_copy(update={"likelihood": None}), tmp_path)
    assert "the baseline scored no texts" in str(refused(store, now))
    other = now.likelihood.model_copy(update={"texts_sha256": "0" * 64})
    assert "the baseline scored no texts" in str(refused(store, now.model_copy(update={"likelihood": other})))


# --- What is brought


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "evidence" / "baseline"
    folder.mkdir(parents=True)
    return folder


def test_the_report_the_answers_and_the_loads_measurements_are_brought(
    store: Store, now: CellPlan, baseline: Report, folder: Path
) -> None:
    bring(planned_in(store, now)[0], store, folder)
    brought = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert brought == {
        "report.json",
        LOAD_STAGE,
        answers_path("gsm8k"),
        *(f"accuracy/gsm8k/{each}" for each in (WORDS, THOUGHTS)),
        SCORES,
    }
    assert Report.model_validate_json((folder / "report.json").read_bytes()) == baseline
    stage = StageEvidence.model_validate_json((folder / LOAD_STAGE).read_bytes())
    assert stage == next(stage for stage in baseline.stages if stage.stage == "load")
    assert (folder / answers_path("gsm8k")).read_bytes() == ANSWERS


@pytest.mark.usefixtures("baseline")
def test_who_scores_nothing_needs_no_scores(store: Store, now: CellPlan, folder: Path) -> None:
    plan, _ = planned_in(store, now)
    bring(plan.model_copy(update={"likelihood": None}), store, folder)
    assert not (folder / SCORES).exists()


def test_a_run_that_is_only_here_is_brought_from_its_folder(store: Store, then: CellPlan, now: CellPlan, folder: Path) -> None:
    report, run = made(planned_in(store, then, establish="always")[0], "20260301T080000Z-0a1b2c", home() / "runs")
    plan, _ = planned_in(store, now, run=run.id)
    bring(plan, store, folder)
    assert (folder / answers_path("gsm8k")).read_bytes() == ANSWERS
    assert Report.model_validate_json((folder / "report.json").read_bytes()) == report


def test_a_run_that_was_named_by_its_folder_is_brought_from_there(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path, folder: Path
) -> None:
    _, run = made(planned_in(store, then, establish="always")[0], "20260301T080000Z-0a1b2c", tmp_path / "kept")
    plan, _ = planned_in(store, now, run=str(run.folder))
    bring(plan, store, folder)
    assert (folder / answers_path("gsm8k")).read_bytes() == ANSWERS


def test_answers_that_tell_no_noise_are_reported_before_a_server_is_started(
    store: Store, then: CellPlan, now: CellPlan, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = (HEAD | {"answers": 2}, *ASKED[:2])
    monkeypatch.setattr("tests.runs.test_baseline.ANSWERS", "".join(f"{json.dumps(line)}\n" for line in once).encode())
    established(store, then, tmp_path)
    plan, _ = planned_in(store, now)
    with pytest.raises(CallerError, match="asked each question once"):
        bring(plan, store, folder)


def test_a_variant_that_has_another_as_its_baseline_is_none_itself(store: Store, now: CellPlan) -> None:
    other = now.model_copy(update={"baseline_variant": "fp8"})
    with pytest.raises(CallerError, match="cannot be a baseline itself"):
        planned_in(store, other, establish="always")


def test_a_run_that_was_judged_again_is_no_baseline(store: Store, then: CellPlan, now: CellPlan, tmp_path: Path) -> None:
    report = established(store, then, tmp_path)
    again, run = made(report.plan, "20260302T080000Z-0a1b2c", tmp_path / "elsewhere")
    again = again.model_copy(update={"rejudged_from": report.run_id})
    publish_run(again, run, store)
    plan, _ = planned_in(store, now)
    assert plan.baseline is not None
    assert plan.baseline.run_id == report.run_id
    assert "is not a baseline" in str(refused(store, now, run=again.run_id))


def test_a_run_of_another_profile_is_compared_with_none(store: Store, then: CellPlan, now: CellPlan, tmp_path: Path) -> None:
    report = established(store, then, tmp_path)
    latency = now.model_copy(update={"cell": now.cell.model_copy(update={"profile": "latency"})})
    assert "another GPU type or profile" in str(refused(store, latency, run=report.run_id))


def test_changed_evidence_of_the_store_is_not_brought(store: Store, now: CellPlan, baseline: Report, folder: Path) -> None:
    plan, _ = planned_in(store, now)
    file = next(file for file in baseline.files if file.path == answers_path("gsm8k"))
    overwrite(Path(store.locate(evidence_key(file))), ANSWERS + ANSWERS)
    with pytest.raises(StoreError, match="not what its report says"):
        bring(plan, store, folder)


def test_evidence_that_the_store_lost_is_reported(store: Store, now: CellPlan, baseline: Report, folder: Path) -> None:
    plan, _ = planned_in(store, now)
    file = next(file for file in baseline.files if file.path == answers_path("gsm8k"))
    Path(store.locate(evidence_key(file))).unlink()
    with pytest.raises(StoreError, match="no object"):
        bring(plan, store, folder)


def test_changed_evidence_that_is_only_here_is_not_brought(store: Store, then: CellPlan, now: CellPlan, folder: Path) -> None:
    _, run = made(planned_in(store, then, establish="always")[0], "20260301T080000Z-0a1b2c", home() / "runs")
    plan, _ = planned_in(store, now, run=run.id)
    (run.evidence / answers_path("gsm8k")).write_bytes(ANSWERS + ANSWERS)
    with pytest.raises(StoreError, match="not what its report says"):
        bring(plan, store, folder)
