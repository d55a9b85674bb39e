"""The reference: every key of a recipe, every metric, every gate and every key of a report, written from the models themselves.

    python -m infra.reference_docs [--check]

writes docs/reference. With --check it writes nothing, but names each page that is out of date, and ends with 1 if there is one.
A key is described where it is declared. A key without a description is an error.
"""

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime
from functools import cache, reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import AfterValidator, BaseModel, JsonValue
from pydantic.fields import FieldInfo
from typer.main import get_command

from vllm_qualify.cli import app
from vllm_qualify.cli.examples import list_lines
from vllm_qualify.engine.failure.meanings import IN_AN_IMAGE, MEANINGS
from vllm_qualify.evidence.sequential import FALSE_FAIL_AT_MARGIN, FALSE_FAIL_OF_RELEASE, FALSE_PASS
from vllm_qualify.judge.verdict import WORST_FIRST, Checks
from vllm_qualify.recipe import serving, values
from vllm_qualify.recipe.contract import CHECKS
from vllm_qualify.recipe.gates import KINDS, BaseGate, Verdict, Waiver, refused_in_recipes
from vllm_qualify.recipe.metrics import (
    CONSTRAINED,
    CONTRACT_METRICS,
    METRICS,
    NCCL_INFINIBAND,
    PATH_METRICS,
    PROMPTS_PER_REQUEST,
    REORDERED,
    SMOKE_METRICS,
    STAGES,
    Metric,
    least_prompts,
    least_requests,
    path_metric,
)
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.recipe.roles import Role
from vllm_qualify.report.model import REPORT_VERSION, Report

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
RECIPE_HEADS = ("key", "type", "unit", "default", "meaning")
MADE = "<!-- Written by `python -m infra.reference_docs` from the code. Do not edit it. -->"
DASH = "—"
# The unit that a key's name ends with.
UNITS = {
    "_s": "s",
    "_ms": "ms",
    "_mib": "MiB",
    "_gib": "GiB",
    "_days": "days",
    "_tok_s": "tok/s",
    "_req_s": "req/s",
    "_tok": "tok",
    "_len": "tok",
    "_tokens": "tok",
    "_toks": "tok",
    "_usd_gpu_hour": "USD",
}
# The placeholder for a name that the recipe's author chooses.
CHOSEN = {"variants": "<name>", "gpu_types": "<type>", "profiles": "<profile>"}
NAMED: list[tuple[Any, str]] = [
    (values.Name, "name"),
    (values.TaskName, "task name"),
    (values.Text, "text"),
    (serving.VersionRange, "range of versions"),
    (serving.ServerArguments, "server arguments"),
    (serving.RecipeEnvironment, "environment"),
    (JsonValue, "anything"),
]
PLAIN: dict[Any, str] = {
    bool: "`true` or `false`",
    int: "whole number",
    float: "number",
    str: "text",
    date: "day",
    datetime: "time",
    Path: "path",
    object: "anything",
}
PLURALS = {
    "name": "names",
    "text": "texts",
    "path": "paths",
    "number": "numbers",
    "whole number": "whole numbers",
    "list of": "lists of",
    "mapping of": "mappings of",
}
# Validators that check a bound, by their names.
ORDERED = {"_ascending": "ascending"}
VERDICTS: dict[Verdict, str] = {
    "fail": "the whole interval misses the bound: noise cannot turn it round",
    "invalid": "there is no trustworthy evidence. It says nothing about the release",
    "inconclusive": "the bound lies within the interval, or the noise is not known: more samples could decide",
    "pass": "the whole interval meets the bound. Only this lets a cell pass",
}
REPORT_KEYS = {
    "report_version": "of the form of this document",
    "made_by": "the program and its version",
    "created_at": "when the evidence was judged, in UTC",
    "run_id": "the run's id, which sorts by time",
    "rejudged_from": "the run whose evidence was judged again; null in a run's own report",
    "judged_on": "the machine that judged, by its name",
    "plan": "all that determined the run: cell, release, machine, server, settings and gates",
    "stages": "what each stage left: its files with their hashes, its commands and its measurements",
    "judgement": "the verdict of the cell and of each gate, with all that they were judged by",
    "details": "what the page shows beside the measurements",
}
# Gates that every cell has, or that another key of the recipe asks for. No recipe names them.
BY_THEMSELVES = (*SMOKE_METRICS, *CONTRACT_METRICS, NCCL_INFINIBAND, *PATH_METRICS)
ASKED_FOR = {
    "smoke_golden": "the variant has a `smoke_golden`",
    NCCL_INFINIBAND: "the GPU type has `network: infiniband`",
    **dict.fromkeys(PATH_METRICS, "the profile has `paths`, and `leave_out` does not name it"),
    path_metric(
        REORDERED
    ): "also, the model promises `json_schema`, the GPU type has `warm_starts`, and no option names a `backend`",
    path_metric(CONSTRAINED): "the profile has `paths`, and `capabilities` has `json_schema` or `tools`",
    **{
        check.name: f"`capabilities` has `{check.capability}`"
        if check.capability
        else "`contract` is not false; with TensorRT-LLM, `contract` is true or `capabilities` has any"
        for check in CHECKS
    },
}

