"""The commands that qualify: `run` and `demo`."""

import os
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vllm_qualify.cli.flow import flow_module
from vllm_qualify.cli.words import (
    NOT_PASSED,
    PASSED,
    AllowCodeOption,
    RecipeArgument,
    StoreOption,
    open_named_store,
    show,
    tell,
    undecided,
)
from vllm_qualify.engine.launchers import LauncherName
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.plan.request import Against, Reuse, ReusedRuns

if TYPE_CHECKING:
    from vllm_qualify.engine.provision import Launch
    from vllm_qualify.plan.choice import Choice
    from vllm_qualify.runs.request import QualifyRelease

PRIVATE_KEY = "VLLM_QUALIFY_PRIVATE_KEY"
Weights = Literal["bf16", "regressed"]


def run(
    recipe: RecipeArgument,
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
        bool,
        typer.Option(
            "--establish-baseline",
            help="Make this run the baseline of later ones; it is itself compared with the approved one.",
        ),
    ] = False,
    anchor: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="The approved baseline to use as the anchor; by default the cell's own anchor."),
    ] = None,
    new_anchor: Annotated[
        bool,
        typer.Option(
            "--new-anchor", help="With --establish-baseline: compare this run with no earlier one, and make it the anchor too."
        ),
    ] = False,
    in_turns: Annotated[
        bool,
        typer.Option("--in-turns/--no-in-turns", help="Serve the baseline too if possible, and measure both loads in turns."),
    ] = True,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="The server's port; by default a free one.")] = None,
    price_usd_gpu_hour: Annotated[
        float | None, typer.Option(min=0.000001, help="What a GPU costs an hour, in US dollars; by default the recipe's price.")
    ] = None,
    time_budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.001,
            help="Begin no repeat of a load that may end after it; by default the recipe's load.time_budget_s.",
        ),
    ] = None,
    reuse: Annotated[
        ReusedRuns,
        typer.Option(
            help="The runs whose finished stages are reused if the inputs are the same: none, unfinished ones, or all."
        ),
    ] = "unfinished",
    decision_timeout_s: Annotated[
        float,
        typer.Option(min=0, help="How long to wait for a person to decide, with `vllm-qualify approve` or at the approver."),
    ] = 0,
    allow_code: AllowCodeOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the exact commands that would start the servers, for any GPU type.")
    ] = False,
) -> None:
    """Qualify the cells of a recipe on this machine."""
    from vllm_qualify.engine.provision import Launch
    from vllm_qualify.plan.choice import Choice
    from vllm_qualify.runs.home import default_store_url
    from vllm_qualify.runs.request import QualifyRelease

    choice = Choice(gpu_type=gpu_type, variant=variant, profile=profile)
    launch = Launch(launcher=launcher, image=image, client_image=client_image)
    if dry_run:
        _show_scripts(recipe, choice, launch, port, allow_code)
        return
    if baseline and establish_baseline:
        problem = "a run that becomes the baseline is held against the approved one alone"
        raise CallerError(problem, "leave one of the two out", "--baseline")
    if new_anchor and (anchor or not establish_baseline):
        problem = "a run becomes the anchor only as a baseline, and is held against no other anchor"
        raise CallerError(problem, "add --establish-baseline, and leave --anchor out", "--new-anchor")
    request = QualifyRelease(
        recipe=recipe,
        allow_code=allow_code,
        choice=choice,
        launch=launch,
        store=store or default_store_url(),
        against=Against(
            run=baseline,
            establish="always" if establish_baseline else "never",
            in_turns=in_turns,
            anchor=anchor,
            new_anchor=new_anchor,
        ),
        port=port,
        price_usd_gpu_hour=price_usd_gpu_hour,
        time_budget_s=time_budget,
        reuse=Reuse(of=reuse),
        decision_timeout_s=decision_timeout_s,
    )
    raise typer.Exit(_qualify(request))


def demo(
    weights: Annotated[Weights, typer.Option(help="`regressed` is a worse model, which must be refused.")] = "bf16",
    store: StoreOption = None,
) -> None:
    """Qualify the reference model on a real vLLM server on the CPU.

    The first run in a store becomes the baseline, later ones are compared with it.
    """
    from vllm_qualify.publish.layout import prepare
    from vllm_qualify.runs.home import default_store_url

    if weights == "regressed":
        from vllm_qualify.runs.baseline import newest_baseline

        opened = open_named_store(store)
        prepare(opened)
        if newest_baseline(opened, "reference/bf16/cpu/balanced") is None:
            typer.echo("the store has no baseline to compare with: the reference model is qualified first", err=True)
            _run_demo("bf16", store or default_store_url())
    raise typer.Exit(_run_demo(weights, store or default_store_url()))


