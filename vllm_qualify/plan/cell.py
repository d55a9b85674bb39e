"""A cell's plan: what is served, checked, measured and judged."""

from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.recipe.accuracy import Accuracy, Likelihood, Smoke
from vllm_qualify.recipe.code import TASKS_CODE, code_of_server, openings_of_server
from vllm_qualify.recipe.contract import Capability, Contract
from vllm_qualify.recipe.gates import Gate, Verdict, Waiver
from vllm_qualify.recipe.load import Load, LoadSettings
from vllm_qualify.recipe.metrics import PATH_METRICS
from vllm_qualify.recipe.paths import Paths
from vllm_qualify.recipe.recipe import Approval
from vllm_qualify.recipe.roles import EFFORT, FOUND, NOTE, PLACE, WORK, Settings
from vllm_qualify.recipe.sampling import Sampling
from vllm_qualify.recipe.searches import ProfileStages, Soak
from vllm_qualify.recipe.values import Count, Drawn, Frozen, Name, NotNegative, Positive


class Release(Frozen):
    """A model at a revision with an engine."""

    model: str
    revision: str
    """a hub commit, or the digest of a local folder's content"""
    files: dict[str, str] = {}
    """the SHA-256 of each file of a local folder; empty for a model of the hub, whose commit has them"""
    engine: EngineIdentity


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


class TaskPlan(Settings):
    """One lm-eval task of a cell: its settings, completed for the cell's server and this machine."""

    settings: Annotated[Accuracy, WORK]
    num_concurrent: Annotated[int, EFFORT]
    """requests under way at one time"""
    repetitions: Annotated[int, EFFORT] = 1
    """how often all questions are asked at most: above 1 only for sampled answers, or to compare with a baseline's"""
    sequential: Annotated[bool, EFFORT] = False
    """whether the task may end after any block of questions, but not before `least_repetitions`"""
    questions: Annotated[list[Path] | None, PLACE] = None
    """local files of questions, and of solved examples if there are any"""
    questions_digests: Annotated[list[str], WORK] = []
    """the digest of each of these files"""
    folder: Annotated[Path | None, PLACE] = None
    """the folder with lm-eval's YAML files of own tasks"""
    folder_digest: Annotated[str | None, WORK] = None
    """the digest of that folder's content"""
    recommended: Annotated[Sampling | None, WORK] = None
    """the numbers behind `sampling: model`"""
    order: Annotated[Drawn, FOUND] = ""
    """drawn for the run, when model and engine were known: the order of the questions, and the seeds of samples, follow it"""

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
    def asked_settings(self) -> Accuracy:
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


class LikelihoodPlan(Settings):
    """The texts whose likelihood is asked for."""

    settings: Annotated[Likelihood, WORK]
    texts: Annotated[Path | None, PLACE] = None
    """the file of texts, if there is one"""
    texts_sha256: Annotated[str | None, WORK] = None
    """the hash of the file's content"""

    def covers(self, baseline: "LikelihoodPlan") -> bool:
        """Whether all that a baseline scored is scored here: as many answers or more, and the same texts."""
        has_answers = baseline.settings.num_answers <= self.settings.num_answers
        return has_answers and baseline.texts_sha256 == self.texts_sha256


class Baseline(Frozen):
    """The run that a cell is compared with, and what must be the same for that."""

    run_id: str
    folder: Path | None = None
    """where the run is, if not in the store"""
    cell: Cell
    fingerprint: Fingerprint
    client_version: str
    accuracy: list[Accuracy]
    load: Load
    likelihood: LikelihoodPlan | None = None
    served_model_name: str = ""


class Anchor(Frozen):
    """The approved run that a cell is held against for good, and what must be the same for that."""

    run_id: str
    cell: Cell
    accuracy: list[Accuracy]
    chosen: Literal["the first approved", "made to be one", "named by the recipe", "named by the caller"]
    """why it is this run"""


class EarlierTry(Frozen):
    """An earlier run of the same release in the same cell."""

    run_id: str
    verdict: Verdict


class Between(Frozen):
    """How much means of one build differ, in squared shares of the questions, or squared logarithms of times and rates."""

    variance: NotNegative
    """of the means of starts, of pairs of starts or of runs"""
    noise: NotNegative
    """the part of the variance that the answers or the repeats within each start explain"""
    freedom: Positive
    """the degrees of freedom of the variance"""

    @property
    def part(self) -> float:
        """What starts add: the variance without noise (method of moments)."""
        return max(0.0, self.variance - self.noise)


class BetweenStarts(Between):
    """How much one build differs in a metric, by approved runs of the cell or of others of its recipe, GPU type and profile."""

    label: str
    """the metric, with its task and filter"""
    of: Literal["start", "pair", "day"] = "start"
    """from start to start within a run, from pair to pair of starts of two builds in turns, or from day to day between runs"""
    runs: list[str]


