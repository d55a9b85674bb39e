"""What a model's own `generation_config.json` does to requests, where vLLM reads it: a warning before anything is measured.

vLLM takes it with `--generation-config auto`, its default, for what a request does not say (vllm/config/model.py,
`get_diff_sampling_param`). The requests of vllm-qualify say their temperature, 0, and how many tokens they want: those of the
smoke test, of lm-eval's `local-completions` and of `vllm bench serve --temperature 0`. So temperature, top_k, top_p and min_p
change what clients get, and neither loads nor the scores of tasks without `sampling`. Penalties change all of them. A
`max_new_tokens` was a cap on every request before vLLM 0.17, and since then it is the default of chats and responses that
name no length (`get_max_tokens` of its entry points); completions have one of their own, 16.
"""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version
from pydantic import ValidationError

from vllm_qualify.engine.hub import cache_folder, fetch_configuration, folder_name
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.sampling import Sampling
from vllm_qualify.recipe.serving import VLLM

NAME = "generation_config.json"
OPTION, OVERRIDE = "generation-config", "override-generation-config"
REMEDY = f"`{OPTION}: vllm` among the server's arguments leaves the file aside"
# The values that change nothing.
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
NEWER_PENALTIES, PENALTIES_SINCE = ("presence_penalty", "frequency_penalty"), Version("0.31")
LENGTH = "max_new_tokens"
DEFAULT_LENGTH_SINCE = Version("0.17")
MOST_BYTES = 1_000_000
OF_PENALTIES = "which changes every reply, scores and loads too, also at temperature 0"
OF_SAMPLING = "for requests that do not set it; loads, and tasks without `sampling`, ask at temperature 0 and do not show this"


def generation_warnings(server: ServerPlan, version: str) -> list[str]:
    """What the model's file changes in replies, in words; none if the file is not on this machine, or vLLM does not read it.

    `version` is vLLM's, or empty if it is not known yet.
    """
    file = _find_file(server)
    if server.kind != VLLM or file is None or not file.is_file():
        return []
    known = _parse_version(version)
    document = _read_document(file)
    if document is None:
        return [f"the model's {NAME} is no JSON object that vLLM could read"]
    overridden = {name.partition(".")[0] for name in _override_of(server)}
    own = {name: value for name, value in document.items() if _is_number(value) and name not in overridden}
    is_newer = known is None or known >= PENALTIES_SINCE
    penalties = {name: PENALTIES[name] for name in PENALTIES if is_newer or name not in NEWER_PENALTIES}
    lines = _warn_of_length(own, known)
    for neutral, effect in ((penalties, OF_PENALTIES), (SAMPLING, OF_SAMPLING)):
        changes = [f"{name} {own[name]:g}" for name, value in neutral.items() if own.get(name, value) != value]
        lines += [f"{', '.join(changes)}, {effect}"] if changes else []
    return [f"the model's {NAME} has {line}; {REMEDY}" for line in lines]


def recommended_sampling(server: ServerPlan, place: str) -> Sampling:
    """What a client gets that says nothing: the numbers of the model's file, over which go those of the recipe's server.

    The file is fetched if it is not on this machine. A file that says `do_sample` without a temperature means 1, as vLLM does.

    Raises CallerError if the server leaves the file aside, it recommends nothing, or its numbers are none of sampling;
    HostError if the hub does not answer.
    """
    remedy = "write the numbers of the model's card instead, like `sampling: {temperature: 0.6, top_p: 0.95}`"
    file = _find_file(server)
    if file is None:
        raise CallerError(f"the server does not read the model's own {NAME}, by its options", remedy, place)
    if not server.is_local and not file.is_file():
        fetch_configuration(server.model, server.revision, place)
        file = _find_file(server) or file
    document = (_read_document(file) if file.is_file() else None) or {}
    known = (*SAMPLING, *PENALTIES)
    given = {name: value for name, value in (document | _override_of(server)).items() if name in known and value is not None}
    if not given and document.get("do_sample") is not True:
        raise CallerError(f"the model has no {NAME} that recommends how to sample", remedy, place)
    try:
        return Sampling.model_validate({"temperature": SAMPLING["temperature"]} | given)
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"the model's {NAME} or {OVERRIDE} has a {first['loc'][0]} that is no number of sampling: {first['msg']}"
        raise CallerError(problem, remedy, place) from error


def _find_file(server: ServerPlan) -> Path | None:
    """Where the file would be on this machine; None if the server reads no such file, or that of another repository."""
    named = server.arguments.get(OPTION, "auto")
    if named == "vllm" or "hf-config-path" in server.arguments:
        return None
    if named != "auto":
        return Path(str(named), NAME) if Path(str(named)).is_absolute() else None
    if server.revision is None:
        return Path(server.model, NAME)
    folder, commit = cache_folder() / folder_name(server.model), server.revision
    # What the cache has no branch of is a commit.
    with suppress(OSError, ValueError):
        commit = (folder / "refs" / server.revision).read_text(encoding="ascii").strip()
    return folder / "snapshots" / commit / NAME


def _read_document(file: Path) -> dict[str, Any] | None:
    """None if the file is too large, or no JSON object."""
    if file.stat().st_size > MOST_BYTES:
        return None
    try:
        document: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _override_of(server: ServerPlan) -> dict[str, Any]:
    """What the recipe itself sets."""
    given: Any = server.arguments.get(OVERRIDE, {})
    try:
        given = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return {}
    return {str(name): value for name, value in given.items()} if isinstance(given, dict) else {}


def _parse_version(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None


def _warn_of_length(own: dict[str, float], version: Version | None) -> list[str]:
    if LENGTH not in own:
        return []
    if version is None:
        effect = "which before vLLM 0.17 ends every reply there, and since then those to chats without max_tokens"
    elif version < DEFAULT_LENGTH_SINCE:
        effect = f"where vLLM {version} ends every reply, whatever a request asks for, so that a load of longer ones is invalid"
    else:
        effect = (
            "where replies to chats and /v1/responses without max_tokens end, while /v1/completions ends them after 16; all"
            " requests of vllm-qualify have one"
        )
    return [f"{LENGTH} {own[LENGTH]:g}, {effect}"]
