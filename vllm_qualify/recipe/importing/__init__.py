"""Import from vllm-project/recipes: turns its published commands for a model and GPU types into a recipe of ours.

There are two sources. The published JSON (`<org>/<repo>/hw/<gpu>.json`) has whole commands, which are translated word by word.
The YAML (`models/<org>/<model>.yaml`, with taxonomy.yaml and strategies/ beside it) has the parts of a command. They are put
together only for one server on one node. If the JSON is available too, it is used instead.

A server of the imported recipe gets exactly the published arguments and environment. Anything that a recipe cannot express is
refused.
"""

import io
import math
import re
import textwrap
from pathlib import Path
from typing import Any

from packaging.version import Version
from pydantic import JsonValue, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from vllm_qualify.errors import CallerError, writing
from vllm_qualify.recipe.importing.combination import by_note, gathered_json, gathered_yaml
from vllm_qualify.recipe.importing.commands import Gathered, Translated
from vllm_qualify.recipe.importing.documents import InexpressibleError
from vllm_qualify.recipe.load import LEAST_PROMPTS_PER_CLIENT
from vllm_qualify.recipe.loading import short
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.recipe.serving import ServerArguments
from vllm_qualify.recipe.values import Frozen

# The filters of lm-eval's gsm8k.
_FILTERS = ("strict-match", "flexible-extract")
_LENGTH, _LENGTH_MARGIN = 1024, 64
_CONCURRENCY, _WARMUPS = 64, 20
# The longest answer of a chat to gsm8k, as for the catalog's gpt-oss: it may think first.
_REPLY = 4096
_IMAGE = re.compile(
    r"(?:docker\.io/)?vllm/vllm-openai(?:-[a-z0-9]+)?:v(\d+\.\d+(?:\.\d+)?)(?:-[\w.-]+)?(?:@sha256:[0-9a-f]{64})?"
)
_COMMENTS = {
    "capabilities": "What the published parsers are for. Each adds checks of the API's contract, which gate the release.",
    "gpu_types": (
        "Arguments and environment are the published ones, all of them and no others. The rest of a GPU type is not the "
        "source's. The timeout is the seed recipes': compiling a large model alone can take more than half an hour. The load "
        "is plain: at max-num-seqs where that is given and else at 64 requests, with five times as many prompts; raise "
        "num_prompts if a repeat is shorter than min_duration_s. No gates on speed: the source has no numbers."
    ),
    "smoke": "Not the source's: the seed recipes' prompt.",
    "accuracy": "Not the source's: all of gsm8k, as for the seed recipes.",
    "gates": "Not the source's: bound and filter were given at the import.",
}
_COMMENTS_BY_CHAT = _COMMENTS | {
    "accuracy": (
        "Not the source's: all of gsm8k, by chat, which is what is promised. gsm8k's own texts that end a reply would also end "
        "a model's thinking, and its own longest reply would cut it."
    )
}


