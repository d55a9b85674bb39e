"""An engine's server as data: its plan, its container if it has one, and the running server with its client."""

import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, JsonValue, SerializeAsAny

from vllm_qualify.engine.confinement import STATISTICS_OFF, paths_within
from vllm_qualify.engine.containers.leftovers import CELL_LABEL, ROLE_LABEL, RUN_LABEL
from vllm_qualify.engine.containers.plan import SERVED_PORT, Bind, ContainerPlan
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.failure.end import End
from vllm_qualify.engine.failure.meanings import Turn
from vllm_qualify.engine.hub import cache_folder, folder_name
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.kinds.base import EngineKind, ServedModel
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.launchers import LauncherName
from vllm_qualify.engine.process import Running, tail, text_of
from vllm_qualify.errors import CallerError, HostError, HubError, QualifyError, RecipeError, ReleaseError, UnclearError
from vllm_qualify.lazy import Lazy
from vllm_qualify.recipe.roles import EFFORT, PLACE, WORK, Settings
from vllm_qualify.recipe.serving import VLLM, EngineName, Environment, ServerArguments
from vllm_qualify.recipe.values import Frozen

if TYPE_CHECKING:
    import httpx

    from vllm_qualify import answers
else:
    answers, httpx = Lazy("vllm_qualify.answers"), Lazy("httpx")

HOST = "127.0.0.1"
STAGE = "serve"
# Files in the folder of a server.
CONFIG_FILE, LOG = "server.yaml", "server.log"

# Paths in a container, the same on every machine. Its /tmp is its own, and every user in it may write there.
CONFIG_INSIDE, MODEL_INSIDE, RESULTS_INSIDE = "/vllm-qualify/server.yaml", "/vllm-qualify/model", "/tmp/results"  # noqa: S108
DRAFT_INSIDE = "/vllm-qualify/draft"
HF_HOME_INSIDE = "/root/.cache/huggingface"
# What it needs of the hub is in the cache before it starts, so it needs neither a network nor a token.
OFFLINE = {"HF_HUB_OFFLINE": "1"}
# What a deployment takes from its own environment.
PASSED = ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE")
# vLLM's own advice is --ipc=host or --shm-size. NCCL and PyTorch use /dev/shm between the processes of a server, by GPU.
SHARED_MEMORY_GIB = 16

MODEL = "model"

Engine = Annotated[EngineEnvironment | EngineImage, Field(discriminator="launcher")]
Labels = dict[str, str]


class Part(Frozen):
    """A repository of the hub, or a file or folder of this machine, that a server option names.

    `revision` is a commit of the hub, or `sha256:` with the digest of the content. `files` has the hub's hash of each file of a
    repository (`engine.hub.Repository`).
    """

    option: str
    name: str
    revision: str
    files: dict[str, str] = {}

    @property
    def is_of_the_hub(self) -> bool:
        return not self.revision.startswith("sha256:")


