"""What the worker changes inside lm-eval, or reads of it beside its documented interface.

A new version of lm-eval may move any of it. `tests/evidence/test_lm_eval_internals.py` names what moved.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from vllm_qualify.evidence.members import is_task_name
from vllm_qualify.evidence.pictures import Pictures

# Task files of this project. They go before lm-eval's, and those of a recipe's own folder before them.
OURS = Path(__file__).parent / "tools" / "tasks"
# The split of local solved examples, where the task has none of its own for them.
SHOTS = "shots"
# Groups in groups; lm-eval has three levels.
DEEPEST = 10


class MadeError(Exception):
    """lm-eval has made the prompts of a task, and must stop there."""


class UnusableGroupError(Exception):
    """A group that cannot be one task: why, and the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


class Found(NamedTuple):
    """lm-eval's manager of task files, the names of a group's or a tag's members or that of the task, and which it is."""

    manager: Any
    names: list[str]
    is_group: bool


def find(task: str, folder: Path | None) -> Found | None:
    """Where there is a task, None if there is none. A file in `folder` takes precedence over lm-eval's own and this project's.

    Raises UnusableGroupError if a group names tasks that are not there.
    """
    for manager, is_all in _managers(task, folder):
        if task not in manager.task_index:
            continue
        if task in manager.all_subtasks:
            return Found(manager, [task], is_group=False)
        names, tags = _members(manager, task)
        missing = [name for name in names if name not in manager.all_subtasks]
        # Other files may have more tasks of a tag.
        if is_all or not (missing or tags):
            _check_members(task, names, missing)
            return Found(manager, names, is_group=True)
    return None


def _managers(task: str, folder: Path | None) -> Iterator[tuple[Any, bool]]:
    """Managers of ever more files, and whether it has all that matter. To read all of lm-eval's 14,000 takes 11 s."""
    from lm_eval.tasks import TaskManager

    names, lacking, has_tags = [task], [task], False
    if folder:
        own = TaskManager(include_path=folder, include_defaults=False)
        yield own, False
        if task in own.all_groups:
            members, has_tags = _members(own, task)
            names += members
            lacking = [name for name in members if name not in own.all_subtasks]
    ours = TaskManager(include_path=OURS, include_defaults=False)
    if task in ours.task_index:
        yield ours, False
    if usual := sorted({path for path in map(_usual_folder, names) if path}):
        yield TaskManager(include_path=[*usual, *([folder] if folder else [])], include_defaults=False), False
    are_theirs = has_tags or _is_any_written(lacking)
    yield TaskManager(include_path=[OURS, *([folder] if folder else [])], include_defaults=are_theirs), True


def _is_any_written(names: list[str]) -> bool:
    """Whether one of the names stands in any of lm-eval's task files. Else none is a task, group or tag of lm-eval's."""
    pattern = re.compile(rb"(?<![\w.-])(?:%s)(?![\w.-])" % b"|".join(re.escape(name.encode()) for name in names))
    return any(pattern.search(text) for text in task_files())


def task_files() -> Iterator[bytes]:
    """What stands in lm-eval's task files, and in those that they include, which may have any suffix."""
    import lm_eval.tasks

    files = (path for path in Path(lm_eval.tasks.__file__).parent.rglob("*") if path.suffix not in (".py", ".pyc", ".md"))
    return (path.read_bytes() for path in files if path.is_file())


def _usual_folder(task: str) -> Path | None:
    """lm-eval's folder with the longest name with which the task's begins, as gsm8k for gsm8k_cot, and aime for aime25."""
    import lm_eval.tasks

    words = task.split("_")
    folder = Path(lm_eval.tasks.__file__).parent
    begins = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    names = (name for begin in begins for name in (begin, begin.rstrip("0123456789")) if name)
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def _members(manager: Any, group: str) -> tuple[list[str], bool]:
    """The names of the tasks in a group, in groups in it, and so on; and whether one of them comes by a tag."""
    names: list[str] = []
    tags = False

    def add(item: Any, depth: int) -> None:
        nonlocal tags
        if depth > DEEPEST:
            raise UnusableGroupError(
                f"the groups in '{group}' are nested more than {DEEPEST} deep", "name its tasks themselves"
            )
        if isinstance(item, dict) and "group" in item and item["group"] not in manager.task_index:
            for inner in _listed(item):
                add(inner, depth + 1)
            return
        name = item.get("group", item.get("task")) if isinstance(item, dict) else item
        entry = manager.task_index.get(name) if isinstance(name, str) else None
        if entry is None or name in manager.all_subtasks:
            names.append(str(name))
            return
        tags = tags or name in manager.all_tags
        for inner in _listed(entry.cfg or {}) if name in manager.all_groups else sorted(entry.tags):
            add(inner, depth + 1)

    add(group, 0)
    return names, tags


