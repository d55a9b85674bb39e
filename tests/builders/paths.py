"""The paths of answers through a server that is simulated, measured and parsed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.block_cache import MODEL, BlockCache, serving
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.process import RunningProcess
from vllm_qualify.engine.server import Client, Server
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.paths.measure import Asker, measure_paths
from vllm_qualify.evidence.paths.parse import parse_paths
from vllm_qualify.evidence.paths.replies import Prompt
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.recipe.contract import Capability
from vllm_qualify.recipe.paths import Paths
from vllm_qualify.recipe.serving import VLLM

AT_ONCE = 12
PROMPTS = [Prompt(number, f"Question {number}: " + f"how much is {number} times {number + 7}? " * 12) for number in range(48)]
SETTINGS = Paths(reply_tok=4, num_aborts=24, filler_tok=256)


def asker(settings: Paths = SETTINGS, promised: Sequence[Capability] = ()) -> Asker:
    return Asker(settings, PROMPTS, MODEL, "salt", promised, sleeps=True)


def measured(
    folder: Path, cache: BlockCache, settings: Paths = SETTINGS, promised: Sequence[Capability] = ()
) -> dict[str, Measurement]:
    """The measurements of a server with this cache, by their names; their files are in the folder."""
    return measured_of(folder, cache, asker(settings, promised), AT_ONCE)


def measured_of(folder: Path, cache: BlockCache, asker: Asker, at_once: int) -> dict[str, Measurement]:
    folder.mkdir(exist_ok=True)
    with running(cache, folder) as server:
        measure_paths(server, asker, at_once, folder, lambda _: None)
    return _by_name(parse_paths(folder, asker, at_once, KINDS[VLLM], Levels()))


@contextmanager
def running(cache: BlockCache, folder: Path) -> Iterator[Server]:
    process = RunningProcess(state_file=folder / "none", log=folder / "none.log", guard_pid=1)
    with serving(cache) as url:
        client = Client(program="", python="", url=url, model=MODEL)
        yield Server(url=url, served_model_name=MODEL, process=process, command=[], startup_s=1.0, client=client)


def parsed(folder: Path, settings: Paths = SETTINGS, promised: Sequence[Capability] = ()) -> dict[str, Measurement]:
    return _by_name(parse_paths(folder, asker(settings, promised), AT_ONCE, KINDS[VLLM], Levels()))


def _by_name(rows: Sequence[Measurement]) -> dict[str, Measurement]:
    return {row.metric: row for row in rows}
