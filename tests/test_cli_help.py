"""What `--help` says: two examples per command that the command line takes, and no name that is cut on a narrow terminal."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from vllm_qualify.cli import app
from vllm_qualify.cli.examples import EXAMPLES

NARROW = 80
ROOT: Any = get_command(app)


def find_commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command and each group, with its name's words."""
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from find_commands(each, (*path, name))


COMMANDS = {" ".join(path): command for path, command in find_commands(ROOT)}
LEAVES = [words for words, command in COMMANDS.items() if not hasattr(command, "commands")]


def help_of(words: str) -> str:
    done = CliRunner().invoke(app, [*words.split(), "--help"], terminal_width=NARROW, prog_name="vllm-qualify")
    assert done.exit_code == 0, done.output
    return done.output


def test_no_example_is_of_a_command_that_is_not_there() -> None:
    assert sorted(EXAMPLES) == sorted(LEAVES)


@pytest.mark.parametrize("words", LEAVES)
def test_a_command_has_two_examples_that_it_takes(words: str) -> None:
    lines = [line.strip() for line in help_of(words).splitlines() if line.startswith("    vllm-qualify ")]
    assert len(set(lines)) == 2, lines
    for line in lines:
        _program, *typed = shlex.split(line)
        path = words.split()
        assert typed[: len(path)] == path
        context = COMMANDS[words].make_context(words, typed[len(path) :], parent=ROOT.make_context("vllm-qualify", [words]))
        assert context.args == []


@pytest.mark.parametrize("words", COMMANDS)
def test_nothing_is_cut_on_a_narrow_terminal(words: str) -> None:
    shown = help_of(words)
    for option in COMMANDS[words].params:
        assert all(name in shown.split() or f"{name}," in shown.split() for name in option.opts if name.startswith("-"))
    assert "…" not in shown
    assert [line for line in shown.splitlines() if line.endswith("...") and "COMMAND [ARGS]" not in line] == []
