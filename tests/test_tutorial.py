"""The tutorial, followed: its commands that need no server are run, and tell what it says they tell.

A block marked `console` is a transcript: commands after `$ `, what they tell below them, `…` for lines that are left out. Its
paths are those of somebody called Ada, and its run is the one of that somebody.
"""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tests.approval.builder import publish_report
from tests.builders.changed import changed
from tests.report.builder import image_report
from vllm_qualify import cli
from vllm_qualify.approval.signing import PASSWORD, PRIVATE_KEY, PUBLIC_KEY
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.server import MODEL, Part
from vllm_qualify.errors import QualifyError
from vllm_qualify.plan.cell import Cell
from vllm_qualify.plan.choice import Choice, select
from vllm_qualify.plan.server import server_plan
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.report.model import Report
from vllm_qualify.runs.home import default_store_url

DOCS = Path(__file__).parents[1] / "docs"
TUTORIAL = (DOCS / "tutorial.md").read_text(encoding="utf-8")
RECIPE, CELL, RUN = "assistant.yaml", "assistant/bf16/h100/balanced", "20261121T155711Z-719e83"
IMAGE = EngineImage(repository="vllm/vllm-openai", tag="v0.32.0", digest=f"sha256:{64 * 'a'}", platform="linux/amd64")
COMMAND, LEFT_OUT = ".venv/bin/vllm-qualify", "…"
# What differs from one machine and one day to the next, and what the tutorial has in its place.
VARYING = {
    r"\d{8}T\d{6}Z-[0-9a-f]{6}": RUN,
    r"\b\d{4}-\d\d-\d\d\b": "2026-11-21",
    r"\b[0-9a-f]{16,64}\b": "0123456789abcdef",
    r"\d+ objects": "12 objects",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TUTORIAL, re.DOTALL | re.MULTILINE)


def transcripts() -> Iterator[tuple[str, list[str]]]:
    """Each command of the tutorial's transcripts with the lines below it."""
    for block in blocks("console"):
        commands_shown = re.split(r"^\$ ", block, flags=re.MULTILINE)
        assert commands_shown[0] == "", "a transcript begins with a command"
        for transcript in commands_shown[1:]:
            command, *lines = transcript.rstrip("\n").split("\n")
            yield command, lines


def alike(text: str) -> list[str]:
    """Lines without what differs between machines and days."""
    for varying, fixed in VARYING.items():
        text = re.sub(varying, fixed, text)
    return [line.rstrip() for line in text.rstrip("\n").split("\n")] if text.strip() else []


def agree(documented: list[str], actual: list[str]) -> bool:
    """Whether the lines are those of the page, with any number of them where some are left out."""
    pattern = "".join("(?:.*\n)*?" if line == LEFT_OUT else re.escape(f"{line}\n") for line in documented)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in actual)) is not None


def follow(command: str, home: Path) -> str:
    """What a command tells, with Ada's folders in place of this machine's; `sed` is the system's own."""
    program, *arguments = shlex.split(command)
    if program == COMMAND:
        result = CliRunner().invoke(cli.app, arguments)
        if isinstance(result.exception, QualifyError):
            output = f"{result.output}error ({result.exception.who_acts} must act): {result.exception}"
        else:
            assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
            output = result.output
    else:
        assert program == "sed", f"{command}: no test can follow it"
        output = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    return output.replace(str(home), "/home/ada/.vllm-qualify").replace(str(Path.cwd()), "/home/ada")


def publish_adas_run(home: Path) -> None:
    """A run of the tutorial's recipe that passed, as if it had been made on a host with the GPU."""
    loaded = load_recipe(RECIPE)
    selection = select(loaded, Choice(gpu_type="h100"), None)

    def as_of_the_recipe(report: Report) -> Report:
        release = changed(image_report().plan.cell.release, "engine", digest=IMAGE.digest)
        server = server_plan(loaded, selection, "balanced", IMAGE, release.engine.version, release.revision)
        cell = Cell(
            recipe=loaded.recipe.name,
            release=changed(release, model=server.model),
            variant=selection.variant_name,
            gpu_type=selection.gpu_type,
            profile="balanced",
        )
        parts = [Part(option=MODEL, name=server.model, revision=release.revision), *server.parts]
        machine = changed(report.plan.fingerprint, gpu_type=cell.gpu_type)
        return changed(report, "plan", cell=cell, fingerprint=machine, server=changed(server, gpus=[0], parts=parts))

    (home / "store").mkdir()
    publish_report(open_store(default_store_url()), home / "runs", RUN, as_of_the_recipe)


@pytest.fixture
def desk(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ada's folder, with the tutorial's recipe in it; her runs and her store."""
    (recipe,) = blocks("yaml")
    (tmp_path / RECIPE).write_text(recipe, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for kind, name in ((PRIVATE_KEY, "approval.key"), (PUBLIC_KEY, "approval.key.pub")):
        monkeypatch.setenv(f"{kind}_FILE", str(tmp_path / name))
    # Here is no terminal to ask on.
    monkeypatch.setenv(PASSWORD, "Ada's passphrase")
    publish_adas_run(home)
    return tmp_path


def test_the_recipe_is_valid_and_has_the_cell_that_is_spoken_of(desk: Path) -> None:
    recipe = load_recipe(str(desk / RECIPE)).recipe
    assert [f"{recipe.name}/{variant}/{gpu}/{profile}" for gpu, variant, profile in recipe.cells()] == [CELL]


def test_the_demos_report_is_the_readmes() -> None:
    """Numbers of a real run stand in one place, and are taken from there."""
    (shown,) = blocks("text")
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in shown.splitlines() if line not in readme] == []
    quoted = re.search(
        r"a throughput of ([\d.]+) tok/s has\s+a visible change of (\d+):", (DOCS / "release-managers.md").read_text()
    )
    assert quoted is not None
    (line,) = (line for line in readme if line.startswith("output_throughput_tok_s "))
    assert set(quoted.groups()) <= set(line.split())


@pytest.mark.usefixtures("desk", "believed")
def test_every_command_that_needs_no_server_tells_what_the_tutorial_says(home: Path) -> None:
    followed = list(transcripts())
    assert len(followed) >= 10
    for command, documented in followed:
        actual = alike(follow(command, home))
        assert agree(alike("\n".join(documented)), actual), "\n".join([f"$ {command}", *actual])


def test_every_option_of_the_tutorial_is_there() -> None:
    """Also of the commands that need a server, which are not run."""
    whole_lines = re.sub(r" \\\n +", " ", TUTORIAL)
    commands = re.findall(rf"^(?:\$ )?{re.escape(COMMAND)} (.*?)(?: +#.*)?$", whole_lines, re.MULTILINE)
    assert commands
    for command in commands:
        words = shlex.split(command)
        given = {word for word in words if word.startswith("--")}
        assert given <= options_of(words), command


def options_of(words: list[str]) -> set[str]:
    """Those of the command that the words begin with. Raises KeyError if there is no such command."""
    command: Any = get_command(cli.app)
    for word in words:
        if not hasattr(command, "commands"):
            break
        command = command.commands[word]
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
