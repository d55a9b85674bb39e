"""Whether the weights of planned servers are whole, by what the engine itself knows of the model. No GPU is used."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from vllm_qualify.drift import weights_probe
from vllm_qualify.drift.asking import CHECK, PINNED, configuration_digest, keep_answer
from vllm_qualify.drift.candidate import candidate_of
from vllm_qualify.engine.launchers.base import Script
from vllm_qualify.engine.launchers.registry import launcher_of
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.engine.weights import USUAL_LOADERS, read_headers, refuse_weights
from vllm_qualify.errors import HostError, writing
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


WHOLE = Answer(lacking=[], misshapen=[], unsure=None)


def check_parameters(servers: Iterable[ServerPlan], cache: Path, check: Callable[[], None] = lambda: None) -> list[str]:
    """Check that the files of each server's model give every parameter of it, in its shape, as far as the engine can tell.

    Returns in words what is not known. That a model is whole is kept in `cache`: the engine takes eight seconds to say so.
    Raises ReleaseError of the kind `incomplete-model`, HostError, and what `check` raises.
    """
    asked = {(server.model, server.revision): server for server in servers if _can_be_asked(server)}
    unknown = []
    for server in asked.values():
        answer = _ask_once(server, cache, check)
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


def _ask_once(server: ServerPlan, cache: Path, check: Callable[[], None]) -> Answer:
    kept = _kept_file(server, cache)
    if kept and kept.exists():
        return WHOLE
    answer = _ask_probe(server, check)
    if kept and answer == WHOLE:
        keep_answer(kept, answer.model_dump_json())
    return answer


def _kept_file(server: ServerPlan, cache: Path) -> Path | None:
    """Where it is kept that this engine finds this model whole; None if the model can change without a sign."""
    if not server.is_local and not PINNED.fullmatch(str(server.revision)):
        return None
    engine = candidate_of(server.engine, launcher_of(server.engine).identity(server.engine))
    key = "\0".join([engine.key, PROBE.read_text(), *_describe_model(server)])
    return cache / f"whole-{hashlib.sha256(key.encode()).hexdigest()}.json"


def _describe_model(server: ServerPlan) -> Iterator[str]:
    """All that the probe reads of a model: the hub's commit; or a folder's configuration, and its tensors' names and shapes."""
    yield server.served_from
    if not server.is_local:
        yield str(server.revision)
        return
    folder = Path(server.model)
    with writing(CHECK):
        yield configuration_digest(folder)
        yield from (f"{name} {hashlib.sha256(header).hexdigest()}" for name, header in read_headers(folder))


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
