"""The commands about reports: `report show`, `report diff`, `rejudge` and `publish`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from vllm_qualify.cli.words import EXIT_CODES, NOT_PASSED, PASSED, StoreOption, open_named_store, show, tell, undecided, warn
from vllm_qualify.errors import CallerError

if TYPE_CHECKING:
    from vllm_qualify.report.model import Report
    from vllm_qualify.runs.folder import Run
    from vllm_qualify.runs.publishing import Published

REPORT, FAILURE = "report.json", "failure.html"
REPORT_HELP = "A run's id, its folder or a report.json"

StoreOfReports = Annotated[
    str | None, typer.Option("--store", help="s3://bucket/prefix or file:///folder, for ids of runs that are not here.")
]
report_app = typer.Typer(help="Look at reports.", no_args_is_help=True)


@report_app.command("show", epilog=EXIT_CODES)
def report_show(
    report: Annotated[
        str | None, typer.Argument(help=f"{REPORT_HELP}; with --store, also the id of a run there; by default the latest.")
    ] = None,
    store: StoreOfReports = None,
    json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> None:
    """Show a report's first screen."""
    found, text, page = _find_report(report, store)
    if json:
        typer.echo(text)
    else:
        show(found, page)


@report_app.command("diff", epilog="Exit codes: 0 compared, whatever differs, 2 the caller's mistake, 3 the world's fault.")
def report_diff(
    a: Annotated[str, typer.Argument(metavar="A", help=f"{REPORT_HELP}; with --store, also the id of a run there.")],
    b: Annotated[str, typer.Argument(metavar="B", help="As A. B is compared with A.")],
    store: StoreOfReports = None,
    json: Annotated[bool, typer.Option("--json", help="The comparison as JSON.")] = False,
) -> None:
    """Compare two reports, of any cells. Shown is what went into them, and what came out."""
    from vllm_qualify.report.diff import diff

    compared = diff(*(_find_report(name, store)[0] for name in (a, b)))
    if json:
        typer.echo(compared.model_dump_json(indent=2))
    else:
        from rich.console import Console

        from vllm_qualify.report.terminal import show_diff

        show_diff(compared, Console())


def rejudge(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id or folder; with --store, an id that is not here is fetched.")
    ],
    recipe: Annotated[str | None, typer.Option(help="Judge by this recipe's gates; by default by the run's own.")] = None,
    store: StoreOption = None,
) -> None:
    """Judge stored evidence again, without a server. The new report is published."""
    from vllm_qualify.plan.gates import judged_by
    from vllm_qualify.publish.kept import keep_judged_again
    from vllm_qualify.publish.layout import prepare
    from vllm_qualify.recipe.loading import load_recipe
    from vllm_qualify.report.diff import changed_gates, words_of_change
    from vllm_qualify.runs.judging import rejudge as judge_again
    from vllm_qualify.runs.publishing import publish_run

    target = open_named_store(store)
    prepare(target)
    old = find_or_fetch(run, store)
    report, fresh = judge_again(old, judged_by(old.plan, load_recipe(recipe).recipe) if recipe else old.plan)
    for change in changed_gates(old.plan, report.plan):
        tell(f"judged by other gates than run {old.id}: {words_of_change(change)}")
    published = publish_run(report, fresh, target)
    if report.passed:
        keep_judged_again(target, report.plan, report.stages)
    if report.passed and report.is_baseline_again:
        tell(f"run {report.run_id} is a baseline for runs with the same gates, until the cell has an approved one")
    _end_published(report, published)


def publish(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id or folder.")], store: StoreOption = None
) -> None:
    """Publish a run that finished while its store was away. Nothing is judged again."""
    from vllm_qualify.runs.folder import find_run
    from vllm_qualify.runs.publishing import publish_run

    measured = find_run(run)
    if not (measured.folder / REPORT).is_file():
        remedy = f"judge and publish what it measured: vllm-qualify rejudge {measured.id}"
        raise CallerError(f"run {measured.id} has not been judged", remedy, "RUN")
    target, report = open_named_store(store), measured.report()
    target.check()
    _end_published(report, publish_run(report, measured, target))


def _end_published(report: "Report", published: "Published") -> NoReturn:
    show(report, published.page)
    warn(published.index_problem)
    if report.passed:
        typer.echo(undecided(report.run_id))
    raise typer.Exit(PASSED if report.passed else NOT_PASSED)


def _report_file(name: str | None) -> Path:
    """The report file of a run, given by id, folder or the file itself; None means the latest report. Raises CallerError."""
    from vllm_qualify.runs.folder import find_run

    given = Path(name).expanduser() if name else None
    if given and given.suffix == ".json":
        return given
    if given and (given / REPORT).is_file():
        return given / REPORT
    folder = find_run(name).folder
    if not (folder / REPORT).is_file() and (folder / FAILURE).is_file():
        raise CallerError(f"run {folder.name} ended by an error and has no report", f"see {folder / FAILURE}", "RUN")
    return folder / REPORT


def _find_report(name: str | None, store: str | None) -> tuple["Report", str, str | None]:
    """A report of this machine, or of a run in the store; its JSON text; the place of its page, None if it has none.

    Raises CallerError if neither has it, or StoreError.
    """
    from vllm_qualify.publish.store import MissingObjectError
    from vllm_qualify.publish.stores import open_store
    from vllm_qualify.report.model import load_report
    from vllm_qualify.runs.stored import trusted_report

    try:
        path = _report_file(name)
        report, page = load_report(path), path.with_name("report.html")
        return report, path.read_text(encoding="utf-8"), str(page) if page.is_file() else None
    except CallerError:
        if name is None or store is None:
            raise
    opened = open_store(store)
    try:
        report = trusted_report(opened, name)
    except MissingObjectError as error:
        problem = f"neither this machine nor {opened.url} has a report '{name}'"
        raise CallerError(problem, "give a run's id, its folder or a report.json", "RUN") from error
    return report, report.model_dump_json(indent=2), opened.locate(f"{report.prefix}/report.html")


def find_or_fetch(name: str, store: str | None) -> "Run":
    from vllm_qualify.runs.folder import find_run
    from vllm_qualify.runs.stored import fetch_run

    try:
        return find_run(name)
    except CallerError:
        if store is None:
            raise
        return fetch_run(store, name)
