"""The Dockerfiles: pinned, not root, from the lock, and with all that they copy. Images in the Compose files are pinned too."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from infra import lock_images
from tests.infra.files import COMPOSE, ENGINE, IMAGE, ROOT, document, image_environment, instructions_of, last_stage
from tests.releases.docker_registry import registries
from vllm_qualify.engine.confinement import NO_STATISTICS
from vllm_qualify.errors import CallerError

FILES = sorted(IMAGE.glob("*Dockerfile"))
REQUIREMENTS = ROOT / "infra" / "requirements"
parametrized = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


@parametrized
def test_every_base_image_is_an_argument_or_a_stage(file: Path) -> None:
    """So it is pinned where `infra.lock_images` looks, and can be replaced."""
    assert [each.name for each in FILES] == ["Dockerfile", "engine.Dockerfile"]
    arguments = {argument.split("=", 1)[0] for argument in instructions_of(file, "ARG")}
    for base in instructions_of(file, "FROM"):
        assert re.fullmatch(r"\$\{(\w+_IMAGE)\}", base.split()[0]), base
        assert base.split()[0][2:-1] in arguments


# No digest of these was at hand. `python -m infra.lock_images` writes them; then they leave this list.
STILL_TO_BE_PINNED = {"vllm/vllm-openai:v0.32.0", "prefecthq/prefect:3.9.1-python3.11"}


def images() -> list[str]:
    """All that the Dockerfiles and the Compose files name, but for what is built here."""
    arguments = [argument for file in FILES for argument in instructions_of(file, "ARG") if re.match(r"\w+_IMAGE=", argument)]
    services = [service for file in sorted(COMPOSE.glob("*.yaml")) for service in document(file)["services"].values()]
    named = [*(argument.split("=", 1)[1] for argument in arguments), *(each["image"] for each in services if "image" in each)]
    return [name for name in named if name != "${VLLM_QUALIFY_IMAGE:-vllm-qualify:local}"]


def test_every_image_has_a_version_and_is_pinned_and_the_file_that_names_it_gets_pinned() -> None:
    assert len(images()) >= 6
    for name in images():
        assert re.match(r"[a-z/-]+:v?\d+[\w.-]*", name), name
    assert {name for name in images() if not re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", name)} == STILL_TO_BE_PINNED

    texts = [file.read_text(encoding="utf-8") for file in lock_images.FILES]
    assert sorted(f"{match['name']}:{match['tag']}" for text in texts for match in lock_images.NAMED.finditer(text)) == sorted(
        name.partition("@")[0] for name in images()
    )


def test_an_image_is_pinned_to_what_its_registry_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registry").mkdir()
    with registries(tmp_path / "registry") as registry:
        digest = registry.push("library/tool", "1.2", "content")
        file, old = tmp_path / "compose.yaml", f"sha256:{64 * 'a'}"
        name = f"{registry.open}/library/tool:1.2"
        lines = ["services:", f"    image: {name}", f"ARG BASE_IMAGE={name}@{old}", "    image: ${OWN:-own:local}", ""]
        file.write_text("\n".join(lines))
        monkeypatch.setattr("sys.argv", ["lock_images", str(file)])
        assert lock_images.main() == 0
        pinned = ["services:", f"    image: {name}@{digest}", f"ARG BASE_IMAGE={name}@{digest}", lines[3], ""]
        assert file.read_text() == "\n".join(pinned)
        file.write_text(f"    image: {registry.open}/library/tool:1.3\n")
        assert lock_images.main() == CallerError.exit_code
        assert file.read_text() == f"    image: {registry.open}/library/tool:1.3\n"


def test_the_images_have_no_tools_of_tests() -> None:
    """An image that signs has as little in it as can be."""
    runtime = set(re.findall(r"^([\w.-]+)==", (REQUIREMENTS / "orchestrator.txt").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"prefect", "securesystemslib", "hatchling"} <= runtime
    tools = {"pytest", "hypothesis", "moto", "mypy", "playwright", "ruff", "import-linter", "cyclonedx-bom", "flask"}
    assert runtime & tools == set()
    for file in FILES:
        assert not [rest for word, rest in last_stage(file) if word in ("RUN", "COPY") and "development.txt" in rest]


@parametrized
def test_the_image_runs_as_a_user_with_a_number(file: Path) -> None:
    """By number, so that Kubernetes can tell that it is not root."""
    users = [rest for word, rest in last_stage(file) if word == "USER"]
    assert users[-1] == "10001:10001"
    assert any("useradd --uid 10001" in rest for word, rest in last_stage(file) if word == "RUN")


@parametrized
def test_packages_are_the_locks_alone_and_of_no_registry_by_its_address(file: Path) -> None:
    installs = [part for run in instructions_of(file, "RUN") for part in run.split("&&") if re.search(r"pip install", part)]
    assert any("--requirement infra/requirements/orchestrator.txt" in part for part in installs)
    for part in installs:
        assert "--no-deps" in part, part
        assert "--require-hashes" in part or part.rstrip().endswith("--no-build-isolation ."), part
    assert re.findall(r"https?://|--index|--extra-index|--find-links", file.read_text(encoding="utf-8")) == []


@parametrized
def test_what_is_copied_is_there_and_is_let_through(file: Path) -> None:
    ignored, *kept = [
        line
        for line in file.with_name(f"{file.name}.dockerignore").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    assert ignored == "*"
    sources = [
        source for copied in instructions_of(file, "COPY") if not copied.startswith("--from") for source in copied.split()[:-1]
    ]
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
    assert needed.items() <= image_environment(file).items()


def test_the_engines_image_has_the_folder_that_is_looked_for_and_no_entry_point() -> None:
    """`find_engine` wants bin/vllm and bin/python. With vLLM's entry point a job's command would be options of `vllm serve`."""
    assert ("ENTRYPOINT", "[]") in last_stage(ENGINE)
    folder = image_environment(ENGINE)["VLLM_QUALIFY_ENGINE"]
    (made,) = [rest for word, rest in last_stage(ENGINE) if word == "RUN"]
    assert f"{folder}/bin/${{program%3}}" in made
    assert "for program in vllm python3" in made
