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


@trace_app.command("make", epilog=EXIT_CODES)
def trace_make(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines: OpenTelemetry's spans, or an access log.")],
    out: Annotated[Path, typer.Option(help="The trace that is written.")],
    fields: Annotated[
        str | None,
        typer.Option(metavar="TIME,INPUT,OUTPUT", help="Of an access log: its keys for the time and the numbers of tokens."),
    ] = None,
) -> None:
    """Make a trace of what production keeps: times and numbers of tokens, without texts and without names."""
    from vllm_qualify.errors import CallerError, writing
    from vllm_qualify.recipe.traces.making import Fields, make_trace

    names = [name.strip() for name in fields.split(",")] if fields is not None else None
    if names is not None and (len(names) != len(Fields._fields) or not all(names)):
        raise CallerError(
            f"'{fields}' is not three keys", "write them like time,usage.prompt_tokens,usage.completion_tokens", "--fields"
        )
    made = make_trace(file, Fields(*names) if names else None)
    with writing(str(out)):
        out.write_text(made.body)
    typer.echo(f"{out}: {made.requests:,} requests; {made.left_out:,} lines or spans that generated nothing were left out")
