"""What the worker changes inside lm-eval, or reads of it beside its documented interface.

A new version of lm-eval may move any of it. `tests/evidence/test_lm_eval_internals.py` names what moved.
"""

import copy
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from vllm_qualify.evidence.accuracy.letters import GENERATES, Member, RefusedError, config_hash
from vllm_qualify.evidence.accuracy.pictures import Pictures
from vllm_qualify.evidence.accuracy.task_files import DEEPEST, OURS, usual_folder
from vllm_qualify.recipe.values import TaskName

# The split of local solved examples, where the task has none of its own for them.
SHOTS = "shots"
# What names the split of a task's solved examples: the first one that it has.
SOLVED = ("fewshot_split", "training_split", "validation_split")
# What of a task's configuration says how it scores, and the filters that have no function of a task's own.
SCORING = ("output_type", "doc_to_target", "doc_to_choice", "metric_list", "filter_list", "repeats", "generation_kwargs")
PURE_FILTERS = ("regex", "take_first", "take_first_k", "majority_vote", "remove_whitespace", "lowercase", "uppercase")
# Some patterns take the square of a text's length: a publisher's text must not hold whoever scores it again for hours.
LONGEST_REPLY, LONGEST_FOUND = 1_000_000, 20_000


class MadeError(Exception):
    """lm-eval has made the prompts of a task, and must stop there."""


class Found(NamedTuple):
    """lm-eval's manager of task files, the names of a group's or a tag's members or that of the task, and which it is."""

    manager: Any
    names: list[str]
    is_group: bool


def find_task(task: str, folder: Path | None) -> Found | None:
    """Where there is a task, None if there is none. A file in `folder` takes precedence over lm-eval's own and this project's.

    Raises RefusedError if a group names tasks that are not there.
    """
    for manager, is_all in _open_managers(task, folder):
        if task not in manager.task_index:
            continue
        if task in manager.all_subtasks:
            return Found(manager, [task], is_group=False)
        names, tags = _list_members(manager, task)
        missing = [name for name in names if name not in manager.all_subtasks]
        # Other files may have more tasks of a tag.
        if is_all or not (missing or tags):
            _check_members(task, names, missing)
            return Found(manager, names, is_group=True)
    return None


def _open_managers(task: str, folder: Path | None) -> Iterator[tuple[Any, bool]]:
    """Managers of ever more files, and whether it has all that matter. To read all of lm-eval's 14,000 takes 11 s."""
    from lm_eval.tasks import TaskManager

    names, lacking, has_tags = [task], [task], False
    own_folder = [folder] if folder else []
    if folder:
        own = TaskManager(include_path=folder, include_defaults=False)
        yield own, False
        if task in own.all_groups:
            members, has_tags = _list_members(own, task)
            names += members
            lacking = [name for name in members if name not in own.all_subtasks]
    ours = TaskManager(include_path=OURS, include_defaults=False)
    if task in ours.task_index:
        yield ours, False
    if usual := sorted({path for path in map(usual_folder, names) if path}):
        yield TaskManager(include_path=[*usual, *own_folder], include_defaults=False), False
    # A name that stands in none of lm-eval's task files is no task, group or tag of lm-eval's.
    pattern = re.compile(rb"(?<![\w.-])(?:%s)(?![\w.-])" % b"|".join(re.escape(name.encode()) for name in lacking))
    are_theirs = has_tags or any(map(pattern.search, task_files()))
    yield TaskManager(include_path=[OURS, *own_folder], include_defaults=are_theirs), True


def task_files() -> Iterator[bytes]:
    """What stands in lm-eval's task files, and in those that they include, which may have any suffix."""
    import lm_eval.tasks

    files = (path for path in Path(lm_eval.tasks.__file__).parent.rglob("*") if path.suffix not in (".py", ".pyc", ".md"))
    return (path.read_bytes() for path in files if path.is_file())


def _list_members(manager: Any, group: str) -> tuple[list[str], bool]:
    """The names of the tasks in a group, in groups in it, and so on; and whether one of them comes by a tag."""
    names: list[str] = []
    tags = False

    def add(item: Any, depth: int) -> None:
        nonlocal tags
        if depth > DEEPEST:
            raise RefusedError(f"the groups in '{group}' are nested more than {DEEPEST} deep", "name its tasks themselves")
        if isinstance(item, dict) and "group" in item and item["group"] not in manager.task_index:
            for inner in _listed_tasks(item):
                add(inner, depth + 1)
            return
        name = item.get("group", item.get("task")) if isinstance(item, dict) else item
        entry = manager.task_index.get(name) if isinstance(name, str) else None
        if entry is None or name in manager.all_subtasks:
            names.append(str(name))
            return
        tags = tags or name in manager.all_tags
        for inner in _listed_tasks(entry.cfg or {}) if name in manager.all_groups else sorted(entry.tags):
            add(inner, depth + 1)

    add(group, 0)
    return names, tags


