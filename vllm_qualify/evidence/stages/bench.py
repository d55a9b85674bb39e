"""What all stages that run `vllm bench serve` have in common."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES
from vllm_qualify.evidence.stages.stage import dumped, judging_inputs, order_s
from vllm_qualify.evidence.watched import WATCHED
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.workload import Load


def bench_tools(plan: CellPlan) -> dict[str, str]:
    engine = plan.client or plan.cell.release.engine
    return {"vllm bench serve": engine.version, "client": engine.launcher if engine.image is None else engine.image.reference}


@contextmanager
def meanwhile(plan: CellPlan, evidence: Path, folder: Path) -> Iterator[None]:
    """Copy what is watched during the block into the stage's folder, so that it can be judged without the server's files."""
    if not plan.watched:
        yield
        return
    watched = [evidence / "serve" / name for name in (SCRAPES, HOST_SAMPLES)]
    begins = [path.stat().st_size for path in watched]
    yield
    inside = folder / WATCHED
    inside.mkdir()
    for path, begin in zip(watched, begins, strict=True):
        (inside / path.name).write_bytes(_whole_lines(path.read_bytes()[begin:]))


def _whole_lines(text: bytes) -> bytes:
    """The text without a last line that is still being written."""
    return text[: text.rfind(b"\n") + 1]


def silent(_done: int, _total: int) -> None:
    """Report no progress of requests: the stage reports each run."""


def load_s(settings: Load, most_repeats: int) -> float:
    """The most that a load may take on one server, in s. It begins when no prompts are made any more, with the same limit."""
    return (1 + most_repeats) * order_s(settings.time_limit_s)


def load_inputs(plan: CellPlan) -> dict[str, Any]:
    return {"load": dumped(plan.load), "speculative": bool(plan.undrafted)}


def search_inputs(plan: CellPlan) -> list[Any]:
    """The inputs of the stages that run loads other than the profile's own."""
    planned = {"sweep": dumped(plan.sweep), "fit": dumped(plan.fit), "workload": dumped(plan.workload)}
    return [load_inputs(plan), planned, *judging_inputs(plan)]
