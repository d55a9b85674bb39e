"""A version of vLLM, and what it says about recipes: by its table, or by its own code. No GPU is used."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from vllm_qualify.engine import image, probe
from vllm_qualify.engine.environment import EngineEnvironment, EngineIdentity, find_engine
from vllm_qualify.engine.gpu import Fingerprint, compute_capability_of
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.engine.launch import identity_of
from vllm_qualify.engine.launchers.base import Script
from vllm_qualify.engine.launchers.registry import launcher_of
from vllm_qualify.engine.plan import CellPlan, Choice, Selection, select, server_plan
from vllm_qualify.engine.server import Engine, ServerPlan, config_text
from vllm_qualify.errors import CallerError, HostError, RecipeError, writing
from vllm_qualify.recipe import drift
from vllm_qualify.recipe.drift import Finding
from vllm_qualify.recipe.recipe import LoadedRecipe
from vllm_qualify.recipe.serving import VLLM, Environment
from vllm_qualify.recipe.tables import (
    EngineJudgement,
    EngineTable,
    ModelKind,
    ProbeAnswer,
    parse_answer,
    parse_version,
    table_of,
)
from vllm_qualify.recipe.values import Frozen

PROBE = Path(probe.__file__)
CHECK, CPU = "check", "cpu"
ASKING = "asking vLLM what it takes"
UNASKED = "whether options refuse each other: a table cannot tell; give --image or --python"
# Enough for three imports of vLLM side by side on a busy host.
PROBE_LIMIT_S = 600
# Linux allows 128 KiB in an argument.
LONGEST_QUESTION = 100_000
# Nothing listens there.
PORT = 8000
DEFAULT_BRANCH = "main"
# A GPU type's name gives its capability. The memory only sets defaults, which change at 70 GiB; the count only bounds sizes.
NOMINAL_MEMORY_MIB, ENOUGH_GPUS = 80 * 1024, 64
MOST_NAMED = 3
VERSION = re.compile(r"v?[0-9]+\.[0-9]+[^/:]*")
# A commit of the hub, not a branch or a tag.
PINNED = re.compile("[0-9a-f]{40}")


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


class FindingOfCells(NamedTuple):
    """A finding, and the cells that it is about."""

    finding: Finding
    cells: list[str]


class Checked(NamedTuple):
    """What a candidate says about a recipe: the `cells`, the findings in `told`, and in words what is `unknown`.

    `unjudged` counts the cells that an engine could not judge completely. `left_out` has the variants without a cell.
    """

    version: str
    cells: list[str]
    told: list[FindingOfCells]
    unknown: list[str]
    unjudged: int = 0
    left_out: list[str] = []

    @property
    def problems(self) -> list[FindingOfCells]:
        return [told for told in self.told if told.finding.is_problem]

    @property
    def fits(self) -> bool | None:
        """Whether the recipe fits; None if no problem was found, but not everything could be checked."""
        if self.problems:
            return False
        return None if self.unjudged else True

    def lines(self) -> Iterator[str]:
        """Lines for people: problems first, each with its cells."""
        for told in sorted(self.told, key=lambda told: not told.finding.is_problem):
            state = "problem" if told.finding.is_problem else "note"
            yield f"{state:<8} {told.finding.kind:<20} {told.finding.told}  [{self._of(told.cells)}]"
        yield from (f"{'unknown':<8} {what}" for what in self.unknown)
        yield from (f"{'left out':<8} {what}" for what in self.left_out)
        yield f"vLLM {self.version}, {len(self.cells)} cells: {self._verdict()}"

    def _verdict(self) -> str:
        if self.problems:
            return f"does not fit: {len(self.problems)} problems"
        return f"no problem found, {self.unjudged} cells not judged to the end" if self.unjudged else "fits"

    def _of(self, cells: list[str]) -> str:
        if len(cells) == len(self.cells):
            return "every cell"
        more = f" and {len(cells) - MOST_NAMED} more" if len(cells) > MOST_NAMED else ""
        return ", ".join(cells[:MOST_NAMED]) + more

    def as_json(self) -> str:
        """The findings as JSON; `fits` is true, false or null."""
        findings = [
            told.finding.model_dump() | {"is_problem": told.finding.is_problem, "cells": told.cells} for told in self.told
        ]
        answer = {"vllm": self.version, "fits": self.fits, "cells": self.cells, "findings": findings}
        return json.dumps(answer | {"unknown": self.unknown, "left_out": self.left_out}, indent=2)


def find_candidate(
    vllm: str | None, image_reference: str | None, python: str | None, progress: Callable[[str], None]
) -> Candidate:
    """The candidate that a version, an image or an environment's folder names; without one, the engine that `run` would use.

    Raises:
        CallerError: more than one is given, or there is no table of this version or no such image.
        HostError: there is no engine, or no Docker Engine.
        ReleaseError: the image is not one of vLLM.
    """
    given = [option for option, value in (("--vllm", vllm), ("--image", image_reference), ("--python", python)) if value]
    if len(given) > 1:
        raise CallerError(f"{' and '.join(given)} name different engines", "give one of them", given[1])
    if vllm:
        return _of_table(vllm, "--vllm")
    if image_reference:
        return _of_image(image_reference, "--image", progress)
    return _of_engine(_environment(python, "--python") if python else find_engine(), "--python")


def find_other(name: str, progress: Callable[[str], None]) -> Candidate:
    """What `--against` names: a version, an environment's folder, or an image. Raises as `find_candidate`."""
    option = "--against"
    if VERSION.fullmatch(name):
        return _of_table(name, option)
    if name.startswith(("/", "./", "../", "~")) or Path(name).is_dir():
        return _of_engine(_environment(name, option), option)
    return _of_image(name, option, progress)


