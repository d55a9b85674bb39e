"""Likelihood: the server scores given texts token by token, by prefill alone, and its replies are read and checked.

The server is asked for a text's token ids, and then for the log-likelihood of each of these tokens. Where a text begins follows
from the ids of its prompt alone: a token that holds the end of the prompt and the beginning of the text counts as the text's.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
from pydantic import BaseModel, ConfigDict, Field
from scipy import special

from vllm_qualify.answers import ask_within
from vllm_qualify.engine.process import Progress
from vllm_qualify.engine.server import Server
from vllm_qualify.errors import RecipeError
from vllm_qualify.evidence.measurement import Interval, Measurement, around, valid
from vllm_qualify.evidence.memory import Memory, digest_together
from vllm_qualify.evidence.passages import OF_TEXTS, Passage, PassageId
from vllm_qualify.evidence.sequential import Levels, Sides, sides_at_once
from vllm_qualify.recipe.values import Count, CountOrZero, Frozen

STAGE = "likelihood"
ANSWERS, TEXTS = "answers.jsonl", "texts.jsonl"
# One is enough to see which token is the likeliest.
ALTERNATIVES = 1
# What vLLM writes for a token that is impossible, whose log-likelihood is minus infinity.
IMPOSSIBLE_NAT = -9999.0
# Two numbers of a reply can differ by rounding.
ROUNDING = 1e-5
# In characters; the longest tokens of some hundred are runs of spaces and signs.
LONGEST_TOKEN = 64
READ = Memory(files=16)


class Written(Frozen):
    """One passage as it is written, with the server's reply to its tokens."""

    of: str
    number: CountOrZero
    digest: str
    begins: CountOrZero = 0
    """the place of the text's first token"""
    tokens: list[CountOrZero] = []
    """of prompt and text together"""
    reply: Any = None
    """without the likelihoods of the prompt's tokens"""
    problem: str = ""
    """why there is no reply"""


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class Tokenized(_Read):
    """A prompt's token ids, and how many tokens the server takes."""

    tokens: list[CountOrZero]
    max_model_len: Count


class _Likely(_Read):
    logprob: Annotated[float, Field(ge=IMPOSSIBLE_NAT, le=0)]
    rank: Count
    decoded_token: str


class _Choice(_Read):
    prompt_logprobs: list[dict[str, _Likely]]


class _Usage(_Read):
    prompt_tokens: Count


class _Reply(_Read):
    model: str
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]
    usage: _Usage


class Scored(NamedTuple):
    """A passage with its tokens' ids, the sum of their negative log-likelihoods, and the likeliest token at each place."""

    identity: PassageId
    tokens: tuple[int, ...]
    nll_nat: float
    likeliest: tuple[int, ...]

    @property
    def hits(self) -> int:
        return sum(token == likeliest for token, likeliest in zip(self.tokens, self.likeliest, strict=True))


def measure_likelihood(server: Server, passages: Sequence[Passage], path: Path, limit_s: float, progress: Progress) -> None:
    """Have the server score the passages, and write a line for each to `path`. It ends at the first one without a reply.

    One passage is sent at a time: what else is in a batch changes a kernel's sums. `limit_s` is for each request. Raises
    RecipeError if a text of the recipe is longer than what the server takes, ReleaseError if the server has ended.
    """
    with path.open("w", encoding="utf-8") as file:
        for done, passage in enumerate(passages, start=1):
            written = _score_passage(server, passage, limit_s)
            file.write(f"{json.dumps(written.model_dump())}\n")
            progress(done, len(passages))
            if written.problem:
                break
    server.check_alive()


def _score_passage(server: Server, passage: Passage, limit_s: float) -> Written:
    of, number, digest = passage.identity
    try:
        begins, tokens = _find_text(server, passage, limit_s)
        request = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": ALTERNATIVES}
        reply = _trim_reply(_post_request(server, "/v1/completions", request, limit_s), begins)
    except (httpx.HTTPError, ValueError) as error:
        server.check_alive()
        return Written(of=of, number=number, digest=digest, problem=f"{type(error).__name__}: {error}"[:500])
    return Written(of=of, number=number, digest=digest, begins=begins, tokens=tokens, reply=reply)


def _find_text(server: Server, passage: Passage, limit_s: float) -> tuple[int, list[int]]:
    """Where the text begins, and all ids. Raises ValueError if the server gives none, RecipeError for too long a text."""
    prompt_alone, with_text = _tokenize_requests(passage)
    before = tokenize(server, prompt_alone, limit_s).tokens if passage.prompt else []
    whole = tokenize(server, with_text, limit_s)
    # Nothing comes before the first token, so that it has no likelihood.
    begins = max(1, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, whole.tokens, strict=False))))
    # The server generates one token more.
    if len(whole.tokens) >= whole.max_model_len:
        problem = f"{len(whole.tokens)} tokens, and the server takes {whole.max_model_len} with the one that it must generate"
        if passage.of == OF_TEXTS:
            raise RecipeError(f"the text of line {passage.number} has {problem}", "shorten it", f"{STAGE}.{OF_TEXTS}")
        raise ValueError(f"question {passage.number} of {passage.of} has with its answer {problem}")
    return begins, whole.tokens


