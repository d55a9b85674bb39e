"""What a run does just now, below its log: on a terminal only, and in a few lines that always tell the newest."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vllm_qualify.secrets import safe_text

# The attribute of a log record with what it says of the run's progress.
ATTRIBUTE = "progress"
# Before so much of a part is done, what is left of it is a guess.
LEAST_SHARE, LEAST_S = 0.05, 3.0
BAR_WIDTH = 20


class Counted(NamedTuple):
    """How far a part of a run is: `done` of `total` things in `elapsed_s` seconds."""

    what: str
    things: str
    done: int
    total: int
    elapsed_s: float

    @property
    def left_s(self) -> float | None:
        """At the rate so far; None while that is a guess."""
        if self.done < LEAST_SHARE * self.total or self.elapsed_s < LEAST_S or not self.done:
            return None
        return self.elapsed_s / self.done * (self.total - self.done)


class Waited(NamedTuple):
    """What a run waits for, such as a server that starts: the last line that was said of it."""

    line: str


class LiveView(logging.Handler):
    """Shows log records above the view, but for those of progress alone, which change the view.

    The view is drawn as records come, and by no thread of its own.
    """

    def __init__(self, console: Console, formatter: logging.Formatter | None) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.progress: Counted | Waited | None = None
        self.warning = ""

    def emit(self, record: logging.LogRecord) -> None:
        told = getattr(record, ATTRIBUTE, None)
        try:
            if isinstance(told, Waited) or (isinstance(told, Counted) and told.done < told.total):
                self.progress = told
            else:
                # The last of what is counted, and whatever follows a wait, ends it. A warning meanwhile ends neither.
                if record.levelno < logging.WARNING:
                    self.progress = None
                self.live.console.print(Text(safe_text(self.format(record))), soft_wrap=True)
            if record.levelno >= logging.WARNING:
                self.warning = record.getMessage().splitlines()[0]
            self.live.update(self._draw(), refresh=True)
        except Exception:  # as each handler of `logging`: a log that cannot be shown ends no run
            self.handleError(record)

    def _draw(self) -> Group:
        lines = [draw_progress(self.progress)] if self.progress else []
        if self.warning:
            lines.append(_draw_line(f"last warning: {self.warning}", "yellow"))
        return Group(*lines)


def draw_progress(progress: Counted | Waited) -> Table | Text:
    """One line, cut where the terminal ends."""
    if isinstance(progress, Waited):
        return _draw_line(progress.line, "dim")
    left = f", about {describe_seconds(progress.left_s)} left" if progress.left_s is not None else ""
    counted = f"{progress.done:,} of {progress.total:,} {progress.things}, {describe_seconds(progress.elapsed_s)}{left}"
    line = Table.grid(padding=(0, 1))
    line.add_row(
        _draw_line(progress.what, "bold"),
        ProgressBar(total=progress.total, completed=progress.done, width=BAR_WIDTH),
        _draw_line(counted, ""),
    )
    return line


def _draw_line(text: str, style: str) -> Text:
    return Text(" ".join(safe_text(text).split()), style, no_wrap=True, overflow="ellipsis")


def describe_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def is_live(console: Console) -> bool:
    """Whether a person may look at it: no file, no pipe, no terminal without a cursor, and no CI."""
    return console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")


@contextmanager
def showing_progress(console: Console) -> Iterator[None]:
    """Within the block one view is the root logger's handler of this terminal. Elsewhere than on a terminal nothing changes."""
    root = logging.getLogger()
    shown = [handler for handler in root.handlers if isinstance(handler, logging.StreamHandler)]
    if not shown or not is_live(console):
        yield
        return
    view = LiveView(console, shown[0].formatter)
    view.filters = list(shown[0].filters)
    before = list(root.handlers)
    root.handlers = [view, *(handler for handler in before if handler not in shown)]
    try:
        with view.live:
            yield
    finally:
        root.handlers = before
