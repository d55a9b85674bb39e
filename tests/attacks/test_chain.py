"""Who wants a release approved that lost more than anybody agreed to: little by little, or by a comparison of their choice."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.approval.builder import made_key
from tests.builders.plans import difference_from
from tests.chained import (
    ANCHOR,
    BASELINE,
    CELL,
    FEW,
    LOSS,
    OWN,
    SINCE,
    WIDE,
    Cell,
    document,
    evidence_of,
    run_id,
    verdicts,
    without,
)
from tests.lm_eval_files import hashed
from tests.recipes import Document
from vllm_qualify.approval.actions import revoke
from vllm_qualify.approval.decision import waivers_used
from vllm_qualify.approval.errors import TamperedError
from vllm_qualify.approval.layout import JSON, approval_key
from vllm_qualify.approval.pointer import revocation
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.approver.decisions import Desk
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.evidence.accuracy.answers import write
from vllm_qualify.evidence.accuracy.samples import read_answers
from vllm_qualify.evidence.measurement import describe
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.recipe import Approval, LoadedRecipe, Recipe
from vllm_qualify.runs.baseline import departures_of_baseline
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.judging import check_judgement, judge_run
from vllm_qualify.runs.publishing import publish_run

# Of the engine that is not real.
ENGINE_DIGEST = f"sha256:{'0' * 64}"


def cell_of(tmp_path: Path, *gates: Document, **how: int) -> Cell:
    store = open_store((tmp_path / "store").as_uri())
    store.check()
    return Cell(store, made_key(tmp_path / "key.pem"), tmp_path, document(tmp_path / "weights", *gates, **how))


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    """A cell with margins of 20 points, and few questions."""
    return cell_of(tmp_path, *WIDE, **FEW)


@pytest.fixture
def desk(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> Desk:
    # What else of a plan must be the recipe's is tested with the plan's conformity.
    monkeypatch.setattr("vllm_qualify.approver.decisions.difference", lambda *_: "")
    recipe = LoadedRecipe(recipe=Recipe.model_validate(cell.recipe), folder=cell.folder)
    return Desk(cell.store, cell.key, {"reference": recipe}, engines=[ENGINE_DIGEST])


def published(cell: Cell, plan: CellPlan, lost: int = 0, forged: Callable[[Run], None] = lambda _: None) -> PublishedRun:
    run = cell.measured(plan, lost)
    forged(run)
    publish_run(judge_run(run, run.stages()), run, cell.store)
    return read_run(cell.store, CELL, run.id)


# --- little by little


@pytest.mark.thorough
def test_a_chain_of_losses_below_the_margin_ends_at_the_anchors(tmp_path: Path) -> None:
    """Five releases that lose 2.8 points each of a margin of 3, every one approved as the next one's baseline."""
    cell = cell_of(tmp_path, LOSS | {"max_loss": 0.03}, SINCE | {"max_loss_since_anchor": 0.06}, questions=250)
    first = cell.baseline(1, 0)
    seen = []
    for number in range(1, 6):
        report, run = cell.judged(cell.plan(1 + number, establish="always"), 7 * number)
        seen.append(verdicts(report))
        assert report.plan.held_against.run_id == first.run_id
        # As it was before there were anchors: each passes, and becomes what the next one is compared with.
        (run.folder / "plan.json").write_text(without(report.plan, ANCHOR).model_dump_json())
        run = Run(folder=run.folder)
        alone = judge_run(run, run.stages())
        assert verdicts(alone) == {OWN: "pass", BASELINE: "pass"}
        publish_run(alone, run, cell.store)
        cell.approve(read_run(cell.store, CELL, run.id))
    assert seen == [{OWN: "pass", BASELINE: "pass", ANCHOR: message} for message in ("pass", "pass", "fail", "fail", "fail")]


# --- by becoming the baseline


