"""The command `vllm-qualify`.

Exit codes: 0 passed (or done), 1 not passed, 2 the caller's mistake, 3 the world's fault.
"""

import importlib
import logging
import os
import signal
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from vllm_qualify import cli_approval
from vllm_qualify.cli_approval import StoreOption
from vllm_qualify.engine.launchers import LauncherName
from vllm_qualify.errors import CallerError, HostError, QualifyError, StoreError
from vllm_qualify.secrets import redact

if TYPE_CHECKING:
    from vllm_qualify.engine.launch import Launch
    from vllm_qualify.plan.cell import CellPlan
    from vllm_qualify.plan.choice import Choice
    from vllm_qualify.report.model import Report
    from vllm_qualify.runs.folder import Run

PASSED, NOT_PASSED, WORLD = 0, 1, 3
PRIVATE_KEY = "VLLM_QUALIFY_PRIVATE_KEY"
REPORT, FAILURE = "report.json", "failure.html"
DEMO_BASELINE = "reference/bf16/cpu/balanced"
STATE_CHANGES = ("Beginning ", "Finished in state ")
EXIT_CODES = "Exit codes: 0 passed (or done), 1 not passed, 2 the caller's mistake, 3 the world's fault."
REPORT_HELP = "A run's id, its folder or a report.json"

StoreOfReports = Annotated[
    str | None, typer.Option("--store", help="s3://bucket/prefix or file:///folder, for ids of runs that are not here.")
]

app = typer.Typer(
    name="vllm-qualify",
    help=f"Qualify a model for production on vLLM.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
report_app = typer.Typer(help="Look at reports.", no_args_is_help=True)
recipe_app = typer.Typer(help="Check, show and import recipes.", no_args_is_help=True)
app.add_typer(report_app, name="report")
app.add_typer(recipe_app, name="recipe")


class Weights(StrEnum):
    bf16 = "bf16"
    regressed = "regressed"


class Reusing(StrEnum):
    none = "none"
    unfinished = "unfinished"
    all = "all"


class Filter(StrEnum):
    strict_match = "strict-match"
    flexible_extract = "flexible-extract"


RunSettings = dict[str, object]
RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe of the catalog, like `reference`, or the path of a YAML file.")
]
VllmOption = Annotated[str | None, typer.Option("--vllm", metavar="VERSION", help="A version by its table, like 0.32.0.")]


@app.command(epilog=EXIT_CODES)
def run(
    recipe: Annotated[str, typer.Argument(help="A recipe of the catalog, like `reference`, or the path of a YAML file.")],
    gpu_type: Annotated[str | None, typer.Option(help="By default this machine's.")] = None,
    profile: Annotated[str | None, typer.Option(help="By default every profile of the GPU type.")] = None,
    variant: Annotated[str | None, typer.Option(help="By default the GPU type's default variant.")] = None,
    launcher: Annotated[LauncherName, typer.Option(help="How the server is started.")] = "process",
    image: Annotated[
        str | None, typer.Option(help="For docker: the image under test, by tag or digest, like vllm/vllm-openai:v0.32.0.")
    ] = None,
    client_image: Annotated[
        str | None, typer.Option(help="For docker: the load client's image; by default it runs inside the image under test.")
    ] = None,
    store: StoreOption = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="RUN", help="The run to compare with; by default the cell's newest baseline.")
    ] = None,
    establish_baseline: Annotated[
        bool, typer.Option("--establish-baseline", help="Make this run the baseline of later ones; it is compared with none.")
    ] = False,
    in_turns: Annotated[
        bool,
        typer.Option("--in-turns/--no-in-turns", help="Serve the baseline too, where that can be, to measure loads in turns."),
    ] = True,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="The server's port; by default a free one.")] = None,
    price_usd_gpu_hour: Annotated[
        float | None, typer.Option(min=0.000001, help="What a GPU costs an hour, in US dollars; by default the recipe's price.")
    ] = None,
    time_budget: Annotated[
        float | None,
        typer.Option(
            "--time-budget",
            metavar="SECONDS",
            min=0.001,
            help="No repeat of a load begins that would not end within it; by default the recipe's load.time_budget_s.",
        ),
    ] = None,
    reuse: Annotated[
        Reusing, typer.Option(help="Whose finished stages are taken over, where their inputs are the same.")
    ] = Reusing.unfinished,
    decision_timeout_s: Annotated[
        float,
        typer.Option(min=0, help="How long to wait for a decision in Prefect's UI where a person is to decide."),
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the exact commands that would start the servers, for any GPU type.")
    ] = False,
) -> None:
    """Qualify the cells of a recipe on this machine."""
    from vllm_qualify.engine.launch import Launch
    from vllm_qualify.plan.choice import Choice

    choice = Choice(gpu_type=gpu_type, variant=variant, profile=profile)
    launch = Launch(launcher=launcher, image=image, client_image=client_image)
    if dry_run:
        _dry_run(recipe, choice, launch, port)
        return
    if baseline and establish_baseline:
        raise CallerError("a run that is to be the baseline is compared with none", "leave one of the two out", "--baseline")
    if decision_timeout_s and not os.environ.get("PREFECT_API_URL"):
        problem, remedy = "nobody could decide: without a Prefect server of its own this run has no UI", "set PREFECT_API_URL"
        raise CallerError(problem, f"{remedy}, or decide later with `vllm-qualify approve`", "--decision-timeout-s")
    against: RunSettings = {"run": baseline, "establish": "always" if establish_baseline else "never", "in_turns": in_turns}
    others: RunSettings = {
        "reuse": {"of": reuse.value},
        "port": port,
        "price_usd_gpu_hour": price_usd_gpu_hour,
        "time_budget_s": time_budget,
        "decision_timeout_s": decision_timeout_s,
    }
    raise typer.Exit(_qualify(recipe, choice, launch, store, against, **others))


