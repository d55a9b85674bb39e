"""What a plan from another machine leaves out, changes or makes long, so that a person signs without having seen it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.approval.builder import CELL, NEWER, OLDER, RUN, Change, approved, publish_report, with_gate
from tests.approval.conftest import key, store
from tests.approver.desk import PAGE, asked
from tests.builders.approval_commands import WHO, Command
from tests.builders.approval_commands import command as command
from tests.builders.approval_commands import store as cli_store
from tests.builders.changed import changed
from tests.builders.told_by_hosts import change_of, desk
from tests.html import Reader
from tests.report.builder import passed_report
from vllm_qualify.approval.decision import why_by_hand
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.approver.decisions import Desk
from vllm_qualify.plan.cell import Baseline, CellPlan
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.recipe import Approval
from vllm_qualify.report.head import facts
from vllm_qualify.report.model import Report

__all__ = ["desk", "key", "store"]
in_store = cli_store

AUTOMATIC = change_of("plan", approval=Approval(automatic=True))
OF_THE_MODEL = "server.trust-remote-code: the model's own Python code runs in the server"


def served(**options: object) -> Change:
    """The server with further options, of which the plan's list of code says nothing."""

    def change(report: Report) -> Report:
        arguments = report.plan.server.arguments | options
        return changed(changed(report, "plan.server", arguments=arguments), "plan", code=[])

    return change


def opened(report: Report) -> Report:
    """Its server can be changed while it runs."""
    return changed(report, "plan.server", environment=report.plan.server.environment | {"VLLM_SERVER_DEV_MODE": "1"})


def with_a_task_folder(report: Report) -> Report:
    tasks = [task.model_copy(update={"folder": Path("/srv/tasks")}) for task in report.plan.accuracy]
    return changed(report, "plan", accuracy=tasks, code=[])


@pytest.fixture
def page(store: Store, key: PrivateKey, tmp_path: Path) -> Callable[[Change], str]:
    """What Ada sees of a report at the approver, which has a recipe of that name."""
    service = asked(Desk(store, key, {"llama-3.1-8b": load_recipe("reference")}), tmp_path / "approvers.json")
    adas = service.newcomer("Ada")

    def seen(change: Change) -> str:
        publish_report(store, tmp_path / "runs", change=change)
        return " ".join(Reader(service.look(PAGE, "Ada", adas).text).text.split())

    return seen


# --- code


@pytest.mark.parametrize("option", ["trust-remote-code", "trust_remote_code", "trust-remote"])
def test_code_that_a_plan_does_not_name_is_shown_and_is_for_a_person(option: str, page: Callable[[Change], str]) -> None:
    message = OF_THE_MODEL.replace("trust-remote-code", option)
    report = served(**{option: True})(passed_report())
    assert dict(facts(report))["Trusts code"] == message
    assert why_by_hand(AUTOMATIC(passed_report())) == ""
    assert "runs code" in why_by_hand(AUTOMATIC(report))
    assert f"Trusts code{message}" in page(served(**{option: True}))


def test_a_server_that_can_be_changed_after_the_check_is_shown_and_is_for_a_person(page: Callable[[Change], str]) -> None:
    report = opened(passed_report())
    message = "environment.VLLM_SERVER_DEV_MODE: whoever reaches the server may"
    assert message in dict(facts(report))["Opens the server"]
    assert "may change after the check" in why_by_hand(AUTOMATIC(report))
    assert f"Opens the server{message}" in page(opened)


def test_a_folder_of_tasks_that_a_plan_does_not_name_is_shown_too() -> None:
    report = with_a_task_folder(passed_report())
    assert "accuracy.gsm8k: lm-eval runs what its task_folder says" in dict(facts(report))["Trusts code"]
    assert "runs code" in why_by_hand(AUTOMATIC(report))


