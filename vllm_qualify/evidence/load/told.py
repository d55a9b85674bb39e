"""Whether replies have as many tokens as the server says: its usage, with which its own counters may agree, can be wrong.

Two things tell how many tokens a reply brought: the model's own tokenizer counts those of its text, where the client runs, and
the reply came in chunks. Each can be less than what was generated: special tokens have no text, and a busy server puts several
tokens into one chunk. Both are seldom far less. So the larger one counts, reply by reply.
What was measured is in docs/design/0049.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue

from vllm_qualify.engine.kind import KINDS
from vllm_qualify.evidence.load.result import Repeat
from vllm_qualify.recipe.serving import EngineName, ServerArguments
from vllm_qualify.recipe.values import CountOrNone, Frozen
from vllm_qualify.recipe.workload import Load

# A reply is short if it brought less than this share of its tokens. Of 2,752 replies of real vLLM servers, 2 did.
SHORT = 0.5
# A text shows its reply if it has this share of the reply's tokens. If this share of the texts do, special tokens are rare, and
# chunks matter little.
SHOWN, LEAST_SHOWN = 0.9, 0.25
# So many of a repeat's replies may then be short, and together they must bring this share of their tokens. Those of real
# servers brought .997 or more, and none was short.
SHORT_ALLOWED, LEAST_TOLD = 0.10, 0.80
# Else chunks must show them. On a busy CPU, 62 came for 100 tokens (docs/design/0028). Nor has bench a text of the reasoning
# that a chat's parser splits off, and such a parser keeps chunks back.
LEAST_BY_CHUNKS = 0.55
# A byte of a text is at most one token; a tokenizer may put a few tokens of its own before it.
ITS_OWN_TOK = 4
STREAM_INTERVALS = ("stream_interval", "stream-interval")
REASONING = ("reasoning-parser", "reasoning_parser")


class TextTokens(Frozen):
    """`tokens-N.json`: how many tokens each reply's text has, or why they were not counted; and the hash of these texts."""

    texts_sha256: str
    tokens: list[CountOrNone] = []
    why_not: str = ""


class _Told(NamedTuple):
    """`short` and `shown` are numbers of replies."""

    short: int
    shown: int
    told_tok: int
    usage_tok: int
    replies: int


def told_problems(folder: Path, repeat: Repeat, settings: Load, kind: EngineName, arguments: ServerArguments) -> list[str]:
    """Why the replies of a repeat, all answered, do not bring their tokens. Empty for older runs, and see `untold`.

    Raises one of UNUSABLE.
    """
    counted, each = _read(folder, repeat.number), _most_per_chunk(kind, arguments)
    if counted is None or counted.why_not or each is None:
        return []
    what = ("told", counted.texts_sha256, tuple(counted.tokens), each)
    found = repeat.remembered(what, lambda: _told(repeat.result, counted, each))
    if found is None:
        return [f"{tokens_path(folder, repeat.number).name} is not of the texts of this repeat"]
    is_reasoning = settings.api == "chat" and any(arguments.get(name) for name in REASONING)
    least, most = (
        (LEAST_BY_CHUNKS, 1.0) if is_reasoning or found.shown < LEAST_SHOWN * found.replies else (LEAST_TOLD, SHORT_ALLOWED)
    )
    if found.told_tok >= least * found.usage_tok and found.short <= most * found.replies:
        return []
    return [
        f"its replies have {found.usage_tok:,} tokens by the server's usage, and brought {found.told_tok:,} at most, by their "
        f"chunks and by their texts in the model's own tokens; {found.short} of {found.replies} brought less than half of "
        "theirs: the server counts tokens that it does not send, or a proxy before it cuts replies"
    ]


def untold(folder: Path, number: int, kind: EngineName, arguments: ServerArguments) -> str:
    """Why nobody knows whether the replies brought their tokens, in words; empty if it is known. Raises one of UNUSABLE."""
    counted = _read(folder, number)
    if counted is None:
        return ""
    if counted.why_not:
        return f"the tokens of its texts were not counted: {counted.why_not}"
    if _most_per_chunk(kind, arguments) is None:
        return "the tokens of its texts do not tell: it is not known how many tokens a chunk has"
    return ""


def tokens_path(folder: Path, number: int) -> Path:
    return folder / f"tokens-{number}.json"


def _read(folder: Path, number: int) -> TextTokens | None:
    path = tokens_path(folder, number)
    return TextTokens.model_validate_json(path.read_bytes()) if path.exists() else None


def _most_per_chunk(kind: EngineName, arguments: ServerArguments) -> int | None:
    """The most tokens that one step of the server puts into a chunk; None if it drafts nobody knows how many."""
    interval = max((_count(arguments.get(name)) or 1 for name in STREAM_INTERVALS), default=1)
    speculative = arguments.get(KINDS[kind].speculative)
    if not speculative:
        return interval
    drafted = _count(speculative.get("num_speculative_tokens")) if isinstance(speculative, dict) else None
    return None if drafted is None else interval * (1 + drafted)


def _count(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _told(result: dict[str, Any], counted: TextTokens, per_chunk: int) -> _Told | None:
    """None if the counts are not of the result's texts."""
    texts, usages = result["generated_texts"], result["output_lens"]
    if counted.texts_sha256 != texts_sha256(texts) or len(counted.tokens) != len(texts):
        return None
    sizes = [len(text.encode(errors="replace")) for text in texts]
    if any(tokens > size + ITS_OWN_TOK for tokens, size in zip(counted.tokens, sizes, strict=True)):
        return None
    # A text of single bytes is read as far more tokens than were sent: what is beyond the usage counts for no other reply.
    told = [
        min(usage, max(tokens, per_chunk * (len(gaps) + 1)))
        for usage, tokens, gaps in zip(usages, counted.tokens, result["itls"], strict=True)
    ]
    short = sum(brought < SHORT * usage for brought, usage in zip(told, usages, strict=True))
    shown = sum(tokens >= SHOWN * usage for tokens, usage in zip(counted.tokens, usages, strict=True))
    return _Told(short, shown, sum(told), sum(usages), len(told))


def texts_sha256(texts: list[str]) -> str:
    """The hash that the client makes of the texts."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
