"""The Dockerfiles: pinned, not root, from the lock, and with all that they copy."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.infra.files import IMAGE, ROOT
from vllm_qualify.engine.confinement import NO_STATISTICS

FILES = sorted(IMAGE.glob("*Dockerfile"))
ENGINE = IMAGE / "engine.Dockerfile"
parametrized = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)

Instruction = tuple[str, str]


def instructions(file: Path) -> list[Instruction]:
    """Each with its continued lines as one; comments are left out, as Docker does."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, " ".join(rest)) for word, *rest in (line.split() for line in whole if line.strip())]


def of(file: Path, wanted: str) -> list[str]:
    return [rest for word, rest in instructions(file) if word == wanted]


def last_stage(file: Path) -> list[Instruction]:
    found = instructions(file)
    start = max(index for index, (word, _) in enumerate(found) if word == "FROM")
    return found[start:]


def environment(file: Path) -> dict[str, str]:
    pairs = [pair.split("=", 1) for word, rest in last_stage(file) if word == "ENV" for pair in rest.split()]
    return dict(pairs)


def test_there_are_both() -> None:
    assert [file.name for file in FILES] == ["Dockerfile", "engine.Dockerfile"]


@parametrized
def test_base_images_have_a_version(file: Path) -> None:
    defaults = dict(argument.split("=", 1) for argument in of(file, "ARG") if "=" in argument)
    for base in of(file, "FROM"):
        name = re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], base.split()[0])
        assert re.search(r":v?\d+\.\d+", name), name
        assert "latest" not in name


@parametrized
def test_the_image_runs_as_a_user_with_a_number(file: Path) -> None:
    """By number, so that Kubernetes can tell that it is not root."""
    users = [rest for word, rest in last_stage(file) if word == "USER"]
    assert users[-1] == "10001:10001"
    assert any("useradd --uid 10001" in rest for word, rest in last_stage(file) if word == "RUN")


@parametrized
def test_packages_are_the_locks_alone(file: Path) -> None:
    installs = [part for run in of(file, "RUN") for part in run.split("&&") if re.search(r"pip install", part)]
    assert any("--requirement infra/requirements/orchestrator.txt" in part for part in installs)
    for part in installs:
        assert "--no-deps" in part, part
        assert "--require-hashes" in part or "--editable ." in part, part


@parametrized
def test_what_is_copied_is_there_and_is_let_through(file: Path) -> None:
    ignored, *kept = [
        line
        for line in file.with_name(f"{file.name}.dockerignore").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    assert ignored == "*"
    sources = [source for copy in of(file, "COPY") if not copy.startswith("--from") for source in copy.split()[:-1]]
    assert {"vllm_qualify", "tasks", "flows", "deployments", "pyproject.toml"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, line.removeprefix("!")) for line in kept if line.startswith("!")), source


@parametrized
def test_nothing_phones_home(file: Path) -> None:
    """Prefect's server runs in neither; vLLM in one."""
    needed = {name: value for name, value in NO_STATISTICS.items() if file == ENGINE or not name.startswith("VLLM_")}
    if file == ENGINE:
        needed.pop("PREFECT_SERVER_ANALYTICS_ENABLED")
    assert needed.items() <= environment(file).items()


@parametrized
def test_no_address_of_a_package_registry(file: Path) -> None:
    assert re.findall(r"https?://|--index|--extra-index|--find-links", file.read_text(encoding="utf-8")) == []


def test_vllms_entry_point_is_taken_away() -> None:
    """A job's command comes as arguments; with the entry point they would be options of `vllm serve`."""
    assert ("ENTRYPOINT", "[]") in last_stage(ENGINE)


def test_the_engines_folder_has_the_form_that_is_looked_for() -> None:
    """`find_engine` wants bin/vllm and bin/python."""
    folder = environment(ENGINE)["VLLM_QUALIFY_ENGINE"]
    (made,) = [rest for word, rest in last_stage(ENGINE) if word == "RUN"]
    assert f"{folder}/bin/${{program%3}}" in made
    assert "for program in vllm python3" in made