class Imported(Frozen):
    """A recipe and its source. `images` are the published images by GPU type; a recipe itself never names an image."""

    recipe: Recipe
    source: str
    images: dict[str, str] = {}
    notes: list[str] = []


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

    Raises CallerError if the source is not there or not of its form, or bound or filter are missing, InexpressibleError if no
    recipe can express it for any GPU type; notes name those that cannot be expressed.
    """
    gate = _make_gate(exact_match_minimum, exact_match_filter)
    try:
        imported = _make_recipe(_gather_commands(source, variant, published), gate, source)
        _check_round_trip(imported, source)
    except RecursionError as error:
        raise CallerError("nested too deeply, or in itself", "mend the file", str(source)) from error
    except UnicodeError as error:
        problem = "a recipe cannot express text that UTF-8 does not have"
        raise InexpressibleError(problem, "mend the source", str(source)) from error
    except OSError as error:
        raise CallerError(f"cannot be read: {error.strerror}", "check the path and its permissions", str(source)) from error
    return imported


def _gather_commands(source: Path, variant: str | None, published: Path | None) -> Gathered:
    if published is not None and not published.is_dir():
        raise CallerError(f"there is no folder {published}", "name the folder that holds <org>/<repo>/hw", "--published")
    if source.suffix in (".yaml", ".yml") and not source.is_dir():
        return gathered_yaml(source, variant or "default", published)
    for option, given in (("--variant", variant), ("--published", published)):
        if given is not None:
            problem = f"JSON is of one variant already, and published: it has no use for {option}"
            raise CallerError(problem, "leave it out", option)
    return gathered_json(source)


def _make_gate(minimum: float | None, filter_: str | None) -> dict[str, Any]:
    """The gate on accuracy. A bound of 0 is refused, because every score would pass it."""
    if minimum is None or not 0 < minimum <= 1:
        reason = "which the source does not have" if minimum is None else f"above 0 and at most 1, not {minimum}"
        problem = f"the recipe needs the least share of gsm8k's questions to be answered exactly, {reason}"
        remedy = "measure a release that you trust, or take a published score less a margin"
        raise CallerError(problem, remedy, "--exact-match-minimum")
    if filter_ not in _FILTERS:
        lacking = "the gate needs lm-eval's filter, and the source has none"
        problem = f"gsm8k has no filter {short(filter_)}" if filter_ else lacking
        remedy = f"one of {', '.join(_FILTERS)}: the one that fits how the model answers"
        raise CallerError(problem, remedy, "--exact-match-filter")
    return {"metric": "exact_match", "filter": filter_, "minimum": float(minimum), "unit": "fraction"}


def _make_recipe(gathered: Gathered, gate: dict[str, Any], source: Path) -> Imported:
    served = gathered.commands
    name, names = _make_name(served[0].model, source), _variant_names(served, source)
    by_variant = {name: [one for one, own in zip(served, names, strict=True) if own == name] for name in names}
    served_names = list(dict.fromkeys(each for one in served for each in one.served_names)) or [name]
    notes = [(one.command.gpu_type, note) for one in served for note in [*one.notes, _other_names(one, served_names)]]
    capabilities = _promised_capabilities(served)
    document = {
        "name": name,
        "description": f"{served[0].model} as vllm-project/recipes serves it.",
        "served_model_name": served_names[0],
        **_without_empty(aliases=served_names[1:], capabilities=capabilities),
        "variants": {name: _make_variant(commands, gathered.oldest_vllm) for name, commands in by_variant.items()},
        "gpu_types": {one.command.gpu_type: _make_serving(one, variant) for one, variant in zip(served, names, strict=True)},
        "smoke": {"prompt": "San Francisco is a", "max_tokens": 20},
        "accuracy": [_make_task(served, by_chat="chat" in capabilities)],
        "gates": [gate],
    }
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "[key]")
        problem = f"a recipe cannot have this at {key}: {first['msg'].removeprefix('Value error, ')}"
        raise InexpressibleError(problem, "see docs/recipes.md for what a recipe can have", str(source)) from error
    images = {one.command.gpu_type: one.command.image for one in served if one.command.image}
    return Imported(recipe=recipe, source=gathered.label, images=images, notes=[*gathered.notes, *by_note(notes)])


def _without_empty(**keys: Any) -> dict[str, Any]:
    return {name: value for name, value in keys.items() if value}


def _other_names(one: Translated, names: list[str]) -> str:
    """A note if the command is published with other names than the recipe, which has all names for every GPU type."""
    if not one.served_names or one.served_names == names:
        return ""
    return f"published as {', '.join(one.served_names)}, and served under all of {', '.join(names)}, as every GPU type is"


def _make_name(text: str, source: Path) -> str:
    """A valid name, made from the last part of a model's name."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", text.rstrip("/").rpartition("/")[2].lower())
    name = re.sub(r"^[^a-z0-9]+", "", plain)[:100]
    if not name:
        raise InexpressibleError(f"{short(text)} has nothing that a name can be made of", "rename it", str(source))
    return name


def _variant_names(served: list[Translated], source: Path) -> list[str]:
    """The source's names of the variants. If one name stands for several models, the names of the models."""
    weights = [(one.model, one.revision) for one in served]
    by_source = [_make_name(one.command.variant, source) for one in served]
    if len(set(zip(by_source, weights, strict=True))) == len(set(by_source)):
        return by_source
    names = [_make_name(f"{one.model}-{one.revision}" if one.revision else one.model, source) for one in served]
    if len(set(names)) < len(set(weights)):
        raise InexpressibleError("several models have the same name", "import their files one by one", str(source))
    return names


def _promised_capabilities(served: list[Translated]) -> list[str]:
    """What the published parsers are for, if every command has them."""
    every = [one.arguments for one in served]
    tools = all("tool-call-parser" in each and each.get("enable-auto-tool-choice") is True for each in every)
    reasoning = all("reasoning-parser" in each for each in every)
    named = {"chat": tools or reasoning, "tools": tools, "reasoning": reasoning}
    return [name for name, promised in named.items() if promised]