@app.command(epilog=EXIT_CODES)
def demo(
    weights: Annotated[Weights, typer.Option(help="`regressed` is to be refused.")] = Weights.bf16,
    store: StoreOption = None,
) -> None:
    """Qualify the reference model on a real vLLM server on the CPU.

    The first run in a store becomes the baseline, later ones are compared with it.
    """
    chosen = [weights]
    if weights is Weights.regressed and not _has_baseline(store):
        typer.echo("the store has no baseline to compare with: the reference model is qualified first", err=True)
        chosen = [Weights.bf16, weights]
    outcomes = [_demo(variant, store) for variant in chosen]
    raise typer.Exit(outcomes[-1])


def _has_baseline(store: str | None) -> bool:
    from vllm_qualify.publish.store import open_store
    from vllm_qualify.runs.baseline import newest_baseline
    from vllm_qualify.runs.home import default_store_url

    opened = open_store(store or default_store_url())
    opened.check()
    return newest_baseline(opened, DEMO_BASELINE) is not None


def _demo(weights: Weights, store: str | None) -> int:
    from vllm_qualify.engine.launch import Launch
    from vllm_qualify.plan.choice import Choice

    establish = "none" if weights is Weights.bf16 else "never"
    return _qualify("reference", Choice(gpu_type="cpu", variant=weights.value), Launch(), store, {"establish": establish})


@report_app.command("show", epilog=EXIT_CODES)
def report_show(
    report: Annotated[
        str | None, typer.Argument(help=f"{REPORT_HELP}; with --store, also the id of a run there; by default the latest.")
    ] = None,
    store: StoreOfReports = None,
    json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> None:
    """Show a report's first screen."""
    found = _find_report(report, store)
    if json:
        typer.echo(found.text)
    else:
        _show(found.report, found.page)


@report_app.command("diff", epilog="Exit codes: 0 compared, whatever differs, 2 the caller's mistake, 3 the world's fault.")
def report_diff(
    a: Annotated[str, typer.Argument(metavar="A", help=f"{REPORT_HELP}; with --store, also the id of a run there.")],
    b: Annotated[str, typer.Argument(metavar="B", help="As A; what is told is B beside A.")],
    store: StoreOfReports = None,
    json: Annotated[bool, typer.Option("--json", help="The comparison as JSON.")] = False,
) -> None:
    """Compare two reports, of any cells: what went into them, and what came out."""
    from vllm_qualify.report.diff import diff

    found = diff(_find_report(a, store).report, _find_report(b, store).report)
    if json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        from rich.console import Console

        from vllm_qualify.report.terminal import show_diff

        show_diff(found, Console())


@app.command(epilog=EXIT_CODES)
def rejudge(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id or folder; with --store, an id that is not here is fetched.")
    ],
    recipe: Annotated[str | None, typer.Option(help="Judge by this recipe's gates; by default by the run's own.")] = None,
    store: StoreOption = None,
) -> None:
    """Judge stored evidence again, without a server, and publish the new report."""
    from vllm_qualify.publish.store import open_store
    from vllm_qualify.runs.home import default_store_url
    from vllm_qualify.runs.judging import rejudge as judge_again
    from vllm_qualify.runs.publishing import publish_run

    target = open_store(store or default_store_url())
    target.check()
    old = _find_or_fetch(run, store)
    report, fresh = judge_again(old, _plan_by(recipe, old))
    published = publish_run(report, fresh, target)
    _show(report, published.page)
    if report.passed:
        typer.echo(_undecided(report.run_id))
    raise typer.Exit(PASSED if report.passed else NOT_PASSED)