class ServerPlan(Settings):
    """All that determines a server: stages with an equal plan share one server.

    `arguments` are options of the engine's `kind`. `gpus` are the indices of the GPUs that it may use; none on a CPU.
    `memory_limit_gib` limits a container's host memory. `draft_digest` covers the content of a draft model's folder. `parts`
    are the repositories and files that shape its replies, each pinned: the model itself, if it is the hub's, is the first.
    `signed_by` is the key (PEM) of the model's publisher, if its files must be those that this key signed. `inherited` are
    variables of the orchestrator's own environment that tune a server run as a process, beside those of its `environment`.
    `aliases` are names under which it offers the model too.
    """

    engine: Annotated[Engine, PLACE]
    model: Annotated[str, WORK]
    revision: Annotated[str | None, WORK]
    served_model_name: Annotated[str, WORK]
    arguments: Annotated[ServerArguments, WORK]
    environment: Annotated[Environment, WORK]
    startup_timeout_s: Annotated[float, EFFORT]
    gpus: Annotated[list[int], PLACE] = []
    memory_limit_gib: Annotated[float | None, WORK] = None
    kind: Annotated[EngineName, WORK] = VLLM
    draft_digest: Annotated[str | None, WORK] = None
    parts: Annotated[list[Part], WORK] = []
    signed_by: Annotated[str | None, WORK] = None
    inherited: Annotated[Environment, WORK] = {}
    aliases: Annotated[list[str], WORK] = []

    def part(self, option: str) -> Part | None:
        """What an option names, if it is not the model's own."""
        return next((part for part in self.parts if part.option == option), None)

    @property
    def repositories(self) -> list[Part]:
        """The hub's repositories that it reads: the model alone, while the parts are not looked up."""
        parts = [part for part in self.parts if part.is_of_the_hub]
        if self.revision is None or self.part(MODEL):
            return parts
        return [Part(option=MODEL, name=self.model, revision=self.revision), *parts]

    @property
    def names(self) -> list[str]:
        return [self.served_model_name, *self.aliases]

    @property
    def engine_kind(self) -> EngineKind:
        return KINDS[self.kind]

    @property
    def most_requests(self) -> int | None:
        return self.engine_kind.most_requests(self.arguments)

    @property
    def in_container(self) -> bool:
        """Whether it runs from an image: paths there differ from those on this machine."""
        return isinstance(self.engine, EngineImage)

    @property
    def is_local(self) -> bool:
        """Whether the weights are on this machine; a model of the hub has a revision."""
        return self.revision is None

    @property
    def variables(self) -> Environment:
        """All variables that tune it, the recipe's after those of the machine."""
        return self.inherited | self.environment

    @property
    def trust_remote_code(self) -> bool:
        return self.arguments.get(self.engine_kind.trust_remote_code) is True

    @property
    def served_from(self) -> str:
        """The model as the server knows it: a hub repository, or a folder where the server runs."""
        return MODEL_INSIDE if self.is_local and self.in_container else self.model

    @property
    def draft(self) -> Path | None:
        """The folder on this machine with the draft model of speculative decoding; None for the hub's, or without one."""
        model = draft_model(self.arguments, self.kind)
        return Path(model) if model is not None and Path(model).is_absolute() else None

    @property
    def local_paths(self) -> list[Path]:
        """What it reads of this machine: weights, the hub's repositories, files of its parts, the paths among its arguments."""
        models = [Path(self.model)] if self.is_local else []
        folders = [cache_folder() / folder_name(part.name) for part in self.repositories]
        files = [Path(part.name).expanduser().absolute() for part in self.parts if not part.is_of_the_hub]
        return [*models, *folders, *files, *([self.draft] if self.draft else []), *paths_within(self.arguments)]

    @property
    def shared_memory_gib(self) -> int:
        """The most that its processes may share in memory, in a container."""
        return SHARED_MEMORY_GIB * max(1, len(self.gpus))

    @property
    def served_arguments(self) -> ServerArguments:
        """The arguments, with the draft model's path as the server sees it, or its commit on the hub."""
        pinned = self.part(self.engine_kind.speculative)
        if pinned and pinned.is_of_the_hub:
            return with_draft(self.arguments, self.kind, {"revision": pinned.revision})
        if self.draft is None or not self.in_container:
            return self.arguments
        return with_draft(self.arguments, self.kind, {"model": DRAFT_INSIDE})

    @property
    def tokenizer_revision(self) -> str | None:
        pinned = self.part("tokenizer")
        return pinned.revision if pinned and pinned.is_of_the_hub else self.revision

    def served_model(self, port: int) -> ServedModel:
        """The settings that the server gets. A container listens on a port of its own."""
        return ServedModel(
            model=self.served_from,
            revision=self.revision,
            tokenizer_revision=self.tokenizer_revision,
            name=self.served_model_name,
            host="0.0.0.0" if self.in_container else HOST,  # noqa: S104  (Docker publishes it on 127.0.0.1 only)
            port=SERVED_PORT if self.in_container else port,
            aliases=tuple(self.aliases),
        )

    def config(self, port: int) -> ServerArguments:
        """The content of the `--config` file, the engine's option names as keys."""
        return self.engine_kind.config(self.served_model(port), self.served_arguments)


def with_speculation_parsed(arguments: ServerArguments, kind: EngineName) -> ServerArguments:
    """The arguments with their speculative decoding as a mapping, also if it is written as vLLM's JSON text.

    Raises CallerError if it is not a mapping, or a field of it is an option of its own.
    """
    option = KINDS[kind].speculative
    if dotted := next((name for name in arguments if name.startswith(f"{option}.")), None):
        raise CallerError(f"{dotted} is one field of {option}", f"write {option} as a mapping", f"server.{dotted}")
    if option not in arguments:
        return arguments
    written = arguments[option]
    try:
        parsed = json.loads(written) if isinstance(written, str) else written
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        problem = f"{written!r} is not a JSON object"
        raise CallerError(problem, "write a mapping, such as {method: ngram, num_speculative_tokens: 3}", f"server.{option}")
    return arguments | {option: parsed}


def draft_model(arguments: ServerArguments, kind: EngineName) -> str | None:
    """The draft model that the arguments name: a repository of the hub or a folder."""
    speculative = arguments.get(KINDS[kind].speculative)
    model = speculative.get("model") if isinstance(speculative, dict) else None
    return model if isinstance(model, str) else None


def with_draft(arguments: ServerArguments, kind: EngineName, changes: dict[str, JsonValue]) -> ServerArguments:
    """The arguments, with changes to the mapping that names their draft model."""
    option = KINDS[kind].speculative
    speculative = arguments[option]
    assert isinstance(speculative, dict)  # noqa: S101  (the caller has checked it)
    return arguments | {option: speculative | changes}


def config_text(plan: ServerPlan, port: int) -> str:
    """The config file as its engine reads it."""
    return plan.engine_kind.text(plan.config(port))


def gpu_count(arguments: ServerArguments, kind: EngineName = VLLM) -> int:
    """How many GPUs a server with these arguments takes: the product of its parallel sizes. Raises CallerError."""
    sizes = {name: str(arguments.get(name, 1)) for name in KINDS[kind].parallel}
    if wrong := next((name for name, size in sizes.items() if not re.fullmatch("[1-9][0-9]*", size)), None):
        raise CallerError(f"{arguments[wrong]!r} is not a number of GPUs", "write a whole number, 1 or more", f"server.{wrong}")
    return math.prod(map(int, sizes.values()))


