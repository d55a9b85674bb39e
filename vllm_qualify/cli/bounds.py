"""The command `recipe bounds`: what a run suggests for its recipe's gates."""

import json as json_text
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_qualify.cli.report import find_or_fetch
from vllm_qualify.cli.words import StoreOption, tell
from vllm_qualify.errors import CallerError

if TYPE_CHECKING:
    from vllm_qualify.judge.bounds import Bound, Hurts
    from vllm_qualify.recipe.gates import Gate
    from vllm_qualify.recipe.recipe import LoadedRecipe
    from vllm_qualify.report.model import Report

LOSS, WORSENING = "--loss-that-hurts", "--worsening-that-hurts"
Hurting = Annotated[float | None, typer.Option(LOSS, min=0.0001, max=0.5, help="The share of questions whose loss hurts.")]
HurtingLoad = Annotated[
    float | None, typer.Option(WORSENING, min=0.001, max=1.0, help="How much slower hurts: 0.05 is 1.05 times the time.")
]


def recipe_bounds(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id or folder; with --store, an id that is not here.")],
    recipe: Annotated[str | None, typer.Option(help="The YAML file that the run was made with; needed for --write.")] = None,
    loss_that_hurts: Hurting = None,
    worsening_that_hurts: HurtingLoad = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Write the bound on this metric; can be repeated. By default the usual ones.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Add the gates to the recipe's file.")] = False,
    store: StoreOption = None,
    json: Annotated[bool, typer.Option("--json", help="The suggestions as JSON.")] = False,
) -> None:
    """Suggest bounds by what a run measured, never its own values. Gates that the recipe has are kept."""
    from vllm_qualify.judge.bounds import find_named, suggest_bounds

    measured = find_or_fetch(run, store)
    report = measured.report()
    loaded = _load_own(report, recipe, write)
    own = _gates_of_cell(report, loaded)
    hurts = _ask_hurts(loss_that_hurts, worsening_that_hurts, is_asked=not json and sys.stdin.isatty())
    bounds = suggest_bounds(report.plan, report.stages, measured.evidence, own, hurts)
    _check_names(bounds, metric or [])
    chosen = list(find_named(bounds, metric or []))
    if json:
        typer.echo(_as_json(report, bounds, chosen))
    else:
        for line in _list_lines(report, bounds, chosen, hurts):
            typer.echo(line)
    if write and recipe:
        _write_gates(report, recipe, chosen)


def _load_own(report: "Report", recipe: str | None, write: bool) -> "LoadedRecipe | None":
    """The recipe, if it is named. Raises CallerError if it is not the run's own, or cannot be written to."""
    from vllm_qualify.plan.conformity import difference_of_settings
    from vllm_qualify.recipe.editing import find_file
    from vllm_qualify.recipe.loading import load_recipe

    if recipe is None:
        if write:
            raise CallerError("nothing says which file is written", "name it with --recipe FILE", "--recipe")
        return None
    if write:
        find_file(recipe)
    loaded = load_recipe(recipe)
    if reason := difference_of_settings(report.plan, loaded):
        remedy = "name the file that the run was made with, or run this one and take its own bounds"
        raise CallerError(f"run {report.run_id} was not made with this recipe: {reason}", remedy, "--recipe")
    if write and (failed := _failed_checks(report)):
        problem = f"run {report.run_id} is no measure of others: its server does not work as it should ({', '.join(failed)})"
        raise CallerError(problem, "take the bounds from a run whose checks hold", "RUN")
    return loaded


def _failed_checks(report: "Report") -> list[str]:
    return [each.gate.label for each in report.judgement.gates if not each.gate.has_noise and each.verdict != "pass"]


def _gates_of_cell(report: "Report", loaded: "LoadedRecipe | None") -> "Sequence[Gate]":
    if loaded is None:
        return report.plan.gates
    profile = loaded.recipe.gpu_types[report.plan.cell.gpu_type].profiles[report.plan.cell.profile]
    return loaded.recipe.gates_of(profile)


def _ask_hurts(loss: float | None, worsening: float | None, *, is_asked: bool) -> "Hurts":
    """What the user calls a loss that hurts, asked where a person can answer."""
    from vllm_qualify.judge.bounds import Hurts

    if is_asked and loss is None:
        loss = _ask_share("Which share of right answers must a later release not lose? 0 asks for no such gate", 0.01, 0.5)
    if is_asked and worsening is None:
        worsening = _ask_share("How much slower must it not be, as a share? 0 asks for no such gate", 0.05, 1.0)
    return Hurts(loss=loss or None, worsening=worsening or None)