def test_a_worse_release_does_not_become_the_baseline_unseen(tmp_path: Path) -> None:
    """It was compared with nothing, and one that was six points worse could become what all later ones are compared with.

    A waiver is a way past that everybody sees.
    """
    cell = cell_of(tmp_path, LOSS, **FEW)
    cell.baseline(1, 0)
    report, _ = cell.judged(cell.plan(2, establish="always"), 3)
    assert verdicts(report) == {OWN: "pass", BASELINE: "fail"}
    assert not report.passed
    about = {"gate": BASELINE, "gpu_type": "cpu", "variant": "bf16", "profile": "balanced", "owner": "Ada"}
    cell.recipe["waivers"] = [about | {"reason": "another tokenizer", "expires": datetime.now(UTC).date()}]
    report, _ = cell.judged(cell.plan(3, establish="always"), 3)
    assert report.passed
    assert verdicts(report)[BASELINE] == "fail"
    assert [waiver.owner for waiver in waivers_used(report)] == ["Ada"]


def test_a_release_that_becomes_a_baseline_is_never_approved_automatically(cell: Cell, desk: Desk) -> None:
    """One that begins anew says what it was not held against."""
    cell.recipe["approval"] = {"automatic": True}
    cell.baseline(1, 0)
    run = cell.published(2, 0, establish="always")
    assert verdicts(run.report)[BASELINE] == "pass"
    assert not run.report.judgement.not_judged
    anew = cell.published(3, 10, establish="always", new_anchor=True)
    assert verdicts(anew.report) == {OWN: "pass"}
    assert [gate.label for gate in anew.report.judgement.not_judged] == [BASELINE, ANCHOR]
    for each in (run, anew):
        assert desk.why_by_hand(each) == "becomes what later releases are compared with"


def test_a_new_baseline_is_a_try_like_any_other(cell: Cell) -> None:
    """Else who fails against the baseline could try again as a baseline, at the level of a first try."""
    cell.baseline(1, 0)
    cell.published(2, 20, establish="always")
    assert [tried.verdict for tried in cell.plan(3, establish="always").tries] == ["fail"]
    assert cell.plan(4).unpassed == 1
    assert cell.plan(5, establish="always", new_anchor=True).tries == []


# --- by another baseline or anchor


def automatic(plan: CellPlan) -> CellPlan:
    return plan.model_copy(update={"approval": Approval(automatic=True)})


def test_a_run_that_is_held_against_the_cells_own_needs_nobody(cell: Cell, desk: Desk) -> None:
    cell.baseline(1, 0)
    cell.baseline(2, 2)
    assert desk.why_by_hand(published(cell, automatic(cell.plan(3)))) == ""


def test_a_run_is_not_held_against_what_only_a_pointer_calls_approved(cell: Cell, desk: Desk, tmp_path: Path) -> None:
    """Whoever may write a pointer could name a worse baseline. Only a key that the approver knows makes one."""
    first = cell.baseline(1, 0)
    run = published(cell, automatic(cell.plan(2)))
    assert desk.why_by_hand(run) == ""
    stranger = Desk(cell.store, made_key(tmp_path / "another.pem"), desk.recipes, engines=desk.engines)
    why = f"is held against run {first.run_id} of {CELL}, whose approval cannot be trusted: signed by key "
    assert stranger.why_by_hand(run).startswith(why)
    assert replace(stranger, trusted=[cell.key.public_key]).why_by_hand(run) == ""
    spoil_signature(cell, first.run_id)
    assert f"is held against run {first.run_id} of {CELL}, whose approval cannot be trusted" in desk.why_by_hand(run)


@pytest.mark.parametrize("number", [1, 2])
def test_neither_anchor_nor_baseline_is_taken_without_its_signature(cell: Cell, desk: Desk, number: int) -> None:
    cell.baseline(1, 0)
    cell.baseline(2, 2)
    plan = cell.plan(3)
    assert [other.run_id for other in (plan.anchor, plan.baseline) if other] == [run_id(1), run_id(2)]
    run = published(cell, automatic(plan))
    assert desk.why_by_hand(run) == ""
    spoil_signature(cell, run_id(number))
    assert f"is held against run {run_id(number)} of {CELL}, whose approval cannot be trusted" in desk.why_by_hand(run)


