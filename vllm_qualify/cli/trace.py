"""The commands about traces."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_qualify.cli.words import EXIT_CODES

trace_app = typer.Typer(help="Traces of production's requests, without their texts.", no_args_is_help=True)


@trace_app.command("check", epilog=EXIT_CODES)
def trace_check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Mooncake's JSON lines, Azure's CSV, or those of this project.")],
    most: Annotated[int | None, typer.Option("--num-prompts", min=1, help="Only so many requests, the first ones.")] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show arrivals and lengths of a trace, and what a cache can hit. A load can replay it (`load.trace`)."""
    from vllm_qualify.recipe.traces.reading import read_trace
    from vllm_qualify.recipe.traces.summary import summary_of

    read = read_trace(file, most=most)
    summary = summary_of(read.trace, read.form)
    typer.echo(summary.model_dump_json(indent=2) if json else "\n".join(summary.lines))


@trace_app.command("make", epilog=EXIT_CODES)
def trace_make(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="OpenTelemetry's spans or an access log in JSON lines, or conversations.")
    ],
    out: Annotated[Path, typer.Option(help="The trace that is written.")],
    fields: Annotated[
        str | None,
        typer.Option(metavar="TIME,INPUT,OUTPUT", help="Of an access log: its keys for the time and the numbers of tokens."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Of conversations, as in ShareGPT's files: a model's folder, or its tokenizer.json, to count tokens."
        ),
    ] = None,
    rate: Annotated[float, typer.Option(min=1e-6, help="Of conversations: how many begin per second, at random times.")] = 1.0,
    turns_apart_s: Annotated[float, typer.Option(min=0, help="Of conversations: from one turn to the next, in s.")] = 10.0,
    most: Annotated[int | None, typer.Option("--num-conversations", min=1, help="Only so many, the first ones.")] = None,
) -> None:
    """Make a trace of what production keeps. It has times and numbers of tokens, no texts and no names."""
    from vllm_qualify.engine.environment import find_engine
    from vllm_qualify.engine.tokens import count_tokens
    from vllm_qualify.errors import CallerError, writing
    from vllm_qualify.recipe.traces.conversations import Pace, make_chats
    from vllm_qualify.recipe.traces.making import Fields, make_trace

    if fields is not None and tokenizer is not None:
        raise CallerError("a log has its numbers of tokens", "leave out --fields or --tokenizer", "--tokenizer")
    names = [name.strip() for name in fields.split(",")] if fields is not None else None
    if names is not None and (len(names) != len(Fields._fields) or not all(names)):
        remedy = "write them like time,usage.prompt_tokens,usage.completion_tokens"
        raise CallerError(f"'{fields}' is not three keys", remedy, "--fields")
    if tokenizer is not None:
        made = make_chats(file, lambda texts: count_tokens(find_engine(), tokenizer, texts), Pace(rate, turns_apart_s), most)
        left_out = "conversations without a reply"
    else:
        made = make_trace(file, Fields(*names) if names else None)
        left_out = "lines or spans that generated nothing"
    with writing(str(out)):
        out.write_text(made.body)
    typer.echo(f"{out}: {made.requests:,} requests; {made.left_out:,} {left_out} were left out")
