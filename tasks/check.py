"""The checks before anything is measured: recipe, machine, engine, model and store."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prefect import get_run_logger
from prefect.runtime import task_run

from tasks.progress import teller
from tasks.step import step
from vllm_qualify.drift.question import Question
from vllm_qualify.drift.whole_weights import check_parameters
from vllm_qualify.engine.confinement import GIVE_NAMESPACES, USE_LANDLOCK, isolation_problem
from vllm_qualify.engine.host import check_host
from vllm_qualify.engine.hub import Repository, fetch
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.model_signature import check_publisher
from vllm_qualify.engine.provision import Engines, Launch, find_engines, left_behind, provide, read_machine
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.engine.weights import USUAL_LOADERS, check_tokenizer, check_weights
from vllm_qualify.evidence.accuracy.checked_tasks import check_planned_tasks, check_recipes_tasks
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import check_choice, plan_cells, unconfined_code, unisolated_code, within_budget
from vllm_qualify.plan.choice import Choice
from vllm_qualify.plan.request import Against
from vllm_qualify.publish.layout import prepare
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.code import check_allowed
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.recipe import LoadedRecipe
from vllm_qualify.runs.baseline import with_baseline
from vllm_qualify.runs.home import engine_cache
from vllm_qualify.runs.known_starts import with_between
from vllm_qualify.runs.tries import with_tries

# An image of 30 GB at 2 MB/s takes four hours.
PULL_LIMIT_S = 6 * 3600.0
# A trillion weights of one byte at 10 MB/s take 28 hours, and a folder of them is hashed at the speed of its disk.
WEIGHTS_LIMIT_S = 48 * 3600.0


@step("check", "check {recipe}")
def check_request(recipe: str, choice: Choice, launch: Launch, store: str, allow_code: bool = False) -> Engines:
    """Check the request; the engines, their tags as digests. Raises CallerError, HostError, ReleaseError, StoreError."""
    check_host()
    loaded = _load_allowed(recipe, allow_code)
    if selection := check_choice(loaded, choice, launch):
        check_recipes_tasks(loaded, selection.profiles.values())
    prepare(open_store(store))
    return find_engines(launch)


@step("code", "look for code in {recipe}")
def check_code(recipe: str, allow_code: bool) -> None:
    """Raises CallerError if the recipe runs code, and is neither the catalog's nor allowed to."""
    _load_allowed(recipe, allow_code)


def _load_allowed(recipe: str, allow_code: bool) -> LoadedRecipe:
    loaded = load_recipe(recipe)
    check_allowed(loaded, allow_code)
    return loaded


@step("provide", limit_s=PULL_LIMIT_S)
def provide_engines(engines: Engines) -> float | None:
    """Pull, verify and tag images, and remove containers that a killed run left. Raises HostError, ReleaseError.

    Returns the seconds that the pull of the engine's image took. None if nothing was pulled, or if this is a second try:
    the first one may have pulled a part.
    """
    for line in left_behind(engines.engine.launcher):
        get_run_logger().info(line)
    provided = provide(engines, teller())
    for line in provided.messages:
        get_run_logger().info(line)
    return provided.pulled_s if task_run.run_count == 1 else None


@step("plan", "plan {recipe}", limit_s=WEIGHTS_LIMIT_S)
def plan(
    recipe: str,
    choice: Choice,
    engines: Engines,
    pulled_s: float | None,
    price_usd_gpu_hour: float | None,
    time_budget_s: float | None = None,
    allow_code: bool = False,
) -> list[CellPlan]:
    """The plans of the chosen cells here; price and budget replace the recipe's. Raises CallerError, HostError."""
    # Once more: the file may be another one by now.
    loaded = _load_allowed(recipe, allow_code)
    machine = read_machine(engines.engine, choice.gpu_type)
    costs = {"pulled_s": pulled_s} | ({"price_usd_gpu_hour": price_usd_gpu_hour} if price_usd_gpu_hour else {})
    plans = [cell.model_copy(update=costs) for cell in plan_cells(loaded, choice, engines, machine)]
    plans = [cell.model_copy(update={"unasked": check_planned_tasks([cell])}) for cell in plans]
    for unknown in dict.fromkeys(line for cell in plans for line in cell.unasked):
        get_run_logger().warning(f"it is not known {unknown}")
    if time_budget_s:
        plans = [within_budget(cell, time_budget_s) for cell in plans]
    for cell in plans:
        engine = cell.cell.release.engine
        served = f"{KINDS[engine.kind].title} {engine.version} ({engine.digest[:19]})"
        get_run_logger().info(f"cell {cell.cell.id} on {served}, {machine.id}")
        if owner := unconfined_code(cell):
            get_run_logger().warning(f"{owner} can read this user's keys, since this kernel cannot confine it: {USE_LANDLOCK}")
        elif owner := unisolated_code(cell):
            reached = "other processes, their shared memory, and the modes and times of files"
            get_run_logger().warning(
                f"{owner} reaches {reached}, without namespaces ({isolation_problem()}): {GIVE_NAMESPACES}"
            )
    return plans


