"""All commands, and how each error ends them."""

import codecs
import locale
import os
import signal
import sys
import traceback
from importlib import metadata
from typing import Annotated, NoReturn

import typer

from vllm_qualify.cli import approval
from vllm_qualify.cli.approver import approver_app
from vllm_qualify.cli.engine import engine_app
from vllm_qualify.cli.examples import add_examples
from vllm_qualify.cli.recipe import data_app, recipe_app
from vllm_qualify.cli.report import publish, rejudge, report_app
from vllm_qualify.cli.run import demo, run
from vllm_qualify.cli.trace import trace_app
from vllm_qualify.cli.upkeep import doctor, prune
from vllm_qualify.cli.words import EXIT_CODES, WORLD
from vllm_qualify.errors import HostError, QualifyError, UnclearError
from vllm_qualify.secrets import safe_text

app = typer.Typer(
    name="vllm-qualify",
    help=f"Qualify a model for production on vLLM.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # In a table the names of options are cut where the terminal is narrow.
    rich_markup_mode=None,
)
app.add_typer(report_app, name="report")
app.add_typer(recipe_app, name="recipe")
app.add_typer(engine_app, name="engine")
app.add_typer(trace_app, name="trace")
app.add_typer(data_app, name="data")
app.add_typer(approver_app, name="approver")
for command in (run, demo, rejudge, publish, prune):
    app.command(epilog=EXIT_CODES)(command)
approval.add_to(app)
app.command(epilog="Exit codes: 0 all that is needed is there, 3 something is missing.")(doctor)
add_examples(app)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"vllm-qualify {metadata.version('vllm-qualify')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version, and end.")
    ] = False,
) -> None:
    pass


def _end_by_signal(number: int, frame: object) -> NoReturn:  # noqa: ARG001  (a signal handler's signature)
    """Unwind the stack, so that every server is stopped. By default Ctrl-C ends with 1, which means "not passed"."""
    raise SystemExit(128 + number)


def _use_utf8() -> None:
    """Start again in Python's UTF-8 mode, unless the locale's encoding is UTF-8: with LC_ALL=C and PYTHONUTF8=0 it is ASCII."""
    if sys.flags.utf8_mode or codecs.lookup(locale.getpreferredencoding(do_setlocale=False)).name == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606  (no shell is wanted)


def main() -> None:
    """Run the command; every error becomes its exit code."""
    _use_utf8()
    from vllm_qualify.engine.confinement import NO_STATISTICS

    for name, value in NO_STATISTICS.items():
        os.environ.setdefault(name, value)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_by_signal)
    try:
        app()
    except QualifyError as error:
        _end_with_error(error)
    except OSError as error:
        _end_with_error(HostError(str(error), "see the message; a full disk or a missing permission is the usual cause"))
    except Exception:
        # Python's own exit code for this is 1, which here means "not passed".
        traceback.print_exc()
        sys.exit(WORLD)


def _end_with_error(error: QualifyError) -> NoReturn:
    notes = [f"  {note}" for note in getattr(error, "__notes__", [])]
    again = "may well succeed" if error.retry else "will end the same way"
    classed = [f"  class: {error.kind}; the same thing tried again {again}"] if error.kind else []
    turn = "who must act is unclear" if isinstance(error, UnclearError) else f"{error.who_acts} must act"
    lines = [*(f"  | {line}" for line in error.log_tail), f"error ({turn}): {error}", *classed, *notes]
    typer.echo(safe_text("\n".join(lines)), err=True)
    sys.exit(error.exit_code)
