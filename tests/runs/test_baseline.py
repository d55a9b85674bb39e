"""Baselines: which run a cell is compared with, how, and what is brought of it; told before a server is started."""

import json
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.approval.builder import NOW
from tests.builders.changed import changed
from tests.builders.plans import CPU, H200, engine, loaded, only, plans_of
from tests.chained import CELL, evidence_of
from tests.fakes.vllm import make_engine
from tests.recipes import Document, reference
from vllm_qualify.approval.actions import reject
from vllm_qualify.approval.decision import ruling
from vllm_qualify.approval.published import read_run
from vllm_qualify.engine.environment import EngineEnvironment, EngineIdentity
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.evidence.measurement import Measurement, StageEvidence, valid
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.judge.compare.places import LOAD_STAGE, answers_path
from vllm_qualify.judge.verdict import Judgement
from vllm_qualify.plan.cell import Baseline, CellPlan
from vllm_qualify.plan.choice import Choice, select
from vllm_qualify.plan.request import Against
from vllm_qualify.publish.bundle import evidence_key
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.gates import Waiver, gate_of
from vllm_qualify.recipe.metrics import StageName
from vllm_qualify.report.model import Report, make_report
from vllm_qualify.runs.baseline import check_early, copy_baseline, newest_baseline, with_baseline
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.home import home
from vllm_qualify.runs.publishing import publish_run

__all__ = ["engine"]

TTFT = {"metric": "ttft_p50_ms", "max_worsening": 0.05, "unit": "fraction"}
HEAD: Document = {"task": "gsm8k", "task_version": "3.0", "config_hash": "c", "output_type": "generate_until"}
HEAD |= {"lm_eval": "0.4.13", "answers": 4}
ANSWER = {"doc_hash": "d", "prompt_hash": "p", "target_hash": "t", "scores": {"exact_match,strict-match": 1.0}, "length": 9}
ASKED = [
    ANSWER | {"question": question, "repetition": repetition, "unanswered": False, "traced_to": "r1-b1/samples.jsonl:1"}
    for repetition in (1, 2)
    for question in (0, 1)
]
# Two questions, asked twice.
ANSWERS = "".join(f"{json.dumps(line)}\n" for line in (HEAD, *ASKED)).encode()
IMAGE = EngineImage(repository="vllm/vllm-openai", tag="v0.31.0", digest=f"sha256:{'1' * 64}", platform="linux/amd64")

Change = Callable[[CellPlan], CellPlan]


@pytest.fixture
def document(tmp_path: Path) -> Document:
    """The reference recipe with weights of the test's own, and a gate on the load against the baseline."""
    document = reference()
    for name in document["variants"]:
        document["variants"][name]["model"] = str(weights(tmp_path / name))
    document["gpu_types"]["cpu"]["profiles"]["balanced"]["gates"].append(TTFT)
    return document


SCORES = "likelihood/answers.jsonl"
WORDS, THOUGHTS = "r1-b1/samples_gsm8k_2026-11-20.jsonl", "r1-b1/replies.jsonl"


def weights(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"name": folder.name}))
    return folder


def plan_of(document: Document, engine: EngineEnvironment, variant: str | None = None) -> CellPlan:
    return only(plans_of(document, engine, choice=Choice(variant=variant)))


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


def without_gates_on(plan: CellPlan, against: str) -> CellPlan:
    return plan.model_copy(update={"gates": [gate for gate in plan.gates if gate.against != against]})


