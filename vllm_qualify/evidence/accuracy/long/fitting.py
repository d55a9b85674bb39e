"""Questions of a given length in tokens, counted by the server that is asked: this process has no tokenizer of the model."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError
from ruamel.yaml import YAML

from vllm_qualify.engine.letter_box import write_plain
from vllm_qualify.evidence.accuracy.letters import RefusedError
from vllm_qualify.evidence.accuracy.long.questions import KINDS, made
from vllm_qualify.recipe.values import Count

TASK_FILE = Path(__file__).parent / "long.yaml"
# A question is this much shorter than its room at most: a share of it, or so many tokens where that is more.
SLACK, LEAST_SLACK_TOK = 0.03, 64
# What a template adds is rounded up to a multiple, since it may differ by the day: some say which day it is.
STEP_TOK = 64
# Each try is off by a quarter of the one before at most, unless the tokenizer is odd.
TRIES = 12
POLL_S, LIMIT_S = 1.0, 600.0


class _Tokenized(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    count: Count
    max_model_len: Count


class Tokenizer:
    """vLLM's `/tokenize` of a server, which may still be loading."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model, self._client = f"{url}/tokenize", model, httpx.Client(timeout=LIMIT_S)
        self.max_model_len = self._tokenize({"prompt": "one"}).max_model_len

    def count(self, **request: Any) -> int:
        return self._tokenize(request).count

    def _tokenize(self, request: dict[str, Any]) -> _Tokenized:
        reply = self._post_until_ready({"model": self._model} | request)
        try:
            return _Tokenized.model_validate_json(reply.raise_for_status().content)
        except (httpx.HTTPStatusError, ValidationError) as error:
            problem = f"the server counts no tokens by /tokenize: HTTP {reply.status_code}, {reply.text[:200]}"
            raise RefusedError(problem, "serve with vLLM, or leave out tasks of a given length") from error

    def _post_until_ready(self, request: dict[str, Any]) -> httpx.Response:
        """The reply. Who has started this process ends it, if there never is one."""
        while True:
            try:
                reply = self._client.post(self._url, json=request)
            except httpx.TransportError:
                reply = None
            if reply is not None and reply.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                return reply
            time.sleep(POLL_S)


def write_task(name: str, documents: list[dict[str, Any]], folder: Path) -> None:
    """Write a task file, and its questions beside it, into a new folder."""
    folder.mkdir()
    questions = folder / "questions.jsonl"
    write_plain(questions, "".join(f"{json.dumps(each)}\n" for each in documents).encode())
    task = {"include": str(TASK_FILE), "task": name, "dataset_kwargs": {"data_files": {"test": str(questions)}}}
    YAML(typ="safe").dump(task, folder / f"{name}.yaml")


def fit_documents(
    tokenizer: Tokenizer, context_tok: int, reply_tok: int, around: dict[str, Any], seed: int, count: int
) -> list[dict[str, Any]]:
    """Documents of `count` questions, the kinds in turn. Prompt and longest reply have nearly `context_tok` tokens, never more.

    `around` is a request of `/tokenize` with a prompt of one word, so that it has what a template adds.

    Raises RefusedError if the server takes no such context, or no question fits into it.
    """
    if tokenizer.max_model_len < context_tok:
        problem = f"{context_tok:,} tokens are asked, prompt and reply, and the server takes {tokenizer.max_model_len:,}"
        raise RefusedError(problem, "raise max-model-len as far as the model goes, or name a shorter context")
    room = (tokenizer.count(**around) // STEP_TOK + 1) * STEP_TOK
    most, sizes, documents = context_tok - reply_tok - room, {name: kind.least for name, kind in KINDS.items()}, []
    for number, kind in zip(range(count), itertools.cycle(KINDS), strict=False):
        # The next question of a kind nearly fits at once.
        sizes[kind] = size = _find_size(kind, seed, number, sizes[kind], most, tokenizer)
        wanted = made(kind, seed, number, size).wanted
        documents.append({"topic": kind, "seed": seed, "number": number, "size": size, "wanted": wanted})
    return documents


def _find_size(kind: str, seed: int, number: int, size: int, most: int, tokenizer: Tokenizer) -> int:
    slack, least = max(LEAST_SLACK_TOK, int(most * SLACK)), KINDS[kind].least
    for _ in range(TRIES):
        tokens = tokenizer.count(prompt=made(kind, seed, number, size).text, add_special_tokens=False)
        if most - slack <= tokens <= most:
            return size
        if size == least and tokens > most:
            problem = f"a question of the kind {kind} has {tokens:,} tokens or more, and {max(most, 0):,} are left"
            raise RefusedError(problem, "name a longer context, or lower max_gen_toks")
        # Each line or word is a token at least.
        size = min(max(least, round(size * (most - slack // 2) / tokens)), most)
    problem = f"no question of the kind {kind} has {most - slack:,} to {most:,} tokens by the server's tokenizer"
    raise RefusedError(problem, "name another length")
