"""Whether a server takes requests as long as a load's, as far as that is known before it starts."""

import json
import re

from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.serving import VLLM

OPTION = "max-model-len"
# vLLM's `human_readable_int`: small letters are decimal, capital ones binary.
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def check_length(server: ServerPlan, longest_tok: int, asked: str, place: str) -> None:
    """Raises CallerError if `longest_tok`, prompt and reply, are more than the server takes. `asked` says what has so many."""
    limit = _limit_of(server)
    if limit is None or longest_tok <= limit[0]:
        return
    most, says = limit
    problem = f"{asked} has {longest_tok:,} tokens, prompt and reply, and {says} {most:,}"
    raise CallerError(problem, f"shorten it, or serve a longer context: {OPTION}, as far as the model goes", place)


def _limit_of(server: ServerPlan) -> tuple[int, str] | None:
    """The most tokens of a request, and what says so; None if only the engine knows."""
    if server.kind != VLLM:
        return None
    given = _tokens(server.arguments.get(OPTION))
    if given is not None:
        return given, f"{OPTION} is"
    of_model = _of_model(server) if OPTION not in server.arguments and server.is_local else None
    return None if of_model is None else (of_model, "max_position_embeddings of the model's config.json is")


def _tokens(given: object) -> int | None:
    """As vLLM reads a number of tokens; None if it is none of these, like `auto`."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kKmMgG]?)", str(given))
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def _of_model(server: ServerPlan) -> int | None:
    """Of a model in a folder. A stretched one and one of several parts are left to the engine."""
    (folder, *_) = server.local_paths
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        # The engine tells what is wrong with it.
        return None
    if not isinstance(config, dict) or any(_stretches(config.get(name)) for name in ("rope_scaling", "rope_parameters")):
        return None
    most = config.get("max_position_embeddings")
    return most if type(most) is int and most > 0 else None


def _stretches(rope: object) -> bool:
    """Whether a configuration of rotary embeddings, or what is in its place, changes how far they go."""
    return bool(rope) and not (isinstance(rope, dict) and rope.get("rope_type") == "default")
