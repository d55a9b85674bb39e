"""Writes the trace of the catalog's recipe `reference-chat`: mixed traffic in bursts.

Its lengths are made up, to be short and to fit a context of 2,048 tokens. Stretches that prompts share are whole blocks of
the CPU engine's KV cache, which have 128 tokens.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from vllm_qualify.recipe.loading import catalog_folder

Line = dict[str, object]
FOLDER = catalog_folder() / "reference-chat"
# Of each kind of request: its share, the tokens of its system prompt, the mean tokens of the rest, and the tokens of its reply.
KINDS = {"assistant": (0.6, 384, 60, 32), "tools": (0.25, 512, 90, 16), "document": (0.15, 0, 1000, 24)}
REQUESTS, RATE_REQ_S, BURSTINESS, SEED = 32, 6.0, 0.5, 1


def traffic() -> Iterator[Line]:
    """Requests of three kinds, two of which have a system prompt, in bursts: bench draws the times between them so, too."""
    drawn, arrival_s = random.Random(SEED), 0.0
    for _ in range(REQUESTS):
        (kind,) = drawn.choices(list(KINDS), [share for share, *_ in KINDS.values()])
        _, system_tok, rest_tok, reply_tok = KINDS[kind]
        prefix = [[kind, system_tok]] if system_tok else []
        yield _line(arrival_s, system_tok + drawn.randint(rest_tok // 2, rest_tok * 3 // 2), reply_tok, prefix)
        arrival_s += drawn.gammavariate(BURSTINESS, 1 / (BURSTINESS * RATE_REQ_S))


def _line(arrival_s: float, input_tok: int, output_tok: int, prefix: list[list[object]]) -> Line:
    line: Line = {"arrival_s": round(arrival_s, 3), "input_tok": input_tok, "output_tok": output_tok}
    return line | {"prefix": prefix} if prefix else line


def write(folder: Path) -> None:
    (folder / "traffic.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in traffic()))


if __name__ == "__main__":
    write(FOLDER)
