"""The speculation stage: it compares the server with the same server without speculative decoding."""

from pathlib import Path

from vllm_qualify.engine.process import Tell
from vllm_qualify.engine.server import Server
from vllm_qualify.evidence import accuracy
from vllm_qualify.evidence.load import client, speculation
from vllm_qualify.evidence.measurement import Measurement, StageEvidence, invalid
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.serving import Served, another
from vllm_qualify.evidence.stages import bench
from vllm_qualify.evidence.stages.stage import Commands, StageKind, order_s, start_s
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import SAME_TEXT, SPEEDUP, SPEEDUP_BATCH1
from vllm_qualify.recipe.workload import Load

NO_ROOM = "no-room.txt"
# How many prompts both servers of a pair get besides the smoke prompt, and the most tokens of a reply.
GREEDY_PROMPTS, GREEDY_TOKENS = 8, 64


def speculation_stage(served: Served, plan: CellPlan, evidence: Path, tell: Tell) -> StageEvidence:
    """Measure the server beside the same server without speculative decoding, if the machine has room for both.

    Raises:
        QualifyError: the other server does not start, or as `client.run`.
    """

    def measure(folder: Path) -> Commands:
        if plan.undrafted is None:
            (folder / NO_ROOM).write_text("both servers need more GPUs than this machine has\n")
            return []
        commands: Commands = []
        inside = folder / "undrafted"
        inside.mkdir()
        with another(plan.undrafted, plan, inside, tell, served) as other:
            sides = {each.server.url: each.driven(plan) for each in (served, other)}

            def once(server: Server, settings: Load, into: Path, repeat: int) -> None:
                tell(f"speculation: {into.relative_to(folder)}, repeat {repeat}")
                commands.append(client.run_repeat(sides[server.url], settings, into, repeat, bench.silent))

            servers = speculation.Pair(served.server, other.server)
            speculation.measure_speculation(servers, _greedy(plan, evidence), plan.load, folder, once)
        return commands

    return SPECULATION.run(plan, evidence, measure, bench.bench_tools(plan))


def _greedy(plan: CellPlan, evidence: Path) -> speculation.Greedy:
    """The smoke prompt, and the first prompts of those accuracy tasks that generate text."""
    asked = [plan.smoke.prompt]
    for task in plan.accuracy:
        asked += accuracy.prompts(evidence / "accuracy" / task.name, GREEDY_PROMPTS)
    return speculation.Greedy(prompts=asked[: 1 + GREEDY_PROMPTS], max_tokens=GREEDY_TOKENS)


def _longest_s(plan: CellPlan) -> float:
    """Both servers are asked the greedy prompts, and run each repeat of both loads."""
    if plan.undrafted is None:
        return 0.0
    asked_s = (1 + GREEDY_PROMPTS) * speculation.ANSWER_LIMIT_S
    repeats = sum(load.repeats for load in speculation.draft_loads(plan.load).values())
    return start_s(plan.undrafted) + 2 * (asked_s + repeats * order_s(plan.load.time_limit_s))


def _parse(plan: CellPlan, evidence: Path) -> list[Measurement]:
    if plan.undrafted is None:
        because = "the machine has no room for the same server without speculative decoding beside it: use one with more GPUs"
        return [invalid(metric, because, f"speculation/{NO_ROOM}") for metric in (SPEEDUP, SPEEDUP_BATCH1, SAME_TEXT)]
    return speculation.parse_speculation(evidence / "speculation", plan.load, levels_for(plan), plan.server)


SPECULATION = StageKind(
    name="speculation",
    is_wanted=lambda plan: plan.is_speculative,
    needs_server=True,
    is_timed=True,
    uses_bench=True,
    grows=False,
    settings=lambda _: {},
    inputs=bench.search_inputs,
    longest_s=_longest_s,
    parse=_parse,
)