@pytest.mark.usefixtures("believed")
def test_who_deploys_is_warned_of_the_models_code(in_store: Store, command: Command, tmp_path: Path) -> None:
    assert command("approve", RUN, *WHO)[0] == 0
    assert "trusts" not in command("approved", "get", CELL)[1].splitlines()[0]
    publish_report(in_store, tmp_path / "runs", NEWER, served(**{"trust-remote-code": True}))
    assert command("approve", NEWER, *WHO)[0] == 0
    assert f"trusts {OF_THE_MODEL}" in command("approved", "get", CELL)[1].splitlines()[0]


@pytest.mark.usefixtures("believed")
def test_who_deploys_is_warned_of_what_opens_the_server(in_store: Store, command: Command, tmp_path: Path) -> None:
    assert command("approve", RUN, *WHO)[0] == 0
    assert "opens" not in command("approved", "get", CELL)[1].splitlines()[0]
    publish_report(in_store, tmp_path / "runs", NEWER, opened)
    assert command("approve", NEWER, *WHO)[0] == 0
    assert "opens environment.VLLM_SERVER_DEV_MODE: whoever" in command("approved", "get", CELL)[1].splitlines()[0]


# --- the decision


def test_the_page_says_how_long_an_approval_would_hold(page: Callable[[Change], str]) -> None:
    """The days are the plan's, which another machine made."""
    assert "An approval holds for 3650 days" in page(change_of("plan", approval=Approval(valid_days=3650)))


def test_the_page_says_what_is_not_as_the_approvers_recipe_says(page: Callable[[Change], str]) -> None:
    """Also where the plan asks for a person: whoever lowers a gate would not ask for an automatic approval."""
    assert "was not qualified as the approver's recipe says: the recipe has no GPU type 'h200'" in page(lambda report: report)


def test_the_page_says_which_tries_are_not_counted(store: Store, page: Callable[[Change], str], tmp_path: Path) -> None:
    publish_report(store, tmp_path / "runs", OLDER, with_gate("fail"))
    assert f"does not count {OLDER}, in which its release did not pass" in page(change_of("plan", tries=[]))


@pytest.mark.usefixtures("believed")
def test_who_approves_on_the_command_line_is_told_the_same(in_store: Store, command: Command, tmp_path: Path) -> None:
    """It stops nothing: a person may know why."""
    publish_report(in_store, tmp_path / "runs", OLDER, with_gate("fail"))
    publish_report(in_store, tmp_path / "runs", NEWER, change_of("plan", tries=[]))
    code, _, told = command("approve", NEWER, *WHO)
    assert code == 0
    assert f"note: run {NEWER} does not count {OLDER}, in which its release did not pass" in told


# --- the baseline


def compared_with(run_id: str, plan: CellPlan, **of_cell: str) -> Baseline:
    return Baseline(
        run_id=run_id,
        cell=plan.cell.model_copy(update=of_cell),
        fingerprint=plan.fingerprint,
        client_version=plan.client_version,
        accuracy=[task.settings for task in plan.accuracy],
        load=plan.load,
        likelihood=plan.likelihood,
        served_model_name=plan.server.served_model_name,
    )


def test_a_run_that_is_compared_with_another_baseline_than_the_cells_is_for_a_person(
    desk: Desk, store: Store, key: PrivateKey, tmp_path: Path
) -> None:
    """Whoever starts a run may name its baseline: of a model that answers worse, nothing is a loss."""
    approved(store, publish_report(store, tmp_path / "runs", OLDER, change_of("plan", establishes=True)), key)

    def against(run_id: str, **of_cell: str) -> Change:
        return lambda report: changed(AUTOMATIC(report), "plan", baseline=compared_with(run_id, report.plan, **of_cell))

    honest = publish_report(store, tmp_path / "runs", RUN, against(OLDER))
    assert desk.why_by_hand(honest) == ""
    for number, (named, of_cell) in enumerate([("20260101T080000Z-ffffff", {}), (OLDER, {"variant": "worse"})]):
        other = publish_report(store, tmp_path / "runs", f"20260315T08000{number}Z-ffffff", against(named, **of_cell))
        assert f"is compared with run {named} of" in desk.why_by_hand(other)
        assert f"and the approved baseline of {CELL} is run {OLDER}" in desk.why_by_hand(other)