def _of_table(version: str, option: str) -> Candidate:
    version = version.removeprefix("v")
    return Candidate(version=str(parse_version(version, option)), table=table_of(version, option))


def _of_image(reference: str, option: str, progress: Callable[[str], None]) -> Candidate:
    found = image.resolve(reference, option)
    image.pull(found, progress)
    return _of_engine(found, option)


def _of_engine(engine: Engine, option: str) -> Candidate:
    identity = identity_of(engine)
    if identity.kind != VLLM:
        problem = f"{KINDS[identity.kind].title} does not tell what it knows, and vllm-qualify has no table of it"
        raise CallerError(problem, "check a recipe's variants for vLLM against a vLLM", option)
    return _candidate(engine, identity)


def _candidate(engine: Engine, identity: EngineIdentity) -> Candidate:
    """An engine as a candidate. The packages beside vLLM also decide what its configuration accepts."""
    key = json.dumps([identity.digest, identity.python, identity.packages], sort_keys=True)
    return Candidate(version=identity.version, engine=engine, key=key)


def _environment(name: str, option: str) -> EngineEnvironment:
    path = Path(name).expanduser().absolute()
    python = path / "bin" / "python" if path.is_dir() else path
    if not python.is_file():
        raise CallerError(f"there is no Python at {python}", "give the folder of an environment with vLLM in it", option)
    return EngineEnvironment(python=python)


class Subject(NamedTuple):
    """A cell to check, with its server and the question about it. `asked` is None if its GPU type is unknown."""

    cell: str
    server: ServerPlan
    asked: CandidateServer | None


def check_recipe(
    loaded: LoadedRecipe, choice: Choice, candidate: Candidate, cache: Path, against: Candidate | None = None
) -> Checked:
    """Check every chosen cell of the recipe. What `choice` leaves open means all that the recipe has.

    Raises:
        CallerError: the recipe has no such GPU type, variant or profile, or nothing of it is for this version.
        HostError: the candidate cannot be asked.
    """
    left_out = list(_left_out(loaded, choice, candidate.version))
    subjects = list(_subjects(loaded, choice, candidate, left_out))
    checked = _check(subjects, candidate, cache)._replace(left_out=left_out)
    if against is None:
        return checked
    before, now = _table(against, cache), _table(candidate, cache)
    changed = [(subject.cell, drift.changed_defaults(subject.server.arguments, before, now)) for subject in subjects]
    unresolved = [
        f"what vLLM {table.version} makes of options that are left out, for {kind} models"
        for table in (before, now)
        for kind in get_args(ModelKind)
        if not table.resolved.get(kind)
    ]
    return checked._replace(told=[*checked.told, *_by_finding(changed)], unknown=[*checked.unknown, *unresolved])


