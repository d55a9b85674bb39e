"""A cell's plan: what is served, checked, measured and judged."""

import hashlib
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.recipe.code import TASKS_CODE, code_of_server
from vllm_qualify.recipe.contract import Contract
from vllm_qualify.recipe.gates import Gate, Verdict, Waiver
from vllm_qualify.recipe.recipe import Approval
from vllm_qualify.recipe.sampling import Sampling
from vllm_qualify.recipe.values import Count, Frozen, Name, NotNegative, Positive
from vllm_qualify.recipe.workload import Accuracy, Fit, Likelihood, Load, LoadSettings, Smoke, Soak, Sweep


class Release(Frozen):
    """A model at a revision (a hub commit, or the digest of a local folder's content) with an engine.

    `files` has the SHA-256 of each file of a local folder. It is empty for a model of the hub, whose commit has them.
    """

    model: str
    revision: str
    files: dict[str, str] = {}
    engine: EngineIdentity

    @property
    def digest(self) -> str:
        """SHA-256 of the model's revision and the engine's digest, in hexadecimal: two names of one release have one digest."""
        return hashlib.sha256(f"{self.revision} {self.engine.digest}".encode()).hexdigest()


class Cell(Frozen):
    """The unit that is qualified and approved."""

    recipe: Name
    release: Release
    variant: Name
    gpu_type: Name
    profile: Name

    @property
    def id(self) -> str:
        return f"{self.recipe}/{self.variant}/{self.gpu_type}/{self.profile}"


class TaskPlan(Frozen):
    """One lm-eval task of a cell: its settings, completed for the cell's server and this machine.

    All its questions are asked at most `repetitions` times: more than once only if answers are sampled so, or compared with a
    baseline's. With `sequential` it may end after any block of questions, but not before `least_repetitions`. `recommended` are
    the numbers behind `sampling: model`.
    """

    settings: Accuracy
    num_concurrent: int
    repetitions: int = 1
    sequential: bool = False
    questions: list[Path] | None = None
    folder: Path | None = None
    recommended: Sampling | None = None

    @property
    def name(self) -> str:
        return self.settings.task

    @property
    def least_repetitions(self) -> int:
        """How often all questions are asked before anything is decided; 1 lets a block decide."""
        # Not `repetitions`, which a plan from another machine may claim: only settings are held against the recipe.
        return self.settings.samples_per_question

    @property
    def sampling(self) -> Sampling | None:
        """How tokens are chosen; None leaves that to the task, which mostly takes the likeliest."""
        return self.recommended if self.settings.sampling == "model" else self.settings.sampling

    @property
    def asked(self) -> Accuracy:
        """The settings, with the numbers of `sampling` also where the recipe leaves them to the model."""
        return self.settings.model_copy(update={"sampling": self.sampling})

    @property
    def keeps_replies(self) -> bool:
        """Whether what a model thinks is kept beside the answers, if the task has it write them."""
        return self.settings.api == "chat" or self.settings.think_end is not None

    @property
    def gen_kwargs(self) -> dict[str, Any]:
        """What lm-eval sends with each request beside the task's own: its `gen_kwargs`, by the names of OpenAI and vLLM."""
        settings = self.settings
        own = {"chat_template_kwargs": settings.chat_template_kwargs, "reasoning_effort": settings.reasoning_effort}
        stop = {} if settings.stop is None else {"until": settings.stop}
        return (self.sampling.numbers if self.sampling else {}) | stop | {name: value for name, value in own.items() if value}


class LikelihoodPlan(Frozen):
    """What is scored: the settings, and the file of texts with the SHA-256 of its content, if there is one."""

    settings: Likelihood
    texts: Path | None = None
    texts_sha256: str | None = None

    def covers(self, baseline: "LikelihoodPlan") -> bool:
        """Whether all that a baseline scored is scored here: as many answers or more, and the same texts."""
        has_answers = baseline.settings.num_answers <= self.settings.num_answers
        return has_answers and baseline.texts_sha256 == self.texts_sha256


class Baseline(Frozen):
    """The run that a cell is compared with, and what must be the same for that.

    `folder` is where the run is, if not in the store.
    """

    run_id: str
    folder: Path | None = None
    cell: Cell
    fingerprint: Fingerprint
    client_version: str
    accuracy: list[Accuracy]
    load: Load
    likelihood: LikelihoodPlan | None = None
    served_model_name: str = ""


class Anchor(Frozen):
    """The approved run that a cell is held against for good, and what must be the same for that.

    `chosen` says why it is that one.
    """

    run_id: str
    cell: Cell
    accuracy: list[Accuracy]
    chosen: Literal["the first approved", "made to be one", "named by the recipe", "named by the caller"]


class EarlierTry(Frozen):
    """An earlier run of the same release in the same cell."""

    run_id: str
    verdict: Verdict


class BetweenStarts(Frozen):
    """How much one build differs in a metric, by approved `runs` of the cell, or of others of its recipe, GPU type and profile.

    It is from start to start within a run, from pair to pair of starts of two builds in turns, or from day to day between runs.
    Older plans also have what differs from repeat to repeat within a start, which is not used any more. `variance` is that of
    the means of starts or of runs, with so many degrees of `freedom`, and `noise` the part of it from within the starts. Both
    are in squared shares of the questions, or of squared logarithms of times and rates.
    """

    label: str
    of: Literal["start", "pair", "day", "repeat"] = "start"
    variance: NotNegative
    noise: NotNegative
    freedom: Positive
    runs: list[str]


