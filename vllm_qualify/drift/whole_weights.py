"""Whether the weights of planned servers are whole, by what the engine itself knows of the model. No GPU is used."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import ValidationError

from vllm_qualify.drift import weights_probe
from vllm_qualify.drift.asking import CHECK
from vllm_qualify.engine.launchers.base import Script
from vllm_qualify.engine.launchers.registry import launcher_of
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.engine.weights import USUAL_LOADERS, refuse_weights
from vllm_qualify.errors import HostError
from vllm_qualify.recipe.serving import VLLM
from vllm_qualify.recipe.values import Frozen

PROBE = Path(weights_probe.__file__)
ASKING = "asking the engine whether the weights are whole"
# It imports PyTorch and transformers, on a busy host; a model of 100,000 tensors takes half a minute.
LIMIT_S = 300.0
MOST_NAMED = 3
# With these the model is not what its folder says.
CHANGING = ("hf-overrides", "config-format", "hf-config-path", "model-impl")


class Answer(Frozen):
    """What the engine's transformers says of a checkpoint; `unsure` is why it says nothing."""

    lacking: list[str]
    misshapen: list[tuple[str, list[int], list[int]]]
    unsure: str | None


def check_parameters(servers: Iterable[ServerPlan], check: Callable[[], None] = lambda: None) -> list[str]:
    """Check that the files of each server's model give every parameter of it, in its shape, as far as the engine can tell.

    Returns in words what is not known. Raises ReleaseError of the kind `incomplete-model`, and what `check` raises.
    """
    asked = {(server.model, server.revision): server for server in servers if _can_be_asked(server)}
    unknown = []
    for server in asked.values():
        answer = _ask_probe(server, check)
        if answer.unsure is not None:
            unknown.append(f"whether the weights of {server.model} have every parameter of the model: {answer.unsure}")
            continue
        if answer.lacking:
            refuse_weights(server.model, f"no tensor gives {_name_some(answer.lacking)}", CHECK)
        if answer.misshapen:
            name, has, wants = answer.misshapen[0]
            shapes = f"the shape {has}, where the model has {wants}" if wants else "another shape than the model has"
            refuse_weights(server.model, f"{name[:200]} has {shapes}", CHECK)
    return unknown


def _can_be_asked(server: ServerPlan) -> bool:
    """Other loaders read other files; and a model that needs code of its own, transformers does not make without it."""
    is_usual = server.arguments.get("load-format", "auto") in USUAL_LOADERS
    is_changed = any(name.partition(".")[0] in CHANGING for name in server.arguments)
    return server.kind == VLLM and is_usual and not is_changed and not server.trust_remote_code


def _ask_probe(server: ServerPlan, check: Callable[[], None]) -> Answer:
    question = json.dumps({"model": server.served_from, "revision": server.revision})
    try:
        text = launcher_of(server.engine).ask(server.engine, Script(PROBE, question, [server], ASKING, CHECK, LIMIT_S), check)
        return Answer.model_validate_json(text)
    except HostError as error:
        return _answer_unsure(error.problem)
    except ValidationError:
        return _answer_unsure("the engine did not answer")


def _answer_unsure(why: str) -> Answer:
    return Answer(lacking=[], misshapen=[], unsure=why)


def _name_some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(name[:200] for name in names[:MOST_NAMED]) + more
