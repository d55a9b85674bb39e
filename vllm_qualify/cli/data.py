"""The command about the data of accuracy tasks."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_qualify.cli.words import EXIT_CODES, AllowCodeOption, RecipeArgument

data_app = typer.Typer(help="The data of accuracy tasks.", no_args_is_help=True)


@data_app.callback()
def _group() -> None:
    """Keep `fetch` a command of the group, also where it is the only one."""


@data_app.command("fetch", epilog=EXIT_CODES)
def data_fetch(
    recipe: RecipeArgument,
    to: Annotated[Path, typer.Option(help="A folder; each task gets a folder in it.")] = Path("data"),
    task: Annotated[str | None, typer.Option(help="Only this task; by default all whose data is not here.")] = None,
    allow_code: AllowCodeOption = False,
) -> None:
    """Fetch the data of a recipe's tasks as files, for hosts without a hub, and show the lines that name them in the recipe."""
    from vllm_qualify.errors import CallerError
    from vllm_qualify.evidence.data import fetch
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
