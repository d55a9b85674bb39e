"""Add gates to a recipe's file: its comments stay, and it is written whole or not at all."""

import difflib
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from vllm_qualify.errors import CallerError, writing
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.loading import catalog_folder, load_recipe
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.recipe import Recipe


class NewGate(NamedTuple):
    """A gate, and the comment that says why it has this bound."""

    gate: Gate
    comment: str


class Edit(NamedTuple):
    """A recipe's file before and after."""

    path: Path
    before: str
    after: str

    @property
    def diff(self) -> str:
        """As `diff -u` shows it."""
        old, new = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(old, new, str(self.path), f"{self.path} (new)"))


def find_file(name: str) -> Path:
    """The file of a recipe that may be written to. Raises CallerError if it is the catalog's, or there is none."""
    path = Path(name).expanduser()
    is_path = "/" in name or name.endswith((".yaml", ".yml"))
    if not is_path or path.resolve().is_relative_to(catalog_folder().resolve()):
        stem = path.stem
        problem = f"{stem} is a recipe of the catalog, which is not written to"
        remedy = f"copy it, and name the copy: cp {catalog_folder() / stem}.yaml mine.yaml (with the folder that it names)"
        raise CallerError(problem, remedy, "--recipe")
    if not path.is_file():
        raise CallerError(f"there is no recipe '{name}'", "name the YAML file that the run was made with", "--recipe")
    return path


def add_gates(path: Path, gpu_type: str, profile: str, gates: Sequence[NewGate]) -> Edit:
    """What the file is with further gates: those on answers for all cells, and the others in the profile.

    Nothing is written. Raises CallerError if the file would not be a recipe then, or other gates would change too.
    """
    before = load_recipe(str(path.absolute())).recipe
    text, names_task = path.read_text(encoding="utf-8"), len(before.accuracy) > 1
    places = {True: (), False: ("gpu_types", gpu_type, "profiles", profile)}
    after = text
    for of_answers, keys in places.items():
        added = [new for new in gates if (METRICS[new.gate.metric].stage == "accuracy") is of_answers]
        if added:
            after = _add_lines(after, keys, added, names_task, path)
    edit = Edit(path, text, after)
    _check_edit(edit, before, gpu_type, profile, [new.gate for new in gates])
    return edit


def write_edit(edit: Edit) -> None:
    """Write the file whole. Raises CallerError if it was changed since it was read, HostError if it cannot be written."""
    target = edit.path.resolve()
    fresh = target.with_name(f".{target.name}.new")
    with writing(str(edit.path)):
        if target.read_text(encoding="utf-8") != edit.before:
            raise CallerError("the file was changed meanwhile", "run the command again", str(edit.path))
        fresh.write_text(edit.after, encoding="utf-8")
        fresh.chmod(target.stat().st_mode & 0o777)
        fresh.replace(target)


def _add_lines(text: str, keys: Sequence[str], gates: Sequence[NewGate], names_task: bool, path: Path) -> str:
    """The text with gates at the end of the list `gates` of the mapping below `keys`. All other lines stay as they are.

    To write the whole document anew would keep its comments, and change the form of some of its lines.
    """
    holder = YAML(pure=True).compose(text)
    for key in keys:
        holder = _value_of(holder, key)
    listed = _value_of(holder, "gates")
    if isinstance(holder, MappingNode) and not holder.flow_style and listed is None:
        column, after = holder.start_mark.column, _last_line(holder)
        added = [f"{' ' * column}gates:\n", *(_line_of(new, column + 2, names_task) for new in gates)]
    elif isinstance(listed, SequenceNode) and not listed.flow_style:
        column, after = listed.start_mark.column, _last_line(listed)
        added = [_line_of(new, column, names_task) for new in gates]
    else:
        place = ".".join((*keys, "gates"))
        raise CallerError(f"{place} is no list with a line for each gate", "write it as one, or the gates by hand", str(path))
    lines = text.splitlines(keepends=True)
    if not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return "".join([*lines[: after + 1], *added, *lines[after + 1 :]])


def _value_of(holder: Any, key: str) -> Any:
    """The node of a key's value; None if the mapping does not have the key itself."""
    pairs = holder.value if isinstance(holder, MappingNode) else []
    return next((value for name, value in pairs if name.value == key), None)


def _last_line(node: Any) -> int:
    """The last line of a node, from 0. The end of a block, as the parser has it, is behind the comments that follow."""
    if isinstance(node, MappingNode) and not node.flow_style:
        return _last_line(node.value[-1][1])
    if isinstance(node, SequenceNode) and not node.flow_style:
        return _last_line(node.value[-1])
    line: int = node.end_mark.line
    return line - 1 if isinstance(node, ScalarNode) and node.style in ("|", ">") else line


def _line_of(new: NewGate, column: int, names_task: bool) -> str:
    keys = new.gate.model_dump(mode="json", exclude_none=True)
    if not names_task:
        keys.pop("task", None)
    bounds = {name: int(bound) if (bound := keys.pop(name)).is_integer() else bound for name in new.gate.own_keys()}
    unit = {"unit": keys.pop("unit")}
    entry = CommentedMap(keys | bounds | unit)
    entry.fa.set_flow_style()
    yaml, written = YAML(), StringIO()
    yaml.width = 100_000
    yaml.dump([entry], written)
    comment = f" # {' '.join(new.comment.split())}" if new.comment else ""
    return f"{' ' * column}{written.getvalue().rstrip()}{comment}\n"


def _check_edit(edit: Edit, before: Recipe, gpu_type: str, profile: str, gates: Sequence[Gate]) -> None:
    """Hold the edited text against what it should be. An anchor, for example, can put a gate into several profiles."""
    fresh = edit.path.with_name(f".{edit.path.stem}.check.yaml")
    try:
        with writing(str(edit.path)):
            fresh.write_text(edit.after, encoding="utf-8")
        after = load_recipe(str(fresh.absolute())).recipe
    except CallerError as error:
        problem = f"with these gates it would be no recipe: {error.problem}"
        raise CallerError(problem, "write fewer of them with --metric, or mend the recipe", str(edit.path)) from error
    finally:
        fresh.unlink(missing_ok=True)
    if _as_document(after) != _with_gates(before, gpu_type, profile, gates):
        problem = "more than this cell's gates would change: its gates are shared by an anchor or a merge of YAML"
        raise CallerError(problem, "write the gates by hand", str(edit.path))


def _with_gates(recipe: Recipe, gpu_type: str, profile: str, gates: Sequence[Gate]) -> Any:
    document = _as_document(recipe)
    for gate in gates:
        of_answers = METRICS[gate.metric].stage == "accuracy"
        holder = document if of_answers else document["gpu_types"][gpu_type]["profiles"][profile]
        own = gate if len(recipe.accuracy) > 1 else gate.model_copy(update={"task": None})
        holder["gates"].append(own.model_dump(mode="json"))
    return document


def _as_document(recipe: Recipe) -> Any:
    return recipe.model_dump(mode="json")