cli_approval.add_to(app)


@app.command(epilog="Exit codes: 0 all that is needed is there, 3 something is missing.")
def doctor(
    clean: Annotated[bool, typer.Option("--clean", help="Remove the containers that killed runs left behind.")] = False,
) -> None:
    """Tell what this machine has and lacks, one line each with the remedy."""
    from vllm_qualify.doctor import examine
    from vllm_qualify.engine.launchers.registry import LAUNCHERS

    for launcher in LAUNCHERS.values() if clean else []:
        for leftover in launcher.remove_leftovers():
            typer.echo(f"removed  {leftover.name}, of run {leftover.run or 'unknown'}")
    findings = examine()
    for finding in findings:
        remedy = "" if finding.ok else f"  → {finding.remedy}"
        typer.echo(f"{finding.state:<8} {finding.what:<13} {finding.detail}{remedy}")
    raise typer.Exit(0 if all(finding.ok or finding.optional for finding in findings) else WORLD)


@recipe_app.command(
    "check", epilog="Exit codes: 0 no problem found, 1 it does not fit, 2 the caller's mistake, 3 the world's fault."
)
def recipe_check(
    recipe: RecipeArgument,
    vllm: VllmOption = None,
    image: Annotated[str | None, typer.Option(help="An image of vLLM, which is asked itself.")] = None,
    python: Annotated[
        str | None, typer.Option(metavar="ENV", help="The folder of an environment with vLLM, which is asked itself.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="OTHER", help="A version, an environment or an image before it: tells which defaults changed."),
    ] = None,
    gpu_type: Annotated[str | None, typer.Option(help="By default every one of the recipe.")] = None,
    variant: Annotated[str | None, typer.Option(help="By default every one that fits.")] = None,
    profile: Annotated[str | None, typer.Option(help="By default every one that fits.")] = None,
    json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> None:
    """Compare a recipe with what a vLLM takes, without a GPU; by default with the engine that `run` would use."""
    from vllm_qualify.drift.candidate import find_candidate, find_other
    from vllm_qualify.drift.check import check_recipe
    from vllm_qualify.plan.choice import Choice
    from vllm_qualify.recipe.loading import load_recipe
    from vllm_qualify.runs.home import engine_cache

    loaded, choice = load_recipe(recipe), Choice(gpu_type=gpu_type, variant=variant, profile=profile)
    candidate = find_candidate(vllm, image, python, _tell)
    other = find_other(against, _tell) if against else None
    checked = check_recipe(loaded, choice, candidate, engine_cache(), other)
    if json:
        typer.echo(checked.as_json())
    else:
        for line in checked.lines():
            typer.echo(line)
    raise typer.Exit(NOT_PASSED if checked.problems else 0)


@recipe_app.command("show", epilog=EXIT_CODES)
def recipe_show(
    recipe: RecipeArgument,
    gpu_type: Annotated[str | None, typer.Option(help="By default this machine's.")] = None,
    vllm: VllmOption = None,
    profile: Annotated[str | None, typer.Option(help="By default every profile of the GPU type.")] = None,
    variant: Annotated[str | None, typer.Option(help="By default the GPU type's default variant.")] = None,
    image: Annotated[str | None, typer.Option(help="By default vllm/vllm-openai of the version, or the newest known.")] = None,
) -> None:
    """Show config file, environment and docker command of the servers, for any GPU type and version."""
    from vllm_qualify.plan.choice import Choice
    from vllm_qualify.plan.dry_run import shown
    from vllm_qualify.recipe.loading import load_recipe
    from vllm_qualify.runs.home import runs_folder

    choice = Choice(gpu_type=gpu_type, variant=variant, profile=profile)
    typer.echo("\n\n".join(shown(load_recipe(recipe), choice, vllm, image, runs_folder())))


@recipe_app.command("import", epilog=EXIT_CODES)
def recipe_import(
    source: Annotated[
        Path, typer.Argument(help="A model's YAML in a checkout of vllm-project/recipes, or published JSON (a file or folder).")
    ],
    output: Annotated[Path | None, typer.Option(help="The recipe's file; by default it is written to the terminal.")] = None,
    exact_match_minimum: Annotated[
        float | None, typer.Option(help="The gate on gsm8k, which no published recipe has: the least share of right answers.")
    ] = None,
    exact_match_filter: Annotated[Filter | None, typer.Option(help="lm-eval's filter that the gate is on.")] = None,
    variant: Annotated[str | None, typer.Option(help="Of a YAML: its variant; by default its default one.")] = None,
    published: Annotated[
        Path | None, typer.Option(help="Of a YAML: the folder of published JSON, which is believed where it has the answer.")
    ] = None,
) -> None:
    """Make a recipe of one of vllm-project/recipes: its servers get exactly the published arguments and environment."""
    from vllm_qualify.recipe.importing import import_recipe, rendered, write_recipe

    chosen = exact_match_filter.value if exact_match_filter else None
    imported = import_recipe(
        source, exact_match_minimum=exact_match_minimum, exact_match_filter=chosen, variant=variant, published=published
    )
    if output is None:
        typer.echo(rendered(imported), nl=False)
    else:
        write_recipe(imported, output)
        typer.echo(f"wrote {output}; try it: vllm-qualify recipe check {output} --vllm VERSION", err=True)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _dry_run(recipe: str, choice: "Choice", launch: "Launch", port: int | None) -> None:
    from vllm_qualify.plan.dry_run import scripts
    from vllm_qualify.recipe.loading import load_recipe
    from vllm_qualify.runs.home import runs_folder

    typer.echo("\n\n".join(scripts(load_recipe(recipe), choice, launch, port, runs_folder())))


def _qualify(
    recipe: str,
    choice: "Choice",
    launch: "Launch",
    store: str | None,
    against: "RunSettings",
    **others: object,
) -> int:
    """Run the flow and show its reports. Returns the exit code. `others` are settings of the flow's request."""
    from vllm_qualify.engine.launch import check_launch
    from vllm_qualify.runs.home import default_store_url

    check_launch(launch)
    store = store or default_store_url()
    _check_early(recipe, choice, launch, store, against)
    flow = _flow_module()
    request = flow.QualifyRelease(recipe=recipe, choice=choice, launch=launch, store=store, against=against, **others)
    results = flow.qualified(request)
    for result in results:
        _show(result.run.report(), result.page)
        if result.passed:
            typer.echo(result.told or _undecided(result.run.id))
    is_good = all(result.passed and not result.rejected for result in results)
    return PASSED if results and is_good else NOT_PASSED


def _undecided(run_id: str) -> str:
    return f"to approve it for deployment: vllm-qualify approve {run_id} --by NAME --reason WHY"


def _check_early(recipe: str, choice: "Choice", launch: "Launch", store: str, against: "RunSettings") -> None:
    """Report a mistake before the orchestrator starts, which takes seconds. The flow checks again where it runs."""
    from vllm_qualify.engine.launch import find_engines
    from vllm_qualify.plan.cells import check_choice
    from vllm_qualify.publish.store import open_store
    from vllm_qualify.recipe.loading import load_recipe
    from vllm_qualify.runs.home import make_home

    make_home()
    loaded, opened = load_recipe(recipe), open_store(store)
    selection = check_choice(loaded, choice, launch)
    try:
        find_engines(launch)
    except HostError as error:
        # The flow asks again, after a wait.
        if error.kind != "registry-rate-limit":
            raise
    if os.environ.get(PRIVATE_KEY) or os.environ.get(f"{PRIVATE_KEY}_FILE"):
        from vllm_qualify.approval.signing import private_key

        private_key()
    opened.check()
    if selection:
        # Last, since it reads reports: their libraries take a second to import.
        from vllm_qualify.runs.baseline import Against, check_early

        check_early(selection, loaded.recipe, opened, Against.model_validate(against))


def _flow_module() -> Any:
    """The module flows.qualify. It is not part of the package: it is in the checkout (or the project's image)."""
    set_up_prefect()
    try:
        module = importlib.import_module("flows.qualify")
    except ModuleNotFoundError as error:
        if error.name not in ("flows", "tasks"):
            raise
        raise HostError(
            "the flows are not installed", "run from a checkout: git clone, `make setup`, .venv/bin/vllm-qualify", "check"
        ) from error
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_for_people)
    return module


def _is_for_people(record: logging.LogRecord) -> bool:
    """Whether to show a log record. Prefect logs every state, and each exception twice; the command shows an error once."""
    if record.name.startswith("great_expectations") and record.levelno < logging.WARNING:
        return False
    is_orchestrators = record.name.startswith("prefect.")
    return not (is_orchestrators and (record.exc_info or record.getMessage().startswith(STATE_CHANGES)))


def set_up_prefect() -> None:
    """Set Prefect's defaults: an ephemeral server, its home in ours, and log lines of time and message only."""
    from vllm_qualify.runs.home import make_home

    if "PREFECT_API_URL" not in os.environ and "PREFECT_PROFILE" not in os.environ:
        os.environ.setdefault("PREFECT_HOME", str(make_home() / "prefect"))
    # Its default of 20 s is too short on a busy host, since it first creates its database.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
    os.environ.setdefault("PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT", "%(asctime)s  %(message)s")
    os.environ.setdefault("PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT", "%(asctime)s  %(message)s")
    os.environ.setdefault("PREFECT_LOGGING_FORMATTERS_STANDARD_DATEFMT", "%H:%M:%S")


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


class _Found(NamedTuple):
    """A report, its JSON text, and the place of its page; None if it has no page."""

    report: "Report"
    text: str
    page: str | None


def _find_report(name: str | None, store: str | None) -> _Found:
    """A report of this machine, or of a run in the store. Raises CallerError if neither has it, or StoreError."""
    try:
        return _report_at(_report_file(name))
    except CallerError:
        if name is None or store is None:
            raise
    return _stored_report(name, store)


def _report_at(path: Path) -> _Found:
    from vllm_qualify.report.model import load_report

    report, page = load_report(path), path.with_name("report.html")
    return _Found(report, path.read_text(encoding="utf-8"), str(page) if page.is_file() else None)


def _stored_report(run_id: str, url: str) -> _Found:
    from vllm_qualify.publish.store import open_store
    from vllm_qualify.runs.stored import trusted_report

    store = open_store(url)
    try:
        report = trusted_report(store, run_id)
    except StoreError as error:
        if any(key.endswith(f"/{run_id}/manifest.json") for key in store.keys("reports/")):
            raise
        problem = f"neither this machine nor {store.url} has a report '{run_id}'"
        raise CallerError(problem, "give a run's id, its folder or a report.json", "RUN") from error
    return _Found(report, report.model_dump_json(indent=2), store.locate(f"{report.prefix}/report.html"))


def _find_or_fetch(name: str, store: str | None) -> "Run":
    from vllm_qualify.runs.folder import find_run
    from vllm_qualify.runs.stored import fetch_run

    try:
        return find_run(name)
    except CallerError:
        if store is None:
            raise
        return fetch_run(store, name)


def _plan_by(recipe: str | None, run: "Run") -> "CellPlan":
    """The run's plan. If `recipe` is given, the plan judges its cell as that recipe says."""
    from vllm_qualify.plan.gates import judged_by
    from vllm_qualify.recipe.loading import load_recipe

    return judged_by(run.plan, load_recipe(recipe).recipe) if recipe else run.plan


def _show(report: "Report", page: str | None) -> None:
    from rich.console import Console

    from vllm_qualify.report.terminal import show_report

    show_report(report, Console(), page)


def _terminated(number: int, frame: object) -> NoReturn:  # noqa: ARG001  (a signal handler's signature)
    """Unwind the stack, so that every server is stopped. By default Ctrl-C ends with 1, which means "not passed"."""
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command; every error becomes its exit code."""
    from vllm_qualify.engine.process import NO_STATISTICS

    for name, value in NO_STATISTICS.items():
        os.environ.setdefault(name, value)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _terminated)
    try:
        app()
    except QualifyError as error:
        _fail(error)
    except OSError as error:
        _fail(HostError(str(error), "see the message; a full disk or a missing permission is the usual cause"))
    except Exception:
        # Python's own exit code for this is 1, which here means "not passed".
        traceback.print_exc()
        sys.exit(WORLD)


def _fail(error: QualifyError) -> NoReturn:
    notes = [f"  {note}" for note in getattr(error, "__notes__", [])]
    again = "may well succeed" if error.retry else "will end the same way"
    classed = [f"  class: {error.kind}; the same thing tried again {again}"] if error.kind else []
    lines = [*(f"  | {line}" for line in error.log_tail), f"error ({error.who_acts} must act): {error}", *classed, *notes]
    typer.echo(redact("\n".join(lines)), err=True)
    sys.exit(error.exit_code)