@step("baselines")
def find_baselines(plans: list[CellPlan], store: str, against: Against) -> list[CellPlan]:
    """The plans, each with its baseline run, the earlier tries of its release, and what is known of how much starts differ.

    Raises CallerError, StoreError, TamperedError.
    """
    opened, tell = open_store(store), get_run_logger().info
    compared = [with_tries(with_baseline(cell, opened, against, tell), opened, tell) for cell in plans]
    # Only now it is known which become baselines, and ask more at once.
    check_planned_tasks([cell for cell in compared if cell.establishes])
    return [with_between(cell, opened, tell) for cell in compared]


@step("models", limit_s=WEIGHTS_LIMIT_S)
def fetch_models(plans: list[CellPlan]) -> None:
    """Bring what the cells' servers read of the hub into this machine's cache, and check each file by the hub's hash.

    A server then needs neither the hub nor its token. A model must be signed by its publisher's key, if the recipe names one.
    Its weights must be whole, as far as their files and the engine tell, and its folder must have a tokenizer.
    Raises CallerError, HostError, HubError, ReleaseError.
    """
    servers = [server for cell in plans for server in (cell.server, cell.undrafted, cell.beside) if server]
    wanted = {(part.name, part.revision): part for server in servers for part in server.repositories}
    folders: dict[str, Path] = {}
    for part in wanted.values():
        get_run_logger().info(f"fetching {part.name} at {part.revision} and checking its files")
        if not part.files:
            get_run_logger().warning(f"the hub gives no hashes of {part.name}: its files are not checked")
        folders[part.name] = fetch(Repository(name=part.name, commit=part.revision, files=part.files), "check")
    for server in {(server.model, server.signed_by): server for server in servers}.values():
        check_publisher(server, folders.get(server.model), "check")
    for folder, name in _list_weights(servers, folders):
        check_weights(folder, name, "check")
    for server in servers:
        # Another folder or repository may have the tokenizer.
        if server.is_local and not {"tokenizer", "skip-tokenizer-init"} & server.arguments.keys():
            check_tokenizer(Path(server.model), server.model, "check")
    for unknown in check_parameters(servers, engine_cache()):
        get_run_logger().info(f"it is not known {unknown}")


def _list_weights(servers: list[ServerPlan], folders: Mapping[str, Path]) -> Iterator[tuple[Path, str]]:
    """The folders of weights that vLLM's usual loader reads, each with its name. Other loaders have files of their own."""
    seen: set[Path] = set()
    for server in servers:
        usual = server.arguments.get("load-format", "auto") in USUAL_LOADERS
        own = Path(server.model) if server.is_local else folders.get(server.model)
        for folder in (own if usual else None, server.draft):
            if folder and folder not in seen:
                seen.add(folder)
                yield folder, str(folder) if server.is_local or folder is server.draft else server.model


@contextmanager
def asking(plans: list[CellPlan]) -> Iterator[Question]:
    """Ask the engine whether it accepts the cells' configuration, while the block starts a server. The question ends with it.

    It is asked before the block in two cases: the answer is already cached, so it costs no time; or a gate is on a start-up
    time, which the question would make longer. Then it raises RecipeError, HostError as `Question.ask`.
    """
    question = Question(plans, engine_cache())
    metrics = [METRICS[gate.metric] for cell in plans for gate in cell.judged_gates]
    if question.is_kept or any((metric.stage, metric.unit) == ("serve", "s") for metric in metrics):
        check_drift(question)
        yield question
        return
    asked = check_drift.submit(question)
    asked.add_done_callback(lambda _: question.settle())
    try:
        yield question
    finally:
        question.give_up()
        asked.wait()


@step("drift", once=True)
def check_drift(question: Question) -> None:
    """Check the cells against the engine's own code, without a GPU. It is not tried again: its answer can end a server's start.

    Raises RecipeError, HostError as `Question.ask`.
    """
    get_run_logger().info("asking vLLM whether it takes what the recipe says; once for each engine and configuration")
    for each in question.ask():
        get_run_logger().warning(f"not known: {each}")