TYPES = {
    "name": "lower-case letters, digits, `.`, `_` and `-`; begins with a letter or a digit; at most 100 characters",
    "task name": "letters, digits, `.`, `_` and `-`; begins with a letter or a digit; at most 100 characters",
    "text": "a string that is not empty; a path starts at the folder of the recipe, `~` is the home folder",
    "number": "a finite number",
    "range of versions": "as for Python packages, like `<0.13` or `>=0.12,<0.14`",
    "server arguments": "a mapping of options, see [Server arguments](../recipes.md#server-arguments)",
    "environment": "a mapping of variable names to strings, see [Environment](../recipes.md#environment)",
}
OF_RECIPES = """\
What keys are for, by example and with reasons, is in [recipes.md](../recipes.md). [Gates and waivers](gates.md) and
[metrics](metrics.md) have pages of their own. A key that is not here is an error. To find one, search for its name, or look
into the [list of all](#every-key)."""
OF_METRICS = """\
The unit is that of value, interval and bound. `fraction` is a share between 0 and 1, `bool` is 1 for yes and 0 for no. *Gate*
is how a recipe may bound the metric, *baseline* how it may hold it against a baseline, where the unit is `fraction`: see
[gates](gates.md). What makes a measurement invalid is in [recipes.md](../recipes.md#what-makes-a-measurement-invalid)."""
OF_PERCENTILES = f"""\
A gate on a percentile needs so many requests, all in time, to show it at all. A load needs {PROMPTS_PER_REQUEST} times as many
prompts: its warm-up and its tail are cut."""
OF_GATES = """\
A gate is a rule over one [metric](metrics.md). How a person reads a verdict is in the [guide](../release-managers.md), how
gates are judged in [recipes.md](../recipes.md#how-a-gate-is-judged)."""
OF_CHANCES = f"""\
If a release misses a gate's bound, the gate passes with a chance of at most {FALSE_PASS:.0%}. A release that lost
nothing and meets the bounds of all its gates is failed with a chance of at most {FALSE_FAIL_OF_RELEASE:.0%}, which its gates
with noise share. A gate against another run fails with at most {FALSE_FAIL_AT_MARGIN:.0%} if as much was lost as it allows."""
OF_REPORTS = f"""\
`vllm-qualify report show RUN --json`, or the `report.json` of a run; this is version {REPORT_VERSION}. A key's name ends with
its unit. Missing data is null and never 0, and the reason stands beside it. How a person reads a report is in the
[guide](../release-managers.md)."""

Model = type[BaseModel]


class Key(NamedTuple):
    """One key of a document's model."""

    name: str
    hint: Any
    field: FieldInfo
    meaning: str | None
    """what it means, where its model says so"""


class Address(NamedTuple):
    """Where a model is described, and its title there: its places in a recipe, or its name in a report."""

    page: str
    anchor: str
    places: tuple[str, ...]

    @property
    def link(self) -> str:
        label = re.search(r"[^.]+(\.<\w+>)*$", self.places[0])
        return f"[`{label.group() if label else self.places[0]}`]({self.page}.md#{self.section})"

    @property
    def section(self) -> str:
        return f"keys-of-{self.anchor or 'recipe'}"

    def row(self, key: str) -> str:
        return f"{self.anchor}.{key}" if self.anchor else key


# Models and their keys


@cache
def keys(model: Model) -> tuple[Key, ...]:
    hints = {name: _without_role(hint) for name, hint in get_type_hints(model, include_extras=True).items()}
    classes = [each for each in reversed(model.__mro__) if issubclass(each, BaseModel) and each is not BaseModel]
    docstrings = {name: below for each in classes for name, below in attribute_docstrings(each).items()}
    return tuple(
        Key(name, hints[name], field, field.description or docstrings.get(name)) for name, field in model.model_fields.items()
    )


