"""Logins at a registry, and its answers."""

import base64
import json
from pathlib import Path

from tests.releases.docker_registry import PASSWORD, USER
from tests.releases.service import Answer
from vllm_qualify.releases.source import VersionRule

ALL = VersionRule(versions=">=0")


def login(config: Path, registry: str, **fields: str) -> None:
    config.write_text(json.dumps({"auths": {registry: fields}}))


def basic_login(config: Path, registry: str, password: str = PASSWORD) -> None:
    login(config, registry, auth=base64.b64encode(f"{USER}:{password}".encode()).decode())


def bearer(address: str) -> Answer:
    return Answer(401, headers={"WWW-Authenticate": f'Bearer realm="{address}",service="s",scope="repository:x:pull"'})
