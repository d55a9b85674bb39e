"""Whether replies have as many tokens as the server says: its usage, with which its own counters may agree, can be wrong.

Two things tell how many tokens a reply brought: the model's own tokenizer counts those of its text, where the client runs, and
the reply came in chunks. Each can be less than what was generated: special tokens have no text, and a busy server puts several
tokens into one chunk. Both are seldom far less. So the larger one counts, reply by reply.
What was measured is in docs/design/0049.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.load.agreement import STREAM_INTERVALS, splits_reasoning
from vllm_qualify.evidence.load.result import Repeat
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.values import CountOrZero, Frozen

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


class TextTokens(Frozen):
    """`tokens-N.json`: how many tokens each reply's text has, or why they were not counted; and the hash of these texts."""

    texts_sha256: str
    tokens: list[CountOrZero] = []
    why_not: str = ""


def told_problems(repeat: Repeat, settings: Load, server: ServerPlan) -> list[str]:
    """Why the replies of a repeat, all answered, do not bring their tokens. Empty if nobody knows, see `why_untold`.

    Raises one of UNUSABLE.
    """
    counted, each = _read_counts(repeat), _most_per_chunk(server)
    if counted is None or counted.why_not or each is None:
        return []
    what = ("told", counted.texts_sha256, tuple(counted.tokens), each)
    found = repeat.remember(what, lambda: _count_told(repeat.result, counted, each))
    if found is None:
        return [f"{tokens_path(repeat.folder, repeat.number).name} is not of the texts of this repeat"]
    short, shown, told_tok, usage_tok, replies = found
    by_chunks = splits_reasoning(settings, server.arguments) or shown < LEAST_SHOWN * replies
    least, most = (LEAST_BY_CHUNKS, 1.0) if by_chunks else (LEAST_TOLD, SHORT_ALLOWED)
    if told_tok >= least * usage_tok and short <= most * replies:
        return []
    return [
        f"its replies have {usage_tok:,} tokens by the server's usage, and brought {told_tok:,} at most, by their "
        f"chunks and by their texts in the model's own tokens; {short} of {replies} brought less than half of "
        "theirs: the server counts tokens that it does not send, or a proxy before it cuts replies"
    ]


def why_untold(repeat: Repeat, server: ServerPlan) -> str:
    """Why nobody knows whether the replies brought their tokens, in words; empty if it is known. Raises one of UNUSABLE."""
    counted = _read_counts(repeat)
    if counted and counted.why_not:
        return f"the tokens of its texts were not counted: {counted.why_not}"
    if counted and _most_per_chunk(server) is None:
        return "the tokens of its texts do not tell: it is not known how many tokens a chunk has"
    return ""


def tokens_path(folder: Path, number: int) -> Path:
    return folder / f"tokens-{number}.json"


def _read_counts(repeat: Repeat) -> TextTokens | None:
    path = tokens_path(repeat.folder, repeat.number)
    return TextTokens.model_validate_json(path.read_bytes()) if path.exists() else None


def _most_per_chunk(server: ServerPlan) -> int | None:
    """The most tokens that one step of the server puts into a chunk; None if it drafts nobody knows how many."""
    interval = max((_positive_or_none(server.arguments.get(name)) or 1 for name in STREAM_INTERVALS), default=1)
    speculative = server.arguments.get(server.engine_kind.speculative)
    if not speculative:
        return interval
    drafted = _positive_or_none(speculative.get("num_speculative_tokens")) if isinstance(speculative, dict) else None
    return None if drafted is None else interval * (1 + drafted)


def _positive_or_none(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _count_told(result: dict[str, Any], counted: TextTokens, per_chunk: int) -> tuple[int, int, int, int, int] | None:
    """How many replies are short, and how many show in their texts; the tokens they brought, those by the usage; all replies.

    None if the counts are not of the result's texts.
    """
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
    return short, shown, sum(told), sum(usages), len(told)


def texts_sha256(texts: list[str]) -> str:
    """The hash that the client makes of the texts."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
