"""The files that operators use, read as they are written."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
COMPOSE, IMAGE, KUBERNETES = (ROOT / "infra" / name for name in ("compose", "image", "kubernetes"))
ENGINE = IMAGE / "engine.Dockerfile"
ENTRY_POINTS = ROOT / "deployments" / "prefect.yaml"
GUIDE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")

Document = dict[str, Any]
Instruction = tuple[str, str]


def documents(file: Path) -> list[Any]:
    """Of a YAML or JSON file, which is YAML too. Compose's merge keys are merged."""
    return list(YAML(typ="safe", pure=True).load_all(file.read_text(encoding="utf-8")))


def document(file: Path) -> Document:
    (only,) = documents(file)
    assert isinstance(only, dict)
    return only


def deployments() -> dict[str, str]:
    """Flow and deployment, like `decide/decide`, with the work pool of each; flows are named as Prefect names them."""
    entries = document(ENTRY_POINTS)["deployments"]
    names = ((each["entrypoint"].rpartition(".")[2].replace("_", "-"), each) for each in entries)
    return {f"{flow}/{each['name']}": each["work_pool"]["name"] for flow, each in names}


def strings(value: Any) -> Iterator[str]:
    """Every string inside a document, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def pools_served(text: str) -> set[str]:
    """The pools in `prefect worker start --pool NAME`, also where NAME is a default."""
    return {pool for pool in re.findall(r"--pool (?:\$\{\w+:-)?([\w-]+)", text) if pool != "POOL"}


def prefect_version() -> str:
    lock = (ROOT / "infra" / "requirements" / "orchestrator.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^prefect==(\S+)", lock, re.MULTILINE)
    return str(version)


def instructions(file: Path) -> list[Instruction]:
    """Each with its continued lines as one; comments are left out, as Docker does."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, " ".join(rest)) for word, *rest in (line.split() for line in whole if line.strip())]


def instructions_of(file: Path, wanted: str) -> list[str]:
    return [rest for word, rest in instructions(file) if word == wanted]


def last_stage(file: Path) -> list[Instruction]:
    lines = instructions(file)
    start = max(index for index, (word, _) in enumerate(lines) if word == "FROM")
    return lines[start:]


def image_environment(file: Path) -> dict[str, str]:
    pairs = [pair.split("=", 1) for word, rest in last_stage(file) if word == "ENV" for pair in rest.split()]
    return dict(pairs)
