"""How a report that passed becomes an approval in the flow: by the recipe's rule, or by a form of Prefect's that waits."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, get_client, pause_flow_run
from prefect.blocks.system import Secret
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.testing.utilities import prefect_test_harness

from flows.qualify import QualifyRelease, approve_automatically, await_decision, qualify_release
from tasks import approve
from tests.approval.builder import (
    BOB_REJECTS,
    CELL,
    NEWER,
    NOW,
    RUN,
    VALID_DAYS,
    Change,
    made_key,
    of_variant,
    publish_report,
    waiver,
    with_gate,
)
from vllm_qualify.approval.actions import reject
from vllm_qualify.approval.decision import read_decision
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

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("believed")]

AUTOMATIC = Approval(automatic=True, valid_days=VALID_DAYS)
BY_HAND = Approval(automatic=False, valid_days=VALID_DAYS)


@pytest.fixture(scope="module", autouse=True)
def _prefect() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture(autouse=True)
def _asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow that waits looks each second for the answer, not each ten."""
    monkeypatch.setattr(approve, "pause_flow_run", partial(pause_flow_run, poll_interval=1))


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
        report = change(report)
        return report.model_copy(update={"plan": report.plan.model_copy(update={"approval": rule})})

    found = publish_report(store, folder / "runs", run_id, ruled)
    run = Run(folder=folder / "runs" / found.run_id)
    (run.folder / "report.json").write_text(found.report.model_dump_json())
    (run.folder / "plan.json").write_text(found.report.plan.model_dump_json())
    return Published(outcome=found.report.outcome, passed=found.report.passed, run=run, page="page", manifest="manifest")


def settled(found: Published, store: Store, timeout_s: float = 0, block: str = "no-such-block") -> Published:
    return all_settled([found], store, timeout_s, block)[0]


def all_settled(found: list[Published], store: Store, timeout_s: float, block: str = "no-such-block") -> list[Published]:
    """As `qualify_release` ends; what becomes of the flow run is looked at, too."""
    request = QualifyRelease(recipe="reference", store=store.url, decision_timeout_s=timeout_s, signing_key_block=block)

    @flow(name="settling")
    def ending() -> list[Published]:
        reported = [approve_automatically(each, request) for each in found]
        return [await_decision(each, request) for each in reported]

    state: State[list[Published]] = ending(return_state=True)
    assert state.is_completed(), state
    return state.result()


def answered(work: Callable[[], Published], *answers: dict[str, Any]) -> tuple[Published, FlowRun]:
    """What `work` gives once its flow run has waited and got these answers, as Prefect's UI would send them."""
    with ThreadPoolExecutor(1) as pool, get_client(sync_client=True) as client:
        done, times = pool.submit(work), set[Any]()
        for answer in answers:
            waiting = paused(client, times)
            client.resume_flow_run(waiting.id, run_input=answer)
        return done.result(), waiting


def paused(client: SyncPrefectClient, times: set[Any]) -> FlowRun:
    """The flow run that waits, and has not yet waited since one of these times; this one is added."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for found in client.read_flow_runs(flow_run_filter=FlowRunFilter(state={"type": {"any_": [StateType.PAUSED]}})):
            if found.state and found.state.timestamp not in times:
                times.add(found.state.timestamp)
                return found
        time.sleep(0.2)  # between two looks at what another thread does
    raise AssertionError("no flow run waits")


@pytest.mark.usefixtures("key")
def test_a_recipe_that_allows_it_approves_what_passed(store: Store, tmp_path: Path) -> None:
    found = settled(published(store, tmp_path, AUTOMATIC), store)
    assert found.decision is not None
    assert found.decision.startswith("approved by recipe on ")
    pointer = read_pointer(store, CELL)
    assert pointer is not None
    assert pointer.last.by == "recipe"


def test_the_key_may_be_a_secret_block(store: Store, tmp_path: Path) -> None:
    made_key(tmp_path / "approver.pem")
    Secret(value=(tmp_path / "approver.pem").read_text()).save("signs-approvals")
    settled(published(store, tmp_path, AUTOMATIC), store, block="signs-approvals")
    assert read_pointer(store, CELL) is not None


def without_a_baseline(report: Report) -> Report:
    judgement = report.judgement.model_copy(update={"not_judged": [report.plan.gates[0]]})
    return report.model_copy(update={"judgement": judgement})


def trusting(*, confined: bool) -> Change:
    """The model's own code was trusted, and ran confined or not."""

    def change(report: Report) -> Report:
        plan = report.plan
        server = plan.server.model_copy(update={"arguments": {**plan.server.arguments, "trust-remote-code": True}})
        machine = plan.fingerprint.model_copy(update={"confined": confined})
        return report.model_copy(update={"plan": plan.model_copy(update={"server": server, "fingerprint": machine})})

    return change


@pytest.mark.usefixtures("key")
def test_trusted_code_that_was_confined_is_approved_automatically(store: Store, tmp_path: Path) -> None:
    settled(published(store, tmp_path, AUTOMATIC, trusting(confined=True)), store)
    assert read_pointer(store, CELL) is not None


