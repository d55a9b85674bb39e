"""The paths stage: the accuracy questions on each path that an answer can take through a busy server, after the loads."""

import uuid
from pathlib import Path
from typing import Any

from vllm_qualify.errors import HostError
from vllm_qualify.evidence import passages
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words, invalid
from vllm_qualify.evidence.paths import measure, parse
from vllm_qualify.evidence.paths.measure import Asker
from vllm_qualify.evidence.paths.replies import Prompt
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.stages.accuracy import ACCURACY, tasks_as_inputs
from vllm_qualify.evidence.stages.stage import Stage, inputs_of, settled
from vllm_qualify.evidence.stages.world import Commands, World
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import METRICS

NO_PATHS = "the profile has no paths"
SALT = "salt.txt"
MOST_AT_ONCE = 64


class PathsStage(Stage, name="paths", is_timed=False, counts="prompts"):
    """What a busy server answers: from its cache, beside other requests, after evictions and after clients hung up."""

    def inputs(self, plan: CellPlan) -> Any:
        return [inputs_of(plan.paths), _requests_at_once(plan), tasks_as_inputs(plan)]

    def shared(self, plan: CellPlan) -> Any:
        return plan.paths, _requests_at_once(plan), ACCURACY.shared(plan)

    def measure(self, world: World, folder: Path) -> Commands:
        plan = world.plan
        try:
            (folder / SALT).write_text(uuid.uuid4().hex)
            asker = _make_asker(plan, world.evidence)
        except UNUSABLE as error:
            problem = f"the accuracy questions cannot be asked again: {in_words(error)}"
            raise HostError(problem, "see the files of the accuracy stage", measure.STAGE) from error
        measure.measure_paths(world.served.server, asker, _requests_at_once(plan), folder, world.tell)
        return []

    def parse(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        folder = evidence / measure.STAGE
        try:
            asker = _make_asker(plan, evidence)
        except UNUSABLE as error:
            names = [name for name, metric in METRICS.items() if metric.stage == measure.STAGE]
            return [invalid(name, f"it is not known what was asked: {in_words(error)}", measure.STAGE) for name in names]
        return parse.parse_paths(folder, asker, _requests_at_once(plan), plan.server.engine_kind, levels_for(plan))


def _make_asker(plan: CellPlan, evidence: Path) -> Asker:
    """Raises one of UNUSABLE if the accuracy stage left no prompts, or nothing was asked yet."""
    settings = settled(plan.paths, NO_PATHS)
    contents = passages.asked_prompts(plan, evidence, settings.num_prompts)
    prompts = [Prompt(number, content) for number, content in enumerate(contents)]
    # Not of the plan: a stage may be of another run, and one that is measured again needs other salts.
    salt = (evidence / measure.STAGE / SALT).read_text()
    return Asker(settings, prompts, plan.server.served_model_name, salt)


def _requests_at_once(plan: CellPlan) -> int:
    """As many as the settings say, or as the load has clients."""
    asked = settled(plan.paths, NO_PATHS).num_concurrent
    return asked or min(plan.load.max_concurrency or MOST_AT_ONCE, MOST_AT_ONCE)


PATHS_STAGE = PathsStage()