def spoil_signature(cell: Cell, of_run: str) -> None:
    key = approval_key(CELL, of_run)
    body, tag = cell.store.read(key)
    envelope = json.loads(body)
    envelope["signatures"][0]["sig"] = envelope["signatures"][0]["sig"][::-1]
    cell.store.swap(key, json.dumps(envelope).encode(), JSON, tag)


def test_a_host_does_not_choose_its_anchor(cell: Cell, desk: Desk) -> None:
    """The worse one is approved, and its answers are its own: only the cell's pointer says that it is not the anchor."""
    best, worse = cell.baseline(1, 0), cell.baseline(2, 4)
    run = published(cell, automatic(cell.plan(3, anchor=worse.run_id)), lost=5)
    check_judgement(cell.store, run)
    message = f"is held against run {worse.run_id} of {CELL}, and the anchor of {CELL} is run {best.run_id}"
    assert desk.why_by_hand(run) == message
    assert "a person decides" in desk.approve_automatically(CELL, run.run_id)


def compared_with(named: str, newest: str) -> str:
    return f"is compared with run {named} of {CELL}, and the approved baseline of {CELL} is {newest}"


def test_a_host_does_not_choose_its_baseline(cell: Cell, desk: Desk) -> None:
    """An undecided one of its own making, one that is no longer the newest, or one of another variant."""
    first = cell.baseline(1, 0)
    own = cell.published(2, 5, establish="always")
    claim = cell.plan(3)
    assert claim.baseline is not None
    message = claim.baseline.model_copy(update={"run_id": own.run_id})
    run = published(cell, automatic(claim.model_copy(update={"baseline": message})), lost=5)
    assert desk.why_by_hand(run) == compared_with(own.run_id, f"run {first.run_id}")
    newest = cell.baseline(4, 0)
    older = published(cell, automatic(cell.plan(5, run=first.run_id)))
    assert desk.why_by_hand(older) == compared_with(first.run_id, f"run {newest.run_id}")
    elsewhere = cell.plan(6).model_copy(update={"baseline_variant": "regressed"})
    assert "baseline's variant" in difference_from(elsewhere, Recipe.model_validate(cell.recipe))


def test_a_host_does_not_make_the_baseline_beside_it_slower(cell: Cell) -> None:
    """Its release would be no slower than that server."""
    best = cell.baseline(1, 0)
    server, another = best.report.plan.server, f"is compared with another server than run {best.run_id} had"
    for changed, message in (({}, ""), ({"max-num-seqs": 1}, another)):
        beside = server.model_copy(update={"arguments": server.arguments | changed})
        plan = cell.plan(2).model_copy(update={"beside": beside, "warms_alike": True})
        assert next(departures_of_baseline(plan, cell.store), "") == message
    for changes in ({"gpus": [0, 1]}, {"engine": EngineEnvironment(python=Path("/opt/old/bin/python"))}):
        plan = cell.plan(2).model_copy(update={"beside": server.model_copy(update=changes), "warms_alike": True})
        assert list(departures_of_baseline(plan, cell.store)) == [another]


def test_a_host_does_not_say_how_its_baseline_was_measured(cell: Cell, desk: Desk) -> None:
    """A load that was another one would be compared, and answers to other questions."""
    best = cell.baseline(1, 0)
    plan = automatic(cell.plan(2))
    assert plan.baseline is not None
    load = plan.baseline.load.model_copy(update={"num_prompts": 7 * plan.baseline.load.num_prompts})
    claimed = plan.model_copy(update={"baseline": plan.baseline.model_copy(update={"load": load})})
    assert desk.why_by_hand(published(cell, claimed)) == f"says of its baseline, run {best.run_id}, what is not in its report"


def test_a_host_does_not_leave_its_anchor_out(cell: Cell, desk: Desk) -> None:
    cell.baseline(1, 0)
    without_one = published(cell, automatic(cell.plan(2).model_copy(update={"anchor": None})), lost=5)
    assert desk.why_by_hand(without_one).startswith("has gates that were not judged")


