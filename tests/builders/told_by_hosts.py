"""Changes of reports, as a host may publish them, and a desk that decides about these reports."""

import pytest

from tests.approval.builder import Change
from tests.builders.changed import changed
from tests.report.builder import passed_report
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.approver.decisions import Desk
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.loading import load_recipe


def change_of(part: str, **changes: object) -> Change:
    return lambda report: changed(report, part, **changes)


@pytest.fixture
def desk(store: Store, key: PrivateKey, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """What else of a plan must be the recipe's is tested with the plan's conformity."""
    monkeypatch.setattr("vllm_qualify.approver.decisions.difference", lambda *_: "")
    own = passed_report().plan.cell.release.engine.digest
    return Desk(store, key, {"llama-3.1-8b": load_recipe("reference")}, engines=[own])
