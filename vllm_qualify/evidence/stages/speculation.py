"""The speculation stage: it compares the server with the same server without speculative decoding."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_qualify.engine.bench import no_progress
from vllm_qualify.engine.process import Tell
from vllm_qualify.engine.server import Server, ServerPlan
from vllm_qualify.evidence.accuracy import lm_eval_process
from vllm_qualify.evidence.load import client, speculation
from vllm_qualify.evidence.load.client import Driven
from vllm_qualify.evidence.load.greedy import DRAFTED, Greedy
from vllm_qualify.evidence.measurement import Measurement, StageEvidence, invalid
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.serving import serving_other
from vllm_qualify.evidence.stages.stage import Stage, search_inputs
from vllm_qualify.evidence.stages.world import Commands, World
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.metrics import SAME_TEXT, SPEEDUP, SPEEDUP_BATCH1

# How many prompts both servers of a pair get besides the smoke prompt, and the most tokens of a reply.
GREEDY_PROMPTS, GREEDY_TOKENS = 8, 64


class SpeculationStage(Stage, name="speculation", is_timed=True, uses_bench=True):
    """The server beside the same one without speculative decoding, or in turn with it if the machine has no room for both."""

    def is_wanted(self, plan: CellPlan) -> bool:
        return plan.is_speculative

    def needs_server(self, plan: CellPlan) -> bool:
        return not plan.undrafted_in_turn

    def inputs(self, plan: CellPlan) -> Any:
        return [search_inputs(plan), *(["in turn"] if plan.undrafted_in_turn else [])]

    def measure(self, world: World, folder: Path) -> Commands:
        plan, commands = world.plan, Commands()
        if plan.undrafted is None:
            return commands
        inside = folder / "undrafted"
        inside.mkdir()
        with serving_other(plan.undrafted, plan, inside, world.tell_often, world.served) as other:
            sides = {each.server.url: each.driven(plan) for each in (world.served, other)}
            measure_once = _note_commands(sides, folder, world.tell_often, commands)
            drafted, prompts = world.served.server, _choose_prompts(plan, world.evidence)
            speculation.measure_speculation(drafted, other.server, prompts, plan.load, folder, measure_once)
        return commands

    def run_in_turn(self, plan: CellPlan, evidence: Path, tell: Tell) -> StageEvidence:
        """Start both servers in turn. Raises QualifyError."""

        def measure(folder: Path) -> Commands:
            commands, servers = Commands(), servers_in_turn(plan, evidence)
            for start, (inside, server) in zip(speculation.starts_in_turn(plan.load), servers, strict=True):
                inside.mkdir()
                tell(f"speculation: {inside.name.replace('-', ' ')}, {start.side}")
                with serving_other(server, plan, inside, tell) as served:
                    measure_once = _note_commands({served.server.url: served.driven(plan)}, folder, tell, commands)
                    prompts = _choose_prompts(plan, evidence)
                    speculation.measure_start(start, served.server, prompts, plan.load, folder, measure_once)
            return commands

        return self.record(plan, evidence, measure)

    def parse(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        if plan.undrafted is None:
            return [invalid(metric, why_not_compared(plan), "speculation") for metric in (SPEEDUP, SPEEDUP_BATCH1, SAME_TEXT)]
        return speculation.parse_speculation(evidence / "speculation", plan.load, levels_for(plan), plan.server)


def _note_commands(sides: Mapping[str, Driven], folder: Path, tell: Tell, commands: Commands) -> speculation.RunLoad:
    """Runs a repeat of a load on one of the servers, which are given by their addresses, and adds its command."""

    def measure_once(server: Server, settings: Load, into: Path, repeat: int) -> None:
        tell(f"speculation: {into.relative_to(folder)}, repeat {repeat}")
        commands.append(client.run_repeat(sides[server.url], settings, into, repeat, no_progress))

    return measure_once


def servers_in_turn(plan: CellPlan, evidence: Path) -> list[tuple[Path, ServerPlan]]:
    """The folder and the server of each start, where both servers are started in turn; none where they are not."""
    if not plan.undrafted_in_turn:
        return []
    drafted, undrafted = plan.server, plan.undrafted or plan.server
    return [
        (evidence / speculation.STAGE / f"start-{number}", drafted if start.side == DRAFTED else undrafted)
        for number, start in enumerate(speculation.starts_in_turn(plan.load), start=1)
    ]


def _choose_prompts(plan: CellPlan, evidence: Path) -> Greedy:
    """The smoke prompt, and the first prompts of those accuracy tasks that generate text."""
    asked = [plan.smoke.prompt]
    for task in plan.accuracy:
        asked += lm_eval_process.read_prompts(evidence / "accuracy" / task.name, GREEDY_PROMPTS)
    return Greedy(prompts=asked[: 1 + GREEDY_PROMPTS], max_tokens=GREEDY_TOKENS)


def why_not_compared(plan: CellPlan) -> str:
    """Why a plan has no server without speculative decoding to be compared with, and the remedy."""
    if plan.load.is_open or plan.load.turns > 1:
        return "requests come at a rate or in turns, which both servers would keep: use a load with clients alone"
    # Older versions measured both servers at once only.
    return "the machine had no room for the same server without speculative decoding beside it: qualify the cell again"


SPECULATION = SpeculationStage()
