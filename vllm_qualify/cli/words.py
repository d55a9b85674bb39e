"""Options and texts that several commands share."""

from typing import TYPE_CHECKING, Annotated

import typer

from vllm_qualify.secrets import safe_text

if TYPE_CHECKING:
    from vllm_qualify.publish.store import PrunableStore
    from vllm_qualify.report.model import Report


PASSED, NOT_PASSED, WORLD = 0, 1, 3
EXIT_CODES = "Exit codes: 0 passed (or done), 1 not passed, 2 the caller's mistake, 3 the world's fault."
RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe of the catalog, like `reference`, or the path of a YAML file.")
]
AllowCodeOption = Annotated[
    bool,
    typer.Option("--allow-code", help="Let a recipe from outside the catalog run code, or open its server; read it first."),
]
StoreOption = Annotated[
    str | None, typer.Option(help="s3://bucket/prefix or file:///folder; by default a folder below VLLM_QUALIFY_HOME.")
]
VllmOption = Annotated[str | None, typer.Option("--vllm", metavar="VERSION", help="A version by its table, like 0.32.0.")]


def tell(line: str) -> None:
    typer.echo(safe_text(line), err=True)


def warn(problem: str | None) -> None:
    if problem:
        typer.echo(f"warning: {problem}", err=True)


def open_named_store(url: str | None) -> "PrunableStore":
    """The store of this URL; without one, the folder below VLLM_QUALIFY_HOME."""
    from vllm_qualify.publish.stores import open_store
    from vllm_qualify.runs.home import default_store_url, make_default_store

    if url is None:
        make_default_store()
    return open_store(url or default_store_url())


def undecided(run_id: str) -> str:
    return f"to approve it for deployment: vllm-qualify approve {run_id} --by NAME --reason WHY"


def show(report: "Report", page: str | None) -> None:
    from rich.console import Console

    from vllm_qualify.report.terminal import show_report

    show_report(report, Console(), page)
