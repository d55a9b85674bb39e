"""Thoughts, apart from the content."""

import re
from functools import partial

from pydantic import JsonValue

from vllm_qualify.evidence.contract.capabilities.chat import QUESTIONS
from vllm_qualify.evidence.contract.capabilities.probe import Probe, stream_body, user_body
from vllm_qualify.evidence.contract.content import check_content
from vllm_qualify.evidence.contract.replies import MissingError, need, shorten
from vllm_qualify.evidence.contract.transcript import Transcript

# Some models think only if their template is told to, and templates have one of two words for it.
TOLD: list[dict[str, JsonValue]] = [{}, {"enable_thinking": True}, {"thinking": True}]
BODIES = [
    user_body(question, **({"chat_template_kwargs": told} if told else {}))
    for question, told in zip(QUESTIONS, TOLD, strict=True)
]
# The tags around thoughts in the reasoning parsers of vLLM 0.32, like <think>, [/THINK], <seed:think>, <|channel|>.
TAG = re.compile(r"</?(\w+[:|])?think\w*>|\[/?THINK\]|◁/?think▷|<\|?/?channel\|?>|<\|(START|END)_THINKING\|>", re.IGNORECASE)


def _check_split(replies: Transcript, attempt: str, *, is_streamed: bool = False) -> None:
    spoken = replies.streamed_chat(attempt) if is_streamed else replies.chat(attempt)
    for part, text in (("thoughts", spoken.reasoning), ("content", spoken.content)):
        whole = f"it ended by {spoken.reason}, and all of it is {shorten(spoken.text)}"
        need(text.strip(), f"the reply to '{attempt}' has no {part}: {whole}")
    check_content(attempt, spoken.content)


PLAIN = Probe("reasoning", [{"": body} for body in BODIES], _check_split)
STREAM = Probe("reasoning_stream", [{"": stream_body(body)} for body in BODIES], partial(_check_split, is_streamed=True))


def _check_no_tags(replies: Transcript) -> None:
    """No content of a reply, plain or streamed, has a tag; and there is a content."""
    contents = {
        name: read(name).content
        for probe, read in ((PLAIN, replies.chat), (STREAM, replies.streamed_chat))
        for name in probe.requests
        if name in replies
    }
    if not contents:
        raise MissingError("no chat with thoughts was kept")
    need(any(text.strip() for text in contents.values()), "no reply has a content")
    for name, text in contents.items():
        tag = TAG.search(text)
        need(tag is None, f"the content of '{name}' has the tag {tag[0] if tag else ''}: {shorten(text)}")


PROBES = (PLAIN, STREAM)
OF_OTHERS = {"reasoning_tags": _check_no_tags}
