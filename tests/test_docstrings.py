"""Names in the source: docstrings name what is there, and test files import from no other test file."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for room in ("vllm_qualify", "tasks", "flows", "deployments", "infra") for path in (ROOT / room).rglob("*.py")]
# In `name.ending`, this is a file.
ENDINGS = {"py", "js", "json", "log", "yaml", "sig", "txt"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def names_in(tree: ast.Module) -> Iterator[str]:
    """What a file defines: functions, classes, their fields, and names of values."""
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
NAMES: dict[str, set[str]] = {}
for file, parsed in TREES.items():
    NAMES.setdefault(file.parent.name if file.stem == "__init__" else file.stem, set()).update(names_in(parsed))
MODULES = {path.stem for path in FILES}


# Names that are another project's: vLLM's, Linux's, lm-eval's and BFCL's.
FOREIGN = {
    *("get_diff_sampling_param", "get_max_tokens", "compilation_config", "local_lock"),
    *("create_image_prompt", "standardize_string"),
}


def words_in(tree: ast.Module) -> Iterator[str]:
    """Every name that a file defines or uses, and texts that are a name, like an option or a key."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                yield name


WORDS = {word for tree in TREES.values() for word in words_in(tree)}


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | Definition):
            yield ast.get_docstring(node) or ""


def missing_in(tree: ast.Module) -> list[str]:
    named = {each for text in docstrings(tree) for each in re.findall(r"`([A-Za-z_]+\.[A-Za-z_]+)`", text)}
    pairs = [each.split(".") for each in sorted(named)]
    return [
        f"{module}.{name}" for module, name in pairs if module in NAMES and name not in {*NAMES[module], *MODULES, *ENDINGS}
    ]


def unknown_in(tree: ast.Module) -> list[str]:
    """Names of several words that docstrings have in backticks, and no file."""
    named = {each for text in docstrings(tree) for each in re.findall(r"`([a-z]+_[a-z_]+)`", text)}
    return sorted(named - WORDS - FOREIGN)


@pytest.mark.parametrize("find", [missing_in, unknown_in])
def test_what_a_docstring_names_is_there(find: Callable[[ast.Module], list[str]]) -> None:
    """`module.name`, where this project has such a module, and names as `parse_load`, of a function, a field or a key."""
    found = {str(path.relative_to(ROOT)): find(tree) for path, tree in TREES.items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_what_is_gone_is_found() -> None:
    assert missing_in(ast.parse('"""As `client.measure_load`, `client.measured` and `client.json`."""')) == ["client.measured"]
    assert unknown_in(ast.parse('"""As `measure_load` and `measured_the_load`."""')) == ["measured_the_load"]


def test_no_test_file_imports_from_another_one() -> None:
    """What several use is in tests/builders: then a file of tests can be read, moved and deleted alone."""
    taken = {
        str(path.relative_to(ROOT)): node.module
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.rpartition(".")[2].startswith("test_")
    }
    assert taken == {}
