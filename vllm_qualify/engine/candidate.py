"""A vLLM that may be served with, and what it says of recipes: by its table, or asked of its own code. No GPU is used."""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.engine import image, probe
from vllm_qualify.engine.container import ContainerPlan, run_once
from vllm_qualify.engine.environment import EngineEnvironment, find_engine
from vllm_qualify.engine.gpu import Fingerprint, compute_capability_of
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.engine.plan import CellPlan, Choice, Selection, select, server_plan
from vllm_qualify.engine.process import quiet_environment
from vllm_qualify.engine.server import (
    Engine,
    ServerPlan,
    config_text,
    container_environment,
    model_binds,
    passed_names,
)
from vllm_qualify.errors import CallerError, HostError, RecipeError, writing
from vllm_qualify.recipe import drift
from vllm_qualify.recipe.drift import Finding
from vllm_qualify.recipe.model import VLLM, Environment, Frozen, LoadedRecipe
from vllm_qualify.recipe.tables import Answer, EngineTable, Judgement, parse_answer, table_of
from vllm_qualify.secrets import redact

PROBE = Path(probe.__file__)
CHECK, CPU = "check", "cpu"
UNASKED = "whether options refuse each other: a table cannot tell; give --image or --python"
# Three imports of vLLM side by side, on a busy host.
PROBE_LIMIT_S = 600
# Nothing listens there.
PORT = 8000
DEFAULT_BRANCH = "main"
# A GPU type by name tells its capability. The memory only sets defaults, which change at 70 GiB; the count only bounds sizes.
NOMINAL_MEMORY_MIB, ENOUGH_GPUS = 80 * 1024, 64
MOST_NAMED = 3
VERSION = re.compile(r"v?([0-9]+\.[0-9]+(\.[0-9]+)?\S*)")


class Device(Frozen):
    """The GPUs that a server is to have, as vLLM's platform for CUDA is told of them."""

    name: str
    capability: tuple[int, int]
    memory_mib: int
    count: int


class Asked(Frozen):
    """A server that is to be judged: its config file's text, its environment, and its GPUs, or none for a CPU."""

    config: str
    environment: Environment
    device: Device | None


class Candidate(Frozen):
    """A version of vLLM by its table alone, or an engine that can be asked."""

    version: str
    table: EngineTable | None = None
    engine: Engine | None = None
    digest: str = ""


class Told(NamedTuple):
    """A finding, and the cells that it is about."""

    finding: Finding
    cells: list[str]


class Checked(NamedTuple):
    """What a candidate says of a recipe. `unasked` are what nobody could tell, in words."""

    version: str
    cells: list[str]
    told: list[Told]
    unasked: list[str]

    @property
    def problems(self) -> list[Told]:
        return [told for told in self.told if told.finding.is_problem]

    @property
    def fits(self) -> bool:
        return not self.problems

    def lines(self) -> Iterator[str]:
        """For people: problems first, each with its cells."""
        for told in sorted(self.told, key=lambda told: not told.finding.is_problem):
            state = "problem" if told.finding.is_problem else "note"
            yield f"{state:<8} {told.finding.kind:<20} {told.finding.told}  [{self._of(told.cells)}]"
        for unasked in self.unasked:
            yield f"{'unknown':<8} {unasked}"
        verdict = "fits" if self.fits else f"does not fit: {len(self.problems)} problems"
        yield f"vLLM {self.version}, {len(self.cells)} cells: {verdict}"

    def _of(self, cells: list[str]) -> str:
        if len(cells) == len(self.cells):
            return "every cell"
        more = f" and {len(cells) - MOST_NAMED} more" if len(cells) > MOST_NAMED else ""
        return ", ".join(cells[:MOST_NAMED]) + more

    def as_json(self) -> str:
        findings = [
            told.finding.model_dump() | {"is_problem": told.finding.is_problem, "cells": told.cells} for told in self.told
        ]
        answer = {"vllm": self.version, "fits": self.fits, "cells": self.cells, "findings": findings, "unknown": self.unasked}
        return json.dumps(answer, indent=2)


