"""Options and texts that several commands share."""

from typing import TYPE_CHECKING, Annotated

import typer

from vllm_qualify.secrets import shown

if TYPE_CHECKING:
    from vllm_qualify.report.model import Report


PASSED, NOT_PASSED, WORLD = 0, 1, 3
EXIT_CODES = "Exit codes: 0 passed (or done), 1 not passed, 2 the caller's mistake, 3 the world's fault."
REPORT_HELP = "A run's id, its folder or a report.json"
RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe of the catalog, like `reference`, or the path of a YAML file.")
]
AllowCodeOption = Annotated[
    bool, typer.Option("--allow-code", help="Let a recipe from outside the catalog run code; read it first.")
]
VllmOption = Annotated[str | None, typer.Option("--vllm", metavar="VERSION", help="A version by its table, like 0.32.0.")]


def tell(line: str) -> None:
    typer.echo(shown(line), err=True)


def undecided(run_id: str) -> str:
    return f"to approve it for deployment: vllm-qualify approve {run_id} --by NAME --reason WHY"


def show(report: "Report", page: str | None) -> None:
    from rich.console import Console

    from vllm_qualify.report.terminal import show_report

    show_report(report, Console(), page)