def check_plans(plans: Sequence[CellPlan], cache: Path, check: Callable[[], None] = lambda: None) -> list[str]:
    """Check the planned cells, without a GPU. Returns in words what is unknown. `check` is called while the engine is asked.

    Raises:
        RecipeError: the engine does not accept the recipe; the error names each problem.
        HostError: the engine cannot be asked.
        whatever `check` raises.
    """
    candidate, subjects = _of_plans(plans)
    if candidate is None:
        return []
    checked = _check(subjects, candidate, cache, check)
    if checked.problems:
        raise RecipeError(
            f"vLLM {candidate.version} does not take what the recipe asks of it",
            "mend the recipe, with by_version where it is to serve several versions; vllm-qualify recipe check tells more",
            CHECK,
            [f"{told.finding.told} ({', '.join(told.cells)})" for told in checked.problems],
            kind="recipe-drift",
        )
    return checked.unknown


def is_kept(plans: Sequence[CellPlan], cache: Path) -> bool:
    """Whether every answer that `check_plans` needs is in the cache, so that no engine is asked."""
    candidate, subjects = _of_plans(plans)
    return candidate is None or all(_kept(_file(candidate, group, cache)) for group in _questions(candidate, subjects))


def _of_plans(plans: Sequence[CellPlan]) -> tuple[Candidate | None, list[Subject]]:
    """The engine of the plans for vLLM, and what it is asked about them."""
    of_vllm = [plan for plan in plans if plan.server.kind == VLLM]
    if not of_vllm:
        return None, []
    candidate = _candidate(of_vllm[0].server.engine, of_vllm[0].cell.release.engine)
    return candidate, [
        Subject(plan.cell.id, plan.server, _asked(plan.server, _device_of(plan.fingerprint))) for plan in of_vllm
    ]


def _left_out(loaded: LoadedRecipe, choice: Choice, version: str) -> Iterator[str]:
    """The chosen variants that have no cell, and why."""
    for name, variant in loaded.recipe.variants.items():
        if choice.variant not in (None, name):
            continue
        if not variant.of_vllm:
            yield f"the variant '{name}' is for {KINDS[variant.engine].title}, which does not tell what it takes"
        elif not variant.fits_version(version):
            yield f"the variant '{name}' is for vLLM {variant.vllm}"


def _subjects(loaded: LoadedRecipe, choice: Choice, candidate: Candidate, left_out: list[str]) -> Iterator[Subject]:
    recipe, found = loaded.recipe, False
    for gpu_type, variant, profile in recipe.cells(candidate.version):
        wanted = ((choice.gpu_type, gpu_type), (choice.variant, variant), (choice.profile, profile))
        if recipe.variants[variant].of_vllm and all(chosen in (None, name) for chosen, name in wanted):
            selection = select(loaded, Choice(gpu_type=gpu_type, variant=variant, profile=profile), None)
            found = True
            yield _subject(loaded, selection, profile, candidate)
    if not found:
        known = f"it has the GPU types {', '.join(recipe.gpu_types)} and the variants {', '.join(recipe.variants)}"
        problem = f"the recipe has nothing of this choice for vLLM {candidate.version}"
        raise CallerError(problem, "; ".join([known, *left_out]), "RECIPE")


def _subject(loaded: LoadedRecipe, selection: Selection, profile: str, candidate: Candidate) -> Subject:
    # The memory limit is for the launcher, not for the engine.
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


def _asked(server: ServerPlan, device: Device | None) -> CandidateServer:
    return CandidateServer(config=config_text(server, PORT), environment=server.environment, device=device)


