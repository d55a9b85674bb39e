"""Whether lm-eval has what a recipe asks of it, and the server takes the requests, before it starts.

lm-eval must have the recipe's tasks, and the filters and scores of their gates.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.drift.check import Checked, group_by_finding
from vllm_qualify.drift.finding import Finding, nearest_words
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import CallerError
from vllm_qualify.evidence.accuracy import task_files
from vllm_qualify.evidence.accuracy.task_files import NoTaskError, TaskFile, UntoldError
from vllm_qualify.evidence.request_limits import AskedTask, Requests, find_refused
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.choice import Choice
from vllm_qualify.plan.gates import contract_of, starts_of
from vllm_qualify.plan.workload import limit_of, most_clients
from vllm_qualify.recipe.accuracy import USUAL_TOKENS, Accuracy
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.recipe import LoadedRecipe, Profile

# A question or a solved example of most tasks has fewer tokens; only in less room than that it is said that nobody counted.
USUAL_EXAMPLE_TOK = 512


class Asked(NamedTuple):
    """A task that is asked: its settings, the folder of its files, the gates on it, and the server, if it is known."""

    settings: Accuracy
    folder: Path | None
    gates: Sequence[Gate]
    server: ServerPlan | None = None


# What is said of a task by its name, with the folder of its files; or the problem that there is none, or why nobody says it.
LookUp = Callable[[str, Path | None], TaskFile | Finding | UntoldError]


class Told(NamedTuple):
    """What is said of an asked task, or of other requests: the problems, and in words what nobody says.

    `place` is the recipe's key that asks.
    """

    problems: list[Finding]
    unknown: list[str]
    place: str = "accuracy"


def with_tasks(checked: Checked, loaded: LoadedRecipe, choice: Choice) -> Checked:
    """What a candidate says of a recipe's chosen cells, with what lm-eval says of their tasks, and which requests are refused.

    The tasks of cells of other engines are among them: these are asked as vLLM is.
    """
    # Cells ask the same tasks. Nothing is kept longer: files of a recipe change.
    look_up = cache(_look_up)
    servers = dict.fromkeys(_cells_of_others(loaded, choice)) | dict(checked.servers)
    told = [(cell, each) for cell, server in servers.items() for each in _tell_cell(loaded, cell, server, look_up)]
    refused = [
        (cell, [each.finding for each in find_refused(_requests_of(loaded, cell, server, checked.version, look_up))])
        for cell, server in checked.servers.items()
    ]
    findings = group_by_finding([*((cell, each.problems) for cell, each in told), *refused])
    unknown = dict.fromkeys(line for _, each in told for line in each.unknown)
    return checked._replace(findings=[*checked.findings, *findings], unknown=[*checked.unknown, *unknown])


def _cells_of_others(loaded: LoadedRecipe, choice: Choice) -> Iterator[str]:
    recipe = loaded.recipe
    for gpu_type, variant, profile in recipe.cells():
        wanted = ((choice.gpu_type, gpu_type), (choice.variant, variant), (choice.profile, profile))
        if not recipe.variants[variant].of_vllm and all(chosen in (None, name) for chosen, name in wanted):
            yield f"{recipe.name}/{variant}/{gpu_type}/{profile}"


def _tell_cell(loaded: LoadedRecipe, cell: str, server: ServerPlan | None, look_up: LookUp) -> Iterator[Told]:
    gpu_type, profile = cell.split("/")[-2:]
    gates = loaded.recipe.gates_of(loaded.recipe.gpu_types[gpu_type].profiles[profile])
    for settings in loaded.recipe.accuracy:
        yield _tell(Asked(settings, _folder_of(loaded, settings), _gates_on(settings, gates), server), look_up)


def _requests_of(loaded: LoadedRecipe, cell: str, server: ServerPlan, version: str, look_up: LookUp) -> Requests:
    recipe, (variant_name, gpu_type, profile_name) = loaded.recipe, cell.split("/")[-3:]
    variant, serving = recipe.variants[variant_name], recipe.gpu_types[gpu_type]
    profile = serving.profiles[profile_name]
    gates = recipe.gates_of(profile)
    # Some run becomes the baseline, and asks everything at once.
    is_baseline = variant.baseline in (None, variant_name) and any(gate.is_against_baseline for gate in gates)
    starts = starts_of(serving, gates)
    return Requests(
        server=server,
        version=version,
        contract=contract_of(recipe, variant, serving, profile),
        paths=profile.paths if variant.of_vllm else None,
        scores_texts=recipe.likelihood is not None and server.engine_kind.scores_prompts,
        tasks=[
            AskedTask(
                each,
                _describe_task(each, _folder_of(loaded, each), look_up),
                each.sequential and not is_baseline and not _is_asked_by_further_starts(each, gates, starts),
            )
            for each in recipe.accuracy
        ],
        clients=profile.load.count_clients(most_clients(server, profile.fit)),
        sweep=profile.sweep,
    )


def _is_asked_by_further_starts(settings: Accuracy, gates: Iterable[Gate], starts: int) -> bool:
    """These ask it in one block."""
    return starts > 1 and any(gate.against == "answers" for gate in _gates_on(settings, gates))


def _describe_task(settings: Accuracy, folder: Path | None, look_up: LookUp) -> TaskFile | None:
    if settings.context_tok:
        return task_files.describe_long()
    found = look_up(settings.task, folder)
    return found if isinstance(found, TaskFile) else None


def check_recipes_tasks(loaded: LoadedRecipe, profiles: Iterable[Profile]) -> None:
    """Check the tasks of a recipe, with the gates of these profiles, before anything is planned. Raises CallerError."""
    gates = [gate for profile in profiles for gate in loaded.recipe.gates_of(profile)]
    _check([Asked(each, _folder_of(loaded, each), _gates_on(each, gates)) for each in loaded.recipe.accuracy])


def check_planned_tasks(plans: Sequence[CellPlan]) -> list[str]:
    """Check the tasks of planned cells, and all requests. Returns in words what is unknown. Raises CallerError."""
    asked = [
        Asked(task.settings, task.folder, _gates_on(task.settings, plan.gates), plan.server)
        for plan in plans
        for task in plan.accuracy
    ]
    look_up = cache(_look_up)
    found = [each for plan in plans for each in find_refused(_planned_requests(plan, look_up))]
    refused = [Told([each.finding], [], each.place) for each in found]
    return _check(asked, look_up, refused)


def _planned_requests(plan: CellPlan, look_up: LookUp) -> Requests:
    return Requests(
        server=plan.server,
        version=plan.cell.release.engine.version,
        contract=plan.contract,
        paths=plan.paths,
        scores_texts=plan.likelihood is not None,
        tasks=[
            AskedTask(
                task.settings,
                _describe_task(task.settings, task.folder, look_up),
                task.sequential and not _is_asked_by_further_starts(task.settings, plan.gates, plan.starts),
            )
            for task in plan.accuracy
        ],
        clients=plan.load.max_concurrency,
        sweep=plan.sweep,
    )


def _check(asked: Iterable[Asked], look_up: LookUp | None = None, beside: Sequence[Told] = ()) -> list[str]:
    look_up = look_up or cache(_look_up)
    told = [*(_tell(each, look_up) for each in asked), *beside]
    places: dict[Finding, str] = {}
    for place, problem in ((each.place, problem) for each in told for problem in each.problems):
        places.setdefault(problem, place)
    if places:
        (first, place), *others = places.items()
        more = f" ({len(others)} more after this)" if others else ""
        raise CallerError(first.told + more, "mend the recipe; vllm-qualify recipe check shows every problem", place)
    return list(dict.fromkeys(line for each in told for line in each.unknown))


def _tell(asked: Asked, look_up: LookUp) -> Told:
    settings = asked.settings
    if settings.context_tok:
        # Such a task is made by this project, when the server can count its tokens; a plan checks the length.
        return Told([*_check_gates(asked, task_files.describe_long())], [])
    found = look_up(settings.task, asked.folder)
    if isinstance(found, Finding):
        return Told([found], [])
    if isinstance(found, UntoldError):
        gated = ", with the filters and scores that the gates name" if any(gate.filter for gate in asked.gates) else ""
        return Told([], [f"whether lm-eval can ask {settings.task}{gated}: {found}"])
    of_context = _tell_context(asked, found)
    return of_context._replace(problems=[*_check_gates(asked, found), *of_context.problems])


def _look_up(task: str, folder: Path | None) -> TaskFile | Finding | UntoldError:
    try:
        return task_files.describe(task, folder)
    except UntoldError as error:
        return error
    except NoTaskError:
        where = f"lm-eval {metadata.version('lm-eval')}" + (" and task_folder have" if folder else " has")
        near = nearest_words(task, task_files.known_names())
        return Finding(kind="unknown-task", name=task, told=f"{where} no task {task}{near}")


def _check_gates(asked: Asked, described: TaskFile) -> Iterator[Finding]:
    task = asked.settings.task
    for gate in asked.gates:
        if gate.filter is not None and gate.filter not in described.filters:
            near = nearest_words(gate.filter, described.filters)
            told = f"{task} has no filter {gate.filter}; it has {', '.join(described.filters)}{near}"
            yield Finding(kind="unknown-filter", name=f"{task}.{gate.filter}", told=told)
        if METRICS[gate.metric].is_score and described.scores is not None and gate.metric not in described.scores:
            known = [name for name in described.scores if name in METRICS]
            told = f"{task} gives no answer the score {gate.metric}; it gives {', '.join(known) or 'none that is known here'}"
            yield Finding(kind="unknown-score", name=f"{task}.{gate.metric}", told=told + nearest_words(gate.metric, known))


def _tell_context(asked: Asked, described: TaskFile) -> Told:
    """Whether prompts and replies fit into the server's context. How long prompts are, only the task's data says."""
    limit = limit_of(asked.server) if asked.server else None
    if limit is None:
        return Told([], [])
    settings, (most, says) = asked.settings, limit
    reply = (settings.max_gen_toks or described.reply_tok or USUAL_TOKENS) if described.generates else 0
    shots = 0 if described.num_fewshot == 0 else settings.num_fewshot
    # vLLM cuts a reply that is as long as the context since 0.32; versions before it refuse the request, which the run tells.
    if reply > most:
        told = f"a reply to {settings.task} may have {reply:,} tokens, and {says} {most:,}: no room is left for a prompt"
        return Told([Finding(kind="context-too-short", name=settings.task, told=told)], [])
    if most - reply >= (shots + 1) * USUAL_EXAMPLE_TOK:
        return Told([], [])
    examples = f" with {shots} examples" if shots else ""
    beside = f" beside replies of {reply:,} tokens" if reply else ""
    unread = f"{says} {most:,}, and the task's data is not read here"
    return Told([], [f"whether {settings.task}'s prompts{examples} fit{beside}: {unread}"])


def _folder_of(loaded: LoadedRecipe, settings: Accuracy) -> Path | None:
    return loaded.path(settings.task_folder) if settings.task_folder else None


def _gates_on(settings: Accuracy, gates: Iterable[Gate]) -> list[Gate]:
    return [gate for gate in gates if METRICS[gate.metric].stage == "accuracy" and gate.task in (None, settings.task)]