def _listed_tasks(config: dict[str, Any]) -> list[Any]:
    listed = config.get("task")
    return listed if isinstance(listed, list) else []


def _check_members(group: str, names: list[str], missing: list[str]) -> None:
    if missing:
        problem = f"the group '{group}' names {missing[0]}, which is no task"
        raise RefusedError(problem, "correct its name, or give it a file of its own")
    for name in names:
        try:
            TypeAdapter(TaskName).validate_python(name)
        except ValidationError as error:
            remedy = "name tasks by letters, digits, '.', '_' and '-'"
            raise RefusedError(f"the group '{group}' names {name!r}", remedy) from error
    if not names:
        raise RefusedError(f"the group '{group}' has no tasks", "name them in the group's file")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RefusedError(f"the group '{group}' has {twice} twice", "name each task once")


def load_tasks(found: Found, task: str) -> dict[str, Any]:
    """The task, or all members of the group in the order of their names.

    Raises RefusedError unless the group's score can be the mean over all its questions.
    """
    loaded = found.manager.load([task])
    tasks = dict(sorted(loaded["tasks"].items()))
    if not found.is_group:
        return tasks
    group = loaded["groups"].get(task)
    for each in (group.aggregate_metric_list if group else None) or []:
        if each.aggregation != "mean" or not each.weight_by_size:
            raise RefusedError(
                f"the group '{group.name}' does not score by the mean over all its questions: its {each.metric} has"
                f" aggregation {each.aggregation} and weight_by_size {str(each.weight_by_size).lower()}",
                "measure its tasks one by one, or write a group of your own into a task_folder",
            )
    (first, wanted), *others = ((name, scoring_of(member)) for name, member in tasks.items())
    for what, (name, scoring) in itertools.product(wanted, others):
        if scoring[what] != wanted[what]:
            raise RefusedError(
                f"the tasks of '{task}' have no score in common: {first} has the {what} {', '.join(wanted[what])},"
                f" and {name} {', '.join(scoring[what])}",
                "measure those that are alike as one group, in a file of your own in a task_folder",
            )
    return tasks


def scoring_of(task: Any) -> dict[str, list[str]]:
    """What all tasks of a group must have in common."""
    filters = sorted(each.name for each in task._filters)
    return {"metrics": sorted(task.aggregation()), "filters": filters, "kinds of output": [str(task.get_config("output_type"))]}


def local_data(config: dict[str, Any], test: str, shots: str | None) -> dict[str, Any]:
    """The part of a task's configuration that has it read local files, under the names of its own splits.

    `config` is the task's own, as its file and those that it includes say it. The names are kept, since they are part of the
    configuration's hash. A task that takes its examples from the split of its questions gets another split for `shots`.
    """
    asked = config.get("test_split") or config.get("validation_split") or "test"
    solved = [str(config[name]) for name in SOLVED if config.get(name)]
    lacks_own = not solved or solved[0] == asked
    own_split = {"fewshot_split": SHOTS} if shots and config.get("num_fewshot") != 0 and lacks_own else {}
    others = sorted({*solved} - {asked} | {*own_split.values()})
    return own_split | {"dataset_kwargs": {"data_files": {asked: test} | dict.fromkeys(others, shots or test)}}


def source_of(task: Any) -> tuple[Any, ...]:
    return tuple(task.get_config(name) for name in ("dataset_path", "dataset_name", "dataset_kwargs"))


def splits_of(task: Any) -> tuple[str, str | None]:
    """The split of the questions, and that of the solved examples, if the task draws any from its data."""
    asked = task.get_config("test_split") or task.get_config("validation_split")
    solved = map(task.get_config, SOLVED) if task.fewshot_cfg.samples is None else ()
    return asked, next(filter(None, solved), None)