def _listed(config: dict[str, Any]) -> list[Any]:
    listed = config.get("task")
    return listed if isinstance(listed, list) else []


def _check_members(group: str, names: list[str], missing: list[str]) -> None:
    if missing:
        raise UnusableGroupError(
            f"the group '{group}' names {missing[0]}, which is no task", "correct its name, or give it a file of its own"
        )
    if odd := next((name for name in names if not is_task_name(name)), None):
        raise UnusableGroupError(f"the group '{group}' names {odd!r}", "name tasks by letters, digits, '.', '_' and '-'")
    if not names:
        raise UnusableGroupError(f"the group '{group}' has no tasks", "name them in the group's file")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UnusableGroupError(f"the group '{group}' has {twice} twice", "name each task once")


def load(found: Found, task: str) -> dict[str, Any]:
    """The task, or all members of the group in the order of their names.

    Raises UnusableGroupError unless the group's score can be the mean over all its questions.
    """
    loaded = found.manager.load([task])
    tasks = dict(sorted(loaded["tasks"].items()))
    if found.is_group:
        _check_mean(loaded["groups"].get(task))
        for what, of in (("metrics", _metrics), ("filters", _filters), ("kinds of output", _output_type)):
            _check_same(task, tasks, what, of)
    return tasks


def _check_mean(group: Any) -> None:
    """Check that lm-eval's own score of the group, if it has one, is the mean over all questions."""
    for each in (group.aggregate_metric_list if group else None) or []:
        if each.aggregation != "mean" or not each.weight_by_size:
            raise UnusableGroupError(
                f"the group '{group.name}' does not score by the mean over all its questions: its {each.metric} has"
                f" aggregation {each.aggregation} and weight_by_size {str(each.weight_by_size).lower()}",
                "measure its tasks one by one, or write a group of your own into a task_folder",
            )


def _check_same(group: str, tasks: dict[str, Any], what: str, of: Callable[[Any], list[str]]) -> None:
    (first, wanted), *others = ((name, of(task)) for name, task in tasks.items())
    for name, found in others:
        if found != wanted:
            raise UnusableGroupError(
                f"the tasks of '{group}' have no score in common: {first} has the {what} {', '.join(wanted)},"
                f" and {name} {', '.join(found)}",
                "measure those that are alike as one group, in a file of your own in a task_folder",
            )


def _metrics(task: Any) -> list[str]:
    return sorted(task.aggregation())


def _filters(task: Any) -> list[str]:
    return sorted(each.name for each in task._filters)


def _output_type(task: Any) -> list[str]:
    return [str(task.get_config("output_type"))]


def local_data(config: dict[str, Any], test: str, shots: str | None) -> dict[str, Any]:
    """The part of a task's configuration that has it read local files, under the names of its own splits.

    `config` is the task's own, as its file and those that it includes say it. The names are kept, since they are part of the
    configuration's hash. A task that takes its examples from the split of its questions gets another split for `shots`.
    """
    asked = config.get("test_split") or config.get("validation_split") or "test"
    solved = {str(config[name]) for name in ("fewshot_split", "training_split", "validation_split") if config.get(name)} - {
        asked
    }
    source = next((config[name] for name in ("fewshot_split", "training_split", "validation_split") if config.get(name)), asked)
    own_split = {"fewshot_split": SHOTS} if shots and config.get("num_fewshot") != 0 and source == asked else {}
    files = {asked: test} | dict.fromkeys(sorted(solved | {*own_split.values()}), shots or test)
    return own_split | {"dataset_kwargs": {"data_files": files}}


def source_of(task: Any) -> tuple[Any, ...]:
    """Where the task's data comes from."""
    return tuple(task.get_config(name) for name in ("dataset_path", "dataset_name", "dataset_kwargs"))


