"""What lm-eval's task files say of a task, read without lm-eval: its import alone takes longer than most of a command.

Nothing that a file names is run. What a file leaves to code, or says in a form that is not known here, is told as unknown.
"""

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vllm_qualify.evidence.accuracy.letters import GENERATES

# Task files of this project. They go before lm-eval's, and those of a recipe's own folder before them.
OURS = Path(__file__).parent / "tools" / "tasks"
LONG = Path(__file__).parent / "long" / "long.yaml"
# The filter of a task that names none.
NO_FILTER = "none"
# Groups in groups; lm-eval has three levels.
DEEPEST = 10
# Of a recipe's own folder: many times what tasks of one's own have.
MOST_FILES, MOST_BYTES = 2_000, 200_000
# A word in more of lm-eval's files than this is one of its everyday words.
MOST_NAMING = 500
_NOT_TASKS = (".py", ".pyc", ".md")
_DEFINED = re.compile(rb"^(?:task|group)\s*:\s*[\"']?([\w.-]+)", re.MULTILINE)
# What a group may say of its tasks in their place.
_OVERRIDDEN = ("filter_list", "metric_list", "output_type", "num_fewshot", "generation_kwargs")

Config = Mapping[str, Any]


class UntoldError(Exception):
    """The files do not say it; the message is the reason."""


class NoTaskError(Exception):
    """There is no such task, group or tag."""


class TaskFile(NamedTuple):
    """What is said of a task, or of all tasks of a group alike: its filters, the scores of an answer, and how it asks.

    `scores` is None if code says them. `num_fewshot` is the number of examples that the task itself says, and `reply_tok` its
    longest reply. `stops` is how many texts end a reply; of a group the most, and whether any task shows pictures. `repeats` is
    how often each question is asked at once; of a group the most.
    """

    filters: tuple[str, ...]
    scores: tuple[str, ...] | None
    generates: bool
    num_fewshot: int | None
    reply_tok: int | None
    stops: int = 0
    shows_pictures: bool = False
    repeats: int = 1


def describe(task: str, folder: Path | None) -> TaskFile:
    """What files say of a task or a group; those in `folder`, a recipe's own, go before lm-eval's.

    Raises NoTaskError if there is none, UntoldError if the files do not say it.
    """
    return _describe(task, [*([_Own(folder)] if folder else []), _ours(), _theirs()], 0)


def describe_long() -> TaskFile:
    """What is said of the tasks that this project makes in a given length."""
    return _task_file(_load(LONG, (LONG.parent,), is_trusted=True))


def known_names() -> Iterator[str]:
    """The names of lm-eval's tasks and groups. Reads all of its files."""
    for content in _theirs().contents.values():
        yield from (name.decode() for name in _DEFINED.findall(content))


def usual_folder(task: str) -> Path | None:
    """lm-eval's folder with the longest name with which the task's begins, as gsm8k for gsm8k_cot, and aime for aime25."""
    words = task.split("_")
    begins = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    names = (name for begin in begins for name in (begin, begin.rstrip("0123456789")) if name)
    return next((tasks_folder() / name for name in names if (tasks_folder() / name).is_dir()), None)


@cache
def tasks_folder() -> Path:
    """lm-eval's folder of task files. Raises UntoldError if lm-eval is not installed."""
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise UntoldError("lm-eval is not installed here")
    return Path(spec.origin).parent / "tasks"


class _Own:
    """A folder of task files, which are all read."""

    def __init__(self, folder: Path, *, is_trusted: bool = False) -> None:
        self.folder, self.is_trusted = folder, is_trusted
        self._entries: dict[str, Config] | None = None
        self._tags: dict[str, list[str]] = {}
        self._doubt = ""

    def find(self, name: str) -> Config | None:
        """The configuration by this name; None if there is none. Raises UntoldError if it may be in an unreadable file."""
        if self._entries is None:
            self._read()
        entries = self._entries or {}
        if name in entries:
            return entries[name]
        if name in self._tags:
            return _group(name, self._tags[name])
        if self._doubt:
            raise UntoldError(self._doubt)
        return None

    def _read(self) -> None:
        self._entries = {}
        try:
            files = sorted((path for path in _walk(self.folder) if path.suffix == ".yaml"), key=Path.as_posix)
        except OSError as error:
            files, self._doubt = [], f"{self.folder.name} cannot be read: {error.strerror}"
        if len(files) > MOST_FILES:
            files, self._doubt = [], f"{self.folder.name} has more than {MOST_FILES:,} task files"
        for path in files:
            try:
                config = _load(path, (self.folder,), is_trusted=self.is_trusted)
            except UntoldError as error:
                # lm-eval leaves out a file that it cannot read. It may read this one.
                self._doubt = str(error)
                continue
            if name := _name_of(config):
                self._entries.setdefault(name, config)
                for tag in _tags_of(config):
                    self._tags.setdefault(tag, []).append(name)


