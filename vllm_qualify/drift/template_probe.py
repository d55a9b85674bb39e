"""Render conversations by a model's chat template, as transformers does, in a process with bounds of time and memory.

A script that imports Jinja and nothing of this project. Its arguments are a file with the question and one for the answer:

    {"templates": {"default": "…"}, "variables": {"bos_token": "…"}, "conversations": {"asked": {"template": "default", …}, …}}
    {"texts": {"asked": "…"}, "errors": {"call": "why it could not be rendered"}}

A template is code from outside. Jinja's sandbox lets it call no method that changes anything, and open no attribute that begins
with an underscore, as in transformers (utils/chat_template_utils.py). What it may compute and hold, the kernel bounds.
"""

import datetime
import json
import resource
import sys
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

MOST_CPU_S, MOST_BYTES, MOST_CHARACTERS = 20, 2**30, 400_000


class UnrenderedError(Exception):
    """What the template itself, or a bound, says against a conversation."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model writes; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def make_environment() -> jinja2.Environment:
    extensions: list[Any] = [Generation, jinja2.ext.loopcontrols]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = write_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def write_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without the escapes of HTML that Jinja's own filter has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: object) -> NoReturn:
    raise UnrenderedError(f"the template says: {message}"[:300])


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    text = ""
    for piece in template.generate(variables):
        text += piece
        if len(text) > MOST_CHARACTERS:
            raise UnrenderedError(f"it makes more than {MOST_CHARACTERS:,} characters of a short conversation")
    return text


def answer_about(question: dict[str, Any]) -> dict[str, Any]:
    environment, compiled = make_environment(), dict[str, jinja2.Template]()
    texts, errors = dict[str, str](), dict[str, str]()
    for key, conversation in question["conversations"].items():
        name = conversation["template"]
        try:
            if name not in compiled:
                compiled[name] = environment.from_string(question["templates"][name])
            given = {name: conversation[name] for name in ("messages", "tools")}
            texts[key] = render(compiled[name], question["variables"] | given | {"add_generation_prompt": conversation["asks"]})
        except Exception as error:  # whatever a template of others raises, it is not rendered
            errors[key] = str(error)[:300] if isinstance(error, UnrenderedError) else f"{type(error).__name__}: {error}"[:300]
    return {"texts": texts, "errors": errors}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    answer = answer_about(json.loads(Path(sys.argv[1]).read_bytes()))
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
