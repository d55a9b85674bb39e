"""The templates of the pages: outside text is escaped, and its control characters are made visible."""

import shlex
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from vllm_qualify.report import words
from vllm_qualify.secrets import plain

FILTERS = {name: getattr(words, name) for name in ("time", "duration", "size", "value")}
FILTERS |= {"command": shlex.join, "address": quote}
NAMES = {name: getattr(words, name) for name in ("DASH", "tally", "hardware", "parts", "publisher", "engine")}


def template(package: str, name: str, **names: object) -> Template:
    """The template in a package's file. It can use FILTERS, NAMES and `names`."""
    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_show_controls,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    environment.globals |= NAMES | names
    return environment.get_template(name)


def _show_controls(value: object) -> object:
    """Outside text with visible control characters. Markup of a template stays unchanged."""
    return plain(value) if type(value) is str else value
