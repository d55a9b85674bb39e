"""The paths stage: the accuracy questions on each path that an answer can take through a busy server, after the loads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_qualify.errors import HostError
from vllm_qualify.evidence import passages
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words
from vllm_qualify.evidence.paths import measure, parse
from vllm_qualify.evidence.paths.constrained import FormAsking
from vllm_qualify.evidence.paths.details import PathsDetails, read_details
from vllm_qualify.evidence.paths.measure import Asker, How
from vllm_qualify.evidence.paths.replies import Content, make_prompts
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.stages.accuracy import ACCURACY, tasks_as_inputs
from vllm_qualify.evidence.stages.stage import Stage, inputs_of, settled
from vllm_qualify.evidence.stages.world import Commands, World
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import CONSTRAINED
from vllm_qualify.recipe.paths import can_sleep

NO_PATHS = "the profile has no paths"
HOW = "how.json"
# Says why paths that need not be proven were not taken.
NOT_TAKEN, MOST_LETTERS = "not-taken.txt", 600
MOST_AT_ONCE = 64


class PathsStage(Stage, name="paths", is_timed=False, counts="prompts"):
    """What a busy server answers: cached, beside others, after evictions and hang-ups, and where a reply must have a form."""

    def inputs(self, plan: CellPlan) -> Any:
        return [inputs_of(plan.paths), _requests_at_once(plan), plan.promised, tasks_as_inputs(plan)]

    def shareable(self, plan: CellPlan) -> Any:
        return plan.paths, _requests_at_once(plan), plan.promised, ACCURACY.shareable(plan)

    def measure(self, world: World, folder: Path) -> Commands:
        try:
            self._take_paths(world, folder)
        except HostError as error:
            # A server that has ended is a fault, whatever was asked for.
            world.served.server.check_alive()
            if settled(world.plan.paths, NO_PATHS).must_be_proven:
                raise
            (folder / NOT_TAKEN).write_text(f"{error}\n", encoding="utf-8")
        return []

    def _take_paths(self, world: World, folder: Path) -> None:
        plan, server = world.plan, world.served.server
        settings = settled(plan.paths, NO_PATHS)
        try:
            contents = passages.asked_prompts(plan, world.evidence, settings.num_prompts)
        except UNUSABLE as error:
            problem = f"the accuracy questions cannot be asked again: {in_words(error)}"
            raise HostError(problem, "see the files of the accuracy stage", measure.STAGE) from error
        has_forms = CONSTRAINED in settings.taken(plan.promised, sleeps=False)
        how = measure.decide_how(server, contents, settings, has_forms=has_forms)
        (folder / HOW).write_text(how.model_dump_json())
        measure.measure_paths(server, make_asker(plan, contents, how), _requests_at_once(plan), folder, world.tell)

    def parse(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        try:
            asker = _read_asker(plan, evidence)
        except UNUSABLE as error:
            asker = make_asker(plan, [], How(salt="unknown", questions_per_prompt=1, asking=FormAsking()))
            note = evidence / measure.STAGE / NOT_TAKEN
            if note.is_file():
                because = note.read_text(errors="replace")[:MOST_LETTERS].strip()
                return parse.refuse_all(asker, f"the paths were not taken: {because}", is_unproven=True)
            return parse.refuse_all(asker, f"it is not known what was asked: {in_words(error)}")
        return parse.parse_paths(
            evidence / measure.STAGE, asker, _requests_at_once(plan), plan.server.engine_kind, levels_for(plan)
        )


def read_paths(plan: CellPlan, evidence: Path) -> PathsDetails:
    """What people read of the paths. Raises one of UNUSABLE if it is not known what was asked."""
    return read_details(evidence / measure.STAGE, _read_asker(plan, evidence), _requests_at_once(plan), plan.server.engine_kind)


def _read_asker(plan: CellPlan, evidence: Path) -> Asker:
    """As the stage's files say: it may be of another run, and one that is measured again needs other salts."""
    contents = passages.asked_prompts(plan, evidence, settled(plan.paths, NO_PATHS).num_prompts)
    return make_asker(plan, contents, How.model_validate_json((evidence / measure.STAGE / HOW).read_bytes()))


def make_asker(plan: CellPlan, contents: Sequence[Content], how: How) -> Asker:
    prompts = make_prompts(contents, how.questions_per_prompt)
    settings, model = settled(plan.paths, NO_PATHS), plan.server.served_model_name
    is_invariant = plan.server.variables.get(measure.INVARIANT, "0") not in ("", "0")
    sleeps = can_sleep(plan.server.arguments, plan.server.environment)
    return Asker(settings, prompts, model, how.salt, plan.promised, how.asking, is_invariant, sleeps)


def _requests_at_once(plan: CellPlan) -> int:
    """As many as the settings say, or as the load has clients."""
    asked = plan.paths.num_concurrent if plan.paths else None
    return asked or min(plan.load.max_concurrency or MOST_AT_ONCE, MOST_AT_ONCE)


PATHS_STAGE = PathsStage()