def needs_shots(task: Any, num_fewshot: int) -> bool:
    """Whether prompts have solved examples that are not the task's own. A task that says 0 itself keeps it."""
    return num_fewshot > 0 and task.get_config("num_fewshot") != 0 and task.fewshot_cfg.samples is None


def extra_of(error: Exception) -> str | None:
    """The extra of lm-eval that has the package which an import did not find, None if none has."""
    if named := re.search(r"lm[-_]eval\[(\w+)\]", str(error)):
        return named[1]

    def name_module(package: str) -> str:
        return re.split(r"[^A-Za-z0-9_.-]", package)[0].lower().replace("-", "_")

    wanted = [line.partition("; extra == ") for line in metadata.requires("lm-eval") or []]
    module = name_module(getattr(error, "name", None) or "")
    return next((extra.strip("\"'") for package, _, extra in wanted if extra and name_module(package) == module), None)


class Again(NamedTuple):
    """A question scored again, as lm-eval writes it: the answer that is wanted, what a filter found, and the scores."""

    target: Any
    found: list[Any]
    scores: dict[str, Any]


class TooLongError(Exception):
    """A text is too long to be scored again: some of lm-eval's patterns take the square of its length."""


class OwnScoring:
    """How one of lm-eval's tasks scores a reply: by its own filters, its own target and its own exact match.

    As lm-eval does, it learns from the task's first question, `document`, whether a question has several answers.
    """

    def __init__(self, config: dict[str, Any], document: dict[str, Any]) -> None:
        from lm_eval.api.task import ConfigurableTask

        class Scoring(ConfigurableTask):  # type: ignore[misc]  # lm-eval has no types
            def download(self, *_: Any, **__: Any) -> None:
                """It needs no data: what it scores is given to it."""
                self.dataset = {"test": _Questions([document])}

        keep_templates()
        with _in_plain_words():
            self._task = Scoring(config=copy.deepcopy(config))

    def score(self, document: dict[str, Any], replies: list[list[str]], name: str) -> Again:
        """Score a question's replies by the filter of this name. Raises one of UNUSABLE if it cannot, and TooLongError."""
        from lm_eval.api.instance import Instance

        named = next((each for each in self._task._filters if each.name == name), None)
        if named is None:
            raise ValueError("lm-eval's task has no such filter")
        _check_length(replies, LONGEST_REPLY)
        with _in_plain_words():
            requests = [
                Instance(request_type=GENERATES, doc=document, arguments=(), idx=place, resps=each)
                for place, each in enumerate(replies)
            ]
            named.apply(requests)
            found = [request.filtered_resps[name] for request in requests]
            _check_length(found, LONGEST_FOUND)
            target, scores = self._task.doc_to_target(document), self._task.process_results(document, found)
        # As it is once it was written and read.
        return Again(*json.loads(json.dumps([target, found, {metric: float(value) for metric, value in scores.items()}])))


class _Questions(list[dict[str, Any]]):
    """A split of data, as far as a task reads one that only scores."""

    @property
    def features(self) -> dict[str, Any]:
        return self[0]


@contextmanager
def _in_plain_words() -> Iterator[None]:
    """Within the block, whatever a task cannot read is a ValueError."""
    try:
        yield
    except TooLongError:
        raise
    except Exception as error:
        # A publisher's values meet lm-eval's code and templates: no kind of error is a sample that may count.
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _check_length(texts: object, longest: int) -> None:
    for text in texts if isinstance(texts, list) else []:
        _check_length(text, longest)
    if isinstance(texts, str) and len(texts) > longest:
        raise TooLongError(f"a text of {len(texts):,} characters, and {longest:,} are scored again at most")


@lru_cache(maxsize=256)
def own_scoring(name: str) -> dict[str, Any] | None:
    """How lm-eval's own task of this name scores, as its configuration; None if that is not by filters and exact match alone.

    A function of the task's own is not called here: some run what the model wrote.
    """
    from lm_eval.tasks import TaskManager

    folder = usual_folder(name)
    index = TaskManager(include_path=folder, include_defaults=False).task_index if folder else {}
    config = (index[name].cfg if name in index else None) or {}
    kept = {key: config[key] for key in SCORING if config.get(key) is not None}
    metrics, filters = kept.get("metric_list") or [{}], kept.get("filter_list") or []
    is_pure = (
        kept.get("output_type") == GENERATES
        and config.get("process_results") is None
        and all(each.get("metric") == "exact_match" and "hf_evaluate" not in each for each in metrics)
        and all(each.get("function") in PURE_FILTERS for ensemble in filters for each in ensemble["filter"])
        # lm-eval gives a function that was not loaded as the path of its file.
        and not str(kept.get("doc_to_target", "/")).startswith("/")
        and not str(kept.get("doc_to_choice", "")).startswith("/")
    )
    return kept | {"task": name, "test_split": "test", "doc_to_text": "", "num_fewshot": 0} if is_pure else None


