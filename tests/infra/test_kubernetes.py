"""The base job templates as Prefect renders them, and the files beside them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.schema_tools.validation import is_valid, is_valid_schema
from prefect.utilities.templating import apply_values, find_placeholders

from infra.kubernetes.job_templates import CPU_POOL, GPU_RESOURCE, POOLS, job_template
from tests.infra.files import (
    ENGINE,
    KUBERNETES,
    Document,
    deployments,
    document,
    documents,
    image_environment,
    prefect_version,
    strings,
)
from vllm_qualify.engine.gpu_products import gpu_type_of
from vllm_qualify.recipe.gpu_types import POOL_PRODUCTS

DIGEST = "registry.example.com/vllm-qualify-engine@sha256:" + "0" * 64
# What the worker fills in itself where the template's variables have nothing.
BY_WORKER = {"name": "a-run", "command": ["prefect", "flow-run", "execute"]}
COMPUTE_CAPABILITIES = {"gpu-h100": "9.0", "gpu-h200": "9.0", "gpu-b200": "10.0"}
VALUES = sorted(KUBERNETES.rglob("*.values.yaml"))
per_pool = pytest.mark.parametrize("pool", POOLS)


def rendered(pool: str, **given: Any) -> Document:
    """The job, as the worker makes it of the template, its defaults and a deployment's job variables."""
    template = job_template(pool, DIGEST)
    properties = template["variables"]["properties"]
    defaults = {name: variable["default"] for name, variable in properties.items() if variable.get("default") is not None}
    job: Document = apply_values(template["job_configuration"]["job_manifest"], defaults | BY_WORKER | given)
    return job


def pod_of(job: Document) -> Document:
    pod: Document = job["spec"]["template"]["spec"]
    return pod


def test_yaml_is_read() -> None:
    for file in KUBERNETES.rglob("*.yaml"):
        assert all(isinstance(each, dict) for each in documents(file)), file


@per_pool
def test_every_placeholder_has_a_variable_and_the_reverse_and_defaults_are_complete_and_fit_the_schema(pool: str) -> None:
    template = job_template(pool, DIGEST)
    used = {placeholder.name for placeholder in find_placeholders(template["job_configuration"])}
    variables = template["variables"]
    assert used == set(variables["properties"])
    is_valid_schema(variables)
    defaults = {name: variable["default"] for name, variable in variables["properties"].items() if "default" in variable}
    assert is_valid(defaults, variables)
    assert set(variables["required"]) <= set(defaults)
    assert not is_valid(defaults | {"image": 1}, variables)


