"""The checks of the API's contract."""

from typing import NamedTuple

from vllm_qualify.recipe.values import Frozen, Seconds


class ContractCheck(NamedTuple):
    """A yes-or-no check. Its `name` is that of its metric."""

    name: str
    meaning: str


def _check(name: str, meaning: str) -> ContractCheck:
    return ContractCheck(f"contract_{name}", meaning)


CHECKS = (
    _check("models", "/v1/models lists the served model"),
    _check("completion", "a completion has text, a finish reason and usage counts that agree"),
    _check("stream", "a stream at temperature 0 has the text of the plain reply"),
    _check("stream_usage", "a stream that is asked for usage ends with the plain reply's counts"),
    _check("stream_end", "a stream has one finish reason, and `[DONE]` is its end"),
    _check("max_tokens", "a reply of one token has one token, and ended by `length`"),
    _check("stop", "a stop string ends the text before it, by `stop`"),
    _check("n", "two choices were asked for, and two came"),
    _check("seed", "the same seed gives the same sampled texts again"),
    _check("logprobs", "each token has its log-probability, and those of the likeliest beside it"),
    _check("prompt_too_long", "a prompt that is too long gets an error of OpenAI's form, of a status 4xx"),
    _check("bad_body", "a body that is no JSON, or has a wrong type, gets such an error"),
    _check("unknown_model", "a model that is not served gets such an error"),
    _check("alive", "after these errors the server still gives the same text"),
    _check("hang_up", "a client that hangs up frees its place: the server stops its request"),
    _check("many", "64 requests at once all get their reply"),
)
NAMES = tuple(check.name for check in CHECKS)


class Contract(Frozen):
    """What of its contract a cell's server is asked. `not_asked` has the other checks, each with its reason."""

    not_asked: dict[str, str] = {}
    time_limit_s: Seconds = 120.0

    @property
    def checks(self) -> list[ContractCheck]:
        """The checks that are asked."""
        return [check for check in CHECKS if check.name not in self.not_asked]
