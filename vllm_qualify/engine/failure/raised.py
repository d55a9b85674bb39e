"""An exception with words that nobody knows, decided by where it was raised: by the families of that place. Pure."""

import re
from collections.abc import Iterable
from itertools import islice

from vllm_qualify.engine.failure.families import Family, decide
from vllm_qualify.engine.failure.messages import Message
from vllm_qualify.engine.failure.package_families import decide_package

_FRAME = re.compile(r'  File "(?P<path>[^"\n]{1,500})", line \d')
_OF_PACKAGE = re.compile(
    r".*/(?:site|dist)-packages/(?P<package>vllm|transformers|huggingface_hub|safetensors|triton|flashinfer|torch)/(?P<file>.+)"
)
_OF_SOURCES = re.compile(
    r".*/(?P<package>vllm)/(?P<file>(?:v1|config|engine|model_executor|worker|executor|lora|entrypoints)[/.].+)"
)
# Where one process tells of another one's end.
_OF_PARENTS = re.compile(
    r"^(?:v1/(?:engine/(?!core\.py)|executor/|utils)|engine/(?!arg_utils)|executor/|entrypoints/|worker/worker_base)"
)
_CLASS = re.compile(r"^(?:[\w.]{1,200}\.)?(?P<name>[A-Z]\w{1,80})(?:: (?P<words>.*))?$")
# What a check raises. Whatever else is raised was not foreseen.
_OF_CHECKS = ("ValueError", "AssertionError", "NotImplementedError", "RuntimeError", "OSError", "Exception", "ImportError")
_OF_TENSORS = re.compile(r"\btensors?\b(?! parallel)|\bdimension|\bshapes?\b|\bdtypes?\b|->", re.I)
_MOST_LINES_BACK = 60
_MOST_CAUSES = 100


def find_raised(lines: list[str], telling: list[str], causes: Iterable[int]) -> tuple[int, Message] | None:
    """The first of the exceptions whose place in the source a family decides, and what it means."""
    for index in islice(causes, _MOST_CAUSES):
        said = _CLASS.match(telling[index])
        path = _find_path(lines, index) if said else None
        message = _decide_place(path, said["name"], said["words"] or "") if said and path else None
        if message:
            return index, message
    return None


def _find_path(lines: list[str], index: int) -> str | None:
    """The file of the traceback's last frame before the exception."""
    back = lines[max(0, index - _MOST_LINES_BACK) : index]
    return next((frame["path"] for line in reversed(back) if (frame := _FRAME.search(line[:1000]))), None)


def _decide_place(path: str, name: str, words: str) -> Message | None:
    place = _OF_PACKAGE.match(path) or _OF_SOURCES.match(path)
    if place is None or name not in _OF_CHECKS:
        return None
    package, file = place["package"], place["file"]
    if package == "vllm" and _OF_PARENTS.match(file):
        return None
    family = decide(file, words) if package == "vllm" else decide_package(f"{package}/{file}", words)
    if family is None or family.fate in ("consequence", "survived"):
        return None
    if family.fate == "refused-configuration" and _OF_TENSORS.search(words):
        return None
    return Message("vLLM" if package == "vllm" else package, _of_a_start(family))


def _of_a_start(family: Family) -> Family:
    """What is said of a request is said of the start's own trial, where nobody has asked yet."""
    return family._replace(fate="engine-bug", remedy=None) if family.fate == "request" else family