def find_candidate(
    vllm: str | None, image_reference: str | None, python: str | None, progress: Callable[[str], None]
) -> Candidate:
    """By at most one of a version, an image and an environment's folder; by none, the engine that `run` would take.

    Raises:
        CallerError: more than one, or no table of this version, or no such image.
        HostError: no engine there, or no Docker Engine.
        ReleaseError: the image is not one of vLLM.
    """
    given = [option for option, value in (("--vllm", vllm), ("--image", image_reference), ("--python", python)) if value]
    if len(given) > 1:
        raise CallerError(f"{' and '.join(given)} name different engines", "give one of them", given[1])
    if vllm:
        return _of_table(vllm)
    if image_reference:
        return _of_image(image_reference, progress)
    engine = _environment(python) if python else find_engine()
    return _of_engine(engine)


def find_other(name: str, progress: Callable[[str], None]) -> Candidate:
    """What `--against` names: a version, an environment's folder, or an image. Raises as `find_candidate`."""
    if VERSION.fullmatch(name):
        return _of_table(name)
    if Path(name).expanduser().exists():
        return _of_engine(_environment(name))
    return _of_image(name, progress)


def _of_table(version: str) -> Candidate:
    match = VERSION.fullmatch(version)
    table = table_of(match[1] if match else version)
    return Candidate(version=table.version, table=table)


def _of_image(reference: str, progress: Callable[[str], None]) -> Candidate:
    found = image.resolve(reference)
    image.pull(found, progress)
    return _of_engine(found)


def _of_engine(engine: Engine) -> Candidate:
    identity = engine.identity()
    if identity.kind != VLLM:
        problem = f"{KINDS[identity.kind].title} does not tell what it knows, and vllm-qualify has no table of it"
        raise CallerError(problem, "check a recipe's variants for vLLM against an image of vLLM", "--image")
    return Candidate(version=identity.version, engine=engine, digest=identity.digest)


def _environment(name: str) -> EngineEnvironment:
    path = Path(name).expanduser().absolute()
    python = path / "bin" / "python" if path.is_dir() else path
    if not python.is_file():
        raise CallerError(f"there is no Python at {python}", "give the folder of an environment with vLLM in it", "--python")
    return EngineEnvironment(python=python)


class Subject(NamedTuple):
    """A cell that is to be checked, with what decides it. `asked` is None where its GPU type is unknown."""

    cell: str
    server: ServerPlan
    asked: Asked | None


def check_recipe(
    loaded: LoadedRecipe, choice: Choice, candidate: Candidate, cache: Path, against: Candidate | None = None
) -> Checked:
    """Every chosen cell of the recipe; what `choice` leaves open is all that the recipe has.

    Raises:
        CallerError: the recipe has no such GPU type, variant or profile, or nothing of it is for this version.
        HostError: the candidate cannot be asked.
    """
    subjects = list(_subjects(loaded, choice, candidate))
    checked = _check(subjects, candidate, cache)
    if against is None:
        return checked
    before, now = _table(against, cache), _table(candidate, cache)
    changed = [(subject.cell, drift.changed_defaults(subject.server.arguments, before, now)) for subject in subjects]
    return checked._replace(told=[*checked.told, *_by_finding(changed)])


def check_plans(plans: Sequence[CellPlan], cache: Path) -> list[str]:
    """The planned cells, before a GPU is used. Returns what could not be told, in words.

    Raises:
        RecipeError: the engine does not take what the recipe asks of it; names each problem.
        HostError: the engine cannot be asked.
    """
    of_vllm = [plan for plan in plans if plan.server.kind == VLLM]
    if not of_vllm:
        return []
    engine, identity = of_vllm[0].server.engine, of_vllm[0].cell.release.engine
    candidate = Candidate(version=identity.version, engine=engine, digest=identity.digest)
    subjects = [Subject(plan.cell.id, plan.server, _asked(plan.server, _device_of(plan.fingerprint))) for plan in of_vllm]
    checked = _check(subjects, candidate, cache)
    if checked.problems:
        raise RecipeError(
            f"vLLM {candidate.version} does not take what the recipe asks of it",
            "mend the recipe, with by_version where it is to serve several versions; vllm-qualify recipe check tells more",
            CHECK,
            [f"{told.finding.told} ({', '.join(told.cells)})" for told in checked.problems],
            kind="recipe-drift",
        )
    return checked.unasked