def _nominal_device(capability: str) -> Device:
    """The same device for all types of one capability: each other device takes another process that imports vLLM."""
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


def _check(subjects: Sequence[Subject], candidate: Candidate, cache: Path, check: Callable[[], None] = lambda: None) -> Checked:
    cells = [subject.cell for subject in subjects]
    if candidate.table is not None:
        found = [(subject.cell, _by_table(subject, candidate.table)) for subject in subjects]
        same = candidate.version == candidate.table.version
        newer = [] if same else [f"what changed after vLLM {candidate.table.version}, whose table this is"]
        return Checked(candidate.version, cells, _by_finding(found), [*newer, UNASKED])
    answer, judgements = ask(candidate, subjects, cache, check=check)
    found = [(subject.cell, _findings(subject, judgements.get(subject.cell), answer)) for subject in subjects]
    why = _unjudged(subjects, judgements)
    unknown = [f"whether options refuse each other, for {len(of)} of {len(cells)} cells: {told}" for told, of in why.items()]
    return Checked(candidate.version, cells, _by_finding(found), unknown, sum(map(len, why.values())))


def _by_table(subject: Subject, table: EngineTable) -> list[Finding]:
    return drift.check(subject.server.arguments, subject.server.environment, table)


def _findings(subject: Subject, judgement: EngineJudgement | None, answer: ProbeAnswer) -> list[Finding]:
    """The table's findings that vLLM itself did not accept, and, if none is about the server, what vLLM refuses."""
    found = _by_table(subject, answer)
    if judgement is None or subject.asked is None:
        return found
    is_of_this_build = answer.build == "cuda" or subject.asked.device is None
    if is_of_this_build and judgement.parsed:
        taken = drift.OF_THE_PARSER if judgement.refused or judgement.unclear else drift.OF_THE_SERVER
        found = [finding for finding in found if finding.kind not in taken]
    if judgement.refused is None or any(finding.kind in drift.OF_THE_SERVER for finding in found):
        return found
    return [*found, drift.refusal(judgement.refused, answer.version, is_of_this_build)]


def _unjudged(subjects: Sequence[Subject], judgements: Mapping[str, EngineJudgement]) -> dict[str, list[str]]:
    """The reasons why an engine could not judge, each with its cells."""
    why: dict[str, list[str]] = {}
    for subject in subjects:
        judgement = judgements.get(subject.cell)
        if judgement is None:
            why.setdefault("the compute capability of its GPU type is not known", []).append(subject.cell)
        elif judgement.unclear:
            why.setdefault(judgement.unclear.splitlines()[0], []).append(subject.cell)
    return why


def _by_finding(found: Iterable[tuple[str, list[Finding]]]) -> list[FindingOfCells]:
    cells: dict[Finding, list[str]] = {}
    for cell, findings in found:
        for finding in findings:
            cells.setdefault(finding, []).append(cell)
    return [FindingOfCells(finding, names) for finding, names in cells.items()]


def _table(candidate: Candidate, cache: Path) -> EngineTable:
    return candidate.table or ask(candidate, [], cache, resolve=True)[0].table


# --- asking


def ask(
    candidate: Candidate,
    subjects: Sequence[Subject],
    cache: Path,
    resolve: bool = False,
    check: Callable[[], None] = lambda: None,
) -> tuple[ProbeAnswer, dict[str, EngineJudgement]]:
    """What the candidate's own code knows, and what it says about each cell's server. `check` is called until then.

    Raises:
        HostError: its Python does not run, or gave no answer.
        whatever `check` raises.
    """
    groups = _questions(candidate, subjects)
    answers = [_ask_once(candidate, group, cache, resolve, check) for group in groups]
    judgements = {
        subject.cell: judgement
        for group, answer in zip(groups, answers, strict=False)
        for subject, judgement in zip(group, answer.servers, strict=True)
    }
    return answers[0], judgements


def _questions(candidate: Candidate, subjects: Sequence[Subject]) -> list[list[Subject]]:
    """The cells of each question. If there are none, there is one question about what the engine knows."""
    known = [subject for subject in subjects if subject.asked is not None]
    return [portion for group in _groups(candidate, known) for portion in _portions(group)] or [[]]


