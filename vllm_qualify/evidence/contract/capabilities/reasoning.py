"""Thoughts, apart from the content."""

import re

from pydantic import JsonValue

from vllm_qualify.evidence.contract.asked import Asked, need
from vllm_qualify.evidence.contract.capabilities.chat import QUESTIONS
from vllm_qualify.evidence.contract.capabilities.probe import LONG_TOK, Probe, streamed, user
from vllm_qualify.evidence.contract.chats import Spoken
from vllm_qualify.evidence.contract.replies import MissingError, shown

# Some models think only if their template is told to, and templates have one of two words for it.
TOLD: list[dict[str, JsonValue]] = [{}, {"enable_thinking": True}, {"thinking": True}]
BODIES = [
    user(question, **({"chat_template_kwargs": told} if told else {})) for question, told in zip(QUESTIONS, TOLD, strict=True)
]
# The tags around thoughts in the reasoning parsers of vLLM 0.32, like <think>, [/THINK], <seed:think>, <|channel|>.
TAG = re.compile(r"</?(\w+[:|])?think\w*>|\[/?THINK\]|◁/?think▷|<\|?/?channel\|?>|<\|(START|END)_THINKING\|>", re.IGNORECASE)


def _is_split(name: str, spoken: Spoken) -> None:
    for part, text in (("thoughts", spoken.reasoning), ("content", spoken.content)):
        whole = f"it ended by {spoken.reason}, and all of it is {shown(spoken.text)}"
        need(text.strip(), f"the reply to '{name}' has no {part}: {whole}")


def _plain(asked: Asked, attempt: str) -> None:
    _is_split(attempt, asked.chat(attempt))


def _stream(asked: Asked, attempt: str) -> None:
    _is_split(attempt, asked.streamed_chat(attempt))


PLAIN = Probe("reasoning", [{"": body} for body in BODIES], _plain, tokens=LONG_TOK)
STREAM = Probe("reasoning_stream", [{"": streamed(body)} for body in BODIES], _stream, tokens=LONG_TOK)


def no_tags(asked: Asked) -> None:
    """No content of a reply, plain or streamed, has a tag; and there is a content."""
    contents = {
        name: read(name).content
        for probe, read in ((PLAIN, asked.chat), (STREAM, asked.streamed_chat))
        for name, _ in probe.names()
        if name in asked.said
    }
    if not contents:
        raise MissingError("no chat with thoughts was kept")
    need(any(text.strip() for text in contents.values()), "no reply has a content")
    for name, text in contents.items():
        tag = TAG.search(text)
        need(tag is None, f"the content of '{name}' has the tag {tag[0] if tag else ''}: {shown(text)}")


PROBES = (PLAIN, STREAM)
OF_OTHERS = {"reasoning_tags": no_tags}
