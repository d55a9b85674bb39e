"""The plans of a cell's accuracy tasks, of the texts that it scores, and of its load."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from vllm_qualify.engine.environment import content_digest, digest_at
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import CallerError, HostError, RecipeError
from vllm_qualify.plan.cell import LikelihoodPlan, TaskPlan
from vllm_qualify.plan.generation import recommended_sampling
from vllm_qualify.plan.questions import check_questions
from vllm_qualify.recipe.accuracy import Accuracy, Likelihood
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.load import CountedFrom, Load, LoadSettings, Workload
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.recipe import LoadedRecipe, Profile
from vllm_qualify.recipe.searches import Fit
from vllm_qualify.recipe.serving import VLLM
from vllm_qualify.recipe.traces.reading import read_trace

# Questions asked at once: as many as the server runs at once, if the recipe says so, and no more than a client can send.
CONCURRENT_BY_DEFAULT, MOST_CONCURRENT = 64, 256
MAX_LEN = "max-model-len"
# vLLM's `human_readable_int`: small letters are decimal, capital ones binary.
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def task_plan(loaded: LoadedRecipe, settings: Accuracy, server: ServerPlan | None, gates: list[Gate]) -> TaskPlan:
    """The plan of a task; without a server, only its files are checked.

    Raises HostError if a file or folder that the settings name is not there, or the hub does not answer; CallerError if the
    model recommends no sampling, a folder of questions is none, or the task's context is longer than the server takes.
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
    recommended = recommended_sampling(server, f"accuracy.{settings.task}.sampling") if server and is_models else None
    least = settings.samples_per_question
    if recommended and recommended.is_greedy and least > 1:
        problem, place = "the model recommends temperature 0, at which samples do not differ", f"accuracy.{settings.task}"
        raise CallerError(problem, "leave samples_per_question out, or write the numbers of sampling", place)
    return TaskPlan(
        settings=settings,
        num_concurrent=num_concurrent(settings, server),
        repetitions=repetitions_of(settings, gates),
        sequential=settings.sequential,
        questions=questions,
        questions_digests=[digest_at(path) for path in questions or ()],
        folder=folder,
        folder_digest=content_digest(folder) if folder else None,
        recommended=recommended,
    )


def repetitions_of(settings: Accuracy, gates: list[Gate]) -> int:
    """How often all questions are asked at most in one start of the server."""
    is_compared = any(gate.task == settings.task and gate.against == "answers" for gate in gates)
    return settings.most_repetitions if is_compared else settings.samples_per_question


def num_concurrent(settings: Accuracy, server: ServerPlan | None) -> int:
    most = server.most_requests if server else None
    return settings.num_concurrent or min(most or CONCURRENT_BY_DEFAULT, MOST_CONCURRENT)


def likelihood_plan(
    loaded: LoadedRecipe, settings: Likelihood | None, server: ServerPlan, gates: list[Gate]
) -> LikelihoodPlan | None:
    """None if the recipe asks for no likelihoods, or if the engine gives none and no gate needs them.

    Raises RecipeError if a gate needs likelihoods, and the engine gives none; CallerError, HostError if the file of texts is
    not there, or is no such file.
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

    Raises CallerError if the number of clients is unknown, prompts are too few, or requests are longer than the server takes;
    HostError if the file of prompts is not there.
    """
    make = _trace_plan if profile.load.trace else _load_plan
    added = {"seeded_by": name, "counted_from": choose_first_chunk(profile.load, server)}
    return make(loaded, profile, gates, server, place).model_copy(update=added)


def choose_first_chunk(settings: Workload, server: ServerPlan) -> CountedFrom | None:
    """Which chunk has the first token of the chats of a load: the second one if the engine is known to send a role before it.

    None if the load has no chats, and in a steady state where the second one has it, as in plans that do not say it.
    """
    if settings.api != "chat" or (settings.window == "steady" and server.engine_kind.opens_with_role):
        return None
    return "second chunk" if server.engine_kind.opens_with_role else "first chunk"


def _load_plan(loaded: LoadedRecipe, profile: Profile, gates: list[Gate], server: ServerPlan, place: str) -> Load:
    clients, option = profile.load.count_clients(most_clients(server, profile.fit)), server.engine_kind.concurrency
    if clients is None:
        remedy = f"give max_concurrency, or the server its {option}, which it follows"
        raise CallerError("the number of clients is not given", remedy, f"{place}.max_concurrency")
    try:
        load = profile.load.make_load(clients, prompts_needed(profile.load, gates))
    except ValidationError as error:
        problem = f"{profile.load.num_prompts} prompts are too few for {clients} clients, as many as the server's {option}"
        remedy = f"leave it out, or mend it: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        raise CallerError(problem, remedy, f"{place}.num_prompts") from error
    if load.longest_tok is not None:
        check_length(server, load.longest_tok, "the longest request", place)
    prompts = workload_file(loaded, profile.load)
    if prompts is None:
        return load
    digest, lines = _digest_of_lines(prompts, "prompts", "load", "prompt")
    if lines < load.num_prompts:
        problem = f"it has {lines} prompts, and the load asks {load.num_prompts}: some would come twice"
        raise CallerError(problem, "add prompts, or lower num_prompts", str(prompts))
    return load.model_copy(update={"prompts_sha256": digest})


