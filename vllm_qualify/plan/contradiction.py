"""Whether a plan serves what it names: a statement names the release and the parts, and a deployment gets the server."""

from collections.abc import Iterator

from vllm_qualify.engine.environment import EngineIdentity, digest_of
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.server import MODEL, Part, ServerPlan
from vllm_qualify.plan.cell import CellPlan, Release
from vllm_qualify.plan.parts import repositories_named, texts_of
from vllm_qualify.plan.server import PATHS


def contradiction(plan: CellPlan) -> str:
    """In what the server of a plan is another one than its release and its parts say, in words; empty if it is the same."""
    server, release = plan.server, plan.cell.release
    return "; ".join(
        [
            *_contradict_model(server, release),
            *_contradict_engine(server, release.engine),
            *_contradict_parts(server),
            *_contradict_machine(plan),
            *_contradict_purpose(plan),
        ]
    )


def _contradict_model(server: ServerPlan, release: Release) -> Iterator[str]:
    named = f"{release.model} at {release.revision}"
    if not server.is_local:
        if (server.model, server.revision) != (release.model, release.revision):
            yield f"it serves {server.model} at {server.revision}, and names {named}"
    elif not (release.model.startswith(PATHS) and release.revision.startswith("sha256:")):
        yield f"it serves a folder, and names {named}"
    elif digest_of(release.files) != release.revision:
        yield "its files are not those of its digest"


def _contradict_engine(server: ServerPlan, named: EngineIdentity) -> Iterator[str]:
    engine = server.engine
    digest = engine.digest if isinstance(engine, EngineImage) else named.digest
    if (server.kind, engine.launcher, digest) != (named.kind, named.launcher, named.digest):
        served = f"{server.kind} {digest} by {engine.launcher}"
        yield f"its engine is {served}, and it names {named.kind} {named.digest} by {named.launcher}"


def _contradict_machine(plan: CellPlan) -> Iterator[str]:
    if plan.fingerprint.gpu_type != plan.cell.gpu_type:
        yield f"its machine has {plan.fingerprint.gpu_type}, and it names {plan.cell.gpu_type}"


def _contradict_purpose(plan: CellPlan) -> Iterator[str]:
    if (plan.new_anchor or plan.load_alone) and not plan.establishes:
        yield "it is held against less than other runs are, and becomes no baseline"


def _contradict_parts(server: ServerPlan) -> Iterator[str]:
    for part in server.parts:
        if not _is_named(server, part):
            yield f"its {part.option} is not what its part names, {part.name} at {part.revision}"
    pinned = {(part.option, part.name) for part in server.parts}
    models = [] if server.is_local else [(MODEL, server.model)]
    for option, name in [*models, *repositories_named(server)]:
        if (option, name) not in pinned:
            yield f"its {option} {name} has no part, so no commit of it is named"


def _is_named(server: ServerPlan, part: Part) -> bool:
    if part.option == MODEL:
        return (part.name, part.revision) == (server.model, server.revision)
    return part.name in texts_of(server.arguments.get(part.option))