def made(plan: CellPlan, run_id: str, folder: Path, verdict: str = "pass") -> tuple[Report, Run]:
    """A run that ended: its folder with its plan, its evidence and its report."""
    plan = plan.model_copy(update={"run_id": run_id})
    run = Run(folder=folder / run_id)
    texts = ("lm-eval.log", WORDS, THOUGHTS, WORDS.replace("r1", "r2"), THOUGHTS.replace("r1", "r2"))
    others = [*(f"accuracy/gsm8k/{name}" for name in texts), SCORES, "likelihood/machine.json", "load/bench-1.json"]
    for path, body in (dict.fromkeys(others, b"{}\n") | {answers_path("gsm8k"): ANSWERS}).items():
        (run.evidence / path).parent.mkdir(parents=True, exist_ok=True)
        (run.evidence / path).write_bytes(body)
    (run.folder / "plan.json").write_text(plan.model_dump_json(indent=2))
    judgement = Judgement.model_validate({"verdict": verdict, "gates": [], "levels": Levels(), "suite": {}, "validation": {}})
    load = [valid("ttft_p50_ms", 20.0, "load/bench-*.json", sample_count=128, repeats=[20.0, 20.1])]
    measured: dict[StageName, list[Measurement]] = {"accuracy": [], "likelihood": [], "load": load}
    report = make_report(plan, [evidence_of(run, stage, rows) for stage, rows in measured.items()], judgement)
    run.save_report(report)
    return report, run


class Cells:
    """A store with the runs of cells that are planned against it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = open_store((folder / "store").as_uri())
        self.store.check()

    def plan(self, plan: CellPlan, **against: Any) -> tuple[CellPlan, str]:
        """The plan with its baseline, and what was told."""
        messages: list[str] = []
        plan = with_baseline(plan, self.store, Against(**against), messages.append)
        return plan, "\n".join(messages)

    def baseline(self, plan: CellPlan, **against: Any) -> Baseline:
        baseline = self.plan(plan, **against)[0].baseline
        assert baseline is not None
        return baseline

    def not_in_turns(self, plan: CellPlan, **against: Any) -> str:
        """Why not, as the caller is told."""
        planned, message = self.plan(plan, **against)
        assert planned.baseline is not None
        assert planned.beside is None
        return message.partition(", its load as it was then (")[2].removesuffix(")")

    def refuse(self, plan: CellPlan, **against: Any) -> CallerError:
        with pytest.raises(CallerError) as raised:
            self.plan(plan, **against)
        assert raised.value.place == "--baseline"
        return raised.value

    def publish(self, plan: CellPlan, day: int = 1, verdict: str = "pass") -> Report:
        """A run of a day in March in the store, and nowhere in the folder of runs."""
        report, run = made(plan, f"202603{day:02}T080000Z-0a1b2c", self.folder / "elsewhere", verdict)
        publish_run(report, run, self.store)
        return report

    def establish(self, plan: CellPlan, day: int = 1, verdict: str = "pass") -> Report:
        report = self.publish(self.plan(plan, establish="always")[0], day, verdict)
        assert report.plan.establishes
        return report


@pytest.fixture
def cells(tmp_path: Path) -> Cells:
    return Cells(tmp_path)


def overwrite(path: Path, body: bytes) -> None:
    """The store's own files are read-only."""
    path.chmod(0o644)
    path.write_bytes(body)


# --- Which run


def test_without_a_gate_against_one_no_baseline_is_looked_for(cells: Cells, now: CellPlan) -> None:
    plain = now.model_copy(update={"gates": [gate for gate in now.gates if not gate.is_against_baseline]})
    for establish in ("never", "none"):
        assert cells.plan(plain, establish=establish) == (plain, "")
    plan, message = cells.plan(plain, establish="always")
    assert plan == plain
    assert message == f"{plain.cell.id} has no gate against a baseline: it is not compared, and does not become one"


def test_a_store_without_a_baseline_is_refused_with_both_remedies(cells: Cells, now: CellPlan) -> None:
    error = cells.refuse(now)
    assert error.problem == f"{CELL} has gates against a baseline, and {cells.store.url} has none of {CELL}"
    assert error.remedy == (
        "name a run with --baseline, or let this one become the baseline with --establish-baseline "
        "(of a deployment: against.run and against.establish)"
    )


