"""A report that names one thing and serves another: the statement would name the first, and people would deploy the second."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.approval.builder import ADA, CELL, NOW, RUN, VALID_DAYS, Change, approved, publish_report
from tests.approval.conftest import key, store
from tests.builders.changed import changed
from tests.builders.told_by_hosts import change_of
from tests.report.builder import image_report, passed_report
from vllm_qualify.approval.actions import entry_of
from vllm_qualify.approval.decision import make_decision
from vllm_qualify.approval.errors import TamperedError
from vllm_qualify.approval.layout import JSON, approval_key
from vllm_qualify.approval.pointer import advance
from vllm_qualify.approval.published import stored_object
from vllm_qualify.approval.signing import PrivateKey, sign
from vllm_qualify.approval.statement import statement
from vllm_qualify.approval.verify import verify
from vllm_qualify.engine.server import Part
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.contradiction import contradiction
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.report.model import Report

__all__ = ["key", "store"]

MODEL, EVIL = "meta-llama/Llama-3.1-8B-Instruct", "evil/model"
COMMIT, DIGEST = "e" * 40, f"sha256:{'a' * 64}"
FOLDER = {"model": "./m", "revision": DIGEST, "files": {"config.json": "b" * 64}}


def served(**changes: object) -> Change:
    return change_of("plan.server", **changes)


def released(**changes: object) -> Change:
    return change_of("plan.cell.release", **changes)


def both(first: Change, second: Change) -> Change:
    return lambda report: second(first(report))


def with_options(*parts: Part, **options: object) -> Change:
    """The server with further options, and with parts after its model's own."""

    def change(report: Report) -> Report:
        server, release = report.plan.server, report.plan.cell.release
        model = Part(option="model", name=release.model, revision=release.revision)
        arguments = server.arguments | {name.replace("_", "-"): value for name, value in options.items()}
        return changed(report, "plan.server", arguments=arguments, parts=[model, *parts])

    return change


def of_image(report: Report) -> Report:
    plan = image_report().plan
    return changed(changed(report, "plan.cell", release=plan.cell.release), "plan", server=plan.server)


def another_image(report: Report) -> Report:
    return changed(of_image(report), "plan.server.engine", digest=f"sha256:{'e' * 64}")


def a_process_of_an_image(report: Report) -> Report:
    return changed(of_image(report), "plan", server=report.plan.server)


CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "model": (served(model=EVIL), "it serves evil/model at 9372c470"),
    # The model's own part, which the statement takes its subject from, names the release; the server gets another one.
    "named by its part": (both(with_options(), served(model=EVIL)), "it serves evil/model at 9372c470"),
    "revision": (served(revision=COMMIT), f"it serves {MODEL} at eeee"),
    "folder for the hub's": (served(model="/evil", revision=None), "it serves a folder"),
    "the hub's for a folder": (released(model="./model", revision=DIGEST), "it serves meta-llama"),
    "folder by the hub's name": (both(served(model="/evil", revision=None), released(revision=DIGEST)), "it serves a folder"),
    "files of another folder": (
        both(served(model="/m", revision=None), released(**FOLDER)),
        "its files are not those of its digest",
    ),
    "kind": (served(kind="tensorrt-llm"), "its engine is"),
    "image": (another_image, "its engine is"),
    "launcher": (a_process_of_an_image, "its engine is"),
    "part of another commit": (
        served(parts=[Part(option="model", name=MODEL, revision=COMMIT)]),
        "its model is not what its part names",
    ),
    "part of another tokenizer": (
        with_options(Part(option="tokenizer", name="good/words", revision=COMMIT), tokenizer="evil/words"),
        "its tokenizer is not what its part names",
    ),
    "part of a template that is not there": (
        with_options(Part(option="chat-template", name="/good.jinja", revision=DIGEST), chat_template="/evil.jinja"),
        "its chat-template is not what its part names",
    ),
    "part of another draft": (
        with_options(
            Part(option="speculative-config", name="good/draft", revision=COMMIT),
            speculative_config={"method": "eagle", "model": "evil/draft", "num_speculative_tokens": 1},
        ),
        "its speculative-config is not what its part names",
    ),
    "model without a part": (served(parts=[]), f"its model {MODEL} has no part"),
    "model of a part that is a file": (
        served(parts=[Part(option="model", name=MODEL, revision=DIGEST)]),
        "its model is not what its part names",
    ),
    "tokenizer without a part": (with_options(tokenizer="evil/words"), "its tokenizer evil/words has no part"),
}


@pytest.mark.parametrize(("change", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_plan_that_serves_another_thing_than_it_names_is_not_signed(
    change: Change, message: str, store: Store, key: PrivateKey, tmp_path: Path
) -> None:
    run = publish_report(store, tmp_path / "runs", change=change)
    with pytest.raises(CallerError, match=f"cannot be approved: {message}"):
        approved(store, run, key)
    assert not list(store.keys("approvals/"))


@pytest.mark.parametrize(
    "change",
    [
        lambda report: report,
        of_image,
        with_options(Part(option="tokenizer", name="good/words", revision=COMMIT), tokenizer="good/words"),
        with_options(Part(option="lora-modules", name="/l", revision=DIGEST), lora_modules=["x=/l"]),
    ],
)
def test_a_plan_that_serves_what_it_names_is(change: Change, store: Store, key: PrivateKey, tmp_path: Path) -> None:
    approved(store, publish_report(store, tmp_path / "runs", change=change), key)
    assert verify(store, CELL, [key.public_key], NOW).run_id == RUN


def test_a_draft_at_the_commit_of_its_part_is_no_contradiction() -> None:
    draft = Part(option="speculative-config", name="good/draft", revision=COMMIT)
    speculative = {"method": "eagle", "model": "good/draft", "num_speculative_tokens": 1}
    assert contradiction(with_options(draft, speculative_config=speculative)(passed_report()).plan) == ""
    without = contradiction(with_options(speculative_config=speculative)(passed_report()).plan)
    assert without == "its speculative-config good/draft has no part, so no commit of it is named"


def test_what_an_earlier_version_signed_of_such_a_plan_does_not_hold(store: Store, key: PrivateKey, tmp_path: Path) -> None:
    run = publish_report(store, tmp_path / "runs", change=served(model=EVIL))
    honest = replace(run, report=served(model=run.report.plan.cell.release.model)(run.report))
    # Signed as by a version that did not look: the document that is stated is that of `run`.
    decided = make_decision(store, honest, ADA, VALID_DAYS, NOW)
    body = sign(statement(honest, decided), key)
    assert run.document["plan"]["server"]["model"] == EVIL
    store.put_new(approval_key(CELL, RUN), body, JSON)
    advance(store, CELL, entry_of(run, decided.decision, stored_object(approval_key(CELL, RUN), body)))
    with pytest.raises(TamperedError, match="what was signed could not be approved"):
        verify(store, CELL, [key.public_key], NOW)


# --- a gate that was not judged, and that nothing says so of


def test_a_gate_against_a_baseline_cannot_be_left_out_unsaid(store: Store, key: PrivateKey, tmp_path: Path) -> None:
    """A run that becomes a baseline judges no gate against one. Without `not_judged` the statement would not say that."""

    compared = gate_of(metric="exact_match", task="gsm8k", filter="strict-match", max_loss=0.02, unit="fraction")

    def change(report: Report) -> Report:
        return changed(report, "plan", establishes=True, gates=[*report.plan.gates, compared])

    run = publish_report(store, tmp_path / "runs", change=change)
    with pytest.raises(CallerError, match="it has no verdict on exact_match"):
        approved(store, run, key)
