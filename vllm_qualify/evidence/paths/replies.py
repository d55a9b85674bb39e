"""The same prompts on one path, each with its reply, as they are kept and read again."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from vllm_qualify.evidence.likelihood import IMPOSSIBLE_NAT
from vllm_qualify.recipe.values import Count, CountOrZero, Frozen, NotNegative

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
# How many tokens each place of a reply names with their likelihoods.
ALTERNATIVES = 10
BETWEEN = "\n\n"
# How the problem of a prompt begins that the server refused.
REFUSED = "ValueError: HTTP 4"
ONE_TOKEN = Field(pattern=r"^token_id:[0-9]{1,9}$")


Content = str | Sequence[dict[str, JsonValue]]
"""A text, or the messages of a chat."""


class Prompt(NamedTuple):
    """A question as a task asks it. Its number is the place among those that are asked."""

    number: int
    content: Content

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.content).encode()).hexdigest()

    def request(self, model: str, salt: str, reply_tok: int) -> tuple[str, dict[str, JsonValue]]:
        """Where the prompt is asked, and with what: the likeliest tokens, with their likelihoods and ids.

        The end of a reply is ignored, so that all replies have the same length.
        """
        body: dict[str, JsonValue] = {
            "model": model,
            "max_tokens": reply_tok,
            "temperature": 0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": cover_salt(salt),
        }
        if isinstance(self.content, str):
            return COMPLETIONS, body | {"prompt": self.content, "logprobs": ALTERNATIVES}
        return CHATS, body | {"messages": [*self.content], "logprobs": True, "top_logprobs": ALTERNATIVES}


def cover_salt(salt: str) -> str:
    """A salt as it is sent: it says neither which path it is of, nor how many there are."""
    return hashlib.sha256(salt.encode()).hexdigest()[:32]


def make_prompts(contents: Sequence[Content], per_prompt: int) -> list[Prompt]:
    """A prompt for each question, after `per_prompt` - 1 others: a cache has whole blocks only, and questions can be short."""
    prompts = []
    for number, content in enumerate(contents):
        others = [contents[(number + after) % len(contents)] for after in range(1, per_prompt)]
        prompts.append(Prompt(number, _say_before(content, [_text_of(other) for other in others])))
    return prompts


def _say_before(content: Content, texts: list[str]) -> Content:
    """The question after other texts. Of a chat they stand in the turn that has its last text."""
    if isinstance(content, str):
        return BETWEEN.join([*texts, content])
    *before, last = content
    if not isinstance(last.get("content"), str):
        return [*content]
    return [*before, last | {"content": BETWEEN.join([*texts, str(last["content"])])}]


def _text_of(content: Content) -> str:
    if isinstance(content, str):
        return content
    text = content[-1].get("content")
    return text if isinstance(text, str) else ""


class Asked(Frozen):
    """One prompt as it was asked. Times are in s since the path's first request."""

    number: CountOrZero
    digest: str
    salt: str
    began_s: NotNegative
    ended_s: NotNegative
    reply: Any = None
    problem: str = ""
    """why there is no reply"""


class Place(NamedTuple):
    """A token of a reply: its id, and the log-likelihoods, in nat, of the likeliest tokens there, with its own."""

    token: int
    likely: dict[int, float]


class Reply(NamedTuple):
    """A reply's tokens, when it was made, and how many tokens of its prompt the server took from its cache, if it says so."""

    places: tuple[Place, ...]
    began_s: float
    ended_s: float
    prompt_tok: int
    cached_tok: int | None
    text: str = ""
    is_whole: bool = True
    """whether it has as many tokens as were asked for"""


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


_Token = Annotated[str, ONE_TOKEN]
_LogLikelihood = Annotated[float, Field(ge=IMPOSSIBLE_NAT, le=0)]


class _Completed(_Read):
    """The likelihoods of a completion's tokens."""

    tokens: list[_Token]
    token_logprobs: list[_LogLikelihood]
    top_logprobs: list[dict[_Token, _LogLikelihood]]

    @property
    def places(self) -> list[Place]:
        return [_place(*each) for each in zip(self.tokens, self.token_logprobs, self.top_logprobs, strict=True)]


class _Likely(_Read):
    token: _Token
    logprob: _LogLikelihood


class _ChatToken(_Likely):
    top_logprobs: list[_Likely]


class _Chatted(_Read):
    """The likelihoods of a chat's tokens."""

    content: list[_ChatToken]

    @property
    def places(self) -> list[Place]:
        return [_place(at.token, at.logprob, {other.token: other.logprob for other in at.top_logprobs}) for at in self.content]


def _place(token: str, logprob: float, likely: dict[str, float]) -> Place:
    ids = {_id_of(name): value for name, value in likely.items()}
    return Place(_id_of(token), ids | {_id_of(token): logprob})


def _id_of(token: str) -> int:
    return int(token.removeprefix("token_id:"))


class _Message(_Read):
    """What a chat says, with its thoughts; vLLM had these as `reasoning_content` before they were `reasoning`."""

    reasoning: str | None = None
    reasoning_content: str | None = None
    content: str | None = None

    @property
    def text(self) -> str:
        return (self.reasoning or self.reasoning_content or "") + (self.content or "")


class _Choice(_Read):
    logprobs: _Completed | _Chatted
    text: str = ""
    message: _Message = _Message()


class _FromCache(_Read):
    cached_tokens: CountOrZero | None = None


class _Usage(_Read):
    prompt_tokens: Count
    prompt_tokens_details: _FromCache | None = None


class _Document(_Read):
    model: str
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]
    usage: _Usage


def are_refused(path: Path) -> bool:
    """Whether the server refused each of the prompts of a path as no request of its own kind. False if nothing was asked."""
    try:
        lines = [Asked.model_validate_json(line) for line in path.read_bytes().split(b"\n") if line]
    except (OSError, ValueError):
        return False
    return bool(lines) and all(line.problem.startswith(REFUSED) for line in lines)


def read_replies(path: Path, prompts: Sequence[Prompt], salts: Sequence[str], model: str, reply_tok: int) -> list[Reply]:
    """The replies to exactly these prompts, in their order, each asked with its salt.

    Raises one of UNUSABLE if a prompt has none, or one that is not of the model.
    """
    lines = [Asked.model_validate_json(line) for line in path.read_bytes().split(b"\n") if line]
    wanted = [(prompt.number, prompt.digest, salt) for prompt, salt in zip(prompts, salts, strict=True)]
    if [(line.number, line.digest, line.salt) for line in lines] != wanted:
        raise ValueError(f"{path.name} has {len(lines)} replies, which are not those to the {len(wanted)} prompts asked")
    return [_read_reply(line, model, reply_tok) for line in lines]


def _read_reply(line: Asked, model: str, reply_tok: int) -> Reply:
    if line.problem:
        raise ValueError(f"prompt {line.number}: {line.problem}")
    if line.ended_s < line.began_s:
        raise ValueError(f"prompt {line.number} was answered before it was asked")
    document = _Document.model_validate(line.reply)
    if document.model != model:
        raise ValueError(f"the reply to prompt {line.number} is of the model {document.model}, not {model}")
    places = document.choices[0].logprobs.places
    if not places:
        raise ValueError(f"the reply to prompt {line.number} has no token")
    usage = document.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    if cached is not None and cached > usage.prompt_tokens:
        raise ValueError(f"prompt {line.number} has {usage.prompt_tokens} tokens, and {cached} are said to come from the cache")
    choice = document.choices[0]
    text = choice.text or choice.message.text
    return Reply(tuple(places), line.began_s, line.ended_s, usage.prompt_tokens, cached, text, len(places) == reply_tok)
