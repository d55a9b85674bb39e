"""The import: turns gathered commands into a recipe. The caller gives its gate."""

import math
import re
from pathlib import Path
from typing import Any

from packaging.version import Version
from pydantic import JsonValue, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.importing.combination import by_note, gathered_yaml
from vllm_qualify.recipe.importing.commands import Gathered, Translated
from vllm_qualify.recipe.importing.documents import InexpressibleError, short
from vllm_qualify.recipe.importing.published import gathered_json
from vllm_qualify.recipe.importing.rendering import Imported, rendered
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.recipe.serving import ServerArguments
from vllm_qualify.recipe.workload import LEAST_PROMPTS_PER_CLIENT

PROFILE = "balanced"
FILTERS = ("strict-match", "flexible-extract")
"""The filters of lm-eval's gsm8k."""

_LENGTH, _LENGTH_MARGIN = 1024, 64
_CONCURRENCY, _WARMUPS = 64, 20
_STARTUP_TIMEOUT_S = 3600
_IMAGE = re.compile(
    r"(?:docker\.io/)?vllm/vllm-openai(?:-[a-z0-9]+)?:v(\d+\.\d+(?:\.\d+)?)(?:-[\w.-]+)?(?:@sha256:[0-9a-f]{64})?"
)


def import_recipe(
    source: Path,
    *,
    exact_match_minimum: float | None,
    exact_match_filter: str | None,
    variant: str | None = None,
    published: Path | None = None,
) -> Imported:
    """A recipe whose server has exactly the arguments and environment of `source`.

    Args:
        source: a published JSON file; a folder `<org>/<repo>` or `<org>/<repo>/hw` with such files, whose GPU types become
            those of one recipe; or a YAML file models/<org>/<model>.yaml in its repository.
        exact_match_minimum: the bound of the gate on gsm8k, above 0 and at most 1. Recipes of vllm-project/recipes have no
            scores, and an invented bound could approve a release that must not pass.
        exact_match_filter: `strict-match` or `flexible-extract`, whichever fits the model.
        variant: one of the YAML's variants; `default` if not given. JSON already has only one variant.
        published: for a YAML file, the folder that holds `<org>/<repo>/hw`; if not given, `api` or `public` of its repository.

    Raises:
        CallerError: no such source, not readable, a key missing or of a wrong type, no bound or no filter.
        InexpressibleError: no recipe can express it for any GPU type. If only some GPU types cannot be expressed, notes name
            them.
    """
    gate = _gate(exact_match_minimum, exact_match_filter)
    try:
        imported = _as_recipe(_gathered(source, variant, published), gate, source)
        _check_round_trip(imported, source)
    except RecursionError as error:
        raise CallerError("nested too deeply, or in itself", "mend the file", place=str(source)) from error
    except UnicodeError as error:
        problem = "a recipe cannot express text that UTF-8 does not have"
        raise InexpressibleError(problem, "mend the source", place=str(source)) from error
    except OSError as error:
        raise CallerError(
            f"cannot be read: {error.strerror}", "check the path and its permissions", place=str(source)
        ) from error
    return imported


def _gathered(source: Path, variant: str | None, published: Path | None) -> Gathered:
    if published is not None and not published.is_dir():
        raise CallerError(f"there is no folder {published}", "name the folder that holds <org>/<repo>/hw", "--published")
    if source.suffix in (".yaml", ".yml") and not source.is_dir():
        return gathered_yaml(source, variant or "default", published)
    for option, given in (("--variant", variant), ("--published", published)):
        if given is not None:
            raise CallerError(
                f"JSON is of one variant already, and published: it has no use for {option}", "leave it out", option
            )
    return gathered_json(source)


def _gate(minimum: float | None, filter_: str | None) -> dict[str, Any]:
    """The gate on accuracy. A bound of 0 is refused, because every score would pass it."""
    if minimum is None or not 0 < minimum <= 1:
        reason = "which the source does not have" if minimum is None else f"above 0 and at most 1, not {minimum}"
        raise CallerError(
            f"the recipe needs the least share of gsm8k's questions to be answered exactly, {reason}",
            "measure a release that you trust, or take a published score less a margin",
            place="--exact-match-minimum",
        )
    if filter_ not in FILTERS:
        raise CallerError(
            f"gsm8k has no filter {short(filter_)}" if filter_ else "the gate needs lm-eval's filter, and the source has none",
            f"one of {', '.join(FILTERS)}: the one that fits how the model answers",
            place="--exact-match-filter",
        )
    return {"metric": "exact_match", "filter": filter_, "minimum": float(minimum), "unit": "fraction"}