@pytest.mark.usefixtures("key")
@pytest.mark.parametrize(
    ("rule", "change"),
    [
        (BY_HAND, lambda report: report),
        (AUTOMATIC, trusting(confined=False)),
        (AUTOMATIC, with_gate("fail", waiver(datetime.now(UTC).date() + timedelta(days=7)))),
        (AUTOMATIC, with_gate("fail")),
        (AUTOMATIC, without_a_baseline),
    ],
    ids=["the recipe says so", "trusted code was not confined", "a gate was waived", "a gate failed", "a gate was not judged"],
)
def test_nothing_is_approved_automatically_that_a_person_must_decide(
    store: Store, tmp_path: Path, rule: Approval, change: Change
) -> None:
    assert settled(published(store, tmp_path, rule, change), store).decision is None
    assert read_pointer(store, CELL) is None


def test_without_a_key_a_report_stays_to_be_decided(store: Store, tmp_path: Path) -> None:
    assert settled(published(store, tmp_path, AUTOMATIC), store).decision is None
    assert not list(store.keys("approvals/"))


@pytest.mark.usefixtures("key")
def test_the_flow_waits_for_a_release_manager(store: Store, tmp_path: Path) -> None:
    found = published(store, tmp_path, BY_HAND)
    answer = {"decision": "approve", "name": "Ada", "reason": "it is faster"}
    done, waiting = answered(lambda: settled(found, store, timeout_s=60), answer)
    assert done.decision is not None
    assert done.decision.startswith("approved by Ada on ")
    assert not done.rejected
    asked = form_of(waiting)
    assert set(asked["properties"]) >= {"decision", "name", "reason"}
    pointer = read_pointer(store, CELL)
    assert pointer is not None
    assert pointer.last.by == "Ada"


def form_of(waiting: FlowRun) -> dict[str, Any]:
    """The JSON schema that Prefect's UI makes the form of."""
    with get_client(sync_client=True) as client:
        kept = client.filter_flow_run_input(waiting.id, "paused", limit=10, exclude_keys=set())
    (schema,) = (entry for entry in kept if entry.key.endswith("schema"))
    found: dict[str, Any] = json.loads(schema.value)
    return found


@pytest.mark.usefixtures("key")
def test_a_rejection_is_kept_and_told(store: Store, tmp_path: Path) -> None:
    found = published(store, tmp_path, BY_HAND)
    answer = {"decision": "reject", "name": "Bob", "reason": "nobody needs it"}
    done, _ = answered(lambda: settled(found, store, timeout_s=60), answer)
    assert done.rejected
    assert read_pointer(store, CELL) is None
    assert read_decision(store, CELL, found.run.id).decision.by == "Bob"


@pytest.mark.usefixtures("key")
def test_decisions_that_nobody_makes_in_time_stay_to_be_made(store: Store, tmp_path: Path) -> None:
    """Each cell is asked about, and the flow run completes."""
    cells = (("fp8", RUN), ("bf16", NEWER))
    found = [published(store, tmp_path, BY_HAND, of_variant(name), run_id) for name, run_id in cells]
    assert [each.decision for each in all_settled(found, store, timeout_s=1)] == [None, None]
    assert not list(store.keys("approvals/"))


@pytest.mark.usefixtures("key")
def test_a_name_that_cannot_be_kept_is_asked_for_again(store: Store, tmp_path: Path) -> None:
    found = published(store, tmp_path, BY_HAND)
    answers = [{"decision": "approve", "name": name, "reason": "it is faster"} for name in ("recipe", "Ada")]
    done, _ = answered(lambda: settled(found, store, timeout_s=60), *answers)
    assert done.decision is not None
    assert done.decision.startswith("approved by Ada on ")


@pytest.mark.usefixtures("key")
def test_what_somebody_else_decided_meanwhile_holds(store: Store, tmp_path: Path) -> None:
    found = published(store, tmp_path, BY_HAND)
    reject(store, read_run(store, CELL, found.run.id), BOB_REJECTS, NOW)
    late = {"decision": "approve", "name": "Ada", "reason": "it is faster"}
    asked, _ = answered(lambda: settled(found, store, timeout_s=60), late)
    for done in (asked, settled(found, store, timeout_s=1)):
        assert done.rejected
        assert "rejected by Bob on 2026-03-14" in (done.decision or "")


def test_waiting_without_a_key_is_told_before_anything_starts(store: Store) -> None:
    request = QualifyRelease(recipe="reference", store=store.url, decision_timeout_s=60, signing_key_block="no-such-block")
    with pytest.raises(CallerError, match="no key to sign"):
        qualify_release(request)


def test_a_bad_key_is_told_before_anything_starts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRIVATE_KEY, "no key")
    with pytest.raises(CallerError, match="not a private key"):
        qualify_release(QualifyRelease(recipe="reference", store=store.url))
