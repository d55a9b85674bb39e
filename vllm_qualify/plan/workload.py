"""The plans of a cell's accuracy tasks, of the texts that it scores, and of its load."""

import hashlib
import json
from pathlib import Path

from pydantic import ValidationError

from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import CallerError, HostError, RecipeError
from vllm_qualify.plan.cell import LikelihoodPlan, TaskPlan
from vllm_qualify.plan.context import check_length
from vllm_qualify.plan.generation import recommended_sampling
from vllm_qualify.plan.questions import check_questions
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.recipe import LoadedRecipe, Profile
from vllm_qualify.recipe.traces.reading import read_trace
from vllm_qualify.recipe.workload import Accuracy, Fit, Likelihood, Load, LoadSettings

# Questions asked at once: as many as the server runs at once, if the recipe says so, and no more than a client can send.
CONCURRENT_BY_DEFAULT, MOST_CONCURRENT = 64, 256


def task_plan(loaded: LoadedRecipe, settings: Accuracy, server: ServerPlan | None, gates: list[Gate]) -> TaskPlan:
    """The plan of a task; without a server, only its files are checked.

    Raises:
        HostError: a file or folder that the settings name is not there, or the hub does not answer.
        CallerError: the model recommends no sampling, a folder of questions is none, or the task's context is longer than the
            server takes.
    """
    if server and settings.context_tok:
        check_length(server, settings.context_tok, settings.task, f"accuracy.{settings.task}")
    files = settings.questions
    questions = [loaded.path(path) for path in (files.test, files.shots) if path] if files else None
    for path in questions or ():
        check_questions(path)
    folder = loaded.path(settings.task_folder) if settings.task_folder else None
    if folder and not folder.is_dir():
        raise HostError(f"no tasks at {folder}", "restore the folder, or mend accuracy.task_folder in the recipe", "check")
    is_models = settings.sampling == "model"
    compared = any(gate.task == settings.task and gate.against == "answers" for gate in gates)
    recommended = recommended_sampling(server, f"accuracy.{settings.task}.sampling") if server and is_models else None
    least = settings.samples_per_question
    if recommended and recommended.is_greedy and least > 1:
        problem, place = "the model recommends temperature 0, at which samples do not differ", f"accuracy.{settings.task}"
        raise CallerError(problem, "leave samples_per_question out, or write the numbers of sampling", place)
    return TaskPlan(
        settings=settings,
        num_concurrent=num_concurrent(settings, server),
        repetitions=settings.most_repetitions if compared else least,
        sequential=settings.sequential,
        questions=questions,
        folder=folder,
        recommended=recommended,
    )


def num_concurrent(settings: Accuracy, server: ServerPlan | None) -> int:
    most = server.most_requests if server else None
    return settings.num_concurrent or min(most or CONCURRENT_BY_DEFAULT, MOST_CONCURRENT)


def likelihood_plan(
    loaded: LoadedRecipe, settings: Likelihood | None, server: ServerPlan, gates: list[Gate]
) -> LikelihoodPlan | None:
    """None if the recipe asks for no likelihoods, or if the engine gives none and no gate needs them.

    Raises:
        RecipeError: a gate needs likelihoods, and the engine gives none.
        CallerError, HostError: the file of texts is not there, or is no such file.
    """
    if settings is None:
        return None
    if not server.engine_kind.scores_prompts:
        if needing := next((gate.label for gate in gates if METRICS[gate.metric].stage == "likelihood"), None):
            problem = f"{server.engine_kind.title} does not give the likelihood of a prompt's tokens, which {needing} needs"
            raise RecipeError(problem, "leave the gate out for this engine, in a recipe of its own", "likelihood")
        return None
    if settings.texts is None:
        return LikelihoodPlan(settings=settings)
    texts = loaded.path(settings.texts)
    digest, lines = _digest_of_lines(texts, "texts", "likelihood", "text")
    if not lines:
        raise CallerError("it has no text", 'write one {"text": "…"} in each line', str(texts))
    return LikelihoodPlan(settings=settings, texts=texts, texts_sha256=digest)


def load_plan(loaded: LoadedRecipe, name: str, profile: Profile, gates: list[Gate], server: ServerPlan, place: str) -> Load:
    """The load of the profile of this name on a server.

    Raises:
        CallerError: the number of clients is unknown, prompts are too few, or requests are longer than the server takes.
        HostError: the file of prompts is not there.
    """
    make = _trace_plan if profile.load.trace else _load_plan
    return make(loaded, profile, gates, server, place).model_copy(update={"seeded_by": name})


