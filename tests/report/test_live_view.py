"""The live view, on a real terminal: a program that logs in a pseudo-terminal, and what reaches the terminal of it."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping

import pytest

from vllm_qualify.report.live_view import Counted, describe_seconds

PROGRAM = """
import logging, sys, time
from rich.console import Console
from vllm_qualify.report.live_view import ATTRIBUTE, Counted, Waited, showing_progress

logging.basicConfig(format="10:00:00  %(message)s", level=logging.INFO)
log = logging.getLogger("run")

def say(message, progress=None, level=logging.INFO):
    log.log(level, message, extra={ATTRIBUTE: progress} if progress else {})

with showing_progress(Console(stderr=True)):
"""
SHOW, HIDE = "\x1b[?25h", "\x1b[?25l"
# Codes that colour text or move the cursor.
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_on_terminal(lines: str, columns: int = 100, variables: Mapping[str, str] = {}) -> str:
    """All that reaches a terminal of a program with these lines within the view."""
    body = "".join(f"    {line}\n" for line in lines.splitlines())
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "COLUMNS", "LINES")}
    command = [sys.executable, "-c", PROGRAM + body + "print('after', file=sys.stderr)\n"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=kept | {"TERM": "xterm", **variables})
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        said += piece
    os.close(ours)
    process.wait(timeout=60)
    return said.decode()


def lines_of(said: str) -> list[str]:
    return [line.rstrip() for line in CODES.sub("", said).replace("\r", "\n").split("\n") if line.strip()]


COUNTING = """
say("smoke done in 1 s")
say("accuracy: 50 of 200 questions, 10 s", Counted("accuracy", "questions", 50, 200, 10.0))
say("no bound on speed", level=logging.WARNING)
say("accuracy: 150 of 200 questions, 30 s", Counted("accuracy", "questions", 150, 200, 30.0))
say("accuracy: 200 of 200 questions, 40 s", Counted("accuracy", "questions", 200, 200, 40.0))
"""


def test_a_terminal_shows_what_of_how_many_time_left_and_the_last_warning() -> None:
    shown = lines_of(run_on_terminal(COUNTING))
    assert shown[0] == "10:00:00  smoke done in 1 s"
    counted = [line for line in shown if "50 of 200 questions, 10 s, about 30 s left" in line]
    assert counted
    assert counted[0].startswith("accuracy")
    assert any("150 of 200 questions, 30 s, about 10 s left" in line for line in shown)
    assert "last warning: no bound on speed" in shown
    # A warning in between ends no count.
    assert shown[shown.index("last warning: no bound on speed") - 1] == counted[0]
    # What counts alone stays in no scrollback; the last word of it does.
    assert "10:00:00  accuracy: 50 of 200 questions, 10 s" not in shown
    assert "10:00:00  accuracy: 200 of 200 questions, 40 s" in shown
    assert shown[-1] == "after"


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"CI": "true"}])
def test_elsewhere_each_line_is_written_as_it_was(variables: dict[str, str]) -> None:
    said = run_on_terminal(COUNTING, variables=variables)
    assert "\x1b" not in said
    assert [line for line in lines_of(said) if line != "after"] == [
        "10:00:00  smoke done in 1 s",
        "10:00:00  accuracy: 50 of 200 questions, 10 s",
        "10:00:00  no bound on speed",
        "10:00:00  accuracy: 150 of 200 questions, 30 s",
        "10:00:00  accuracy: 200 of 200 questions, 40 s",
    ]


def test_the_view_is_gone_at_the_end_and_the_cursor_is_there() -> None:
    said = run_on_terminal('say("asked: 5 of 9 texts", Counted("asked", "texts", 5, 9, 4.0))')
    assert said.count(HIDE) == said.count(SHOW) == 1
    # The line of the view is erased before the next one is written.
    assert "\x1b[2K" in said[said.index("5 of 9") :]


def test_a_narrow_terminal_gets_one_line_of_each_thing() -> None:
    counted = 'say("x", Counted("accuracy, repetition 2", "questions", 1234, 5000, 100.0))'
    said = run_on_terminal(f'{counted}\nsay("y", Waited("server starting: " + "z" * 500))', columns=40)
    assert max(map(len, lines_of(said))) <= 40
    assert not [line for line in lines_of(said) if set(line) == {"z"}]


def test_words_of_a_server_cannot_command_the_terminal() -> None:
    """The attack: a log line or a name with codes that clear the screen, name the window, or write into the clipboard."""
    evil = r"\x1b]0;owned\x07\x1b[2J\x1b]52;c;ZXZpbA==\x07[bold]\u202e"
    said = run_on_terminal(
        f'say("{evil}", Waited("server starting: {evil}"))\n'
        f'say("{evil}", Counted("{evil}", "{evil}", 1, 9, 4.0))\n'
        f'say("{evil}", level=logging.WARNING)'
    )
    for command in ("\x1b]", "\x07", "\x1b[2J", "\u202e"):
        assert command not in said
    # Its words are shown, and no markup of ours is made of them.
    assert "owned" in said
    assert "[bold]" in said


def test_a_broken_off_run_leaves_the_terminal_as_it_was() -> None:
    """As the command ends: by the handler of a signal, which unwinds the stack."""
    end = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\nos.kill(os.getpid(), signal.SIGTERM)"
    said = run_on_terminal(f'say("x", Counted("asked", "texts", 5, 9, 4.0))\n{end}\ntime.sleep(60)')
    assert "after" not in said
    assert said.rindex(SHOW) > said.rindex(HIDE)


@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "left_s"),
    [(1, 200, 60.0, None), (50, 200, 2.0, None), (0, 9, 60.0, None), (50, 200, 10.0, 30.0), (200, 200, 40.0, 0.0)],
)
def test_what_is_left_is_said_only_when_it_is_no_guess(done: int, total: int, elapsed_s: float, left_s: float | None) -> None:
    assert Counted("accuracy", "questions", done, total, elapsed_s).left_s == left_s


def test_long_times_are_minutes() -> None:
    assert [describe_seconds(each) for each in (0.4, 119.0, 150.0, 5400.0)] == ["0 s", "119 s", "2 min", "90 min"]
