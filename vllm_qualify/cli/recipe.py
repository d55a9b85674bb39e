"""The commands about recipes, `recipe check`, `recipe show` and `recipe import`, and about the data of their tasks."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from vllm_qualify.cli.bounds import recipe_bounds
from vllm_qualify.cli.new_recipe import recipe_new
from vllm_qualify.cli.words import EXIT_CODES, NOT_PASSED, AllowCodeOption, RecipeArgument, VllmOption, tell

recipe_app = typer.Typer(help="Draft, check, show and import recipes.", no_args_is_help=True)
recipe_app.command("new", epilog=EXIT_CODES)(recipe_new)
data_app = typer.Typer(help="The data of accuracy tasks.", no_args_is_help=True)
recipe_app.command("bounds", epilog=EXIT_CODES)(recipe_bounds)


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
        typer.Option(metavar="OTHER", help="A version, an environment or an image before it: shows which defaults changed."),
    ] = None,
    gpu_type: Annotated[str | None, typer.Option(help="By default every one of the recipe.")] = None,
    variant: Annotated[str | None, typer.Option(help="By default every one that fits.")] = None,
    profile: Annotated[str | None, typer.Option(help="By default every one that fits.")] = None,
    allow_code: AllowCodeOption = False,
    json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> None:
    """Compare a recipe with what a vLLM takes, without a GPU. By default it is the engine that `run` would use."""
    from vllm_qualify.drift.candidate import find_candidate, find_other
    from vllm_qualify.drift.check import check_recipe
    from vllm_qualify.evidence.accuracy.checked_tasks import with_tasks
    from vllm_qualify.plan.choice import Choice
    from vllm_qualify.recipe.code import check_allowed
    from vllm_qualify.recipe.loading import load_recipe
    from vllm_qualify.runs.home import engine_cache

    loaded, choice = load_recipe(recipe), Choice(gpu_type=gpu_type, variant=variant, profile=profile)
    if not vllm:
        # An engine that is asked may run the code of the recipe; a table does not.
        check_allowed(loaded, allow_code)
    candidate = find_candidate(vllm, image, python, tell)
    other = find_other(against, tell) if against else None
    checked = with_tasks(check_recipe(loaded, choice, candidate, engine_cache(), other, allow_code), loaded, choice)
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
    """Show the config file and the command of each server. GPU type and version can be any."""
    from vllm_qualify.plan.choice import Choice
    from vllm_qualify.plan.dry_run import server_scripts
    from vllm_qualify.recipe.loading import load_recipe
    from vllm_qualify.runs.home import runs_folder

    choice = Choice(gpu_type=gpu_type, variant=variant, profile=profile)
    typer.echo("\n\n".join(server_scripts(load_recipe(recipe), choice, vllm, image, runs_folder())))


@recipe_app.command("import", epilog=EXIT_CODES)
def recipe_import(
    source: Annotated[
        Path, typer.Argument(help="A model's YAML in a checkout of vllm-project/recipes, or published JSON (a file or folder).")
    ],
    output: Annotated[Path | None, typer.Option(help="The recipe's file; by default it is written to the terminal.")] = None,
    exact_match_minimum: Annotated[
        float | None, typer.Option(help="The gate on gsm8k, which no published recipe has: the least share of right answers.")
    ] = None,
    exact_match_filter: Annotated[
        Literal["strict-match", "flexible-extract"] | None, typer.Option(help="lm-eval's filter that the gate is on.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Of a YAML: its variant; by default its default one.")] = None,
    published: Annotated[
        Path | None, typer.Option(help="Of a YAML: the folder of published JSON, which is believed where it has the answer.")
    ] = None,
    allow_code: AllowCodeOption = False,
) -> None:
    """Make a recipe of one of vllm-project/recipes. Its servers get exactly the published arguments and environment."""
    from vllm_qualify.recipe.code import check_import_allowed
    from vllm_qualify.recipe.importing import import_recipe, render_recipe, write_recipe

    imported = import_recipe(
        source,
        exact_match_minimum=exact_match_minimum,
        exact_match_filter=exact_match_filter,
        variant=variant,
        published=published,
    )
    for line in check_import_allowed(imported.recipe, source, allow_code):
        tell(f"it needs trust: {line}")
    if output is None:
        typer.echo(render_recipe(imported), nl=False)
    else:
        write_recipe(imported, output)
        # In the file they are a comment, which is easily missed.
        for note in imported.notes:
            tell(note)
        typer.echo(f"wrote {output}; try it: vllm-qualify recipe check {output} --vllm VERSION", err=True)


@data_app.callback()
def _keep_group() -> None:
    """Keep `fetch` a command of the group, also where it is the only one."""


@data_app.command("fetch", epilog=EXIT_CODES)
def data_fetch(
    recipe: RecipeArgument,
    to: Annotated[Path, typer.Option(help="A folder; each task gets a folder in it.")] = Path("data"),
    task: Annotated[str | None, typer.Option(help="Only this task; by default all whose data is not here.")] = None,
    allow_code: AllowCodeOption = False,
) -> None:
    """Fetch the data of a recipe's tasks for hosts without a hub. Shown are the lines that name the files in the recipe."""
    from vllm_qualify.errors import CallerError
    from vllm_qualify.evidence.accuracy.data import fetch
    from vllm_qualify.plan.questions import SUFFIX
    from vllm_qualify.plan.workload import task_plan
    from vllm_qualify.recipe.code import check_allowed
    from vllm_qualify.recipe.loading import load_recipe

    loaded = load_recipe(recipe)
    check_allowed(loaded, allow_code)
    # Long contexts are made of a seed alone.
    lacking = [each for each in loaded.recipe.accuracy if not each.questions and not each.context_tok]
    wanted = [each for each in lacking if task in (None, each.task)]
    if not wanted:
        named = f"no task '{task}' with data that is not here" if task else "no task with data that is not here"
        raise CallerError(f"the recipe has {named}", "there is nothing to fetch", "RECIPE")
    for each in wanted:
        into = to / each.task
        reply = fetch(task_plan(loaded, each, None, []), into)
        typer.echo(f"{each.task}: {reply.questions:,} questions" + (f", {reply.shots:,} examples" if reply.shots else ""))
        suffix = "" if reply.members else SUFFIX
        shots = f", shots: {into / f'shots{suffix}'}" if reply.shots else ""
        typer.echo(f"  questions: {{test: {into / f'test{suffix}'}{shots}}}")
        if not reply.shots and each.num_fewshot:
            typer.echo("  # it draws its examples from its questions, or has its own: without own ones set num_fewshot to 0")
