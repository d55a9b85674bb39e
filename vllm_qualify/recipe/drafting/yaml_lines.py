"""A recipe's text, line by line, each with its reason. What comes from outside cannot end a line or a comment."""

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

WIDTH, INDENT = 128, "  "
_PLAIN = re.compile(r"[A-Za-z./~][A-Za-z0-9_./@+-]*")
# What YAML 1.1 reads as something else than text; whoever edits the file may use such a tool.
_OTHERWISE = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", ".inf", ".nan", "~"}


class Entry(NamedTuple):
    """A key of a mapping with its value: entries, which are written below it, or a value in one line. `why` is its comment."""

    key: str
    value: "Sequence[Entry] | Items | object"
    why: str = ""


class Item(NamedTuple):
    """An element of a list, written in one line."""

    value: object
    why: str = ""


class Items(NamedTuple):
    """A list, written below its key. `beside` are comments after it."""

    items: Sequence[Item]
    beside: Sequence[str] = ()


class Block(NamedTuple):
    """A mapping, written below its key."""

    entries: Sequence[Entry]


def write_lines(entries: Sequence[Entry], indent: str = "") -> Iterator[str]:
    for entry in entries:
        match entry.value:
            case Block(inner):
                yield from _with_comment(f"{indent}{write_value(entry.key)}:", entry.why, indent)
                yield from write_lines(inner, indent + INDENT)
            case Items(items, beside):
                yield from _with_comment(f"{indent}{write_value(entry.key)}:", entry.why, indent)
                for item in items:
                    yield from _with_comment(f"{indent}{INDENT}- {write_value(item.value)}", item.why, indent + INDENT)
                for text in beside:
                    yield from write_comment(text, indent + INDENT)
            case value:
                yield from _with_comment(f"{indent}{write_value(entry.key)}: {write_value(value)}", entry.why, indent)


def _with_comment(line: str, why: str, indent: str) -> Iterator[str]:
    """The line with its reason behind it, or above it where the line would be too long."""
    why = plain_text(why)
    if not why:
        yield line
    elif len(line) + len(why) + 4 <= WIDTH:
        yield f"{line} # {why}"
    else:
        yield from write_comment(why, indent)
        yield line


def write_comment(text: str, indent: str = "") -> Iterator[str]:
    yield from textwrap.wrap(
        plain_text(text),
        WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def plain_text(text: str) -> str:
    """In one line: characters that are not printable become spaces, so that they cannot end a comment."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def write_value(value: object) -> str:
    """A value of YAML 1.2 in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write_value(key)}: {write_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(write_value, value)) + "]"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _OTHERWISE and not value.startswith(".inf")
        # What JSON escapes, YAML reads; what JSON leaves as it is and does not print is escaped, too.
        return value if is_plain else json.dumps(value, ensure_ascii=not value.isprintable())
    return json.dumps(value)
