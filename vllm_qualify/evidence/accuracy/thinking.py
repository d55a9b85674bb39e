"""What a model thinks before it answers: kept as evidence, and no part of the answer that is scored."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_qualify.recipe.values import CountOrZero, Frozen

REPLIES = "replies.jsonl"
# Why a reply ended, by OpenAI's word for the longest reply.
CUT = "length"


class Reply(Frozen):
    """What lm-eval does not keep of a reply."""

    prompt_hash: str
    """as lm-eval's samples have it"""
    finish_reason: str | None
    thinking: str | None
    """the server's, or the text before `think_end`; None if there is none"""
    is_empty: bool
    """whether the answer after the thinking is empty"""
    stop_reason: str | None = None
    """the text of `stop` that ended it, by vLLM's own word; None if the server names none"""
    output_tok: CountOrZero | None = None
    """all tokens, also of the thinking, by the reply's own `usage`; None if that has no count"""

    @property
    def has_thinking(self) -> bool:
        """Whether anything was thought. A template that turns thinking off leaves blanks."""
        return bool(self.thinking and self.thinking.strip())


def split_thinking(prompt: str, choice: dict[str, Any], text: str | None, think_end: str | None) -> tuple[Reply, str | None]:
    """A choice of OpenAI's reply, with the answer that is scored: `text` is what lm-eval read of it.

    vLLM's field for thinking that the server split off is `reasoning` (`ChatMessage` of its OpenAI protocol), and others' is
    `reasoning_content`. Where the server splits nothing, thinking ends at the last `think_end`. A reply that was cut before it
    has no answer; one that ended by itself without it is all answer.
    """
    message, ended = choice.get("message"), _text_or_none(choice.get("finish_reason"))
    fields = message if isinstance(message, dict) else {}
    thinking = _text_or_none(fields.get("reasoning")) or _text_or_none(fields.get("reasoning_content"))
    if think_end and text and not thinking:
        before, found, after = text.rpartition(think_end)
        if found:
            thinking, text = before, after.lstrip()
        elif ended == CUT:
            thinking, text = text, ""
    reply = Reply(
        prompt_hash=hashlib.sha256(prompt.encode()).hexdigest(),
        finish_reason=ended,
        stop_reason=_text_or_none(choice.get("stop_reason")),
        thinking=thinking,
        is_empty=not (text or "").strip(),
        output_tok=_count_tokens(choice.get("usage")),
    )
    return reply, text


def _count_tokens(usage: object) -> int | None:
    """The output tokens that a reply's usage counts, if it counts any way at all."""
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return counted if isinstance(counted, int) and not isinstance(counted, bool) and counted >= 0 else None


def _text_or_none(value: object) -> str | None:
    """What a server wrote where a text belongs, if it is one."""
    return value if isinstance(value, str) else None


def read_replies(step: Path) -> Iterator[Reply]:
    """The replies in a step's folder; none if the task compares likelihoods. Raises one of UNUSABLE."""
    path = step / REPLIES
    if path.exists():
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from map(Reply.model_validate_json, file)
