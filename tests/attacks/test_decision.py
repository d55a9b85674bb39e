"""A decision that lies in the store before anybody decided, and a report that is not the one that was looked at."""

import json
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.approval.builder import ADA, CELL, NOW, RUN, TODAY, VALID_DAYS, made_key, publish_report, waiver, with_gate
from tests.builders.approval_commands import WHO, Command
from tests.builders.approval_commands import command as command
from tests.builders.approval_commands import store as cli_store
from vllm_qualify.approval.actions import approve
from vllm_qualify.approval.decision import Decision, make_decision
from vllm_qualify.approval.layout import JSON, approval_key, decision_key
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store

in_store = cli_store


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def planted(store: Store, run: PublishedRun, folder: Path, **changes: object) -> None:
    """The decision that Ada would make, changed, and there before she makes it."""
    (folder / "elsewhere").mkdir()
    elsewhere = open_store((folder / "elsewhere").as_uri())
    made = make_decision(elsewhere, run, ADA, VALID_DAYS, NOW).decision.model_dump(mode="json") | changes
    store.put_new(decision_key(run.cell, run.run_id), Decision.model_validate(made).model_dump_json().encode(), JSON)


OVER = NOW + timedelta(days=10)


@pytest.mark.parametrize(
    ("is_waived", "changes", "error", "message"),
    [
        (False, {"expires": date(2099, 1, 1)}, StoreError, "holds until 2099-01-01, longer than it may"),
        (False, {"expires": None}, StoreError, "holds until None, longer than it may"),
        (False, {"at": NOW + timedelta(days=30)}, StoreError, "is of the future"),
        (True, {"expires": TODAY + timedelta(days=60)}, StoreError, "longer than it may"),
        (True, {"at": OVER}, CallerError, "its waiver expired"),
    ],
    ids=["too-long", "for-ever", "of-the-future", "outlives-its-waiver", "of-a-day-without-its-waiver"],
)
def test_a_planted_decision_is_not_signed(
    empty: Store, tmp_path: Path, is_waived: bool, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    change = with_gate("fail", waiver(TODAY + timedelta(days=3))) if is_waived else lambda report: report
    run = publish_report(empty, tmp_path / "runs", change=change)
    planted(empty, run, tmp_path, **changes)
    with pytest.raises(error, match=message):
        approve(empty, run, ADA, VALID_DAYS, made_key(tmp_path / "key.pem"), OVER if error is CallerError else NOW)
    assert not empty.exists(approval_key(CELL, RUN))


@pytest.mark.parametrize("action", ["approve", "reject"])
def test_only_the_published_report_is_decided_about(in_store: Store, command: Command, tmp_path: Path, action: str) -> None:
    """With another run's id in it, the report that was looked at was not the one that was signed."""
    report = json.loads(in_store.get(f"reports/{CELL}/{RUN}/report.json"))
    report["made_by"] = "somebody else"
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "report.json").write_text(json.dumps(report))
    for named in ("shown", "shown/report.json"):
        code, _, err = command(action, str(tmp_path / named), *WHO)
        assert (code, "this file is not the report that was published" in err) == (2, True)
    assert list(in_store.keys("approvals/")) == []
