"""A service with two people who may decide, and what it is asked."""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from tests.approval.builder import CELL, RUN
from vllm_qualify.approver.decisions import Desk
from vllm_qualify.approver.people import add_person
from vllm_qualify.approver.service import make_app

PAGE = f"/runs/{RUN}/{CELL}"


@dataclass(frozen=True)
class Asked:
    """The service as a browser sees it."""

    client: TestClient
    approvers: Path

    def look(self, page: str, name: str = "", key: str = "") -> Any:
        return self.client.get(page, headers=login(name, key))

    def decide(self, form: dict[str, str], name: str = "", key: str = "", page: str = PAGE, **headers: str) -> Any:
        return self.client.post(page, data=form, headers=login(name, key) | headers)

    def newcomer(self, name: str) -> str:
        return add_person(self.approvers, name)


def login(name: str, key: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'{name}:{key}'.encode()).decode()}"} if name else {}


def asked(desk: Desk, approvers: Path) -> Asked:
    return Asked(TestClient(make_app(desk, approvers), base_url="https://approver.example.com"), approvers)