@pytest.mark.parametrize("establish", ["none", "always"])
def test_the_first_run_can_become_the_baseline(cells: Cells, now: CellPlan, establish: str) -> None:
    plan, message = cells.plan(now, establish=establish)
    assert plan.establishes
    assert (plan.baseline, plan.beside) == (None, None)
    assert not any(gate.is_against_baseline for gate in plan.judged_gates)
    # In whole repetitions, as often as the recipe allows.
    assert [(task.sequential, task.repetitions) for task in plan.accuracy] == [(False, 10)]
    assert message.startswith(f"{CELL} becomes a baseline. ")


def test_where_there_is_a_baseline_only_always_makes_another(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    report = cells.establish(then)
    assert cells.plan(now, establish="always")[0].establishes
    for establish in ("never", "none"):
        plan, message = cells.plan(now, establish=establish)
        assert cells.baseline(now, establish=establish).run_id == report.run_id
        assert [task.sequential for task in plan.accuracy] == [True]
        assert message.startswith(f"{CELL} is compared with run {report.run_id} of {CELL}")


def test_a_plan_has_what_must_be_alike(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    report = cells.establish(then)
    baseline = cells.baseline(now)
    assert (baseline.cell, baseline.fingerprint, baseline.load) == (then.cell, CPU, then.load)
    assert baseline.accuracy == [task.settings for task in report.plan.accuracy]
    assert baseline.client_version == then.client_version


def test_the_newest_approved_baseline_is_taken(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    """Neither a later candidate that was approved, nor a baseline that was not, nor one that was not published whole."""
    cells.establish(then, 1)
    wanted = cells.establish(then, 2)
    cells.publish(cells.plan(now)[0], 3)
    cells.establish(then, 4, verdict="fail")
    unfinished = cells.establish(then, 5)
    Path(cells.store.locate(f"{unfinished.prefix}/manifest.json")).unlink()
    newest = newest_baseline(cells.store, CELL)
    assert newest is not None
    assert newest.run_id == wanted.run_id
    assert newest_baseline(cells.store, "reference/bf16/cpu/bal") is None


def test_a_rejected_run_that_is_named_is_refused(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    report = cells.establish(then)
    reject(cells.store, read_run(cells.store, CELL, report.run_id), ruling("reject", "Bob", "it forgets"), NOW)
    with pytest.raises(CallerError, match=r"was rejected by Bob on 2026-03-14: it forgets"):
        cells.plan(now, run=report.run_id)


def test_a_report_that_is_not_its_manifests_is_no_baseline(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    path = Path(cells.store.locate(f"{cells.establish(then).prefix}/report.json"))
    overwrite(path, path.read_bytes().replace(b'"num_questions": 500', b'"num_questions": 499'))
    with pytest.raises(StoreError, match="not what its manifest says"):
        cells.plan(now)


def test_the_variant_can_name_another_cell(cells: Cells, then: CellPlan, document: Document, engine: EngineEnvironment) -> None:
    regressed = plan_of(document, engine, "regressed")
    assert (regressed.cell.id, regressed.baseline_cell) == ("reference/regressed/cpu/balanced", CELL)
    assert cells.refuse(regressed).problem.endswith(f"has none of {CELL}")
    report = cells.establish(then)
    baseline = cells.baseline(regressed)
    assert (baseline.run_id, baseline.cell.variant) == (report.run_id, "bf16")


def test_an_older_run_of_the_store_can_be_named(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    older = cells.establish(then, 1)
    cells.establish(then, 2)
    assert cells.baseline(now, run=older.run_id).run_id == older.run_id


@pytest.mark.parametrize(
    ("verdict", "establishes", "message"), [("fail", True, "did not pass"), ("pass", False, "is not a baseline")]
)
@pytest.mark.parametrize("here", [True, False])
def test_a_named_run_must_be_an_approved_baseline(
    cells: Cells, then: CellPlan, now: CellPlan, verdict: str, establishes: bool, message: str, here: bool
) -> None:
    cells.establish(then, 1)
    plan, _ = cells.plan(then, establish="always" if establishes else "never")
    if here:
        report, _ = made(plan, "20260302T080000Z-0a1b2c", home() / "runs", verdict)
    else:
        report = cells.publish(plan, 2, verdict)
    error = cells.refuse(now, run=report.run_id)
    assert error.problem == f"run {report.run_id} {message}"
    assert "--establish-baseline" in error.remedy


def test_a_named_run_that_is_nowhere_is_reported(cells: Cells, now: CellPlan) -> None:
    assert "no whole run '20200101T000000Z-000000'" in cells.refuse(now, run="20200101T000000Z-000000").problem


def test_what_is_missing_is_reported_before_an_engine_is_known(cells: Cells, then: CellPlan, document: Document) -> None:
    """Of any variant, by the cell that it is compared with."""
    recipe = loaded(document)
    chosen = [select(recipe, Choice(variant=name), CPU) for name in ("bf16", "regressed")]

    def check(**against: Any) -> None:
        for selection in chosen:
            check_early(selection, recipe.recipe, cells.store, Against(**against))

    for selection in chosen:
        with pytest.raises(CallerError, match=f"has none of {CELL}"):
            check_early(selection, recipe.recipe, cells.store, Against())
    for establish in ("none", "always"):
        check(establish=establish)
    with pytest.raises(CallerError, match="no whole run"):
        check(run="20200101T000000Z-000000")
    report = cells.establish(then)
    check()
    check(run=report.run_id)


# --- In turns, or with its load as it was


@pytest.fixture
def baseline(cells: Cells, then: CellPlan) -> Report:
    return cells.establish(then)


def test_other_weights_that_are_here_are_served_beside(cells: Cells, then: CellPlan, now: CellPlan, baseline: Report) -> None:
    plan, message = cells.plan(now)
    assert baseline.plan.server == then.server
    assert plan.beside == then.server
    assert plan.server == now.server
    assert message.endswith(", its load in turns")
    assert CellPlan.model_validate_json(plan.model_dump_json()) == plan


def test_the_same_release_is_not_measured_beside_itself(cells: Cells, then: CellPlan, baseline: Report) -> None:
    assert baseline.passed
    assert cells.not_in_turns(then) == "it is the same release with the same server"


@pytest.mark.parametrize(
    ("key", "value", "change"),
    [
        ("arguments", {"middleware": ["evil.Thing"]}, "it runs code that this recipe does not: server.middleware"),
        ("environment", {"NCCL_NET_PLUGIN": "evil"}, "it runs code that this recipe does not: environment.NCCL_NET_PLUGIN"),
        ("environment", {"HF_ENDPOINT": "http"}, "it has variables that no recipe may set: HF_ENDPOINT"),
    ],
)
def test_a_baseline_that_runs_other_code_is_not_served_beside(
    cells: Cells, then: CellPlan, now: CellPlan, key: str, value: dict[str, Any], change: str
) -> None:
    """Its plan comes from the store, and nobody allowed it here."""
    cells.establish(changed(then, "server", **{key: value}))
    assert cells.not_in_turns(now).startswith(change)


@pytest.mark.parametrize(
    ("key", "value"), [("arguments", {"max-num-seqs": 16}), ("environment", {"VLLM_CPU_KVCACHE_SPACE": "2"})]
)
def test_the_same_release_with_another_server_is_measured_beside_it(
    cells: Cells, then: CellPlan, baseline: Report, key: str, value: dict[str, Any]
) -> None:
    assert cells.plan(changed(then, "server", **{key: value}))[0].beside == baseline.plan.server


def test_without_a_gate_on_the_load_nothing_is_served_beside(cells: Cells, now: CellPlan, baseline: Report) -> None:
    planned, message = cells.plan(without_gates_on(now, "load"))
    assert planned.beside is None
    assert message == f"{CELL} is compared with run {baseline.run_id} of {CELL}"


@pytest.mark.parametrize("how", ["changed", "more", "gone"])
def test_other_weights_than_then_are_refused(cells: Cells, then: CellPlan, now: CellPlan, baseline: Report, how: str) -> None:
    assert baseline.passed
    folder = Path(then.server.model)
    if how == "gone":
        shutil.rmtree(folder)
    else:
        (folder / ("config.json" if how == "changed" else "more.json")).write_text("{}")
    assert cells.not_in_turns(now) == "its weights are not here any more"


@pytest.mark.parametrize(
    ("how", "change"), [("changed", "its engine is not here any more"), ("gone", "its engine is not here: the engine's Python")]
)
def test_an_engine_that_is_not_that_of_then_is_not_started(
    cells: Cells, then: CellPlan, now: CellPlan, tmp_path: Path, how: str, change: str
) -> None:
    """Each of the two has an environment of its own."""
    python = make_engine(tmp_path / "older") / "bin" / "python"
    report = cells.establish(changed(then, "server", engine=EngineEnvironment(python=python)))
    assert cells.plan(now)[0].beside == report.plan.server
    if how == "gone":
        python.unlink()
    else:
        python.write_text(python.read_text().replace("0" * 64, "1" * 64))
    assert cells.not_in_turns(now).startswith(change)


def of_image(plan: CellPlan) -> CellPlan:
    """As of an image whose vLLM is 0.31.0."""
    about = {"version": "0.31.0", "digest": str(IMAGE.digest), "packages": {"vllm": "0.31.0"}}
    identity = EngineIdentity(launcher="docker", python="3.12.1", **about)
    return changed(changed(plan, "cell.release", engine=identity), "server", engine=IMAGE)


def with_client(plan: CellPlan) -> CellPlan:
    """The load client in an image of its own, for both."""
    identity = EngineIdentity(launcher="docker", version="0.32.0", digest="sha256:2", python="3.12.1", packages={})
    return plan.model_copy(update={"client_image": IMAGE, "client": identity})


def test_an_image_is_not_served_beside_a_process(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    cells.establish(with_client(of_image(then)))
    assert cells.not_in_turns(now.model_copy(update={"client": with_client(now).client})) == "it is launched in another way"


def test_images_with_clients_of_their_own_are_not_measured_in_turns(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    cells.establish(of_image(then))
    cell = changed(now.cell, "release.engine", launcher="docker", version="0.32.0")
    error = cells.refuse(changed(of_image(now), cell=cell))
    assert error.problem == (
        "the baseline's load client was vLLM 0.31.0, and this one is 0.32.0, and the two cannot be measured in turns"
        " (each would have the load client of its own image)"
    )
    assert "--client-image" in error.remedy


def test_an_image_is_pulled_by_its_digest_whatever_its_tag_means_by_now(
    cells: Cells, then: CellPlan, now: CellPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: list[EngineImage] = []
    identity = of_image(then).cell.release.engine
    monkeypatch.setattr("vllm_qualify.engine.image.pull", lambda image, _: pulled.append(image))
    monkeypatch.setattr(EngineImage, "identity", lambda _: identity)
    cells.establish(with_client(of_image(then)))
    beside = cells.plan(with_client(of_image(now)))[0].beside
    assert beside is not None
    assert [beside.engine] == pulled == [IMAGE.model_copy(update={"tag": None})]


def on_gpus(plan: CellPlan, *devices: int) -> CellPlan:
    """Of a server that takes one GPU of a machine with these."""
    machine = H200.model_copy(update={"devices": list(devices), "count": len(devices)})
    return changed(changed(plan, "server", gpus=list(devices[:1])), fingerprint=machine)


def test_the_baseline_gets_gpus_of_its_own_and_too_few_are_reported(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    cells.establish(on_gpus(then, 0))
    for devices in ((0, 1), (2, 5, 7)):
        plan, _ = cells.plan(on_gpus(now, *devices))
        assert plan.beside is not None
        assert [*plan.server.gpus, *plan.beside.gpus] == [*devices[:2]]
    assert cells.not_in_turns(on_gpus(now, 0)) == "this machine has too few GPUs for both"


def test_a_baseline_of_another_gpu_type_has_no_load_to_compare_with(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    report = cells.establish(on_gpus(then, 0))
    error = cells.refuse(now, run=report.run_id)
    assert error.problem.startswith("the baseline was measured on NVIDIA H200")
    assert "the two cannot be measured in turns (it is for h200)" in error.problem
    assert cells.baseline(without_gates_on(now, "load"), run=report.run_id)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_client, "the baseline's load client was vLLM 0.32.0, and this one is 0.32.0+cpu"),
        (
            lambda plan: changed(plan, "fingerprint", count=4),
            "the baseline was measured on Some CPU · cores: 4 · 8 GiB, and this is Some CPU · cores: 2 · 8 GiB",
        ),
        (lambda plan: changed(plan, "load", input_len=256), "the baseline's load was another one"),
        (lambda plan: changed(plan, "load", seed=1), "the baseline's load was another one"),
    ],
)
def test_a_load_of_then_that_cannot_be_compared_is_reported_before_anything_starts(
    cells: Cells, then: CellPlan, now: CellPlan, change: Change, message: str
) -> None:
    cells.establish(change(then))
    error = cells.refuse(now, in_turns=False)
    assert error.problem.startswith(message)
    assert error.problem.endswith("and the two cannot be measured in turns (--no-in-turns)")
    assert "--establish-baseline" in error.remedy
    assert cells.plan(now)[0].beside is not None


def test_who_wants_no_turns_gets_none_and_the_number_of_repeats_may_change(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    cells.establish(changed(then, "load", repeats=9, min_duration_s=1.0))
    assert cells.not_in_turns(now, in_turns=False) == "--no-in-turns"


def asked(plan: CellPlan, **changes: object) -> CellPlan:
    return changed(plan, accuracy=[changed(task, "settings", **changes) for task in plan.accuracy])


@pytest.mark.parametrize(
    ("name", "value"), [("num_questions", 400), ("num_fewshot", 4), ("api", "chat"), ("max_gen_toks", 64), ("seed", 7)]
)
@pytest.mark.parametrize("in_turns", [True, False])
def test_a_task_that_was_asked_in_another_way_is_reported_before_anything_starts(
    cells: Cells, then: CellPlan, now: CellPlan, name: str, value: object, in_turns: bool
) -> None:
    cells.establish(asked(then, **{name: value}))
    error = cells.refuse(now, in_turns=in_turns)
    assert error.problem.startswith(f"the baseline was asked gsm8k in another way: {name} {value}, now ")
    assert "--establish-baseline" in error.remedy


def test_a_task_without_a_gate_against_the_baseline_may_be_asked_otherwise(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    cells.establish(asked(then, num_questions=400))
    assert cells.baseline(without_gates_on(now, "answers"))


def test_a_baseline_that_scored_other_texts_is_reported_before_a_start(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    assert now.likelihood is not None
    cells.establish(then.model_copy(update={"likelihood": None}))
    assert "the baseline scored no texts" in str(cells.refuse(now))
    other = changed(now, "likelihood", texts_sha256="0" * 64)
    assert "the baseline scored no texts" in str(cells.refuse(other))


# --- What is brought


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "evidence" / "baseline"
    folder.mkdir(parents=True)
    return folder


def test_report_answers_and_measurements_are_brought(cells: Cells, now: CellPlan, baseline: Report, folder: Path) -> None:
    copy_baseline(cells.plan(now)[0], cells.store, folder)
    brought = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    accuracy = [answers_path("gsm8k"), *(f"accuracy/gsm8k/{each}" for each in (WORDS, THOUGHTS))]
    assert brought == {"report.json", LOAD_STAGE, *accuracy, SCORES}
    assert Report.model_validate_json((folder / "report.json").read_bytes()) == baseline
    stage = StageEvidence.model_validate_json((folder / LOAD_STAGE).read_bytes())
    assert stage == next(stage for stage in baseline.stages if stage.stage == "load")
    assert (folder / answers_path("gsm8k")).read_bytes() == ANSWERS


@pytest.mark.usefixtures("baseline")
def test_who_scores_nothing_needs_no_scores(cells: Cells, now: CellPlan, folder: Path) -> None:
    plan, _ = cells.plan(now)
    copy_baseline(plan.model_copy(update={"likelihood": None}), cells.store, folder)
    assert not (folder / SCORES).exists()


@pytest.mark.parametrize("by_folder", [True, False])
def test_a_run_that_is_only_here_can_be_named_and_is_brought_from_its_folder(
    cells: Cells, then: CellPlan, now: CellPlan, tmp_path: Path, folder: Path, by_folder: bool
) -> None:
    runs = tmp_path / "kept" if by_folder else home() / "runs"
    report, run = made(cells.plan(then, establish="always")[0], "20260301T080000Z-0a1b2c", runs)
    plan, _ = cells.plan(now, run=str(run.folder) if by_folder else run.id)
    copy_baseline(plan, cells.store, folder)
    assert (folder / answers_path("gsm8k")).read_bytes() == ANSWERS
    assert Report.model_validate_json((folder / "report.json").read_bytes()) == report


def test_answers_that_tell_no_noise_are_reported_before_a_server_is_started(
    cells: Cells, then: CellPlan, now: CellPlan, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = (HEAD | {"answers": 2}, *ASKED[:2])
    monkeypatch.setattr("tests.runs.test_baseline.ANSWERS", "".join(f"{json.dumps(line)}\n" for line in once).encode())
    cells.establish(then)
    plan, _ = cells.plan(now)
    with pytest.raises(CallerError, match="asked each question once"):
        copy_baseline(plan, cells.store, folder)


def test_a_variant_that_has_another_as_its_baseline_is_none_itself(cells: Cells, now: CellPlan) -> None:
    other = now.model_copy(update={"baseline_variant": "fp8"})
    with pytest.raises(CallerError, match="cannot be a baseline itself"):
        cells.plan(other, establish="always")


WEAKER = {"metric": "exact_match", "filter": "strict-match", "minimum": 0.1, "unit": "fraction"}


def judged_again(cells: Cells, report: Report, run_id: str, folder: Path, change: Change = lambda plan: plan) -> Report:
    """A run that judges the evidence of another one again and passes, published."""
    again, run = made(change(report.plan), run_id, folder)
    again = again.model_copy(update={"rejudged_from": report.run_id})
    run.save_report(again)
    publish_run(again, run, cells.store)
    return again


def judging_weakly(plan: CellPlan) -> CellPlan:
    """The plan with a bound that nearly everything meets in the place of the recipe's."""
    others = [gate for gate in plan.gates if gate.is_compared or gate.metric != "exact_match"]
    return plan.model_copy(update={"gates": [*others, gate_of(**WEAKER, task="gsm8k")]})


@pytest.fixture
def failed(cells: Cells, then: CellPlan, tmp_path: Path) -> Report:
    """A run that was made to be a baseline and missed a bound."""
    report, run = made(cells.plan(then, establish="always")[0], "20260301T080000Z-0a1b2c", tmp_path / "failed", "fail")
    publish_run(report, run, cells.store)
    return report


def test_a_run_that_was_judged_again_by_the_gates_of_now_is_the_baseline(
    cells: Cells, failed: Report, now: CellPlan, folder: Path, tmp_path: Path
) -> None:
    assert "has none of" in str(cells.refuse(now))
    again = judged_again(cells, failed, "20260302T080000Z-0a1b2c", tmp_path / "again")
    assert cells.baseline(now).run_id == again.run_id
    assert cells.baseline(now, run=again.run_id).run_id == again.run_id
    copy_baseline(cells.plan(now)[0], cells.store, folder)
    assert Report.model_validate_json((folder / "report.json").read_bytes()) == again


def test_a_run_that_was_judged_again_by_weaker_gates_is_no_baseline(
    cells: Cells, failed: Report, now: CellPlan, tmp_path: Path
) -> None:
    weak = judged_again(cells, failed, "20260302T080000Z-0a1b2c", tmp_path / "again", judging_weakly)
    named = (weak.run_id, str(tmp_path / "again" / weak.run_id))
    for problem in (cells.refuse(now), *(cells.refuse(now, run=name) for name in named)):
        assert f"run {weak.run_id} was judged again, and not by the gates of {CELL}" in str(problem)
    # Who judges by the weak ones has it.
    assert cells.baseline(judging_weakly(now)).run_id == weak.run_id


def test_nor_is_one_with_a_waiver_that_the_recipe_does_not_have(
    cells: Cells, failed: Report, now: CellPlan, tmp_path: Path
) -> None:
    waiver = Waiver.model_validate(
        {"gpu_type": "cpu", "variant": "bf16", "profile": "balanced", "gate": "ttft_p50_ms against the baseline"}
        | {"owner": "Ada", "reason": "slow", "expires": date(2099, 1, 1)}
    )
    judged_again(
        cells, failed, "20260302T080000Z-0a1b2c", tmp_path / "again", lambda plan: plan.model_copy(update={"waivers": [waiver]})
    )
    assert "was judged again" in str(cells.refuse(now))


def test_weaker_gates_hide_no_baseline_before_them(cells: Cells, then: CellPlan, now: CellPlan, tmp_path: Path) -> None:
    report = cells.establish(then)
    judged_again(cells, report, "20260302T080000Z-0a1b2c", tmp_path / "again", judging_weakly)
    assert cells.baseline(now).run_id == report.run_id


def test_a_variant_is_compared_with_a_run_that_was_judged_again_by_the_gates_that_both_have(
    cells: Cells, failed: Report, document: Document, engine: EngineEnvironment, tmp_path: Path
) -> None:
    other = plan_of(document, engine, "regressed")
    again = judged_again(cells, failed, "20260302T080000Z-0a1b2c", tmp_path / "again")
    assert cells.baseline(other).run_id == again.run_id
    judged_again(cells, failed, "20260303T080000Z-0a1b2c", tmp_path / "weak", judging_weakly)
    assert cells.baseline(other).run_id == again.run_id


def test_a_rejected_run_that_was_judged_again_is_no_baseline(
    cells: Cells, failed: Report, now: CellPlan, tmp_path: Path
) -> None:
    again = judged_again(cells, failed, "20260302T080000Z-0a1b2c", tmp_path / "again")
    reject(cells.store, read_run(cells.store, CELL, again.run_id), ruling("reject", "Ada", "worse"), NOW)
    assert "has none of" in str(cells.refuse(now))


def test_a_run_of_another_profile_is_compared_with_none(cells: Cells, then: CellPlan, now: CellPlan) -> None:
    report = cells.establish(then)
    assert "another GPU type or profile" in str(cells.refuse(changed(now, "cell", profile="latency"), run=report.run_id))


def test_changed_evidence_of_the_store_is_not_brought(cells: Cells, now: CellPlan, baseline: Report, folder: Path) -> None:
    plan, _ = cells.plan(now)
    path = Path(cells.store.locate(next(evidence_key(file) for file in baseline.files if file.path == answers_path("gsm8k"))))
    overwrite(path, ANSWERS + ANSWERS)
    with pytest.raises(StoreError, match="not what its report says"):
        copy_baseline(plan, cells.store, folder)
    path.unlink()
    with pytest.raises(StoreError, match="no object"):
        copy_baseline(plan, cells.store, folder)


def test_changed_evidence_that_is_only_here_is_not_brought(cells: Cells, then: CellPlan, now: CellPlan, folder: Path) -> None:
    _, run = made(cells.plan(then, establish="always")[0], "20260301T080000Z-0a1b2c", home() / "runs")
    plan, _ = cells.plan(now, run=run.id)
    (run.evidence / answers_path("gsm8k")).write_bytes(ANSWERS + ANSWERS)
    with pytest.raises(StoreError, match="not what its report says"):
        copy_baseline(plan, cells.store, folder)
