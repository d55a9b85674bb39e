"""Which requests of a cell its server would refuse, by what its options and variables allow. No server need run for it.

The limits are those of vLLM 0.12 to 0.33, in its `sampling_params.py`, `entrypoints/openai`, `multimodal/media` and
`v1/engine/async_llm.py`. The length of prompts is checked where they are planned. A request's body has no limit in vLLM's
Python frontend.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from vllm_qualify.drift.finding import Finding
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.accuracy.blocks import largest_block
from vllm_qualify.evidence.accuracy.picture_limits import NO_LIMITS, PictureLimits
from vllm_qualify.evidence.accuracy.task_files import TaskFile
from vllm_qualify.plan.workload import num_concurrent
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.recipe.contract import Contract
from vllm_qualify.recipe.paths import Paths
from vllm_qualify.recipe.searches import Sweep
from vllm_qualify.recipe.serving import VLLM, ServerArguments, covers

# A variable that limits requests → the first version that reads it, and its value where it is not set.
VARIABLES = {
    "VLLM_MAX_N_SEQUENCES": ("0.19", 16_384),
    "VLLM_MAX_IMAGE_PIXELS": ("0.25", 178_956_970),
    "VLLM_MAX_STOP_STRINGS": ("0.28", 4),
    "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES": ("0.33", 715_827_880),
}
LOGPROBS, PICTURES, NO_PICTURES, UNDER_WAY = "max-logprobs", "limit-mm-per-prompt", "language-model-only", "max-num-queued-reqs"
# vLLM's count where `limit-mm-per-prompt` has other fields alone.
PICTURES_BY_DEFAULT = 999
# vLLM counts so many bytes for each pixel of a picture, whatever its form.
PIXEL_BYTES = 4
# Of a task's stop texts lm-eval sends so many in a chat; all of them in a completion.
CHAT_STOPS = 4
# What is asked for at most. The code that asks has them too, and takes a second to import.
PATHS_LOGPROBS, OTHER_LOGPROBS = 10, 1
PATHS_AT_ONCE, CONTRACT_AT_ONCE = 64, 64
CONTRACT_REPLIES, CONTRACT_STOPS = 2, 1
# What asks, and the recipe's key that says so.
THE_CONTRACT, THE_PATHS = ("the contract", "contract"), ("the stage paths", "paths")


class AskedTask(NamedTuple):
    """A task, with what lm-eval's files say of it, or None where they do not, and whether all runs ask it in blocks alone."""

    settings: Accuracy
    about: TaskFile | None
    in_blocks: bool

    def count_under_way(self, server: ServerPlan) -> int:
        """How many of its requests are under way at most. Where answers are compared, a question has several requests."""
        most = num_concurrent(self.settings, server)
        if self.about is None or not self.about.generates:
            return most
        return min(most, self.about.repeats * largest_block(self.settings.num_questions, sequential=self.in_blocks))


class Requests(NamedTuple):
    """What a cell asks of its server."""

    server: ServerPlan
    version: str
    contract: Contract | None
    paths: Paths | None
    scores_texts: bool
    tasks: Sequence[AskedTask]
    clients: int | None
    sweep: Sweep | None

    def wants(self, check: str) -> bool:
        """Whether the contract's check of this name is asked."""
        return self.contract is not None and f"contract_{check}" in {each.name for each in self.contract.checks}


class _Limit(NamedTuple):
    most: int
    option: str


class Use(NamedTuple):
    """How many are asked for, by what, and the recipe's key that says so."""

    wanted: int
    name: str
    place: str


class Refused(NamedTuple):
    """Requests that the server would refuse, and the recipe's key that asks for them."""

    finding: Finding
    place: str


def find_refused(asked: Requests) -> Iterator[Refused]:
    """The requests that the server would refuse, and what says so."""
    if asked.server.kind != VLLM:
        return
    arguments, server, version = asked.server.arguments, asked.server, asked.version
    limits: list[tuple[_Limit | None, Callable[[Requests], Iterator[Use]], str, str]] = [
        (_limit_of_option(arguments, LOGPROBS), _list_logprobs, "log-probability", "log-probabilities of each token"),
        (_limit_of_variable(server, version, "VLLM_MAX_STOP_STRINGS"), _list_stops, "stop text", "stop texts"),
        (_limit_of_variable(server, version, "VLLM_MAX_N_SEQUENCES"), _list_replies, "reply", "replies to one request"),
        (_limit_of_pictures(arguments), _list_pictures, "picture", "pictures in one request"),
        (_limit_of_option(arguments, UNDER_WAY), _list_under_way, "request", "requests under way at once"),
    ]
    for limit, list_uses, one, several in limits:
        for use in list_uses(asked) if limit else ():
            if limit and use.wanted > limit.most:
                many = f"{use.wanted:,} {several}, of which {limit.option} allows {limit.most:,}"
                told = f"{use.name} asks for {many if use.wanted > 1 else f'a {one}, and {limit.option} allows none'}"
                finding = Finding(kind="refused-request", name=limit.option, told=f"{told}: vLLM refuses that")
                yield Refused(finding, use.place)