def record_of(task: Any) -> dict[str, Any]:
    """The task's configuration as lm-eval writes it into its results."""
    from lm_eval.utils import handle_non_serializable

    record: dict[str, Any] = json.loads(json.dumps(dict(task.dump_config()), default=handle_non_serializable))
    return record


def describe_member(name: str, task: Any) -> Member:
    kept = {"task_version": str(task.VERSION), "config_hash": config_hash(record_of(task))}
    return Member(name=name, questions=len(task.eval_docs), output_type=task.get_config("output_type"), **kept)


@cache
def keep_templates() -> None:
    """Keep compiled templates: lm-eval compiles a task's templates again for each question, while the server idles."""
    from lm_eval.utils import env

    env.from_string = lru_cache(maxsize=256)(env.from_string)


def keep_encoded(data: Any) -> Any:
    """A split of a data set, with each picture as the bytes of its file."""
    from datasets import Image

    for name, feature in (data.features or {}).items():
        if isinstance(feature, Image):
            data = data.cast_column(name, Image(decode=False))
    return data


def keep_questions(task: Any, pictures: Pictures | None = None) -> None:
    """Keep the questions: some tasks prepare them again, with shuffled choices, at each access.

    With `pictures`, which get them, the questions name their pictures. Raises KeyError if the data lacks a field with pictures;
    UnusablePictureError if one is none.
    """
    if pictures:
        split, shown = splits_of(task)[0], task.get_config("doc_to_image")
        lacking = [name for name in shown if name not in task.features] if isinstance(shown, list) else []
        if lacking:
            raise KeyError(lacking[0])
        task.dataset[split] = keep_encoded(task.dataset[split])
    questions = list(pictures.taken_from(task.eval_docs)) if pictures else task.eval_docs
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
                whole.setdefault(request.doc_id, []).append(_name_pictures(pictures, request) if pictures else request)
        if not samples:
            raise MadeError
        task._instances = [
            dataclasses.replace(request, metadata=(request.task_name, place, request.repeats), resps=[], filtered_resps={})
            for place, question in enumerate(samples)
            for request in whole[question]
        ]

    task.build_all_requests = build_block


def _name_pictures(pictures: Pictures, request: Any) -> Any:
    """The request of a chat, with its pictures named in its messages and not beside them."""
    chat, settings, beside = request.arguments
    prompt = chat._replace(prompt=pictures.prompt(chat.prompt, beside["visual"]))
    return dataclasses.replace(request, arguments=(prompt, settings))


def model_without_server() -> Any:
    """A model of lm-eval that answers nothing of use: for prompts that no server is needed to make."""
    from lm_eval.api.registry import get_model

    return get_model("dummy")()


def keep_tokens(model: Any) -> None:
    """Keep the tokens of prompts: all choices of a question share its prompt, and each call is a request to the server."""
    if model.tokenizer is not None:
        model.tokenizer.encode = lru_cache(maxsize=64)(model.tokenizer.encode)


def change_requests(model: Any, change: Callable[[Any], tuple[Any, dict[str, Any]]]) -> None:
    """Let `change` find for each prompt what is sent in its place, and further fields of the request.

    The last change comes first: it sees the prompt as lm-eval hashes it.
    """
    make = model._create_payload

    def make_changed(messages: Any, **named: Any) -> Any:
        sent, fields = change(messages)
        return make(sent, **named) | fields

    model._create_payload = make_changed


def order_requests(model: Any, order: Callable[[int], list[int]]) -> None:
    """Let `order` say in which order so many requests are sent: lm-eval sends the longest first, in every run alike.

    One that asks for one request at a time keeps lm-eval's order.
    """
    ask = model.get_batched_requests

    async def ask_in_order(requests: list[Any], cache_keys: list[Any], **named: Any) -> list[Any]:
        places = order(len(requests))
        replies = await ask([requests[place] for place in places], [cache_keys[place] for place in places], **named)
        by_place = dict(zip(places, replies, strict=True))
        return [by_place[place] for place in range(len(requests))]

    model.get_batched_requests = ask_in_order