def splits_of(task: Any) -> tuple[str, str | None]:
    """The split of the questions, and that of the solved examples, if the task draws any from its data."""
    asked = task.get_config("test_split") or task.get_config("validation_split")
    named = [task.get_config(name) for name in ("fewshot_split", "training_split", "validation_split")]
    return asked, next((split for split in named if split), None) if task.fewshot_cfg.samples is None else None


def needs_shots(task: Any, num_fewshot: int) -> bool:
    """Whether prompts have solved examples that are not the task's own. A task that says 0 itself keeps it."""
    return num_fewshot > 0 and task.get_config("num_fewshot") != 0 and task.fewshot_cfg.samples is None


def extra_of(error: Exception) -> str | None:
    """The extra of lm-eval that has the package which an import did not find, None if none has."""
    if named := re.search(r"lm[-_]eval\[(\w+)\]", str(error)):
        return named[1]
    wanted = [line.partition("; extra == ") for line in metadata.requires("lm-eval") or []]
    module = _plain(getattr(error, "name", None) or "")
    return next((extra.strip("\"'") for package, _, extra in wanted if extra and _plain(package) == module), None)


def _plain(package: str) -> str:
    """A package's name without its version and extras, as a module would be named."""
    return re.split(r"[^A-Za-z0-9_.-]", package)[0].lower().replace("-", "_")


def record_of(task: Any) -> dict[str, Any]:
    """The task's configuration as lm-eval writes it into its results."""
    from lm_eval.utils import handle_non_serializable

    record: dict[str, Any] = json.loads(json.dumps(dict(task.dump_config()), default=handle_non_serializable))
    return record


def version_of(task: Any) -> str:
    return str(task.VERSION)


def keep_templates() -> None:
    """Keep compiled templates: lm-eval compiles a task's templates again for each question, while the server idles."""
    from lm_eval.utils import env

    env.from_string = lru_cache(maxsize=256)(env.from_string)


def keep_questions(task: Any) -> None:
    """Keep the questions: some tasks prepare them again, with shuffled choices, at each access."""
    questions = task.eval_docs
    setattr(task, "test_docs" if task.has_test_docs() else "validation_docs", lambda: questions)


def has_pictures(task: Any) -> bool:
    return task.get_config("doc_to_image") is not None


def has_sounds(task: Any) -> bool:
    return task.get_config("doc_to_audio") is not None


def undecoded(data: Any) -> Any:
    """A split of a data set, with each picture as the bytes of its file."""
    from datasets import Image

    for name, feature in (data.features or {}).items():
        if isinstance(feature, Image):
            data = data.cast_column(name, Image(decode=False))
    return data


def take_pictures(task: Any, pictures: Pictures) -> None:
    """Have the task's questions name their pictures, which go to `pictures`. It must come before `keep_questions`.

    Raises KeyError if the data lacks a field with pictures; UnusablePictureError if one is none.
    """
    split = task.get_config("test_split") or task.get_config("validation_split")
    shown = task.get_config("doc_to_image")
    lacking = [name for name in shown if name not in task.features] if isinstance(shown, list) else []
    if lacking:
        raise KeyError(lacking[0])
    task.dataset[split] = undecoded(task.dataset[split])
    questions = list(pictures.taken_from(task.eval_docs))
    setattr(task, "test_docs" if task.has_test_docs() else "validation_docs", lambda: questions)


def keep_prompts(task: Any, pictures: Pictures | None = None) -> None:
    """Give each question the prompt that it has when lm-eval asks the whole task. Without questions it raises MadeError.

    lm-eval draws the examples of the prompts one after another. If it drew them for one block alone, they would depend on the
    block. Prompts with `pictures` name them in the messages.
    """
    build = task.build_all_requests
    whole: dict[int, list[Any]] = {}

    def build_block(*, samples: list[int], **others: Any) -> None:
        if not whole:
            build(samples=None, **others)
            for request in task.instances:
                whole.setdefault(request.doc_id, []).append(_naming(pictures, request) if pictures else request)
        if not samples:
            raise MadeError
        task._instances = [
            dataclasses.replace(request, metadata=(request.task_name, place, request.repeats), resps=[], filtered_resps={})
            for place, question in enumerate(samples)
            for request in whole[question]
        ]

    task.build_all_requests = build_block


def _naming(pictures: Pictures, request: Any) -> Any:
    """The request of a chat, with its pictures named in its messages and not beside them."""
    chat, settings, beside = request.arguments
    prompt = chat._replace(prompt=pictures.prompt(chat.prompt, beside["visual"]))
    return dataclasses.replace(request, arguments=(prompt, settings))


