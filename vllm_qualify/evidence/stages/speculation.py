"""The speculation stage: it compares the server with the same server without speculative decoding."""

from pathlib import Path

from vllm_qualify.engine.process import Tell
from vllm_qualify.engine.server import Server, ServerPlan
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

# How many prompts both servers of a pair get besides the smoke prompt, and the most tokens of a reply.
GREEDY_PROMPTS, GREEDY_TOKENS = 8, 64


def speculation_stage(served: Served, plan: CellPlan, evidence: Path, tell: Tell) -> StageEvidence:
    """Measure the server beside the same server without speculative decoding, if the plan has one.

    Raises:
        QualifyError: the other server does not start, or as `client.run`.
    """

    def measure(folder: Path) -> Commands:
        if plan.undrafted is None:
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


def speculation_in_turn(plan: CellPlan, evidence: Path, tell: Tell) -> StageEvidence:
    """Start the server and the same server without speculative decoding in turn: the machine has no room for both.

    Raises:
        QualifyError: a server does not start, or as `client.run`.
    """

    def measure(folder: Path) -> Commands:
        commands: Commands = []
        for number, start in enumerate(speculation.starts_in_turn(plan.load), start=1):
            commands += _one_start(number, start, plan, evidence, folder, tell)
        return commands

    return SPECULATION.run(plan, evidence, measure, bench.bench_tools(plan))


def _one_start(number: int, start: speculation.Start, plan: CellPlan, evidence: Path, folder: Path, tell: Tell) -> Commands:
    commands: Commands = []
    inside = folder / _folder(number)
    inside.mkdir()
    tell(f"speculation: start {number}, {start.side}")
    with another(_server(plan, start.side), plan, inside, tell) as served:
        driven = served.driven(plan)

        def once(_: Server, settings: Load, into: Path, repeat: int) -> None:
            tell(f"speculation: {into.relative_to(folder)}, repeat {repeat}")
            commands.append(client.run_repeat(driven, settings, into, repeat, bench.silent))

        speculation.measure_start(start, served.server, _greedy(plan, evidence), plan.load, folder, once)
    return commands


def servers_in_turn(plan: CellPlan, evidence: Path) -> list[tuple[Path, ServerPlan]]:
    """The folder and the server of each start, where both servers are started in turn; none where they are not."""
    if not plan.undrafted_in_turn:
        return []
    return [
        (evidence / speculation.STAGE / _folder(number), _server(plan, start.side))
        for number, start in enumerate(speculation.starts_in_turn(plan.load), start=1)
    ]


def _folder(start: int) -> str:
    return f"start-{start}"


def _server(plan: CellPlan, side: str) -> ServerPlan:
    return plan.server if side == speculation.DRAFTED or plan.undrafted is None else plan.undrafted


def _greedy(plan: CellPlan, evidence: Path) -> speculation.Greedy:
    """The smoke prompt, and the first prompts of those accuracy tasks that generate text."""
    asked = [plan.smoke.prompt]
    for task in plan.accuracy:
        asked += accuracy.prompts(evidence / "accuracy" / task.name, GREEDY_PROMPTS)
    return speculation.Greedy(prompts=asked[: 1 + GREEDY_PROMPTS], max_tokens=GREEDY_TOKENS)


def _started(plan: CellPlan) -> list[str]:
    """The servers that the stage starts, one for each start."""
    in_turn = [start.side for start in speculation.starts_in_turn(plan.load)]
    return in_turn if plan.undrafted_in_turn else [speculation.UNDRAFTED]


def _longest_s(plan: CellPlan) -> float:
    """Both servers are asked the greedy prompts, and run each repeat of both loads."""
    if plan.undrafted is None:
        return 0.0
    asked_s = (1 + GREEDY_PROMPTS) * speculation.ANSWER_LIMIT_S
    repeats = sum(load.repeats for load in speculation.draft_loads(plan.load).values())
    starts_s = sum(start_s(_server(plan, side)) for side in _started(plan))
    return starts_s + 2 * (asked_s + repeats * order_s(plan.load.time_limit_s))


def why_not_compared(plan: CellPlan) -> str:
    """Why a plan has no server without speculative decoding to be compared with, and the remedy."""
    if plan.load.is_open or plan.load.turns > 1:
        return "requests come at a rate or in turns, which both servers would keep: use a load with clients alone"
    # Older versions measured both servers at once only.
    return "the machine had no room for the same server without speculative decoding beside it: qualify the cell again"


def _parse(plan: CellPlan, evidence: Path) -> list[Measurement]:
    if plan.undrafted is None:
        return [invalid(metric, why_not_compared(plan), "speculation") for metric in (SPEEDUP, SPEEDUP_BATCH1, SAME_TEXT)]
    return speculation.parse_speculation(evidence / "speculation", plan.load, levels_for(plan), plan.server)


SPECULATION = StageKind(
    name="speculation",
    is_wanted=lambda plan: plan.is_speculative,
    needs_server=lambda plan: not plan.undrafted_in_turn,
    is_timed=True,
    uses_bench=True,
    grows=False,
    settings=lambda _: {},
    inputs=lambda plan: [bench.search_inputs(plan), *(["in turn"] if plan.undrafted_in_turn else [])],
    longest_s=_longest_s,
    parse=_parse,
)