def _without_role(hint: Any) -> Any:
    """The type of a setting as it would be without its role, which readers of a recipe need not know."""
    if get_origin(hint) is not Annotated:
        return hint
    base, *others = get_args(hint)
    kept = [each for each in others if not isinstance(each, Role)]
    # mypy knows no Annotated that is made while the program runs.
    return Annotated[(base, *kept)] if kept else base  # type: ignore[return-value]


def attribute_docstrings(model: Model) -> dict[str, str]:
    """The strings below a class's own fields, by field."""
    (defined,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(defined, ast.ClassDef)
    docstrings = {}
    for field, below in pairwise(defined.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                docstrings[name] = docstring
    return docstrings


def docstring(model: Model) -> str:
    return inspect.cleandoc(model.__doc__ or "")


def models_in(hint: Any) -> Iterator[tuple[str, Model]]:
    """The models inside a type, each with the kinds of the collections around it."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield "", hint
    origin = get_origin(hint)
    kind = {dict: "d", list: "l"}.get(origin, "") if origin else ""
    for argument in get_args(hint):
        for kinds, model in models_in(argument):
            yield kind + kinds, model


def places_of(model: Model, place: str = "") -> Iterator[tuple[str, Model]]:
    """Each place of a document with its model, from the outside in."""
    yield place, model
    for key in keys(model):
        for kinds, inner in models_in(key.hint):
            steps = [CHOSEN.get(key.name, "<key>") if kind == "d" else "<n>" for kind in kinds]
            yield from places_of(inner, ".".join([*([place] if place else []), key.name, *steps]))


def reachable(model: Model, models: dict[Model, None] | None = None) -> dict[Model, None]:
    """The model and those inside it, in the order of their keys."""
    models = {} if models is None else models
    if model not in models:
        models[model] = None
        for key in keys(model):
            for _, inner in models_in(key.hint):
                reachable(inner, models)
    return models


@cache
def addresses() -> dict[Model, Address]:
    """Where each model is described. A model at several places of a recipe is described once, by the shortest of them."""
    places: dict[Model, list[str]] = {}
    for place, model in places_of(Recipe):
        places.setdefault(model, []).append(place)
    pages = {}
    for model, all_places in places.items():
        ordered = tuple(sorted(all_places, key=lambda place: place.count(".")))
        page = "gates" if model in (*KINDS, Waiver) else "recipe"
        pages[model] = Address(page, re.sub("[<>]", "", ordered[0]), ordered)
    for model in reachable(Report):
        pages.setdefault(model, Address("report", model.__name__, (model.__name__,)))
    return pages


# Types in words


def words(hint: Any, constraints: Iterable[Any] = ()) -> str:
    """A type in plain words, with its bounds."""
    for known, word in NAMED:
        if hint == known:
            return word
    if get_origin(hint) is Annotated:
        base, *others = get_args(hint)
        return words(base, [*constraints, *others])
    return ", ".join([_plain(hint), *bounds(constraints)])


def _plain(hint: Any) -> str:
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return addresses()[hint].link
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(code, arguments))
    if origin in (Union, UnionType):
        # Kinds of one thing have the same words, so each is named once.
        return " or ".join(dict.fromkeys("null" if part is NoneType else words(part) for part in arguments))
    many = [plural(words(argument)) for argument in arguments]
    if origin is list:
        return f"list of {many[0]}"
    if origin is dict:
        return f"mapping of {many[0]} to {many[1]}"
    if origin is tuple and len(set(many)) == 1:
        return f"{len(many)} {many[0]}"
    raise SystemExit(f"error: no words for the type {hint}: add it to PLAIN or NAMED in {__file__}")


def plural(meaning: str) -> str:
    """The plural, such as `whole numbers, 1 or more`. A link or a choice of values is not changed."""
    for one, many in PLURALS.items():
        if meaning == one or meaning.startswith((f"{one},", f"{one} ")):
            return many + meaning.removeprefix(one)
    return meaning


def bounds(constraints: Iterable[Any]) -> list[str]:
    """`1 or more`, `above 0`, `ascending`, each once."""
    known: list[Any] = []
    for constraint in constraints:
        known += constraint.metadata if isinstance(constraint, FieldInfo) else [constraint]
    return list(dict.fromkeys(text for each in known if (text := _bound(each))))


def _bound(constraint: Any) -> str | None:
    match constraint:
        case Ge(ge=least):
            return f"{least} or more"
        case Gt(gt=least):
            return f"above {least}"
        case Le(le=most):
            return f"at most {most}"
        case Lt(lt=most):
            return f"under {most}"
        case MinLen(min_length=least):
            return f"at least {least}"
        case MaxLen(max_length=most):
            return f"at most {most}"
        case AfterValidator(func=check):
            return ORDERED.get(check.__name__)
    return None


def unit(name: str) -> str:
    """The unit of a key, by the longest ending that its name has."""
    endings = [ending for ending in UNITS if name.endswith(ending)]
    return UNITS[max(endings, key=len)] if endings else DASH


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default()
    if value is None:
        return "none"
    if value in ({}, [], ""):
        return "empty"
    if isinstance(value, BaseModel):
        return "its own defaults"
    return code(value)


def code(value: Any) -> str:
    """A value as a recipe writes it."""
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def without_null(hint: Any) -> Any:
    """The type without null: an optional key of a recipe is left out, and never null."""
    parts = [part for part in get_args(hint) if part is not NoneType] if get_origin(hint) in (Union, UnionType) else [hint]
    return reduce(or_, parts)


# Markdown


def link_target(anchor: str) -> str:
    return f'<a id="{anchor}"></a>'


def heading(anchor: str, text: str) -> str:
    return f"{link_target(anchor)}\n\n## {text}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown. A bar or a line end inside a cell is escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def page(*parts: str) -> str:
    return "\n\n".join([MADE, *parts]) + "\n"


def section(model: Model) -> Iterator[str]:
    """A model's keys in a recipe."""
    address = addresses()[model]
    yield heading(address.section, _places(address) if address.anchor else "Top level")
    yield docstring(model)
    yield table(RECIPE_HEADS, (_recipe_row(key, address) for key in keys(model)))


def _places(address: Address) -> str:
    return " and ".join(map(code, address.places))


def _recipe_row(key: Key, address: Address) -> list[str]:
    if key.meaning is None:
        raise SystemExit(f"error: {address.row(key.name)} has no description: give its Field one")
    kind = words(without_null(key.hint), key.field.metadata)
    return [f"{link_target(address.row(key.name))}`{key.name}`", kind, unit(key.name), default(key.field), key.meaning]


# Pages


def recipe_page() -> str:
    here = [model for model, address in addresses().items() if address.page == "recipe"]
    return page(
        "# The keys of a recipe",
        OF_RECIPES,
        table(["type", "allowed"], TYPES.items()),
        *(part for model in here for part in section(model)),
        heading("every-key", "Every key"),
        table(["key", "where"], _all_keys()),
    )


def _all_keys() -> Iterator[list[str]]:
    """Each key's name with all places that have it, in alphabetical order."""
    places: dict[str, set[str]] = {}
    for model, address in addresses().items():
        for key in keys(model) if address.page != "report" else []:
            for place in address.places:
                path = f"{place}.{key.name}" if place else key.name
                places.setdefault(key.name, set()).add(f"[`{path}`]({address.page}.md#{address.row(key.name)})")
    return ([f"`{name}`", "<br>".join(sorted(places[name]))] for name in sorted(places))


def metrics_page() -> str:
    return page(
        "# Metrics",
        OF_METRICS,
        *(part for stage in STAGES for part in _stage(stage)),
        heading("percentiles", "Percentiles"),
        OF_PERCENTILES,
        table(["percentile", "requests", "prompts"], _percentiles()),
        heading("every-metric", "Every metric"),
        ", ".join(f"[`{name}`](#{name})" for name in sorted(METRICS)),
    )


def _stage(stage: str) -> Iterator[str]:
    metrics = [metric for metric in METRICS.values() if metric.stage == stage]
    if not metrics:
        return
    yield heading(f"stage-{stage}", stage)
    yield table(["metric", "unit", "better", "gate", "baseline", "meaning"], map(_metric_row, metrics))
    if reasons := list(_reasons(metrics)):
        yield "\n".join(reasons)


def _reasons(metrics: Iterable[Metric]) -> Iterator[str]:
    """Why no recipe has a gate on these metrics. Metrics with the same reason share a line."""
    groups: dict[str, list[str]] = {}
    for metric in metrics:
        if reason := refused_in_recipes(metric):
            groups.setdefault(reason.removeprefix(f"{metric.name} "), []).append(f"`{metric.name}`")
    for reason, names in groups.items():
        yield f"- No gate of a recipe's on {', '.join(names)}: {reason}."


def _metric_row(metric: Metric) -> list[str]:
    kinds = kinds_of(metric)
    gate = ", ".join(form(kind) for kind in kinds if kind.compares is None)
    baseline = ", ".join(form(kind) for kind in kinds if kind.compares)
    name = f"{link_target(metric.name)}`{metric.name}`"
    return [name, metric.unit, metric.direction, gate or DASH, baseline or DASH, metric.meaning]


def kinds_of(metric: Metric) -> list[type[BaseGate]]:
    """The kinds of gates that a recipe may have on a metric."""
    return [] if refused_in_recipes(metric) else [kind for kind in KINDS if kind.fits(metric)]


def form(kind: type[BaseGate]) -> str:
    """The keys that a gate of this kind is given."""
    return " and ".join(map(code, kind.own_keys()))


def _percentiles() -> Iterator[list[str]]:
    first = {metric.quantile: metric.name for metric in reversed(METRICS.values()) if metric.quantile}
    for quantile, name in sorted(first.items()):
        yield [f"p{100 * quantile:.0f}", str(least_requests(name)), str(least_prompts(name))]


def gates_page() -> str:
    return page(
        "# Gates, waivers and verdicts",
        OF_GATES,
        heading("verdicts", "Verdicts"),
        "The worst first: of a cell's gates the worst decides.",
        table(["verdict", "meaning"], ([f"{link_target(f'verdict-{name}')}`{name}`", VERDICTS[name]] for name in WORST_FIRST)),
        OF_CHANCES,
        heading("checks", "What is checked of a gate"),
        table(
            ["check", "holds if"],
            ([f"{link_target(f'check-{key.name}')}`{key.name}`", key.meaning or ""] for key in keys(Checks)),
        ),
        heading("forms", "Kinds of gates"),
        "A metric can have gates of these kinds. The keys of a gate tell which kind it is.",
        table(["metrics", "kinds, by their keys"], _forms()),
        heading("by-themselves", "Gates that are there by themselves"),
        table(["gate", "passes if", "where"], map(_by_itself, BY_THEMSELVES)),
        *_gate_section(),
        *section(Waiver),
    )


def _gate_section() -> Iterator[str]:
    """The keys of gates: those that all have, then those of each kind."""
    address = addresses()[KINDS[0]]
    yield heading(address.section, _places(address))
    yield docstring(BaseGate)
    common = [key for key in keys(KINDS[0]) if key.name in BaseGate.model_fields]
    own = [key for kind in KINDS for key in keys(kind) if key.name in kind.own_keys()]
    yield table(RECIPE_HEADS, (_recipe_row(key, address) for key in common))
    yield "A gate has the keys of just one of these kinds:"
    yield "\n".join(f"- {form(kind)}. {' '.join(docstring(kind).split())}" for kind in KINDS)
    rows = (_recipe_row(key, address) for key in own)
    yield table(["key", "type", "meaning"], ([key, kind, meaning] for key, kind, _, _, meaning in rows))


def _by_itself(name: str) -> list[str]:
    return [f"[`{name}`](metrics.md#{name})", METRICS[name].meaning, ASKED_FOR.get(name, "every cell")]


def _forms() -> Iterator[list[str]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for metric in METRICS.values():
        forms = tuple(map(form, kinds_of(metric)))
        groups.setdefault(forms, []).append(f"[`{metric.name}`](metrics.md#{metric.name})")
    for forms, metrics in groups.items():
        if forms:
            yield [", ".join(metrics), ", or ".join(forms)]


def report_page() -> str:
    others = [model for model, address in addresses().items() if address.page == "report" and model is not Report]
    return page(
        "# The report's JSON",
        OF_REPORTS,
        heading(addresses()[Report].section, "Top level"),
        table(["key", "type", "default", "meaning"], map(_report_row, keys(Report))),
        *(part for model in others for part in _inner_section(model)),
    )


def _report_row(key: Key) -> list[str]:
    meaning = key.meaning or REPORT_KEYS.get(key.name)
    if meaning is None:
        raise SystemExit(f"error: {key.name} of the report has no description: give its Field one")
    return [*_typed(key, addresses()[Report]), meaning]


def _inner_section(model: Model) -> Iterator[str]:
    """A model inside the report, introduced by its docstring."""
    address = addresses()[model]
    yield heading(address.section, model.__name__)
    if docstring(model):
        yield docstring(model)
    rows = [[*_typed(key, address), " ".join((key.meaning or "").split())] for key in keys(model)]
    heads = ["key", "type", "default", "meaning"]
    has_meanings = any(row[-1] for row in rows)
    yield table(heads, rows) if has_meanings else table(heads[:-1], (row[:-1] for row in rows))


def _typed(key: Key, address: Address) -> list[str]:
    return [f"{link_target(address.row(key.name))}`{key.name}`", words(key.hint, key.field.metadata), default(key.field)]


EXIT_CODES = """| exit code | meaning |
|---|---|
| 0 | passed, or done |
| 1 | not passed: a gate failed, is inconclusive or invalid. If several cells were qualified, at least one did not pass |
| 2 | the caller's mistake: the command line, or a recipe that is not valid. Nothing was started |
| 3 | the world's fault: this machine, the store, a release that does not start, or a vLLM that does not take the recipe |
| 130, 143 | ended by Ctrl-C or `kill`; the server was stopped first |"""
TURNS = {
    "recipe": "the recipe's author",
    "host": "the operator",
    "hub": "the hub's side",
    "release": "the release's owner",
    "unclear": "unclear",
}


def commands_page() -> str:
    """All commands with their options, by the command line's own declarations."""
    return page(
        "# Commands",
        "The command is `.venv/bin/vllm-qualify`. `--help` tells the same. An error says who must act, what is wrong, where,"
        " and the remedy. `verify` and `approved get` have exit codes of their own: [approvals.md](../approvals.md).",
        EXIT_CODES,
        *(part for words, command in _commands(get_command(app), []) for part in _command_section(words, command)),
    )


def _commands(command: Any, path: list[str]) -> Iterator[tuple[list[str], Any]]:
    """The commands, each with its name's words."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, each in command.commands.items():
        yield from _commands(each, [*path, name])


def _command_section(path: list[str], command: Any) -> Iterator[str]:
    """A command's own words, and its options as a table."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    named = " ".join(["vllm-qualify", *path, *((each.metavar or each.name.upper()) for each in arguments)])
    yield f"## {' '.join(path)}"
    yield f"`{named}`: {' '.join((command.help or '').split())}"
    yield "\n".join(["```sh", *list_lines(" ".join(path)), "```"])
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    if options:
        yield table(["option", "meaning"], ([_option(each), " ".join((each.help or "").split())] for each in options))


def _option(option: Any) -> str:
    return ", ".join(f"`{each}`" for each in (*option.opts, *option.secondary_opts))


def failures_page() -> str:
    """The classes of failures, with who must act."""
    rows = (
        [f"`{kind}`", TURNS[meaning.turn], "yes" if meaning.retry else "no", meaning.remedy]
        for kind, meaning in MEANINGS.items()
    )
    return page(
        "# Failures",
        "A server that does not start, or ends, ends the run with a class, by the lines of its log that tell it. A run's"
        " `failure.html` has these lines, and the remedy for this very case.",
        table(["class", "who must act", "may it work if tried again?", "remedy"], rows),
        "## Where the server runs from an image",
        "What an image holds nobody on the host can mend, so these classes mean something else there.",
        table(
            ["class", "who must act", "remedy"],
            ([f"`{kind}`", TURNS[meaning.turn], meaning.remedy] for kind, meaning in IN_AN_IMAGE.items()),
        ),
    )


PAGES: dict[str, Callable[[], str]] = {
    "recipe": recipe_page,
    "metrics": metrics_page,
    "gates": gates_page,
    "report": report_page,
    "commands": commands_page,
    "failures": failures_page,
}


def stale(folder: Path = FOLDER) -> list[Path]:
    """The pages of a folder that are out of date, and those that are no longer generated."""
    made = {folder / f"{name}.md": make for name, make in PAGES.items()}
    old = [path for path, make in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != make()]
    return [*old, *sorted(path for path in folder.glob("*.md") if path not in made)]


def main(arguments: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; tell which pages are stale")
    if parser.parse_args(arguments).check:
        outdated = stale(folder)
        for path in outdated:
            print(f"{path.name} is not what the models make: run `python -m infra.reference_docs`", file=sys.stderr)
        return 1 if outdated else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (folder / f"{name}.md").write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