def _tokenize_requests(passage: Passage) -> tuple[dict[str, Any], dict[str, Any]]:
    """For the ids of the prompt alone, and of prompt and text."""
    if isinstance(passage.prompt, str):
        return {"prompt": passage.prompt}, {"prompt": passage.prompt + passage.text}
    messages = [*passage.prompt, {"role": "assistant", "content": passage.text}]
    answered = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    return {"messages": passage.prompt, "add_generation_prompt": True}, answered


def tokenize(server: Server, request: Mapping[str, Any], limit_s: float) -> Tokenized:
    """The token ids of a prompt or of a chat's messages. Raises httpx.HTTPError, or ValueError if the server gives none."""
    return Tokenized.model_validate(_post_request(server, "/tokenize", dict(request), limit_s))


def _post_request(server: Server, path: str, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
    reply = ask_within("POST", f"{server.url}{path}", limit_s, json={"model": server.served_model_name} | request)
    if reply.status_code != httpx.codes.OK:
        raise ValueError(f"HTTP {reply.status_code}: {reply.text[:300]}")
    document = json.loads(reply.text)
    if not isinstance(document, dict):
        raise ValueError(f"the reply of {path} is not a JSON object")
    return document


def _trim_reply(reply: dict[str, Any], begins: int) -> dict[str, Any]:
    """The reply without the likelihoods of the prompt's tokens, which mostly are the largest part of it."""
    choices = [
        choice | {"prompt_logprobs": choice["prompt_logprobs"][begins:]}
        if isinstance(choice, dict) and isinstance(choice.get("prompt_logprobs"), list)
        else choice
        for choice in reply.get("choices") or []
    ]
    return reply | {"choices": choices}


def read_scored(path: Path, passages: Sequence[Passage], model: str) -> list[Scored]:
    """The scores of exactly these passages, from what `measure_likelihood` wrote.

    Raises one of UNUSABLE unless each passage has one reply, in its order, of this model, to its tokens, and with a possible
    log-likelihood and a likeliest token for each of the text's tokens.
    """
    content, wanted = path.read_bytes(), tuple(passage.identity for passage in passages)
    return READ.find(digest_together(content), (wanted, model), lambda: _parse_scored(content, passages, model))


def _parse_scored(content: bytes, passages: Sequence[Passage], model: str) -> list[Scored]:
    lines = [Written.model_validate_json(line) for line in content.split(b"\n") if line]
    for line in lines:
        if line.problem:
            raise ValueError(line.problem)
    scored = [PassageId(line.of, line.number, line.digest) for line in lines]
    if scored != [passage.identity for passage in passages]:
        raise ValueError(f"{len(scored)} texts were scored, which are not the {len(passages)} that were to be scored")
    return [_check_line(line, passage, model) for line, passage in zip(lines, passages, strict=True)]


def _check_line(line: Written, passage: Passage, model: str) -> Scored:
    where = f"the text of {line.of} {line.number}"
    reply = _Reply.model_validate(line.reply)
    if reply.model != model:
        raise ValueError(f"the reply to {where} is of the model {reply.model}, not {model}")
    if reply.usage.prompt_tokens != len(line.tokens):
        raise ValueError(f"{where} has {len(line.tokens)} tokens, and the server counts {reply.usage.prompt_tokens}")
    tokens, likelihoods = line.tokens[line.begins :], reply.choices[0].prompt_logprobs
    if not tokens or len(likelihoods) != len(tokens):
        raise ValueError(f"{where} has {len(tokens)} tokens and {len(likelihoods)} likelihoods")
    own = [_check_place(token, at, where) for token, at in zip(tokens, likelihoods, strict=True)]
    _check_text("".join(token.decoded_token for token in own), passage, where)
    likeliest = tuple(_find_likeliest(token, at) for token, at in zip(tokens, likelihoods, strict=True))
    return Scored(passage.identity, tuple(tokens), -math.fsum(token.logprob for token in own), likeliest)


def _check_place(token: int, at: dict[str, _Likely], where: str) -> _Likely:
    """A token's likelihood. A reply must also have the likeliest token if that is another, and the two must fit together.

    If two tokens are equally likely, each may have rank 1.
    """
    own, others = at.get(str(token)), [likelihood for name, likelihood in at.items() if name != str(token)]
    if own is None:
        raise ValueError(f"a reply to {where} is about other tokens")
    if own.rank == 1 and not others:
        return own
    if len(others) != 1 or others[0].rank != 1 or (own.rank == 1 and own.logprob != others[0].logprob):
        raise ValueError(f"a reply to {where} does not say which token is the likeliest")
    first = others[0].logprob
    if own.logprob > first or math.exp(own.logprob) + math.exp(first) > 1 + ROUNDING:
        raise ValueError(f"a reply to {where} has likelihoods that cannot be: {own.logprob} beside {first}")
    return own


def _find_likeliest(token: int, at: dict[str, _Likely]) -> int:
    """The id of the likeliest token: the text's own, unless another is likelier."""
    likelier = next((name for name, likelihood in at.items() if likelihood.logprob > at[str(token)].logprob), str(token))
    if str(int(likelier)) != likelier:
        raise ValueError(f"{likelier!r} is no token id")
    return int(likelier)


def _check_text(decoded: str, passage: Passage, where: str) -> None:
    """Check that the tokens are the text's, by its plain letters and digits: other characters may be parts of tokens.

    Without a prompt and a token before it, the first token of a text is not scored, and its letters are missing.
    """
    text, scored = (re.sub(r"[^a-z0-9]", "", each.casefold()) for each in (passage.text, decoded))
    lacks_first = not passage.prompt and text.endswith(scored) and len(text) - len(scored) <= LONGEST_TOKEN
    if text not in scored and not lacks_first:
        raise ValueError(f"the tokens of {where} are not those of its text")


def per_token(totals: Sequence[float], tokens: Sequence[int], at: Sides, least: float = 0.0) -> tuple[float, Interval | None]:
    """The mean of `totals` per token, with bounds over the passages; none for fewer than two.

    It is a ratio of two sums over passages, with the variance of Cochran 1977, "Sampling Techniques", chapter 6, without
    the finite population. Each bound is Student's t's, or Hall's where that reaches farther: few passages that changed much
    skew a mean, and where chance drew few of them, its error is too small too. `least` is added to the sum of squares as one
    more deviation: no difference in a few passages does not mean that there is none.
    """
    number, value = len(totals), math.fsum(totals) / sum(tokens)
    if number < 2:
        return value, None
    apart = [total - value * count for total, count in zip(totals, tokens, strict=True)]
    deviation = math.sqrt((math.fsum(each**2 for each in apart) + least**2) / (number - 1))
    error = deviation / math.sqrt(number) / (sum(tokens) / number)
    skew = math.fsum(each**3 for each in apart) / number / deviation**3 / math.sqrt(number) if deviation else 0.0
    below, above = (-float(special.stdtrit(number - 1, alpha)) for alpha in at)
    lower, upper = value - max(below, _skew_t(below, skew)) * error, value - min(-above, _skew_t(-above, skew)) * error
    return value, around(value, lower, upper)


def _skew_t(t: float, skew: float) -> float:
    """What Student's t of a skewed mean is where it would be `t` without the skew.

    It is the inverse of a transformation that takes the skew out (Hall 1992, "On the removal of skewness by transformation",
    JRSS B 54). `skew` is that of the values over the root of their number.
    """
    return 3 / skew * (math.cbrt(1 + skew * (t - skew / 6)) - 1) if skew else t


def share_per_token(hits: Sequence[int], tokens: Sequence[int], at: Sides) -> tuple[float, Interval | None]:
    """The share of tokens that are hits, with bounds as in `per_token`, as if one more token had been none."""
    value, interval = per_token(hits, tokens, at, least=1.0)
    return value, interval and _clip_interval(interval, 1.0)


def _clip_interval(interval: Interval, most: float) -> Interval:
    """The interval without what lies below 0 or above `most`, where no value can be."""
    return Interval(lower=max(0.0, interval.lower), upper=min(most, interval.upper))


def parse_likelihood(scored: Sequence[Scored], metrics: tuple[str, str], levels: Levels, source: str) -> list[Measurement]:
    """The mean negative log-likelihood per token and the share of likeliest tokens, by the names of their metrics."""
    tokens, totals = [len(passage.tokens) for passage in scored], [passage.nll_nat for passage in scored]
    nll_sides, top1_sides = (sides_at_once(metric, levels) for metric in metrics)
    nll, interval = per_token(totals, tokens, nll_sides)
    top1 = share_per_token([passage.hits for passage in scored], tokens, top1_sides)
    values = zip(metrics, ((nll, interval and _clip_interval(interval, math.inf)), top1), strict=True)
    return [
        valid(metric, value, source, sample_count=len(scored), interval=interval, traced_to=[source])
        for metric, (value, interval) in values
    ]
