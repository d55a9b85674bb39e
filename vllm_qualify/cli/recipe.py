"""The commands about recipes: `recipe check`, `recipe show` and `recipe import`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vllm_qualify.cli.words import EXIT_CODES, NOT_PASSED, AllowCodeOption, RecipeArgument, VllmOption, tell

recipe_app = typer.Typer(help="Check, show and import recipes.", no_args_is_help=True)


class Filter(StrEnum):
    strict_match = "strict-match"
    flexible_extract = "flexible-extract"


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
    """Compare a recipe with what a vLLM takes, without a GPU; by default with the engine that `run` would use."""
    from vllm_qualify.drift.candidate import find_candidate, find_other
    from vllm_qualify.drift.check import check_recipe
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
    checked = check_recipe(loaded, choice, candidate, engine_cache(), other, allow_code)
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
    exact_match_filter: Annotated[Filter | None, typer.Option(help="lm-eval's filter that the gate is on.")] = None,
    variant: Annotated[str | None, typer.Option(help="Of a YAML: its variant; by default its default one.")] = None,
    published: Annotated[
        Path | None, typer.Option(help="Of a YAML: the folder of published JSON, which is believed where it has the answer.")
    ] = None,
    allow_code: AllowCodeOption = False,
) -> None:
    """Make a recipe of one of vllm-project/recipes: its servers get exactly the published arguments and environment."""
    from vllm_qualify.recipe.code import check_import_allowed
    from vllm_qualify.recipe.importing import import_recipe, rendered, write_recipe

    chosen = exact_match_filter.value if exact_match_filter else None
    imported = import_recipe(
        source, exact_match_minimum=exact_match_minimum, exact_match_filter=chosen, variant=variant, published=published
    )
    for line in check_import_allowed(imported.recipe, source, allow_code):
        tell(f"it runs code: {line}")
    if output is None:
        typer.echo(rendered(imported), nl=False)
    else:
        write_recipe(imported, output)
        typer.echo(f"wrote {output}; try it: vllm-qualify recipe check {output} --vllm VERSION", err=True)
