"""The Compose files are whole: settings, names, services, volumes, health."""

import ast
import importlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.ci import IN_CI
from tests.infra.files import COMPOSE, Document, deployments, document, pools_served, prefect_version, strings

FLEET, HOST = COMPOSE / "compose.yaml", COMPOSE / "gpu-host.yaml"
FILES = (FLEET, HOST)
EXAMPLE = COMPOSE / ".env.example"
# `$${NAME}` is a shell's, not Compose's.
SETTING = re.compile(r"(?<!\$)\$\{(\w+)(?:(:[-?])([^}]*))?\}")
ONE_SHOT = {"store", "setup"}
SECRET = r"PASSWORD|SECRET_ACCESS_KEY|SECRET$|AUTH_STRING|PRIVATE_KEY$"

file_and_service = [(file, name) for file in FILES for name in document(file)["services"]]


def service(file: Path, name: str) -> Document:
    """With what it extends."""
    described: Document = document(file)["services"][name]
    extended = described.get("extends")
    return service(COMPOSE / extended["file"], extended["service"]) | described if extended else described


def settings_of(file: Path) -> list[tuple[str, str, str]]:
    """Name, `:-`, `:?` or nothing, and what follows it."""
    return [setting for text in strings(document(file)) for setting in SETTING.findall(text)]


