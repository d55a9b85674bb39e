"""A report that names one thing and serves another: the statement would name the first, and people would deploy the second."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.approval.builder import ADA, CELL, NOW, RUN, VALID_DAYS, approved, made_key, publish_report
from tests.report.builder import image_report, passed_report
from vllm_qualify.approval.actions import entry_of
from vllm_qualify.approval.decision import make_decision
from vllm_qualify.approval.errors import TamperedError
from vllm_qualify.approval.layout import JSON, approval_key
from vllm_qualify.approval.pointer import advance
from vllm_qualify.approval.published import PublishedRun, stored_object
from vllm_qualify.approval.signing import PrivateKey, sign
from vllm_qualify.approval.statement import statement
from vllm_qualify.approval.verify import verify
from vllm_qualify.engine.server import Part
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.contradiction import contradiction
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.report.model import Report

Change = Callable[[Report], Report]
EVIL = "evil/model"
COMMIT = "e" * 40


def planned(report: Report, **changes: object) -> Report:
    return report.model_copy(update={"plan": report.plan.model_copy(update=changes)})


def served(**changes: object) -> Change:
    return lambda report: planned(report, server=report.plan.server.model_copy(update=changes))


def released(**changes: object) -> Change:
    def change(report: Report) -> Report:
        release = report.plan.cell.release.model_copy(update=changes)
        return planned(report, cell=report.plan.cell.model_copy(update={"release": release}))

    return change


def with_options(*parts: Part, **options: object) -> Change:
    """The server with further options, and with parts after its model's own."""

    def change(report: Report) -> Report:
        server, release = report.plan.server, report.plan.cell.release
        model = Part(option="model", name=release.model, revision=release.revision)
        arguments = server.arguments | {name.replace("_", "-"): value for name, value in options.items()}
        return planned(report, server=server.model_copy(update={"arguments": arguments, "parts": [model, *parts]}))

    return change


def of_image(report: Report) -> Report:
    plan = image_report().plan
    cell = report.plan.cell.model_copy(update={"release": plan.cell.release})
    return planned(report, server=plan.server, cell=cell)


def another_image(report: Report) -> Report:
    report = of_image(report)
    return served(engine=report.plan.server.engine.model_copy(update={"digest": f"sha256:{'e' * 64}"}))(report)


def a_process_of_an_image(report: Report) -> Report:
    return served(engine=report.plan.server.engine)(planned(of_image(report), server=report.plan.server))


def named_parts(report: Report) -> Report:
    """The model's own part, which the statement takes its subject from, names the release; the server gets another one."""
    return served(model=EVIL)(with_options()(report))


CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "model": (served(model=EVIL), "it serves evil/model at 9372c470"),
    "named by its part": (named_parts, "it serves evil/model at 9372c470"),
    "revision": (served(revision=COMMIT), "it serves meta-llama/Llama-3.1-8B-Instruct at eeee"),
    "folder for the hub's": (served(model="/evil", revision=None), "it serves a folder"),
    "the hub's for a folder": (released(model="./model", revision=f"sha256:{'a' * 64}"), "it serves meta-llama"),
    "folder by the hub's name": (
        lambda report: released(revision=f"sha256:{'a' * 64}")(served(model="/evil", revision=None)(report)),
        "it serves a folder",
    ),
    "files of another folder": (
        lambda report: released(model="./m", revision=f"sha256:{'a' * 64}", files={"config.json": "b" * 64})(
            served(model="/m", revision=None)(report)
        ),
        "its files are not those of its digest",
    ),
    "kind": (served(kind="tensorrt-llm"), "its engine is"),
    "image": (another_image, "its engine is"),
    "launcher": (a_process_of_an_image, "its engine is"),
    "part of another commit": (
        lambda report: planned(
            with_options()(report),
            server=with_options()(report).plan.server.model_copy(
                update={"parts": [Part(option="model", name=report.plan.server.model, revision=COMMIT)]}
            ),
        ),
        "its model is not what its part names",
    ),
    "part of another tokenizer": (
        with_options(Part(option="tokenizer", name="good/words", revision=COMMIT), tokenizer="evil/words"),
        "its tokenizer is not what its part names",
    ),
    "part of a template that is not there": (
        with_options(
            Part(option="chat-template", name="/good.jinja", revision=f"sha256:{'a' * 64}"), chat_template="/evil.jinja"
        ),
        "its chat-template is not what its part names",
    ),
    "part of another draft": (
        with_options(
            Part(option="speculative-config", name="good/draft", revision=COMMIT),
            speculative_config={"method": "eagle", "model": "evil/draft", "num_speculative_tokens": 1},
        ),
        "its speculative-config is not what its part names",
    ),
    "model without a part": (served(parts=[]), "its model meta-llama/Llama-3.1-8B-Instruct has no part"),
    "model of a part that is a file": (
        served(parts=[Part(option="model", name="meta-llama/Llama-3.1-8B-Instruct", revision=f"sha256:{'a' * 64}")]),
        "its model is not what its part names",
    ),
    "tokenizer without a part": (with_options(tokenizer="evil/words"), "its tokenizer evil/words has no part"),
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "store").mkdir()
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def key(tmp_path: Path) -> PrivateKey:
    return made_key(tmp_path / "key.pem")


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_plan_that_serves_another_thing_than_it_names_is_not_signed(
    name: str, store: Store, key: PrivateKey, tmp_path: Path
) -> None:
    change, message = CONTRADICTIONS[name]
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
        with_options(Part(option="lora-modules", name="/l", revision=f"sha256:{'a' * 64}"), lora_modules=["x=/l"]),
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
    bring_into_force_unseen(store, honest, run, key)
    with pytest.raises(TamperedError, match="what was signed could not be approved"):
        verify(store, CELL, [key.public_key], NOW)


def bring_into_force_unseen(store: Store, honest: PublishedRun, run: PublishedRun, key: PrivateKey) -> None:
    """Sign as a version did that did not look: the document that is stated is that of `run`."""
    decided = make_decision(store, honest, ADA, VALID_DAYS, NOW)
    body = sign(statement(honest, decided), key)
    assert run.document["plan"]["server"]["model"] == EVIL
    store.put_new(approval_key(CELL, RUN), body, JSON)
    advance(store, CELL, entry_of(run, decided.decision, stored_object(approval_key(CELL, RUN), body)))


# --- a gate that was not judged, and that nothing says so of


def test_a_gate_against_a_baseline_cannot_be_left_out_unsaid(store: Store, key: PrivateKey, tmp_path: Path) -> None:
    """A run that becomes a baseline judges no gate against one. Without `not_judged` the statement would not say that."""

    compared = gate_of(metric="exact_match", task="gsm8k", filter="strict-match", max_loss=0.02, unit="fraction")

    def change(report: Report) -> Report:
        return planned(report, establishes=True, gates=[*report.plan.gates, compared])

    run = publish_report(store, tmp_path / "runs", change=change)
    with pytest.raises(CallerError, match="it has no verdict on exact_match"):
        approved(store, run, key)
