"""The operator's guide names what there is, and nothing that there is not."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.infra.files import GUIDE, KUBERNETES, ROOT, deployments, document, documents, pools_served

# Of the development scripts in infra/, which no operator sets.
SOURCES = ("vllm_qualify", "tasks", "flows", "deployments")
# Where a name is made of parts.
COMPOSED = {
    f"VLLM_QUALIFY_{rest}"
    for rest in ("PRIVATE_KEY_FILE", "PRIVATE_KEY_PASSWORD", "PRIVATE_KEY_PASSWORD_FILE", "PUBLIC_KEY_FILE")
}


def variables() -> Iterator[str]:
    """Every environment variable of this project that its code names."""
    for folder in SOURCES:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield from re.findall(r"^VLLM_QUALIFY_[A-Z0-9_]*[A-Z0-9]$", node.value)


def code() -> str:
    """All that stands in code style, blocks and words."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", GUIDE, flags=re.DOTALL | re.MULTILINE))])


def test_every_variable_of_the_code_is_explained_and_none_is_made_up() -> None:
    known = {*variables()} | COMPOSED
    assert len(known) >= 14
    assert sorted(name for name in known if f"`{name}`" not in GUIDE) == []
    assert set(re.findall(r"VLLM_QUALIFY_[A-Z0-9_]*[A-Z0-9]", GUIDE)) - known == set()


def test_every_deployment_and_pool_is_named_and_none_is_made_up() -> None:
    for name, pool in deployments().items():
        assert name.partition("/")[0] in GUIDE, name
        assert pool in GUIDE, pool
    run = re.findall(r"prefect deployment run ([\w/-]+)", code())
    assert run
    assert set(run) <= set(deployments())
    asked = set(re.findall(r"work-pool \w+ ([a-z][\w-]+)", code())) | pools_served(code())
    assert asked
    assert asked <= set(deployments().values())


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:infra|deployments)/[\w./-]*\w", code()))))
def test_files_in_commands_are_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_kubernetes_secrets_and_config_maps_are_those_that_are_used() -> None:
    made = set(re.findall(r"create (?:secret generic|configmap) ([\w-]+)", code()))
    control = document(KUBERNETES / "workers" / "control.values.yaml")["worker"]
    server = document(KUBERNETES / "server.values.yaml")
    approver = documents(KUBERNETES / "approver.yaml")[0]
    pod = approver["spec"]["template"]["spec"]
    used = {
        *(each["secretRef"]["name"] for each in pod["containers"][0]["envFrom"] if "secretRef" in each),
        *(each["secret"]["secretName"] for each in pod["volumes"]),
        *control["extraEnvVarsCMs"],
        *control["extraEnvVarsSecrets"],
        server["server"]["basicAuth"]["existingSecret"],
        server["externalDatabase"]["existingSecret"],
    }
    assert made == used
    assert f"--from-literal={server['externalDatabase']['connectionStringSecretKey']}=" in code()