def _subjects(loaded: LoadedRecipe, choice: Choice, candidate: Candidate) -> Iterator[Subject]:
    recipe, found = loaded.recipe, False
    for gpu_type, variant, profile in recipe.cells(candidate.version):
        wanted = ((choice.gpu_type, gpu_type), (choice.variant, variant), (choice.profile, profile))
        if recipe.variants[variant].of_vllm and all(chosen in (None, name) for chosen, name in wanted):
            selection = select(loaded, Choice(gpu_type=gpu_type, variant=variant, profile=profile), None)
            found = True
            yield _subject(loaded, selection, profile, candidate)
    if not found:
        known = f"it has the GPU types {', '.join(recipe.gpu_types)} and the variants {', '.join(recipe.variants)}"
        raise CallerError(f"the recipe has nothing of this choice for vLLM {candidate.version}", known, "RECIPE")


def _subject(loaded: LoadedRecipe, selection: Selection, profile: str, candidate: Candidate) -> Subject:
    # What a launcher takes of the recipe is no matter of the engine's.
    anywhere = selection.serving.model_copy(update={"memory_limit_gib": None})
    selection = selection.model_copy(update={"serving": anywhere})
    engine = candidate.engine or EngineEnvironment(python=Path("python3"))
    branch = selection.variant.revision or DEFAULT_BRANCH
    server = server_plan(loaded, selection, profile, engine, candidate.version, branch)
    cell = f"{loaded.recipe.name}/{selection.variant_name}/{selection.gpu_type}/{profile}"
    capability = compute_capability_of(selection.gpu_type)
    if selection.gpu_type == CPU:
        return Subject(cell, server, _asked(server, None))
    return Subject(cell, server, None if capability is None else _asked(server, _nominal_device(capability)))


def _asked(server: ServerPlan, device: Device | None) -> Asked:
    return Asked(config=config_text(server, PORT), environment=server.environment, device=device)


def _nominal_device(capability: str) -> Device:
    """The same for all types of a capability: each device is another process that imports vLLM."""
    name = f"a GPU of compute capability {capability}"
    return Device(name=name, capability=_pair(capability), memory_mib=NOMINAL_MEMORY_MIB, count=ENOUGH_GPUS)


def _device_of(machine: Fingerprint) -> Device | None:
    if machine.compute_capability is None:
        return None
    capability = _pair(machine.compute_capability)
    return Device(name=machine.name, capability=capability, memory_mib=machine.memory_mib, count=machine.count)


def _pair(capability: str) -> tuple[int, int]:
    major, minor = map(int, capability.split("."))
    return major, minor


def _check(subjects: Sequence[Subject], candidate: Candidate, cache: Path) -> Checked:
    cells = [subject.cell for subject in subjects]
    if candidate.engine is None:
        found = [(subject.cell, _by_table(subject, _table(candidate, cache))) for subject in subjects]
        return Checked(candidate.version, cells, _by_finding(found), [UNASKED])
    known = [subject for subject in subjects if subject.asked is not None]
    answer = ask(candidate, [subject.server for subject in known], [subject.asked for subject in known if subject.asked], cache)
    judgements = {subject.cell: judgement for subject, judgement in zip(known, answer.servers, strict=True)}
    found = [(subject.cell, _findings(subject, judgements.get(subject.cell), answer)) for subject in subjects]
    return Checked(candidate.version, cells, _by_finding(found), _unasked(subjects, judgements))


def _by_table(subject: Subject, table: EngineTable) -> list[Finding]:
    return drift.check(subject.server.arguments, subject.server.environment, table)