def _trace_plan(loaded: LoadedRecipe, profile: Profile, gates: list[Gate], server: ServerPlan, place: str) -> Load:
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
    load = settings.model_copy(update={"num_prompts": count}).make_load(None, 1)
    return load.model_copy(update={"prompts_sha256": trace.digest})


def most_clients(server: ServerPlan, fit: Fit | None) -> int | None:
    """As many as the server runs at once; a default while a fit has yet to find that number."""
    return server.most_requests or (CONCURRENT_BY_DEFAULT if fit and fit.max_num_seqs else None)


def prompts_needed(settings: LoadSettings, gates: list[Gate]) -> int:
    return max((settings.least_prompts(gate.metric) for gate in gates), default=1)


def workload_file(loaded: LoadedRecipe, settings: LoadSettings) -> Path | None:
    """The file of prompts or the trace, if the workload has one."""
    return loaded.path(settings.file) if settings.file else None


def load_digest(loaded: LoadedRecipe, settings: LoadSettings) -> str | None:
    """The digest of the workload's file, as a load has it. Raises HostError without the file, CallerError as `load_plan`."""
    if settings.trace:
        file = loaded.path(settings.trace)
        return read_trace(file, most=settings.num_prompts, speed=settings.trace_speed).trace.digest
    prompts = workload_file(loaded, settings)
    return None if prompts is None else _digest_of_lines(prompts, "prompts", "load", "prompt")[0]


def check_files(loaded: LoadedRecipe, profiles: Iterable[Profile]) -> None:
    """Check that the texts to score and the files of the profiles' loads are there. Raises HostError."""
    scored = loaded.recipe.likelihood
    if scored and scored.texts is not None:
        _check_is_file(loaded.path(scored.texts), "texts", "likelihood")
    for load in (profile.load for profile in profiles):
        if file := workload_file(loaded, load):
            _check_is_file(file, "trace" if load.trace else "prompts", "load")


def _check_is_file(path: Path, name: str, section: str) -> None:
    if not path.is_file():
        raise HostError(f"no {name} at {path}", f"restore the file, or mend {section}.{name} in the recipe", "check")


def _digest_of_lines(path: Path, name: str, section: str, key: str) -> tuple[str, int]:
    """The SHA-256 of a file of JSON lines, each with a text under `key`, and the number of its lines.

    Raises HostError without the file; CallerError if a line has no such text.
    """
    _check_is_file(path, name, section)
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
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and isinstance(row.get(key), str) and bool(row[key])


def check_length(server: ServerPlan, longest_tok: int, asked: str, place: str) -> None:
    """Raises CallerError if `longest_tok`, prompt and reply, are more than a server is known to take before it starts.

    `asked` says what has so many.
    """
    limit = limit_of(server)
    if limit is not None and longest_tok > limit[0]:
        problem = f"{asked} has {longest_tok:,} tokens, prompt and reply, and {limit[1]} {limit[0]:,}"
        raise CallerError(problem, f"shorten it, or serve a longer context: {MAX_LEN}, as far as the model goes", place)


def limit_of(server: ServerPlan) -> tuple[int, str] | None:
    """The most tokens of a request, and what says so; None if only the engine knows."""
    if server.kind != VLLM:
        return None
    # As vLLM reads a number of tokens; no number is one like `auto`.
    given = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kKmMgG]?)", str(server.arguments.get(MAX_LEN)))
    if given:
        return int(float(given[1]) * UNITS[given[2]]), f"{MAX_LEN} is"
    of_model = _limit_of_model(server) if MAX_LEN not in server.arguments and server.is_local else None
    return None if of_model is None else (of_model, "max_position_embeddings of the model's config.json is")


def _limit_of_model(server: ServerPlan) -> int | None:
    """Of a model in a folder. A stretched one and one of several parts are left to the engine."""
    (folder, *_) = server.local_paths
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        # The engine tells what is wrong with it.
        return None
    if not isinstance(config, dict) or any(_is_stretched(config.get(name)) for name in ("rope_scaling", "rope_parameters")):
        return None
    most = config.get("max_position_embeddings")
    return most if type(most) is int and most > 0 else None


def _is_stretched(rope: object) -> bool:
    """Whether a configuration of rotary embeddings, or what is in its place, changes how far they go."""
    return bool(rope) and not (isinstance(rope, dict) and rope.get("rope_type") == "default")