def _as_recipe(gathered: Gathered, gate: dict[str, Any], source: Path) -> Imported:
    served = gathered.commands
    name = _name(served[0].model, source)
    names = _variant_names(served, source)
    served_names = list(dict.fromkeys(each for one in served for each in one.served_names)) or [name]
    notes = [(one.command.gpu_type, note) for one in served for note in [*one.notes, _other_names(one, served_names)]]
    promised = _capabilities(served)
    document = {
        "name": name,
        "description": f"{served[0].model} as vllm-project/recipes serves it.",
        "served_model_name": served_names[0],
        **({"aliases": served_names[1:]} if served_names[1:] else {}),
        **({"capabilities": promised} if promised else {}),
        "variants": {name: _variant(of, gathered.oldest_vllm) for name, of in _by_name(names, served).items()},
        "gpu_types": {one.command.gpu_type: _serving(one, variant) for one, variant in zip(served, names, strict=True)},
        "smoke": {"prompt": "San Francisco is a", "max_tokens": 20},
        "accuracy": [{"task": "gsm8k", "num_fewshot": 5, "num_questions": 1319}],
        "gates": [gate],
    }
    return Imported(
        recipe=_validated(document, source),
        source=gathered.label,
        images={one.command.gpu_type: one.command.image for one in served if one.command.image},
        notes=[*gathered.notes, *by_note(notes)],
    )


def _other_names(one: Translated, names: list[str]) -> str:
    """A note if the command is published with other names than the recipe, which has all names for every GPU type."""
    if not one.served_names or one.served_names == names:
        return ""
    return f"published as {', '.join(one.served_names)}, and served under all of {', '.join(names)}, as every GPU type is"


def _validated(document: dict[str, Any], source: Path) -> Recipe:
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "[key]")
        problem = f"a recipe cannot have this at {key}: {first['msg'].removeprefix('Value error, ')}"
        raise InexpressibleError(problem, "see docs/recipes.md for what a recipe can have", place=str(source)) from error


def _name(text: str, source: Path) -> str:
    """A valid name, made from the last part of a model's name."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", text.rstrip("/").rpartition("/")[2].lower())
    name = re.sub(r"^[^a-z0-9]+", "", plain)[:100]
    if not name:
        raise InexpressibleError(f"{short(text)} has nothing that a name can be made of", "rename it", place=str(source))
    return name


def _variant_names(served: list[Translated], source: Path) -> list[str]:
    """The source's names of the variants. If one name stands for several models, the names of the models."""
    weights = [(one.model, one.revision) for one in served]
    by_source = [_name(one.command.variant, source) for one in served]
    if len(set(zip(by_source, weights, strict=True))) == len(set(by_source)):
        return by_source
    names = [_name(f"{one.model}-{one.revision}" if one.revision else one.model, source) for one in served]
    if len(set(names)) < len(set(weights)):
        raise InexpressibleError("several models have the same name", "import their files one by one", place=str(source))
    return names


def _capabilities(served: list[Translated]) -> list[str]:
    """What the published parsers are for, if every command has them."""
    every = [one.arguments for one in served]
    tools = all("tool-call-parser" in each and each.get("enable-auto-tool-choice") is True for each in every)
    reasoning = all("reasoning-parser" in each for each in every)
    named = {"chat": tools or reasoning, "tools": tools, "reasoning": reasoning}
    return [name for name, promised in named.items() if promised]


def _by_name(names: list[str], served: list[Translated]) -> dict[str, list[Translated]]:
    """The commands of each variant."""
    return {name: [one for one, own in zip(served, names, strict=True) if own == name] for name in names}


def _variant(commands: list[Translated], oldest_vllm: str | None) -> dict[str, Any]:
    """The variant's model, and the oldest vLLM for it: the source's own word, else the newest version among its images."""
    model, revision = commands[0].model, commands[0].revision
    of_images = [version for one in commands if (version := _version_of(one.command.image))]
    oldest = oldest_vllm or max(of_images, key=Version, default=None)
    of_model = {"model": model} | ({"revision": revision} if revision else {})
    return of_model | ({"vllm": f">={oldest}"} if oldest else {})


def _version_of(image: str | None) -> str | None:
    """The version in the tag of vLLM's image, as in vllm/vllm-openai:v0.25.0-cu129; None for `latest` and other tags."""
    match = _IMAGE.fullmatch(image or "")
    return match[1] if match else None


def _serving(one: Translated, variant: str) -> dict[str, Any]:
    return {
        "default_variant": variant,
        "server": one.arguments,
        **({"environment": one.command.environment} if one.command.environment else {}),
        "startup_timeout_s": _STARTUP_TIMEOUT_S,
        "profiles": {PROFILE: {"load": _load(one.arguments)}},
    }


def _load(arguments: ServerArguments) -> dict[str, int]:
    concurrency = _whole(arguments.get("max-num-seqs")) or _CONCURRENCY
    longest = _whole(arguments.get("max-model-len")) or math.inf
    length = int(max(1, min(_LENGTH, (longest - _LENGTH_MARGIN) // 2)))
    prompts = LEAST_PROMPTS_PER_CLIENT * concurrency
    return {
        "input_len": length,
        "output_len": length,
        "max_concurrency": concurrency,
        "num_prompts": prompts,
        "num_warmups": min(_WARMUPS, prompts),
    }


def _whole(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _check_round_trip(imported: Imported, source: Path) -> None:
    """Raises InexpressibleError if the written YAML would not give the same recipe again."""
    try:
        again = Recipe.model_validate(YAML(typ="safe", pure=True).load(rendered(imported)))
    except (YAMLError, ValueError) as error:
        raise InexpressibleError("its text cannot be written as YAML", "mend the source", place=str(source)) from error
    if again != imported.recipe:
        raise InexpressibleError("its text does not survive being written as YAML", "mend the source", place=str(source))
