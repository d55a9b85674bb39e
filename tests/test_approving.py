"""How a report that passed becomes an approval in the flow: by the recipe's rule, or by a person whom the flow waits for."""

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.schemas.objects import State

from flows.qualify import qualify_release, with_decision
from tasks import approve
from tests.approval.builder import (
    BOB_REJECTS,
    CELL,
    NEWER,
    NOW,
    RUN,
    VALID_DAYS,
    Change,
    approved,
    made_key,
    of_plan,
    of_variant,
    publish_report,
    waiver,
    with_gate,
    with_judgement,
)
from tests.approval.stores import pointer_of
from tests.builders.changed import changed
from vllm_qualify.approval.actions import reject
from vllm_qualify.approval.pointer import read_pointer
from vllm_qualify.approval.published import read_run
from vllm_qualify.approval.signing import PRIVATE_KEY
from vllm_qualify.errors import CallerError
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.recipe import Approval
from vllm_qualify.report.model import Report
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.publishing import Published
from vllm_qualify.runs.request import QualifyRelease

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("believed"), pytest.mark.usefixtures("on_prefect")]

AUTOMATIC = Approval(automatic=True, valid_days=VALID_DAYS)
BY_HAND = Approval(automatic=False, valid_days=VALID_DAYS)


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PRIVATE_KEY, f"{PRIVATE_KEY}_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key in the environment."""
    made_key(tmp_path / "approver.pem")
    monkeypatch.setenv(f"{PRIVATE_KEY}_FILE", str(tmp_path / "approver.pem"))


def published(
    store: Store, folder: Path, rule: Approval, change: Change = lambda report: report, run_id: str = RUN
) -> Published:
    def ruled(report: Report) -> Report:
        return of_plan(approval=rule)(change(report))

    run_published = publish_report(store, folder / "runs", run_id, ruled)
    run = Run(folder=folder / "runs" / run_published.run_id)
    report = run_published.report
    (run.folder / "report.json").write_text(report.model_dump_json())
    (run.folder / "plan.json").write_text(report.plan.model_dump_json())
    return Published(outcome=report.outcome, passed=report.passed, run=run, page="page", manifest="manifest")


def settled(reported: Published, store: Store, timeout_s: float = 0) -> Published:
    return all_settled([reported], store, timeout_s)[0]


def all_settled(reports: list[Published], store: Store, timeout_s: float) -> list[Published]:
    """As `qualify_release` ends; what becomes of the flow run is looked at, too."""
    request = QualifyRelease(recipe="reference", store=store.url, decision_timeout_s=timeout_s)

    @flow(name="settling")
    def ending() -> list[Published]:
        reported = [approve.approve_automatically(each, request.store) for each in reports]
        return [with_decision(each, request) for each in reported]

    state: State[list[Published]] = ending(return_state=True)
    assert state.is_completed(), state
    return state.result()


@pytest.mark.usefixtures("key")
def test_a_recipe_that_allows_it_approves_what_passed(store: Store, tmp_path: Path) -> None:
    waiting = settled(published(store, tmp_path, AUTOMATIC), store)
    assert waiting.decision is not None
    assert waiting.decision.startswith("approved by recipe on ")
    assert pointer_of(store).last.by == "recipe"


def without_a_baseline(report: Report) -> Report:
    return with_judgement(not_judged=[report.plan.gates[0]])(report)


def trusting(*, confined: bool) -> Change:
    """The model's own code was trusted, and ran confined or not."""

    def change(report: Report) -> Report:
        arguments = {**report.plan.server.arguments, "trust-remote-code": True}
        return changed(changed(report, "plan.server", arguments=arguments), "plan.fingerprint", confined=confined)

    return change


@pytest.mark.usefixtures("key")
@pytest.mark.parametrize(
    ("rule", "change"),
    [
        pytest.param(BY_HAND, lambda report: report, id="the recipe says so"),
        pytest.param(AUTOMATIC, trusting(confined=False), id="trusted code was not confined"),
        pytest.param(AUTOMATIC, trusting(confined=True), id="trusted code"),
        pytest.param(AUTOMATIC, with_gate("fail", waiver(date.max)), id="a gate was waived"),
        pytest.param(AUTOMATIC, with_gate("fail"), id="a gate failed"),
        pytest.param(AUTOMATIC, without_a_baseline, id="a gate was not judged"),
    ],
)
def test_nothing_is_approved_automatically_that_a_person_must_decide(
    store: Store, tmp_path: Path, rule: Approval, change: Change
) -> None:
    assert settled(published(store, tmp_path, rule, change), store).decision is None
    assert read_pointer(store, CELL) is None


def test_without_a_key_a_report_stays_to_be_decided(store: Store, tmp_path: Path) -> None:
    assert settled(published(store, tmp_path, AUTOMATIC), store).decision is None
    assert not list(store.keys("approvals/"))


def meanwhile(act: Callable[[], object]) -> Callable[[float], None]:
    """What the flow does in place of its first sleep: somebody acts elsewhere while it waits."""
    acted: list[object] = []

    def sleep(_: float) -> None:
        if not acted:
            acted.append(act())

    return sleep


def test_the_flow_waits_for_a_person(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, key = published(store, tmp_path, BY_HAND), made_key(tmp_path / "adas.pem")
    run = read_run(store, CELL, waiting.run.id)
    monkeypatch.setattr(approve, "sleep", meanwhile(lambda: approved(store, run, key)))
    done = settled(waiting, store, timeout_s=60)
    assert done.decision == "approved by Ada on 2026-03-14, until 2026-06-12"
    assert not done.rejected


def test_a_rejection_ends_the_wait_and_is_reported(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = published(store, tmp_path, BY_HAND)
    run = read_run(store, CELL, waiting.run.id)
    monkeypatch.setattr(approve, "sleep", meanwhile(lambda: reject(store, run, BOB_REJECTS, NOW)))
    done = settled(waiting, store, timeout_s=60)
    assert done.rejected
    assert done.decision == "rejected by Bob on 2026-03-14: we do not need it"


def test_decisions_that_nobody_makes_in_time_stay_to_be_made(store: Store, tmp_path: Path) -> None:
    """Each cell is waited for, and the flow run completes."""
    cells = (("fp8", RUN), ("bf16", NEWER))
    waiting = [published(store, tmp_path, BY_HAND, of_variant(name), run_id) for name, run_id in cells]
    assert [each.decision for each in all_settled(waiting, store, timeout_s=1)] == [None, None]
    assert not list(store.keys("approvals/"))


@pytest.mark.usefixtures("key")
def test_a_rejection_that_came_first_holds_against_the_recipe(store: Store, tmp_path: Path) -> None:
    waiting = published(store, tmp_path, AUTOMATIC)
    reject(store, read_run(store, CELL, waiting.run.id), BOB_REJECTS, NOW)
    done = settled(waiting, store)
    assert done.rejected
    assert "rejected by Bob on 2026-03-14" in (done.decision or "")


def test_a_bad_key_is_reported_before_anything_starts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRIVATE_KEY, "no key")
    with pytest.raises(CallerError, match="not a private key"):
        qualify_release(QualifyRelease(recipe="reference", store=store.url))