def _make_variant(commands: list[Translated], oldest_vllm: str | None) -> dict[str, Any]:
    """The variant's model, and the oldest vLLM for it: the source's own word, else the newest version among its images."""
    # Of an image with the tag `latest`, and of others without a version, nothing is known.
    tags = [_IMAGE.fullmatch(one.command.image or "") for one in commands]
    oldest = oldest_vllm or max((tag[1] for tag in tags if tag), key=Version, default=None)
    model, revision = commands[0].model, commands[0].revision
    return {"model": model, **_without_empty(revision=revision, vllm=oldest and f">={oldest}")}


def _make_serving(one: Translated, variant: str) -> dict[str, Any]:
    return {
        "default_variant": variant,
        "server": one.arguments,
        **_without_empty(environment=one.command.environment),
        "startup_timeout_s": 3600,
        "profiles": {"balanced": {"load": _make_load(one.arguments)}},
    }


def _make_task(served: list[Translated], *, by_chat: bool) -> dict[str, Any]:
    """All of gsm8k. Where chat is promised, it is asked by chat: completions show little of a model that only chats."""
    task = {"task": "gsm8k", "num_fewshot": 5, "num_questions": 1319}
    if not by_chat:
        return task
    lengths = [length for one in served if (length := _positive_int(one.arguments.get("max-model-len")))]
    # Half of a short context is for the examples.
    reply = min([_REPLY, *(max(1, length // 2) for length in lengths)])
    return task | {"api": "chat", "max_gen_toks": reply, "stop": []}


def _make_load(arguments: ServerArguments) -> dict[str, int]:
    concurrency = _positive_int(arguments.get("max-num-seqs")) or _CONCURRENCY
    longest = _positive_int(arguments.get("max-model-len")) or math.inf
    length = int(max(1, min(_LENGTH, (longest - _LENGTH_MARGIN) // 2)))
    prompts = LEAST_PROMPTS_PER_CLIENT * concurrency
    return {
        "input_len": length,
        "output_len": length,
        "max_concurrency": concurrency,
        "num_prompts": prompts,
        "num_warmups": min(_WARMUPS, prompts),
    }


def _positive_int(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _check_round_trip(imported: Imported, source: Path) -> None:
    """Raises InexpressibleError if the written YAML would not give the same recipe again."""
    try:
        again = Recipe.model_validate(YAML(typ="safe", pure=True).load(render_recipe(imported)))
    except (YAMLError, ValueError) as error:
        raise InexpressibleError("its text cannot be written as YAML", "mend the source", str(source)) from error
    if again != imported.recipe:
        raise InexpressibleError("its text does not survive being written as YAML", "mend the source", str(source))


def write_recipe(imported: Imported, path: Path) -> None:
    """Write the recipe as YAML, as a new file. Raises CallerError if it exists already, HostError if it cannot be written."""
    if path.exists():
        raise CallerError("there is such a file already", "give another name, or move it away", str(path))
    with writing("recipe"):
        path.write_text(render_recipe(imported), encoding="utf-8")


def render_recipe(imported: Imported) -> str:
    """The recipe as YAML. Comments name its source, and the parts that the source does not have."""
    by_image: dict[str, list[str]] = {}
    for gpu_type, image in imported.images.items():
        by_image.setdefault(image, []).append(gpu_type)
    gates = "; ".join(f"{gate.label} of at least {gate.bounds[0]:g}" for gate in imported.recipe.gates)
    header = [
        f"Imported from vllm-project/recipes: {imported.source}.",
        *(f"Published image for {', '.join(gpu_types)}: {image}" for image, gpu_types in by_image.items()),
        f"The source has no scores, so the person who imports it chooses the gate: {gates}.",
    ]
    lines = [_wrap_comment(line) for line in header] + [_wrap_comment(f"- {note}", "  ") for note in imported.notes]
    document = imported.recipe.model_dump(exclude_unset=True)
    # The default variant comes first.
    document["gpu_types"] = {
        name: {"default_variant": serving["default_variant"]} | serving for name, serving in document["gpu_types"].items()
    }
    comments = _COMMENTS_BY_CHAT if imported.recipe.accuracy[0].api == "chat" else _COMMENTS
    sections = [_render_section(key, value, comments.get(key)) for key, value in document.items()]
    apart = [f"\n{section}" if section.count("\n") > 1 else section for section in sections]
    return "\n".join([*lines, "".join(apart)])


def _wrap_comment(text: str, indent: str = "") -> str:
    """Comment lines. Characters that are not printable become spaces, so that they cannot end the comment."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    wrapper = textwrap.TextWrapper(128, "# ", f"# {indent}", break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(plain)


def _render_section(key: str, value: object, comment: str | None) -> str:
    """One top-level key with its comment."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 2**16
    text = io.StringIO()
    if comment:
        text.write(f"{_wrap_comment(comment)}\n")
    yaml.dump({key: value}, text)
    return text.getvalue()