class _Theirs:
    """lm-eval's own task files: 14,000, of which only those that have a name are parsed."""

    def __init__(self) -> None:
        self.root = tasks_folder()
        self._near: dict[Path, dict[Path, bytes]] = {}
        self._all: dict[Path, bytes] | None = None

    @property
    def contents(self) -> dict[Path, bytes]:
        if self._all is None:
            self._all = _read_all(self.root)
        return self._all

    def find(self, name: str) -> Config | None:
        """As of `_Own`. A name that no file defines is no task, group or tag."""
        usual = usual_folder(name)
        if usual is not None and usual not in self._near:
            self._near[usual] = _read_all(usual)
        found = self._find_in(self._near[usual], name) if usual else None
        return found or self._find_in(self.contents, name)

    def _find_in(self, contents: Mapping[Path, bytes], name: str) -> Config | None:
        text = name.encode()
        word = re.compile(rb"(?<![\w.-])%s(?![\w.-])" % re.escape(text))
        # To look for the plain text first takes a tenth of the time.
        naming = sorted(path for path, content in contents.items() if text in content and word.search(content))
        if len(naming) > MOST_NAMING:
            raise UntoldError(f"{name} is in {len(naming):,} of lm-eval's files")
        tagged: list[str | None] = []
        for path in naming:
            is_task_file = path.suffix == ".yaml"
            try:
                config = _load_theirs(path)
            except UntoldError:
                if is_task_file:
                    raise
                # Beside files that others include there are tables and scripts.
                continue
            named = _name_of(config) if is_task_file else None
            if named == name:
                return config
            if name in _tags_of(config):
                tagged.append(named)
        return _group(name, [task for task in tagged if task]) if tagged else None


@cache
def _ours() -> _Own:
    return _Own(OURS, is_trusted=True)


@cache
def _theirs() -> _Theirs:
    return _Theirs()


def _describe(name: str, sources: list[_Own | _Theirs], depth: int, overrides: Config | None = None) -> TaskFile:
    if depth > DEEPEST:
        raise UntoldError(f"its groups are nested more than {DEEPEST} deep")
    config = next((found for source in sources if (found := source.find(name)) is not None), None)
    if config is None:
        raise NoTaskError(name)
    replaced = {key: config[key] for key in _OVERRIDDEN if key in config} | dict(overrides or {})
    if "group" in config and "class" not in config:
        return _describe_group(config, sources, depth, replaced)
    if "class" in config:
        raise UntoldError(f"{name} is a class of Python code")
    return _task_file({**config, **replaced})


def _describe_group(config: Config, sources: list[_Own | _Theirs], depth: int, overrides: Config) -> TaskFile:
    """What all members have in common; lm-eval's worker takes no others for a group."""
    members = config.get("task")
    described = set()
    for item in members if isinstance(members, list) else []:
        own = item if isinstance(item, dict) else {}
        inner = own.get("group", own.get("task")) if own else item
        replaced = {**overrides, **{key: own[key] for key in _OVERRIDDEN if key in own}}
        if isinstance(own.get("task"), list):
            described.add(_describe_group(own, sources, depth + 1, replaced))
            continue
        if not isinstance(inner, str):
            raise UntoldError("one of its tasks is written in a form that is not known here")
        try:
            described.add(_describe(inner, sources, depth + 1, replaced))
        except NoTaskError as error:
            raise UntoldError(f"it names {inner}, of which no file is found") from error
    alike = {(each.filters, each.scores, each.generates) for each in described}
    if len(alike) != 1:
        raise UntoldError("its tasks have no scores in common" if alike else "it names no tasks")
    asked, replies = {each.num_fewshot for each in described}, {each.reply_tok for each in described}
    shots, reply = (each.pop() if len(each) == 1 else None for each in (asked, replies))
    stops, shows_pictures = max(each.stops for each in described), any(each.shows_pictures for each in described)
    repeats = max(each.repeats for each in described)
    return described.pop()._replace(
        num_fewshot=shots, reply_tok=reply, stops=stops, shows_pictures=shows_pictures, repeats=repeats
    )


def _task_file(config: Config) -> TaskFile:
    listed, metrics, sent = config.get("filter_list"), config.get("metric_list"), config.get("generation_kwargs")
    options = sent if isinstance(sent, dict) else {}
    reply, until = options.get("max_gen_toks", options.get("max_tokens")), options.get("until")
    shots, repeats = config.get("num_fewshot"), config.get("repeats")
    return TaskFile(
        filters=(NO_FILTER,) if listed is None else tuple(_texts(listed, "name", "filters")),
        scores=_scores(metrics, is_scored_by_code="process_results" in config),
        generates=config.get("output_type", GENERATES) == GENERATES,
        num_fewshot=shots if type(shots) is int else None,
        reply_tok=reply if type(reply) is int else None,
        stops=len(until) if isinstance(until, list) else int(isinstance(until, str)),
        shows_pictures=config.get("doc_to_image") is not None,
        repeats=repeats if type(repeats) is int and repeats > 0 else 1,
    )