def _load_plan(loaded: LoadedRecipe, profile: Profile, gates: list[Gate], server: ServerPlan, place: str) -> Load:
    """Raises as `load_plan`."""
    clients, option = profile.load.clients(most_clients(server, profile.fit)), server.engine_kind.concurrency
    if clients is None:
        raise CallerError(
            "the number of clients is not given",
            f"give max_concurrency, or the server its {option}, which it follows",
            f"{place}.max_concurrency",
        )
    try:
        load = profile.load.of(clients, prompts_needed(profile.load, gates))
    except ValidationError as error:
        raise CallerError(
            f"{profile.load.num_prompts} prompts are too few for {clients} clients, as many as the server's {option}",
            f"leave it out, or mend it: {error.errors()[0]['msg'].removeprefix('Value error, ')}",
            f"{place}.num_prompts",
        ) from error
    if load.longest_tok is not None:
        check_length(server, load.longest_tok, "the longest request", place)
    prompts = workload_file(loaded, profile.load)
    return load.model_copy(update={"prompts_sha256": _digest_of(prompts, load)}) if prompts else load


def _trace_plan(loaded: LoadedRecipe, profile: Profile, gates: list[Gate], server: ServerPlan, place: str) -> Load:
    """Raises as `load_plan`."""
    settings = profile.load
    file = loaded.path(str(settings.trace))
    read = read_trace(file, most=settings.num_prompts, speed=settings.trace_speed)
    trace, count = read.trace, len(read.trace.requests)
    if settings.num_prompts and count < settings.num_prompts:
        raise CallerError(f"it has {count} requests, and the load asks {settings.num_prompts}", "lower num_prompts", str(file))
    if count < (needed := prompts_needed(settings, gates)):
        raise CallerError(f"it has {count} requests, and the gates need {needed}", "give a longer trace", str(file))
    if trace.arrivals_s[-1] >= settings.time_limit_s:
        problem = f"its requests take {trace.arrivals_s[-1]:,.0f} s to send, and time_limit_s is {settings.time_limit_s:g}"
        raise CallerError(problem, "raise time_limit_s or trace_speed, or lower num_prompts", place)
    longest = max(range(count), key=lambda at: trace.input_toks[at] + trace.output_toks[at])
    tokens = trace.input_toks[longest] + trace.output_toks[longest]
    check_length(server, tokens, f"the request in line {read.lines[longest]}", str(file))
    load = settings.model_copy(update={"num_prompts": count}).of(None, 1)
    return load.model_copy(update={"prompts_sha256": trace.digest})


def most_clients(server: ServerPlan, fit: Fit | None) -> int | None:
    """As many as the server runs at once; a default while a fit has yet to find that number."""
    return server.most_requests or (CONCURRENT_BY_DEFAULT if fit and fit.max_num_seqs else None)


def prompts_needed(settings: LoadSettings, gates: list[Gate]) -> int:
    return max((settings.least_prompts(gate.metric) for gate in gates), default=1)


def workload_file(loaded: LoadedRecipe, settings: LoadSettings) -> Path | None:
    """The file of prompts or the trace, if the workload has one."""
    return loaded.path(settings.file) if settings.file else None


def _digest_of(prompts: Path, load: Load) -> str:
    """Raises HostError without the file; CallerError if a line has no prompt, or prompts would come twice."""
    digest, lines = _digest_of_lines(prompts, "prompts", "load", "prompt")
    if lines < load.num_prompts:
        problem = f"it has {lines} prompts, and the load asks {load.num_prompts}: some would come twice"
        raise CallerError(problem, "add prompts, or lower num_prompts", str(prompts))
    return digest


def _digest_of_lines(path: Path, name: str, section: str, key: str) -> tuple[str, int]:
    """The SHA-256 of a file of JSON lines, each with a text under `key`, and the number of its lines.

    Raises HostError without the file; CallerError if a line has no such text.
    """
    if not path.is_file():
        raise HostError(f"no {name} at {path}", f"restore the file, or mend {section}.{name} in the recipe", "check")
    body = path.read_bytes()
    # Split as bytes: in a text other characters end a line too.
    lines = body.splitlines()
    for number, line in enumerate(lines, start=1):
        if not _has_text(line, key):
            problem, remedy = f'line {number} is no {{"{key}": "…"}}', "write one JSON object in each line"
            raise CallerError(problem, remedy, str(path))
    return hashlib.sha256(body).hexdigest(), len(lines)


def _has_text(line: bytes, key: str) -> bool:
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and isinstance(row.get(key), str) and bool(row[key])