def test_a_release_is_not_approved_by_a_baseline_that_nobody_approved(cell: Cell, desk: Desk) -> None:
    cell.published(1, 5, establish="always")
    run = published(cell, automatic(without(cell.plan(2, establish="none"), ANCHOR)))
    assert run.report.passed
    assert desk.why_by_hand(run) == compared_with(run_id(1), "none")


def test_an_undecided_baseline_is_not_named_past_an_approved_one(cell: Cell) -> None:
    approved = cell.baseline(1, 0)
    undecided = cell.published(2, 3, establish="always")
    with pytest.raises(CallerError) as refused:
        cell.plan(3, run=undecided.run_id)
    assert refused.value.problem == (
        f"run {undecided.run_id} is not approved, and its cell has an approved baseline, run {approved.run_id}"
    )


@pytest.mark.parametrize("decided", ["not", "revoked", "a candidate", "nowhere"])
def test_only_an_approved_baseline_is_named_as_anchor(cell: Cell, decided: str) -> None:
    cell.baseline(1, 0)
    named = "../../../reports" if decided == "nowhere" else run_id(2)
    if decided == "not":
        cell.published(2, 0, establish="always")
    if decided == "revoked":
        cell.baseline(2, 0)
        revoke(cell.store, CELL, run_id(2), revocation("Grace", "it forgets", datetime.now(UTC)))
    if decided == "a candidate":
        cell.approve(cell.published(2, 0))
    with pytest.raises(CallerError, match="is no approved baseline of") as refused:
        cell.plan(3, anchor=named)
    assert refused.value.place == "--anchor"


# --- by answers that are not theirs


def forge_answers(file: Path) -> None:
    """Half of the answers become wrong ones."""
    first, *answers = [json.loads(line) for line in file.read_text().splitlines()]
    for answer in answers[::2]:
        answer["scores"] = dict.fromkeys(answer["scores"], 0.0)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in (first, *answers)))


def forge(path: str) -> Callable[[Run], None]:
    """Half of the answers of another run become wrong ones, and all hashes of this run's evidence fit."""

    def change(run: Run) -> None:
        forge_answers(run.evidence / path)
        stage = run.stage("baseline")
        assert stage is not None
        files = [describe(run.evidence / each.path, run.evidence) for each in stage.files]
        run.save_stage(stage.model_copy(update={"files": files}))

    return change


@pytest.mark.parametrize("folder", ["baseline", "baseline/anchor"])
def test_answers_that_are_not_the_other_runs_are_found(cell: Cell, folder: str) -> None:
    first = cell.baseline(1, 0)
    honest = published(cell, cell.plan(2))
    check_judgement(cell.store, honest)
    path = f"{folder}/accuracy/gsm8k/answers.jsonl"
    forged = published(cell, cell.plan(3), lost=15, forged=forge(path))
    assert verdicts(forged.report)[ANCHOR if "anchor" in folder else BASELINE] == "pass"
    with pytest.raises(TamperedError, match=f"answers.jsonl is not that of run {first.run_id}"):
        check_judgement(cell.store, forged)


# --- by scores that no reply has


def score_wrong_ones_as_right(*, found: bool = False, target: bool = False) -> Callable[[Run], None]:
    """Each wrong reply counts as right, in lm-eval's files and in what is made of them; all hashes of the evidence fit.

    What the filter `found` in it may be the answer too, or the wanted answer be the one that it has.
    """

    def change(run: Run) -> None:
        folder = run.evidence / "accuracy" / "gsm8k"
        for samples in sorted(folder.glob("r*-b*/samples_*")):
            rows = [json.loads(line) for line in samples.read_text().splitlines()]
            for row in rows:
                right = str(row["doc_id"]) if row["exact_match"] == 1.0 or found else row["filtered_resps"][0]
                row |= {"exact_match": 1.0, "filtered_resps": [right if found else row["filtered_resps"][0]]}
                row |= {"target": f"#### {right}"} if target else {}
            samples.write_text("".join(f"{json.dumps(hashed(row))}\n" for row in rows))
            (results,) = samples.parent.glob("results_*")
            said = json.loads(results.read_text())
            scores = said["results"]["gsm8k"]
            scores |= {key: 1.0 for key in scores if key.startswith("exact_match,")}
            results.write_text(json.dumps(said, indent=2))
        (task,) = run.plan.accuracy
        write(read_answers(folder, task), folder / "answers.jsonl")
        run.save_stage(evidence_of(run, "accuracy"))

    return change