def _groups(candidate: Candidate, subjects: Sequence[Subject]) -> list[list[Subject]]:
    """Group by local models: a container has one place for local weights, and one for a draft model."""
    is_image = isinstance(candidate.engine, EngineImage)
    held = [_local_models(subject.server) if is_image else [] for subject in subjects]
    # A container with a draft model can also answer about its model without the draft model.
    places = sorted(held, key=len, reverse=True)
    groups: dict[int, list[Subject]] = {}
    for subject, models in zip(subjects, held, strict=True):
        at = next(number for number, place in enumerate(places) if place[: len(models)] == models)
        groups.setdefault(at, []).append(subject)
    return list(groups.values())


def _portions(group: Sequence[Subject]) -> Iterator[list[Subject]]:
    """Parts of a group, each of which fits into one argument of a command."""
    portion, length = list[Subject](), 0
    for subject in group:
        added = len(_question([subject]))
        if portion and length + added > LONGEST_QUESTION:
            yield portion
            portion, length = [], 0
        portion.append(subject)
        length += added
    yield portion


def _question(group: Sequence[Subject], *, resolve: bool = False) -> str:
    return json.dumps({"servers": [one.asked.model_dump() for one in group if one.asked], "resolve": resolve})


def _local_models(server: ServerPlan) -> list[Path]:
    """The folders of a server's weights and of its draft model's, if they are on this machine."""
    return [*([Path(server.model)] if server.is_local else []), *([server.draft] if server.draft else [])]


def _ask_once(
    candidate: Candidate, group: Sequence[Subject], cache: Path, resolve: bool, check: Callable[[], None]
) -> ProbeAnswer:
    """Ask one question. A complete answer is kept in `cache`, if nothing that it depends on can change unnoticed."""
    kept = _file(candidate, group, cache, resolve=resolve)
    if found := _kept(kept):
        return found
    text = _answer(candidate, group, _question(group, resolve=resolve), check)
    answer = parse_answer(text)
    is_whole = not any(judgement.unclear for judgement in answer.servers) and all(answer.resolved.values())
    if is_whole and all(one.server.is_local or PINNED.fullmatch(str(one.server.revision)) for one in group):
        with writing(CHECK):
            cache.mkdir(parents=True, exist_ok=True)
            fresh = kept.with_suffix(f".{os.getpid()}")
            fresh.write_text(text)
            fresh.replace(kept)
    return answer


def _file(candidate: Candidate, group: Sequence[Subject], cache: Path, *, resolve: bool = False) -> Path:
    """Where the answer about a group is kept."""
    return cache / f"{_key(candidate, group, _question(group, resolve=resolve))}.json"


def _key(candidate: Candidate, group: Sequence[Subject], question: str) -> str:
    own = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    # By content: the paths that the engine sees are in the question, and in a container they are always the same.
    held = [_local_models(one.server) for one in group]
    digests = {model: _configuration_digest(model) for models in held for model in models}
    models = [[digests[model] for model in models] for models in held]
    parts = [candidate.key, PROBE.read_text(), question, json.dumps([own, models], sort_keys=True)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _configuration_digest(model: Path) -> str:
    """The digest of all files that vLLM makes its configuration from; weights are not read."""
    files = sorted(path for path in model.glob("*") if path.suffix in (".json", ".py", ".jinja", ".model"))
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def _kept(path: Path) -> ProbeAnswer | None:
    """The kept answer; None if there is none, or another version wrote it in another form."""
    try:
        return parse_answer(path.read_text())
    except (OSError, HostError):
        return None


def _answer(candidate: Candidate, group: Sequence[Subject], question: str, check: Callable[[], None]) -> str:
    assert candidate.engine is not None  # noqa: S101  (a table alone is not asked)
    asked = Script(PROBE, question, [subject.server for subject in group], ASKING, CHECK, PROBE_LIMIT_S)
    return launcher_of(candidate.engine).ask(candidate.engine, asked, check)
