"""The commands about traces."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_qualify.cli.words import EXIT_CODES

trace_app = typer.Typer(help="Traces of production's requests, without their texts.", no_args_is_help=True)


@trace_app.callback()
def _group() -> None:
    """Keep `check` a command of the group, also where it is the only one."""


@trace_app.command("check", epilog=EXIT_CODES)
def trace_check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Mooncake's JSON lines, Azure's CSV, or those of this project.")],
    most: Annotated[int | None, typer.Option("--num-prompts", min=1, help="Only so many requests, the first ones.")] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show what a trace asks: arrivals, lengths, and how much a prefix cache can hit. A load can replay it (`load.trace`)."""
    from vllm_qualify.recipe.traces.reading import read_trace
    from vllm_qualify.recipe.traces.summary import summary_of

    read = read_trace(file, most=most)
    summary = summary_of(read.trace, read.form)
    typer.echo(summary.model_dump_json(indent=2) if json else "\n".join(summary.lines))
