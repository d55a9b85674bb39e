"""The approver's service: people decide there, each in their own name."""

from pathlib import Path

import pytest

from tests.approval.builder import CELL, NEWER, RUN, publish_report, with_gate
from tests.approval.stores import pointer_of
from tests.approver.desk import PAGE, Asked, asked
from tests.builders.changed import changed
from tests.html import Reader
from vllm_qualify.approval.decision import read_decision
from vllm_qualify.approval.pointer import read_pointer
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.approver.decisions import Desk
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.report.model import Report

pytestmark = pytest.mark.usefixtures("believed")


@pytest.fixture
def service(store: Store, key: PrivateKey, tmp_path: Path) -> Asked:
    return asked(Desk(store, key, {}), tmp_path / "approvers.json")


@pytest.fixture
def adas(service: Asked) -> str:
    """Ada's key."""
    return service.newcomer("Ada")


def form(run: PublishedRun, decision: str = "approve", reason: str = "it is faster") -> dict[str, str]:
    return {"decision": decision, "reason": reason, "report_sha256": run.report_object.sha256}


def test_ada_sees_the_reports_and_the_gates(service: Asked, run: PublishedRun, adas: str) -> None:
    reports = Reader(service.look("/", "Ada", adas).text)
    assert PAGE in reports.having("href")
    shown = Reader(service.look(PAGE, "Ada", adas).text)
    named = (CELL, RUN, run.report.plan.cell.release.revision, run.report_object.sha256)
    for expected in (*named, "exact_match", "is not approved"):
        assert expected in shown.text


def test_checks_that_hold_are_one_line_and_others_are_rows(service: Asked, store: Store, tmp_path: Path, adas: str) -> None:
    def change(report: Report) -> Report:
        first, *others = report.judgement.gates
        checks = [
            changed(first, gate=gate_of(metric=name, minimum=1, unit="bool"), verdict=verdict)
            for name, verdict in (("contract_models", "pass"), ("contract_chat", "pass"), ("contract_seed", "fail"))
        ]
        return changed(report, "judgement", gates=[first, *others, *checks], verdict="fail")

    publish_report(store, tmp_path / "others", NEWER, change)
    page = service.look(PAGE.replace(RUN, NEWER), "Ada", adas).text
    table, _, rest = page.partition("</table>")
    assert "contract_seed" in table
    assert "contract_models" not in table
    assert "6 yes-or-no checks hold" in rest
    assert "contract_models" in rest


def test_ada_approves_and_revokes_in_her_own_name(service: Asked, store: Store, run: PublishedRun, adas: str) -> None:
    answer = service.decide(form(run), "Ada", adas)
    assert answer.status_code == 200
    assert "approved by Ada" in answer.text
    assert pointer_of(store).last.by == "Ada"
    assert service.decide(form(run, "revoke", "it fell over"), "Ada", adas).status_code == 200
    revoked = pointer_of(store).last.revoked
    assert revoked
    assert revoked.by == "Ada"


def test_a_rejection_is_kept(service: Asked, store: Store, run: PublishedRun, adas: str) -> None:
    assert service.decide(form(run, "reject", "nobody needs it"), "Ada", adas).status_code == 200
    assert read_decision(store, CELL, RUN).decision.reason == "nobody needs it"
    answer = service.decide(form(run), "Bob", service.newcomer("Bob"))
    assert (answer.status_code, "already rejected by Ada" in answer.text) == (409, True)
    assert read_pointer(store, CELL) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"decision": "sign"}, "&#39;sign&#39; is not a decision"),
        ({"decision": ""}, "is not a decision"),
        ({"reason": ""}, "reason"),
        ({"reason": "x" * 501}, "500"),
        ({"report_sha256": "0" * 64}, "not the report that you saw"),
        ({"report_sha256": ""}, "not the report that you saw"),
    ],
)
def test_a_mistake_is_reported_and_decides_nothing(
    service: Asked, store: Store, run: PublishedRun, adas: str, wrong: dict[str, str], message: str
) -> None:
    answer = service.decide(form(run) | wrong, "Ada", adas)
    assert answer.status_code == 409
    assert message in answer.text
    assert not list(store.keys("approvals/"))


def test_what_did_not_pass_is_not_approved(service: Asked, store: Store, adas: str, tmp_path: Path) -> None:
    run = publish_report(store, tmp_path / "runs", change=with_gate("fail"))
    assert service.decide(form(run), "Ada", adas).status_code == 409
    assert read_pointer(store, CELL) is None


@pytest.mark.parametrize("page", [f"/runs/20990101T000000Z-000000/{CELL}", "/runs/x/not-a-cell", "/runs/../../etc/passwd"])
def test_a_report_that_is_not_there_is_reported(service: Asked, adas: str, page: str) -> None:
    assert service.look(page, "Ada", adas).status_code in (404, 409)


def test_health_needs_no_login(service: Asked) -> None:
    assert service.look("/health").json() == {"status": "ok"}
