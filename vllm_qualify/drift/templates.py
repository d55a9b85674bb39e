"""Chat templates of models, rendered apart: a template is code from outside."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from vllm_qualify.drift import template_probe
from vllm_qualify.engine.confinement import confining_process, folders_here
from vllm_qualify.engine.letter_box import read_plain
from vllm_qualify.engine.process import running_guarded, wait_for
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.recipe.drafting.chats import Told, make_conversations, read_template
from vllm_qualify.recipe.drafting.model_files import ModelFiles, token_text
from vllm_qualify.recipe.values import Frozen

PROBE = Path(template_probe.__file__)
CHECK, RENDERING = "check", "rendering the chat template"
# Over the seconds of a core that the probe itself allows: the machine may be busy.
LIMIT_S = 90.0
# Of the tokenizer's configuration, as transformers gives them to a template.
VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Rendered(Frozen):
    texts: dict[str, str]
    errors: dict[str, str]


def ask_template(files: ModelFiles) -> Told:
    """What a model's chat template says of the texts that the model writes.

    Raises CallerError if no question can be rendered, or the template takes more time or memory than any does; HostError if no
    process can be started.
    """
    place = f"{files.source}: {files.template_file}"
    variables = {name: text for name in VARIABLES if (text := token_text(files.tokenizer.get(name)))}
    conversations = {key: each._asdict() for key, each in make_conversations(files.templates).items()}
    question = {"templates": _name_default(files.templates), "variables": variables, "conversations": conversations}
    rendered = _render(question, place)
    ends = [text for name in ("eos_token",) if (text := variables.get(name, ""))]
    told = read_template("\n".join(files.templates.values()), rendered.texts, rendered.errors, ends)
    if told.fails:
        problem = f"the chat template does not render a question and its answer: {told.fails}"
        raise CallerError(problem, "mend the template, or take it away if the model does not chat", place)
    return told


def _name_default(templates: Mapping[str, str]) -> dict[str, str]:
    """With a template `default`, which is the first one where none is named so."""
    return {"default": next(iter(templates.values()))} | dict(templates)


def _render(question: dict[str, Any], place: str) -> Rendered:
    readable, listable = folders_here()
    with TemporaryDirectory() as name, TemporaryDirectory() as logs:
        box = Path(name)
        (box / "question.json").write_text(json.dumps(question), encoding="utf-8")
        command = [sys.executable, "-I", str(PROBE), str(box / "question.json"), str(box / "answer.json")]
        with (
            confining_process({}, readable=readable, writable=[box], listable=listable) as confinement,
            running_guarded(command, confinement.environment, Path(logs) / "it.log", rules=confinement.rules) as process,
        ):
            try:
                wait_for(process, LIMIT_S, lambda: None, RENDERING)
                return Rendered.model_validate_json(read_plain(box / "answer.json") or b"")
            except (HostError, ValidationError) as error:
                bounds = f"{template_probe.MOST_CPU_S} s of a core and {template_probe.MOST_BYTES // 2**30} GiB"
                problem = f"the chat template cannot be rendered within {bounds}"
                raise CallerError(problem, "mend the template, or take it away if the model does not chat", place) from error
