"""A version of vLLM that a recipe may run on: a table, a local environment, or an image."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from vllm_qualify.engine import image
from vllm_qualify.engine.environment import EngineEnvironment, EngineIdentity, find_engine
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.provision import identity_of
from vllm_qualify.engine.server import Engine
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.serving import VLLM, Environment
from vllm_qualify.recipe.tables import EngineTable, parse_version, table_of
from vllm_qualify.recipe.values import Frozen

VERSION = re.compile(r"v?[0-9]+\.[0-9]+[^/:]*")


class Device(Frozen):
    """The GPUs of a server, as vLLM's platform for CUDA gets them."""

    name: str
    capability: tuple[int, int]
    memory_mib: int
    count: int


class CandidateServer(Frozen):
    """A server to judge: its config file's text, its environment, and its GPUs, or None for a CPU."""

    config: str
    environment: Environment
    device: Device | None


class Candidate(Frozen):
    """A version of vLLM by its table alone, or an engine that can be asked. Engines with one `key` give the same answers."""

    version: str
    table: EngineTable | None = None
    engine: Engine | None = None
    key: str = ""


def find_candidate(
    vllm: str | None, image_reference: str | None, python: str | None, progress: Callable[[str], None]
) -> Candidate:
    """The candidate that a version, an image or an environment's folder names; without one, the engine that `run` would use.

    Raises CallerError if more than one is given, or there is no table of this version or no such image; HostError without an
    engine or Docker Engine; ReleaseError if the image is not one of vLLM.
    """
    given = [option for option, value in (("--vllm", vllm), ("--image", image_reference), ("--python", python)) if value]
    if len(given) > 1:
        raise CallerError(f"{' and '.join(given)} name different engines", "give one of them", given[1])
    if vllm:
        return _table_candidate(vllm, "--vllm")
    if image_reference:
        return _image_candidate(image_reference, "--image", progress)
    return _engine_candidate(_find_environment(python, "--python") if python else find_engine(), "--python")


def find_other(name: str, progress: Callable[[str], None]) -> Candidate:
    """What `--against` names: a version, an environment's folder, or an image. Raises as `find_candidate`."""
    option = "--against"
    if VERSION.fullmatch(name):
        return _table_candidate(name, option)
    if name.startswith(("/", "./", "../", "~")) or Path(name).is_dir():
        return _engine_candidate(_find_environment(name, option), option)
    return _image_candidate(name, option, progress)


def _table_candidate(version: str, option: str) -> Candidate:
    version = version.removeprefix("v")
    return Candidate(version=str(parse_version(version, option)), table=table_of(version, option))


def _image_candidate(reference: str, option: str, progress: Callable[[str], None]) -> Candidate:
    resolved = image.resolve(reference, option)
    image.pull(resolved, progress)
    return _engine_candidate(resolved, option)


def _engine_candidate(engine: Engine, option: str) -> Candidate:
    identity = identity_of(engine)
    if identity.kind != VLLM:
        problem = f"{KINDS[identity.kind].title} does not report what it knows, and vllm-qualify has no table of it"
        raise CallerError(problem, "check a recipe's variants for vLLM against a vLLM", option)
    return candidate_of(engine, identity)


def candidate_of(engine: Engine, identity: EngineIdentity) -> Candidate:
    """An engine as a candidate. The packages beside vLLM also decide what its configuration accepts."""
    key = json.dumps([identity.digest, identity.python, identity.packages], sort_keys=True)
    return Candidate(version=identity.version, engine=engine, key=key)


def _find_environment(name: str, option: str) -> EngineEnvironment:
    path = Path(name).expanduser().absolute()
    python = path / "bin" / "python" if path.is_dir() else path
    if not python.is_file():
        raise CallerError(f"there is no Python at {python}", "give the folder of an environment with vLLM in it", option)
    return EngineEnvironment(python=python)