def picture_limits(server: ServerPlan, version: str) -> PictureLimits:
    """How large the pictures of a request may be for a server."""
    if server.kind != VLLM:
        return NO_LIMITS
    each = _limit_of_variable(server, version, "VLLM_MAX_IMAGE_PIXELS")
    together = _limit_of_variable(server, version, "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES")
    # With 0 there is no limit.
    return PictureLimits(
        most_pixels=each.most if each and each.most > 0 else None,
        most_pixels_together=together.most // PIXEL_BYTES if together and together.most > 0 else None,
    )


# --- what is allowed


def _limit_of_option(arguments: ServerArguments, name: str) -> _Limit | None:
    """None if it has no limit, or one that only vLLM reads. A negative number of log-probabilities is all of them."""
    most = _read_count(arguments.get(name))
    return None if most is None else _Limit(most, name)


def _limit_of_variable(server: ServerPlan, version: str, name: str) -> _Limit | None:
    since, by_default = VARIABLES[name]
    if not covers(f">={since}", version):
        return None
    given = server.variables.get(name)
    most = by_default if given is None else _read_count(given)
    return None if most is None else _Limit(most, name)


def _limit_of_pictures(arguments: ServerArguments) -> _Limit | None:
    if arguments.get(NO_PICTURES) is True:
        return _Limit(0, NO_PICTURES)
    of_pictures = arguments.get(f"{PICTURES}.image", _read_mapping(arguments.get(PICTURES)).get("image"))
    if isinstance(of_pictures, dict):
        of_pictures = of_pictures.get("count", PICTURES_BY_DEFAULT)
    most = _read_count(arguments.get(f"{PICTURES}.image.count", of_pictures))
    return None if most is None else _Limit(most, PICTURES)


def _read_count(value: JsonValue) -> int | None:
    text = str(value)
    return int(text) if not isinstance(value, bool) and text.isascii() and text.isdecimal() and len(text) <= 12 else None


def _read_mapping(value: JsonValue) -> dict[str, JsonValue]:
    try:
        read = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        # vLLM refuses it as a value.
        return {}
    return read if isinstance(read, dict) else {}


# --- what is asked for


def _list_logprobs(asked: Requests) -> Iterator[Use]:
    if asked.wants("logprobs"):
        yield Use(OTHER_LOGPROBS, *THE_CONTRACT)
    if asked.paths:
        yield Use(PATHS_LOGPROBS, *THE_PATHS)
    if asked.scores_texts:
        yield Use(OTHER_LOGPROBS, "the stage likelihood", "likelihood")
    for settings, about, _ in asked.tasks:
        if about and not about.generates:
            yield Use(OTHER_LOGPROBS, settings.task, _place_of(settings))


def _list_stops(asked: Requests) -> Iterator[Use]:
    if asked.wants("stop"):
        yield Use(CONTRACT_STOPS, *THE_CONTRACT)
    for settings, about, _ in asked.tasks:
        of_task = about.stops if about and about.generates else 0
        stops = of_task if settings.stop is None else len(settings.stop)
        yield Use(min(stops, CHAT_STOPS) if settings.api == "chat" else stops, settings.task, _place_of(settings))


def _list_replies(asked: Requests) -> Iterator[Use]:
    if asked.wants("n") or asked.wants("seed"):
        yield Use(CONTRACT_REPLIES, *THE_CONTRACT)


def _list_pictures(asked: Requests) -> Iterator[Use]:
    if asked.wants("vision_two"):
        yield Use(2, "the contract's vision", "contract")
    for settings, about, _ in asked.tasks:
        if about and about.shows_pictures:
            yield Use(1, f"{settings.task}, at least,", _place_of(settings))


def _list_under_way(asked: Requests) -> Iterator[Use]:
    if asked.wants("many"):
        yield Use(CONTRACT_AT_ONCE, *THE_CONTRACT)
    for task in asked.tasks:
        yield Use(task.count_under_way(asked.server), task.settings.task, _place_of(task.settings))
    if asked.clients is not None:
        yield Use(asked.clients, "the load", "load")
        if asked.paths:
            yield Use(asked.paths.num_concurrent or min(asked.clients, PATHS_AT_ONCE), *THE_PATHS)
    if asked.sweep:
        yield from _list_of_sweep(asked.sweep, asked.server.most_requests or asked.clients)


def _list_of_sweep(sweep: Sweep, by_default: int | None) -> Iterator[Use]:
    """The curve asks for all its clients, a search for no more than so many."""
    yield Use(max(sweep.concurrencies, default=0), "the sweep", "sweep")
    if sweep.slo and "concurrency" in sweep.search:
        yield Use(sweep.most_concurrency or by_default or 0, "the sweep's search, at most,", "sweep")


def _place_of(settings: Accuracy) -> str:
    return f"accuracy.{settings.task}"
