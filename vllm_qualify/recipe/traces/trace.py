"""A trace: when each request arrives, how long it and its reply are, and which beginnings of prompts are the same."""

import hashlib
import json
from collections.abc import Iterable
from typing import NamedTuple

from pydantic import Field

from vllm_qualify.recipe.values import Count, CountOrZero, Frozen, NotNegative

# `hash_ids` of a repeat begin so far from those of the one before: no two requests of different repeats share a block.
APART = 2**40


class Request(NamedTuple):
    """One request: seconds after the first one, tokens of prompt and reply, and the ids of the prompt's blocks, in order."""

    arrival_s: float
    input_tok: int
    output_tok: int
    blocks: tuple[int, ...]


class Trace(Frozen):
    """Requests in the order of their arrivals. Blocks have `block_tok` tokens, but the last of a prompt may have fewer.

    Two prompts have the same tokens as long as their blocks have the same ids. Ids count from 0 in the order of appearance, so
    that traces that ask the same are the same.
    """

    block_tok: Count
    requests: list[tuple[NotNegative, Count, Count, list[CountOrZero]]] = Field(min_length=1)

    @classmethod
    def from_requests(cls, block_tok: int, requests: Iterable[Request]) -> "Trace":
        """Requests with blocks of any ids; the first arrives at 0 s."""
        known: dict[int, int] = {}
        rows, began = [], None
        for request in requests:
            began = request.arrival_s if began is None else began
            blocks = [known.setdefault(block, len(known)) for block in request.blocks]
            rows.append((round(request.arrival_s - began, 6), request.input_tok, request.output_tok, blocks))
        return cls(block_tok=block_tok, requests=rows)

    @property
    def arrivals_s(self) -> list[float]:
        return [row[0] for row in self.requests]

    @property
    def input_toks(self) -> list[int]:
        return [row[1] for row in self.requests]

    @property
    def output_toks(self) -> list[int]:
        return [row[2] for row in self.requests]

    @property
    def body(self) -> bytes:
        """Its form in evidence, from which its digest is made."""
        return self.model_dump_json().encode()

    @property
    def digest(self) -> str:
        """The SHA-256 of its content, whatever file or settings it came from."""
        return hashlib.sha256(self.body).hexdigest()

    def for_bench(self, number: int) -> str:
        """The JSON lines that `vllm bench serve --dataset-name timed_trace` replays, with times in s.

        Bench makes the tokens of a block from its id alone. So each `number` has ids of its own: the same prompts again would
        measure the prefix cache.
        """
        names = ("timestamp", "input_length", "output_length", "hash_ids")
        rows = ((*row, [APART * number + block for block in blocks]) for *row, blocks in self.requests)
        return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)

    @property
    def shared_tok(self) -> int:
        """The tokens of prompts that an earlier prompt began with, which an endless prefix cache need not compute again.

        The last token of a prompt is computed in any case: its likelihoods give the first token of the reply.
        """
        # A place in the tree of all prompts so far, by the place before it, the block and its length.
        places: dict[tuple[int, int, int], int] = {}
        shared = 0
        for _, input_tok, _, blocks in self.requests:
            place, left, seen, is_seen = 0, input_tok, 0, True
            for block in blocks:
                length = min(left, self.block_tok)
                step = (place, block, length)
                is_seen = is_seen and step in places
                seen += length if is_seen else 0
                place, left = places.setdefault(step, len(places) + 1), left - length
            shared += min(seen, input_tok - 1)
        return shared

    @property
    def shared_share(self) -> float:
        """`shared_tok` as a share of all tokens of prompts: the most that a prefix cache can hit."""
        return self.shared_tok / sum(self.input_toks)