def says_tools(metadata: object) -> bool:
    """Whether a task's `metadata`, as its file or lm-eval's results have it, says that it calls tools."""
    return isinstance(metadata, dict) and metadata.get("calls_tools") is True


def read_replies(model: Any, read: Callable[[str, dict[str, Any], str | None], str | None]) -> None:
    """Let `read` make each answer: of the prompt that lm-eval hashes, the choice in the reply, and lm-eval's text of it."""
    make, parse_generations = model._create_payload, model.parse_generations
    # Requests under way at one time are asyncio's tasks, and each of them has a context of its own.
    prompt: ContextVar[str] = ContextVar("prompt")

    def keep_prompt(messages: Any, **named: Any) -> Any:
        prompt.set(messages if isinstance(messages, str) else json.dumps(messages, ensure_ascii=False))
        return make(messages, **named)

    def read_choices(outputs: Any, **named: Any) -> Any:
        texts = parse_generations(outputs=outputs, **named)
        choices = _read_choices(outputs if isinstance(outputs, list) else [outputs])
        if len(choices) != len(texts):
            return texts
        return [read(prompt.get(), choice, text) for choice, text in zip(choices, texts, strict=True)]

    model._create_payload, model.parse_generations = keep_prompt, read_choices


def _read_choices(replies: list[Any]) -> list[dict[str, Any]]:
    """The choices of replies, each reply's in their order. None if one has another form: its answer is empty.

    The only choice of a reply has its `usage` too.
    """
    found: list[dict[str, Any]] = []
    try:
        for reply in replies:
            choices = sorted(reply["choices"], key=lambda each: each["index"])
            found += [choice | ({"usage": reply.get("usage")} if len(choices) == 1 else {}) for choice in choices]
    except (LookupError, TypeError):
        return []
    return found


class _Staying:
    """A session of aiohttp that follows no redirect."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def post(self, *positional: Any, **named: Any) -> Any:
        return self._session.post(*positional, allow_redirects=False, **named)


def refuse_redirects(model: Any, url: str) -> None:
    """See that the model's server leads lm-eval nowhere: this machine may reach addresses that the server may not.

    `url` is the server's. From other servers, such as the hub, `requests` goes on as before.
    """
    import requests

    target_of, call_at_once = requests.Session.get_redirect_target, model.amodel_call

    def get_redirect_target(session: Any, answer: Any) -> Any:
        return None if answer.url.startswith(f"{url}/") else target_of(session, answer)

    async def call_here(*positional: Any, session: Any, **named: Any) -> Any:
        return await call_at_once(*positional, session=_Staying(session), **named)

    # Its types are of a method that nobody replaces.
    requests.Session.get_redirect_target = get_redirect_target  # type: ignore[method-assign,assignment]
    model.amodel_call = call_here


def send_agent(agent: str) -> None:
    """Let all requests have this `User-Agent`, also those of tokenizers that ask the server. The hub's client has its own."""
    from aiohttp import client_reqrep
    from requests import utils

    utils.default_user_agent = lambda *_: agent
    # It is a name of another module there, which mypy does not take for its own.
    client_reqrep.SERVER_SOFTWARE = agent  # type: ignore[attr-defined]


def seed_language_detection(seed: int) -> None:
    """Let ifeval score a reply the same every time: langdetect draws at random, and lm-eval seeds everything but it."""
    # It is installed with lm-eval's extra for ifeval alone.
    if find_spec("langdetect"):
        import_module("langdetect").DetectorFactory.seed = seed


def send_no_key(model: Any) -> None:
    """Let the model's requests have no `Authorization`: lm-eval sends the word `none` where there is no key."""
    model.header = {}


def count_failed(model: Any, count: Callable[[int], None]) -> None:
    """Count the calls that do not return: lm-eval asks again after each, and keeps only the last reply.

    `count` gets 1 when a call begins, and -1 when it returns.
    """
    call, call_at_once = model.model_call, model.amodel_call

    def count_call(*positional: Any, **named: Any) -> Any:
        count(1)
        reply = call(*positional, **named)
        count(-1)
        return reply

    async def count_call_at_once(*positional: Any, **named: Any) -> Any:
        count(1)
        reply = await call_at_once(*positional, **named)
        count(-1)
        return reply

    model.model_call, model.amodel_call = count_call, count_call_at_once