def send_pictures(model: Any, pictures: Pictures) -> None:
    """Send the pictures that the messages name. It must come first: what else reads the messages reads the names."""
    make = model._create_payload
    model._create_payload = lambda messages, **named: make(pictures.put_into(messages), **named)


def model_without_server() -> Any:
    """A model of lm-eval that answers nothing of use: for prompts that no server is needed to make."""
    from lm_eval.api.registry import get_model

    return get_model("dummy")()


def keep_tokens(model: Any) -> None:
    """Keep the tokens of prompts: all choices of a question share its prompt, and each call is a request to the server."""
    if model.tokenizer is not None:
        model.tokenizer.encode = lru_cache(maxsize=64)(model.tokenizer.encode)


def seed_requests(model: Any, seed_of: Callable[[Any], int]) -> None:
    """Give each request the seed that `seed_of` finds for its prompt.

    lm-eval sends one seed with all requests. Then a question would get the same answer again, and what chance does to one
    question it would do to the others.
    """
    make = model._create_payload

    def seeded(messages: Any, **named: Any) -> Any:
        return make(messages, **named) | {"seed": seed_of(messages)}

    model._create_payload = seeded


def calls_tools(task: Any) -> bool:
    """Whether the prompts of a task have tools, and its answers are calls of them."""
    return says_tools(task.get_config("metadata"))


def says_tools(metadata: object) -> bool:
    """Whether a task's `metadata`, as its file or lm-eval's results have it, says that it calls tools."""
    return isinstance(metadata, dict) and metadata.get("calls_tools") is True


def send_tools(model: Any, request_of: Callable[[Any], tuple[Any, Any]]) -> None:
    """Send with each request the messages and tools that `request_of` finds in its prompt. The model chooses what to call."""
    make = model._create_payload

    def with_tools(messages: Any, **named: Any) -> Any:
        said, tools = request_of(messages)
        return make(said, **named) | {"tools": tools, "tool_choice": "auto"}

    model._create_payload = with_tools


def read_replies(model: Any, read: Callable[[str, dict[str, Any], str | None], str | None]) -> None:
    """Let `read` make each answer: of the prompt that lm-eval hashes, the choice in the reply, and lm-eval's text of it."""
    make, parse_generations = model._create_payload, model.parse_generations
    # Requests under way at one time are asyncio's tasks, and each of them has a context of its own.
    prompt: ContextVar[str] = ContextVar("prompt")

    def made(messages: Any, **named: Any) -> Any:
        prompt.set(messages if isinstance(messages, str) else json.dumps(messages, ensure_ascii=False))
        return make(messages, **named)

    def parsed(outputs: Any, **named: Any) -> Any:
        texts = parse_generations(outputs=outputs, **named)
        choices = _choices(outputs if isinstance(outputs, list) else [outputs])
        if len(choices) != len(texts):
            return texts
        return [read(prompt.get(), choice, text) for choice, text in zip(choices, texts, strict=True)]

    model._create_payload, model.parse_generations = made, parsed


def _choices(replies: list[Any]) -> list[dict[str, Any]]:
    """The choices of replies, each reply's in their order. None if one has another form: its answer is empty.

    The only choice of a reply has its `usage` too.
    """
    try:
        chosen = [(reply, sorted(reply["choices"], key=lambda each: each["index"])) for reply in replies]
        return [choice | _usage(reply, len(choices)) for reply, choices in chosen for choice in choices]
    except (LookupError, TypeError):
        return []


def _usage(reply: dict[str, Any], choices: int) -> dict[str, Any]:
    return {"usage": reply.get("usage")} if choices == 1 else {}


def count_failed(model: Any, count: Callable[[int], None]) -> None:
    """Count the calls that do not return: lm-eval asks again after each, and keeps only the last reply.

    `count` gets 1 when a call begins, and -1 when it returns.
    """
    call, call_at_once = model.model_call, model.amodel_call

    def counted(*given: Any, **named: Any) -> Any:
        count(1)
        reply = call(*given, **named)
        count(-1)
        return reply

    async def counted_at_once(*given: Any, **named: Any) -> Any:
        count(1)
        reply = await call_at_once(*given, **named)
        count(-1)
        return reply

    model.model_call, model.amodel_call = counted, counted_at_once