def _scores(metrics: object, *, is_scored_by_code: bool) -> tuple[str, ...] | None:
    """The names of the scores; None if lm-eval's code chooses them, by the kind of output."""
    if metrics is None:
        return None
    names = _texts(metrics, "metric", "scores")
    if is_scored_by_code and any(isinstance(name, _Function) for name in names):
        return None
    # lm-eval names a score by the function that makes it.
    return tuple(name.rpartition(".")[2] if isinstance(name, _Function) else str(name) for name in names)


def _texts(listed: object, key: str, what: str) -> list[str]:
    found = [item.get(key) for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    if not isinstance(listed, list) or len(found) != len(listed) or not all(isinstance(text, str) for text in found):
        raise UntoldError(f"its {what} are written in a form that is not known here")
    return [text for text in found if isinstance(text, str)]


def _name_of(config: Config) -> str | None:
    """The name that a file defines, as lm-eval's index has it; None if it defines none."""
    name = config.get("group") if "group" in config and "class" not in config else config.get("task")
    return name if isinstance(name, str) else None


def _group(tag: str, tasks: list[str]) -> Config:
    """A tag as a group of those of its tasks that say it themselves. The others have the same scores, or it is not measured."""
    return {"group": tag, "task": tasks}


def _tags_of(config: Config) -> set[str]:
    tags = config.get("tag")
    return {tag for tag in (tags if isinstance(tags, list) else [tags]) if isinstance(tag, str)}


# --- files


class _Function(str):
    """The name of a function, which is not looked up."""


class _Loader(yaml.SafeLoader):
    """Of a recipe's own files. What a short text repeats in itself may be more than any memory: no mappings are merged."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.constructor.ConstructorError(None, None, "mappings are merged", node.start_mark)


class _TrustedLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # it is there or not
    """Of lm-eval's files: ten times as fast, where libyaml is there."""


def _name_function(loader: Any, node: yaml.ScalarNode) -> _Function:
    return _Function(loader.construct_scalar(node))


_Loader.add_constructor("!function", _name_function)
_TrustedLoader.add_constructor("!function", _name_function)


def _walk(folder: Path) -> Iterator[Path]:
    """The plain files in a folder and below; links to folders are not followed. Raises OSError if one cannot be read."""

    def refuse(error: OSError) -> None:
        raise error

    for place, _, names in os.walk(folder, onerror=refuse):
        yield from (path for name in names if (path := Path(place, name)).is_file())


def _read_all(folder: Path) -> dict[Path, bytes]:
    """What stands in lm-eval's task files, and in those that they include, which may have any suffix."""
    return {path: path.read_bytes() for path in _walk(folder) if path.suffix not in _NOT_TASKS}


@cache
def _load_theirs(path: Path) -> Config:
    return _load(path, (tasks_folder(),), is_trusted=True)


def _load(path: Path, within: tuple[Path, ...], *, is_trusted: bool, seen: frozenset[Path] = frozenset()) -> dict[str, Any]:
    """The mapping in a file, over those that it includes. Raises UntoldError if a file is none, or outside of `within`."""
    try:
        file = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise UntoldError(f"{path.name!r} is no path of a file") from error
    if file in seen:
        raise UntoldError(f"{path.name} includes itself")
    if not any(file.is_relative_to(folder.resolve()) for folder in (*within, tasks_folder())):
        raise UntoldError(f"{path.name} is not in the folder of tasks")
    config = _parse(file, is_trusted=is_trusted)
    merged: dict[str, Any] = {}
    included = config.pop("include", [])
    for name in included if isinstance(included, list) else [included]:
        if not isinstance(name, str):
            raise UntoldError(f"{path.name} includes what is no file")
        inner = _load(file.parent / name, within, is_trusted=is_trusted, seen=seen | {file})
        merged |= {key: value for key, value in inner.items() if key != "task_list"}
    return merged | config


def _parse(file: Path, *, is_trusted: bool) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read() if is_trusted else opened.read(MOST_BYTES + 1)
        if not is_trusted and len(content) > MOST_BYTES:
            raise UntoldError(f"{file.name} is longer than {MOST_BYTES:,} bytes")
        # Both loaders make plain values alone; the name of a function stays a name.
        config = yaml.load(content, _TrustedLoader if is_trusted else _Loader)  # noqa: S506
    # For values that are not what their tags say, PyYAML also raises some internal errors of its code.
    except (OSError, yaml.YAMLError, ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
        raise UntoldError(f"{file.name} cannot be read as YAML") from error
    if not isinstance(config, dict):
        raise UntoldError(f"{file.name} is no task file that can be read here")
    return config