class Client(Frozen):
    """Where vLLM's own measuring tool runs, and its settings.

    `runs_in` is the place in its launcher's words: a container's id, or empty for this machine. `python` is the interpreter of
    `program`. `trust_remote_code`: the model's tokenizer may bring its own code, to the client as to the server. It may read
    `paths` of this machine.
    """

    launcher: LauncherName = "process"
    runs_in: str = ""
    program: str
    python: str
    url: str
    model: str
    trust_remote_code: bool = False
    paths: list[Path] = []


class Server(Frozen):
    """A server that answers: its addresses and ids, no handle."""

    url: str
    metrics_path: str = "/metrics"
    served_model_name: str
    kind: EngineName = VLLM
    process: SerializeAsAny[Running]
    command: list[str]
    startup_s: float
    client: Client

    def check_alive(self) -> None:
        """If the server has ended, raises the error of the failure's class, with the telling lines of its log."""
        check_alive(self.process)

    def metrics_page(self) -> str:
        """The server's metrics page, or a comment that says why there is none. Raises as `check_alive` if it has ended."""
        try:
            return answers.ask_within("GET", f"{self.url}{self.metrics_path}", 30).raise_for_status().text
        except httpx.HTTPError as error:
            self.check_alive()
            return f"# no answer: {type(error).__name__}\n"

    def post(self, path: str) -> str:
        """The status of an empty POST to `path`, or why there is none. Raises as `check_alive` if it has ended."""
        try:
            return str(answers.ask_within("POST", f"{self.url}{path}", 30).status_code)
        except httpx.HTTPError as error:
            self.check_alive()
            return f"no answer: {type(error).__name__}"


class Starting(Frozen):
    """A server that was launched, and may not answer yet. `launched_at` is a time of this process's monotonic clock, in s."""

    url: str
    process: SerializeAsAny[Running]
    command: list[str]
    client: Client
    launched_at: float


def container_of(plan: ServerPlan, config: Path, port: int, labels: Labels) -> ContainerPlan:
    """The server's container. Of this machine it gets only the cell's GPUs, the config file and the model."""
    assert isinstance(plan.engine, EngineImage)  # noqa: S101  (the caller has checked it)
    return ContainerPlan(
        name=container_name(labels, "server"),
        image=plan.engine.pinned,
        platform=plan.engine.platform,
        arguments=plan.engine_kind.arguments(plan.served_model(port), CONFIG_INSIDE),
        environment=container_environment(plan),
        binds=[Bind(source=config, target=CONFIG_INSIDE), *model_binds(plan)],
        labels=container_labels(labels, "server"),
        gpus=plan.gpus,
        port=port,
        shared_memory_gib=plan.shared_memory_gib,
        memory_limit_mib=int(plan.memory_limit_gib * 1024) if plan.memory_limit_gib else None,
    )


def container_environment(plan: ServerPlan) -> dict[str, str]:
    home = {"HF_HOME": HF_HOME_INSIDE} if plan.repositories else {}
    return home | OFFLINE | STATISTICS_OFF | plan.environment


def model_binds(plan: ServerPlan) -> list[Bind]:
    """Weights, also a draft model's, and repositories of the hub, all read-only: those of the plan, and nothing else."""
    model = [Bind(source=Path(plan.model), target=MODEL_INSIDE)] if plan.is_local else []
    draft = [Bind(source=plan.draft, target=DRAFT_INSIDE)] if plan.draft else []
    folders = [folder_name(part.name) for part in plan.repositories]
    return [*model, *draft, *(Bind(source=cache_folder() / name, target=f"{HF_HOME_INSIDE}/hub/{name}") for name in folders)]


def container_name(labels: Labels, role: str) -> str:
    return f"vllm-qualify-{labels.get('run', os.getpid())}-{role}"


def container_labels(labels: Labels, role: str) -> Labels:
    return {RUN_LABEL: labels.get("run", ""), CELL_LABEL: labels.get("cell", ""), ROLE_LABEL: role}


def check_alive(process: Running) -> None:
    """If a server has ended, raises the error of the failure's class, with the telling lines of its log."""
    end = process.end()
    if end is not None:
        raise error_of(process, end)


def error_of(process: Running, end: End) -> QualifyError:
    """The error for a server that ended or was given up; its class says who must act."""
    # Only a failure needs its import, which takes half a second.
    from vllm_qualify.engine.failure.classify import classify_log

    failure = classify_log(text_of(process.log), end, in_image=process.in_image)
    errors: dict[Turn, type[QualifyError]] = {
        "recipe": RecipeError,
        "host": HostError,
        "release": ReleaseError,
        "hub": HubError,
        "unclear": UnclearError,
    }
    lines = failure.lines or tail(process.log)
    return errors[failure.whose_turn](failure.problem, failure.remedy, STAGE, lines, failure.kind, failure.retry)
