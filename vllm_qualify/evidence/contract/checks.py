"""The checks of the contract, each on kept requests and replies alone."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from vllm_qualify.engine.kinds.base import EngineKind
from vllm_qualify.evidence.contract.asked import Asked, check_end, need, number, of_alias
from vllm_qualify.evidence.contract.asking import MANY, counted
from vllm_qualify.evidence.contract.capabilities import table
from vllm_qualify.evidence.contract.exchange import EXCHANGES, read_exchanges
from vllm_qualify.evidence.contract.replies import (
    BrokenError,
    Chunk,
    Completion,
    MissingError,
    Models,
    Said,
    check_refused,
    shown,
)
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words, invalid, valid
from vllm_qualify.recipe.contract import Contract

# A log-probability is at most 0; the last digits of a sum can be above.
ROUNDING = 1e-6


def parse_contract(folder: Path, contract: Contract, model: str, kind: EngineKind) -> list[Measurement]:
    """The measurement of each check that is asked, 1.0 or 0.0, from what `measure_contract` wrote."""
    source = f"{folder.name}/{EXCHANGES}"
    try:
        asked = Asked(Said(read_exchanges(folder)), model, kind, contract.aliases)
    except UNUSABLE as error:
        return [invalid(check.name, f"no usable exchanges: {in_words(error)}", source) for check in contract.checks]
    return [_measured(check.name, asked, source) for check in contract.checks]


def _measured(metric: str, asked: Asked, source: str) -> Measurement:
    try:
        HOLDS[metric](asked)
    except MissingError as why:
        return invalid(metric, str(why), source)
    except BrokenError as what:
        return valid(metric, 0.0, source, sample_count=1, finding=str(what))
    except UNUSABLE as error:
        return invalid(metric, f"no usable exchanges: {in_words(error)}", source)
    return valid(metric, 1.0, source, sample_count=1)


def _models(asked: Asked) -> None:
    names = [card.id for card in asked.said.read("models", Models).data]
    need(asked.model in names, f"/v1/models lists {shown(', '.join(names))}, and not the served model")
    for alias in asked.aliases:
        need(alias in names, f"/v1/models lists {shown(', '.join(names))}, and not the alias {shown(alias)}")
        # Whether the reply names the alias or the model's first name is the engine's choice.
        reply = asked.said.read(of_alias(alias), Completion)
        need(reply.choices[0].text.strip(), f"the reply to a request for {shown(alias)} has no text")


def _completion(asked: Asked) -> None:
    reply = asked.completion("plain")
    need(reply.choices[0].text.strip(), "the reply has no text")
    most = number(asked.said, "plain", "max_tokens")
    tokens = reply.usage.completion_tokens
    need(0 < tokens <= most, f"the reply has {tokens} tokens of at most {most}")


def _stream(asked: Asked) -> None:
    streamed = "".join(choice.text for chunk in asked.said.chunks("stream", Chunk) for choice in chunk.choices)
    plain = asked.text("plain")
    need(streamed == plain, f"the stream has {shown(streamed)}, and the plain reply {shown(plain)}")


def _stream_usage(asked: Asked) -> None:
    usage, plain = asked.said.chunks("stream", Chunk)[-1].usage, asked.completion("plain").usage
    need(usage is not None, "the stream's last chunk has no usage counts")
    need(usage == plain, f"the stream counts {usage}, and the plain reply {plain}")


def _stream_end(asked: Asked) -> None:
    chunks = asked.said.chunks("stream", Chunk)
    check_end(asked.said.events("stream"), [choice.finish_reason for chunk in chunks for choice in chunk.choices])


def _max_tokens(asked: Asked) -> None:
    reply, most = asked.completion("one"), number(asked.said, "one", "max_tokens")
    reason = reply.choices[0].finish_reason
    need(
        reason == "length" and reply.usage.completion_tokens == most,
        f"{most} token was asked for: {reply.usage.completion_tokens} came, ended by {reason}",
    )


def _stop(asked: Asked) -> None:
    plain, stopped = asked.text("plain"), asked.completion("stop").choices[0]
    wanted = asked.said.sent("stop").get("stop")
    if not (isinstance(wanted, list) and len(wanted) == 1 and isinstance(wanted[0], str) and wanted[0]):
        raise MissingError("the request 'stop' has no stop string")
    before = plain.partition(wanted[0])[0]
    need(
        stopped.text == before and stopped.finish_reason == "stop",
        f"before {wanted[0]!r} the plain reply has {shown(before)}; with it as the stop string came {shown(stopped.text)},"
        f" ended by {stopped.finish_reason}",
    )


def _n(asked: Asked) -> None:
    wanted = number(asked.said, "sampled", "n")
    indices = sorted(choice.index for choice in asked.completion("sampled").choices)
    need(indices == list(range(wanted)), f"{wanted} choices were asked for, and those of the indices {indices} came")


def _seed(asked: Asked) -> None:
    first, again = (_texts(asked, name) for name in ("sampled", "sampled again"))
    if asked.said.sent("sampled") != asked.said.sent("sampled again"):
        raise MissingError("the two sampled requests differ")
    need(first == again, f"the same seed gave {shown(str(first))}, then {shown(str(again))}")


def _texts(asked: Asked, name: str) -> list[str]:
    return [choice.text for choice in sorted(asked.completion(name).choices, key=lambda choice: choice.index)]


def _logprobs(asked: Asked) -> None:
    reply = asked.completion("logprobs")
    likelihoods = reply.choices[0].logprobs
    if likelihoods is None:
        raise BrokenError("the reply has no logprobs")
    tokens = reply.usage.completion_tokens
    counts = [len(likelihoods.tokens), len(likelihoods.token_logprobs), len(likelihoods.top_logprobs)]
    need(counts == [tokens] * 3, f"{tokens} tokens have {counts} tokens, log-probabilities and likeliest ones")
    for own, top in zip(likelihoods.token_logprobs, likelihoods.top_logprobs, strict=True):
        need(own is not None and own <= ROUNDING and top, f"a token's log-probability is {own}, beside {shown(str(top))}")
        likeliest = max((top or {}).values())
        need(
            own is not None and math.isclose(own, likeliest, abs_tol=1e-3),
            f"at temperature 0 a token of log-probability {own} was taken, and the likeliest has {likeliest}",
        )


def _refusal(*names: str) -> Callable[[Asked], None]:
    def check(asked: Asked) -> None:
        for name in names:
            check_refused(asked.said, name)

    return check


def _alive(asked: Asked) -> None:
    before, after = asked.text("plain"), asked.text("after errors")
    need(before == after, f"before the errors came {shown(before)}, and after them {shown(after)}")


def _hang_up(asked: Asked) -> None:
    need("data:" in asked.said.answered("hung up").reply, "the stream that was to be hung up did not begin")
    most = number(asked.said, "hung up", "max_tokens")
    running, generated = (
        [counted(asked.said.answered(f"metrics {when}").reply, asked.kind.counters[name]) for when in ("before", "after")]
        for name in ("running", "generation_tokens")
    )
    need(None not in (*running, *generated), "the metrics page does not count running requests and their tokens")
    need(running[-1] == 0, f"after the client hung up, {running[-1]} requests still run")
    gained = (generated[1] or 0) - (generated[0] or 0)
    # One token is of the request that follows.
    need(gained - 1 < most, f"the server made all {most} tokens for a client that had hung up")


def _many(asked: Asked) -> None:
    for each in range(1, MANY + 1):
        need(asked.text(f"at once {each}").strip(), f"reply {each} of {MANY} at once has no text")


HOLDS: Mapping[str, Callable[[Asked], None]] = {
    "contract_models": _models,
    "contract_completion": _completion,
    "contract_stream": _stream,
    "contract_stream_usage": _stream_usage,
    "contract_stream_end": _stream_end,
    "contract_max_tokens": _max_tokens,
    "contract_stop": _stop,
    "contract_n": _n,
    "contract_seed": _seed,
    "contract_logprobs": _logprobs,
    "contract_prompt_too_long": _refusal("too long"),
    "contract_bad_body": _refusal("no JSON", "wrong type"),
    "contract_unknown_model": _refusal("unknown model"),
    "contract_alive": _alive,
    "contract_hang_up": _hang_up,
    "contract_many": _many,
    **table.HOLDS,
}