@per_pool
def test_a_job_runs_once_on_its_kind_of_machine(pool: str) -> None:
    job = rendered(pool)
    pod = pod_of(job)
    (container,) = pod["containers"]
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert (job["spec"]["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert job["spec"]["ttlSecondsAfterFinished"] > 0
    assert (container["image"], container["args"]) == (DIGEST, BY_WORKER["command"])
    if pool == CPU_POOL:
        assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
        assert GPU_RESOURCE not in container["resources"].get("limits", {})
        assert "tolerations" not in pod
    else:
        assert pod["nodeSelector"] == {"nvidia.com/gpu.product": POOL_PRODUCTS[pool]}
        assert container["resources"]["limits"] == {GPU_RESOURCE: 8}
        assert pod["tolerations"][0]["key"] == GPU_RESOURCE
    assert [text for text in strings(job) if "{{" in text] == [], "nothing of the template is left"


def test_a_deployment_asks_for_fewer_gpus_and_another_product_as_numbers_and_names() -> None:
    pod = pod_of(rendered("gpu-h100", gpus=2, gpu_product="NVIDIA-H100-PCIe", memory_limit="100Gi"))
    assert pod["containers"][0]["resources"]["limits"] == {GPU_RESOURCE: 2, "memory": "100Gi"}
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-PCIe"}


@per_pool
def test_a_pod_has_its_volumes_where_the_image_looks_is_not_root_and_has_secrets_by_reference_alone(pool: str) -> None:
    pod = pod_of(rendered(pool))
    container = pod["containers"][0]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    image = image_environment(ENGINE)
    assert mounts == {"shm": "/dev/shm", "models": image["HF_HOME"], "home": image["VLLM_QUALIFY_HOME"]}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    assert next(volume for volume in pod["volumes"] if volume["name"] == "shm")["emptyDir"]["medium"] == "Memory"

    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert [sorted(source) for source in container["envFrom"]] == [["configMapRef"], ["secretRef"]]
    assert [entry for entry in container["env"] if "value" in entry] == []


@pytest.mark.parametrize("pool", POOL_PRODUCTS)
def test_a_pools_product_is_of_its_gpu_type(pool: str) -> None:
    """The label is NVML's name with dashes."""
    assert gpu_type_of(POOL_PRODUCTS[pool].replace("-", " "), COMPUTE_CAPABILITIES[pool]) == pool.removeprefix("gpu-")


def test_pools_are_those_of_the_deployments() -> None:
    served = {document(file)["worker"]["config"]["workPool"] for file in (KUBERNETES / "workers").iterdir()}
    assert served == set(deployments().values())
    assert served == {*POOLS, "control"}


def test_claims_and_names_agree() -> None:
    claims = {claim["metadata"]["name"] for claim in documents(KUBERNETES / "volumes.yaml")}
    job = rendered("gpu-h100")
    used = {volume["persistentVolumeClaim"]["claimName"] for volume in pod_of(job)["volumes"] if "emptyDir" not in volume}
    for file in VALUES:
        for part in document(file).values():
            volumes = part.get("extraVolumes", []) if isinstance(part, dict) else []
            used |= {volume["persistentVolumeClaim"]["claimName"] for volume in volumes}
    assert used == claims
    everything = [*documents(KUBERNETES / "volumes.yaml"), document(KUBERNETES / "setup.yaml"), job]
    assert {each["metadata"]["namespace"] for each in everything} == {"vllm-qualify"}


def test_servers_and_workers_are_of_the_locked_prefect_with_one_password_and_the_server_keeps_leases_and_is_alone() -> None:
    server, worker = (document(KUBERNETES / f"{name}.values.yaml") for name in ("server", "worker"))
    assert server["global"]["prefect"]["image"]["prefectTag"] == f"{prefect_version()}-python3.11"
    assert worker["worker"]["image"]["prefectTag"] == f"{prefect_version()}-python3.11-kubernetes"
    for part in (server["server"], worker["worker"]["selfHostedServerApiConfig"]):
        assert part["basicAuth"] == {"enabled": True, "existingSecret": "prefect-auth"}
    settings = {entry["name"]: entry["value"] for entry in server["server"]["env"]}
    assert settings["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"].endswith(".filesystem")
    assert settings["PREFECT_HOME"] in {mount["mountPath"] for mount in server["server"]["extraVolumeMounts"]}
    assert (server["server"]["replicaCount"], server["server"]["updateStrategy"]) == (1, {"type": "Recreate"})


def test_all_images_of_the_project_are_of_its_version() -> None:
    control = document(KUBERNETES / "workers" / "control.values.yaml")["worker"]["image"]
    (setup,) = document(KUBERNETES / "setup.yaml")["spec"]["template"]["spec"]["containers"]
    assert setup["image"] == f"{control['repository']}:{control['prefectTag']}"
    project = (KUBERNETES.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.+)"$', project, re.MULTILINE) == [control["prefectTag"]]


def test_the_command_writes_every_pools_template(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infra.kubernetes.job_templates", str(tmp_path), "--image", DIGEST]
    subprocess.run(command, check=True, cwd=KUBERNETES.parents[1])
    written = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in tmp_path.iterdir()}
    assert written == {pool: job_template(pool, DIGEST) for pool in POOLS}