def _run_demo(weights: Weights, store_url: str) -> int:
    from vllm_qualify.plan.choice import Choice
    from vllm_qualify.runs.request import QualifyRelease

    against = Against(establish="none" if weights == "bf16" else "never")
    choice = Choice(gpu_type="cpu", variant=weights)
    return _qualify(QualifyRelease(recipe="reference", choice=choice, store=store_url, against=against))


def _tell_of_new_home(store_url: str) -> None:
    from vllm_qualify.runs.home import home

    if not home().exists():
        tell(f"first run here: {home()} is made, and holds runs, Prefect's database and what engines said")
        tell(f"results go to {store_url}, and to nowhere else; VLLM_QUALIFY_HOME names another folder")


def _show_scripts(recipe: str, choice: "Choice", launch: "Launch", port: int | None, allow_code: bool) -> None:
    from vllm_qualify.evidence.accuracy.checked_tasks import check_recipes_tasks
    from vllm_qualify.plan.dry_run import scripts, select_cells
    from vllm_qualify.recipe.code import check_allowed
    from vllm_qualify.recipe.loading import load_recipe
    from vllm_qualify.runs.home import runs_folder

    loaded = load_recipe(recipe)
    check_allowed(loaded, allow_code)
    shown = list(scripts(loaded, choice, launch, port, runs_folder()))
    check_recipes_tasks(loaded, select_cells(loaded, choice).profiles.values())
    typer.echo("\n\n".join(shown))


def _qualify(request: "QualifyRelease") -> int:
    """Run the flow, and show its reports and which refusals may be chance. Returns the exit code."""
    from rich.console import Console

    from vllm_qualify.engine.provision import check_launch
    from vllm_qualify.report.live_view import showing_progress

    check_launch(request.launch)
    _tell_of_new_home(request.store)
    _check_early(request)
    flows = flow_module()
    with showing_progress(Console(stderr=True)):
        results = flows.run_qualification(request)
    for result in results:
        show(result.run.report(), result.page)
        if result.passed:
            typer.echo(result.decision or undecided(result.run.id))
    # Their libraries take a second to import.
    from vllm_qualify.judge.chance import refusals
    from vllm_qualify.report.refusals import refusal_lines

    for line in refusal_lines(refusals([result.run.report().chance for result in results])):
        typer.echo(line)
    is_good = all(result.passed and not result.rejected for result in results)
    return PASSED if results and is_good else NOT_PASSED


def _check_early(request: "QualifyRelease") -> None:
    """Report a mistake before the orchestrator starts, which takes seconds. The flow checks again where it runs."""
    from vllm_qualify.engine.host import check_host
    from vllm_qualify.engine.provision import find_engines
    from vllm_qualify.evidence.accuracy.checked_tasks import check_recipes_tasks
    from vllm_qualify.plan.cells import check_choice
    from vllm_qualify.publish.layout import prepare
    from vllm_qualify.publish.stores import open_store
    from vllm_qualify.recipe.code import check_allowed
    from vllm_qualify.recipe.loading import load_recipe
    from vllm_qualify.runs.home import make_home

    check_host()
    make_home()
    loaded, opened = load_recipe(request.recipe), open_store(request.store)
    check_allowed(loaded, request.allow_code)
    selection = check_choice(loaded, request.choice, request.launch)
    if selection:
        check_recipes_tasks(loaded, selection.profiles.values())
    try:
        find_engines(request.launch)
    except HostError as error:
        # The flow asks again, after a wait.
        if error.kind != "registry-rate-limit":
            raise
    if os.environ.get(PRIVATE_KEY) or os.environ.get(f"{PRIVATE_KEY}_FILE"):
        from vllm_qualify.approval.signing import private_key

        private_key()
    prepare(opened)
    if selection:
        # Last, since it reads reports: their libraries take a second to import.
        from vllm_qualify.runs.baseline import check_early

        check_early(selection, loaded.recipe, opened, request.against)