def example() -> dict[str, str]:
    lines = [line for line in EXAMPLE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def filled_in(folder: Path) -> Path:
    key = folder / "key"
    key.write_text("a key", encoding="utf-8")
    needed = {name for file in FILES for name, kind, _ in settings_of(file) if kind == ":?"}
    files = {"SIGNING_KEY_FILE": str(key), "APPROVERS_FILE": str(key)}
    values = {name: value or ("x" if name in needed else "") for name, value in example().items()} | files
    file = folder / "env"
    file.write_text("".join(f"{name}={value}\n" for name, value in values.items()), encoding="utf-8")
    return file


def test_every_setting_and_no_other_is_in_the_example_and_needed_or_with_its_default() -> None:
    settings = [setting for file in FILES for setting in settings_of(file)]
    assert {name for name, _, _ in settings} | {"COMPOSE_PROJECT_NAME"} == set(example())
    for name, kind, text in settings:
        assert kind in (":-", ":?"), name
        assert kind == ":?" or text == example()[name] or "/" in text, name


def test_no_secret_has_a_value() -> None:
    needed = {name for file in FILES for name, kind, _ in settings_of(file) if kind == ":?"}
    assert {name for name in example() if re.search("PASSWORD|SECRET", name)} <= needed
    assert {name: value for name, value in example().items() if re.search("PASSWORD|SECRET|KEY|TOKEN", name) and value} == {}
    for file, service_name in file_and_service:
        environment = service(file, service_name).get("environment", {})
        secrets = [name for name in environment if re.search(SECRET, name)]
        assert [name for name in secrets if not SETTING.search(environment[name])] == []


def test_every_service_that_is_awaited_volume_and_secret_is_declared() -> None:
    fleet = document(FLEET)
    for name in fleet["services"]:
        described = service(FLEET, name)
        assert set(described.get("depends_on", {})) <= set(fleet["services"])
        assert set(described.get("secrets", [])) <= set(fleet["secrets"])
        named = {volume.split(":")[0] for volume in described.get("volumes", []) if volume[0] not in "/.$"}
        assert named <= set(fleet["volumes"])


@pytest.mark.parametrize(("file", "name"), file_and_service)
def test_a_service_tells_its_health_or_ends_and_is_awaited_so_and_its_image_and_ports_are_pinned(file: Path, name: str) -> None:
    described = service(file, name)
    assert ("healthcheck" in described) != (name in ONE_SHOT)
    assert described["restart"] == ("on-failure:10" if name in ONE_SHOT else "unless-stopped")
    for other, how in described.get("depends_on", {}).items():
        assert how["condition"] == ("service_completed_successfully" if other in ONE_SHOT else "service_healthy")
    tag = described["image"].partition("@")[0].rpartition(":")[2].rstrip("}")
    assert tag == "local" or re.match(r"\d", tag), described["image"]
    assert all(port.startswith("127.0.0.1:") for port in described.get("ports", []))


def test_the_server_keeps_leases_on_a_volume_and_is_of_the_locked_version() -> None:
    server = service(FLEET, "server")
    settings = server["environment"]
    assert settings["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"] == "prefect.server.concurrency.lease_storage.filesystem"
    assert [volume for volume in server["volumes"] if volume.endswith(f":{settings['PREFECT_HOME']}")]
    assert server["image"].partition("@")[0] == f"prefecthq/prefect:{prefect_version()}-python3.11"


def test_workers_serve_pools_that_have_deployments_and_a_gpu_hosts_one_reaches_its_engine_under_the_hosts_paths() -> None:
    served = {pool for file, name in file_and_service for pool in pools_served(" ".join(strings(service(file, name))))}
    assert served == {"control", "gpu-h100"}
    assert served <= set(deployments().values())

    worker = service(HOST, "gpu-worker")
    folder = worker["environment"]["VLLM_QUALIFY_HOME"]
    assert f"{folder}:{folder}" in worker["volumes"]
    assert worker["environment"]["HF_HOME"].startswith(folder)
    assert (worker["network_mode"], worker["pid"]) == ("host", "host")
    assert "--limit 1" in " ".join(worker["command"])


def test_the_approver_alone_signs_and_it_takes_no_orders_of_prefects_server() -> None:
    """Whoever has the password of Prefect's API can run code on a worker."""
    signing = {name for file, name in file_and_service if "signing-key" in service(file, name).get("secrets", [])}
    with_the_key = {
        name for file, name in file_and_service if "PRIVATE_KEY" in " ".join(service(file, name).get("environment", {}))
    }
    assert signing == with_the_key == {"approver"}
    approver = service(FLEET, "approver")
    assert not any(name.startswith("PREFECT_") for name in approver["environment"])
    given = {name: service(FLEET, name)["environment"]["AWS_ACCESS_KEY_ID"] for name in ("approver", "control")}
    assert given["approver"] != given["control"]


def test_store_settings_are_the_same_on_control_and_on_gpu_hosts() -> None:
    def those(variables: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in variables.items() if name.startswith(("VLLM_QUALIFY_S", "AWS_A"))}

    host = those(service(HOST, "gpu-worker")["environment"])
    assert len(host) >= 6
    assert those(service(FLEET, "control")["environment"]) == host


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_compose_takes_the_file_and_wants_its_settings(file: Path, tmp_path: Path) -> None:
    command = shutil.which("docker-compose")
    if command is None:
        # In CI everything is there.
        (pytest.fail if IN_CI else pytest.skip)("no docker-compose: run infra/debian-package.sh docker-compose")
    asked = [command, "--file", str(file), "--profile", "gpu", "--env-file"]
    filled = subprocess.run([*asked, str(filled_in(tmp_path)), "config"], capture_output=True, text=True, check=False)
    assert filled.returncode == 0, filled.stderr
    assert "gpu-worker" in filled.stdout
    (tmp_path / "empty").touch()
    refused = subprocess.run([*asked, str(tmp_path / "empty"), "config"], capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "set it in .env" in refused.stderr


def test_what_a_service_imports_in_its_command_is_there() -> None:
    """No test starts these services, so that a name that has moved would be noticed by its user."""
    programs = [
        command[2]
        for file, name in file_and_service
        if (command := document(file)["services"][name].get("command", []))[:2] == ["python", "-c"]
    ]
    imported = [node for program in programs for node in ast.walk(ast.parse(program)) if isinstance(node, ast.ImportFrom)]
    assert imported
    for node in imported:
        assert node.module is not None
        module = importlib.import_module(node.module)
        assert [each.name for each in node.names if not hasattr(module, each.name)] == []