def _ask_share(question: str, default: float, most: float) -> float:
    while True:
        answer: float = typer.prompt(question, default=default, type=float, err=True)
        if 0 <= answer <= most:
            return answer
        tell(f"a number from 0 to {most:g} is needed, like {default:g}")


def _check_names(bounds: "Sequence[Bound]", names: Sequence[str]) -> None:
    for name in names:
        known = [bound for bound in bounds if name in (bound.label, bound.label.split()[0])]
        if not known:
            metrics = ", ".join(dict.fromkeys(bound.label.split()[0] for bound in bounds))
            raise CallerError(f"the run has no bound on '{name}'", f"name one of: {metrics}", "--metric")


def _list_lines(report: "Report", bounds: "Sequence[Bound]", chosen: "Sequence[Bound]", hurts: "Hurts") -> Iterator[str]:
    from vllm_qualify.report import words

    yield f"run {report.run_id} of {report.plan.cell.id}: {report.outcome}"
    if not report.passed:
        yield "It did not pass: be sure that the release is good before its figures become bounds."
    for bound in bounds:
        mark = "+" if bound in chosen else "=" if bound.own else " "
        yield ""
        yield f"{mark} {bound.label}"
        if bound.value is not None:
            measured = f"{words.value(bound.value, bound.unit)}, interval {words.interval(bound.interval, bound.unit)}"
            yield f"    measured   {measured}, visible {words.change(bound.visible, bound.unit)}"
        if bound.own is not None:
            yield f"    own gate   {words.words_of_bound(bound.own)}"
        if bound.gate is not None:
            yield f"    suggested  {words.words_of_bound(bound.gate)}"
        yield f"    why        {bound.reason}"
        if bound.price is not None:
            yield f"    price      {_price_words(bound)}"
    yield ""
    yield "+ is written by --write, = is kept as it is; --metric NAME chooses others"
    for option, what, given in ((LOSS, "max_loss", hurts.loss), (WORSENING, "max_worsening", hurts.worsening)):
        if given is None:
            yield f"for gates with {what} say what hurts: {option}"


def _price_words(bound: "Bound") -> str:
    from vllm_qualify.report import words

    price = bound.price
    if price is None:
        return ""
    what = f"{price.answers:,} answers" if price.answers is not None else f"{price.repeats:,} repeats"
    return f"{what} of each build, {words.duration(price.minutes * 60)} for each at this run's pace"


def _as_json(report: "Report", bounds: "Sequence[Bound]", chosen: "Sequence[Bound]") -> str:
    rows = [bound.model_dump(mode="json") | {"is_chosen": bound in chosen} for bound in bounds]
    return json_text.dumps({"run": report.run_id, "cell": report.plan.cell.id, "bounds": rows}, indent=2)


def _write_gates(report: "Report", recipe: str, chosen: "Sequence[Bound]") -> None:
    from vllm_qualify.recipe.editing import NewGate, add_gates, find_file, write_edit

    gates = [NewGate(bound.gate, _comment_of(report, bound)) for bound in chosen if bound.gate is not None]
    if not gates:
        tell("nothing to write: each suggested gate is in the recipe already, or was not chosen")
        return
    edit = add_gates(find_file(recipe), report.plan.cell.gpu_type, report.plan.cell.profile, gates)
    write_edit(edit)
    tell(edit.diff)
    if any(new.gate.is_compared for new in gates):
        # The run may have asked too little for them: how often a baseline is measured follows from its gates.
        tell(f"wrote {edit.path}; make a baseline for it: vllm-qualify run {recipe} --establish-baseline")
    else:
        tell(f"wrote {edit.path}; judge the run by it: vllm-qualify rejudge {report.run_id} --recipe {recipe}")


def _comment_of(report: "Report", bound: "Bound") -> str:
    from vllm_qualify.report import words

    if bound.value is None:
        return f"price: {_price_words(bound)}, run {report.run_id}" if bound.price else f"by run {report.run_id}"
    return f"run {report.run_id}: {words.value(bound.value, bound.unit)}, {words.interval(bound.interval, bound.unit)}"
