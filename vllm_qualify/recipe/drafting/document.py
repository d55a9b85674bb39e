"""The first recipe of a model, each line with the reason why it is there."""

import re
from collections.abc import Iterable, Iterator, Sequence

from ruamel.yaml.error import YAMLError

from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.drafting.measures import FEW_QUESTIONS, list_gates, list_tasks
from vllm_qualify.recipe.drafting.parts import Command, Host, Model, Published
from vllm_qualify.recipe.drafting.section import REASONING, TOOLS, Section
from vllm_qualify.recipe.drafting.traffic import CPU, Slo, Traffic
from vllm_qualify.recipe.drafting.yaml_lines import Block, Entry, write_comment, write_lines
from vllm_qualify.recipe.loading import load_yaml
from vllm_qualify.recipe.recipe import Recipe

# A folder's name, or a commit in a hub's cache.
_SAYS_NOTHING = re.compile(r"\.*|(?i:models?|weights|checkpoints?|snapshots|[0-9a-f]{40})")


def write_recipe(
    model: Model, hosts: Sequence[Host], traffic: Traffic, slo: Slo, published: Published | None, command: Command
) -> str:
    """The recipe's YAML. Raises CallerError if the traffic does not fit, or the model fits on no GPU type that was named."""
    name = make_name(model.written)
    sections = [Section(model, host, traffic, slo, published) for host in hosts]
    _check_fits(sections)
    fitting = [each for each in sections if each.gpus]
    is_slow = all(each.host.gpu_type == CPU for each in fitting)
    context = min(each.context_tok for each in fitting)
    entries = [
        Entry("name", name),
        Entry("description", f"{name}, a model that {_describe_kind(model, fitting)}."),
        Entry("served_model_name", name, "what clients name in their requests"),
        *_promise(model, fitting),
        Entry("variants", Block([Entry(model.shape.weights, {"model": model.written}, _describe_weights(model))])),
        Entry("gpu_types", Block([Entry(each.host.gpu_type, Block(list(each.entries()))) for each in fitting])),
        Entry("smoke", {"prompt": "The capital of France is"}, "asked twice, by completions"),
        Entry("accuracy", list_tasks(model, context, is_slow=is_slow)),
        *([Entry("likelihood", {"num_answers": FEW_QUESTIONS}, "how likely the baseline's answers are")] if is_slow else []),
        Entry("gates", list_gates(model, has_clients=all(each.traffic.clients for each in fitting), is_slow=is_slow)),
    ]
    text = "\n".join([*_head(command, _explain_left_out(model, sections)), *_space_out(write_lines(entries)), ""])
    _check_written(text, model)
    return text


def make_name(model: str) -> str:
    """A valid name, of the last part of a model's name or path that says something."""
    telling = [part for part in model.split("/") if part and not _SAYS_NOTHING.fullmatch(part)]
    plain = re.sub(r"[^a-z0-9._-]+", "-", (telling or ["model"])[-1].rpartition("--")[2].lower())
    return re.sub(r"^[^a-z0-9]+", "", plain)[:100] or "model"


def _head(command: Command, left_out: Iterable[str]) -> Iterator[str]:
    file = str(command.output) if command.output else "FILE"
    yield from write_comment(f"Drafted by `{command.typed}` of the model's own files. Read each line before you rely on it.")
    yield from write_comment(f"Next: `vllm-qualify recipe check {file}`, then `vllm-qualify run {file} --establish-baseline`.")
    yield from write_comment(
        "`vllm-qualify recipe bounds RUN` then proposes absolute bounds of that run. docs/recipes.md has all keys."
    )
    for line in left_out:
        yield from write_comment(line)


def _space_out(lines: Iterator[str]) -> Iterator[str]:
    """An empty line before each mapping or list of the top, before its comment, and after it."""
    held, was_inner = list[str](), False
    for line in lines:
        if line.startswith("#"):
            held.append(line)
            continue
        is_inner = line.startswith(" ")
        if not is_inner and (was_inner or re.fullmatch(r"\w+:( #.*)?", line)):
            yield ""
        yield from held
        held, was_inner = [], is_inner
        yield line


def _describe_kind(model: Model, sections: Sequence[Section]) -> str:
    if model.told is None:
        return "completes texts"
    kinds = [
        "chats",
        *(["thinks"] if model.told.thoughts else []),
        *(["calls tools"] if all(each.promises(TOOLS) for each in sections) else []),
    ]
    kinds += ["sees pictures"] if model.shape.sees else []
    return ", ".join(kinds[:-1]) + " and " + kinds[-1] if len(kinds) > 1 else kinds[0]


def _describe_weights(model: Model) -> str:
    if model.weights_bytes is None:
        return "nothing says how large its weights are"
    return f"{model.weights_bytes / 10**9:.3g} GB of weights, by {model.weights_by}"


def _promise(model: Model, sections: Sequence[Section]) -> Iterator[Entry]:
    """`capabilities`: what each server is held to by checks of the API's contract."""
    if model.told is None:
        return
    calls, thinks = (all(each.promises(option) for each in sections) for option in (TOOLS, REASONING))
    promised = ["chat", *(["tools", "json_schema"] if calls else []), *(["reasoning"] if thinks else [])]
    why = f"each has checks of its own, which gate. {model.template_file} renders chats"
    yield Entry("capabilities", [*promised, *(["vision"] if model.shape.sees else [])], why)


def _explain_left_out(model: Model, sections: Sequence[Section]) -> Iterator[str]:
    """Why something is not promised, in comments of the head."""
    for what, option, parser in (("tools", TOOLS, model.tools), ("reasoning", REASONING, model.reasoning)):
        if model.told is not None and not all(each.promises(option) for each in sections) and parser.why:
            yield f"No {what} among the capabilities: {parser.why}."
    yield from (f"Left out: {each.refusal}." for each in sections if not each.gpus)


def _check_fits(sections: Sequence[Section]) -> None:
    if not any(each.gpus for each in sections):
        remedy = "name GPU types with more memory by --gpu-type, or serve it on several nodes, which vllm-qualify does not"
        raise CallerError("; ".join(each.refusal for each in sections), remedy, "--gpu-type")


def _check_written(text: str, model: Model) -> None:
    """Raises CallerError if the text is not the recipe that was meant, as a name of the model could make it."""
    try:
        recipe = Recipe.model_validate(load_yaml(text))
    except (YAMLError, ValueError) as error:
        problem = f"no recipe can be written of it: {' '.join(str(error).split())[:200]}"
        raise CallerError(problem, "rename the model's folder, and name what traffic has", model.written) from error
    if [each.model for each in recipe.variants.values()] != [model.written]:
        raise CallerError("its name does not survive being written as YAML", "rename its folder", model.written)