def _findings(subject: Subject, judgement: Judgement | None, answer: Answer) -> list[Finding]:
    """What the table tells; if that is nothing, what vLLM's own configuration tells. Its parser would tell the same again."""
    problems = _by_table(subject, answer.table)
    if problems or judgement is None or judgement.refused is None or subject.asked is None:
        return problems
    is_of_this_build = answer.build == "cuda" or subject.asked.device is None
    return [drift.refusal(judgement.refused, answer.version, is_of_this_build)]


def _unasked(subjects: Sequence[Subject], judgements: Mapping[str, Judgement]) -> list[str]:
    why: dict[str, list[str]] = {}
    for subject in subjects:
        judgement = judgements.get(subject.cell)
        if judgement is None:
            why.setdefault("the compute capability of its GPU type is not known", []).append(subject.cell)
        elif judgement.unclear:
            why.setdefault(judgement.unclear.splitlines()[0], []).append(subject.cell)
    return [
        f"whether options refuse each other, for {len(cells)} of {len(subjects)} cells: {reason}"
        for reason, cells in why.items()
    ]


def _by_finding(found: Iterable[tuple[str, list[Finding]]]) -> list[Told]:
    cells: dict[Finding, list[str]] = {}
    for cell, findings in found:
        for finding in findings:
            cells.setdefault(finding, []).append(cell)
    return [Told(finding, names) for finding, names in cells.items()]


def _table(candidate: Candidate, cache: Path) -> EngineTable:
    return candidate.table or ask(candidate, [], [], cache, resolve=True).table


# --- asking


def ask(
    candidate: Candidate, servers: Sequence[ServerPlan], asked: Sequence[Asked], cache: Path, resolve: bool = False
) -> Answer:
    """What the candidate's own code knows, and says of each server. An answer that leaves nothing open is kept in `cache`.

    Raises:
        HostError: its Python does not run, or gave no answer.
    """
    question = json.dumps({"servers": [one.model_dump() for one in asked], "resolve": resolve}, sort_keys=True)
    key = hashlib.sha256("\0".join([candidate.digest, PROBE.read_text(), question]).encode()).hexdigest()
    kept = cache / f"{key}.json"
    if kept.is_file():
        return parse_answer(kept.read_text())
    text = _answer(candidate, servers, question)
    answer = parse_answer(text)
    if not any(judgement.unclear for judgement in answer.servers):
        with writing(CHECK):
            cache.mkdir(parents=True, exist_ok=True)
            fresh = kept.with_suffix(f".{os.getpid()}")
            fresh.write_text(text)
            fresh.replace(kept)
    return answer


def _answer(candidate: Candidate, servers: Sequence[ServerPlan], question: str) -> str:
    if isinstance(candidate.engine, EngineImage):
        return _in_container(candidate.engine, servers, question)
    assert isinstance(candidate.engine, EngineEnvironment)  # noqa: S101  (a table alone is not asked)
    return _in_process(candidate.engine, question)


def _in_process(engine: EngineEnvironment, question: str) -> str:
    command = [str(engine.python), "-I", str(PROBE), question]
    environment = quiet_environment()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_LIMIT_S, env=environment, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise HostError(
            f"the engine's Python {engine.python} did not tell what it knows: {error}",
            "try again on a host that is less busy",
            CHECK,
        ) from error
    if done.returncode != 0:
        problem = f"the engine's Python {engine.python} did not tell what it knows"
        raise HostError(problem, "see the last lines that it wrote", CHECK, redact(done.stderr).splitlines()[-10:])
    return done.stdout


def _in_container(engine: EngineImage, servers: Sequence[ServerPlan], question: str) -> str:
    """Without a GPU, and with the models' files where a server of this image has them."""
    binds = {bind for server in servers for bind in model_binds(server)}
    plan = ContainerPlan(
        image=engine.pinned,
        platform=engine.platform,
        entrypoint="python3",
        arguments=["-I", "-c", PROBE.read_text(), question],
        environment=container_environment(servers[0]) if servers else {},
        passed=passed_names(),
        binds=sorted(binds, key=str),
    )
    return run_once(plan, CHECK, time_limit_s=PROBE_LIMIT_S)