class CellPlan(Frozen):
    """Everything that one qualification of one cell will do; written to the run's folder before anything starts.

    - `contract` is what of the API's contract is checked; None if the recipe asks for none of it.
    - `client` and `client_image` are those of the load client, if it does not run beside the server in the same engine.
    - `beside` is the baseline's server, if this machine can serve it too: then their loads are measured in turns.
    - With `warms_alike`, which all new plans with `beside` have, a load in turns counts only if both servers were warmed alike.
    - A run that `establishes` is made to be the baseline of later runs. It is held against the approved one before it, if there
      is one: its load only where `load_alone` does not say why not.
    - A run with `new_anchor` is made to be the anchor of later runs too, and held against no earlier run.
    - `named_anchor` is the run that the recipe names as the cell's anchor.
    - `server` and `load` have the result of `fit` only when it was found; the load then follows from `workload`.
    - `prompts` is the workload's file: of prompts, or a trace.
    - `undrafted` is the server without its speculative decoding, if the load has clients: at a rate, both would have the
      throughput of that rate. With `undrafted_in_turn` the machine has no room for both, and they are started in turn.
    - `starts` is how often the server is started at most, for the gates against the baseline.
    - `pulled_s` is how long the pull of the image took; None without a pull.
    - With `watched`, which all new plans have, a load counts only with the samples that were taken during it.
    - `code` is what of the plan runs code, in words: its options, its variables, the folders of its tasks.
    - `tries` are the earlier runs of this release in this cell that the store shows, the oldest first.
    - `between` is what the store shows of how much starts and days differ, by metric.
    - `unasked` is what the engine could not say when it was asked whether it accepts the server's plan.
    - `warnings` say what the model's own generation_config.json does to replies.
    """

    run_id: str
    cell: Cell
    fingerprint: Fingerprint
    server: ServerPlan
    smoke: Smoke
    smoke_golden: str | None
    contract: Contract | None = None
    accuracy: list[TaskPlan]
    likelihood: LikelihoodPlan | None = None
    load: Load
    prompts: Path | None = None
    sweep: Sweep | None = None
    soak: Soak | None = None
    fit: Fit | None = None
    workload: LoadSettings | None = None
    warm_starts: int = 0
    starts: Count = 1
    price_usd_gpu_hour: float | None = None
    undrafted: ServerPlan | None = None
    undrafted_in_turn: bool = False
    pulled_s: float | None = None
    watched: bool = False
    unasked: list[str] = []
    warnings: list[str] = []
    code: list[str] = []
    gates: list[Gate]
    waivers: list[Waiver] = []
    approval: Approval = Approval()
    baseline_variant: Name
    baseline: Baseline | None = None
    establishes: bool = False
    load_alone: str = ""
    new_anchor: bool = False
    named_anchor: str | None = None
    anchor: Anchor | None = None
    beside: ServerPlan | None = None
    warms_alike: bool = False
    tries: list[EarlierTry] = []
    between: list[BetweenStarts] = []
    client_image: EngineImage | None = None
    client: EngineIdentity | None = None

    @property
    def labels(self) -> dict[str, str]:
        """The labels of this cell's containers."""
        return {"run": self.run_id, "cell": self.cell.id}

    @property
    def client_version(self) -> str:
        """The version of `vllm bench serve` that measures the load."""
        return (self.client or self.cell.release.engine).version

    @property
    def baseline_cell(self) -> str:
        """The id of the cell whose run is the baseline."""
        return self.cell.model_copy(update={"variant": self.baseline_variant}).id

    @property
    def is_compared(self) -> bool:
        return self.baseline is not None or self.anchor is not None

    @property
    def compared_with(self) -> Baseline:
        """The baseline. Raises ValueError for a cell that has none."""
        if self.baseline is None:
            raise ValueError("the run has no baseline")
        return self.baseline

    @property
    def held_against(self) -> Anchor:
        """The anchor. Raises ValueError for a cell that has none."""
        if self.anchor is None:
            raise ValueError("the run has no anchor")
        return self.anchor

    @property
    def unpassed(self) -> int:
        """How often the release was judged and did not pass since it last passed. An invalid run decided nothing."""
        since = takewhile(lambda tried: tried.verdict != "pass", reversed(self.tries))
        return sum(tried.verdict != "invalid" for tried in since)

    @property
    def foreign_code(self) -> list[str]:
        """What of the plan runs code, in words, by its server and tasks as they stand here: `code` may leave something out."""
        tasks = [f"accuracy.{task.name}: {TASKS_CODE}" for task in self.accuracy if task.folder or task.settings.task_folder]
        own = [*code_of_server(self.server.arguments, self.server.environment), *tasks]
        return list(dict.fromkeys([*own, *self.code]))

    @property
    def over_starts(self) -> list[Gate]:
        """The gates against the baseline that further starts of the server can decide."""
        return [gate for gate in self.gates if gate.is_over_starts]

    @property
    def comparing(self) -> list[Gate]:
        """The gates against the baseline."""
        return [gate for gate in self.gates if gate.is_against_baseline]

    @property
    def scores_answers(self) -> bool:
        """Whether it scores texts. Only runs that are compared do, and those that are made to be a baseline."""
        return self.likelihood is not None and (self.baseline is not None or self.establishes)

    @property
    def is_speculative(self) -> bool:
        return self.server.engine_kind.speculative in self.server.arguments

    @property
    def judged(self) -> list[Gate]:
        """The gates that decide: all but those that have nothing to be held against."""
        return [gate for gate in self.gates if self._is_judged(gate)]

    def _is_judged(self, gate: Gate) -> bool:
        if gate.is_against_anchor:
            return self.anchor is not None
        if not (self.establishes and gate.is_against_baseline):
            return True
        if gate.against == "likelihood":
            # A run that becomes a baseline scores its own answers, which later runs score too.
            return False
        return self.baseline is not None and not (gate.against == "load" and self.load_alone)
