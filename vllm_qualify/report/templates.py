"""The templates of the pages: outside text is escaped, and its control characters are made visible."""

import shlex
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from vllm_qualify.report import words
from vllm_qualify.secrets import plain

FILTERS = {
    "time": words.time,
    "duration": words.duration,
    "size": words.size,
    "command": shlex.join,
    "address": quote,
}
NAMES = {
    "DASH": words.DASH,
    "tally": words.tally,
    "hardware": words.hardware,
    "parts": words.parts,
    "publisher": words.publisher,
    "engine": words.engine,
}


def template(package: str, name: str, **names: object) -> Template:
    """The template in a package's file. It can use FILTERS, NAMES and `names`."""
    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    environment.globals |= NAMES | names
    return environment.get_template(name)


def _finalize(value: object) -> object:
    """Outside text with visible control characters. Markup of a template stays unchanged."""
    return plain(value) if type(value) is str else value
