"""Whether a version of vLLM accepts a recipe's or a plan's servers."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from vllm_qualify.drift import finding as drift
from vllm_qualify.drift.asking import CHECK, CPU, Subject, answer_file, ask_candidate, kept_answer, questions_of, table_from
from vllm_qualify.drift.candidate import Candidate, CandidateServer, Device, candidate_of
from vllm_qualify.drift.finding import Finding
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.gpu_products import compute_capability_of
from vllm_qualify.engine.hub import fetch_configuration
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.server import ServerPlan, config_text, draft_model
from vllm_qualify.errors import CallerError, QualifyError, RecipeError
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.choice import Choice, Selection, select
from vllm_qualify.plan.forms import form_warnings
from vllm_qualify.plan.gates import contract_of
from vllm_qualify.plan.server import server_plan
from vllm_qualify.recipe.code import check_allowed, code_of, is_of_the_catalog, openings_of
from vllm_qualify.recipe.contract import Contract
from vllm_qualify.recipe.paths import FORMS_OPTION
from vllm_qualify.recipe.recipe import LoadedRecipe
from vllm_qualify.recipe.serving import VLLM
from vllm_qualify.recipe.tables import EngineJudgement, EngineTable, ModelKind, ProbeAnswer

UNASKED = "whether options exclude each other: a table does not say; give --image or --python"
# Nothing listens there.
PORT = 8000
DEFAULT_BRANCH = "main"
# A GPU type's name gives its capability. The memory only sets defaults, which change at 70 GiB; the count only bounds sizes.
NOMINAL_MEMORY_MIB, ENOUGH_GPUS = 80 * 1024, 64
MOST_NAMED = 3


class FindingOfCells(NamedTuple):
    """A finding, and the cells that it is about."""

    finding: Finding
    cells: list[str]


class Checked(NamedTuple):
    """What a candidate says about a recipe: the `cells`, the findings in `findings`, and in words what is `unknown`.

    `unjudged` counts the cells that an engine could not judge completely. `left_out` has the variants without a cell, and
    `servers` the plan of each cell's server.
    """

    version: str
    cells: list[str]
    findings: list[FindingOfCells]
    unknown: list[str]
    unjudged: int = 0
    left_out: list[str] = []
    servers: Mapping[str, ServerPlan] = {}

    @property
    def problems(self) -> list[FindingOfCells]:
        return [each for each in self.findings if each.finding.is_problem]

    @property
    def fits(self) -> bool | None:
        """Whether the recipe fits; None if no problem was found, but not everything could be checked."""
        if self.problems:
            return False
        return None if self.unjudged else True

    def lines(self) -> Iterator[str]:
        """Lines for people: problems first, each with its cells."""
        for each in sorted(self.findings, key=lambda each: not each.finding.is_problem):
            state = "problem" if each.finding.is_problem else "note"
            yield f"{state:<8} {each.finding.kind:<20} {each.finding.told}  [{self._cells_words(each.cells)}]"
        yield from (f"{'unknown':<8} {what}" for what in self.unknown)
        yield from (f"{'left out':<8} {what}" for what in self.left_out)
        yield f"vLLM {self.version}, {_count_words(len(self.cells), 'cell')}: {self._verdict_words()}"

    def _verdict_words(self) -> str:
        if self.problems:
            return f"does not fit: {_count_words(len(self.problems), 'problem')}"
        if self.unjudged:
            return f"no problem found, but {_count_words(self.unjudged, 'cell')} not judged to the end: see what is unknown"
        return f"fits, with {_count_words(len(self.findings), 'note')}" if self.findings else "fits"

    def _cells_words(self, cells: list[str]) -> str:
        if set(cells) >= set(self.cells):
            return "every cell"
        more = f" and {len(cells) - MOST_NAMED} more" if len(cells) > MOST_NAMED else ""
        return ", ".join(cells[:MOST_NAMED]) + more

    def as_json(self) -> str:
        """The findings as JSON; `fits` is true, false or null."""
        findings = [
            each.finding.model_dump() | {"is_problem": each.finding.is_problem, "cells": each.cells} for each in self.findings
        ]
        answer = {"vllm": self.version, "fits": self.fits, "cells": self.cells, "findings": findings}
        return json.dumps(answer | {"unknown": self.unknown, "left_out": self.left_out}, indent=2)


def _count_words(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def check_recipe(
    loaded: LoadedRecipe,
    choice: Choice,
    candidate: Candidate,
    cache: Path,
    against: Candidate | None = None,
    allow_code: bool = False,
) -> Checked:
    """Check every chosen cell of the recipe. What `choice` leaves open means all that the recipe has.

    Raises CallerError if the recipe has no such GPU type, variant or profile, or nothing of it is for this version; or if it
    runs code, which is not allowed, and the candidate is an engine, which would run it. HostError if that cannot be asked.
    """
    if candidate.table is None:
        check_allowed(loaded, allow_code)
    left_out = list(_find_left_out(loaded, choice, candidate.version))
    subjects = list(_make_subjects(loaded, choice, candidate, left_out))
    away = [] if candidate.table else list(_fetch_configurations(subjects))
    checked = _check_subjects(subjects, candidate, cache)
    findings = [*checked.findings, *_form_findings(loaded, subjects), *_code_findings(loaded, checked.cells, allow_code)]
    servers = {subject.cell: subject.server for subject in subjects}
    checked = checked._replace(left_out=left_out, findings=findings, unknown=[*checked.unknown, *away], servers=servers)
    if against is None:
        return checked
    before, now = table_from(against, cache), table_from(candidate, cache)
    changed = [(subject.cell, drift.changed_defaults(subject.server.arguments, before, now)) for subject in subjects]
    unresolved = [
        f"what vLLM {table.version} makes of options that are left out, for {kind} models"
        for table in (before, now)
        for kind in get_args(ModelKind)
        if not table.resolved.get(kind)
    ]
    return checked._replace(findings=[*checked.findings, *group_by_finding(changed)], unknown=[*checked.unknown, *unresolved])


def _fetch_configurations(subjects: Sequence[Subject]) -> Iterator[str]:
    """Fetch all files but weights, since an engine is asked without a network. Says why that failed."""
    servers = [subject.server for subject in subjects]
    models = {(part.name, part.revision) for server in servers for part in server.repositories}
    drafts = {(name, None) for server in servers if (name := draft_model(server.arguments, server.kind)) and not server.draft}
    for model, revision in sorted(models | drafts, key=str):
        try:
            fetch_configuration(model, revision, CHECK)
        except QualifyError as error:
            yield f"the configuration of {model}: {error.problem}"


def _form_findings(loaded: LoadedRecipe, subjects: Sequence[Subject]) -> list[FindingOfCells]:
    """Where the first form after a start decides for all others."""
    contracts = {name: contract_of(loaded.recipe, variant) for name, variant in loaded.recipe.variants.items()}
    of_cells = []
    for cell, server, _ in subjects:
        told = form_warnings(server, contracts[cell.split("/")[1]])
        of_cells.append((cell, [Finding(kind="unnamed-backend", name=FORMS_OPTION, told=each) for each in told]))
    return group_by_finding(of_cells)


def _code_findings(loaded: LoadedRecipe, cells: list[str], allow_code: bool) -> list[FindingOfCells]:
    """What runs code or opens the server: a run refuses the whole recipe, so it is said where no cell of it is checked, too."""
    is_allowed = allow_code or is_of_the_catalog(loaded)
    # Each line with the GPU types that it is about, if it is about some. Those that differ in them alone become one.
    by_line: dict[str, list[str]] = {}
    for line in [*code_of(loaded), *openings_of(loaded)]:
        of_one = re.fullmatch(r"gpu_types\.([^.]+)\.(.*)", line, re.DOTALL)
        by_line.setdefault(of_one[2] if of_one else line, []).extend([of_one[1]] if of_one else [])
    findings = []
    for line, gpu_types in by_line.items():
        several = f"{', '.join(gpu_types)} " if gpu_types else ""
        place = f"gpu_types.{gpu_types[0]}." if len(gpu_types) == 1 else several
        own = [cell for cell in cells if cell.split("/")[2] in gpu_types]
        findings.append(FindingOfCells(drift.runs_code(place + line, is_allowed=is_allowed), own or cells))
    return findings


def check_plans(plans: Sequence[CellPlan], cache: Path, check: Callable[[], None] = lambda: None) -> list[str]:
    """Check the planned cells, without a GPU. Returns in words what is unknown. `check` is called while the engine is asked.

    Raises RecipeError, which names each problem, if the engine does not accept the recipe, HostError if it cannot be asked, and
    whatever `check` raises.
    """
    candidate, subjects = _plan_subjects(plans)
    if candidate is None:
        return []
    checked = _check_subjects(subjects, candidate, cache, check)
    if checked.problems:
        raise RecipeError(
            f"vLLM {candidate.version} does not take what the recipe asks of it",
            "mend the recipe, with by_version where it is to serve several versions; vllm-qualify recipe check shows more",
            CHECK,
            [f"{each.finding.told} ({', '.join(each.cells)})" for each in checked.problems],
            kind="recipe-drift",
        )
    return checked.unknown


def is_kept(plans: Sequence[CellPlan], cache: Path) -> bool:
    """Whether every answer that `check_plans` needs is in the cache, so that no engine is asked."""
    candidate, subjects = _plan_subjects(plans)
    groups = questions_of(candidate, subjects) if candidate else []
    return candidate is None or all(kept_answer(answer_file(candidate, group, cache)) for group in groups)


def _plan_subjects(plans: Sequence[CellPlan]) -> tuple[Candidate | None, list[Subject]]:
    """The engine of the plans for vLLM, and what it is asked about them."""
    of_vllm = [plan for plan in plans if plan.server.kind == VLLM]
    if not of_vllm:
        return None, []
    subjects = []
    for plan in of_vllm:
        machine, capability = plan.fingerprint, plan.fingerprint.compute_capability
        device = _make_device(machine.name, capability, machine.memory_mib, machine.count) if capability else None
        subjects.append(Subject(plan.cell.id, plan.server, _candidate_server(plan.server, device)))
    return candidate_of(of_vllm[0].server.engine, of_vllm[0].cell.release.engine), subjects


def _find_left_out(loaded: LoadedRecipe, choice: Choice, version: str) -> Iterator[str]:
    """The chosen variants that have no cell, and why."""
    for name, variant in loaded.recipe.variants.items():
        if choice.variant not in (None, name):
            continue
        if not variant.of_vllm:
            title, asked = KINDS[variant.engine].title, _contract_words(contract_of(loaded.recipe, variant))
            yield f"the variant '{name}' is for {title}, which does not report what it accepts; of the API's contract {asked}"
        elif not variant.fits_version(version):
            yield f"the variant '{name}' is for vLLM {variant.vllm}"


def _contract_words(contract: Contract | None) -> str:
    """In words, what of the contract an engine is asked that does not offer all of it."""
    if contract is None:
        return "it is asked nothing without 'contract: true'"
    names: dict[str, list[str]] = {}
    for name, reason in contract.not_asked.items():
        names.setdefault(reason, []).append(name.removeprefix("contract_"))
    if not names:
        return "it is asked everything"
    return "it is not asked " + "; ".join(f"{', '.join(checks)} ({reason})" for reason, checks in names.items())


def _make_subjects(loaded: LoadedRecipe, choice: Choice, candidate: Candidate, left_out: list[str]) -> Iterator[Subject]:
    recipe, count = loaded.recipe, 0
    for gpu_type, variant, profile in recipe.cells(candidate.version):
        wanted = ((choice.gpu_type, gpu_type), (choice.variant, variant), (choice.profile, profile))
        if recipe.variants[variant].of_vllm and all(chosen in (None, name) for chosen, name in wanted):
            selection = select(loaded, Choice(gpu_type=gpu_type, variant=variant, profile=profile), None)
            count += 1
            yield _make_subject(loaded, selection, profile, candidate)
    if not count:
        chosen = " and ".join(value for value in (choice.gpu_type, choice.variant, choice.profile) if value)
        problem = f"the recipe has nothing{f' of {chosen}' if chosen else ''} for vLLM {candidate.version}"
        known = f"it has the GPU types {', '.join(recipe.gpu_types)} and the variants {', '.join(recipe.variants)}"
        remedy = "; ".join(left_out) if left_out and not chosen else "; ".join([known, *left_out])
        raise CallerError(problem, remedy, "RECIPE")


def _make_subject(loaded: LoadedRecipe, selection: Selection, profile: str, candidate: Candidate) -> Subject:
    # The memory limit is for the launcher, not for the engine.
    anywhere = selection.serving.model_copy(update={"memory_limit_gib": None})
    selection = selection.model_copy(update={"serving": anywhere})
    engine = candidate.engine or EngineEnvironment(python=Path("python3"))
    branch = selection.variant.revision or DEFAULT_BRANCH
    server = server_plan(loaded, selection, profile, engine, candidate.version, branch)
    cell = f"{loaded.recipe.name}/{selection.variant_name}/{selection.gpu_type}/{profile}"
    if selection.gpu_type == CPU:
        return Subject(cell, server, _candidate_server(server, None))
    capability = compute_capability_of(selection.gpu_type)
    if capability is None:
        return Subject(cell, server, None)
    # The same device for all types of one capability: each other device takes another process that imports vLLM.
    device = _make_device(f"a GPU of compute capability {capability}", capability, NOMINAL_MEMORY_MIB, ENOUGH_GPUS)
    return Subject(cell, server, _candidate_server(server, device))


def _candidate_server(server: ServerPlan, device: Device | None) -> CandidateServer:
    return CandidateServer(config=config_text(server, PORT), environment=server.environment, device=device)


def _make_device(name: str, capability: str, memory_mib: int, count: int) -> Device:
    major, minor = map(int, capability.split("."))
    return Device(name=name, capability=(major, minor), memory_mib=memory_mib, count=count)


def _check_subjects(
    subjects: Sequence[Subject], candidate: Candidate, cache: Path, check: Callable[[], None] = lambda: None
) -> Checked:
    cells = [subject.cell for subject in subjects]
    if candidate.table is not None:
        findings = [(subject.cell, _table_findings(subject, candidate.table)) for subject in subjects]
        same = candidate.version == candidate.table.version
        unknown = [] if same else [f"what changed after vLLM {candidate.table.version}, whose table this is"]
        files = _files_named(subjects)
        unknown += [f"whether there is a file {path}, which --{name} names: a table does not say" for name, path in files]
        unjudged = {cell for of in files.values() for cell in of}
        return Checked(candidate.version, cells, group_by_finding(findings), [*unknown, UNASKED], len(unjudged))
    answer, judgements = ask_candidate(candidate, subjects, cache, check=check)
    findings = [(subject.cell, _engine_findings(subject, judgements.get(subject.cell), answer)) for subject in subjects]
    why = _reasons_unjudged(subjects, judgements)
    unknown = [
        f"whether options refuse each other, for {len(of)} of {len(cells)} cells: {because}" for because, of in why.items()
    ]
    return Checked(candidate.version, cells, group_by_finding(findings), unknown, sum(map(len, why.values())))


def _files_named(subjects: Sequence[Subject]) -> dict[tuple[str, str], list[str]]:
    """The files that options name, each with its cells. vLLM refuses a chat template that is not there."""
    cells: dict[tuple[str, str], list[str]] = {}
    for subject in subjects:
        for name in KINDS[VLLM].files:
            value = subject.server.arguments.get(name)
            # vLLM takes text with one of these for the template itself.
            if isinstance(value, str) and value and not any(letter in value for letter in "{}\n"):
                cells.setdefault((name, value), []).append(subject.cell)
    return cells


def _table_findings(subject: Subject, table: EngineTable) -> list[Finding]:
    return drift.check_server(subject.server.arguments, subject.server.environment, table)


def _engine_findings(subject: Subject, judgement: EngineJudgement | None, answer: ProbeAnswer) -> list[Finding]:
    """The table's findings that vLLM itself did not accept, and, if none is about the server, what vLLM refuses."""
    findings = _table_findings(subject, answer)
    if judgement is None or subject.asked is None:
        return findings
    is_of_this_build = answer.build == "cuda" or subject.asked.device is None
    findings += drift.unnamed_options(judgement.unnamed)
    if is_of_this_build and judgement.parsed:
        taken = drift.OF_THE_PARSER if judgement.refused or judgement.unclear else drift.OF_THE_SERVER
        findings = [finding for finding in findings if finding.kind not in taken]
    if judgement.refused is None or any(finding.kind in drift.ABOUT_THE_SERVER for finding in findings):
        return findings
    return [*findings, drift.refusal_finding(judgement.refused, answer.version, is_of_this_build)]


def _reasons_unjudged(subjects: Sequence[Subject], judgements: Mapping[str, EngineJudgement]) -> dict[str, list[str]]:
    """The reasons why an engine could not judge, each with its cells."""
    why: dict[str, list[str]] = {}
    for subject in subjects:
        judgement = judgements.get(subject.cell)
        if judgement is None:
            why.setdefault("the compute capability of its GPU type is not known", []).append(subject.cell)
        elif judgement.unclear:
            why.setdefault(judgement.unclear.splitlines()[0], []).append(subject.cell)
    return why


def group_by_finding(of_cells: Iterable[tuple[str, list[Finding]]]) -> list[FindingOfCells]:
    """Each finding once, with all its cells."""
    cells: dict[Finding, list[str]] = {}
    for cell, findings in of_cells:
        for finding in findings:
            cells.setdefault(finding, []).append(cell)
    return [FindingOfCells(finding, names) for finding, names in cells.items()]
