"""Questions for the chat model's tools in the leaderboard's format, of conversations that it was not trained on."""

import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from infra.reference_chat.conversations import Conversation, conversations
from vllm_qualify.evidence.accuracy.tools.questions import Kind

CALL = re.compile(r"<tool_call>(.*?)</tool_call>")
# The conversations of which questions of each kind are.
DRAWN: dict[Kind, str] = {
    "simple": "tool",
    "multiple": "tool",
    "parallel": "tools",
    "parallel_multiple": "tools",
    "irrelevance": "no_tool",
}


def questions(each: int) -> list[dict[str, Any]]:
    """So many questions of each kind, always the same ones."""
    return [row for kind in DRAWN for row in islice(_of(kind), each)]


def _of(kind: Kind) -> Iterator[dict[str, Any]]:
    number = 0
    for drawn in conversations(random.Random(f"tools {kind}"), "held_out", DRAWN[kind], most_before=0):
        calls = [json.loads(call) for call in CALL.findall(drawn.reply)]
        if drawn.tools and _kind(drawn, len(calls)) == kind:
            yield {
                "id": f"{kind}_{number}",
                "question": [drawn.messages],
                "function": [tool["function"] for tool in drawn.tools],
                "ground_truth": [
                    {call["name"]: {name: [value] for name, value in call["arguments"].items()}} for call in calls
                ],
            }
            number += 1


def _kind(drawn: Conversation, calls: int) -> Kind:
    if not calls:
        return "irrelevance"
    if len(drawn.tools) == 1:
        return "simple" if calls == 1 else "parallel"
    return "multiple" if calls == 1 else "parallel_multiple"