SAMPLES = r"accuracy/gsm8k/r1-b[0-9]+/samples_gsm8k_[^:]*\.jsonl:[0-9]+, and its"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, rf"exact_match of question [0-9]+ by strict-match is 1\.0 in {SAMPLES} reply gives 0\.0"),
        (
            {"found": True},
            rf"what strict-match found for question [0-9]+ is \['[0-9]+'\] in {SAMPLES} reply gives \['[0-9]+'\]",
        ),
        ({"target": True}, rf"target of question [0-9]+ is '#### [0-9]+' in {SAMPLES} document gives '#### [0-9]+'"),
    ],
)
def test_a_score_that_its_reply_does_not_have_is_found(cell: Cell, how: dict[str, bool], message: str) -> None:
    forged = published(cell, cell.plan(1, establish="always"), lost=15, forged=score_wrong_ones_as_right(**how))
    assert verdicts(forged.report)[OWN] == "pass"
    with pytest.raises(TamperedError, match=message):
        check_judgement(cell.store, forged)


def test_kept_answers_that_are_not_lm_evals_are_found(cell: Cell) -> None:
    """Later runs are compared with them: where a baseline has few right ones, nothing is a loss."""

    def forget(run: Run) -> None:
        forge_answers(run.evidence / "accuracy" / "gsm8k" / "answers.jsonl")
        run.save_stage(evidence_of(run, "accuracy"))

    forged = published(cell, cell.plan(1, establish="always"), forged=forget)
    assert forged.report.passed
    with pytest.raises(TamperedError, match=r"accuracy/gsm8k/answers\.jsonl has other answers than lm-eval's files"):
        check_judgement(cell.store, forged)


# --- by a plan that says otherwise


@pytest.mark.parametrize("other", ["baseline", "anchor"])
def test_a_plan_that_says_otherwise_how_the_other_run_was_asked_is_found(cell: Cell, other: str) -> None:
    cell.baseline(1, 0)
    plan = cell.plan(2)
    message = getattr(plan, other)
    settings = [task.model_copy(update={"seed": 7}) for task in message.accuracy]
    (task,) = plan.accuracy
    asked = task.model_copy(update={"settings": task.settings.model_copy(update={"seed": 7})})
    claim = {other: message.model_copy(update={"accuracy": settings}), "accuracy": [asked]}
    with pytest.raises(TamperedError, match="what the plan says is not that of run"):
        check_judgement(cell.store, published(cell, plan.model_copy(update=claim)))


@pytest.mark.parametrize("claim", ["establishes", "new_anchor"])
def test_a_manifest_does_not_make_a_candidate_a_baseline_or_an_anchor(cell: Cell, claim: str) -> None:
    cell.baseline(1, 0)
    run = cell.published(2, 0) if claim == "establishes" else cell.published(2, 0, establish="always")
    path = Path(cell.store.locate(f"{run.report.prefix}/manifest.json"))
    path.chmod(0o644)
    path.write_text(json.dumps(json.loads(path.read_text()) | {claim: True}))
    with pytest.raises(StoreError, match="another kind of run than its manifest says"):
        read_run(cell.store, CELL, run.run_id)


def test_a_plan_without_the_recipes_gate_against_the_anchor_is_not_the_recipes(cell: Cell) -> None:
    cell.baseline(1, 0)
    message = difference_from(without(cell.plan(2), ANCHOR), Recipe.model_validate(cell.recipe))
    assert "gates" in message.split(":")[0].split(", ")