class CellPlan(Settings, ProfileStages):
    """Everything that one qualification of one cell will do; written to the run's folder before anything starts."""

    run_id: Annotated[str, NOTE]
    cell: Annotated[Cell, WORK]
    fingerprint: Annotated[Fingerprint, FOUND]
    """the machine"""
    server: Annotated[ServerPlan, WORK]
    """it has the result of `fit` once that was found"""
    smoke: Annotated[Smoke, WORK]
    smoke_golden: Annotated[str | None, WORK]
    """the exact reply to the smoke prompt, if the variant has one"""
    drawn: Annotated[Drawn, FOUND] = ""
    """drawn for the run, when model and engine were known: the second smoke prompt follows it"""
    contract: Annotated[Contract | None, WORK] = None
    """the checks of the API's contract; null if the recipe asks for none of them"""
    accuracy: Annotated[list[TaskPlan], WORK]
    likelihood: Annotated[LikelihoodPlan | None, WORK] = None
    load: Annotated[Load, WORK]
    """with `fit` it follows from `workload`, once the fit is found"""
    prompts: Annotated[Path | None, PLACE] = None
    """the load's file: of prompts, or a trace"""
    paths: Annotated[Paths | None, WORK] = None
    """the paths of answers through a busy server; null if none is taken"""
    soak: Annotated[Soak | None, WORK] = None
    workload: Annotated[LoadSettings | None, WORK] = None
    """the profile's load, from which the load after a fit is made; null without a fit"""
    warm_starts: Annotated[int, EFFORT] = 0
    """how often the server is started once more after the load"""
    starts: Annotated[Count, EFFORT] = 1
    """how often the server is started at most, for the gates against the baseline"""
    price_usd_gpu_hour: Annotated[float | None, FOUND] = None
    undrafted: Annotated[ServerPlan | None, WORK] = None
    """the server without its speculative decoding, if the load has clients: at a rate, both have that rate's throughput"""
    undrafted_in_turn: Annotated[bool, WORK] = False
    """whether the machine has no room for both, so that they are started in turn"""
    pulled_s: Annotated[float | None, FOUND] = None
    """how long the pull of the image took; null without a pull"""
    watched: Annotated[bool, EFFORT] = False
    """whether a load counts only with the samples that were taken during it"""
    unasked: Annotated[list[str], FOUND] = []
    """what lm-eval's files do not say of the tasks, and the engine of the server's plan, when they were asked before the run"""
    warnings: Annotated[list[str], NOTE] = []
    """what nobody asked for: what the model's own files do to replies, and forms whose backend nothing names"""
    code: Annotated[list[str], NOTE] = []
    """what of the plan runs code, in words: its options, its variables, the folders of its tasks"""
    gates: Annotated[list[Gate], EFFORT]
    waivers: Annotated[list[Waiver], EFFORT] = []
    approval: Annotated[Approval, EFFORT] = Approval()
    baseline_variant: Annotated[Name, WORK]
    """the variant of the baseline's cell"""
    baseline: Annotated[Baseline | None, FOUND] = None
    establishes: Annotated[bool, FOUND] = False
    """whether the run is made to be the baseline of later runs. It is held against the approved one before it, if any"""
    load_alone: Annotated[str, FOUND] = ""
    """why the load of a run that establishes is not held against the baseline before it; empty if it is"""
    new_anchor: Annotated[bool, FOUND] = False
    """whether the run is made to be the anchor of later runs too. It is held against no earlier run"""
    named_anchor: Annotated[str | None, WORK] = None
    """the run that the recipe names as the cell's anchor"""
    anchor: Annotated[Anchor | None, FOUND] = None
    beside: Annotated[ServerPlan | None, FOUND] = None
    """the baseline's server, if this machine can serve it too: then their loads are measured in turns"""
    warms_alike: Annotated[bool, EFFORT] = False
    """whether a load in turns counts only if both servers were warmed alike; true with `beside`"""
    tries: Annotated[list[EarlierTry], FOUND] = []
    """the earlier runs of this release in this cell that the store shows, the oldest first"""
    between: Annotated[list[BetweenStarts], FOUND] = []
    """what the store shows of how much starts and days differ, by metric"""
    client_image: Annotated[EngineImage | None, PLACE] = None
    """the load client's image, if the client does not run beside the server in the same engine"""
    client: Annotated[EngineIdentity | None, FOUND] = None
    """the engine in that image"""

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
        """How often the release was judged and did not pass since it last passed."""
        return len(self.unpassed_tries)

    @property
    def unpassed_tries(self) -> list[str]:
        """The runs in which the release was judged and did not pass since it last passed. An invalid run decided nothing."""
        since = takewhile(lambda tried: tried.verdict != "pass", reversed(self.tries))
        return [tried.run_id for tried in since if tried.verdict != "invalid"]

    @property
    def foreign_code(self) -> list[str]:
        """What of the plan runs code, in words, by its server and tasks as they stand here: `code` may leave something out."""
        tasks = [f"accuracy.{task.name}: {TASKS_CODE}" for task in self.accuracy if task.folder or task.settings.task_folder]
        own = [*code_of_server(self.server.arguments, self.server.environment), *tasks]
        return list(dict.fromkeys([*own, *self.code]))

    @property
    def openings(self) -> list[str]:
        """What of the server's settings opens it to requests that change it, in words."""
        return openings_of_server(self.server.arguments, self.server.environment)

    @property
    def promised(self) -> list[Capability]:
        """What the server offers beyond completions, as far as its contract is asked for."""
        return self.contract.capabilities if self.contract else []

    @property
    def gates_over_starts(self) -> list[Gate]:
        """The gates against the baseline that further starts of the server can decide."""
        return [gate for gate in self.gates if gate.is_over_starts]

    @property
    def gates_against_baseline(self) -> list[Gate]:
        return [gate for gate in self.gates if gate.is_against_baseline]

    @property
    def scores_answers(self) -> bool:
        """Whether it scores texts. Only runs that are compared do, and those that are made to be a baseline."""
        return self.likelihood is not None and (self.baseline is not None or self.establishes)

    @property
    def is_speculative(self) -> bool:
        return self.server.engine_kind.speculative in self.server.arguments

    def need_not_be_proven(self, gate: Gate) -> bool:
        """Whether the gate is not judged where its path cannot be proven to have been taken."""
        return self.paths is not None and not self.paths.must_be_proven and gate.metric in PATH_METRICS

    @property
    def judged_gates(self) -> list[Gate]:
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
