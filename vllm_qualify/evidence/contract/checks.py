"""The checks of the contract, each on kept requests and replies alone."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path

from vllm_qualify.engine.kinds.base import EngineKind
from vllm_qualify.evidence.contract.capabilities import table
from vllm_qualify.evidence.contract.exchange import EXCHANGES, Exchange
from vllm_qualify.evidence.contract.measure import MANY, alias_request_name, read_count
from vllm_qualify.evidence.contract.own_schemas import check_own_schemas
from vllm_qualify.evidence.contract.replies import BrokenError, Chunk, Completion, MissingError, Models, need, shorten
from vllm_qualify.evidence.contract.transcript import EVENT, Transcript, check_stream_usage
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words, invalid, valid
from vllm_qualify.recipe.contract import OWN_SCHEMAS, Contract

# A log-probability is at most 0; the last digits of a sum can be above.
ROUNDING = 1e-6


def parse_contract(folder: Path, contract: Contract, model: str, kind: EngineKind) -> list[Measurement]:
    """The measurement of each check of the contract, 1.0 or 0.0, from what `measure_contract` wrote."""
    source = f"{folder.name}/{EXCHANGES}"
    try:
        kept = [Exchange.model_validate_json(line) for line in (folder / EXCHANGES).read_text().splitlines()]
    except UNUSABLE as error:
        return [invalid(check.name, f"no usable exchanges: {in_words(error)}", source) for check in contract.checks]
    replies = Transcript({exchange.name: exchange for exchange in kept}, model, kind, contract.aliases)
    own: Callable[[Transcript], None] = partial(check_own_schemas, schemas=contract.schemas)
    holds = {**HOLDS, OWN_SCHEMAS: own}
    return [_measure_check(check.name, holds[check.name], replies, source) for check in contract.checks]


def _measure_check(metric: str, holds: Callable[[Transcript], None], replies: Transcript, source: str) -> Measurement:
    try:
        holds(replies)
    except MissingError as why:
        return invalid(metric, str(why), source)
    except BrokenError as what:
        return valid(metric, 0.0, source, sample_count=1, finding=str(what))
    except UNUSABLE as error:
        return invalid(metric, f"no usable exchanges: {in_words(error)}", source)
    return valid(metric, 1.0, source, sample_count=1)


def _check_models(replies: Transcript) -> None:
    names = [card.id for card in replies.read("models", Models).data]
    listed = f"/v1/models lists {shorten(', '.join(names))}"
    need(replies.model in names, f"{listed}, and not the served model")
    for alias in replies.aliases:
        need(alias in names, f"{listed}, and not the alias {shorten(alias)}")
        # Whether the reply names the alias or the model's first name is the engine's choice.
        reply = replies.read(alias_request_name(alias), Completion)
        need(reply.choices[0].text.strip(), f"the reply to a request for {shorten(alias)} has no text")


def _check_completion(replies: Transcript) -> None:
    reply = replies.read_own("plain", Completion)
    replies.check_length("plain", reply.choices[0].text, reply.usage)


def _check_stream(replies: Transcript) -> None:
    streamed = "".join(choice.text for chunk in replies.chunks("stream", Chunk) for choice in chunk.choices)
    plain = replies.text("plain")
    need(streamed == plain, f"the stream has {shorten(streamed)}, and the plain reply {shorten(plain)}")


def _check_usage(replies: Transcript) -> None:
    check_stream_usage(replies.chunks("stream", Chunk)[-1].usage, replies.read_own("plain", Completion).usage)


def _check_max_tokens(replies: Transcript) -> None:
    reply, most = replies.read_own("one", Completion), replies.sent_number("one", "max_tokens")
    reason, tokens = reply.choices[0].finish_reason, reply.usage.completion_tokens
    is_cut = reason == "length" and tokens == most
    need(is_cut, f"{most} token was asked for: {tokens} came, ended by {reason}")


def _check_stop(replies: Transcript) -> None:
    plain, stopped = replies.text("plain"), replies.read_own("stop", Completion).choices[0]
    wanted = replies.sent_body("stop").get("stop")
    if not (isinstance(wanted, list) and len(wanted) == 1 and isinstance(wanted[0], str) and wanted[0]):
        raise MissingError("the request 'stop' has no stop string")
    before = plain.partition(wanted[0])[0]
    need(
        stopped.text == before and stopped.finish_reason == "stop",
        f"before {wanted[0]!r} the plain reply has {shorten(before)}; with it as the stop string came {shorten(stopped.text)},"
        f" ended by {stopped.finish_reason}",
    )


def _check_n(replies: Transcript) -> None:
    wanted = replies.sent_number("sampled", "n")
    indices = sorted(choice.index for choice in replies.read_own("sampled", Completion).choices)
    need(indices == list(range(wanted)), f"{wanted} choices were asked for, and those of the indices {indices} came")


def _check_seed(replies: Transcript) -> None:
    names = ("sampled", "sampled again")
    choices = [sorted(replies.read_own(name, Completion).choices, key=attrgetter("index")) for name in names]
    if replies.sent_body(names[0]) != replies.sent_body(names[1]):
        raise MissingError("the two sampled requests differ")
    first, again = ([choice.text for choice in each] for each in choices)
    need(first == again, f"the same seed gave {shorten(str(first))}, then {shorten(str(again))}")


def _check_logprobs(replies: Transcript) -> None:
    reply = replies.read_own("logprobs", Completion)
    likelihoods = reply.choices[0].logprobs
    if likelihoods is None:
        raise BrokenError("the reply has no logprobs")
    tokens = reply.usage.completion_tokens
    counts = [len(likelihoods.tokens), len(likelihoods.token_logprobs), len(likelihoods.top_logprobs)]
    need(counts == [tokens] * 3, f"{tokens} tokens have {counts} tokens, log-probabilities and likeliest ones")
    for own, top in zip(likelihoods.token_logprobs, likelihoods.top_logprobs, strict=True):
        if own is None or own > ROUNDING or not top:
            raise BrokenError(f"a token's log-probability is {own}, beside {shorten(str(top))}")
        likeliest = max(top.values())
        need(
            math.isclose(own, likeliest, abs_tol=1e-3),
            f"at temperature 0 a token of log-probability {own} was taken, and the likeliest has {likeliest}",
        )


def _check_alive(replies: Transcript) -> None:
    before, after = replies.text("plain"), replies.text("after errors")
    need(before == after, f"before the errors came {shorten(before)}, and after them {shorten(after)}")


def _check_hang_up(replies: Transcript) -> None:
    need(EVENT in replies.accepted("hung up").reply, "the stream that was to be hung up did not begin")
    most = replies.sent_number("hung up", "max_tokens")
    pages = [replies.accepted(f"metrics {when}").reply for when in ("before", "after")]
    running, generated = (
        [read_count(page, replies.kind.counters[name]) for page in pages] for name in ("running", "generation_tokens")
    )
    need(None not in (*running, *generated), "the metrics page does not count running requests and their tokens")
    need(running[-1] == 0, f"after the client hung up, {running[-1]} requests still run")
    gained = (generated[1] or 0) - (generated[0] or 0)
    # One token is of the request that follows.
    need(gained - 1 < most, f"the server made all {most} tokens for a client that had hung up")


def _check_many(replies: Transcript) -> None:
    for each in range(1, MANY + 1):
        need(replies.text(f"at once {each}").strip(), f"reply {each} of {MANY} at once has no text")


HOLDS: Mapping[str, Callable[[Transcript], None]] = {
    "contract_models": _check_models,
    "contract_completion": _check_completion,
    "contract_stream": _check_stream,
    "contract_stream_usage": _check_usage,
    "contract_stream_end": lambda replies: replies.check_end("stream", Chunk),
    "contract_max_tokens": _check_max_tokens,
    "contract_stop": _check_stop,
    "contract_n": _check_n,
    "contract_seed": _check_seed,
    "contract_logprobs": _check_logprobs,
    "contract_prompt_too_long": lambda replies: replies.check_refused("too long"),
    "contract_bad_body": lambda replies: replies.check_refused("no JSON", "wrong type"),
    "contract_unknown_model": lambda replies: replies.check_refused("unknown model"),
    "contract_alive": _check_alive,
    "contract_hang_up": _check_hang_up,
    "contract_many": _check_many,
    **table.HOLDS,
}
