"""The command that drafts a recipe of a model."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_qualify.cli.words import VllmOption, tell

if TYPE_CHECKING:
    from vllm_qualify.drift.candidate import Candidate
    from vllm_qualify.recipe.drafting.parts import Host
    from vllm_qualify.recipe.drafting.traffic import Slo, Traffic


def recipe_new(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder with a model, or a repository of the hub.")],
    output: Annotated[Path | None, typer.Option(help="The recipe's file; by default it is written to the terminal.")] = None,
    gpu_type: Annotated[
        list[str] | None, typer.Option(help="May be given several times; `cpu` is one. By default this machine's.")
    ] = None,
    input_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a typical prompt.")] = None,
    output_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a typical reply.")] = None,
    users: Annotated[int | None, typer.Option(min=1, help="Clients at once, each waiting for its reply.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests per second, in place of clients.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A trace of production, in place of lengths: `trace make` makes one.")
    ] = None,
    ttft_p50_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Promised: most time to the first token, median.")
    ] = None,
    ttft_p99_ms: Annotated[float | None, typer.Option(min=0.001, help="Promised: the same of 99 % of requests.")] = None,
    tpot_p50_ms: Annotated[float | None, typer.Option(min=0.001, help="Promised: most time per further token, median.")] = None,
    tpot_p99_ms: Annotated[float | None, typer.Option(min=0.001, help="Promised: the same of 99 % of requests.")] = None,
    published: Annotated[
        Path | None, typer.Option(help="A checkout or an export of vllm-project/recipes: its arguments for this model.")
    ] = None,
    vllm: VllmOption = None,
    image: Annotated[str | None, typer.Option(help="An image of vLLM, whose parsers are tried.")] = None,
    python: Annotated[
        str | None, typer.Option(metavar="ENV", help="The folder of an environment with vLLM, whose parsers are tried.")
    ] = None,
) -> None:
    """Draft a recipe of a model from its own files, with reasons."""
    from vllm_qualify.drift.draft import Wish, draft_recipe
    from vllm_qualify.errors import CallerError, writing
    from vllm_qualify.recipe.drafting.traffic import Slo, Traffic

    if output is not None and output.exists():
        raise CallerError("there is such a file already", "give another name, or move it away", str(output))
    promised = {"ttft_p50_ms": ttft_p50_ms, "ttft_p99_ms": ttft_p99_ms, "tpot_p50_ms": tpot_p50_ms, "tpot_p99_ms": tpot_p99_ms}
    slo = Slo({name: limit for name, limit in promised.items() if limit is not None})
    traffic = _check_traffic(Traffic(input_len, output_len, users, rate), trace, output)
    if not traffic.is_said and _is_asked_by_a_person():
        traffic, slo = _ask_traffic(traffic), slo if slo.limits_ms else _ask_slo()
    hosts, candidate = _list_hosts(gpu_type or []), _find_engine(vllm, image, python)
    wish = Wish(model, hosts, traffic, slo, published, output, _typed_command(model))
    text = draft_recipe(wish, candidate, tell)
    if output is None:
        typer.echo(text, nl=False)
        return
    with writing(str(output)):
        output.write_text(text, encoding="utf-8")
    tell(f"wrote {output}; next: vllm-qualify recipe check {shlex.quote(str(output))}")


def _typed_command(model: str) -> str:
    return f"vllm-qualify recipe new {shlex.quote(model)}"


def _check_traffic(traffic: "Traffic", trace: Path | None, output: Path | None) -> "Traffic":
    """The traffic that was said. Raises CallerError if two things of it exclude each other, or the trace is none."""
    from vllm_qualify.errors import CallerError

    if traffic.clients and traffic.rate:
        raise CallerError("--users and --rate are two ways to send requests", "give one of them", "--rate")
    if trace is None:
        return traffic
    if any(traffic[:4]):
        raise CallerError(
            "a trace has its own lengths and times", "leave --input-len, --output-len, --users and --rate out", "--trace"
        )
    from vllm_qualify.recipe.traces.reading import read_trace

    read = read_trace(trace).trace
    longest = max(map(sum, zip(read.input_toks, read.output_toks, strict=True)))
    base = output.absolute().parent if output else None
    whole = trace.absolute()
    written = f"./{whole.relative_to(base)}" if base and whole.is_relative_to(base) else str(whole)
    return traffic._replace(trace=written, longest_tok=longest)


# --- a person at a terminal


def _is_asked_by_a_person() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _ask_traffic(traffic: "Traffic") -> "Traffic":
    """What is not said yet. An empty reply leaves a stand-in, which the recipe says."""
    tell("Whom will the server serve? Leave empty what you do not know: the recipe then has a stand-in and says so.")
    return traffic._replace(
        input_tok=traffic.input_tok or _ask_number("Tokens of a typical prompt"),
        output_tok=traffic.output_tok or _ask_number("Tokens of a typical reply"),
        clients=traffic.clients or (None if traffic.rate else _ask_number("Clients at once")),
    )


def _ask_slo() -> "Slo":
    from vllm_qualify.recipe.drafting.traffic import Slo

    tell("What do you promise? Leave empty what you do not promise.")
    asked = {
        "ttft_p99_ms": _ask_number("Most ms to the first token, for 99 % of requests"),
        "tpot_p99_ms": _ask_number("Most ms per further token, for 99 % of requests"),
    }
    return Slo({name: float(limit) for name, limit in asked.items() if limit})


def _ask_number(what: str) -> int | None:
    while True:
        said = str(typer.prompt(what, default="", show_default=False, err=True)).strip().replace(",", "")
        if not said:
            return None
        if said.isdecimal() and 0 < int(said) < 10**9:
            return int(said)
        tell("a whole number above 0, or nothing")


# --- where it is served


def _list_hosts(gpu_types: list[str]) -> "list[Host]":
    """The GPU types, with the memory of one GPU: this machine's own, or by the table."""
    from vllm_qualify.engine.gpu import detect
    from vllm_qualify.recipe.drafting.parts import Host
    from vllm_qualify.recipe.gpu_types import GPU_TYPES, MEMORY_GB

    here = detect("cpu") if gpu_types == ["cpu"] else detect()
    known = {each.name for each in GPU_TYPES}
    hosts = []
    for name in dict.fromkeys(gpu_types or [here.gpu_type]):
        if name == here.gpu_type:
            memory_gb = here.memory_mib * 2**20 / 10**9
            hosts.append(Host(name, memory_gb, not here.features or any("bf16" in each for each in here.features)))
        else:
            if name not in known:
                tell(f"warning: nothing is known of a GPU type '{name}'; known are {', '.join(sorted(known))}")
            hosts.append(Host(name, MEMORY_GB.get(name)))
    return hosts


def _find_engine(vllm: str | None, image: str | None, python: str | None) -> "Candidate | None":
    """The engine whose parsers are tried; None if none was named and there is none here."""
    from vllm_qualify.drift.candidate import find_candidate
    from vllm_qualify.errors import HostError

    try:
        return find_candidate(vllm, image, python, tell)
    except HostError as error:
        if image or python:
            raise
        tell(f"warning: {error.problem}")
        return None
